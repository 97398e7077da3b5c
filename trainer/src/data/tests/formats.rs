//! Compressed and columnar files hold the same documents as plain ones.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::super::{DataSpec, OnBadRecord, open};
use super::documents;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data")).join(name)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_files_are_read_as_what_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let read = |path: &Path| documents(path, OnBadRecord::Stop);
    let lines = b"{\"text\":\"a\"}\n{\"text\":\"b\"}\n";
    // Members one after the other, as parallel compressors write them, cut in the middle of a line.
    let members = [gzip(&lines[..5]), gzip(&lines[5..])].concat();
    assert_eq!(read(&write("a.jsonl.gz", &members)).unwrap().0, ["a", "b"]);
    assert_eq!(read(&write("a.txt.gz", &gzip(b"a\n\nb"))).unwrap().0, ["a", "b"]);
    assert_eq!(read(&write("a.json.gz", &gzip(b" [{\"text\":\"a\"}]"))).unwrap().0, ["a"]);
    // Two frames with checksums and a skippable one between them.
    assert_eq!(read(&fixture("two.jsonl.zst")).unwrap().0, ["a", "b"]);

    let cut = read(&write("cut.jsonl.gz", &members[..members.len() - 9])).unwrap_err();
    assert!(cut.contains("cut.jsonl.gz: is damaged or cut off"), "{cut}");
    let frames = std::fs::read(fixture("two.jsonl.zst")).unwrap();
    for cut in [frames.len() - 1, frames.len() - 10, 25, 2] {
        assert!(read(&write("cut.jsonl.zst", &frames[..cut])).unwrap_err().contains("cut off"), "{cut}");
    }
    let mut wrong = frames.clone();
    *wrong.last_mut().unwrap() ^= 1;
    assert!(read(&write("wrong.jsonl.zst", &wrong)).unwrap_err().contains("a checksum does not match"));
}

#[test]
fn every_form_of_a_parquet_column_gives_the_same_rows() {
    for name in [
        "snappy_dictionary.parquet",
        "zstd_v2.parquet",
        "gzip_delta.parquet",
        "dictionary_type.parquet",
        "binary_plain.parquet",
    ] {
        let (texts, notices) = documents(&fixture(name), OnBadRecord::Skip).unwrap();
        assert_eq!(texts, ["first", "zwei\nZeilen", "čtyři", "first"], "{name}");
        assert!(notices[0].contains("1 record was skipped") && notices[0].contains(":3: \"text\""), "{notices:?}");
        assert!(notices[1].contains("1 empty document"), "{notices:?}");
    }
    let refused = |name: &str, column: &str| {
        let spec = DataSpec { text_field: column.into(), ..DataSpec::new(vec![fixture(name).display().to_string()]) };
        let error = open(&spec, "bytes", 4, 259).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        error
    };
    assert!(refused("snappy_dictionary.parquet", "text").contains(":3: \"text\" in this row is null"));
    assert!(refused("snappy_dictionary.parquet", "body").contains("the file has \"id\", \"text\""));
    assert!(refused("snappy_dictionary.parquet", "id").contains("holds INT64, strings were expected"));
    assert!(refused("no_rows.parquet", "text").contains("0 rows"));
    assert!(refused("brotli.parquet", "text").contains("BROTLI"));
}

/// Damage is said, whatever byte it is in, and never a panic.
#[test]
fn damaged_parquet_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    for name in ["snappy_dictionary.parquet", "zstd_v2.parquet"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        for cut in (0..whole.len()).step_by(7) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(documents(&path, OnBadRecord::Skip).unwrap_err().contains("a.parquet: "), "{name} cut at {cut}");
        }
        for place in 0..whole.len() {
            let mut wrong = whole.clone();
            wrong[place] ^= 0x55;
            std::fs::write(&path, &wrong).unwrap();
            let _ = documents(&path, OnBadRecord::Skip);
        }
    }
}

#[test]
fn a_folder_may_mix_forms() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.txt"), "1").unwrap();
    std::fs::write(folder.path().join("b.jsonl.gz"), gzip(b"{\"text\":\"2\"}")).unwrap();
    std::fs::copy(fixture("two.jsonl.zst"), folder.path().join("c.jsonl.zst")).unwrap();
    std::fs::copy(fixture("snappy_dictionary.parquet"), folder.path().join("d.parquet")).unwrap();
    let spec = |input: &str| DataSpec {
        on_bad_record: OnBadRecord::Skip,
        ..DataSpec::new(vec![folder.path().join(input).display().to_string()])
    };
    for (input, expected) in [("", 8), ("*.jsonl.*", 3), ("**/*.p?rquet", 4)] {
        let (_, notices) = open(&spec(input), "bytes", 2, 259).unwrap();
        assert!(notices.iter().any(|n| n.contains(&format!("from {expected} documents"))), "{input}: {notices:?}");
    }
}
