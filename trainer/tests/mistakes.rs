//! What people get wrong: each mistake is named, with the way out, and what changes nothing is said.

#[path = "support/binary.rs"]
mod binary;

use binary::{accepts, folder_with_text, output, refuses};
use std::path::Path;

const TRAIN: &str = "train --config model.json --data text.txt --max_length 16 --batch_size 2 --backend cpu \
                     --device_memory 8MiB --host_memory 8MiB --output_dir out --max_steps 2";

/// The last line on standard error of a command that ends with `code`.
#[track_caller]
fn last_line(folder: &Path, words: &str, code: i32) -> String {
    let output = output(folder, words, None);
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "castor {words}\n{err}");
    err.lines().last().unwrap().to_string()
}

/// A shape that would take all memory before it could be refused for its size.
#[test]
fn a_shape_with_a_digit_too_many() {
    let folder = folder_with_text();
    let folder = folder.path();
    let shape = std::fs::read_to_string(folder.join("model.json")).unwrap();
    std::fs::write(
        folder.join("deep.json"),
        shape.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 100000"),
    )
    .unwrap();
    std::fs::write(folder.join("vast.json"), shape.replace("\"vocab_size\": 259", "\"vocab_size\": 1e30")).unwrap();
    let said = refuses(folder, "plan --config vast.json --backend cpu");
    assert!(
        said.contains("vocab_size is 1e+30; a whole number from 1 to") && said.contains("correct the file"),
        "{said}"
    );
    for words in ["plan --config deep.json --backend cpu", "train --config deep.json --data text.txt --backend cpu"] {
        let said = refuses(folder, words);
        assert!(said.contains("deep.json: num_hidden_layers is 100000; a whole number from 1 to 1024"), "{said}");
    }
}

#[test]
fn flags_of_another_command() {
    let folder = folder_with_text();
    let folder = folder.path();
    let said = refuses(folder, "export run out --output_dir out");
    assert!(said.contains("unknown flag --output_dir") && said.contains("`castor export --help`"), "{said}");
    assert!(!said.contains("did you mean"), "{said}");
    let said = refuses(folder, "export run out --dtyp fp32");
    assert!(said.contains("did you mean --dtype?"), "{said}");
    let said = refuses(folder, "data pack a --tokenizer bytes --output_dir out");
    assert!(said.contains("did you mean --out?"), "{said}");
    let said = refuses(folder, "data pack a --tokenizer bytes --lr 1");
    assert!(said.contains("`castor data pack --help`"), "{said}");
    // The same words in another order are nearer than a part of them.
    let said = refuses(folder, &format!("{TRAIN} --clip_grad 1"));
    assert!(said.contains("did you mean --grad_clip?"), "{said}");
}

#[test]
fn a_run_or_its_checkpoint_as_a_model() {
    let folder = folder_with_text();
    let folder = folder.path();
    accepts(folder, &format!("{TRAIN} --save_steps 2"), None);
    let of = |model: &str| refuses(folder, &TRAIN.replace("--config model.json", &format!("--model {model}")));
    let said = of("out/checkpoint-2");
    assert!(said.contains("out/checkpoint-2 is a checkpoint of Castor"), "{said}");
    assert!(said.contains("--resume out/checkpoint-2") && said.contains("castor export out/checkpoint-2"), "{said}");
    let said = of("out");
    assert!(said.contains("out is the folder of a run; its final model is out/model"), "{said}");
    std::fs::remove_dir_all(folder.join("out/model")).unwrap();
    let said = of("out");
    assert!(said.contains("castor export out DIR"), "{said}");
}

#[test]
fn values_out_of_range_say_the_range() {
    let folder = folder_with_text();
    let folder = folder.path();
    for (flags, says) in [
        ("--num_epochs 1e18", "--num_epochs is 1e18; a number above 0 and below 1000000000"),
        ("--lr 1e40", "--lr is 1e40; a number above 0 that fits 32 bits"),
        ("--data /dev/null", "--data /dev/null: it is neither a regular file nor a folder"),
        ("--nvme /proc", "--nvme /proc: no file can be made in it"),
        // The losses of the next step would be scaled to nothing by it.
        ("--grad_clip 1e-45 --clip lagged", "--grad_clip is 1e-45; 0 (off) or a number from 1e-12"),
        ("--growth_interval 4294967296", "--growth_interval is 4294967296; a whole number from 1 to 4294967295"),
    ] {
        let train = if flags.starts_with("--data") { TRAIN.replace("--data text.txt ", "") } else { TRAIN.into() };
        let said = refuses(folder, &format!("{train} {flags}"));
        assert!(said.contains(says), "{flags}: {said}");
    }
    let named = output(folder, &format!("{TRAIN} --tokenizer"), Some(""));
    let said = String::from_utf8_lossy(&named.stderr).into_owned();
    assert!(
        named.status.code() == Some(2) && said.contains("--tokenizer names nothing; give a tokenizer.json"),
        "{said}"
    );
    let said = last_line(folder, &format!("{TRAIN} --device_memory 4KiB"), 3);
    assert!(said.contains("the budget of 4096 bytes is short by"), "{said}");
}

/// A snapshot that does not fit is one user of memory, and the way out is named.
#[test]
fn a_snapshot_that_does_not_fit() {
    let folder = folder_with_text();
    let folder = folder.path();
    let said = last_line(folder, &format!("{TRAIN} --save_steps 2 --async_save on --host_memory 100KiB"), 3);
    let users = said.split("largest users: ").nth(1).unwrap();
    assert_eq!(users.matches("snapshot ").count(), 1, "{said}");
    assert!(said.contains("--async_save off takes no snapshot"), "{said}");
    let without = last_line(folder, &format!("{TRAIN} --device_memory 100KiB --save_steps 2"), 3);
    assert!(!without.contains("async_save"), "{without}");
}

/// Where a disk is given, it may be that which is too small.
#[test]
fn a_disk_that_does_not_hold_what_the_host_cannot() {
    let folder = folder_with_text();
    let flags = "--plugin gemini_auto --device_memory 600KiB --host_memory 100KiB --nvme . --nvme_capacity 4KiB";
    let said = last_line(folder.path(), &format!("{TRAIN} {flags}"), 3);
    assert!(said.contains("host memory: the budget of") && said.contains("or --nvme_capacity of a disk"), "{said}");
}

/// The final model of a run on bytes has no tokenizer; the run's log says what it was trained with.
#[test]
fn a_model_of_a_run_on_bytes_goes_on_with_them() {
    let folder = folder_with_text();
    let folder = folder.path();
    accepts(folder, TRAIN, None);
    let on = TRAIN.replace("--config model.json", "--model out/model").replace("--output_dir out", "--output_dir on");
    accepts(folder, &on, None);
    accepts(folder, &on.replace("out/model", "on/model").replace("--output_dir on", "--output_dir further"), None);
    std::fs::rename(folder.join("out/model"), folder.join("alone")).unwrap();
    let said = refuses(folder, &on.replace("out/model", "alone"));
    assert!(said.contains("--tokenizer alone: alone/tokenizer.json is not there"), "{said}");
}

/// Flags that nothing reads are accepted with a line, or refused where one can only be a mistake.
#[test]
fn flags_without_effect() {
    let folder = folder_with_text();
    let folder = folder.path();
    let notices = |flags: &str| {
        let output = output(folder, &format!("{TRAIN} {flags}"), None);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{flags}: {err}");
        err.lines().filter(|line| line.contains("changes nothing")).map(str::to_owned).collect::<Vec<_>>()
    };
    for (flags, says) in [
        ("--loss_scale 128", "--loss_scale 128 is accepted and changes nothing: the loss is scaled with"),
        ("--bf16 --hysteresis 4", "--hysteresis 4 is accepted and changes nothing"),
        ("--sophia_rho 0.1", "--sophia_rho 0.1 is accepted and changes nothing: only --optimizer sophia"),
        ("--min_lr_ratio 0.1", "--min_lr_ratio 0.1 is accepted and changes nothing"),
        ("--data_seed 3 --shuffle false", "--data_seed 3 is accepted and changes nothing"),
        ("--save_total_limit 2", "--save_total_limit 2 is accepted and changes nothing: the run saves no checkpoint"),
        ("--async_save on", "--async_save on is accepted and changes nothing"),
        ("--token_format llmc", "--token_format is accepted and changes nothing: there is text only"),
    ] {
        let said = notices(flags);
        assert!(said.len() == 1 && said[0].contains(says), "{flags}: {said:?}");
    }
    assert!(notices("--fp16 --loss_scale 128 --hysteresis 2").is_empty());
    for flag in ["nvme_capacity 1GiB", "nvme_endurance 600", "emulated_nvme_read_gbps 1", "emulated_nvme_write_gbps 1"]
    {
        let said = refuses(folder, &format!("{TRAIN} --{flag}"));
        assert!(said.contains("it needs --nvme with the folder to use"), "{flag}: {said}");
    }
}
