//! The ids of words, remembered: most of a text is words that were seen before.
//!
//! Byte-level tokenizers cut text into words before anything else, and never join what such a cut has parted. So a
//! text may be cut at those places beforehand and each piece looked up; only new pieces go through the tokenizer. The
//! ids are those of the whole text. It holds for the ways of cutting that are known here and for no others
//! ([`Words::of`]).

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
    shards: Vec<Mutex<Shard>>,
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
        let digits = match cuts["pretokenizers"].as_array().map(Vec::as_slice) {
            None if by_words(cuts) => false,
            Some([one]) if by_words(one) => false,
            Some([first, second]) if split(first) && byte_level(second) => false,
            Some([first, second]) if first["type"] == "Digits" && by_words(second) => true,
            _ => return None,
        };
        let mut added: HashMap<u8, Vec<String>> = HashMap::new();
        for token in file["added_tokens"].as_array()?.iter().filter_map(|token| token["content"].as_str()) {
            added.entry(*token.as_bytes().first()?).or_default().push(token.into());
        }
        Some(Words { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), digits, added })
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
        let mut rest = text;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(self.end(rest));
            rest = after;
            if piece.len() > PIECE_BYTES_MAX {
                ids.extend(encode(piece)?);
                continue;
            }
            let shard = &self.shards[xxh3_64(piece.as_bytes()) as usize % SHARDS];
            if let Some(known) = shard.lock().get(piece) {
                ids.extend_from_slice(known);
                continue;
            }
            let new = encode(piece)?;
            ids.extend_from_slice(&new);
            let mut shard = shard.lock();
            if shard.len() >= SHARD_PIECES_MAX {
                shard.clear();
            }
            shard.insert(piece.into(), new.into());
        }
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
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
            b'0'..=b'9' => Class::Digit,
            b' ' | b'\t' | b'\n' | b'\r' => Class::Blank,
            0x21..0x7f => Class::Mark,
            _ => Class::Other,
        }
    }
}

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
