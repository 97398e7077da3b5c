//! What a run learnt, seen from outside: evaluations while it trains, and the text that its model goes on with.

#[path = "support/binary.rs"]
mod binary;

use binary::{accepts, folder, number, refuses};
use castor_trainer::report::log::RunLog;

const TRAIN: &str = "train --config model.json --data text.txt --max_length 16 --lr 1e-2 --lr_scheduler_type constant \
                     --add_bos false --add_eos false --backend cpu --output_dir out";

/// A model that has learnt the alphabet by heart goes on with it, from its folder and from its checkpoint.
#[test]
fn what_was_learnt_comes_out() {
    let folder = folder();
    let folder = folder.path();
    std::fs::write(folder.join("text.txt"), "abcdefghijklmnopqrstuvwxyz".repeat(20)).unwrap();
    accepts(folder, &format!("{TRAIN} --batch_size 8 --max_steps 60 --save_steps 60 --logging_steps 60"), None);
    let sample = |model: &str, more: &str| {
        let words =
            format!("sample {model} --tokenizer bytes --add_bos no --max_new_tokens 9 --backend cpu {more} --prompt");
        accepts(folder, &words, Some("opqrs"))
    };
    assert_eq!(sample("out/model", ""), "opqrstuvwxyzab\n");
    assert_eq!(sample("out", ""), "opqrstuvwxyzab\n");
    assert_eq!(sample("out/checkpoint-60", "--temperature 9 --top_k 1"), "opqrstuvwxyzab\n");
    assert_eq!(
        sample("out/model", "--device_memory 3MiB --host_memory 8MiB --mixed_precision bf16 --plugin zero3_offload"),
        "opqrstuvwxyzab\n"
    );
    let drawn = |seed: u64| sample("out/model", &format!("--top_k 20 --temperature 20 --seed {seed}"));
    assert!((1..4).any(|seed| drawn(seed) != drawn(0)), "seeds draw differently");
    let hot = |seed: &str| sample("out/model", &format!("--temperature 20 --seed {seed}"));
    assert_eq!(hot("1"), hot("1"));
    assert_ne!(hot("1"), hot("2"));

    let recorded = "sample out/checkpoint-60 --add_bos no --max_new_tokens 9 --backend cpu --prompt";
    assert_eq!(accepts(folder, recorded, Some("opqrs")), "opqrstuvwxyzab\n");
    std::fs::remove_dir_all(folder.join("out/checkpoint-60")).unwrap();
    assert_eq!(sample("out", ""), "opqrstuvwxyzab\n", "a run without checkpoints has its model");

    // The run's log says which tokenizer it had; weights that lie elsewhere say nothing.
    let alone = "sample out/model --add_bos no --max_new_tokens 9 --backend cpu --prompt";
    assert_eq!(accepts(folder, alone, Some("opqrs")), "opqrstuvwxyzab\n");
    std::fs::rename(folder.join("out/model"), folder.join("model")).unwrap();
    assert!(refuses(folder, "sample model --prompt a --backend cpu").contains("--tokenizer bytes"));
    assert!(refuses(folder, "sample nowhere --prompt a").contains("nowhere: is not there"));
    assert!(refuses(folder, "sample out --prompt a --top_k 1.5").contains("--top_k is 1.5"));
    assert!(refuses(folder, "sample out --prompt a --temperature -1").contains("--temperature is -1"));
}

/// The evaluation after a step is the loss that the next step finds on the same rows, bit for bit; each happens once.
#[test]
fn an_evaluation_sees_the_weights_after_its_step() {
    let folder = folder();
    let folder = folder.path();
    std::fs::write(folder.join("text.txt"), "The quick brown fox jumps over the lazy dog.".repeat(2)).unwrap();
    let evaluated = |words: &str| {
        accepts(folder, words, None);
        let run = RunLog::read(&folder.join("out")).unwrap().unwrap();
        std::fs::remove_dir_all(folder.join("out")).unwrap();
        run
    };
    let train = format!("{TRAIN} --shuffle false --batch_size 5 --max_steps 4 --no_save_model");
    let run = evaluated(&format!("{train} --eval_data text.txt --eval_steps 1"));
    let steps: Vec<u64> = run.evaluations.iter().map(|found| found.step).collect();
    assert_eq!(steps, [1, 2, 3, 4]);
    for (found, step) in run.evaluations.iter().zip(&run.steps[1..]) {
        assert_eq!((found.loss, found.tokens), (step.loss, 75));
    }
    let last = run.evaluations[3].loss;
    // Less often, at the end all the same; and in another folder's words, by ranks that share the rows unevenly.
    let run = evaluated(&format!("{train} --validation_file text.txt --eval_steps 3"));
    assert_eq!(run.evaluations.iter().map(|found| found.step).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(run.evaluations[1].loss, last);
    accepts(folder, &format!("run --nproc_per_node 2 {train} --eval_data text.txt"), None);
    let results = folder.join("out/eval_results.json");
    assert_eq!(number(&results, "eval_tokens"), 75.0);
    assert!(number(&results, "eval_loss").is_finite());
    assert_eq!(number(&folder.join("out/all_results.json"), "eval_loss"), number(&results, "eval_loss"));

    assert!(refuses(folder, &format!("{train} --eval_steps 2")).contains("--eval_steps is 2; it needs --eval_data"));
    let both = format!("{train} --eval_data text.txt --eval_fraction 0.5");
    assert!(refuses(folder, &both).contains("--eval_data names what to evaluate on"));
    for (input, says) in
        [("model.txt", "--eval_data model.txt: there is no such"), ("*.csv", "--eval_data *.csv: no file")]
    {
        let refused = refuses(folder, &format!("{train} --eval_data {input}"));
        assert!(refused.contains(says) && !refused.contains("--data"), "{refused}");
    }
    // What has a place of its own says which data it is about all the same.
    std::fs::write(folder.join("bad.jsonl"), "{").unwrap();
    let refused = refuses(folder, &format!("{train} --eval_data bad.jsonl"));
    assert!(refused.contains("--eval_data: bad.jsonl:1"), "{refused}");
    assert!(refuses(folder, "data pack nowhere.txt --tokenizer bytes --out packed").contains("INPUT nowhere.txt: "));
}
