//! A backend with real bytes whose streams make progress in a seeded random order, fail on request, and
//! know nothing of each other except marks: any missing wait shows as wrong bytes for some seed.
//!
//! Operators do not compute; [`Simulated::check`] and [`Simulated::fill`] stand in for them on the compute
//! stream. Other ranks are imagined to hold the same bytes as this one.

use castor_kernels::backend::{Backend, Collectives, Device, Memory, Order};
use castor_kernels::ops::{Attention, Classify, Into, Linear, State, Update};
use castor_kernels::{Among, DType, Error, Mark, Operators, Result, Span, Stream, Tier, View, rng};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::Path;

enum Command {
    Copy(Span, Span),
    Wait(Mark),
    Mark(u64),
    Fill(Span, u8),
    Check(Span, u8, String),
    Gather(Span, Span),
    Scatter(Span, Span),
    Add(Span, Span),
}

#[derive(Default)]
struct Inside {
    memory: [Vec<u8>; 3],
    queues: [VecDeque<Command>; Stream::ALL.len()],
    issued: [u64; Stream::ALL.len()],
    reached: [u64; Stream::ALL.len()],
    failure: Option<Error>,
    copies: u64,
    draws: u64,
    /// Bytes copied, by stream.
    pub copied: [u64; Stream::ALL.len()],
}

/// The backend.
pub struct Simulated {
    seed: u64,
    world: u32,
    rank: u32,
    /// Number of the copy that fails, if any.
    failing_copy: Option<u64>,
    inside: Mutex<Inside>,
}

impl Simulated {
    /// A rank of `world` whose streams are interleaved by `seed`; copy number `failing_copy` fails.
    pub fn new(seed: u64, world: u32, rank: u32, failing_copy: Option<u64>) -> Simulated {
        Simulated { seed, world, rank, failing_copy, inside: Mutex::default() }
    }

    /// The stream of operators on `span`.
    fn works_on(span: Span) -> Stream {
        if span.tier == Tier::Host { Stream::Host } else { Stream::Compute }
    }

    /// Queues on the stream of its operators: `span` holds `value` everywhere.
    pub fn check(&self, span: Span, value: u8, what: String) {
        self.issue(Self::works_on(span), Command::Check(span, value, what));
    }

    /// Queues on the stream of its operators: `span` becomes `value` everywhere.
    pub fn fill(&self, span: Span, value: u8) {
        self.issue(Self::works_on(span), Command::Fill(span, value));
    }

    /// Bytes copied so far on a stream.
    pub fn copied(&self, stream: Stream) -> u64 {
        self.inside.lock().copied[stream.index()]
    }

    fn issue(&self, stream: Stream, command: Command) {
        let mut inside = self.inside.lock();
        inside.queues[stream.index()].push_back(command);
        // Between two calls the streams make some progress, or none, or a lot.
        let steps = inside.draw(self.seed) % 6;
        for _ in 0..steps {
            let stream = inside.draw(self.seed) as usize % Stream::ALL.len();
            inside.step(stream, self.failing_copy);
        }
    }
}

impl Inside {
    fn draw(&mut self, seed: u64) -> u64 {
        self.draws += 1;
        rng::bits(seed, self.draws, 0)
    }

    /// Runs the next command of a stream if it can. Returns whether it did.
    fn step(&mut self, stream: usize, failing_copy: Option<u64>) -> bool {
        match self.queues[stream].front() {
            None => return false,
            Some(Command::Wait(mark)) if self.reached[mark.stream.index()] < mark.number => return false,
            Some(_) => {}
        }
        match self.queues[stream].pop_front().expect("looked at above") {
            Command::Wait(_) => {}
            Command::Mark(number) => self.reached[stream] = number,
            Command::Fill(span, value) => self.bytes(span).fill(value),
            Command::Check(span, value, what) => {
                let found = self.bytes(span).iter().find(|byte| **byte != value).copied();
                assert!(found.is_none(), "{what}: {span:?} holds {found:?}, expected {value}");
            }
            Command::Copy(source, target) => {
                self.copies += 1;
                self.copied[stream] += source.bytes;
                if Some(self.copies) == failing_copy {
                    self.failure.get_or_insert(Error::Device { call: "copy".into(), reason: "injected".into() });
                    return true;
                }
                let bytes = self.bytes(source).to_vec();
                self.bytes(target).copy_from_slice(&bytes);
            }
            Command::Gather(shard, full) => {
                let bytes = self.bytes(shard).to_vec();
                for part in self.bytes(full).chunks_exact_mut(bytes.len()) {
                    part.copy_from_slice(&bytes);
                }
            }
            Command::Scatter(own, shard) => {
                let bytes = self.bytes(own).to_vec();
                self.bytes(shard).copy_from_slice(&bytes);
            }
            Command::Add(source, target) => {
                let bytes = self.bytes(source).to_vec();
                let sums = self.bytes(target).iter_mut().zip(bytes);
                sums.for_each(|(target, source)| *target = target.wrapping_add(source));
            }
        }
        true
    }

    fn bytes(&mut self, span: Span) -> &mut [u8] {
        &mut self.memory[span.tier.index()][span.offset as usize..span.end() as usize]
    }
}

impl Memory for Simulated {
    fn reserve(&self, tier: Tier, bytes: u64, _: Option<&Path>) -> Result<()> {
        self.inside.lock().memory[tier.index()] = vec![0xEE; bytes.next_multiple_of(4096) as usize];
        Ok(())
    }

    fn upload(&self, target: Span, bytes: &[u8]) -> Result<()> {
        self.inside.lock().bytes(target)[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn download(&self, source: Span, out: &mut [u8]) -> Result<()> {
        for stream in Stream::ALL {
            self.join(self.mark(stream))?;
        }
        out.copy_from_slice(&self.inside.lock().bytes(source)[..out.len()]);
        Ok(())
    }

    fn write_host(&self, target: Span, bytes: &[u8]) {
        self.inside.lock().bytes(target)[..bytes.len()].copy_from_slice(bytes);
    }

    fn read_host(&self, source: Span, out: &mut [u8]) {
        out.copy_from_slice(&self.inside.lock().bytes(source)[..out.len()]);
    }
}

impl Order for Simulated {
    fn mark(&self, stream: Stream) -> Mark {
        let number = {
            let mut inside = self.inside.lock();
            inside.issued[stream.index()] += 1;
            inside.issued[stream.index()]
        };
        self.issue(stream, Command::Mark(number));
        Mark { stream, number }
    }

    fn wait(&self, stream: Stream, mark: Mark) {
        self.issue(stream, Command::Wait(mark));
    }

    fn join(&self, mark: Mark) -> Result<()> {
        let mut inside = self.inside.lock();
        while inside.reached[mark.stream.index()] < mark.number {
            let streams = Stream::ALL.len();
            let start = inside.draw(self.seed) as usize % streams;
            let moved = (0..streams).any(|next| inside.step((start + next) % streams, self.failing_copy));
            assert!(moved, "deadlock: no stream can go on while {mark:?} is awaited");
        }
        inside.failure.clone().map_or(Ok(()), Err)
    }

    fn reached(&self, mark: Mark) -> bool {
        self.inside.lock().reached[mark.stream.index()] >= mark.number
    }

    fn elapsed_ns(&self, _: Mark, _: Mark) -> Option<u64> {
        None
    }

    fn copy(&self, stream: Stream, source: Span, target: Span) -> Result<()> {
        assert_eq!(source.bytes, target.bytes);
        let tiers = (source.tier, target.tier);
        let expected = match stream {
            Stream::HostToDevice => (Tier::Host, Tier::Device),
            Stream::DeviceToHost => (Tier::Device, Tier::Host),
            Stream::NvmeRead => (Tier::Nvme, Tier::Host),
            Stream::NvmeWrite => (Tier::Host, Tier::Nvme),
            Stream::Compute | Stream::Collective | Stream::Host => panic!("chunks do not move on {stream:?}"),
        };
        assert_eq!(tiers, expected, "wrong stream");
        self.issue(stream, Command::Copy(source, target));
        Ok(())
    }
}

impl Collectives for Simulated {
    fn world(&self) -> u32 {
        self.world
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn all_gather(&self, shard: View, full: View) -> Result<()> {
        self.issue(Stream::Collective, Command::Gather(shard.span, full.span));
        Ok(())
    }

    fn reduce_scatter(&self, full: View, shard: View) -> Result<()> {
        let own = full.span.part(shard.span.bytes * u64::from(self.rank), shard.span.bytes);
        self.issue(Stream::Collective, Command::Scatter(own, shard.span));
        Ok(())
    }

    fn all_reduce(&self, _: Among, view: View) -> Result<()> {
        self.issue(Stream::Collective, Command::Scatter(view.span, view.span));
        Ok(())
    }

    fn accumulate(&self, source: View, target: View) -> Result<()> {
        assert_eq!(source.span.bytes, target.span.bytes);
        self.issue(Stream::Collective, Command::Add(source.span, target.span));
        Ok(())
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![message.to_vec(); self.world as usize])
    }
}

impl Backend for Simulated {
    fn device(&self) -> Device {
        Device {
            backend: "simulated",
            name: "simulated".into(),
            available_bytes: u64::MAX,
            overhead_bytes: 0,
            fused_attention: true,
        }
    }

    fn workspace_bytes(&self) -> u64 {
        0
    }

    fn set_workspace(&self, _: Span) {}

    fn computes_in(&self, _: DType) -> bool {
        true
    }
}

/// The simulation moves bytes; nothing asks it for arithmetic except the zeroing of padding.
impl Operators for Simulated {
    fn zero(&self, _: View) {}
    fn cast(&self, _: View, _: View) {
        unreachable!()
    }
    fn embed(&self, _: View, _: View, _: View, _: u64, _: u64, _: u64) {
        unreachable!()
    }
    fn embed_backward(&self, _: View, _: View, _: View, _: u64, _: View, _: View, _: u64, _: u64, _: u64, _: Into) {
        unreachable!()
    }
    fn rmsnorm(&self, _: View, _: View, _: View, _: View, _: u64, _: u64, _: f32) {
        unreachable!()
    }
    fn rmsnorm_backward(&self, _: View, _: View, _: View, _: View, _: View, _: View, _: View, _: u64, _: u64, _: Into) {
        unreachable!()
    }
    fn rmsnorm_scratch_bytes(&self, _: u64, _: u64) -> u64 {
        unreachable!()
    }
    fn linear(&self, _: View, _: View, _: Option<View>, _: Option<View>, _: View, _: Linear) {
        unreachable!()
    }
    fn linear_backward_input(&self, _: View, _: View, _: View, _: Linear, _: Into) {
        unreachable!()
    }
    fn linear_backward_weight(&self, _: View, _: View, _: View, _: Linear, _: Into) {
        unreachable!()
    }
    fn bias_backward(&self, _: View, _: View, _: View, _: u64, _: u64, _: Into) {
        unreachable!()
    }
    fn rope(&self, _: View, _: View, _: Option<View>, _: Attention, _: bool) {
        unreachable!()
    }
    fn attention(&self, _: View, _: Option<View>, _: View, _: View, _: View, _: Attention) {
        unreachable!()
    }
    fn attention_backward(&self, _: View, _: Option<View>, _: View, _: View, _: View, _: View, _: View, _: Attention) {
        unreachable!()
    }
    fn attention_scratch_bytes(&self, _: Attention, _: DType, _: bool) -> u64 {
        unreachable!()
    }
    fn swiglu(&self, _: View, _: View, _: u64, _: u64) {
        unreachable!()
    }
    fn swiglu_backward(&self, _: View, _: View, _: Option<View>, _: u64, _: u64) {
        unreachable!()
    }
    fn classify(&self, _: View, _: View, _: View, _: u64, _: u64, _: Classify) {
        unreachable!()
    }
    fn sum(&self, _: View, _: View, _: Into) {
        unreachable!()
    }
    fn square_sum(&self, _: View, _: View) {
        unreachable!()
    }
    fn norm_finish(&self, _: View, _: f32, _: f32, _: View) {
        unreachable!()
    }
    fn update(&self, _: Update, _: State, _: View) {
        unreachable!()
    }
    fn hessian(&self, _: View, _: View, _: f32, _: f32, _: f32, _: View) {
        unreachable!()
    }
}
