//! The container GGUF: typed metadata and the places of tensors, all checked before the first is read.

use std::collections::HashMap;
use std::path::Path;

use castor_kernels::FileMap;
use serde_json::{Map, Number, Value};

use super::blocks::Format;
use crate::error::{Error, Result};

/// Tensors begin at multiples of this many bytes, unless the metadata says otherwise.
const ALIGNMENT: u64 = 32;
/// Lists within lists beyond this are no metadata.
const DEPTH_MAX: u32 = 4;

/// Where a tensor lies in its file.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub format: Format,
    /// Row-major: the file states dimensions the other way round.
    pub shape: Vec<u64>,
    /// Byte offset in the file.
    start: usize,
    bytes: usize,
}

/// An opened file: what it says and what it holds.
#[derive(Debug)]
pub struct Gguf {
    map: FileMap,
    /// Metadata by key.
    pub(super) metadata: Map<String, Value>,
    pub(super) tensors: HashMap<String, Place>,
}

impl Gguf {
    /// Opens and checks `path`.
    ///
    /// # Errors
    /// [`Error::Usage`] if the file is not GGUF, is damaged or cut off, or holds a tensor in a format that is not read.
    pub fn open(path: &Path) -> Result<Gguf> {
        let map = FileMap::open(path)?;
        let parsed = parse(map.bytes());
        let (metadata, tensors) = parsed.map_err(|reason| Error::Usage(format!("{}: {reason}", path.display())))?;
        Ok(Gguf { map, metadata, tensors })
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        self.map.path()
    }

    /// A value of the metadata; null if there is none.
    pub fn value(&self, key: &str) -> &Value {
        self.metadata.get(key).unwrap_or(&Value::Null)
    }

    /// A tensor's bytes as stored.
    pub(super) fn raw(&self, place: &Place) -> &[u8] {
        &self.map.bytes()[place.start..place.start + place.bytes]
    }
}

type Parsed = (Map<String, Value>, HashMap<String, Place>);

fn parse(bytes: &[u8]) -> std::result::Result<Parsed, String> {
    let mut cursor = Cursor { bytes, at: 0 };
    if bytes.get(..4) != Some(b"GGUF") {
        return Err("neither a Hugging Face folder nor a GGUF file; --model takes either".into());
    }
    cursor.at = 4;
    match cursor.unsigned(4)? {
        2 | 3 => {}
        version => return Err(format!("GGUF of version {version} (or big-endian); versions 2 and 3 are read")),
    }
    let (tensors, pairs) = (cursor.unsigned(8)?, cursor.unsigned(8)?);
    let mut metadata = Map::new();
    for _ in 0..pairs {
        let key = cursor.text()?;
        let kind = cursor.unsigned(4)?;
        let value = cursor.value(kind, 0)?;
        metadata.insert(key, value);
    }
    let mut stated = Vec::new();
    for _ in 0..tensors {
        let name = cursor.text()?;
        let dimensions = cursor.unsigned(4)?;
        if dimensions > 4 {
            return Err(format!("{name} has {dimensions} dimensions; the header is damaged, copy the file again"));
        }
        let mut shape = (0..dimensions).map(|_| cursor.unsigned(8)).collect::<std::result::Result<Vec<_>, _>>()?;
        shape.reverse();
        let format =
            Format::of(cursor.unsigned(4)? as u32).map_err(|reason| format!("{name} is stored as {reason}"))?;
        stated.push((name, shape, format, cursor.unsigned(8)?));
    }
    let alignment = metadata.get("general.alignment").and_then(Value::as_u64).unwrap_or(ALIGNMENT).max(1);
    let data = (cursor.at as u64).checked_next_multiple_of(alignment).ok_or("general.alignment is no alignment")?;
    let mut places = HashMap::new();
    for (name, shape, format, offset) in stated {
        let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
        let place = elements.and_then(|elements| {
            let bytes = format.bytes(elements)?;
            let start = data.checked_add(offset)?;
            (start.checked_add(bytes)? <= bytes_of(cursor.bytes)).then_some((start as usize, bytes as usize))
        });
        let Some((start, bytes)) = place else {
            return Err(format!(
                "{name} {shape:?} lies outside of the file or is no whole number of blocks: the file is damaged or cut \
                 off, copy it again"
            ));
        };
        places.insert(name, Place { format, shape, start, bytes });
    }
    Ok((metadata, places))
}

const fn bytes_of(bytes: &[u8]) -> u64 {
    bytes.len() as u64
}

/// Reads the header from its beginning to its end.
struct Cursor<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Cursor<'b> {
    fn take(&mut self, bytes: u64) -> std::result::Result<&'b [u8], String> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| self.at.checked_add(bytes));
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or("the file is cut off in its header; copy it again")?;
        self.at += taken.len();
        Ok(taken)
    }

    /// A little-endian number of at most 8 bytes.
    fn unsigned(&mut self, bytes: u64) -> std::result::Result<u64, String> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn text(&mut self) -> std::result::Result<String, String> {
        let length = self.unsigned(8)?;
        let bytes = self.take(length)?;
        str::from_utf8(bytes).map(str::to_owned).map_err(|_| "a name or text in the header is not UTF-8".into())
    }

    fn value(&mut self, kind: u64, depth: u32) -> std::result::Result<Value, String> {
        Ok(match kind {
            0 => self.unsigned(1)?.into(),
            1 => (self.unsigned(1)? as i8).into(),
            2 => self.unsigned(2)?.into(),
            3 => (self.unsigned(2)? as i16).into(),
            4 => self.unsigned(4)?.into(),
            5 => (self.unsigned(4)? as i32).into(),
            6 => float(f64::from(f32::from_bits(self.unsigned(4)? as u32))),
            7 => (self.unsigned(1)? != 0).into(),
            8 => self.text()?.into(),
            9 if depth < DEPTH_MAX => {
                let (kind, count) = (self.unsigned(4)?, self.unsigned(8)?);
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value(kind, depth + 1)?);
                }
                Value::Array(values)
            }
            10 => self.unsigned(8)?.into(),
            11 => (self.unsigned(8)? as i64).into(),
            12 => float(f64::from_bits(self.unsigned(8)?)),
            other => {
                return Err(format!("metadata of unknown type {other}; the header is damaged, copy the file again"));
            }
        })
    }
}

/// JSON has no infinities; none is a sensible setting.
fn float(value: f64) -> Value {
    Number::from_f64(value).map_or(Value::Null, Value::Number)
}
