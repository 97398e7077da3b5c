//! Hugging Face's `--save_strategy`, `--eval_strategy` and `--logging_strategy`, as how often each happens.

use super::raw::{Origin, Raw};
use crate::error::Result;

/// Updates between two of anything in Hugging Face's trainer, where nobody says how many.
const UNSAID: &str = "500";

/// A strategy, the setting that it decides about, and what "steps" means where that one is not given.
const STRATEGIES: &[(&str, &str, Option<&str>)] = &[
    ("save_strategy", "save_steps", Some(UNSAID)),
    ("eval_strategy", "eval_steps", None),
    // Castor shows every step unless told otherwise.
    ("logging_strategy", "logging_steps", Some("1")),
];

/// Turns the strategies that were given into numbers of steps, and adds to `notices` what to tell the user.
///
/// # Errors
/// [`crate::error::Error::Usage`] for a strategy that is not known.
pub(super) fn read(raw: &mut Raw, notices: &mut Vec<String>) -> Result<()> {
    for &(strategy, steps, default) in STRATEGIES {
        let asked = raw.values(strategy).concat();
        let value = match asked.as_str() {
            "" => continue,
            "steps" if raw.is_given(steps) => continue,
            // Evaluations then follow the log, where somebody says how often that is.
            "steps" => match default {
                Some(default) => default.to_string(),
                None if raw.is_given("logging_steps") => raw.values("logging_steps").concat(),
                None => UNSAID.to_string(),
            },
            "epoch" => "epoch".to_string(),
            "no" => "0".to_string(),
            _ => return Err(raw.refuse(strategy, "no, steps or epoch was expected")),
        };
        if asked != "steps" && raw.is_given(steps) && raw.values(steps).concat() != value {
            let unheard = raw.values(steps).concat();
            notices.push(format!("--{strategy} {asked} wins over --{steps} {unheard}, as in Hugging Face's trainer"));
        }
        raw.replace(steps, value, Origin::Strategy(strategy));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `key` becomes, and how many notices there are.
    fn given(flags: &[(&'static str, &str)], key: &str) -> (String, usize) {
        let mut raw = Raw::default();
        for (flag, value) in flags {
            raw.set(flag, vec![(*value).into()], Origin::Flag).unwrap();
        }
        let mut notices = Vec::new();
        read(&mut raw, &mut notices).unwrap();
        (raw.values(key).concat(), notices.len())
    }

    #[test]
    fn strategies_decide_about_steps() {
        assert_eq!(given(&[("save_strategy", "steps"), ("save_steps", "100")], "save_steps"), ("100".into(), 0));
        assert_eq!(given(&[("save_strategy", "steps")], "save_steps"), ("500".into(), 0));
        assert_eq!(given(&[("save_strategy", "no"), ("save_steps", "100")], "save_steps"), ("0".into(), 1));
        assert_eq!(given(&[("save_strategy", "epoch")], "save_steps"), ("epoch".into(), 0));
        assert_eq!(given(&[("eval_strategy", "steps"), ("logging_steps", "7")], "eval_steps"), ("7".into(), 0));
        assert_eq!(given(&[("eval_strategy", "steps")], "eval_steps"), ("500".into(), 0));
        assert_eq!(given(&[("logging_strategy", "steps")], "logging_steps"), ("1".into(), 0));
        assert_eq!(given(&[], "save_steps"), ("0".into(), 0));
        let mut raw = Raw::default();
        raw.set("save_strategy", vec!["best".into()], Origin::Flag).unwrap();
        assert!(read(&mut raw, &mut Vec::new()).is_err_and(|error| error.to_string().contains("no, steps or epoch")));
    }
}
