//! Byte-pair encoding of one word of ASCII.
//!
//! The same merges in the same order as the tokenizer's library makes them, without its way there: it is what a text's
//! new words cost. Owns the table of merges.

use serde_json::Value;
use std::collections::HashMap;
use xxhash_rust::xxh3::Xxh3DefaultBuilder;

/// Bytes of a word, at most: longer ones take the library's way, which does not slow down with their length.
pub(super) const WORD_BYTES_MAX: usize = 48;

/// Whether a byte is plain text: ASCII that is seen, a blank, a tab or a line end.
pub(super) const fn is_plain(byte: u8) -> bool {
    matches!(byte, b'\t' | b'\n' | b'\r' | 0x20..0x7f)
}

/// How byte-level vocabularies write a plain byte.
fn written(byte: u8) -> char {
    match byte {
        0x21..0x7f => char::from(byte),
        unseen => char::from_u32(0x100 + u32::from(unseen)).unwrap_or_default(),
    }
}

/// Merges of a vocabulary.
pub(super) struct Bpe {
    /// Ids of the plain bytes.
    symbols: [u32; 128],
    /// Of two ids that follow each other: their rank, lowest first, and what they become.
    merges: HashMap<(u32, u32), (u32, u32), Mix>,
    /// Words that are taken as they stand, where the tokenizer asks for that.
    whole: Option<HashMap<Box<[u8]>, u32, Xxh3DefaultBuilder>>,
}

impl Bpe {
    /// For the model that is written as `model`; `None` if it does anything beside merging, or lacks a character.
    pub fn of(model: &Value) -> Option<Bpe> {
        let none = |key: &str| model[key].is_null() || model[key] == "" || model[key] == false;
        let plain =
            ["dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"].into_iter().all(none);
        let vocabulary = model["vocab"].as_object().filter(|_| plain)?;
        let id = |token: &str| vocabulary.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut symbols = [0; 128];
        for byte in (0..128).filter(|byte| is_plain(*byte)) {
            symbols[usize::from(byte)] = id(written(byte).encode_utf8(&mut [0; 4]))?;
        }
        let mut merges = HashMap::default();
        for (rank, merge) in (0..).zip(model["merges"].as_array()?) {
            let (left, right) = match merge {
                Value::String(both) => both.split_once(' ')?,
                both => (both[0].as_str()?, both[1].as_str()?),
            };
            merges.insert((id(left)?, id(right)?), (rank, id(&format!("{left}{right}"))?));
        }
        let whole = (model["ignore_merges"] == true).then(|| {
            let plain: HashMap<char, u8> =
                (0..128).filter(|byte| is_plain(*byte)).map(|byte| (written(byte), byte)).collect();
            let words = vocabulary.keys().filter_map(|token| {
                let word: Option<Vec<u8>> = token.chars().map(|c| plain.get(&c).copied()).collect();
                Some((word?.into(), id(token)?))
            });
            words.collect()
        });
        Some(Bpe { symbols, merges, whole })
    }

    /// Appends the ids of what the tokenizer takes for one word: at most [`WORD_BYTES_MAX`] plain bytes.
    pub fn encode(&self, word: &[u8], ids: &mut Vec<u32>) {
        if let Some(id) = self.whole.as_ref().and_then(|whole| whole.get(word)) {
            ids.push(*id);
            return;
        }
        const NONE: (u32, u32) = (u32::MAX, 0);
        let (mut held, mut merges) = ([0; WORD_BYTES_MAX], [NONE; WORD_BYTES_MAX]);
        let mut count = word.len();
        for (id, byte) in held.iter_mut().zip(word) {
            *id = self.symbols[usize::from(*byte)];
        }
        let merge = |left: u32, right: u32| self.merges.get(&(left, right)).copied().unwrap_or(NONE);
        for at in 1..count {
            merges[at - 1] = merge(held[at - 1], held[at]);
        }
        while count > 1 {
            // The lowest rank, and of equal ones the leftmost.
            let found = merges[..count - 1].iter().enumerate().min_by_key(|(_, (rank, _))| *rank);
            let Some((at, &(rank, id))) = found.filter(|(_, merge)| **merge != NONE) else { break };
            debug_assert_ne!(rank, NONE.0);
            held[at] = id;
            held.copy_within(at + 2..count, at + 1);
            merges.copy_within(at + 1..count - 1, at);
            count -= 1;
            if at > 0 {
                merges[at - 1] = merge(held[at - 1], id);
            }
            if at + 1 < count {
                merges[at] = merge(id, held[at + 1]);
            }
        }
        ids.extend_from_slice(&held[..count]);
    }
}

/// Hashes two ids: they are small numbers, and nobody chooses them to collide.
#[derive(Clone, Default)]
struct Mix;

/// See [`Mix`].
struct MixHasher(u64);

impl std::hash::BuildHasher for Mix {
    type Hasher = MixHasher;

    fn build_hasher(&self) -> MixHasher {
        MixHasher(0)
    }
}

impl std::hash::Hasher for MixHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, id: u32) {
        self.0 = (self.0.rotate_left(32) ^ u64::from(id)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }
}
