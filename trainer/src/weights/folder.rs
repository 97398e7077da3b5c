//! A Hugging Face model folder as a source of weights, every tensor checked before the first is read.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use super::safetensors_file::{Entry, SafetensorsFile, element_bytes};
use super::{INDEX_FILE, SINGLE_FILE, hf_tensors};
use crate::config::{ModelConfig, json};
use crate::error::{Error, Result};
use crate::source::TensorSource;

/// How many names an error lists before it says how many more there are.
const NAMES_SHOWN: usize = 4;

/// The weights of a folder with `model.safetensors`, or shards and `model.safetensors.index.json`. A rank reads only its
/// part; what ranks of one machine read is in the system's cache once.
#[derive(Debug)]
pub struct HfFolder {
    folder: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Model's tensor name → (index in `files`, place there).
    tensors: HashMap<String, (usize, Entry)>,
}

impl HfFolder {
    /// Opens the weights of `config` in `folder`. The second value holds notices: what is unusual and accepted.
    ///
    /// # Errors
    /// [`Error::Usage`] naming the file or the tensors, if any tensor of the model is missing, has another shape
    /// or a type that is not float, or if the folder holds tensors that the model does not have.
    pub fn open(folder: &Path, config: &ModelConfig) -> Result<(HfFolder, Vec<String>)> {
        let mut notices = Vec::new();
        let files = open_files(folder, &mut notices)?;
        let mut found: BTreeMap<&str, (usize, &Entry)> = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for (name, entry) in &file.tensors {
                if found.insert(name, (index, entry)).is_some() {
                    return Err(refuse(folder, format!("two files hold the tensor {name}")));
                }
            }
        }
        let found = model_names(folder, found, &mut notices)?;
        let mut tensors = HashMap::new();
        for (name, shape) in hf_tensors(config) {
            if let Some((file, entry)) = found.get(&name) {
                check(folder, &name, entry, &shape)?;
                tensors.insert(name, (*file, (*entry).clone()));
            }
        }
        check_complete(folder, config, &found, &tensors, &mut notices)?;
        if config.tie_word_embeddings
            && let (Some((a, head)), Some((b, table))) =
                (found.get("lm_head.weight"), found.get("model.embed_tokens.weight"))
            && !files[*a].is_same(head, &files[*b], table)?
        {
            notices.push(format!(
                "{}: tie_word_embeddings is true, yet lm_head.weight differs from the embedding; the embedding \
                 is used for both, as the configuration says",
                folder.display()
            ));
        }
        notices.push(dtypes(folder, &tensors));
        drop(found);
        Ok((HfFolder { folder: folder.to_path_buf(), files, tensors }, notices))
    }
}

impl TensorSource for HfFolder {
    fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()> {
        let (file, entry) = self
            .tensors
            .get(name)
            .ok_or_else(|| Error::Failed(format!("{}: there is no tensor {name}", self.folder.display())))?;
        let elements: u64 = entry.shape.iter().product();
        assert!(
            first.checked_add(out.len() as u64).is_some_and(|end| end <= elements),
            "{name} has {elements} elements, asked for {first}+{}",
            out.len()
        );
        self.files[*file].widen(entry, first as usize, out)
    }
}

fn refuse(folder: &Path, reason: String) -> Error {
    Error::Usage(format!("{}: {reason}", folder.display()))
}

fn open_files(folder: &Path, notices: &mut Vec<String>) -> Result<Vec<SafetensorsFile>> {
    if !folder.is_dir() {
        return Err(refuse(folder, "this is not a folder; --model takes a Hugging Face model folder".into()));
    }
    let (single, index) = (folder.join(SINGLE_FILE), folder.join(INDEX_FILE));
    if single.exists() {
        if index.exists() {
            notices.push(format!(
                "{}: both {SINGLE_FILE} and {INDEX_FILE} are present; {SINGLE_FILE} is read",
                folder.display()
            ));
        }
        return Ok(vec![SafetensorsFile::open(&single)?]);
    }
    if index.exists() {
        return open_shards(folder, &index, notices);
    }
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .map_err(|e| refuse(folder, format!("cannot be listed: {e}")))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    let shard = names.iter().find(|name| name.ends_with(".safetensors"));
    let pickle = names.iter().find(|name| {
        [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end)) && *name != "training_args.bin"
    });
    Err(refuse(
        folder,
        match (shard, pickle) {
            (Some(shard), _) => {
                format!("{shard} is here, but {INDEX_FILE}, which says what the shards hold, is missing")
            }
            (None, Some(pickle)) => format!(
                "{pickle} is a pickle, which can run code when read and is not supported; load the model \
                 in transformers and save it with save_pretrained(folder, safe_serialization=True)"
            ),
            (None, None) => format!("no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is here"),
        },
    ))
}

fn open_shards(folder: &Path, index: &Path, notices: &mut Vec<String>) -> Result<Vec<SafetensorsFile>> {
    let value = json::read(index)?;
    let refuse_index = |reason: String| Error::Usage(format!("{}: {reason}", index.display()));
    let map =
        value["weight_map"].as_object().ok_or_else(|| refuse_index("weight_map is missing or not an object".into()))?;
    let mut place = BTreeMap::new();
    for (tensor, file) in map {
        match file.as_str() {
            // A name only: an index must not reach outside its folder.
            Some(file) if !file.contains('/') && file != ".." => place.insert(tensor, file),
            _ => {
                return Err(refuse_index(format!("weight_map.{tensor} is {file}, a file name was expected")));
            }
        };
    }
    let mut names: Vec<&str> = place.values().copied().collect();
    names.sort_unstable();
    names.dedup();
    let mut files = Vec::with_capacity(names.len());
    let mut bytes = 0u64;
    for name in &names {
        let file = SafetensorsFile::open(&folder.join(name))?;
        for (tensor, entry) in &file.tensors {
            bytes += entry.bytes as u64;
            match place.get(tensor) {
                None => {
                    return Err(refuse_index(format!("{name} holds {tensor}, which the index does not list")));
                }
                Some(stated) if stated != name => notices.push(format!(
                    "{}: {tensor} is listed in {stated} but lies in {name}, from where it is read",
                    index.display()
                )),
                Some(_) => {}
            }
        }
        files.push(file);
    }
    if let Some(tensor) = place.keys().find(|t| !files.iter().any(|f| f.tensors.contains_key(**t))) {
        return Err(refuse_index(format!("{tensor} is listed, and no shard holds it")));
    }
    if let Some(stated) = value["metadata"]["total_size"].as_u64()
        && stated != bytes
    {
        notices
            .push(format!("{}: total_size is {stated} and the shards hold {bytes} bytes of tensors", index.display()));
    }
    Ok(files)
}

/// Names as the causal model has them: the base model's files lack the prefix `model.`.
fn model_names<'a>(
    folder: &Path,
    found: BTreeMap<&str, (usize, &'a Entry)>,
    notices: &mut Vec<String>,
) -> Result<HashMap<String, (usize, &'a Entry)>> {
    if let Some(name) = found.keys().find(|name| name.starts_with("model.model.")) {
        return Err(refuse(
            folder,
            format!(
                "{name} has its prefix twice: the file was saved from a wrapper; strip the first \"model.\" and \
             save it again"
            ),
        ));
    }
    let bare = found.contains_key("embed_tokens.weight");
    if bare {
        notices
            .push(format!("{}: names lack the prefix \"model.\" (a base model's file); it is added", folder.display()));
    }
    Ok(found
        .into_iter()
        .map(|(name, place)| {
            let prefixed = bare && name != "lm_head.weight" && !name.starts_with("model.");
            (if prefixed { format!("model.{name}") } else { name.to_string() }, place)
        })
        .collect())
}

fn check(folder: &Path, name: &str, entry: &Entry, shape: &[u64]) -> Result<()> {
    if entry.shape != shape {
        return Err(refuse(
            folder,
            format!("{name} has shape {:?} in the file and {shape:?} by the configuration", entry.shape),
        ));
    }
    if element_bytes(entry.dtype).is_none() {
        return Err(refuse(folder, format!("{name} is stored as {:?}; F64, F32, F16 and BF16 are read", entry.dtype)));
    }
    Ok(())
}

fn check_complete(
    folder: &Path,
    config: &ModelConfig,
    found: &HashMap<String, (usize, &Entry)>,
    tensors: &HashMap<String, (usize, Entry)>,
    notices: &mut Vec<String>,
) -> Result<()> {
    let mut missing: Vec<String> =
        hf_tensors(config).into_iter().map(|(name, _)| name).filter(|name| !tensors.contains_key(name)).collect();
    missing.sort();
    let mut unexpected: Vec<String> = found
        .keys()
        .filter(|name| !tensors.contains_key(*name))
        .filter(|name| !name.ends_with("rotary_emb.inv_freq"))
        .filter(|name| !(config.tie_word_embeddings && *name == "lm_head.weight"))
        .cloned()
        .collect();
    unexpected.sort();
    if !missing.is_empty() {
        return Err(refuse(
            folder,
            format!(
                "tensors of the model are missing: {}; config.json and weights do not belong together",
                listed(&missing)
            ),
        ));
    }
    if !unexpected.is_empty() {
        return Err(refuse(
            folder,
            format!(
                "tensors that the model does not have: {}; config.json (num_hidden_layers {}) and weights do not \
             belong together",
                listed(&unexpected),
                config.num_hidden_layers
            ),
        ));
    }
    if found.keys().any(|name| name.ends_with("rotary_emb.inv_freq")) {
        notices.push(format!("{}: stored rotary frequencies are ignored", folder.display()));
    }
    Ok(())
}

fn listed(names: &[String]) -> String {
    match names.len().checked_sub(NAMES_SHOWN) {
        Some(more @ 1..) => format!("{} and {more} more", names[..NAMES_SHOWN].join(", ")),
        _ => names.join(", "),
    }
}

fn dtypes(folder: &Path, tensors: &HashMap<String, (usize, Entry)>) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (_, entry) in tensors.values() {
        *counts.entry(format!("{:?}", entry.dtype)).or_default() += 1;
    }
    let counts: Vec<_> = counts.iter().map(|(dtype, n)| format!("{n} as {dtype}")).collect();
    format!("{}: tensors stored {}; all are widened to fp32", folder.display(), counts.join(", "))
}
