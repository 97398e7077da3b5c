//! Activation memory: one fixed span of the device, laid out exactly before anything is reserved.
//!
//! Two kinds of places. *Kept* ones live from a block's forward to its backward, one set per block and
//! micro-batch; how much a set holds is the block's [`Keep`]. *Shared* ones are scratch that every block uses
//! in turn. An intermediate that is not kept is computed into scratch, in the forward and again in the
//! backward, by the same operators in the same order: the level changes bytes, never bits.
//!
//! Buffers that are never alive together share a place: the FFN's and the packed attention gradient and the
//! logits (`wide`), both norms' outputs (`normed`), both narrow gradients (`narrow`); a micro-batch's hidden state
//! and its gradient lie in neighbouring places of one pool, where each gradient takes over the place of the
//! hidden state before it. This module owns offsets; it issues nothing.

use crate::model::{AttentionKind, Shape, block, head};
use castor_kernels::{Backend, DType, Span, View};
use serde::{Deserialize, Serialize};

/// What is kept of a block's forward for its backward, most first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// Everything.
    All,
    /// Norm outputs and the SwiGLU's output are computed again (about 2 % more time).
    Selective,
    /// As `Selective`, and gate and up are computed again: one more product of 2·C·2F per token.
    Ffn,
    /// Only the block's input is kept.
    Block,
}

impl Keep {
    /// All levels, most bytes first.
    pub const ALL: [Keep; 4] = [Keep::All, Keep::Selective, Keep::Ffn, Keep::Block];
}

/// Bytes of logits that exist at once, where nothing else asks for more.
pub const LOGITS_BYTES: u64 = 512 << 20;

/// What to lay out.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model.
    pub shape: Shape,
    /// Sequence and kind of attention.
    pub attention: AttentionKind,
    /// B: most rows of a micro-batch.
    pub batch: u64,
    /// Most micro-batches of a step.
    pub micro_batches: u64,
    /// The compute type: f32, f16 or bf16.
    pub dtype: DType,
    /// Level of each block.
    pub keep: Vec<Keep>,
    /// In the first of several rounds blocks keep at most this; see [`Activations::first_round`].
    pub first_keep: Keep,
    /// Bytes of logits that may exist at once. What `wide` has anyway is used too.
    pub logits_bytes: u64,
}

/// A point of the step, for [`Activations::live_bytes`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Embedding forward.
    Embed,
    /// Forward of a block.
    Forward(u64),
    /// Head, forward and backward.
    Head,
    /// Backward of a block.
    Backward(u64),
    /// Embedding backward.
    EmbedBackward,
    /// Nothing is alive: norm and updates.
    Update,
}

/// Byte offsets of what is kept per micro-batch at one level.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    n1: Option<u64>,
    rstd1: Option<u64>,
    qkv: Option<u64>,
    attention: Option<u64>,
    stats: Option<u64>,
    h2: Option<u64>,
    n2: Option<u64>,
    rstd2: Option<u64>,
    gate_up: Option<u64>,
    act: Option<u64>,
    bytes: u64,
}

/// Offset and bytes of a shared place.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    offset: u64,
    bytes: u64,
}

/// Places that every block shares.
#[derive(Clone, Copy, Debug, Default)]
struct Shared {
    pool: Place,
    normed: Place,
    rstd: Place,
    narrow: Place,
    wide: Place,
    scratch: Place,
    losses: Place,
    qkv: Place,
    attention: Place,
    stats: Place,
    h2: Place,
    gate_up: Place,
}

/// The layout.
#[derive(Clone, Debug)]
pub struct Activations {
    request: Request,
    kept: [Kept; Keep::ALL.len()],
    /// Byte offset of each block's first micro-batch.
    blocks: Vec<u64>,
    shared: Shared,
    logits_rows: u64,
    bytes: u64,
}

/// Every place starts at a multiple of this many bytes.
const ALIGNMENT: u64 = 256;

/// Hands out offsets one after the other.
struct Cursor(u64);

impl Cursor {
    fn take(&mut self, bytes: u64) -> u64 {
        let offset = self.0;
        self.0 += bytes.next_multiple_of(ALIGNMENT);
        offset
    }

    fn place(&mut self, bytes: u64) -> Place {
        Place { offset: self.take(bytes), bytes }
    }
}

impl Activations {
    /// Lays everything out. `backend` says how much scratch its operators want.
    ///
    /// # Panics
    /// If there is not one level per block.
    pub fn new(request: Request, backend: &dyn Backend) -> Self {
        let Request { shape, attention, batch, micro_batches, dtype, .. } = request;
        assert_eq!(request.keep.len() as u64, shape.blocks, "one level per block");
        let tokens = batch * attention.sequence;
        let rows = |columns: u64| dtype.bytes(tokens * columns);
        let stats_bytes = DType::F32.bytes(tokens * shape.heads);
        let rstd_bytes = DType::F32.bytes(tokens);
        let kept = Keep::ALL.map(|level| {
            let mut cursor = Cursor(0);
            cursor.take(rows(shape.hidden));
            let mut kept = Kept::default();
            if level <= Keep::Ffn {
                kept.qkv = Some(cursor.take(rows(shape.packed())));
                kept.attention = Some(cursor.take(rows(shape.query())));
                kept.stats = Some(cursor.take(stats_bytes));
                kept.h2 = Some(cursor.take(rows(shape.hidden)));
            }
            if level <= Keep::Selective {
                kept.gate_up = Some(cursor.take(rows(2 * shape.ffn)));
            }
            if level == Keep::All {
                kept.n1 = Some(cursor.take(rows(shape.hidden)));
                kept.rstd1 = Some(cursor.take(rstd_bytes));
                kept.n2 = Some(cursor.take(rows(shape.hidden)));
                kept.rstd2 = Some(cursor.take(rstd_bytes));
                kept.act = Some(cursor.take(rows(shape.ffn)));
            }
            kept.bytes = cursor.0;
            kept
        });

        let kept_bytes: u64 = request.keep.iter().map(|&level| kept[level as usize].bytes * micro_batches).sum();
        let blocks = offsets(&request, &kept, kept_bytes);
        let mut cursor = Cursor(kept_bytes);

        let wide = rows(shape.ffn.max(shape.packed()));
        let row = dtype.bytes(shape.vocabulary);
        let logits_rows = logits_rows(request.logits_bytes.max(wide), row, tokens);
        let worst = request.keep.iter().max().copied().unwrap_or(Keep::All).max(request.first_keep);
        let where_dropped = |from: Keep, bytes: u64| if worst >= from { bytes } else { 0 };
        let shared = Shared {
            pool: cursor.place(rows(shape.hidden).next_multiple_of(ALIGNMENT) * (micro_batches + 1)),
            normed: cursor.place(rows(shape.hidden)),
            rstd: cursor.place(rstd_bytes),
            narrow: cursor.place(rows(shape.hidden.max(shape.query()))),
            wide: cursor.place(wide.max(logits_rows * row)),
            scratch: cursor.place(scratch_bytes(&request, backend)),
            losses: cursor.place(DType::F32.bytes(tokens)),
            qkv: cursor.place(where_dropped(Keep::Block, rows(shape.packed()))),
            attention: cursor.place(where_dropped(Keep::Block, rows(shape.query()))),
            stats: cursor.place(where_dropped(Keep::Block, stats_bytes)),
            h2: cursor.place(where_dropped(Keep::Block, rows(shape.hidden))),
            gate_up: cursor.place(where_dropped(Keep::Ffn, rows(2 * shape.ffn))),
        };
        Activations { request, kept, blocks, shared, logits_rows, bytes: cursor.0 }
    }

    /// The layout of a step's first round in the same span, where blocks keep no more than [`Request::first_keep`]: the
    /// states that the updates of that round's forward leave behind can stay where activations would be, and go home
    /// behind its backward.
    #[must_use]
    pub fn first_round(&self) -> Activations {
        let mut request = self.request.clone();
        for level in &mut request.keep {
            *level = (*level).max(request.first_keep);
        }
        let blocks = offsets(&request, &self.kept, self.shared.pool.offset);
        Activations { request, blocks, ..self.clone() }
    }

    /// Bytes of the whole span.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that one micro-batch keeps of a block at `level`.
    pub const fn kept_bytes(&self, level: Keep) -> u64 {
        self.kept[level as usize].bytes
    }

    /// What was laid out.
    pub const fn request(&self) -> &Request {
        &self.request
    }

    /// Bytes in use at a point of a step of `micro_batches`.
    pub fn live_bytes(&self, phase: Phase, micro_batches: u64) -> u64 {
        let s = &self.shared;
        let hidden = self.hidden_bytes() * micro_batches;
        let kept = |until: u64| -> u64 {
            let blocks = &self.request.keep[..until as usize];
            let each: u64 = blocks.iter().map(|&k| self.kept_bytes(k)).sum();
            each * micro_batches
        };
        let dropped = |block: u64| match self.request.keep[block as usize] {
            Keep::All | Keep::Selective => 0,
            Keep::Ffn => s.gate_up.bytes,
            Keep::Block => s.gate_up.bytes + s.qkv.bytes + s.attention.bytes + s.stats.bytes + s.h2.bytes,
        };
        let small = s.normed.bytes + s.rstd.bytes + s.scratch.bytes;
        match phase {
            Phase::Embed | Phase::EmbedBackward => hidden,
            Phase::Forward(block) => kept(block + 1) + hidden + small + s.wide.bytes + dropped(block),
            Phase::Head => {
                let all = kept(self.request.shape.blocks) + hidden + self.hidden_bytes();
                all + small + s.narrow.bytes + s.wide.bytes + s.losses.bytes
            }
            Phase::Backward(block) => {
                let own = kept(block + 1) + hidden + dropped(block);
                own + small + s.narrow.bytes + s.wide.bytes
            }
            Phase::Update => 0,
        }
    }

    /// Bytes at the beginning of the span in which nothing is kept at a point of a step: what blocks keep that come
    /// later in the forward, or came before in the backward.
    pub fn spare_bytes(&self, phase: Phase) -> u64 {
        let last = self.request.shape.blocks - 1;
        let kept_until = match phase {
            Phase::Embed => 0,
            // A block's output is the next one's input.
            Phase::Forward(block) => last.min(block + 1),
            Phase::Head => last,
            Phase::Backward(block) => block,
            Phase::EmbedBackward | Phase::Update => return self.shared.pool.offset,
        };
        self.blocks[kept_until as usize]
    }

    /// Where block `block` of micro-batch `micro`, of `batch` rows, keeps and computes. `base` is the span of
    /// [`Activations::bytes`].
    pub fn block(&self, base: Span, block: u64, micro: u64, batch: u64) -> block::Memory {
        let keep = self.request.keep[block as usize];
        let kept = &self.kept[keep as usize];
        let own = self.blocks[block as usize] + kept.bytes * micro;
        let shape = &self.request.shape;
        let tokens = batch * self.request.attention.sequence;
        let s = &self.shared;
        let view = |place: Option<u64>, shared: Place, columns: u64| {
            let offset = place.map_or(shared.offset, |offset| own + offset);
            self.view(base, offset, tokens * columns)
        };
        let scalars = |place: Option<u64>, shared: Place, columns: u64| {
            let offset = place.map_or(shared.offset, |offset| own + offset);
            let elements = tokens * columns;
            base.part(offset, DType::F32.bytes(elements)).view(DType::F32)
        };
        block::Memory {
            keep,
            batch,
            input: self.view(base, own, tokens * shape.hidden),
            n1: view(kept.n1, s.normed, shape.hidden),
            rstd1: scalars(kept.rstd1, s.rstd, 1),
            qkv: view(kept.qkv, s.qkv, shape.packed()),
            attention: view(kept.attention, s.attention, shape.query()),
            stats: scalars(kept.stats, s.stats, shape.heads),
            h2: view(kept.h2, s.h2, shape.hidden),
            n2: view(kept.n2, s.normed, shape.hidden),
            rstd2: scalars(kept.rstd2, s.rstd, 1),
            gate_up: view(kept.gate_up, s.gate_up, 2 * shape.ffn),
            act: view(kept.act, s.wide, shape.ffn),
            wide: self.view(base, s.wide.offset, tokens * shape.ffn.max(shape.packed())),
            narrow: self.view(base, s.narrow.offset, tokens * shape.hidden.max(shape.query())),
            scratch: self.scratch(base),
        }
    }

    /// Where block `block` writes its output: the next block's input, or the hidden state.
    pub fn block_output(&self, base: Span, block: u64, micro: u64, batch: u64) -> View {
        if block + 1 == self.request.shape.blocks {
            self.hidden(base, micro, batch)
        } else {
            self.block_input(base, block + 1, micro, batch)
        }
    }

    /// The kept input of a block `[T,C]`.
    pub fn block_input(&self, base: Span, block: u64, micro: u64, batch: u64) -> View {
        let level = self.request.keep[block as usize];
        let own = self.blocks[block as usize] + self.kept_bytes(level) * micro;
        let tokens = batch * self.request.attention.sequence;
        self.view(base, own, tokens * self.request.shape.hidden)
    }

    /// The last block's output of a micro-batch `[T,C]`.
    pub fn hidden(&self, base: Span, micro: u64, batch: u64) -> View {
        self.pooled(base, micro + 1, batch)
    }

    /// The gradient of a micro-batch's hidden state `[T,C]`, from the head back to the embedding. It takes the
    /// place of the hidden state of the micro-batch before: the head goes through them in order.
    pub fn d_hidden(&self, base: Span, micro: u64, batch: u64) -> View {
        self.pooled(base, micro, batch)
    }

    /// Where the head of a micro-batch works.
    pub fn head(&self, base: Span, micro: u64, batch: u64) -> head::Memory {
        let s = &self.shared;
        let (hidden, tokens) = (self.request.shape.hidden, batch * self.request.attention.sequence);
        let scalars = |place: Place| base.part(place.offset, DType::F32.bytes(tokens)).view(DType::F32);
        head::Memory {
            tokens,
            chunk: self.logits_rows,
            hidden: self.hidden(base, micro, batch),
            normed: self.view(base, s.normed.offset, tokens * hidden),
            rstd: scalars(s.rstd),
            logits: self.view(base, s.wide.offset, self.logits_rows * self.request.shape.vocabulary),
            d_normed: self.view(base, s.narrow.offset, tokens * hidden),
            losses: scalars(s.losses),
            scratch: self.scratch(base),
        }
    }

    fn pooled(&self, base: Span, index: u64, batch: u64) -> View {
        let tokens = batch * self.request.attention.sequence;
        let offset = self.shared.pool.offset + index * self.hidden_bytes();
        self.view(base, offset, tokens * self.request.shape.hidden)
    }

    /// Bytes of a place of the pool.
    fn hidden_bytes(&self) -> u64 {
        self.shared.pool.bytes / (self.request.micro_batches + 1)
    }

    fn scratch(&self, base: Span) -> View {
        base.part(self.shared.scratch.offset, self.shared.scratch.bytes).view(DType::F32)
    }

    fn view(&self, base: Span, offset: u64, elements: u64) -> View {
        let dtype = self.request.dtype;
        base.part(offset, dtype.bytes(elements)).view(dtype)
    }
}

/// Byte offsets of what blocks keep, the last block first, so that it ends at `end`: what the last block keeps is wanted
/// last and free first, so that what is spare at a tick is always the beginning of the span.
fn offsets(request: &Request, kept: &[Kept], end: u64) -> Vec<u64> {
    let mut offset = end;
    let next = |&level: &Keep| {
        offset -= kept[level as usize].bytes * request.micro_batches;
        offset
    };
    request.keep.iter().map(next).collect()
}

/// Rows of logits within `bytes`: whole tiles of 128 where there are several.
fn logits_rows(bytes: u64, row: u64, tokens: u64) -> u64 {
    let rows = (bytes / row).clamp(1, tokens);
    if rows < tokens && rows > 128 { rows / 128 * 128 } else { rows }
}

/// Scratch of attention and of the reductions over tokens, for every number of rows a micro-batch may have.
fn scratch_bytes(request: &Request, backend: &dyn Backend) -> u64 {
    let shape = &request.shape;
    let mut columns = shape.hidden;
    if shape.qkv_bias {
        columns = columns.max(shape.packed());
    }
    if shape.mlp_bias {
        columns = columns.max(2 * shape.ffn);
    }
    let attention = shape.attention(request.batch, request.attention);
    let reductions = (1..=request.batch).map(|batch| {
        let tokens = batch * request.attention.sequence;
        let bytes = |columns| backend.rmsnorm_scratch_bytes(tokens, columns);
        bytes(columns).max(bytes(shape.hidden))
    });
    reductions
        .fold(backend.attention_scratch_bytes(attention, request.dtype, request.attention.documents), u64::max)
        .next_multiple_of(4)
}

#[cfg(test)]
mod tests;
