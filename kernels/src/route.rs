//! The laws of copies and collectives that every backend holds its callers to.

use crate::block_io::BLOCK_BYTES;
use crate::{DType, Error, Result, Span, Stream, Tier, View};

/// Checks that `source` may be copied to `target` on `stream`.
///
/// # Errors
/// [`Error::Unsupported`] if the tiers do not fit the stream.
///
/// # Panics
/// If the lengths differ, the spans overlap without being one, or a copy of a file is not in whole blocks.
#[track_caller]
pub(crate) fn check_copy(backend: &'static str, stream: Stream, source: Span, target: Span) -> Result<()> {
    assert!(source.bytes == target.bytes, "copy of {source:?} to {target:?}: the lengths differ");
    assert!(source == target || !source.overlaps(target), "copy of {source:?} to {target:?}: they overlap");
    let file = match (source.tier, target.tier) {
        (Tier::Nvme, Tier::Host) if stream == Stream::NvmeRead => true,
        (Tier::Host, Tier::Nvme) if stream == Stream::NvmeWrite => true,
        (Tier::Nvme, _) | (_, Tier::Nvme) => {
            return Err(Error::Unsupported {
                what: format!("a copy of {source:?} to {target:?} on {stream:?}"),
                backend,
                instead: "file to host goes on nvme_read, host to file on nvme_write, and files reach the device \
                          through the host"
                    .into(),
            });
        }
        _ => false,
    };
    for span in [source, target] {
        let whole = span.offset.is_multiple_of(BLOCK_BYTES) && span.bytes.is_multiple_of(BLOCK_BYTES);
        assert!(!file || whole, "{span:?} is not in whole blocks of {BLOCK_BYTES} bytes");
    }
    Ok(())
}

/// Checks two views of which one is added to the other.
///
/// # Errors
/// [`Error::Unsupported`] if no rank computes in their type.
///
/// # Panics
/// If they differ in type or length, overlap, or are not on the device.
#[track_caller]
pub(crate) fn check_accumulate(backend: &'static str, source: View, target: View) -> Result<()> {
    let alike = source.dtype == target.dtype && source.span.bytes == target.span.bytes;
    assert!(alike, "{source:?} and {target:?} differ in type or length");
    assert!(!source.span.overlaps(target.span), "{source:?} overlaps {target:?}");
    let there = source.span.tier == Tier::Device && target.span.tier == Tier::Device;
    assert!(there, "{source:?} and {target:?} are not both on the device");
    match source.dtype {
        DType::F32 | DType::F16 | DType::Bf16 => Ok(()),
        other => Err(Error::Unsupported {
            what: format!("an accumulation of {other:?}"),
            backend,
            instead: "f32, f16 or bf16".into(),
        }),
    }
}

/// Checks shard number `own` against the whole of `shards`, and gives its part of the whole.
///
/// # Panics
/// If their types differ, the whole is not as many shards, or the shard overlaps the whole without being its part of
/// it.
#[track_caller]
pub(crate) fn own_part(shard: View, full: View, own: u32, shards: u32) -> Span {
    assert!(shard.dtype == full.dtype, "{shard:?} and {full:?} differ in type");
    let whole = shard.span.bytes * u64::from(shards) == full.span.bytes;
    assert!(whole, "{full:?} is not {shards} shards as {shard:?}");
    let part = full.span.part(u64::from(own) * shard.span.bytes, shard.span.bytes);
    let apart = shard.span == part || !shard.span.overlaps(full.span);
    assert!(apart, "{shard:?} is neither its part of {full:?} nor apart from it");
    part
}
