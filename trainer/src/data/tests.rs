//! Data as people have it, decided by name.

use std::path::{Path, PathBuf};

mod chats;
mod formats;
mod words;

use super::text::tokenize;
use super::{DataSpec, OnBadRecord, PackedRows, TokenFile, TokenFormat, Tokenizer, open, pack};
use crate::source::Rows;
use crate::step_rows::StepRows;

/// The documents of `path` as text, or the refusal.
fn documents(path: &Path, on_bad_record: OnBadRecord) -> Result<(Vec<String>, Vec<String>), String> {
    let spec = DataSpec { on_bad_record, bos: false, eos: false, ..DataSpec::new(vec![]) };
    let (mut texts, mut notices) = (Vec::new(), Vec::new());
    tokenize(&spec, &Tokenizer::bytes(), &[path.to_path_buf()], &mut notices, &mut |ids| {
        texts.push(String::from_utf8(ids.iter().map(|id| *id as u8).collect()).unwrap());
        Ok(())
    })
    .map_err(|e| {
        assert_eq!(e.exit_code(), 2);
        e.to_string()
    })?;
    Ok((texts, notices))
}

fn cases(name: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases")).join(name);
    if !path.is_dir() {
        eprintln!("skipped: the shared cases are not here");
        return None;
    }
    Some(path)
}

#[test]
fn every_shared_text_file_is_decided() {
    let Some(folder) = cases("odd_data") else {
        return;
    };
    let decided: &[(&str, Result<&[&str], &str>)] = &[
        ("json_array.json", Ok(&["a", "b"])),
        ("jsonl_array_rows.jsonl", Err(":1: an object with \"text\" was expected")),
        ("jsonl_blank_lines.jsonl", Ok(&["a", "b"])),
        ("jsonl_crlf.jsonl", Ok(&["a", "b"])),
        ("jsonl_lone_surrogate.jsonl", Err(":1: not valid JSON")),
        ("jsonl_non_utf8.jsonl", Err(":1: byte 0xe9 at column 13 is not UTF-8")),
        ("jsonl_null_text.jsonl", Err(":1: \"text\" is null")),
        ("jsonl_ok.jsonl", Ok(&["a", "b"])),
        ("jsonl_raw_control.jsonl", Err(":1: not valid JSON: control character")),
        ("jsonl_u_2028.jsonl", Ok(&["a\u{2028}b"])),
        ("parquet_binary.parquet", Err(":1: \"text\" in this row is not UTF-8")),
        ("parquet_large_string.parquet", Ok(&["a"])),
        ("parquet_truncated.parquet", Err("damaged or cut off")),
        ("txt_blank.txt", Ok(&["a", "b"])),
        ("txt_cr_only.txt", Ok(&["a\rb"])),
        ("txt_empty.txt", Ok(&[])),
        ("txt_non_utf8.txt", Err(":1: byte 0xe9 at offset 3 is not UTF-8")),
        ("txt_u_2028_ff.txt", Ok(&["a\u{2028}b\u{c}c\u{85}d"])),
    ];
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), decided.len() + 1, "a case is not decided");
    for (name, decision) in decided {
        match (documents(&folder.join(name), OnBadRecord::Stop), decision) {
            (Ok((texts, _)), Ok(expected)) => assert_eq!(texts, *expected, "{name}"),
            (Err(error), Err(says)) => {
                assert!(error.contains(says) && error.contains(name), "{name}: {error}");
            }
            (read, _) => panic!("{name}: {read:?}"),
        }
    }
    let (texts, notices) = documents(&folder.join("jsonl_null_text.jsonl"), OnBadRecord::Skip).unwrap();
    assert_eq!(texts, ["b"]);
    assert!(notices[0].contains("1 record was skipped") && notices[0].contains(":1:"), "{notices:?}");
    // An empty file is no error among others; alone it is.
    let spec = DataSpec::new(vec![folder.join("txt_empty.txt").display().to_string()]);
    let error = open(&spec, "bytes", 8, 259).unwrap_err().to_string();
    assert!(error.contains("the data is empty: no token was found in 1 file;"), "{error}");
    let bad = tempfile::Builder::new().suffix(".jsonl").tempfile().unwrap();
    std::fs::write(bad.path(), "{\"text\": 3}\n{\"txt\": 1}\n{\"text\": \"\"}\n").unwrap();
    let spec = DataSpec { on_bad_record: OnBadRecord::Skip, ..DataSpec::new(vec![bad.path().display().to_string()]) };
    let empty = open(&spec, "bytes", 8, 259).unwrap_err().to_string();
    for part in ["the data is empty", "2 records were skipped", "1 empty document was left out"] {
        assert!(empty.contains(part), "no {part:?} in {empty}");
    }
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(pack(&spec, &Tokenizer::bytes(), folder.path()).unwrap_err().to_string(), empty);
}

#[test]
fn records_that_no_shared_file_holds() {
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        documents(&path, OnBadRecord::Stop)
    };
    assert!(read("a.jsonl", "{\"text\":\"a\"}{\"text\":\"b\"}").unwrap_err().contains("trailing characters"));
    assert!(read("a.jsonl", "{\"text\":\"a\"}\n{\"txt\":1}").unwrap_err().contains(":2: there is no \"text\""));
    assert!(read("a.jsonl", "{\"messages\":[]}").unwrap_err().contains("at least one message"));
    assert!(read("a.json", "{\"data\":[]}").unwrap_err().contains("\"data\""));
    assert!(read("a.jsonl.gz", "x").unwrap_err().contains("damaged or cut off"));
    assert!(read("a.jsonl.xz", "x").unwrap_err().contains("unpack it first"));
    assert_eq!(read("a.jsonl", "\u{FEFF}{\"text\":\"a\"}").unwrap().0, ["a"]);
    assert_eq!(read("a.txt", "a\r\nb\r\n\r\n \nc").unwrap().0, ["a\r\nb", "c"]);
    assert_eq!(read("a.txt", "\n\na\r\rb\r\n\t\r\nc\n\n").unwrap().0, ["a", "b", "c"]);
    assert_eq!(read("a.rs", "a\n\nb\n").unwrap().0, ["a\n\nb\n"]);
    let (texts, notices) = read("a.jsonl", "{\"text\":\"\"}\n{\"text\":\"b\"}").unwrap();
    assert_eq!(texts, ["b"]);
    assert!(notices[0].contains("1 empty document was left out"), "{notices:?}");
}

#[test]
fn every_shared_token_file_is_decided() {
    let Some(folder) = cases("token_bins") else {
        return;
    };
    let refused = |name: &str, says: &str| {
        let error = TokenFile::open(&folder.join(name), None).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(says), "{name}: {error}");
    };
    refused("bad_magic.bin", "the magic of no known token file");
    refused("gpt2_v2.bin", "version 2");
    refused("count_too_small.bin", "the header states");
    refused("odd_byte.bin", "the file has 3025");
    refused("eval_magic.bin", "evaluation file");
    refused("nanogpt_train.bin", "--token_format nanogpt");
    refused("megatron_bad_dtype.bin", "unknown dtype code 42");
    let over = TokenFile::open(&folder.join("ids_over_vocab97.bin"), None).unwrap();
    let error = over.check_vocabulary(97).unwrap_err().to_string();
    assert!(error.contains("vocab_size 97") && error.contains("byte"), "{error}");
    let nano = TokenFile::open(&folder.join("nanogpt_train.bin"), Some(TokenFormat::NanoGpt)).unwrap();
    assert_eq!(nano.len(), 1000);
    let read = |name: &str| {
        let file = TokenFile::open(&folder.join(name), None).unwrap();
        assert_eq!((file.len(), file.documents()), (1000, Some(3)), "{name}");
        let mut ids = vec![0; 1000];
        file.read(0, &mut ids);
        ids
    };
    assert_eq!(read("megatron_u16.bin"), read("megatron_i32.bin"));
}

#[test]
fn an_index_of_another_run_is_refused() {
    let Some(cases) = cases("token_bins") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let (bin, idx) = (folder.path().join("a.bin"), folder.path().join("a.idx"));
    std::fs::copy(cases.join("megatron_i32.bin"), &bin).unwrap();
    std::fs::copy(cases.join("megatron_u16.idx"), &idx).unwrap();
    let error = TokenFile::open(&bin, None).unwrap_err().to_string();
    assert!(error.contains("different runs"), "{error}");
    // What lies beside the tokens says what they are, whatever the flag says.
    for (format, name) in [(TokenFormat::NanoGpt, "nanogpt"), (TokenFormat::LlmC, "llmc")] {
        let error = TokenFile::open(&bin, Some(format)).unwrap_err().to_string();
        assert!(error.contains("a.idx") && error.contains(&format!("--token_format is {name}")), "{error}");
    }
    std::fs::write(&idx, "notes").unwrap();
    assert_eq!(TokenFile::open(&bin, Some(TokenFormat::NanoGpt)).unwrap().len(), 2000);
}

#[test]
fn rows_beyond_two_gibibytes_are_found() {
    use std::os::unix::fs::FileExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.bin");
    let tokens = (5u64 << 30) / 2;
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(tokens * 2).unwrap();
    file.write_all_at(&[7, 0, 8, 0, 9, 0, 10, 0], tokens * 2 - 8).unwrap();
    let file = TokenFile::open(&path, Some(TokenFormat::NanoGpt)).unwrap();
    let rows = PackedRows::from_files(vec![file], 4).unwrap();
    let (mut ids, mut labels) = ([0; 4], [0; 4]);
    rows.row(rows.len() - 1, &mut ids, &mut labels).unwrap();
    assert_eq!((ids, labels), ([7, 8, 9, 10], [7, 8, 9, 10]));
}

#[test]
fn packing_keeps_every_token_and_what_is_packed_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, "{\"text\":\"abc\"}\n{\"text\":\"de\"}\n").unwrap();
    let spec = DataSpec::new(vec![path.display().to_string()]);
    let tokenizer = Tokenizer::bytes();
    let expected = [256, 97, 98, 99, 257, 256, 100, 101, 257];
    let check = |rows: &PackedRows| {
        let (mut ids, mut labels) = ([0; 4], [0; 4]);
        for row in 0..2 {
            rows.row(row, &mut ids, &mut labels).unwrap();
            assert_eq!(ids, expected[4 * row as usize..][..4]);
            assert_eq!(ids, labels);
        }
        assert_eq!((rows.len(), rows.remainder()), (2, 1));
    };
    let (rows, notices) = open(&spec, "bytes", 4, 259).unwrap();
    check(&rows);
    assert!(notices[0].contains("9 tokens from 2 documents"), "{notices:?}");
    assert!(notices[0].contains("with BOS 256 and EOS 257"), "{notices:?}");
    assert!(notices[1].contains("1 token left over"), "{notices:?}");

    let out = folder.path().join("packed");
    let summary = pack(&spec, &tokenizer, &out).unwrap();
    assert_eq!((summary.tokens, summary.documents), (9, 2));
    let packed = DataSpec::new(vec![out.join("tokens.bin").display().to_string()]);
    check(&open(&packed, "bytes", 4, 259).unwrap().0);
    let folder_of_tokens = DataSpec::new(vec![out.display().to_string()]);
    check(&open(&folder_of_tokens, "bytes", 4, 259).unwrap().0);
    assert!(pack(&spec, &tokenizer, &out).unwrap_err().to_string().contains("exists already"));

    let short = open(&spec, "bytes", 10, 259).unwrap_err().to_string();
    assert!(short.contains("has 9 tokens") && short.contains("at least 10"), "{short}");
    let small = open(&spec, "bytes", 4, 258).unwrap_err().to_string();
    assert!(small.contains("vocab_size is 258") && small.contains("259"), "{small}");
}

#[test]
fn rows_know_where_documents_begin_however_they_are_stored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    std::fs::write(&path, "{\"text\":\"abc\"}\n{\"text\":\"h\"}\n{\"text\":\"defg\"}\n").unwrap();
    let ask = |input: &std::path::Path| {
        let mut spec = DataSpec::new(vec![input.display().to_string()]);
        spec.document_mask = true;
        spec
    };
    // 256 97 98 99 257 | 256 104 257 | 256 100 101 102 103 257, in rows of six.
    let expected = [[0, 0, 0, 0, 0, 5], [0, 0, 2, 2, 2, 2]];
    let check = |rows: &PackedRows| {
        for (row, expected) in expected.iter().enumerate() {
            let (mut ids, mut labels, mut starts) = ([0; 6], [0; 6], [0; 6]);
            rows.row(row as u64, &mut ids, &mut labels).unwrap();
            rows.starts(row as u64, &ids, &mut starts).unwrap();
            assert_eq!(starts, *expected, "{ids:?}");
        }
        let mut batch = StepRows::new(6, true);
        batch.fill(rows, &[vec![Some(1), None]]).unwrap();
        let micro = batch.micros().next().unwrap();
        assert_eq!(micro.starts.unwrap()[..6], expected[1]);
        // A document's first token is asked of nobody.
        assert_eq!(micro.labels[..4], [-100, 257, -100, 100]);
    };
    check(&open(&ask(&path), "bytes", 6, 259).unwrap().0);

    let out = folder.path().join("packed");
    pack(&ask(&path), &Tokenizer::bytes(), &out).unwrap();
    let tokens = out.join("tokens.bin");
    check(&open(&ask(&tokens), "no such tokenizer", 6, 259).unwrap().0);
    let index = out.join("tokens.documents");
    let starts: Vec<u8> = [0u64, 5, 8].iter().flat_map(|start| start.to_le_bytes()).collect();
    assert_eq!(std::fs::read(&index).unwrap(), starts);

    std::fs::write(&index, &starts[8..]).unwrap();
    let error = open(&ask(&tokens), "bytes", 6, 259).unwrap_err().to_string();
    assert!(error.contains("tokens.documents") && error.contains("different runs"), "{error}");
    std::fs::remove_file(&index).unwrap();
    let (rows, notices) = open(&ask(&tokens), "bytes", 6, 259).unwrap();
    check(&rows);
    assert!(notices[0].contains("told apart by BOS 256 and EOS 257"), "{notices:?}");
    let error = open(&ask(&tokens), "no such tokenizer", 6, 259).unwrap_err().to_string();
    assert!(error.contains("--document_mask needs BOS or EOS of --tokenizer no such tokenizer"), "{error}");
}

#[test]
fn a_tokenizer_file_is_read_with_its_special_ids() {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary = r#"{"version":"1.0","added_tokens":[
        {"id":3,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},
        {"id":4,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
        "normalizer":null,"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
        "truncation":{"direction":"Right","max_length":1,"strategy":"LongestFirst","stride":0},"padding":null,
        "model":{"type":"WordLevel","vocab":{"a":0,"b":1,"?":2},"unk_token":"?"}}"#;
    std::fs::write(folder.path().join("tokenizer.json"), vocabulary).unwrap();
    let name = folder.path().display().to_string();
    let tokenizer = Tokenizer::open(&name).unwrap();
    assert_eq!((tokenizer.vocabulary(), tokenizer.bos(), tokenizer.eos()), (5, Some(3), Some(4)));
    let mut ids = Vec::new();
    tokenizer.encode("b a zebra", &mut ids).unwrap();
    assert_eq!(ids, [1, 0, 2]);
    assert!(tokenizer.check_fits(5).is_ok() && tokenizer.check_fits(4).is_err());

    let config = r#"{"model_max_length": 1000000000000000019884624838656, "eos_token": {"content": "b"}}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    assert_eq!(Tokenizer::open(&name).unwrap().eos(), Some(1));
    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    assert!(Tokenizer::open(&name).is_err_and(|e| e.to_string().contains("line 1")));
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    std::fs::write(folder.path().join("tokenizer.model"), "x").unwrap();
    assert!(Tokenizer::open(&name).is_err_and(|e| e.to_string().contains("sentencepiece")));
}
