//! Folders as people have them, and the law that what is written is read back.

use std::path::{Path, PathBuf};

use super::{ExportDType, HfFolder, RandomWeights, export, hf_tensors};
use crate::config::{Family, ModelConfig, RopeScaling};
use crate::source::TensorSource;

fn tiny() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab_size: 97,
        hidden_size: 48,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 12,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Default,
        max_position_embeddings: 64,
        attention_bias: true,
        mlp_bias: false,
        sliding_window: None,
        tie_word_embeddings: false,
        initializer_range: 0.02,
        token_ids: Default::default(),
    }
}

fn all(source: &dyn TensorSource, config: &ModelConfig) -> Vec<Vec<f32>> {
    hf_tensors(config)
        .iter()
        .map(|(name, shape)| {
            let mut out = vec![0.0; shape.iter().product::<u64>() as usize];
            source.read(name, 0, &mut out).unwrap();
            out
        })
        .collect()
}

#[test]
fn random_weights_do_not_depend_on_who_asks() {
    let config = tiny();
    let weights = RandomWeights::new(&config, 7);
    let name = "model.layers.1.mlp.down_proj.weight";
    let mut whole = vec![0.0; 48 * 64];
    weights.read(name, 0, &mut whole).unwrap();
    let mut part = vec![0.0; 100];
    weights.read(name, 1234, &mut part).unwrap();
    assert_eq!(part, whole[1234..1334]);
    let mut other = vec![0.0; 100];
    weights.read("model.layers.0.mlp.down_proj.weight", 1234, &mut other).unwrap();
    assert_ne!(part, other);
    // The deviation of 3072 samples is within 4 standard errors (σ/√2n) of the asked one.
    let variance = whole.iter().map(|x| x * x).sum::<f32>() / whole.len() as f32;
    assert!((variance.sqrt() / 0.02 - 1.0).abs() < 4.0 / (2.0 * 3072f32).sqrt());
    // A piece longer than one thread's part.
    let mut table = vec![0.0; 40_000];
    weights.read("lm_head.weight", 0, &mut table).unwrap();
    weights.read("lm_head.weight", 39_900, &mut part).unwrap();
    assert_eq!(part, table[39_900..]);
    weights.read("model.norm.weight", 0, &mut part).unwrap();
    assert!(part.iter().all(|x| *x == 1.0));
    weights.read("model.layers.0.self_attn.q_proj.bias", 0, &mut part).unwrap();
    assert!(part.iter().all(|x| *x == 0.0));
}

#[test]
fn an_exported_folder_is_read_back_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny();
    let weights = RandomWeights::new(&config, 1);
    for (name, shard_bytes_max) in [("single", u64::MAX), ("sharded", 20_000)] {
        let path = folder.path().join(name);
        export(&path, &config, ExportDType::F32, shard_bytes_max, &weights).unwrap();
        let (again, notices) = ModelConfig::from_json_file(&path.join("config.json")).unwrap();
        assert_eq!((again, notices.len()), (config.clone(), 0));
        assert_eq!(path.join("model.safetensors.index.json").exists(), name == "sharded");
        let (read, notices) = HfFolder::open(&path, &config).unwrap();
        assert_eq!(notices.len(), 1, "{notices:?}");
        assert_eq!(all(&read, &config), all(&weights, &config));
    }
    // 16-bit forms: a second export of what was read is the same file.
    for dtype in [ExportDType::Bf16, ExportDType::F16] {
        let (a, b) = (folder.path().join(format!("{dtype:?}a")), folder.path().join(format!("{dtype:?}b")));
        export(&a, &config, dtype, u64::MAX, &weights).unwrap();
        let (read, _) = HfFolder::open(&a, &config).unwrap();
        export(&b, &config, dtype, u64::MAX, &read).unwrap();
        let bytes = |p: &Path| std::fs::read(p.join("model.safetensors")).unwrap();
        assert!(bytes(&a) == bytes(&b));
    }
    let full = export(&folder.path().join("single"), &config, ExportDType::F32, 1, &weights);
    assert!(full.unwrap_err().to_string().contains("not an empty folder"));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 6, "{left:?}");
}

#[test]
fn every_shared_checkpoint_is_decided() {
    let cases = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases/odd_checkpoints"));
    if !cases.is_dir() {
        eprintln!("skipped: the shared cases are not here");
        return;
    }
    let decided: &[(&str, Result<&str, &str>)] = &[
        ("bad_json", Err("line")),
        ("config_fewer_layers", Err("does not have: model.layers.1.input_layernorm.weight")),
        ("double_prefix", Err("prefix twice")),
        ("extra_unknown", Err("model.layers.7.foo")),
        ("index_lacks_a_tensor", Err("holds model.norm.weight, which the index does not list")),
        ("index_wrong_file", Ok("model.norm.weight is listed in model-00001-of-00004")),
        ("missing_shard", Err("model-00004-of-00004.safetensors: this weight file is missing")),
        ("mixed_dtype", Ok("20 as F16, 1 as F32")),
        ("no_format_metadata", Ok("21 as F16")),
        ("no_weights", Err("no weights")),
        ("shape_mismatch", Err("model.norm.weight has shape [50] in the file and [48]")),
        ("shards_w_o_index", Err("model.safetensors.index.json")),
        ("tied_w_different_lm_head", Ok("lm_head.weight differs from the embedding")),
        ("truncated", Err("model.safetensors: the file is cut off")),
        ("zero_byte", Err("model.safetensors: the file has zero bytes")),
    ];
    let present = std::fs::read_dir(&cases).unwrap().filter(|e| e.as_ref().unwrap().path().is_dir());
    assert_eq!(present.count(), decided.len(), "a case is not decided");
    for (name, decision) in decided {
        let folder = cases.join(name);
        let opened = ModelConfig::from_json_file(&folder.join("config.json"))
            .and_then(|(config, _)| HfFolder::open(&folder, &config).map(|(f, n)| (config, f, n)));
        match (opened, decision) {
            (Ok((config, folder, notices)), Ok(notice)) => {
                let text = notices.join("\n");
                assert!(text.contains(notice), "{name}: {text}");
                assert!(all(&folder, &config).iter().flatten().all(|x| x.is_finite()), "{name}");
            }
            (Err(error), Err(says)) => {
                assert_eq!(error.exit_code(), 2, "{name}");
                assert!(error.to_string().contains(says), "{name}: {error}");
            }
            (opened, _) => panic!("{name}: {:?}", opened.map(|o| o.2)),
        }
    }
}

#[test]
fn what_is_not_weights_is_recognised() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny();
    let open = || HfFolder::open(folder.path(), &config).unwrap_err().to_string();
    let file = |name: &str| folder.path().join(name);
    std::fs::write(file("pytorch_model.bin"), b"x").unwrap();
    assert!(open().contains("pickle") && open().contains("safe_serialization"));
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    std::fs::write(file("model.safetensors"), pointer).unwrap();
    assert!(open().contains("git lfs pull"));
    std::fs::write(file("model.safetensors"), [0xFF; 64]).unwrap();
    assert!(open().contains("not a safetensors file"));
    std::fs::write(file("model.safetensors"), [1, 2, 3]).unwrap();
    assert!(open().contains("not a safetensors file"));
    std::fs::remove_file(file("model.safetensors")).unwrap();
    let index = r#"{"weight_map": {"a": "../secret.safetensors"}}"#;
    std::fs::write(file("model.safetensors.index.json"), index).unwrap();
    assert!(open().contains("a file name was expected"));
    let gone = HfFolder::open(&file("nowhere"), &config).unwrap_err().to_string();
    assert!(gone.contains("not a folder"), "{gone}");
}

#[test]
fn a_whole_file_with_bytes_behind_it_is_refused_and_a_base_models_names_are_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let config = ModelConfig { tie_word_embeddings: true, ..tiny() };
    let path = folder.path().join("m");
    export(&path, &config, ExportDType::F32, u64::MAX, &RandomWeights::new(&config, 1)).unwrap();
    let file = path.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, [whole.clone(), vec![0; 5]].concat()).unwrap();
    let error = HfFolder::open(&path, &config).unwrap_err().to_string();
    assert!(error.contains("5 bytes follow"), "{error}");
    // The same header without the prefix, padded to its old length.
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header = String::from_utf8(whole[8..8 + length].to_vec()).unwrap().replace("\"model.", "\"");
    header.push_str(&" ".repeat(length - header.len()));
    std::fs::write(&file, [&whole[..8], header.as_bytes(), &whole[8 + length..]].concat()).unwrap();
    let (read, notices) = HfFolder::open(&path, &config).unwrap();
    assert!(notices[0].contains("lack the prefix"), "{notices:?}");
    assert_eq!(all(&read, &config), all(&RandomWeights::new(&config, 1), &config));
}

/// What the shared cases leave out: a head or blocks that the file does not hold, two forms side by side, an index that
/// counts wrong.
#[test]
fn weights_that_do_not_belong_to_their_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let config = tiny();
    let tied = ModelConfig { tie_word_embeddings: true, ..tiny() };
    let (single, sharded) = (folder.path().join("single"), folder.path().join("sharded"));
    export(&single, &tied, ExportDType::F32, u64::MAX, &RandomWeights::new(&tied, 1)).unwrap();
    let refused = |config: &ModelConfig| HfFolder::open(&single, config).unwrap_err().to_string();
    assert!(refused(&config).contains("missing: lm_head.weight"), "{}", refused(&config));
    let deeper = ModelConfig { num_hidden_layers: 3, ..tied.clone() };
    assert!(refused(&deeper).contains("missing: model.layers.2."), "{}", refused(&deeper));

    export(&sharded, &config, ExportDType::F32, 20_000, &RandomWeights::new(&config, 2)).unwrap();
    let index = sharded.join("model.safetensors.index.json");
    let mut value: serde_json::Value = serde_json::from_slice(&std::fs::read(&index).unwrap()).unwrap();
    value["metadata"]["total_size"] = 7.into();
    std::fs::write(&index, value.to_string()).unwrap();
    let (read, notices) = HfFolder::open(&sharded, &config).unwrap();
    assert!(notices[0].contains("total_size is 7"), "{notices:?}");
    assert_eq!(all(&read, &config), all(&RandomWeights::new(&config, 2), &config));
    std::fs::copy(single.join("model.safetensors"), sharded.join("model.safetensors")).unwrap();
    let (read, notices) = HfFolder::open(&sharded, &tied).unwrap();
    assert!(notices[0].contains("both") && notices[0].ends_with("model.safetensors is read"), "{notices:?}");
    assert_eq!(all(&read, &tied), all(&RandomWeights::new(&tied, 1), &tied));
}
