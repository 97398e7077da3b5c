//! Instruction data through whole runs: the loss is the mean over the tokens that count, wherever they are.

#[path = "support/binary.rs"]
mod binary;

use binary::{accepts, folder};
use castor_trainer::report::log::RunLog;
use std::path::Path;

/// Three rows of 16 tokens: none of the first counts, 3 of the second, 11 of the third.
const RECORDS: &str = "{\"prompt\": \"twenty-eight bytes of prompt\", \"completion\": \"ok\"}\n\
                       {\"prompt\": \"four\", \"completion\": \"ten bytes.\"}\n";

fn train(folder: &Path, ranks: u32, more: &str) -> castor_trainer::report::log::Run {
    let words = "train --config model.json --data data.jsonl --max_length 16 --shuffle false --lr 1e-3 --backend cpu \
                 --no_save_model --output_dir out --plugin zero3";
    match ranks {
        1 => accepts(folder, &format!("{words} {more}"), None),
        _ => accepts(folder, &format!("run --nproc_per_node {ranks} {words} {more}"), None),
    };
    let run = RunLog::read(&folder.join("out")).unwrap().unwrap();
    std::fs::remove_dir_all(folder.join("out")).unwrap();
    run
}

/// However the rows are cut into micro-batches and dealt to ranks, some with nothing that counts, loss, norm and the
/// next step's loss are the same but for the order of sums.
#[test]
fn the_mean_is_over_tokens_that_count() {
    let folder = folder();
    let folder = folder.path();
    std::fs::write(folder.join("data.jsonl"), RECORDS).unwrap();
    let whole = train(folder, 1, "--batch_size 3 --max_steps 2");
    assert_eq!(whole.steps[0].counted_tokens, 14);
    let near = |a: f64, b: f64| (a - b).abs() < 1e-5 * b.abs();
    for (ranks, more) in [
        (1, "--batch_size 1 --gradient_accumulation_steps 3"),
        (2, "--batch_size 1 --gradient_accumulation_steps 2"),
        (3, "--batch_size 1"),
    ] {
        let run = train(folder, ranks, &format!("{more} --max_steps 2"));
        for (step, expected) in run.steps.iter().zip(&whole.steps) {
            assert_eq!(step.counted_tokens, 14);
            assert!(near(step.loss, expected.loss), "{ranks} ranks: {} and {}", step.loss, expected.loss);
            assert!(near(step.grad_norm, expected.grad_norm), "{ranks} ranks");
        }
    }
    // Row by row: the first step has nothing to learn from and says so; the others' losses make up the mean.
    let rows = train(folder, 1, "--batch_size 1 --max_steps 3 --lr 1e-30");
    let counted: Vec<u64> = rows.steps.iter().map(|step| step.counted_tokens).collect();
    assert_eq!(counted, [0, 3, 11]);
    assert!(rows.steps[0].skipped && rows.steps[0].loss.is_nan() && !rows.steps[1].skipped);
    let mean = (3.0 * rows.steps[1].loss + 11.0 * rows.steps[2].loss) / 14.0;
    assert!(near(mean, whole.steps[0].loss), "{mean} and {}", whole.steps[0].loss);
}

/// Packed instruction data trains as the records do.
#[test]
fn packed_records_train_alike() {
    let folder = folder();
    let folder = folder.path();
    std::fs::write(folder.join("data.jsonl"), RECORDS).unwrap();
    let expected = train(folder, 1, "--batch_size 3 --max_steps 2 --eval_data data.jsonl");
    let said = accepts(folder, "data pack data.jsonl --tokenizer bytes --out packed", None);
    assert!(said.contains("48 tokens (14 count in the loss) of 2 documents"), "{said}");
    std::fs::rename(folder.join("data.jsonl"), folder.join("records")).unwrap();
    std::fs::rename(folder.join("packed"), folder.join("data.jsonl")).unwrap();
    let packed = train(folder, 1, "--batch_size 3 --max_steps 2 --eval_data data.jsonl");
    for (step, expected) in packed.steps.iter().zip(&expected.steps) {
        assert_eq!((step.loss, step.grad_norm, step.counted_tokens), (expected.loss, expected.grad_norm, 14));
    }
    assert_eq!(packed.evaluations, expected.evaluations);
}
