//! `--fsdp "…"` and `--fsdp_config FILE`: Hugging Face's words for sharding, as the plugin that does the same.

use std::path::Path;

use serde_json::Value;

use super::nearest;
use super::raw::{Origin, Raw};
use crate::config::json;
use crate::error::{Error, Result};

/// Errors are clauses until the flag's name is put before them.
type Outcome<T> = std::result::Result<T, String>;

/// The words that choose what is sharded, with the plugin of each.
const SHARDINGS: &[(&str, &str)] = &[
    ("full_shard", "zero3"),
    ("shard_grad_op", "zero2"),
    ("no_shard", "ddp"),
    // Over one host's ranks; hosts hold replicas.
    ("hybrid_shard", "zero3"),
    ("hybrid_shard_zero2", "zero2"),
];

/// Keys of the file that are about machinery that this trainer does without. Each may begin with `fsdp_`.
const NOT_NEEDED: &[&str] = &[
    "auto_wrap_policy",
    "backward_prefetch",
    "backward_prefetch_policy",
    "cpu_ram_efficient_loading",
    "forward_prefetch",
    "limit_all_gathers",
    "min_num_params",
    "state_dict_type",
    "sync_module_states",
    "use_orig_params",
    "version",
];

/// What the blocks of the models that are trained here are called in transformers.
const BLOCKS: [&str; 3] = ["LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"];

/// Keys of the file that are read.
const READ: &[&str] =
    &["activation_checkpointing", "cpu_offload", "reshard_after_forward", "transformer_layer_cls_to_wrap", "xla"];

/// What the file says.
#[derive(Default)]
struct File {
    offload: bool,
    reshard: Option<bool>,
    recompute: bool,
    unneeded: Vec<String>,
}

/// Adds what `--fsdp` and its file say to `raw`, and to `notices` what to tell the user.
///
/// # Errors
/// [`Error::Usage`] with the word or key: for what is not known, not offered, or contradicts what was given elsewhere.
pub(super) fn read(raw: &mut Raw, notices: &mut Vec<String>) -> Result<()> {
    let words = raw.values("fsdp").join(" ");
    let path = raw.values("fsdp_config").concat();
    if words.trim().is_empty() {
        if !path.is_empty() {
            notices.push(format!("--fsdp_config {path} is accepted and changes nothing: it needs --fsdp"));
        }
        return Ok(());
    }
    let file = match path.as_str() {
        "" => File::default(),
        path => {
            let value = json::read(Path::new(path))?;
            File::of(&value).map_err(|reason| Error::Usage(format!("--fsdp_config {path}: {reason}")))?
        }
    };
    if !file.unneeded.is_empty() {
        notices.push(format!("--fsdp_config {path}: accepted and not needed here: {}", file.unneeded.join(", ")));
    }
    translate(&words, &file, raw).map_err(|reason| Error::Usage(format!("--fsdp \"{words}\": {reason}")))
}

fn translate(words: &str, file: &File, raw: &mut Raw) -> Outcome<()> {
    let (mut sharding, mut offload) = (None, file.offload);
    for word in words.split([' ', ',']).filter(|word| !word.is_empty()) {
        match word {
            "offload" => offload = true,
            // Blocks are always wrapped one by one here.
            "auto_wrap" => {}
            _ => match SHARDINGS.iter().find(|(name, _)| *name == word) {
                Some((name, _)) if sharding.is_some_and(|(old, _)| old != *name) => {
                    return Err("it names two shardings; keep one".into());
                }
                Some(found) => sharding = Some(*found),
                None => {
                    let names: Vec<&str> = SHARDINGS.iter().map(|(name, _)| *name).collect();
                    return Err(format!("{word} is not known; {}, offload and auto_wrap are", names.join(", ")));
                }
            },
        }
    }
    let Some((name, plugin)) = sharding else {
        return Err("it names no sharding; add full_shard, shard_grad_op or no_shard".into());
    };
    if name.starts_with("hybrid") {
        raw.agree("shard_size", "host".into(), Origin::Fsdp)?;
    }
    if file.reshard == Some(plugin != "zero3") {
        return Err(format!(
            "it contradicts reshard_after_forward {} of --fsdp_config; say {}",
            plugin != "zero3",
            if plugin == "zero3" { "shard_grad_op" } else { "full_shard" }
        ));
    }
    let plugin = match (plugin, offload) {
        ("ddp", true) => return Err("offload needs full_shard or shard_grad_op".into()),
        ("zero3", true) => "zero3_offload",
        (_, true) => "zero2_offload",
        (plugin, false) => plugin,
    };
    raw.agree("plugin", plugin.into(), Origin::Fsdp)?;
    if file.recompute {
        raw.agree("recompute", "full".into(), Origin::Fsdp)?;
    }
    Ok(())
}

impl File {
    fn of(value: &Value) -> Outcome<File> {
        let Some(map) = value.as_object() else { return Err("a JSON object was expected".into()) };
        let mut file = File::default();
        for (name, value) in map {
            let switch = || {
                match value {
                    Value::Null => Ok(false),
                    Value::Bool(on) => Ok(*on),
                    // As it is written by those who also write it on the command line.
                    Value::String(text) => super::boolean(text).ok_or(()),
                    _ => Err(()),
                }
                .map_err(|()| format!("{name} is {value}; true or false was expected"))
            };
            match name.strip_prefix("fsdp_").unwrap_or(name) {
                "cpu_offload" => file.offload = switch()?,
                "activation_checkpointing" => file.recompute = switch()?,
                "reshard_after_forward" => file.reshard = Some(switch()?),
                "xla" if switch()? => return Err(format!("{name} is true; XLA is not offered, leave it out")),
                "xla" => file.unneeded.push(name.clone()),
                "transformer_layer_cls_to_wrap" => {
                    if let Some(other) = classes(value).into_iter().find(|class| !BLOCKS.contains(&class.as_str())) {
                        return Err(format!("{name} names {other}; what is wrapped are blocks: {}", BLOCKS.join(", ")));
                    }
                    file.unneeded.push(name.clone());
                }
                key if NOT_NEEDED.contains(&key) => file.unneeded.push(name.clone()),
                key => {
                    let near = nearest(key, NOT_NEEDED.iter().chain(READ).copied());
                    let meant = near.map(|near| format!("; did you mean {near}?"));
                    return Err(format!("unknown key {name}{}", meant.unwrap_or_else(|| "; leave it out".into())));
                }
            }
        }
        Ok(file)
    }
}

/// A class's name, or several in a list or between commas; anything else as its JSON.
fn classes(value: &Value) -> Vec<String> {
    match value {
        Value::Null => Vec::new(),
        Value::String(names) => names.split(',').map(|name| name.trim().to_string()).collect(),
        Value::Array(items) => items.iter().flat_map(classes).collect(),
        other => vec![other.to_string()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The plugin and recomputation that words and a file give, with notices; or the refusal.
    fn given(words: &str, file: &str) -> std::result::Result<(String, String, Vec<String>), String> {
        let mut raw = Raw::default();
        raw.set("fsdp", vec![words.into()], Origin::Flag).unwrap();
        let path = tempfile::NamedTempFile::new().unwrap();
        if !file.is_empty() {
            std::fs::write(path.path(), file).unwrap();
            raw.set("fsdp_config", vec![path.path().display().to_string()], Origin::Flag).unwrap();
        }
        let mut notices = Vec::new();
        read(&mut raw, &mut notices).map_err(|error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })?;
        Ok((raw.values("plugin").concat(), raw.values("recompute").concat(), notices))
    }

    fn refused(words: &str, file: &str, says: &str) {
        let error = given(words, file).unwrap_err();
        assert!(error.contains(says), "{words} {file}: {error}");
    }

    #[test]
    fn words() {
        for (words, plugin) in [
            ("full_shard auto_wrap", "zero3"),
            ("full_shard", "zero3"),
            ("full_shard,offload,auto_wrap", "zero3_offload"),
            ("shard_grad_op auto_wrap", "zero2"),
            ("shard_grad_op offload", "zero2_offload"),
            ("no_shard", "ddp"),
        ] {
            let (found, _, notices) = given(words, "").unwrap();
            assert_eq!((found.as_str(), notices.len()), (plugin, 0), "{words}");
        }
        let mut raw = Raw::default();
        translate("hybrid_shard auto_wrap", &File::default(), &mut raw).unwrap();
        assert_eq!((raw.values("plugin").concat(), raw.values("shard_size").concat()), ("zero3".into(), "host".into()));
        refused("auto_wrap", "", "names no sharding");
        refused("no_shard offload", "", "offload needs full_shard");
        refused("full_shard shard_grad_op", "", "two shardings");
        refused("fullshard", "", "fullshard is not known; full_shard, ");
    }

    #[test]
    fn files() {
        let article = r#"{"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}"#;
        let (plugin, recompute, notices) = given("full_shard auto_wrap", article).unwrap();
        assert_eq!((plugin.as_str(), recompute.as_str()), ("zero3", "auto"));
        assert!(notices[0].contains("not needed here: fsdp_transformer_layer_cls_to_wrap"), "{notices:?}");
        let all = r#"{"fsdp_version": 2, "reshard_after_forward": "true", "cpu_offload": true, "state_dict_type":
            "SHARDED_STATE_DICT", "activation_checkpointing": true, "transformer_layer_cls_to_wrap":
            ["Qwen2DecoderLayer"], "xla": false}"#;
        let (plugin, recompute, _) = given("full_shard auto_wrap", all).unwrap();
        assert_eq!((plugin.as_str(), recompute.as_str()), ("zero3_offload", "full"));
        refused("full_shard", r#"{"reshard_after_forward": false}"#, "say shard_grad_op");
        refused(
            "full_shard",
            r#"{"transformer_layer_cls_to_wrap": "GPT2Block"}"#,
            "GPT2Block; what is wrapped are blocks: LlamaDecoderLayer",
        );
        refused("full_shard", r#"{"fsdp_forward_prefech": true}"#, "did you mean forward_prefetch?");
        refused("full_shard", r#"{"xla": true}"#, "XLA");
        refused("full_shard", r#"{"activation_checkpointing": 3}"#, "true or false");
        refused("full_shard", "[]", "object");
        refused("full_shard", "{", "line 1");
    }

    #[test]
    fn what_was_given_elsewhere_must_agree() {
        let mut raw = Raw::default();
        raw.set("fsdp", vec!["full_shard".into()], Origin::Flag).unwrap();
        raw.set("plugin", vec!["fsdp".into()], Origin::Flag).unwrap();
        read(&mut raw, &mut Vec::new()).unwrap();
        let mut raw = Raw::default();
        raw.set("fsdp", vec!["full_shard".into()], Origin::Flag).unwrap();
        raw.set("plugin", vec!["zero2".into()], Origin::Flag).unwrap();
        let error = read(&mut raw, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("zero3") && error.contains("--plugin is zero2"), "{error}");
    }
}
