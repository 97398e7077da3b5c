//! Instruction data: which tokens count, held against answers written out by hand.

use super::super::{DataSpec, Tokenizer, open, pack};
use crate::inputs::MicroBatch;
use crate::source::Rows;

/// ChatML, with a system message where the chat has none, as SmolLM2's template has it.
const TEMPLATE: &str = "{% for message in messages %}\
    {% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nS<|im_end|>\n' }}{% endif %}\
    {{'<|im_start|>' + message['role'] + '\n' + message['content'].strip() + '<|im_end|>' + '\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A tokenizer of single letters with ChatML's two marks, and the data `lines` as rows of one sequence.
struct Case {
    folder: tempfile::TempDir,
    tokenizer: String,
}

impl Case {
    fn new(config: Option<serde_json::Value>) -> Case {
        let folder = tempfile::tempdir().unwrap();
        let mark = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let mut letters = serde_json::Map::new();
        for (id, letter) in ('\0'..='\x7f').enumerate() {
            letters.insert(letter.to_string(), id.into());
        }
        letters.insert("ab".into(), 128.into());
        let file = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": {"type": "Fuse"},
            "added_tokens": [mark(129, "<|im_start|>"), mark(130, "<|im_end|>"), mark(131, "</s>")],
            "model": {"type": "BPE", "vocab": letters, "merges": ["a b"], "unk_token": null},
        });
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        if let Some(config) = config {
            std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        }
        let tokenizer = folder.path().display().to_string();
        Case { folder, tokenizer }
    }

    fn spec(&self, lines: &str) -> DataSpec {
        let path = self.folder.path().join("data.jsonl");
        std::fs::write(&path, lines).unwrap();
        DataSpec::new(vec![path.display().to_string()])
    }

    /// The document with everything that does not count replaced by dots, and the whole.
    fn read(&self, lines: &str) -> Result<(String, String), String> {
        let spec = self.spec(lines);
        let tokenizer = Tokenizer::open(&self.tokenizer).unwrap();
        let (mut marked, mut whole) = (String::new(), String::new());
        let mut notices = Vec::new();
        let paths = [spec.inputs[0].clone().into()];
        super::tokenize(&spec, &tokenizer, &paths, &mut notices, &mut |ids| {
            for id in ids {
                let text = match id & !super::super::document::SILENT {
                    128 => "ab".into(),
                    129 => "<|im_start|>".into(),
                    130 => "<|im_end|>".into(),
                    131 => "</s>".into(),
                    letter => char::from(letter as u8).to_string(),
                };
                whole.push_str(&text);
                let silent = id & super::super::document::SILENT != 0;
                marked.push_str(&if silent { ".".repeat(text.len()) } else { text });
            }
            Ok(())
        })
        .map_err(|error| error.to_string())?;
        Ok((marked, whole))
    }
}

fn dots(text: &str) -> String {
    ".".repeat(text.len())
}

const CHAT: &str = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":" ab "},
 {"role":"user","content":"r"},{"role":"assistant","content":"b"}]}"#;

#[test]
fn only_answers_count_in_a_chat_with_the_tokenizers_template() {
    let case = Case::new(Some(serde_json::json!({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})));
    let (marked, whole) = case.read(&CHAT.replace('\n', "")).unwrap();
    let parts = [
        ("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", false),
        ("ab<|im_end|>\n", true),
        ("<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n", false),
        ("b<|im_end|>\n", true),
    ];
    assert_eq!(whole, parts.map(|(text, _)| text).concat(), "nothing is added to what the template says");
    let expected = parts.map(|(text, counts)| if counts { text.to_string() } else { dots(text) });
    assert_eq!(marked, expected.concat());
}

#[test]
fn templates_come_in_several_forms() {
    let several = serde_json::json!([{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]);
    let chat = CHAT.replace('\n', "");
    let expected = Case::new(Some(serde_json::json!({"chat_template": TEMPLATE}))).read(&chat).unwrap();
    assert_eq!(Case::new(Some(serde_json::json!({"chat_template": several}))).read(&chat).unwrap(), expected);
    let file = Case::new(None);
    let marked =
        TEMPLATE.replace("{{'<|im", "{%- generation -%}{{'<|im").replace("'\n'}}", "'\n'}}{% endgeneration %}");
    std::fs::write(file.folder.path().join("chat_template.jinja"), marked).unwrap();
    assert_eq!(file.read(&chat).unwrap(), expected);

    let refuses = Case::new(Some(serde_json::json!({"chat_template":
        "{% if messages[0].role == 'user' %}\n{{ raise_exception('system first') }}{% endif %}"})));
    let error = refuses.read(&chat).unwrap_err();
    assert!(error.contains("data.jsonl:1: ") && error.contains("system first"), "{error}");
    let broken = Case::new(Some(serde_json::json!({"chat_template": "{% if %}"})));
    assert!(broken.read(&chat).unwrap_err().contains("template cannot be used"));
    // It matters only to chats.
    assert_eq!(broken.read("{\"text\":\"a\"}").unwrap().1, "a</s>");
    let forgets = Case::new(Some(serde_json::json!({"chat_template": "{{ messages[-1].content }}"})));
    assert!(forgets.read(&chat).unwrap_err().contains("cannot be told apart"));
}

#[test]
fn without_a_template_a_chat_is_plain_and_framed() {
    let (marked, whole) = Case::new(None).read(&CHAT.replace('\n', "")).unwrap();
    assert_eq!(whole, "user:\nq\n\nassistant:\n ab \n\nuser:\nr\n\nassistant:\nb\n\n</s>");
    let (a, b) = (dots("user:\nq\n\nassistant:\n"), dots("user:\nr\n\nassistant:\n"));
    assert_eq!(marked, format!("{a} ab \n\n{b}b\n\n</s>"));
}

#[test]
fn prompt_and_completion() {
    let case = Case::new(Some(serde_json::json!({"chat_template": TEMPLATE})));
    // The token "ab" begins in the prompt: the completion's b was not asked for.
    let (marked, whole) = case.read(r#"{"prompt":"xa","completion":"bab"}"#).unwrap();
    assert_eq!((marked.as_str(), whole.as_str()), ("...ab</s>", "xabab</s>"));
    let lists = r#"{"prompt":[{"role":"assistant","content":"a"},{"role":"user","content":"q"}],
        "completion":[{"role":"assistant","content":"b"}]}"#;
    let (marked, whole) = case.read(&lists.replace('\n', "")).unwrap();
    let answer = "b<|im_end|>\n";
    assert_eq!(marked, dots(&whole[..whole.len() - answer.len()]) + answer);
    for (record, says) in [
        (r#"{"prompt":"a","completion":""}"#, "\"completion\" is empty"),
        (r#"{"prompt":"a","completion":[]}"#, "both be strings or both lists"),
        (r#"{"prompt":"a"}"#, "no \"prompt\" with \"completion\""),
        (r#"{"messages":[{"role":"user","content":"a"}]}"#, "nothing of the record would count"),
        (r#"{"messages":[{"content":"a"}]}"#, "message 0 has no \"role\""),
        (r#"{"messages":"a"}"#, "a list of at least one message"),
    ] {
        let error = case.read(record).unwrap_err();
        assert!(error.contains(":1: ") && error.contains(says), "{error}");
    }
}

/// Rows cut from memory and from a packed file have the same labels, and count what the records say.
#[test]
fn packing_keeps_the_mask() {
    let case = Case::new(None);
    let lines =
        "{\"prompt\":\"xyz\",\"completion\":\"uv\"}\n{\"text\":\"abc\"}\n{\"prompt\":\"xyzx\",\"completion\":\"w\"}";
    let spec = case.spec(lines);
    let (rows, notices) = open(&spec, &case.tokenizer, 4, 132).unwrap();
    assert!(notices.iter().any(|n| n.contains("2 documents are instructions, 8 tokens count")), "{notices:?}");
    let id = |letter: u8| i32::from(letter);
    let eos = 131;
    let expected = [
        (vec![id(b'x'), id(b'y'), id(b'z'), id(b'u')], vec![-100, -100, -100, id(b'u')]),
        (vec![id(b'v'), eos, 128, id(b'c')], vec![id(b'v'), eos, 128, id(b'c')]),
        (vec![eos, id(b'x'), id(b'y'), id(b'z')], vec![eos, -100, -100, -100]),
    ];
    let check = |rows: &dyn Rows| {
        let (mut ids, mut labels) = (vec![0; 4], vec![0; 4]);
        let mut counted = Vec::new();
        for (row, expected) in expected.iter().enumerate() {
            rows.row(row as u64, &mut ids, &mut labels).unwrap();
            assert_eq!((&ids, &labels), (&expected.0, &expected.1));
            counted.push(MicroBatch { ids: &ids, labels: &labels, starts: None }.counted(4));
        }
        // A row's first token is never asked for.
        assert_eq!(counted, [1, 3, 0]);
    };
    check(&rows);
    let out = case.folder.path().join("packed");
    let summary = pack(&spec, &Tokenizer::open(&case.tokenizer).unwrap(), &out).unwrap();
    assert_eq!((summary.tokens, summary.counted, summary.documents), (15, 8, 3));
    let packed = DataSpec::new(vec![out.display().to_string()]);
    check(&open(&packed, "bytes", 4, 132).unwrap().0);
    std::fs::write(out.join("tokens.mask"), [0; 3]).unwrap();
    let error = open(&packed, "bytes", 4, 132).unwrap_err().to_string();
    assert!(error.contains("tokens.mask: has 3 bytes, and 15 tokens"), "{error}");
}
