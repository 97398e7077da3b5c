//! The control plane's access to chunks at home: initial weights in, exact weights out, raw bytes both ways.

use super::StatefulTensorMgr;
use super::moves::{Piece, file_pieces};
use crate::error::{Error, Result};
use crate::fence::Fence;
use crate::ledger::Category;
use crate::units::{ChunkId, GroupId, Role};
use castor_kernels::{DType, Span, Stream, Tier, numeric};
use rayon::prelude::*;
use std::ops::Range;

/// Elements handled at once: bounds the host memory that loading takes, and stays in the caches of a CPU from its
/// reading to its writing.
const PIECE: u64 = 1 << 20;
/// Elements that one thread converts at a time.
const SLICE: usize = 1 << 14;

/// Bytes that one thread copies at a time.
const COPIED_AT_ONCE: usize = 1 << 20;

/// A piece of a chunk between device and where it is wanted.
struct Flying<'a> {
    done: Fence,
    stage: Span,
    target: &'a mut [u8],
}

/// Gives elements of a group: `fill(first, out)` sets `out` to the elements from `first` on.
pub type Fill<'a, E> = &'a mut dyn FnMut(u64, &mut [f32]) -> std::result::Result<(), E>;

impl StatefulTensorMgr {
    /// Sets a group's weights: `fill(first, out)` gives elements `first ..` of the group (padding is not asked
    /// for). Writes this rank's parameter and master, zeroes its moments.
    ///
    /// # Errors
    /// What `fill` says, or the backend.
    pub fn load_group<E: From<Error>>(&mut self, group: GroupId, fill: Fill<'_, E>) -> std::result::Result<(), E> {
        let parameter = group.chunk(Role::Parameter);
        let master = self.layout.formats.master.map(|_| group.chunk(Role::Master));
        let (begin, count) = self.stored_range(parameter);
        let used = self.layout.group(group).used;
        let mut values = vec![0f32; PIECE.min(count) as usize];
        let mut bytes = Vec::new();
        let mut first = begin;
        while first < begin + count {
            let piece = PIECE.min(begin + count - first);
            let values = &mut values[..piece as usize];
            let known = used.saturating_sub(first).min(piece);
            values[known as usize..].fill(0.0);
            if known > 0 {
                fill(first, &mut values[..known as usize])?;
            }
            let dtype = self.layout.dtype(parameter);
            self.write_home(parameter, dtype.bytes(first - begin), encode(values, dtype, &mut bytes))?;
            if let Some(master) = master {
                let (master_begin, master_count) = self.stored_range(master);
                let from = first.max(master_begin);
                let to = (first + piece).min(master_begin + master_count);
                if from < to {
                    let dtype = self.layout.dtype(master);
                    let part = &values[(from - first) as usize..(to - first) as usize];
                    self.write_home(master, dtype.bytes(from - master_begin), encode(part, dtype, &mut bytes))?;
                }
            }
            first += piece;
        }
        for role in [Role::First, Role::Second] {
            let chunk = group.chunk(role);
            let home = self.chunk(chunk).home;
            if home.tier == Tier::Device {
                self.backend.zero(home.view(self.layout.dtype(chunk)));
                continue;
            }
            let zeros = vec![0u8; (4 * PIECE).min(home.bytes) as usize];
            let mut offset = 0;
            while offset < home.bytes {
                let bytes = (4 * PIECE).min(home.bytes - offset);
                self.write_home(chunk, offset, &zeros[..bytes as usize])?;
                offset += bytes;
            }
        }
        Ok(())
    }

    /// Fills `out` (the group's `used` elements) with its exact f32 weights: master where there is one. With sharded
    /// data every rank must call it.
    ///
    /// # Errors
    /// The backend's.
    pub fn read_group(&mut self, group: GroupId, out: &mut [f32]) -> Result<()> {
        let parameter = group.chunk(Role::Parameter);
        let (mut begin, mut count) = self.stored_range(parameter);
        let mut values = decode(&self.read_chunk(parameter)?, self.layout.dtype(parameter));
        if let Some(format) = self.layout.formats.master {
            let master = group.chunk(Role::Master);
            let bytes = self.read_chunk(master)?;
            let (first, elements) = self.stored_range(master);
            let weights = &values[(first - begin) as usize..(first - begin + elements) as usize];
            values = match format {
                DType::Rem16 => weights
                    .iter()
                    .zip(bytes.chunks_exact(2))
                    .map(|(weight, rest)| {
                        numeric::join(numeric::round_bf16(*weight), i16::from_le_bytes([rest[0], rest[1]]))
                    })
                    .collect(),
                other => decode(&bytes, other),
            };
            (begin, count) = (first, elements);
        }
        let whole = self.layout.group(group).elements;
        if count == whole {
            out.copy_from_slice(&values[..out.len()]);
            return Ok(());
        }
        debug_assert_eq!(begin, count * u64::from(self.backend.shard()));
        let own: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let all = self.all_shards(own)?;
        for (out, bytes) in out.iter_mut().zip(all.chunks_exact(4)) {
            *out = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }

    /// The shards of all ranks in order, from this rank's. Control plane: every rank must call it.
    ///
    /// # Errors
    /// If a peer is gone.
    pub fn all_shards(&self, own: Vec<u8>) -> Result<Vec<u8>> {
        // Ranks beyond the first replica hold the same again.
        let own = if u64::from(self.backend.rank()) < self.layout.shards { own } else { Vec::new() };
        Ok(self.backend.exchange(&own)?.concat())
    }

    /// The raw bytes of what this rank stores of a chunk.
    ///
    /// # Errors
    /// The backend's.
    pub fn read_chunk(&mut self, chunk: ChunkId) -> Result<Vec<u8>> {
        self.settle()?;
        let home = self.chunk(chunk).home;
        let mut out = vec![0u8; home.bytes as usize];
        if home.tier != Tier::Nvme {
            self.backend.download(home, &mut out)?;
            return Ok(out);
        }
        for (file, piece) in file_pieces(home, self.plan.placement.staged_bytes()) {
            let (stage, free) = self.take_staging(file.bytes)?;
            let read = self.transfer.copy(Stream::NvmeRead, file, stage, free)?;
            self.join(read)?;
            let out = &mut out[piece.offset as usize..(piece.offset + piece.bytes) as usize];
            self.backend.read_host(stage.part(0, piece.bytes), out);
            self.staging.give(stage, read);
        }
        Ok(out)
    }

    /// Copies `ranges` of the raw bytes of what this rank stores of chunks to `out`, one after the other, with all
    /// threads. Device memory passes through the pinned memory that the plan reserved for snapshots, where it did.
    ///
    /// # Errors
    /// The backend's.
    ///
    /// # Panics
    /// If `out` has another length than the ranges together.
    pub fn read_ranges(&mut self, ranges: &[(ChunkId, Range<u64>)], out: &mut [u8]) -> Result<()> {
        self.settle()?;
        let stages = self.snapshot_stages();
        let mut flying: Option<Flying> = None;
        let mut rest = out;
        for (chunk, range) in ranges {
            let (mut part, after) = rest.split_at_mut((range.end - range.start) as usize);
            rest = after;
            let home = self.chunk(*chunk).home;
            let mut source = home.part(range.start, range.end - range.start);
            match (home.tier, stages) {
                (Tier::Device, Some([mut stage, mut other])) => {
                    if flying.as_ref().is_some_and(|flying| flying.stage.offset == stage.offset) {
                        (stage, other) = (other, stage);
                    }
                    while source.bytes > 0 {
                        let bytes = stage.bytes.min(source.bytes);
                        let (target, after) = part.split_at_mut(bytes as usize);
                        let landing = stage.part(0, bytes);
                        let done =
                            self.transfer.copy(Stream::DeviceToHost, source.part(0, bytes), landing, Fence::OPEN)?;
                        // While this piece is on its way the one before goes on.
                        if let Some(before) = flying.replace(Flying { done, stage: landing, target }) {
                            self.land(before)?;
                        }
                        (part, source) = (after, source.part(bytes, source.bytes - bytes));
                        (stage, other) = (other, stage);
                    }
                }
                (Tier::Device, None) => self.backend.download(source, part)?,
                (Tier::Host, _) => self.copy_out(source, part),
                // Whole pieces, as they were written: so their checksums are verified.
                (Tier::Nvme, _) => {
                    let wanted =
                        |piece: &Piece| range.start.max(piece.offset)..range.end.min(piece.offset + piece.bytes);
                    for (file, piece) in file_pieces(home, self.plan.placement.staged_bytes())
                        .filter(|(_, piece)| !wanted(piece).is_empty())
                    {
                        let wanted = wanted(&piece);
                        let (stage, free) = self.take_staging(file.bytes)?;
                        let read = self.transfer.copy(Stream::NvmeRead, file, stage, free)?;
                        self.join(read)?;
                        let bytes = wanted.end - wanted.start;
                        let out = &mut part[(wanted.start - range.start) as usize..][..bytes as usize];
                        self.copy_out(stage.part(wanted.start - piece.offset, bytes), out);
                        self.staging.give(stage, read);
                    }
                }
            }
        }
        assert!(rest.is_empty(), "{} bytes more than the ranges have", rest.len());
        flying.map_or(Ok(()), |last| self.land(last))
    }

    /// The two halves of the pinned memory for snapshots.
    fn snapshot_stages(&self) -> Option<[Span; 2]> {
        let reserved = self.plan.fixed.host.iter().any(|(category, _)| *category == Category::Snapshot);
        let stage = reserved.then(|| self.fixed(Tier::Host, Category::Snapshot))?;
        Some([stage.part(0, stage.bytes / 2), stage.part(stage.bytes / 2, stage.bytes / 2)])
    }

    /// Takes a piece that has been on its way to where it is wanted.
    fn land(&self, piece: Flying<'_>) -> Result<()> {
        self.join(piece.done)?;
        self.copy_out(piece.stage, piece.target);
        Ok(())
    }

    /// Copies host memory that nobody writes now.
    fn copy_out(&self, source: Span, out: &mut [u8]) {
        // One core copies at a tenth of what the memory gives.
        out.par_chunks_mut(COPIED_AT_ONCE).enumerate().for_each(|(index, out)| {
            let part = source.part((index * COPIED_AT_ONCE) as u64, out.len() as u64);
            self.backend.read_host(part, out);
        });
    }

    /// Replaces the raw bytes of what this rank stores of a chunk.
    ///
    /// # Errors
    /// The backend's.
    ///
    /// # Panics
    /// If the length differs.
    pub fn write_chunk(&mut self, chunk: ChunkId, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len() as u64, self.chunk(chunk).home.bytes, "{chunk:?}: wrong number of bytes");
        self.settle()?;
        if self.chunk(chunk).idle_copy().is_some() {
            self.drop_copy(chunk);
        }
        self.write_home(chunk, 0, bytes)
    }

    /// What this rank stores of a chunk: first element within the group, and count.
    pub fn stored_range(&self, chunk: ChunkId) -> (u64, u64) {
        if self.sharded(chunk) { self.own_range(chunk) } else { (0, self.layout.group(chunk.group()).elements) }
    }

    /// Blocks until everything issued is done.
    ///
    /// # Errors
    /// The first failure of queued work.
    pub fn settle(&mut self) -> Result<()> {
        for stream in Stream::ALL {
            self.backend.join(self.backend.mark(stream))?;
        }
        Ok(())
    }

    fn join(&self, fence: Fence) -> Result<()> {
        for mark in fence.marks() {
            self.backend.join(mark)?;
        }
        Ok(())
    }

    /// Writes bytes into a chunk's home, which nobody uses now.
    fn write_home(&mut self, chunk: ChunkId, offset: u64, bytes: &[u8]) -> Result<()> {
        let home = self.chunk(chunk).home;
        if home.tier != Tier::Nvme {
            return Ok(self.backend.upload(home.part(offset, bytes.len() as u64), bytes)?);
        }
        // Offsets are multiples of the piece, so only the last piece ends within a file granule.
        for (file, piece) in file_pieces(home.part(offset, bytes.len() as u64), self.plan.placement.staged_bytes()) {
            let (stage, free) = self.take_staging(file.bytes)?;
            self.join(free)?;
            self.backend.write_host(stage, &bytes[piece.offset as usize..(piece.offset + piece.bytes) as usize]);
            let written = self.transfer.copy(Stream::NvmeWrite, stage, file, free)?;
            self.join(written)?;
            self.staging.give(stage, written);
        }
        Ok(())
    }
}

/// `values` as bytes of `dtype`, in `buffer` where they must be converted.
fn encode<'a>(values: &'a [f32], dtype: DType, buffer: &'a mut Vec<u8>) -> &'a [u8] {
    if dtype == DType::F32 {
        return bytemuck::cast_slice(values);
    }
    buffer.resize(2 * values.len(), 0);
    match dtype {
        DType::Bf16 => narrow(values, buffer, numeric::round_bf16),
        DType::F16 => narrow(values, buffer, numeric::round_f16),
        DType::Rem16 => narrow(values, buffer, |value| numeric::split(value).1 as u16),
        DType::F32 | DType::F64 | DType::I32 | DType::Q8 => unreachable!("weights are not kept as {dtype:?}"),
    }
    buffer
}

/// Each type has a loop of its own, which the compiler can make wide.
fn narrow(values: &[f32], out: &mut [u8], convert: impl Fn(f32) -> u16 + Sync) {
    out.par_chunks_mut(2 * SLICE).zip(values.par_chunks(SLICE)).for_each(|(out, values)| {
        for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *out = convert(*value).to_le_bytes();
        }
    });
}

fn decode(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        DType::Bf16 => bytes.chunks_exact(2).map(|b| numeric::widen_bf16(u16::from_le_bytes([b[0], b[1]]))).collect(),
        DType::F16 => bytes.chunks_exact(2).map(|b| numeric::widen_f16(u16::from_le_bytes([b[0], b[1]]))).collect(),
        DType::F64 | DType::I32 | DType::Q8 | DType::Rem16 => unreachable!("weights are not kept as {dtype:?}"),
    }
}
