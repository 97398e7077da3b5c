//! The law of remembered words: the ids are those of the whole text, for every way of cutting that is taken.

use super::super::words::Words;
use castor_kernels::rng;
use std::cell::Cell;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;

const PARTS: [&str; 31] = [
    " ", "  ", "\n", "\r\n", "\t", "a", "the", "B", "é", "中", "7", "42", "٣", "½", "(", "'s", "'", "_", ".", "-",
    "\u{85}", "\u{a0}", "\u{2028}", "\u{b}", "\u{1c}", "<|x|>", "<|", "’", "👍🏽", "'ll", "'Ve",
];

/// Texts of parts that follow each other in all ways.
fn odd_texts() -> Vec<String> {
    let pick = |text: u64, place: u64| PARTS[(rng::bits(9, place, text) % PARTS.len() as u64) as usize];
    (0..400).map(|text| (0..120).map(|place| pick(text, place)).collect()).collect()
}

fn sources() -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/data");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.is_file()).collect();
    files.sort();
    files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// A tokenizer that has learnt the texts, so that what is not cut apart is joined.
fn learnt(pre_tokenizer: &str, texts: &[String]) -> (tokenizers::Tokenizer, serde_json::Value) {
    let file = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,"normalizer":null,"post_processor":null,"decoder":null,
            "added_tokens":[{{"id":0,"content":"<|x|>","single_word":false,"lstrip":false,"rstrip":false,
            "normalized":false,"special":true}}],"pre_tokenizer":{pre_tokenizer},
            "model":{{"type":"BPE","vocab":{{}},"merges":[]}}}}"#
    );
    let mut tokenizer: tokenizers::Tokenizer = file.parse().unwrap();
    let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let trainer = BpeTrainer::builder().vocab_size(3000).min_frequency(1).show_progress(false);
    let mut trainer = TrainerWrapper::BpeTrainer(trainer.initial_alphabet(alphabet.into_iter().collect()).build());
    tokenizer.train(&mut trainer, texts.iter().map(String::as_str)).unwrap();
    let written = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
    (tokenizer, written)
}

#[test]
fn remembered_words_have_the_ids_of_the_whole_text() {
    let texts = [odd_texts(), sources()].concat();
    let byte_level = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
    let bytes_only = byte_level.replace("\"use_regex\":true", "\"use_regex\":false");
    let split = |expression: &str| {
        let expression = serde_json::Value::from(expression);
        format!(r#"{{"type":"Split","pattern":{{"Regex":{expression}}},"behavior":"Isolated","invert":false}}"#)
    };
    let sequence = |first: &str, second: &str| format!(r#"{{"type":"Sequence","pretokenizers":[{first},{second}]}}"#);
    let digits = r#"{"type":"Digits","individual_digits":true}"#;
    for pre_tokenizer in [
        byte_level.to_string(),
        sequence(digits, byte_level),
        sequence(&split(super::super::words::KNOWN[0]), &bytes_only),
        sequence(&split(super::super::words::KNOWN[1]), &bytes_only),
    ] {
        let (_, mut file) = learnt(&pre_tokenizer, &texts);
        // With what no merge makes: a word that is taken as it stands, if the tokenizer looks for it.
        file["model"]["vocab"]["Ġwindow"] = 5000.into();
        for whole_words in [false, true] {
            file["model"]["ignore_merges"] = whole_words.into();
            let tokenizer: tokenizers::Tokenizer = file.to_string().parse().unwrap();
            let words = Words::of(&file).expect("this way of cutting is known");
            let (asked, whole) = (Cell::new(0), |text: &str| {
                tokenizer.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec())
            });
            for text in &texts {
                let mut ids = Vec::new();
                let encode = |piece: &str| {
                    asked.set(
                        asked.get() + usize::from(piece.len() < 48 && piece.bytes().all(super::super::bpe::is_plain)),
                    );
                    whole(piece)
                };
                words.encode(text, &mut ids, encode).unwrap();
                assert_eq!(ids, whole(text).unwrap(), "{pre_tokenizer}: {text:?}");
            }
            assert_eq!(asked.get(), 0, "plain pieces need no tokenizer");
            let mut ids = Vec::new();
            words.encode(" window", &mut ids, |_: &str| Err(())).unwrap();
            assert_eq!(ids == [5000], whole_words);
        }
    }
    for other in [
        byte_level.replace("\"add_prefix_space\":false", "\"add_prefix_space\":true"),
        bytes_only.clone(),
        sequence(&split(r"\s+"), &bytes_only),
        r#"{"type":"Whitespace"}"#.to_string(),
    ] {
        let (_, file) = learnt(&other, &texts[..1]);
        assert!(Words::of(&file).is_none(), "{other}");
    }
}
