//! The small data of a step: token ids and targets on their way up, scalars on their way down.
//!
//! Inputs are written into pinned host memory and copied to the device in one piece per step, between operators
//! in their order. Host memory is double, so that preparing a step never waits for the one in flight; results are
//! read back the same way and looked at a step later. This module owns the layout of both and the order of
//! those copies; it knows no mathematics.

use crate::{
    error::{Error, Result},
    model::embedding::Ids,
};
use castor_kernels::{Among, Backend, DType, Mark, Span, Stream, Tier, View, ops::IGNORED, ops::control};

/// A micro-batch of this rank, as the data gives it: `rows` rows of S tokens.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch<'a> {
    /// Token ids, row after row.
    pub ids: &'a [i32],
    /// Label *of* each token (it is predicted from the token before, as in Hugging Face); -100 does not count.
    pub labels: &'a [i32],
    /// Position, within its row, of each token's document's first token, for runs with document masks. None: each
    /// row is one document.
    pub starts: Option<&'a [i32]>,
}

impl MicroBatch<'_> {
    /// Tokens that count: labels that are not ignored and have a token before them.
    pub fn counted(&self, sequence: u64) -> u64 {
        let row = |labels: &[i32]| labels[1..].iter().filter(|&&l| l != IGNORED).count() as u64;
        self.labels.chunks_exact(sequence as usize).map(row).sum()
    }
}

/// A micro-batch that was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    /// Rows.
    pub batch: u64,
    /// Different ids.
    pub distinct: u64,
}

/// What comes back from a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Readings {
    /// Sum of the losses of all tokens of all ranks.
    pub loss_sum: f32,
    /// Global gradient norm, unscaled, before clipping.
    pub norm: f32,
    /// Whether the update was made.
    pub finite: bool,
}

/// Layout of the inputs' memory. All offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// S
    pub sequence: u64,
    /// B: most rows of a micro-batch.
    pub batch: u64,
    /// Most micro-batches of a step.
    pub micro_batches: u64,
    /// V
    pub vocabulary: u64,
    /// Groups of chunks.
    pub groups: u64,
    /// D
    pub head_dim: u64,
    /// Ranks.
    pub world: u64,
    /// Whether micro-batches carry document starts.
    pub documents: bool,
}

/// f32 loss sum in front of the control scalars: what is read back.
const READINGS_BYTES: u64 = 16 + DType::F32.bytes(control::COUNT);
const ALIGNMENT: u64 = 256;

const fn align(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

impl Layout {
    const fn tokens(&self) -> u64 {
        self.sequence * self.batch
    }

    /// ids, targets, order, (document starts,) bounds of one micro-batch.
    const fn micro_bytes(&self) -> u64 {
        self.bounds() * align(DType::I32.bytes(self.tokens())) + align(DType::I32.bytes(self.tokens() + 1))
    }

    /// Which array of a micro-batch the bounds of equal ids are: the last, as it is longer.
    const fn bounds(&self) -> u64 {
        if self.documents { 4 } else { 3 }
    }

    const fn tokens_bytes(&self) -> u64 {
        self.micro_bytes() * self.micro_batches
    }

    const fn rope_bytes(&self) -> u64 {
        align(DType::F32.bytes(self.sequence * self.head_dim))
    }

    const fn slots_bytes(&self) -> u64 {
        align(DType::F64.bytes(self.groups))
    }

    /// Bytes on the device: inputs, rotation table, norm slots, readings, the Hessian's control.
    pub const fn device_bytes(&self) -> u64 {
        self.tokens_bytes() + self.rope_bytes() + self.slots_bytes() + 2 * ALIGNMENT
    }

    /// Bytes on the host: two of the inputs and two of the readings.
    pub const fn host_bytes(&self) -> u64 {
        2 * (self.tokens_bytes() + ALIGNMENT)
    }
}

/// The inputs' memory and the state of its copies.
pub(crate) struct Inputs {
    layout: Layout,
    device: Span,
    host: Span,
    /// One step's inputs as they will lie in memory.
    staging: Vec<i32>,
    sent: Vec<Sent>,
    /// When each half of the host's inputs has been copied away.
    copied: [Option<Mark>; 2],
    half: usize,
    reading: usize,
}

impl Inputs {
    /// Over spans of at least [`Layout::device_bytes`] and [`Layout::host_bytes`].
    pub fn new(layout: Layout, device: Span, host: Span) -> Self {
        Inputs {
            layout,
            device,
            host,
            // Taken at the first step: a rehearsal sends nothing and takes nothing.
            staging: Vec::new(),
            sent: Vec::with_capacity(layout.micro_batches as usize),
            copied: [None; 2],
            half: 0,
            reading: 0,
        }
    }

    /// Puts the rotation table f32 `[S,D]` on the device. Control plane.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn upload_rope(&self, ops: &dyn Backend, table: &[f32]) -> Result<()> {
        let target = self.rope().span;
        assert_eq!(target.bytes, 4 * table.len() as u64, "rotation table");
        Ok(ops.upload(target, bytemuck::cast_slice(table))?)
    }

    /// Checks, prepares and sends a step's micro-batches; labels become targets, shifted by one.
    ///
    /// # Errors
    /// If there are too many, or of the wrong length, or hold ids outside of the vocabulary; or if a copy fails.
    pub fn send(&mut self, ops: &dyn Backend, micros: &[MicroBatch]) -> Result<()> {
        self.prepare(micros)?;
        let bytes = self.layout.micro_bytes() * micros.len() as u64;
        if bytes == 0 {
            return Ok(());
        }
        self.half ^= 1;
        if let Some(mark) = self.copied[self.half] {
            ops.join(mark)?;
        }
        let source = self.host.part(self.half as u64 * self.layout.tokens_bytes(), bytes);
        let staged = &self.staging[..(bytes / 4) as usize];
        ops.write_host(source, bytemuck::cast_slice(staged));
        ops.copy(Stream::Compute, source, self.device.part(0, bytes))?;
        self.copied[self.half] = Some(ops.mark(Stream::Compute));
        Ok(())
    }

    /// Pretends that `micro_batches` full ones were sent: for rehearsal.
    pub fn pretend(&mut self, micro_batches: u64) {
        self.sent.clear();
        let full = Sent { batch: self.layout.batch, distinct: self.layout.tokens().min(self.layout.vocabulary) };
        self.sent.resize(micro_batches as usize, full);
    }

    /// The micro-batches of the present step.
    pub fn sent(&self) -> &[Sent] {
        &self.sent
    }

    /// A sent micro-batch's ids.
    pub fn ids(&self, micro: u64) -> Ids {
        let Sent { batch, distinct } = self.sent[micro as usize];
        let tokens = batch * self.layout.sequence;
        Ids {
            ids: self.micro(micro, 0, tokens),
            order: self.micro(micro, 2, tokens),
            starts: self.micro(micro, self.layout.bounds(), distinct + 1),
            distinct,
            tokens,
        }
    }

    /// A sent micro-batch's targets i32 `[T]`.
    pub fn targets(&self, micro: u64) -> View {
        let tokens = self.sent[micro as usize].batch * self.layout.sequence;
        self.micro(micro, 1, tokens)
    }

    /// A sent micro-batch's document starts i32 `[B,S]`, in a run with document masks.
    pub fn starts(&self, micro: u64) -> Option<View> {
        let tokens = self.sent[micro as usize].batch * self.layout.sequence;
        self.layout.documents.then(|| self.micro(micro, 3, tokens))
    }

    /// f32 `[S,D]`
    pub fn rope(&self) -> View {
        let elements = self.layout.sequence * self.layout.head_dim;
        self.device.part(self.layout.tokens_bytes(), DType::F32.bytes(elements)).view(DType::F32)
    }

    /// f64, one per group.
    pub fn slots(&self) -> View {
        let offset = self.layout.tokens_bytes() + self.layout.rope_bytes();
        self.device.part(offset, DType::F64.bytes(self.layout.groups)).view(DType::F64)
    }

    /// f32 `[1]`: sum of the losses.
    pub fn loss(&self) -> View {
        self.readings_span().part(0, DType::F32.bytes(1)).view(DType::F32)
    }

    /// The update's control scalars.
    pub fn control(&self) -> View {
        self.readings_span().part(16, DType::F32.bytes(control::COUNT)).view(DType::F32)
    }

    /// The Hessian estimate's control scalars.
    pub fn hessian_control(&self) -> View {
        let offset = self.layout.device_bytes() - ALIGNMENT;
        self.device.part(offset, DType::F32.bytes(control::COUNT)).view(DType::F32)
    }

    /// Makes `view` the sum over all ranks, between the operators before and after this call.
    ///
    /// # Errors
    /// If a peer is gone.
    pub fn sum_over_ranks(&self, ops: &dyn Backend, view: View) -> castor_kernels::Result<()> {
        if self.layout.world == 1 {
            return Ok(());
        }
        ops.wait(Stream::Collective, ops.mark(Stream::Compute));
        ops.all_reduce(Among::All, view)?;
        ops.wait(Stream::Compute, ops.mark(Stream::Collective));
        Ok(())
    }

    /// Sends the readings to the host; [`Inputs::read`] gives them once `Ticket` is due.
    ///
    /// # Errors
    /// If the copy cannot be issued.
    pub fn read_back(&mut self, ops: &dyn Backend) -> Result<Ticket> {
        self.reading ^= 1;
        let half = self.reading;
        ops.copy(Stream::Compute, self.readings_span(), self.readings(half))?;
        Ok(Ticket { half, mark: ops.mark(Stream::Compute) })
    }

    /// Waits for readings. At most two tickets may be open.
    ///
    /// # Errors
    /// If work issued before them failed.
    pub fn read(&self, ops: &dyn Backend, ticket: Ticket) -> Result<Readings> {
        ops.join(ticket.mark)?;
        let mut bytes = [0; READINGS_BYTES as usize];
        ops.read_host(self.readings(ticket.half), &mut bytes);
        let at = |index: u64| {
            let start = (16 + index * 4) as usize;
            f32::from_le_bytes([bytes[start], bytes[start + 1], bytes[start + 2], bytes[start + 3]])
        };
        Ok(Readings {
            loss_sum: f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            norm: at(control::NORM),
            finite: at(control::FINITE) == 1.0,
        })
    }

    fn readings_span(&self) -> Span {
        let offset = self.layout.device_bytes() - 2 * ALIGNMENT;
        self.device.part(offset, READINGS_BYTES)
    }

    fn readings(&self, half: usize) -> Span {
        let offset = 2 * self.layout.tokens_bytes() + half as u64 * ALIGNMENT;
        debug_assert_eq!(self.host.tier, Tier::Host);
        self.host.part(offset, READINGS_BYTES)
    }

    /// Array `index` (ids, targets, order, document starts, bounds) of a micro-batch.
    fn micro(&self, micro: u64, index: u64, elements: u64) -> View {
        let each = align(DType::I32.bytes(self.layout.tokens()));
        let offset = micro * self.layout.micro_bytes() + index * each;
        self.device.part(offset, DType::I32.bytes(elements)).view(DType::I32)
    }

    fn prepare(&mut self, micros: &[MicroBatch]) -> Result<()> {
        let layout = self.layout;
        if micros.len() as u64 > layout.micro_batches {
            return Err(Error::Failed(format!(
                "a step of {} micro-batches was given; room was made for {}",
                micros.len(),
                layout.micro_batches
            )));
        }
        self.staging.resize((layout.tokens_bytes() / 4) as usize, 0);
        self.sent.clear();
        let each = (align(DType::I32.bytes(layout.tokens())) / 4) as usize;
        let stride = (layout.micro_bytes() / 4) as usize;
        for (index, micro) in micros.iter().enumerate() {
            let batch = rows(micro, &layout)?;
            let staged = &mut self.staging[index * stride..(index + 1) * stride];
            let (ids, staged) = staged.split_at_mut(each);
            let (targets, staged) = staged.split_at_mut(each);
            let (order, staged) = staged.split_at_mut(each);
            let (starts, bounds) = staged.split_at_mut(if layout.documents { each } else { 0 });
            let tokens = micro.ids.len();
            let (ids, order) = (&mut ids[..tokens], &mut order[..tokens]);
            if layout.documents {
                match micro.starts {
                    Some(given) => starts[..tokens].copy_from_slice(given),
                    None => starts[..tokens].fill(0),
                }
            }
            ids.copy_from_slice(micro.ids);
            shift(micro.labels, &mut targets[..tokens], layout.sequence as usize);
            let distinct = sort(ids, order, bounds);
            self.sent.push(Sent { batch, distinct });
        }
        Ok(())
    }
}

/// Readings on their way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    half: usize,
    mark: Mark,
}

/// Rows of a micro-batch, after looking at every id and label.
fn rows(micro: &MicroBatch, layout: &Layout) -> Result<u64> {
    let tokens = micro.ids.len() as u64;
    let batch = tokens / layout.sequence;
    if batch * layout.sequence != tokens || batch > layout.batch || tokens == 0 {
        return Err(Error::Failed(format!(
            "a micro-batch of {tokens} tokens was given; room was made for 1 to {} rows of {}",
            layout.batch, layout.sequence
        )));
    }
    if micro.labels.len() != micro.ids.len() {
        return Err(Error::Failed(format!("a micro-batch has {tokens} token ids and {} labels", micro.labels.len())));
    }
    if let Some(starts) = micro.starts {
        check_starts(starts, micro.ids.len(), layout)?;
    }
    let known = 0..layout.vocabulary;
    let outside = |id: i32| u64::try_from(id).map_or(true, |id| !known.contains(&id));
    let bad_id = micro.ids.iter().find(|&&id| outside(id));
    let bad_label = micro.labels.iter().find(|&&label| label != IGNORED && outside(label));
    match (bad_id, bad_label) {
        (Some(id), _) => Err(out_of_range("token id", *id, layout)),
        (_, Some(label)) => Err(out_of_range("label", *label, layout)),
        _ => Ok(batch),
    }
}

/// The kernels skip what lies before a tile's first start: a wrong one would be a wrong result.
fn check_starts(starts: &[i32], tokens: usize, layout: &Layout) -> Result<()> {
    if !layout.documents || starts.len() != tokens {
        return Err(Error::Failed(format!(
            "a micro-batch of {tokens} tokens has {} document starts in a run {} document masks",
            starts.len(),
            if layout.documents { "with" } else { "without" }
        )));
    }
    for row in starts.chunks_exact(layout.sequence as usize) {
        let mut before = 0;
        for (position, &start) in row.iter().enumerate() {
            if start < before || start > position as i32 {
                return Err(Error::Failed(format!(
                    "the document of token {position} of a row starts at {start}; between {before} and {position} is \
                     possible"
                )));
            }
            before = start;
        }
    }
    Ok(())
}

fn out_of_range(what: &str, value: i32, layout: &Layout) -> Error {
    Error::Usage(format!(
        "{what} {value} is outside of the model's vocabulary of {}: the data was made with another tokenizer, or \
         vocab_size in config.json is too small",
        layout.vocabulary
    ))
}

/// Targets: each row's labels one to the left, nothing at its end.
fn shift(labels: &[i32], targets: &mut [i32], sequence: usize) {
    for (labels, targets) in labels.chunks_exact(sequence).zip(targets.chunks_exact_mut(sequence)) {
        targets[..sequence - 1].copy_from_slice(&labels[1..]);
        targets[sequence - 1] = IGNORED;
    }
}

/// Fills `order` with positions sorted stably by id and `starts` with the bounds of equal ids; returns how many
/// different ids there are.
fn sort(ids: &[i32], order: &mut [i32], starts: &mut [i32]) -> u64 {
    for (position, slot) in order.iter_mut().enumerate() {
        *slot = position as i32;
    }
    order.sort_unstable_by_key(|&position| (ids[position as usize], position));
    let mut distinct = 0;
    for index in 0..order.len() {
        if index == 0 || ids[order[index] as usize] != ids[order[index - 1] as usize] {
            starts[distinct] = index as i32;
            distinct += 1;
        }
    }
    starts[distinct] = order.len() as i32;
    distinct as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_starts_bucket_the_ids() {
        let ids = [5, 2, 5, 9, 2, 2];
        let (mut order, mut starts) = ([0; 6], [0; 7]);
        assert_eq!(sort(&ids, &mut order, &mut starts), 3);
        assert_eq!(order, [1, 4, 5, 0, 2, 3]);
        assert_eq!(starts[..4], [0, 3, 5, 6]);
    }

    #[test]
    fn labels_move_left_within_each_row_and_the_count_agrees() {
        let labels = [9, 1, -100, 3, 4, 5];
        let mut targets = [0; 6];
        shift(&labels, &mut targets, 3);
        assert_eq!(targets, [1, -100, -100, 4, 5, -100]);
        let micro = MicroBatch { ids: &[0; 6], labels: &labels, starts: None };
        let counted = targets.iter().filter(|&&t| t != IGNORED).count() as u64;
        assert_eq!(micro.counted(3), counted);
    }
}
