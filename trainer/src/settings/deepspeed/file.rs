//! The text of a DeepSpeed file: JSON with comments, trailing commas and a byte-order mark, as DeepSpeed reads it.
//!
//! Two things are stricter than JSON's readers are: a key given twice is refused, and so is a number that f64 cannot
//! hold. Errors are clauses; the caller adds the file's name.

use jsonc_parser::ast::Value as Node;
use jsonc_parser::common::Ranged;
use jsonc_parser::{CollectOptions, ParseOptions};
use serde_json::{Map, Number, Value};

use super::Outcome;

/// What is accepted beyond JSON.
const ACCEPTED: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_trailing_commas: true,
    allow_loose_object_property_names: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// The object that fills `text`.
pub(super) fn parse(text: &str) -> Outcome<Map<String, Value>> {
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
    let parsed = jsonc_parser::parse_to_ast(text, &CollectOptions::default(), &ACCEPTED).map_err(|error| {
        let what = error.kind().to_string();
        let what = what.trim_end_matches('.');
        format!("line {} column {}: {what}", error.line_display(), error.column_display())
    })?;
    match parsed.value.as_ref().map(|node| value(text, node)).transpose()? {
        Some(Value::Object(map)) => Ok(map),
        Some(_) => Err("a JSON object was expected".into()),
        None => Err("the file is empty; a JSON object was expected".into()),
    }
}

fn value(text: &str, node: &Node) -> Outcome<Value> {
    Ok(match node {
        Node::NullKeyword(_) => Value::Null,
        Node::BooleanLit(literal) => Value::Bool(literal.value),
        Node::StringLit(literal) => Value::String(literal.value.to_string()),
        Node::NumberLit(literal) => Value::Number(
            number(literal.value)
                .ok_or_else(|| format!("line {}: {} is no number", line(text, literal.range.start), literal.value))?,
        ),
        Node::Array(array) => {
            Value::Array(array.elements.iter().map(|node| value(text, node)).collect::<Outcome<_>>()?)
        }
        Node::Object(object) => {
            let mut map = Map::new();
            for property in &object.properties {
                let name = property.name.as_str();
                if map.insert(name.to_string(), value(text, &property.value)?).is_some() {
                    return Err(format!("line {}: the key {name} is given twice", line(text, property.start())));
                }
            }
            Value::Object(map)
        }
    })
}

fn number(text: &str) -> Option<Number> {
    match text.parse::<i64>() {
        Ok(whole) => Some(whole.into()),
        Err(_) => text.parse().ok().and_then(Number::from_f64),
    }
}

/// The line of a byte of the text, from 1.
fn line(text: &str, at: usize) -> usize {
    1 + text[..at].matches('\n').count()
}
