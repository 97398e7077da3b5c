//! Checksums of written spans, in a table of fixed capacity sorted by offset.
//!
//! Writing the same spans again, as every step does, changes entries in place.

/// Checksum of `bytes`.
pub(super) fn of(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

#[derive(Clone, Copy)]
struct Entry {
    offset: u64,
    bytes: u64,
    sum: u64,
}

/// What is known of the file's contents. Entries do not overlap.
pub(super) struct Checksums {
    entries: Vec<Entry>,
}

impl Checksums {
    /// Room for `count` spans, taken now.
    pub(super) fn new(count: usize) -> Checksums {
        Checksums { entries: Vec::with_capacity(count) }
    }

    /// The checksum of exactly this span.
    pub(super) fn get(&self, offset: u64, bytes: u64) -> Option<u64> {
        let index = self.entries.binary_search_by_key(&offset, |entry| entry.offset).ok()?;
        let entry = self.entries[index];
        (entry.bytes == bytes).then_some(entry.sum)
    }

    /// The span is about to be written: what overlaps it is known no more. The entry of the very span stays
    /// in place, its checksum to be replaced by [`Checksums::keep`].
    pub(super) fn forget(&mut self, offset: u64, bytes: u64) {
        let first = self.entries.partition_point(|entry| entry.offset + entry.bytes <= offset);
        let behind = self.entries.partition_point(|entry| entry.offset < offset + bytes);
        let same = behind == first + 1 && self.entries[first].offset == offset && self.entries[first].bytes == bytes;
        if first < behind && !same {
            self.entries.drain(first..behind);
        }
    }

    /// The span was written after [`Checksums::forget`]. Does nothing if the table is full.
    pub(super) fn keep(&mut self, offset: u64, bytes: u64, sum: u64) {
        match self.entries.binary_search_by_key(&offset, |entry| entry.offset) {
            Ok(index) => self.entries[index] = Entry { offset, bytes, sum },
            Err(index) if bytes > 0 && self.entries.len() < self.entries.capacity() => {
                self.entries.insert(index, Entry { offset, bytes, sum });
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_untouched_spans_are_known() {
        let mut sums = Checksums::new(8);
        let write = |sums: &mut Checksums, offset, bytes, sum| {
            sums.forget(offset, bytes);
            sums.keep(offset, bytes, sum);
        };
        write(&mut sums, 0, 10, 1);
        write(&mut sums, 20, 10, 2);
        write(&mut sums, 10, 10, 3);
        assert_eq!([sums.get(0, 10), sums.get(10, 10), sums.get(20, 10)], [Some(1), Some(3), Some(2)]);
        assert_eq!([sums.get(0, 9), sums.get(1, 9)], [None, None]);
        write(&mut sums, 5, 10, 4);
        assert_eq!(
            [sums.get(0, 10), sums.get(10, 10), sums.get(5, 10), sums.get(20, 10)],
            [None, None, Some(4), Some(2)]
        );
        write(&mut sums, 5, 10, 5);
        assert_eq!(sums.get(5, 10), Some(5));
        write(&mut sums, 5, 4, 6);
        assert_eq!([sums.get(5, 10), sums.get(5, 4)], [None, Some(6)]);
    }

    #[test]
    fn a_full_table_forgets_rather_than_grows() {
        let mut sums = Checksums::new(2);
        let room = sums.entries.capacity() as u64;
        for index in 0..room + 3 {
            sums.forget(index, 1);
            sums.keep(index, 1, index);
        }
        assert_eq!(sums.entries.capacity() as u64, room);
        assert_eq!([sums.get(0, 1), sums.get(room, 1)], [Some(0), None]);
    }
}
