//! Settings as text, each with where it came from: flag over TOML over default; and beside them what DeepSpeed's and
//! FSDP's files say, which must agree with flag and TOML.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::table::{self, FLAGS, Kind, SHORTHANDS};
use super::values::boolean;
use super::{deepspeed, fsdp, nearest, strategies};
use crate::error::{Error, Result};
use crate::report::log::recorded_tokenizer;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    /// The training TOML of this path.
    File(String),
    /// A key of the DeepSpeed JSON of this path.
    DeepSpeed {
        path: String,
        key: String,
    },
    /// `--fsdp` and the file of `--fsdp_config`.
    Fsdp,
    /// This one of Hugging Face's strategies.
    Strategy(&'static str),
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path) => f.write_str(path),
            Origin::DeepSpeed { path, key } => write!(f, "{path}: {key}"),
            Origin::Fsdp => f.write_str("--fsdp"),
            Origin::Strategy(name) => write!(f, "--{name}"),
            Origin::Flag => f.write_str("command line"),
        }
    }
}

/// Every setting as text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Raw {
    given: BTreeMap<&'static str, (Vec<String>, Origin)>,
}

impl Raw {
    /// Sets `key` from the command line or a training TOML.
    ///
    /// # Errors
    /// If the same key was set to something else there by another name.
    pub fn set(&mut self, key: &'static str, values: Vec<String>, origin: Origin) -> Result<()> {
        if let Some((old, old_origin)) = self.given.get(key)
            && *old_origin == origin
            && *old != values
        {
            return Err(Error::Usage(format!(
                "{key} is asked to be {} and {} at once; give one",
                old.join(" "),
                values.join(" ")
            )));
        }
        self.given.insert(key, (values, origin));
        Ok(())
    }

    /// Reads every file that the flags name, beneath what is set, and adds to `notices` what to tell the user.
    /// `ranks`: how many will train, asked only where a file states a batch over all of them.
    ///
    /// # Errors
    /// If a file cannot be read, is not understood, or contradicts what is set.
    pub fn read_files(&mut self, ranks: &dyn Fn() -> Result<u32>, notices: &mut Vec<String>) -> Result<()> {
        self.read_config()?;
        if let Some(path) = self.values("deepspeed").pop() {
            let words = self.values("fsdp").join(" ");
            if !words.is_empty() {
                return Err(Error::Usage(format!(
                    "--deepspeed {path} and --fsdp \"{words}\" both choose the sharding; give one"
                )));
            }
            deepspeed::read(&path, self, ranks, notices)?;
        }
        fsdp::read(self, notices)?;
        strategies::read(self, notices)
    }

    /// Reads the file that `--config` names, if any, beneath what is set: a `.json` file is the model's shape, any
    /// other a training TOML.
    fn read_config(&mut self) -> Result<()> {
        let Some((values, origin)) = self.given.get("config").cloned() else {
            return Ok(());
        };
        let path = values.join(" ");
        if path.ends_with(".json") {
            return match self.given.contains_key("model_config") {
                true => {
                    Err(Error::Usage(format!("--config {path} and --model_config both name a model's shape; give one")))
                }
                false => self.set("model_config", values, origin),
            };
        }
        let text = std::fs::read_to_string(&path)
            .map_err(|e| Error::Usage(format!("--config {path}: cannot be read: {e}")))?;
        let mut file = Raw::default();
        file.read_toml(&path, &text)?;
        for (key, value) in file.given {
            self.given.entry(key).or_insert(value);
        }
        Ok(())
    }

    fn read_toml(&mut self, path: &str, text: &str) -> Result<()> {
        let refuse = |reason: String| Error::Usage(format!("{path}: {reason}"));
        let table: toml::Table = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            refuse(format!("line {line}: {}", e.message().replace('\n', " ")))
        })?;
        let origin = Origin::File(path.to_string());
        for (name, value) in &table {
            let values = match value {
                toml::Value::Array(items) => items.iter().map(scalar).collect::<Option<Vec<_>>>(),
                other => scalar(other).map(|value| vec![value]),
            }
            .ok_or_else(|| refuse(format!("{name} is a table; keys are flag names with plain values")))?;
            let name = name.replace('-', "_");
            if let Some(flag) = table::find(&name) {
                if flag.key == "config" {
                    return Err(refuse("config cannot name a further file; the model's shape is model_config".into()));
                }
                // A pair such as betas may be an array.
                let values = if flag.kind == Kind::List { values } else { vec![values.join(",")] };
                self.set(flag.key, values, origin.clone())?;
            } else if let Some(short) = SHORTHANDS.iter().find(|s| s.names.contains(&name.as_str())) {
                match boolean(&values.join(",")) {
                    Some(true) => self.set(short.key, vec![short.value.into()], origin.clone())?,
                    Some(false) => {}
                    None => {
                        return Err(refuse(format!("{name} is {}; true or false was expected", values.join(","))));
                    }
                }
            } else {
                let meant = nearest(&name, table::names()).map(|near| format!("; did you mean {near}?"));
                return Err(refuse(format!("unknown key {name}{}", meant.unwrap_or_default())));
            }
        }
        Ok(())
    }

    /// Sets `key` to what a file of another trainer says, unless it was given: then both must say the same.
    ///
    /// # Errors
    /// A clause with both values and where they are from.
    pub fn agree(&mut self, key: &'static str, value: String, origin: Origin) -> std::result::Result<(), String> {
        let Some((values, given)) = self.given.get(key) else {
            self.given.insert(key, (vec![value], origin));
            return Ok(());
        };
        let old = values.concat();
        if table::canonical(key, &old) == table::canonical(key, &value) {
            return Ok(());
        }
        let (what, leave) = match &origin {
            Origin::DeepSpeed { key, .. } => (key.as_str(), ", or leave it out of the file"),
            _ => ("--fsdp", ""),
        };
        let by = match given {
            Origin::Flag => String::new(),
            given => format!(" (in {given})"),
        };
        Err(format!("{what} asks for {key} {value}, and --{key} is {old}{by}; make them agree{leave}"))
    }

    /// Sets `key`, whatever it was.
    pub fn replace(&mut self, key: &'static str, value: String, origin: Origin) {
        self.given.insert(key, (vec![value], origin));
    }

    /// Whether `key` has a value that is no default.
    pub fn is_given(&self, key: &str) -> bool {
        self.given.contains_key(key)
    }

    /// The values of `key`; empty if it is unset.
    pub fn values(&self, key: &str) -> Vec<String> {
        match self.given.get(key) {
            Some((values, _)) => values.clone(),
            None => Some(self.default_of(key)).filter(|value| !value.is_empty()).into_iter().collect(),
        }
    }

    /// The default of `key`, which may follow another setting; empty if it stays unset.
    fn default_of(&self, key: &str) -> String {
        let of = |key| self.values(key).concat().to_ascii_lowercase();
        match key {
            "betas" if of("optimizer").starts_with("sophia") => "0.965,0.99".into(),
            "betas" => "0.9,0.999".into(),
            "data_seed" => of("seed"),
            "min_lr_ratio" if of("lr_convention") == "colossalai" => "0.1".into(),
            "min_lr_ratio" => "0".into(),
            "tokenizer" => self.values("model").pop().map_or_else(|| "bytes".into(), of_model),
            key => table::default(key).into(),
        }
    }

    /// Where the value of `key` came from.
    pub fn origin(&self, key: &str) -> Origin {
        self.given.get(key).map_or(Origin::Default, |(_, origin)| origin.clone())
    }

    /// Whether `key` has its default's value, given or not.
    pub fn is_default(&self, key: &str) -> bool {
        let same = |raw: &Raw| raw.values(key).iter().map(|value| table::canonical(key, value)).collect::<Vec<_>>();
        same(self) == same(&Raw::default())
    }

    /// Every setting with its origin, one a line, in the table's order: a training TOML that repeats the run.
    pub fn print(&self) -> String {
        let mut text = String::new();
        for flag in FLAGS.iter().filter(|flag| flag.key != "config") {
            let values = self.values(flag.key);
            let quoted = |value: &String| match (value.parse::<f64>(), value.as_str()) {
                // A number as TOML writes it, too: not `.5`, not `+1`.
                (Ok(number), _) if number.is_finite() && value.parse::<toml::Value>().is_ok() => value.clone(),
                (_, "true" | "false") => value.clone(),
                _ => format!("{value:?}"),
            };
            let value = match (flag.kind, values.as_slice()) {
                (_, []) => {
                    text.push_str(&format!("# {} is unset\n", flag.key));
                    continue;
                }
                (Kind::List, values) => {
                    format!("[{}]", values.iter().map(|v| format!("{v:?}")).collect::<Vec<_>>().join(", "))
                }
                (_, values) => quoted(&values[0]),
            };
            text.push_str(&format!("{} = {value} # {}\n", flag.key, self.origin(flag.key)));
        }
        text
    }

    /// Refuses with the setting's name, value and origin.
    pub fn refuse(&self, key: &str, expected: &str) -> Error {
        let from = match self.origin(key) {
            Origin::Flag | Origin::Default => String::new(),
            origin => format!(" (in {origin})"),
        };
        Error::Usage(format!("--{key} is {}{from}; {expected}", self.values(key).join(" ")))
    }

    /// The value parsed; an unset key is refused.
    pub fn parse<T>(&self, key: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T> {
        let values = self.values(key);
        let text = values.first().ok_or_else(|| Error::Usage(format!("--{key} is not given; {expected}")))?;
        parse(text.trim()).ok_or_else(|| self.refuse(key, &format!("{expected} was expected")))
    }

    /// The value parsed, or None if unset.
    pub fn optional<T>(&self, key: &str, expected: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        if self.values(key).is_empty() { Ok(None) } else { self.parse(key, expected, parse).map(Some) }
    }

    /// One of a few names.
    pub fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<T> {
        let value = self.values(key).concat().to_ascii_lowercase();
        choices.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice).ok_or_else(|| {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            let meant = nearest(&value, names.iter().copied()).map(|near| format!(" (did you mean {near}?)"));
            self.refuse(key, &format!("one of {} was expected{}", names.join(", "), meant.unwrap_or_default()))
        })
    }
}

fn scalar(value: &toml::Value) -> Option<String> {
    match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(value) => Some(value.to_string()),
        _ => None,
    }
}

/// The tokenizer of a model: what its folder or file brings, or what the run that left it had.
fn of_model(model: String) -> String {
    let path = Path::new(&model);
    let brings = ["tokenizer.json", "tokenizer.model"].iter().any(|file| path.join(file).exists());
    let recorded = if brings || !path.is_dir() { None } else { recorded_tokenizer(path) };
    recorded.unwrap_or(model)
}
