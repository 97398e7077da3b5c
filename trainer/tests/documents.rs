//! Document masks: a row of packed documents is what each document is alone.

#[path = "support/binary.rs"]
mod binary;
mod support;

use binary::{accepts, folder, refuses};
use castor_kernels::cpu::{Cpu, CpuOptions};
use castor_kernels::{Backend, DType, ops::IGNORED};
use castor_runtime::{GroupId, plan::Rehearse, policy::DevicePolicy};
use castor_trainer::{
    activations::{Keep, LOGITS_BYTES},
    blueprint::{Blueprint, Options, formats},
    config::{Family, ModelConfig, RopeScaling},
    engine::{Engine, StepInputs},
    inputs::MicroBatch,
    rates::Rates,
    report::log::RunLog,
    weights::RandomWeights,
};
use std::sync::Arc;
use support::{constant, plenty};

/// Documents of two rows: their borders fall before, on and behind the border of the attention's tiles of 64.
const ROWS: [&[usize]; 2] = [&[61, 3, 1, 39], &[70, 34]];
const SEQUENCE: usize = 104;
const VOCABULARY: i32 = 97;

/// Sums in another order: a document's place within the tiles differs. An error of 1e-5 is a hundred roundings of
/// f32, in numbers that are sums of thousands of products.
const ORDER: f64 = 1e-5;

fn options(sequence: u64, batch: u64, document_mask: bool, fused_attention: bool) -> Options {
    let config = ModelConfig {
        family: Family::Llama,
        sliding_window: None,
        token_ids: std::collections::BTreeMap::new(),
        vocab_size: VOCABULARY as u64,
        hidden_size: 48,
        intermediate_size: 80,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 12,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::Default,
        max_position_embeddings: 128,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: false,
        // Large enough for attention to prefer some tokens over others.
        initializer_range: 0.3,
    };
    Options {
        batch,
        sequence,
        micro_batches: 1,
        round: 1,
        formats: formats(DType::F32, DType::F32, DType::F32),
        sharding: castor_runtime::layout::Sharding { parameters: true, gradients: true, optimizer: true },
        shards: None,
        keep: vec![Keep::Block, Keep::All],
        first_keep: Keep::All,
        sync_each_batch: false,
        snapshots: false,
        fused_attention,
        document_mask,
        deterministic: true,
        logits_bytes: LOGITS_BYTES,
        optimizer: None,
        max_norm: 0.0,
        clip: castor_trainer::optimizer::Clip::Exact,
        updates_on_host: 0,
        schedule: constant(0.0),
        loss_scale: None,
        seed: 5,
        evaluates: true,
        config,
    }
}

fn engine(options: Options) -> Engine {
    let cpu = Cpu::new(CpuOptions { device_bytes: Some(plenty().device), threads: Some(1), ..CpuOptions::default() });
    let backend: Arc<dyn Backend> = Arc::new(cpu.unwrap());
    let blueprint = Blueprint::new(options, backend.as_ref());
    let plan = blueprint
        .plan(backend.as_ref(), &Rates::assumed("cpu"), &DevicePolicy, plenty(), None, Rehearse::ToRun)
        .unwrap();
    let mut engine = Engine::new(backend, &blueprint, plan).unwrap();
    let weights = RandomWeights::new(&engine.options().config.clone(), 7);
    engine.load(&weights).unwrap();
    engine
}

/// What a model makes of rows: logits, sum of losses, gradient of the mean over `tokens`.
struct Found {
    logits: Vec<f32>,
    loss: f64,
    gradient: Vec<f32>,
}

fn compute(engine: &mut Engine, micro: MicroBatch, tokens: u64) -> Found {
    let mut places = Vec::new();
    let loss = engine.observe(&[micro], &mut |_, _, view| {
        places.push(view);
        Ok(())
    });
    let loss = loss.unwrap();
    // One chunk of logits: it stays where it is until something else is computed.
    let [view] = places[..] else { panic!("the logits came in {} pieces", places.len()) };
    let mut logits = vec![0f32; view.span.bytes as usize / 4];
    let backend = Arc::clone(engine.manager().backend());
    backend.download(view.span, bytemuck::cast_slice_mut(&mut logits)).unwrap();
    engine.gradients(&StepInputs { micros: &[micro], tokens }).unwrap();
    let groups = engine.groups().count() as u32;
    let gradient = (0..groups).flat_map(|group| engine.read_gradient(GroupId(group), 1.0).unwrap()).collect();
    Found { logits, loss, gradient }
}

fn apart(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b))) / norm(&mut b.iter().map(|b| f64::from(*b)))
}

#[test]
fn a_packed_row_is_its_documents_alone() {
    let ids: Vec<i32> = (0..2 * SEQUENCE as i32).map(|t| (t * t + 31 * t / 7) % VOCABULARY).collect();
    let (mut labels, mut starts) = (ids.clone(), Vec::new());
    for (row, lengths) in ROWS.iter().enumerate() {
        assert_eq!(lengths.iter().sum::<usize>(), SEQUENCE);
        let mut start = 0;
        for length in *lengths {
            labels[row * SEQUENCE + start] = IGNORED;
            starts.extend(std::iter::repeat_n(start as i32, *length));
            start += length;
        }
    }
    let packed = MicroBatch { ids: &ids, labels: &labels, starts: Some(&starts) };
    let tokens = packed.counted(SEQUENCE as u64);
    for fused in [true, false] {
        let together = compute(&mut engine(options(SEQUENCE as u64, 2, true, fused)), packed, tokens);
        let (mut logits, mut loss, mut gradient) = (Vec::new(), 0.0, vec![0f32; together.gradient.len()]);
        let mut begin = 0;
        for length in ROWS.concat() {
            let part = begin..begin + length;
            let alone = MicroBatch { ids: &ids[part.clone()], labels: &labels[part], starts: None };
            let found = compute(&mut engine(options(length as u64, 1, false, fused)), alone, tokens);
            logits.extend(found.logits);
            loss += found.loss;
            gradient.iter_mut().zip(&found.gradient).for_each(|(sum, part)| *sum += part);
            begin += length;
        }
        assert!(apart(&together.logits, &logits) <= ORDER, "fused {fused}: logits");
        assert!((together.loss - loss).abs() <= ORDER * loss, "fused {fused}: {} and {loss}", together.loss);
        let error = apart(&together.gradient, &gradient);
        assert!(error <= ORDER, "fused {fused}: gradient, {error:.1e}");

        // Without the mask it is another thing altogether.
        let unmasked = MicroBatch { starts: None, ..packed };
        let seen = compute(&mut engine(options(SEQUENCE as u64, 2, false, fused)), unmasked, tokens);
        assert!(apart(&seen.logits, &logits) > 0.01 && apart(&seen.gradient, &gradient) > 0.01);
    }
}

#[test]
fn starts_that_are_none_are_refused() {
    let mut engine = engine(options(4, 1, true, true));
    for (starts, part) in [
        (&[0, 0, 3, 3][..], "token 2 of a row starts at 3; between 0 and 2"),
        (&[0, 1, 0, 0], "token 2 of a row starts at 0; between 1 and 2"),
        (&[0, 0, 0], "a micro-batch of 4 tokens has 3 document starts"),
    ] {
        let micro = MicroBatch { ids: &[1; 4], labels: &[1; 4], starts: Some(starts) };
        let error = engine.evaluate(&[micro]).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// A run on rows of two documents with the mask is the run on rows of one document each: on one rank and on two, in
/// steps and evaluation, from text and from packed tokens.
#[test]
fn a_masked_run_is_that_of_documents_in_rows_of_their_own() {
    let folder = folder();
    let folder = folder.path();
    // With BOS and EOS each document has 8 tokens.
    std::fs::write(folder.join("data.txt"), "abcdef\n\nghijkl\n\nmnopqr\n\nstuvwx\n").unwrap();
    accepts(folder, "data pack data.txt --tokenizer bytes --out packed", None);
    let train = |launch: &str, more: &str| {
        let words = "train --config model.json --shuffle false --lr 1e-3 --max_steps 3 --num_epochs 3 --backend cpu \
                     --no_save_model --output_dir out --plugin zero3";
        accepts(folder, &format!("{launch} {words} {more}"), None);
        let run = RunLog::read(&folder.join("out")).unwrap().unwrap();
        std::fs::remove_dir_all(folder.join("out")).unwrap();
        run
    };
    let data = |name: &str| format!("--data {name} --eval_data {name}");
    let alone = train("", &format!("{} --max_length 8 --batch_size 4", data("data.txt")));
    assert_eq!(alone.steps[0].counted_tokens, 28);
    let near = |a: f64, b: f64| (a - b).abs() <= ORDER * b.abs();
    for (launch, name, batch) in
        [("", "data.txt", 2), ("", "packed", 2), ("run --nproc_per_node 2", "packed/tokens.bin", 1)]
    {
        let more = format!("{} --max_length 16 --batch_size {batch} --document_mask", data(name));
        let masked = train(launch, &more);
        assert_eq!(masked.steps.len(), 3);
        for (step, expected) in masked.steps.iter().zip(&alone.steps) {
            assert_eq!(step.counted_tokens, expected.counted_tokens);
            assert!(near(step.loss, expected.loss), "{name}: {} and {}", step.loss, expected.loss);
            assert!(near(step.grad_norm, expected.grad_norm), "{name}: {} and {}", step.grad_norm, expected.grad_norm);
        }
        let (found, expected) = (&masked.evaluations[0], &alone.evaluations[0]);
        assert!(near(found.loss, expected.loss), "{name}: {} and {}", found.loss, expected.loss);
    }
}

#[test]
fn a_checkpoint_says_whether_documents_were_masked() {
    let folder = folder();
    let folder = folder.path();
    std::fs::write(folder.join("data.txt"), "abcdef\n\nghijkl\n").unwrap();
    let words =
        "train --config model.json --data data.txt --max_length 16 --backend cpu --no_save_model --output_dir out";
    accepts(folder, &format!("{words} --document_mask --max_steps 1 --save_steps 1"), None);
    let said = refuses(folder, &format!("{words} --max_steps 2 --num_epochs 2 --resume"));
    assert!(said.contains("data.document_mask true") && said.contains("--document_mask"), "{said}");
}
