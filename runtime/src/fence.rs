//! Fences: what must be done before bytes may be touched again.

use castor_kernels::{Mark, Stream};

/// For each stream, the last mark that must be reached. Joining fences takes the later of each.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Fence {
    numbers: [u64; Stream::ALL.len()],
}

impl Fence {
    /// Nothing to wait for.
    pub const OPEN: Fence = Fence { numbers: [0; Stream::ALL.len()] };

    /// Everything up to `mark`.
    pub const fn at(mark: Mark) -> Fence {
        let mut fence = Fence::OPEN;
        fence.numbers[mark.stream.index()] = mark.number;
        fence
    }

    /// Both.
    #[must_use]
    pub fn and(mut self, other: Fence) -> Fence {
        for (own, other) in self.numbers.iter_mut().zip(other.numbers) {
            *own = (*own).max(other);
        }
        self
    }

    /// Number of the mark of `stream` to wait for; 0: none.
    pub const fn number(self, stream: Stream) -> u64 {
        self.numbers[stream.index()]
    }

    /// The marks to wait for.
    pub fn marks(self) -> impl Iterator<Item = Mark> {
        Stream::ALL
            .into_iter()
            .map(move |stream| Mark { stream, number: self.numbers[stream.index()] })
            .filter(|mark| mark.number > 0)
    }
}
