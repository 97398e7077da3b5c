//! Every configuration that people are known to have, decided by name.

use std::path::PathBuf;

use super::{Family, ModelConfig, RopeScaling, SlidingWindow};

const TINY: &str = r#""model_type":"llama","vocab_size":97,"hidden_size":48,"intermediate_size":64,
    "num_hidden_layers":1,"num_attention_heads":4"#;

/// Reads a config made of the tiny shape and `rest`; later keys may not repeat earlier ones.
fn read(text: &str) -> Result<(ModelConfig, Vec<String>), String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    ModelConfig::from_json_file(file.path()).map_err(|e| {
        assert_eq!(e.exit_code(), 2);
        assert!(e.to_string().starts_with(&file.path().display().to_string()), "{e}");
        e.to_string()
    })
}

fn tiny(rest: &str) -> Result<(ModelConfig, Vec<String>), String> {
    read(&format!("{{{TINY}{}{rest}}}", if rest.is_empty() { "" } else { "," }))
}

/// The tiny shape of another family, where the number of kv heads must be said.
fn of(family: &str, rest: &str) -> Result<(ModelConfig, Vec<String>), String> {
    let shape = TINY.replace("\"llama\"", &format!("\"{family}\",\"num_key_value_heads\":2"));
    read(&format!("{{{shape}{}{rest}}}", if rest.is_empty() { "" } else { "," }))
}

fn refused(rest: &str, says: &[&str]) {
    let error = tiny(rest).expect_err(rest);
    for part in says {
        assert!(error.contains(part), "{rest}: {error}");
    }
}

fn cases() -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases"));
    if !path.is_dir() {
        eprintln!("skipped: the shared cases are not here");
        return None;
    }
    Some(path)
}

#[test]
fn every_shared_case_is_decided() {
    let Some(cases) = cases() else { return };
    let decided: &[(&str, Result<&str, &[&str]>)] = &[
        ("act_gelu", Err(&["hidden_act", "\"gelu\""])),
        ("act_nope", Err(&["hidden_act", "\"nope\""])),
        ("attn_bias", Ok("")),
        ("dtype_bad", Ok("torch_dtype \"bf16\"")),
        ("eos_list", Ok("")),
        ("extra", Ok("max_sequence_length, foo")),
        ("head_dim_null", Ok("")),
        ("hidden_50_heads_4", Err(&["hidden_size 50", "num_attention_heads 4"])),
        ("kv_3_of_4", Err(&["num_key_value_heads is 3", "num_attention_heads 4"])),
        ("kv_null", Ok("")),
        ("mlp_bias", Ok("")),
        ("odd_head_dim", Err(&["head_dim is 13", "even"])),
        ("pad_97", Ok("pad_token_id is 97")),
        ("rope_parameters", Ok("")),
        ("rs_dynamic", Ok("")),
        ("rs_factor_.5", Err(&["factor is 0.5", "at least 1"])),
        ("rs_linear_old", Ok("")),
        ("rs_llama3_missing", Err(&["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])),
        ("rs_unknown", Err(&["\"banana\""])),
        ("sw", Ok("sliding_window")),
        ("theta_null", Err(&["rope_theta is null"])),
        ("tie", Ok("")),
        ("vocab_0", Err(&["vocab_size is 0"])),
    ];
    let folder = cases.join("bad_or_odd_config");
    let present = std::fs::read_dir(&folder).unwrap().filter(|e| e.as_ref().unwrap().path().is_dir());
    assert_eq!(present.count(), decided.len(), "a case is not decided");
    let observed: serde_json::Value = super::json::read(&folder.join("observed.json")).unwrap();
    for (name, decision) in decided {
        let read = ModelConfig::from_json_file(&folder.join(name).join("config.json"));
        match (read, decision) {
            (Ok((config, notices)), Ok(notice)) => {
                let notices = notices.join("\n");
                assert!(notices.contains(notice), "{name}: {notices}");
                assert_eq!(notices.is_empty(), notice.is_empty(), "{name}: {notices}");
                let seen = &observed["5.24.0"][name];
                if let Some(parameters) = seen["params"].as_u64() {
                    assert_eq!(config.parameters(), parameters, "{name}");
                    for (ours, theirs) in config.inv_freq(64).iter().zip(seen["inv_freq"].as_array().unwrap()) {
                        // The file gives six decimals.
                        assert!((f64::from(*ours) - theirs.as_f64().unwrap()).abs() < 6e-7, "{name}");
                    }
                }
            }
            (Err(error), Err(parts)) => {
                let text = error.to_string();
                assert_eq!(error.exit_code(), 2);
                assert!(text.contains(&format!("{name}/config.json: ")), "{text}");
                parts.iter().for_each(|part| assert!(text.contains(part), "{name}: {text}"));
            }
            (read, _) => panic!("{name}: {read:?}"),
        }
    }
}

#[test]
fn fields_that_no_shared_case_holds() {
    refused(r#""hidden_act":null"#, &["hidden_act is null"]);
    refused(r#""rope_theta":"1e4""#, &["rope_theta is \"1e4\""]);
    refused(r#""num_key_value_heads":8"#, &["num_key_value_heads is 8"]);
    refused(r#""rms_norm_eps":"1e-5""#, &["rms_norm_eps is \"1e-5\""]);
    refused(r#""attention_dropout":0.1"#, &["attention_dropout is 0.1"]);
    refused(r#""rope_scaling":{"rope_type":"longrope","factor":4}"#, &["\"longrope\"", "yarn"]);
    refused(r#""rope_scaling":{"rope_type":"yarn"}"#, &["rope_scaling.factor is missing"]);
    refused(r#""rope_scaling":{"rope_type":"yarn","factor":4,"beta_fast":1}"#, &["beta_fast is 1", "above"]);
    refused(r#""attention_bias":"yes""#, &["attention_bias is \"yes\""]);
    refused(r#""quantization_config":{"bits":4}"#, &["quantization_config"]);
    refused(r#""torch_dtype":"int3""#, &["torch_dtype is \"int3\""]);
    for kind in ["qwen3", "gemma"] {
        let error = of(kind, "").unwrap_err();
        assert!(error.contains(&format!("model_type is \"{kind}\", and \"llama\"")), "{error}");
    }
    for (field, value) in [("hidden_size\":48", "hidden_size\":48.0"), ("layers\":1", "layers\":0")] {
        let error = read(&format!("{{{}}}", TINY.replace(field, value))).unwrap_err();
        assert!(error.contains("a whole number from 1"), "{error}");
    }
    let missing = read(r#"{"model_type":"llama"}"#).unwrap_err();
    assert!(missing.contains("hidden_size is missing"), "{missing}");
    let huge = TINY.replace(":48", ":262144").replace(":64", ":1048576").replace("layers\":1", "layers\":1024");
    assert!(read(&format!("{{{huge}}}")).unwrap_err().contains("beyond any machine"));

    assert_eq!(tiny(r#""rope_theta":500000"#).unwrap().0.rope_theta, 500_000.0);
    assert_eq!(tiny(r#""rope_scaling":{}"#).unwrap().0.rope_scaling, RopeScaling::Default);
    assert_eq!(tiny(r#""pad_token_id":-1"#).unwrap().1, Vec::<String>::new());
    assert_eq!(tiny(r#""head_dim":16"#).unwrap().0.head_dim, 16);
    assert!(tiny(r#""tie_word_embeddings":null"#).unwrap().1[0].contains("read as false"));
    assert!(tiny(r#""pretraining_tp":2"#).unwrap().1[0].contains("pretraining_tp"));
    let both = tiny(r#""rope_theta":10000,"rope_parameters":{"rope_type":"default","rope_theta":5e5}"#);
    assert_eq!(both.unwrap().0.rope_theta, 5e5);
    let ids = tiny(r#""bos_token_id":1,"eos_token_id":[2,96],"pad_token_id":97"#).unwrap().0;
    let written = ids.to_json("bfloat16");
    assert_eq!((&written["bos_token_id"], &written["eos_token_id"]), (&1.into(), &serde_json::json!([2, 96])));
    assert_eq!(
        written.get("pad_token_id"),
        None,
        "an id outside of the table keeps transformers from reading the model"
    );
    let kanana = read(&format!("{{{},\"head_dim\":12}}", TINY.replace(":48", ":50")));
    assert_eq!(kanana.unwrap().0.head_dim, 12);
}

#[test]
fn broken_files_are_placed() {
    let error = read(&format!("{{{TINY}}}\n}}")).unwrap_err();
    assert!(error.contains("line 3 column 1"), "{error}");
    let error = read(&format!("{{{TINY},\"vocab_size\":98}}")).unwrap_err();
    assert!(error.contains("\"vocab_size\" is given twice at line 2"), "{error}");
    assert!(read("\u{FEFF}{}").unwrap_err().contains("byte-order mark"));
    assert!(read("[]").unwrap_err().contains("not an array"));
    assert!(
        ModelConfig::from_json_file(&PathBuf::from("/nonexistent/config.json"))
            .unwrap_err()
            .to_string()
            .contains("cannot be read")
    );
}

#[test]
fn parameter_counts_of_real_models() {
    // hidden, inter, layers, heads, kv, head_dim, vocab, tied, parameters
    let rows: [([u64; 7], bool, u64); 16] = [
        ([4096, 11008, 4, 32, 32, 128, 32000], false, 1_071_681_536),
        ([4096, 11008, 32, 32, 32, 128, 32000], false, 6_738_415_616),
        ([5120, 13824, 40, 40, 40, 128, 32000], false, 13_015_864_320),
        ([8192, 28672, 80, 64, 8, 128, 32000], false, 68_976_648_192),
        ([4096, 14336, 32, 32, 8, 128, 128_256], false, 8_030_261_248),
        ([8192, 28672, 80, 64, 8, 128, 128_256], false, 70_553_706_496),
        ([2048, 8192, 16, 32, 8, 64, 128_256], true, 1_235_814_400),
        ([3072, 8192, 28, 24, 8, 128, 128_256], true, 3_212_749_824),
        ([2048, 5632, 22, 32, 4, 64, 32000], false, 1_100_048_384),
        ([4096, 11008, 32, 32, 32, 128, 32016], false, 6_738_546_688),
        ([8192, 22016, 48, 64, 8, 128, 32000], false, 33_743_970_304),
        ([4096, 14336, 32, 32, 8, 128, 32000], false, 7_241_732_096),
        ([576, 1536, 30, 9, 3, 64, 49152], true, 134_515_008),
        ([960, 2560, 32, 15, 5, 64, 49152], true, 361_821_120),
        ([2048, 8192, 24, 32, 32, 64, 49152], true, 1_711_376_384),
        ([48, 64, 1, 4, 4, 12, 97], false, 27_888),
    ];
    let base = tiny("").unwrap().0;
    for ([hidden, inter, layers, heads, kv, head_dim, vocab], tied, parameters) in rows {
        let config = ModelConfig {
            hidden_size: hidden,
            intermediate_size: inter,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: kv,
            head_dim,
            vocab_size: vocab,
            tie_word_embeddings: tied,
            ..base.clone()
        };
        assert_eq!(config.parameters(), parameters, "{config:?}");
        let listed: u64 =
            crate::weights::hf_tensors(&config).iter().map(|(_, shape)| shape.iter().product::<u64>()).sum();
        assert_eq!(listed, parameters, "{config:?}");
    }
}

#[test]
fn the_shapes_in_configs_are_the_known_models() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../configs"));
    for (name, parameters) in [
        ("article-4block", 1_071_681_536),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2-7b", 7_615_616_512),
        ("mistral-7b", 7_241_732_096),
        ("castor-1.3b", 1_345_423_360),
        ("castor-30b", 32_528_943_616),
        ("castor-tiny", 5_167_200),
    ] {
        let (config, notices) = ModelConfig::from_json_file(&folder.join(format!("{name}.json"))).unwrap();
        assert_eq!(config.parameters(), parameters, "{name}");
        assert!(notices.is_empty(), "{notices:?}");
        let listed = crate::weights::hf_tensors(&config).into_iter().map(|(_, shape)| shape.iter().product::<u64>());
        assert_eq!(listed.sum::<u64>(), parameters, "{name}");
    }
}

#[test]
fn families() {
    let window = |tokens, first_block| Some(SlidingWindow { tokens, first_block });
    for (family, rest, expected, notice) in [
        ("mistral", "", window(4096, 0), ""),
        ("mistral", r#""sliding_window":null"#, None, ""),
        ("mistral", r#""sliding_window":32,"attention_bias":true"#, window(32, 0), "attention_bias"),
        ("mistral", r#""sliding_window":null,"layer_types":["full_attention"]"#, None, "layer_types"),
        ("qwen2", "", None, ""),
        ("qwen2", r#""sliding_window":131072,"use_sliding_window":false,"max_window_layers":0"#, None, ""),
        ("qwen2", r#""sliding_window":8,"use_sliding_window":true,"max_window_layers":0"#, window(8, 0), ""),
        ("qwen2", r#""sliding_window":8,"use_sliding_window":true,"max_window_layers":1"#, None, ""),
        ("qwen2", r#""use_sliding_window":true"#, None, ""),
        ("qwen2", r#""layer_types":["full_attention"],"attention_bias":false"#, None, "attention_bias"),
        (
            "qwen2",
            r#""sliding_window":8,"use_sliding_window":true,"max_window_layers":0,"layer_types":["sliding_attention"]"#,
            window(8, 0),
            "",
        ),
    ] {
        let (config, notices) = of(family, rest).unwrap();
        assert_eq!((config.family.model_type(), config.sliding_window), (family, expected), "{rest}");
        assert_eq!((config.attention_bias, config.output_bias()), (family == "qwen2", false));
        assert!(notices.join("").contains(notice) && notices.len() == usize::from(!notice.is_empty()), "{notices:?}");
        let written = config.to_json("bfloat16");
        assert_eq!(read(&written.to_string()).unwrap(), (config, Vec::new()), "{written}");
    }
    assert_eq!(tiny("").unwrap().0.family, Family::Llama);
    for (family, rest, says) in [
        ("qwen2", r#""architectures":["LlamaForCausalLM"]"#, "it is \"Qwen2ForCausalLM\""),
        ("mistral", r#""architectures":["Qwen2ForCausalLM"]"#, "it is \"MistralForCausalLM\""),
        ("mistral", r#""sliding_window":0"#, "sliding_window is 0"),
        ("qwen2", r#""layer_types":["sliding_attention"]"#, "layer_types differs"),
    ] {
        let error = of(family, rest).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    let unsaid = read(&format!("{{{}}}", TINY.replace("llama", "mistral"))).unwrap_err();
    assert!(unsaid.contains("num_key_value_heads is missing"), "{unsaid}");

    let (mistral, _) = of("mistral", r#""sliding_window":32"#).unwrap();
    mistral.check_window(32, "--max_length").unwrap();
    let refused = mistral.check_window(33, "--max_length").unwrap_err().to_string();
    assert!(
        refused.contains("sliding_window is 32 and --max_length 33") && refused.contains("at most 32"),
        "{refused}"
    );
    of("qwen2", "").unwrap().0.check_window(1 << 20, "--max_length").unwrap();
}

/// Frequencies that transformers gives, relative error at f32's resolution.
fn close(config: &ModelConfig, expected: &[(usize, f64)]) {
    let frequencies = config.inv_freq(0);
    for (index, value) in expected {
        let error = (f64::from(frequencies[*index]) / value - 1.0).abs();
        assert!(error < 2e-7, "{index}: {} is not {value}", frequencies[*index]);
    }
}

#[test]
fn rotary_frequencies_are_those_of_transformers() {
    let base = tiny("").unwrap().0;
    let llama3 = |factor| RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let llama31 = ModelConfig { head_dim: 128, rope_theta: 5e5, rope_scaling: llama3(8.0), ..base.clone() };
    close(
        &llama31,
        &[
            (0, 1.0),
            (1, 0.814_617_22),
            (16, 0.037_606_031),
            (31, 8.567_514_6e-4),
            (36, 7.784_655_5e-5),
            (63, 3.068_925_9e-7),
        ],
    );
    close(
        &ModelConfig { head_dim: 64, rope_scaling: llama3(32.0), ..llama31 },
        &[(1, 0.663_601_28), (8, 0.037_606_031), (16, 4.295_567_1e-4), (20, 8.570_255_9e-6), (31, 9.418_306_5e-8)],
    );
    close(&ModelConfig { head_dim: 128, ..base.clone() }, &[(1, 0.865_964_35), (63, 1.154_781_9e-4)]);
    let table = base.rope_table(3);
    let half = base.head_dim as usize / 2;
    assert_eq!(table.len(), 3 * 2 * half);
    assert!(table[..half].iter().all(|cos| *cos == 1.0) && table[half..2 * half].iter().all(|s| *s == 0.0));
    assert_eq!(table[4 * half], 2f64.cos() as f32);
}

/// Values of the formulas of YaRN and of dynamic scaling in f64, written out apart from this code.
#[test]
fn yarn_and_dynamic_scaling() {
    let yarn = |more: &str| format!(r#""rope_scaling":{{"rope_type":"yarn","factor":4{more}}}"#);
    let (tiny_model, notices) = tiny(&yarn("")).unwrap();
    assert!(notices.is_empty(), "{notices:?}");
    let long = ModelConfig { head_dim: 128, ..tiny_model.clone() };
    let RopeScaling::Yarn { attention_factor, .. } = long.rope_scaling else { panic!("{long:?}") };
    assert!((attention_factor - 1.138_629_4).abs() < 1e-7);
    let scaling = |original, truncate| RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: original,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor,
        truncate,
    };
    let long = ModelConfig { rope_scaling: scaling(4096, true), ..long };
    close(
        &long,
        &[
            (0, 1.0),
            (1, 0.865_964_323),
            (20, 0.056_234_132_5),
            (21, 0.047_292_038_5),
            (33, 0.005_412_277_02),
            (45, 4.294_025_89e-4),
            (46, 3.333_803_58e-4),
            (63, 2.886_954_96e-5),
        ],
    );
    let short = ModelConfig { rope_scaling: scaling(64, false), ..tiny_model };
    close(&short, &[(0, 1.0), (1, 0.108_576_68), (2, 0.011_603_972_1), (5, 1.160_397_21e-4)]);
    let table = long.rope_table(2);
    let factor = attention_factor as f32;
    assert!(table[..64].iter().all(|cos| *cos == factor) && table[64..128].iter().all(|sin| *sin == 0.0));
    assert_eq!(table[128], 1f64.cos() as f32 * factor);

    let (factor_of, said) =
        tiny(&format!("{},\"max_position_embeddings\":64", yarn(",\"original_max_position_embeddings\":32"))).unwrap();
    assert!(
        matches!(factor_of.rope_scaling, RopeScaling::Yarn { factor: 4.0, .. }) && said[0].contains("is 2; 4 is used"),
        "{said:?}"
    );
    let explicit = tiny(&yarn(r#","attention_factor":1.5,"beta_slow":null"#)).unwrap().0.rope_scaling;
    assert!(matches!(explicit, RopeScaling::Yarn { attention_factor: 1.5, beta_slow: 1.0, .. }), "{explicit:?}");

    let (dynamic, _) = tiny(r#""rope_scaling":{"type":"dynamic","factor":4},"max_position_embeddings":64"#).unwrap();
    let plain = ModelConfig { rope_scaling: RopeScaling::Default, ..dynamic.clone() };
    assert_eq!(dynamic.rope_table(64), plain.rope_table(64), "as long as the model was made for");
    for (index, value) in [(0, 1.0), (1, 0.128_986_62), (3, 0.002_146_021_1), (5, 3.570_452_95e-5)] {
        // The exponent is f32, as in transformers: half its last place times ln θ.
        assert!((f64::from(dynamic.inv_freq(256)[index]) / value - 1.0).abs() < 5e-7, "{index}");
    }
    for config in [dynamic, long, factor_of] {
        let (again, _) = read(&config.to_json("bfloat16").to_string()).unwrap();
        assert_eq!(again, config);
    }
}

#[test]
fn what_is_written_is_read_back() {
    let (config, _) = tiny(
        r#""rms_norm_eps":1e-5,"rope_theta":5e5,"rope_scaling":{"rope_type":"llama3","factor":8,
        "low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":8192},"mlp_bias":true"#,
    )
    .unwrap();
    let (again, notices) = read(&config.to_json("bfloat16").to_string()).unwrap();
    assert_eq!(again, config);
    assert!(notices.is_empty(), "{notices:?}");
}

/// Sizes beyond any model are typing errors; those of the largest published ones are taken.
#[test]
fn sizes_beyond_any_model() {
    let sized = |field: &str, value: u64| {
        let mut shape: serde_json::Value = serde_json::from_str(&format!("{{{TINY}}}")).unwrap();
        shape[field] = value.into();
        read(&shape.to_string())
    };
    for (field, most) in [
        ("num_hidden_layers", 1024),
        ("hidden_size", 262_144),
        ("intermediate_size", 1_048_576),
        ("num_attention_heads", 4096),
        ("head_dim", 16_384),
        ("vocab_size", 16_777_216),
    ] {
        for value in [most + 1, 100_000_000] {
            let error = sized(field, value).unwrap_err();
            let says = format!("{field} is {value}; a whole number from 1 to {most} was expected");
            assert!(error.contains(&says) && error.contains("correct the file"), "{error}");
        }
    }
    for (field, value) in [("num_hidden_layers", 1000), ("hidden_size", 65_536), ("vocab_size", 1_048_576)] {
        sized(field, value).unwrap();
    }
}
