//! JSON as people write it, read strictly: a key given twice, a byte-order mark or anything after the
//! value is refused with its line and column, where a lenient reader would silently pick one.

use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{Error, Result};

/// Reads and parses a JSON file.
///
/// # Errors
/// [`Error::Usage`] in one sentence with path, line and column.
pub fn read(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).map_err(|e| Error::Usage(format!("{}: cannot be read: {e}", path.display())))?;
    parse(&bytes).map_err(|reason| Error::Usage(format!("{}: {reason}", path.display())))
}

/// Parses one JSON value that fills `bytes`; the error is a clause without the file's name.
///
/// # Errors
/// What is wrong, with line and column.
pub fn parse(bytes: &[u8]) -> std::result::Result<Value, String> {
    if bytes.starts_with(b"\xEF\xBB\xBF") {
        return Err("not valid JSON at line 1 column 1: the file begins with a UTF-8 byte-order mark; \
             save it without one"
            .into());
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err("the file is empty, JSON was expected".into());
    }
    serde_json::from_slice::<Strict>(bytes).map(|strict| strict.0).map_err(|e| format!("not valid JSON: {e}"))
}

/// A JSON value in which no object has a key twice.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_f64<E: serde::de::Error>(self, v: f64) -> std::result::Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("a number is not finite"))
    }
    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Strict(value)) = seq.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("the key \"{key}\" is given twice")));
            }
            let Strict(value) = access.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_where() {
        let refused = |text: &str| parse(text.as_bytes()).unwrap_err();
        assert!(refused("{\"a\": 1,\n \"a\": 2}").contains("\"a\" is given twice at line 2"));
        assert!(refused("\u{FEFF}{}").contains("byte-order mark"));
        assert!(refused("{}\n}").contains("line 2 column 1"));
        assert!(refused("{\"a\": NaN}").contains("line 1 column"));
        assert!(refused(" \n").contains("empty"));
        assert_eq!(parse(b"[1, 2.5, null, \"x\"]").unwrap()[1], 2.5);
    }
}
