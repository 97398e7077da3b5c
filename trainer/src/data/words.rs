//! The ids of words, remembered: most of a text is words that were seen before.
//!
//! Byte-level tokenizers cut text into words before anything else, and never join what such a cut has parted. So a
//! text may be cut at those places beforehand and each piece looked up; only new pieces are encoded, those of
//! ASCII here ([`Cuts`], [`Bpe`]) and the rest by the tokenizer. The ids are those of the whole text. It holds for the ways of cutting that
//! are known here and for no others ([`Words::of`]).
//!
//! A thread that encodes has a small memory of its own, which fits its core's cache; what is rare and costs much is in one
//! that all share.

use super::bpe::{Bpe, WORD_BYTES_MAX, is_plain};
use super::cuts::Cuts;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::HashMap;
use xxhash_rust::xxh3::{Xxh3DefaultBuilder, xxh3_64};

/// Parts that are locked alone.
const SHARDS: usize = 64;
/// Pieces that a shard remembers; then it begins anew.
const SHARD_PIECES_MAX: usize = 1 << 12;
/// Longer pieces seldom come again.
const PIECE_BYTES_MAX: usize = 48;
/// Expressions that cut before a blank and a word, as GPT-2's does, found in files of Llama 3 and its like.
pub(super) const KNOWN: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
];

type Shard = HashMap<Box<str>, Box<[u32]>, Xxh3DefaultBuilder>;

/// Pieces of text and their ids.
pub(super) struct Words {
    /// Memories that no thread is using.
    recent: Mutex<Vec<Recent>>,
    shards: Vec<Mutex<Shard>>,
    bpe: Option<Bpe>,
    cuts: Cuts,
    /// Whether digits are cut off first: a blank before one is then no word's.
    digits: bool,
    /// Added tokens, by their first byte.
    added: HashMap<u8, Vec<String>>,
}

impl Words {
    /// For the tokenizer that is written as `file`; `None` if its words cannot be known beforehand.
    pub fn of(file: &Value) -> Option<Words> {
        let plain = |token: &Value| {
            let whole = token["content"].as_str().is_some_and(|text| !text.contains(char::is_whitespace));
            whole && ["lstrip", "rstrip", "single_word"].iter().all(|key| token[*key] == false)
        };
        let known_model = file["model"]["type"] == "BPE" && file["model"]["dropout"].is_null();
        if !known_model || !file["normalizer"].is_null() || !file["added_tokens"].as_array()?.iter().all(plain) {
            return None;
        }
        let byte_level = |cut: &Value| cut["type"] == "ByteLevel" && cut["add_prefix_space"] == false;
        let by_words = |cut: &Value| byte_level(cut) && cut["use_regex"] != false;
        let split = |cut: &Value| {
            let expression = cut["pattern"]["Regex"].as_str();
            cut["type"] == "Split"
                && cut["behavior"] == "Isolated"
                && cut["invert"] != true
                && expression.is_some_and(|expression| KNOWN.contains(&expression))
        };
        let cuts = &file["pre_tokenizer"];
        let mut words = Cuts::Gpt2;
        let digits = match cuts["pretokenizers"].as_array().map(Vec::as_slice) {
            None if by_words(cuts) => false,
            Some([one]) if by_words(one) => false,
            Some([first, second]) if split(first) && byte_level(second) => {
                words = if first["pattern"]["Regex"] == KNOWN[0] { Cuts::Llama3 } else { Cuts::Gpt2 };
                false
            }
            Some([first, second]) if first["type"] == "Digits" && by_words(second) => true,
            _ => return None,
        };
        let mut added: HashMap<u8, Vec<String>> = HashMap::new();
        for token in file["added_tokens"].as_array()?.iter().filter_map(|token| token["content"].as_str()) {
            added.entry(*token.as_bytes().first()?).or_default().push(token.into());
        }
        Some(Words {
            recent: Mutex::default(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            bpe: Bpe::of(&file["model"]),
            cuts: words,
            digits,
            added,
        })
    }

    fn holds_added(&self, text: &str) -> bool {
        let mut begins = [false; 256];
        self.added.keys().for_each(|first| begins[usize::from(*first)] = true);
        let found = |at: usize, first: u8| {
            let tokens = self.added.get(&first).map(Vec::as_slice).unwrap_or_default();
            tokens.iter().any(|token| text.as_bytes()[at..].starts_with(token.as_bytes()))
        };
        text.bytes().enumerate().any(|(at, byte)| begins[usize::from(byte)] && found(at, byte))
    }

    /// Appends the ids of `text` to `ids`; `encode` gives those of a new piece.
    ///
    /// # Errors
    /// What `encode` returns.
    pub fn encode<E>(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        encode: impl Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        // Added tokens are found before words are: a text with one is cut otherwise.
        if self.holds_added(text) {
            ids.extend(encode(text)?);
            return Ok(());
        }
        let mut recent = self.recent.lock().pop().unwrap_or_default();
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.end(rest));
            let key = Recent::key(rest, piece.len());
            rest = after;
            if key.is_some_and(|key| recent.get(key, ids)) {
                continue;
            }
            let before = ids.len();
            if !self.encode_plain(piece, ids) {
                self.encode_other(piece, ids, &encode)?;
            }
            if let Some(key) = key {
                recent.put(key, &ids[before..]);
            }
        }
        self.recent.lock().push(recent);
        Ok(())
    }

    /// Appends the ids of a piece of plain bytes whose words are not too long. False if it is anything else.
    fn encode_plain(&self, piece: &str, ids: &mut Vec<u32>) -> bool {
        let (mut rest, before) = (piece.as_bytes(), ids.len());
        let Some(bpe) = self.bpe.as_ref().filter(|_| rest.iter().all(|byte| is_plain(*byte))) else { return false };
        while !rest.is_empty() {
            // Digits that are cut off first leave texts of their own between them.
            let alone = |byte: &u8| self.digits && byte.is_ascii_digit();
            let text = match rest.iter().position(alone) {
                Some(0) => &rest[..1],
                Some(at) => &rest[..at],
                None => rest,
            };
            rest = &rest[text.len()..];
            let mut text = text;
            while !text.is_empty() {
                let (word, after) = text.split_at(self.cuts.end(text));
                text = after;
                if word.len() > WORD_BYTES_MAX {
                    ids.truncate(before);
                    return false;
                }
                bpe.encode(word, ids);
            }
        }
        true
    }

    /// Appends the ids of any piece, remembered or new.
    fn encode_other<E>(
        &self,
        piece: &str,
        ids: &mut Vec<u32>,
        encode: impl Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        if piece.len() > PIECE_BYTES_MAX {
            ids.extend(encode(piece)?);
            return Ok(());
        }
        let shard = &self.shards[xxh3_64(piece.as_bytes()) as usize % SHARDS];
        if let Some(known) = shard.lock().get(piece) {
            ids.extend_from_slice(known);
            return Ok(());
        }
        let new = encode(piece)?;
        ids.extend_from_slice(&new);
        let mut shard = shard.lock();
        if shard.len() >= SHARD_PIECES_MAX {
            shard.clear();
        }
        shard.insert(piece.into(), new.into());
        Ok(())
    }

    /// Where the first piece of `text` ends.
    fn end(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        for at in 1..bytes.len() {
            let (before, here) = (Class::of(bytes[at - 1]), Class::of(bytes[at]));
            if cuts(before, here, bytes[at]) {
                return at;
            }
            // Blanks before the word's own, and line ends, stay with the piece before: they are cut in the same way
            // whether a word follows or the text ends.
            if bytes[at] != b' ' {
                continue;
            }
            let word = match bytes.get(at + 1).map(|next| Class::of(*next)) {
                Some(Class::Letter | Class::Mark) => true,
                Some(Class::Digit) => !self.digits,
                Some(Class::Other) => {
                    let next = text[at + 1..].chars().next();
                    next.is_some_and(|c| !(c.is_ascii() || c.is_whitespace() || self.digits && c.is_numeric()))
                }
                Some(Class::Blank) | None => false,
            };
            if word {
                return at;
            }
        }
        text.len()
    }
}

/// Short pieces that one thread met lately: each has one place, and whoever comes next takes it.
struct Recent {
    places: Vec<Place>,
}

#[derive(Clone, Copy, Default)]
struct Place {
    /// See [`Recent::key`]; no piece has 0.
    key: u128,
    ids: [u32; Recent::IDS],
    count: u32,
}

impl Recent {
    /// Places; all of them take a megabyte.
    const PLACES: usize = 1 << 15;
    /// Ids of a piece, at most.
    const IDS: usize = 3;

    /// The bytes of the piece with which `text` begins and their number; `None` if there are too many.
    fn key(text: &str, length: usize) -> Option<u128> {
        if length > 15 {
            return None;
        }
        let bytes = match text.as_bytes().first_chunk::<16>() {
            Some(bytes) => *bytes,
            None => {
                let mut bytes = [0; 16];
                bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
                bytes
            }
        };
        let kept = u128::from_le_bytes(bytes) & ((1 << (8 * length)) - 1);
        Some(kept | (length as u128) << 120)
    }

    const fn place(key: u128) -> usize {
        let mixed = ((key as u64) ^ ((key >> 64) as u64).rotate_left(29)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 49) as usize
    }

    /// Appends the ids of a piece that is remembered.
    fn get(&self, key: u128, ids: &mut Vec<u32>) -> bool {
        let place = &self.places[Recent::place(key)];
        if place.key != key {
            return false;
        }
        // All of them at once is quicker than a number that is not known beforehand.
        ids.extend_from_slice(&place.ids);
        ids.truncate(ids.len() - Recent::IDS + place.count as usize);
        true
    }

    fn put(&mut self, key: u128, ids: &[u32]) {
        if ids.len() <= Recent::IDS {
            let place = &mut self.places[Recent::place(key)];
            *place = Place { key, count: ids.len() as u32, ..Place::default() };
            place.ids[..ids.len()].copy_from_slice(ids);
        }
    }
}

impl Default for Recent {
    fn default() -> Recent {
        Recent { places: vec![Place::default(); Recent::PLACES] }
    }
}

/// Bytes as the expressions tell them apart.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    /// ASCII that is seen and neither letter nor digit.
    Mark,
    Blank,
    /// Controls, and parts of characters beyond ASCII.
    Other,
}

impl Class {
    const fn of(byte: u8) -> Class {
        CLASSES[byte as usize]
    }

    const fn find(byte: u8) -> Class {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
            b'0'..=b'9' => Class::Digit,
            b' ' | b'\t' | b'\n' | b'\r' => Class::Blank,
            0x21..0x7f => Class::Mark,
            _ => Class::Other,
        }
    }
}

/// [`Class::find`] of every byte.
static CLASSES: [Class; 256] = {
    let mut classes = [Class::Other; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = Class::find(byte as u8);
        byte += 1;
    }
    classes
};

/// Whether every known expression cuts between two neighbours: none goes from a letter, a digit or a mark to what is
/// listed here.
const fn cuts(before: Class, here: Class, byte: u8) -> bool {
    match (before, here) {
        (Class::Letter, Class::Digit | Class::Mark | Class::Blank) => true,
        (Class::Digit, Class::Letter | Class::Mark | Class::Blank) => true,
        (Class::Mark, Class::Digit) => true,
        // Line ends belong to the marks before them.
        (Class::Mark, Class::Blank) => byte == b' ',
        _ => false,
    }
}
