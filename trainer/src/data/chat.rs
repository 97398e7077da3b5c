//! Instruction data: records of messages, or of a prompt and its completion, as text with answers marked.
//!
//! A chat becomes text through a Jinja template, the tokenizer's own where it has one. What counts in the loss are
//! the answers: for each message of the assistant, what the template adds from the point where it asks for an answer
//! (`add_generation_prompt`) to the end of that message, its closing mark included, for it is what ends an answer.

use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, context};
use serde_json::{Map, Value};

use super::document::Document;

/// The form of a chat where the tokenizer has no template: `role:`, a line end, the content, an empty line.
const PLAIN: &str = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}\
                     {% if add_generation_prompt %}assistant:\n{% endif %}";
/// The role whose messages are answers.
const ASSISTANT: &str = "assistant";
const NAME: &str = "chat_template";

type Outcome<T> = std::result::Result<T, String>;

/// A tokenizer's way to write a chat.
#[derive(Clone, Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether the template is the tokenizer's own.
    own: bool,
    /// Why the template cannot be used: it matters only once there is a chat.
    broken: Option<String>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template `source`, or [`PLAIN`]. `bos` and `eos`: the tokens' text, empty if there is none.
    pub fn new(source: Option<String>, bos: String, eos: String) -> ChatTemplate {
        let mut environment = Environment::new();
        // As Hugging Face sets Jinja up.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the usual delimiters"));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        let text = source.as_deref().map_or(PLAIN.into(), without_generation_tags);
        let broken = environment.add_template_owned(NAME, text).err().map(|error| explained(&error));
        ChatTemplate { environment, own: source.is_some(), broken, bos, eos }
    }

    /// The document of a record with `messages`, or `prompt` and `completion`; `None` if it has neither.
    ///
    /// # Errors
    /// A clause that says what is wrong with the record or with the template.
    pub fn document(&self, record: &Map<String, Value>) -> Outcome<Option<Document>> {
        match (record.get("messages"), record.get("prompt"), record.get("completion")) {
            (Some(messages), _, _) => self.chat(list("messages", messages)?, 0, record).map(Some),
            (None, Some(Value::String(prompt)), Some(Value::String(completion))) => {
                if completion.is_empty() {
                    return Err("\"completion\" is empty: nothing of the record would count".into());
                }
                let text = format!("{prompt}{completion}");
                let answer = prompt.len()..text.len();
                Ok(Some(Document { text, answers: Some(vec![answer]), framed: false }))
            }
            (None, Some(prompt @ Value::Array(_)), Some(completion @ Value::Array(_))) => {
                let mut messages = list("prompt", prompt)?.to_vec();
                let first = messages.len();
                messages.extend_from_slice(list("completion", completion)?);
                self.chat(&messages, first, record).map(Some)
            }
            (None, Some(_), Some(_)) => {
                Err("\"prompt\" and \"completion\" must both be strings or both lists of messages".into())
            }
            _ => Ok(None),
        }
    }

    /// The answers from message `first` on count.
    fn chat(&self, messages: &[Value], first: usize, record: &Map<String, Value>) -> Outcome<Document> {
        if let Some(reason) = &self.broken {
            return Err(format!("the tokenizer's chat template cannot be used: {reason}"));
        }
        for (index, message) in messages.iter().enumerate() {
            if !message["role"].is_string() {
                return Err(format!("message {index} has no \"role\", a string was expected"));
            }
            if !self.own && !message["content"].is_string() {
                return Err(format!("message {index} has no \"content\", a string was expected"));
            }
        }
        let text = self.render(messages, false, record)?;
        let mut answers: Vec<Range<usize>> = Vec::new();
        for (index, message) in messages.iter().enumerate().skip(first) {
            if message["role"] != ASSISTANT {
                continue;
            }
            let begins = match index {
                0 => 0,
                _ => self.end_of(&messages[..index], true, &text, record)?,
            };
            let ends = if index + 1 == messages.len() {
                text.len()
            } else {
                self.end_of(&messages[..=index], false, &text, record)?
            };
            if begins < ends {
                answers.push(begins..ends);
            }
        }
        if answers.is_empty() {
            return Err(format!("no message has the role \"{ASSISTANT}\": nothing of the record would count"));
        }
        Ok(Document { text, answers: Some(answers), framed: self.own })
    }

    /// Where the rendering of the first messages ends in that of all.
    fn end_of(&self, messages: &[Value], asks: bool, text: &str, record: &Map<String, Value>) -> Outcome<usize> {
        let prefix = self.render(messages, asks, record)?;
        if text.starts_with(&prefix) {
            return Ok(prefix.len());
        }
        // Some templates ask for an answer with words that they leave out before a given one.
        let bare = if asks { self.render(messages, false, record)? } else { prefix };
        text.starts_with(&bare).then_some(bare.len()).ok_or_else(|| {
            format!(
                "the chat template writes the first {} messages otherwise when more follow, so the answers cannot be \
                 told apart; give one answer a record",
                messages.len()
            )
        })
    }

    fn render(&self, messages: &[Value], asks: bool, record: &Map<String, Value>) -> Outcome<String> {
        let context = context! {
            messages => Serde(messages),
            add_generation_prompt => asks,
            bos_token => &self.bos,
            eos_token => &self.eos,
            tools => Serde(record.get("tools")),
        };
        let template = self.environment.get_template(NAME).map_err(|error| explained(&error))?;
        template.render(context).map_err(|error| format!("the chat template refuses it: {}", explained(&error)))
    }
}

fn list<'v>(name: &str, value: &'v Value) -> Outcome<&'v [Value]> {
    match value.as_array() {
        Some(messages) if !messages.is_empty() => Ok(messages),
        _ => Err(format!("\"{name}\" must be a list of at least one message with \"role\" and \"content\"")),
    }
}

/// Hugging Face's `{% generation %}` blocks mark answers; here they are blocks without an effect.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        let (tag, after) = tag.split_at(tag.find("%}").map_or(tag.len(), |end| end + 2));
        text.push_str(before);
        text.push_str(&match tag.trim_matches(['{', '%', '-', '+', '}', ' ', '\n']) {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_string(),
        });
        rest = after;
    }
    text.push_str(rest);
    text
}

fn explained(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (line {line} of the template)"),
        None => detail,
    }
}
