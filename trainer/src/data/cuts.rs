//! The regular expressions by which byte-level tokenizers cut text into words, for plain text: each of their alternatives
//! in turn, over bytes ([`super::words::KNOWN`]).

use super::bpe::is_plain;

/// Which expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cuts {
    /// GPT-2's.
    Gpt2,
    /// Llama 3's.
    Llama3,
}

impl Cuts {
    /// Where the first word of `text` ends, which is of plain bytes and not empty.
    pub fn end(self, text: &[u8]) -> usize {
        debug_assert!(text.iter().all(|byte| is_plain(*byte)));
        let run = |from: usize, of: fn(u8) -> bool| from + text[from..].iter().take_while(|byte| of(**byte)).count();
        let is = |at: usize, of: fn(u8) -> bool| text.get(at).is_some_and(|byte| of(*byte));
        if let Some(end) = self.ending(text) {
            return end;
        }
        let blank = usize::from(text[0] == b' ');
        match self {
            Cuts::Gpt2 => {
                for of in [is_letter as fn(u8) -> bool, is_digit, is_mark] {
                    if is(blank, of) {
                        return run(blank, of);
                    }
                }
            }
            Cuts::Llama3 => {
                let taken = usize::from(!is_letter(text[0]) && !is_digit(text[0]) && !is_line_end(text[0]));
                if is(taken, is_letter) {
                    return run(taken, is_letter);
                }
                if is_digit(text[0]) {
                    return run(0, is_digit).min(3);
                }
                if is(blank, is_mark) {
                    return run(run(blank, is_mark), is_line_end);
                }
            }
        }
        // Only blanks and line ends are left to begin with.
        let end = run(0, is_blank);
        if self == Cuts::Llama3
            && let Some(last) = text[..end].iter().rposition(|byte| is_line_end(*byte))
        {
            return last + 1;
        }
        // The last blank is left for what follows, unless it is the only one.
        if end < text.len() && end > 1 { end - 1 } else { end }
    }

    /// Where 's, 't, 're, 've, 'm, 'll or 'd ends, if `text` begins with it.
    fn ending(self, text: &[u8]) -> Option<usize> {
        let rest = text.strip_prefix(b"'")?;
        let letter = |at: usize| match (rest.get(at), self) {
            (Some(byte), Cuts::Llama3) => byte.to_ascii_lowercase(),
            (Some(byte), Cuts::Gpt2) => *byte,
            (None, _) => 0,
        };
        match (letter(0), letter(1)) {
            (b's' | b't' | b'm' | b'd', _) => Some(2),
            (b'r' | b'v', b'e') | (b'l', b'l') => Some(3),
            _ => None,
        }
    }
}

const fn is_letter(byte: u8) -> bool {
    byte.is_ascii_alphabetic()
}

const fn is_digit(byte: u8) -> bool {
    byte.is_ascii_digit()
}

const fn is_mark(byte: u8) -> bool {
    byte.is_ascii_punctuation()
}

const fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

const fn is_line_end(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}
