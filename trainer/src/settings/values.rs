//! Values as people type them: sizes, booleans, fractions of a run; and the nearest name for a misspelt one.

/// Similarity of two names, 1 of equal ones, from which one is suggested for the other.
const NEAR: f64 = 0.7;

/// The candidate that was probably meant, if one is near: first of all one of the same words in another order.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let words = |name: &str| {
        let mut words: Vec<String> = name.split('_').map(str::to_owned).collect();
        words.sort();
        words
    };
    let asked = words(name);
    candidates
        .into_iter()
        .map(|candidate| {
            if words(candidate) == asked {
                return (1.0, candidate);
            }
            let edits = strsim::normalized_damerau_levenshtein(name, candidate);
            (edits.max(strsim::jaro_winkler(name, candidate) - 0.1), candidate)
        })
        .filter(|(similarity, _)| *similarity >= NEAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// A memory budget: a number of bytes, or a share of what the machine has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// What the machine has, less what others use; decided by whoever measures it.
    Auto,
    /// Bytes.
    Bytes(u64),
    /// 0 < p ≤ 100.
    Percent(f64),
}

impl Budget {
    /// Parses `auto`, `12%`, `80GiB`, `512 MB`, `1000000`.
    pub(crate) fn parse(text: &str) -> Option<Budget> {
        let text = text.trim();
        if text.eq_ignore_ascii_case("auto") {
            return Some(Budget::Auto);
        }
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.trim().parse().ok()?;
            return (percent > 0.0 && percent <= 100.0).then_some(Budget::Percent(percent));
        }
        size(text).map(Budget::Bytes)
    }

    /// Bytes, where the machine has `available` of them.
    pub fn bytes(self, available: u64) -> u64 {
        match self {
            Budget::Auto => available,
            Budget::Bytes(bytes) => bytes,
            Budget::Percent(percent) => (available as f64 * percent / 100.0) as u64,
        }
    }
}

/// Bytes from a number with an optional unit; powers of 1024 for KiB…, of 1000 for KB….
pub(super) fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| c.is_ascii_alphabetic() && c != 'e').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: f64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1_048_576.0,
        "gib" => 1_073_741_824.0,
        "tib" => 1_099_511_627_776.0,
        _ => return None,
    };
    let number = number.trim();
    if let (Ok(whole), true) = (number.parse::<u64>(), factor == 1.0) {
        return Some(whole);
    }
    let bytes = number.parse::<f64>().ok()? * factor;
    // 2^63 bytes: beyond any machine, and safely inside u64.
    (bytes.is_finite() && (0.0..9.3e18).contains(&bytes)).then_some(bytes as u64)
}

/// true, yes, 1, on and their opposites.
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "y" | "t" | "1" | "on" => Some(true),
        "false" | "no" | "n" | "f" | "0" | "off" => Some(false),
        _ => None,
    }
}

/// How often something happens in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Every {
    /// Not at all.
    Never,
    /// Every so many steps.
    Steps(u64),
    /// Every such fraction of all steps, 0 < f < 1 (Hugging Face's form).
    Fraction(f64),
    /// At the end of each epoch; [`Every::with_epochs_of`] makes it steps.
    Epoch,
}

impl Every {
    pub(super) fn parse(text: &str) -> Option<Every> {
        if text == "epoch" {
            return Some(Every::Epoch);
        }
        match text.parse::<f64>().ok()? {
            number if number <= 0.0 => Some(Every::Never),
            number if number < 1.0 => Some(Every::Fraction(number)),
            number if number.fract() == 0.0 && number < 9e15 => Some(Every::Steps(number as u64)),
            _ => None,
        }
    }

    /// The same where an epoch has `steps` steps.
    pub fn with_epochs_of(self, steps: u64) -> Every {
        match self {
            Every::Epoch => Every::Steps(steps.max(1)),
            other => other,
        }
    }

    /// Whether it happens after step `done` (1 = after the first) of `total`.
    pub fn is_due(self, done: u64, total: u64) -> bool {
        match self {
            Every::Never | Every::Epoch => false,
            Every::Steps(steps) => done.is_multiple_of(steps),
            Every::Fraction(fraction) => done.is_multiple_of(((total as f64 * fraction).ceil() as u64).max(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("80GiB", 80 << 30),
            ("1.5 MiB", 3 << 19),
            ("512MB", 512_000_000),
            ("64 KB", 64_000),
            ("12B", 12),
            ("18446744073709551615", u64::MAX),
            ("1e9", 1_000_000_000),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "1 XB", "1e30", "abc", "nan"] {
            assert_eq!(size(text), None, "{text}");
        }
        assert_eq!(Budget::parse("50%").unwrap().bytes(1000), 500);
        assert_eq!(Budget::parse("auto"), Some(Budget::Auto));
        assert!(Budget::parse("0%").is_none() && Budget::parse("101%").is_none());
    }

    #[test]
    fn how_often() {
        assert_eq!(Every::parse("0"), Some(Every::Never));
        assert_eq!(Every::parse("-1"), Some(Every::Never));
        assert!(Every::parse("2.5").is_none());
        let due = |text: &str| -> Vec<u64> {
            let every = Every::parse(text).unwrap();
            (1..=10).filter(|done| every.is_due(*done, 10)).collect()
        };
        assert_eq!(due("4"), [4, 8]);
        assert_eq!(due("0.25"), [3, 6, 9]);
        assert_eq!(Every::parse("epoch").unwrap().with_epochs_of(5), Every::Steps(5));
    }

    #[test]
    fn near_names() {
        let names = ["logging_steps", "save_steps", "lr", "weight_decay"];
        assert_eq!(nearest("logging_stepz", names), Some("logging_steps"));
        assert_eq!(nearest("wieght_decay", names), Some("weight_decay"));
        assert_eq!(nearest("banana", names), None);
    }
}
