//! `StatefulTensorMgr`: owns every chunk's state and carries the plan out.
//!
//! The step calls three verbs: [`StatefulTensorMgr::tick`] starts a tick and lets prefetch run ahead by
//! the plan, [`StatefulTensorMgr::acquire`] gives a lease, [`StatefulTensorMgr::release`] takes it back. Under a lease
//! on a sum, [`StatefulTensorMgr::contribution`] and [`StatefulTensorMgr::contribute`] add to it.
//! All decisions (what to fetch, where to put it, what to drop) are made in the order of these calls and
//! from the recorded schedule, never from what has completed: a rehearsal on the dry backend decides the
//! same, every rank decides the same, and what the plan predicted is what happens.
//!
//! Where the step departs from the record (another pass in between, an unused tensor) the manager fetches
//! on demand, counts it in [`StatefulTensorMgr::departures`] and leaves the record as it is (L8).

mod lease;
mod loading;
mod moves;
mod prefetch;
mod sums;

use crate::chunk::{Chunk, WorkingCopy};
use crate::clock::Times;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::ledger::{Category, Ledger};
use crate::mem_stats::MemStatsCollector;
use crate::plan::{FILE_GRANULE, GRANULE, Plan, Prediction, placed_bytes};
use crate::region::Region;
use crate::schedule::{Pass, Schedule, ScheduledTick};
use crate::timeline::{Pace, StepTime};
use crate::transfer::{Traffic, Transfer};
use crate::units::{ChunkId, GroupId, Role, Tick};
use castor_kernels::{Backend, DType, Span, Tier};
pub use lease::Lease;
use std::sync::Arc;
pub use sums::Contribution;
use sums::Places;

/// Bytes of [`Category::Activations`] at a tick.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Activations {
    /// In use.
    pub live: u64,
    /// At the beginning of the span, in which nothing is kept.
    pub spare: u64,
}

/// See [`StatefulTensorMgr::signature`].
#[derive(PartialEq, Eq, Debug, Clone)]
pub struct Signature {
    copies: Vec<(ChunkId, u64, bool, u64)>,
    lent: u64,
    holes: Vec<(u64, u64)>,
}

/// Owns the chunks, their places and their movement.
pub struct StatefulTensorMgr {
    backend: Arc<dyn Backend>,
    layout: Layout,
    plan: Plan,
    chunks: Vec<Option<Chunk>>,
    fixed: Vec<(Tier, Category, Span)>,
    window: Region,
    /// The chunks with a working copy, in order: few of many, which are looked through whenever room is made.
    copies: Vec<ChunkId>,
    staging: Region,
    /// Bytes of activations in use, without what is lent of their span.
    activations: u64,
    /// Where parts of sums are formed.
    sums: Vec<Places>,
    transfer: Transfer,
    ledger: Ledger,
    collector: MemStatsCollector,
    /// For each pass the ticks that use a working copy, ascending: all that prefetch has to look at.
    streamed: [Vec<u32>; Pass::ALL.len()],
    pass: Pass,
    /// Passes since the window was last emptied.
    warm_passes: u64,
    tick: Option<Tick>,
    clock: u64,
    recording: Option<Vec<ScheduledTick>>,
    recorded: [Schedule; Pass::ALL.len()],
    pass_began: Traffic,
    pass_traffic: [Traffic; Pass::ALL.len()],
    /// In a rehearsal: times of the last pass.
    pass_time: Option<StepTime>,
    departures: u64,
    /// `departures` when the pass began.
    departures_before: u64,
    demand_fetches: u64,
    /// One for each of [`Traffic::links`], for whoever exports metrics; made once, for a labelled counter takes memory
    /// to look up (L3). None on a backend that only pretends to move bytes.
    moved: Option<[metrics::Counter; 7]>,
}

impl StatefulTensorMgr {
    /// Reserves the arenas for homes, window, staging and the fixed memory of `plan`, and gives the backend its
    /// workspace.
    ///
    /// # Errors
    /// If a tier cannot give what the plan needs.
    pub fn new(backend: Arc<dyn Backend>, layout: Layout, plan: Plan) -> Result<StatefulTensorMgr> {
        let transfer = Transfer::new(backend.clone(), None);
        StatefulTensorMgr::with(transfer, backend, layout, plan)
    }

    /// As [`StatefulTensorMgr::new`], on a backend that only counts, in place of one of this `pace`.
    ///
    /// # Errors
    /// If a tier cannot give what the plan needs.
    pub fn rehearsing(backend: Arc<dyn Backend>, layout: Layout, plan: Plan, pace: Pace) -> Result<StatefulTensorMgr> {
        let transfer = Transfer::new(backend.clone(), Some(pace));
        StatefulTensorMgr::with(transfer, backend, layout, plan)
    }

    fn with(transfer: Transfer, backend: Arc<dyn Backend>, layout: Layout, plan: Plan) -> Result<StatefulTensorMgr> {
        let ranks = (u64::from(backend.world()), u64::from(backend.shards()));
        assert_eq!(
            ranks,
            (layout.world, layout.shards),
            "layout and backend disagree on the numbers of ranks and shards"
        );
        let mut ledger = Ledger::default();
        let mut ends = [0u64; 3];
        let mut carve = |tier: Tier, category: Category, bytes: u64| {
            let span = Span::new(tier, ends[tier.index()], bytes);
            let rounded = placed_bytes(tier, bytes);
            ends[tier.index()] += rounded;
            ledger.reserve(tier, category, rounded);
            span
        };
        let mut chunks: Vec<Option<Chunk>> = plan.placement.homes.iter().map(|_| None).collect();
        for id in layout.chunk_ids() {
            let tier = plan.placement.homes[id.index()].expect("the placement names a home for every chunk");
            let home = carve(tier, Category::home(id.role()), layout.stored_bytes(id));
            chunks[id.index()] = Some(Chunk::new(id, home));
        }
        // A gradient without a home has an empty one, off the device: it is used through copies alone.
        for gradient in layout.group_ids().map(|group| group.chunk(Role::Gradient)) {
            chunks[gradient.index()].get_or_insert_with(|| Chunk::new(gradient, Span::new(Tier::Host, 0, 0)));
        }
        let window_bytes = placed_bytes(Tier::Device, plan.placement.window_bytes);
        let window = carve(Tier::Device, Category::Window, window_bytes);
        let staging = carve(Tier::Host, Category::Staging, plan.placement.staging_bytes);
        let mut fixed = Vec::new();
        for (category, bytes) in &plan.fixed.device {
            fixed.push((Tier::Device, *category, carve(Tier::Device, *category, *bytes)));
        }
        for (category, bytes) in &plan.fixed.host {
            fixed.push((Tier::Host, *category, carve(Tier::Host, *category, *bytes)));
        }
        let behind = fixed.iter().find(|(_, category, _)| *category == Category::Activations);
        assert!(behind.is_none_or(|(_, _, span)| span.offset == window.end()), "what is lent lies behind the window");
        let workspace = carve(Tier::Device, Category::Workspace, backend.workspace_bytes());
        ledger.reserve(Tier::Host, Category::Snapshot, placed_bytes(Tier::Host, plan.fixed.snapshot));
        for tier in Tier::ALL {
            backend.reserve(tier, ends[tier.index()], plan.budgets.nvme_folder.as_deref())?;
        }
        backend.set_workspace(workspace);
        ledger.set_live(Tier::Device, Category::Window, 0);
        ledger.set_live(Tier::Host, Category::Staging, 0);
        for (tier, category, _) in &fixed {
            if *category == Category::Activations {
                ledger.set_live(*tier, *category, 0);
            }
        }
        let counter = |(link, _)| metrics::counter!("castor_moved_bytes_total", "link" => link);
        let moved = (backend.device().backend != "dry").then(|| Traffic::default().links().map(counter));
        let copies = Vec::with_capacity(chunks.len());
        let mut manager = StatefulTensorMgr {
            transfer,
            backend,
            layout,
            plan,
            chunks,
            fixed,
            window: Region::new(window, GRANULE),
            copies,
            staging: Region::new(staging, FILE_GRANULE),
            activations: 0,
            sums: Vec::new(),
            ledger,
            collector: MemStatsCollector::default(),
            streamed: Default::default(),
            pass: Pass::Train,
            warm_passes: 0,
            tick: None,
            clock: 0,
            recording: None,
            recorded: Default::default(),
            pass_began: Traffic::default(),
            pass_traffic: [Traffic::default(); Pass::ALL.len()],
            pass_time: None,
            departures: 0,
            departures_before: 0,
            demand_fetches: 0,
            moved,
        };
        manager.streamed = Pass::ALL.map(|pass| manager.streamed_ticks(pass));
        Ok(manager)
    }

    /// The hardware, for operators.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The chunks' layout.
    pub const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The plan being carried out.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The span reserved for a category of the trainer's fixed memory.
    ///
    /// # Panics
    /// If the plan reserved none.
    #[track_caller]
    pub fn fixed(&self, tier: Tier, category: Category) -> Span {
        self.fixed
            .iter()
            .find(|(t, c, _)| *t == tier && *c == category)
            .map(|(_, _, span)| *span)
            .unwrap_or_else(|| panic!("the plan reserved no {} on {tier}", category.name()))
    }

    /// Notes what the driver holds on the device beside the arena.
    pub fn reserve_driver(&mut self, bytes: u64) {
        self.ledger.reserve(Tier::Device, Category::Driver, bytes);
    }

    /// Bytes of every tier by category.
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What each tick really held during the warm-up.
    pub const fn collector(&self) -> &MemStatsCollector {
        &self.collector
    }

    /// Ends the warm-up: the collector is read only from now on.
    pub fn end_warm_up(&mut self) {
        self.collector.freeze();
    }

    /// All bytes moved so far.
    pub const fn traffic(&self) -> Traffic {
        self.transfer.traffic()
    }

    /// Bytes moved by the last pass of this kind.
    pub const fn last_traffic(&self, pass: Pass) -> Traffic {
        self.pass_traffic[pass.index()]
    }

    /// Passes since the window was last empty, the present or last one counted.
    pub const fn warm_passes(&self) -> u64 {
        self.warm_passes
    }

    /// In a rehearsal: how long the last pass would take.
    pub const fn last_time(&self) -> Option<StepTime> {
        self.pass_time
    }

    /// The operators of the tick that began take this long; of interest in a rehearsal.
    pub fn expect_work(&mut self, seconds: f64) {
        self.transfer.work(seconds);
    }

    /// How long the engines were busy so far and the step waited for them; what is not over yet comes later.
    pub fn times(&mut self) -> Times {
        self.transfer.times()
    }

    /// Uses that the record did not foresee so far (L8).
    pub const fn departures(&self) -> u64 {
        self.departures
    }

    /// Fetches that prefetch had not issued before they were needed.
    pub const fn demand_fetches(&self) -> u64 {
        self.demand_fetches
    }

    /// What this manager saw: ledger, peaks, traffic and ticks.
    pub fn observed(&self) -> Prediction {
        Prediction {
            ledger: self.ledger,
            window_peak: self.window.peak(),
            train: Vec::new(),
            times: Vec::new(),
            cycle: 0,
            traffic: self.pass_traffic,
            ticks: Pass::ALL.map(|pass| self.collector.ticks(pass).to_vec()),
        }
    }

    /// Everything that future decisions depend on: places and next uses of the working copies, holes of the window.
    pub fn signature(&self) -> Signature {
        let copies = self
            .copies()
            .map(|(chunk, copy)| (chunk.id(), copy.span.offset, copy.whole, copy.due.saturating_sub(self.clock)));
        Signature { copies: copies.collect(), lent: self.window.lent(), holes: self.window.signature() }
    }

    /// The schedules that passes without a record have made.
    pub fn recorded(&self) -> [Schedule; Pass::ALL.len()] {
        self.recorded.clone()
    }

    /// Starts a pass. The window stays warm from one training step to the next. Any other pass, the step after it or
    /// after a departure, and every step of which the plan says so begin with an empty window: so each pass begins
    /// in a state that was rehearsed, and finds the room that it found there.
    pub fn begin_pass(&mut self, pass: Pass) {
        assert!(self.tick.is_none(), "{:?} has not ended", self.pass);
        let by_the_record = self.departures == self.departures_before;
        let goes_on = pass == Pass::Train && self.pass == Pass::Train && by_the_record;
        self.departures_before = self.departures;
        if !goes_on || self.plan.fresh_every == Some(self.warm_passes) {
            self.empty_window();
            self.lend(0);
        }
        self.warm_passes += 1;
        self.pass = pass;
        self.pass_began = self.transfer.traffic();
        self.recording = self.plan.schedules[pass.index()].is_empty().then(Vec::new);
    }

    /// Drops all idle copies: they are clean (L5).
    fn empty_window(&mut self) {
        self.drop_idle(|_, _| true);
        self.warm_passes = 0;
    }

    /// Drops those idle copies that are `meant`, in the order of chunks.
    fn drop_idle(&mut self, meant: impl Fn(&Region, &WorkingCopy) -> bool) {
        let mut at = 0;
        while let Some(&chunk) = self.copies.get(at) {
            match self.chunk(chunk).idle_copy().is_some_and(|copy| meant(&self.window, copy)) {
                true => self.drop_copy(chunk),
                false => at += 1,
            }
        }
    }

    /// Starts the next tick. Prefetch runs ahead. What `activations` leave spare is lent to the window for as long as,
    /// by the record, it stays so.
    ///
    /// # Errors
    /// If a move cannot be issued.
    pub fn tick(&mut self, name: &'static str, group: GroupId, activations: Activations) -> Result<Tick> {
        self.activations = activations.live;
        let spare = activations.spare;
        let tick = Tick(self.tick.map_or(0, |tick| tick.0 + 1));
        self.tick = Some(tick);
        self.clock += 1;
        self.collector.begin(self.pass, tick, name, group);
        match &mut self.recording {
            Some(ticks) => ticks.push(ScheduledTick { name, group, spare, uses: Vec::new() }),
            None => {
                let schedule = &self.plan.schedules[self.pass.index()];
                match schedule.ticks.get(tick.index()) {
                    Some(expected) if expected.name == name && expected.group == group => {
                        let sums = expected.uses.iter().any(|used| used.access.sums());
                        self.lend(if self.departures == self.departures_before { spare } else { 0 });
                        if !sums {
                            self.give_kept_places();
                        }
                        self.prefetch(tick)?;
                    }
                    _ => {
                        self.departures += 1;
                        self.lend(0);
                    }
                }
            }
        }
        self.note_regions();
        Ok(tick)
    }

    /// Ends the pass.
    ///
    /// # Errors
    /// None today; the signature leaves room for checks of queued work.
    pub fn end_pass(&mut self) -> Result<()> {
        let pass = self.pass.index();
        self.give_kept_places();
        self.tick = None;
        self.pass_traffic[pass] = self.transfer.traffic().since(&self.pass_began);
        self.pass_time = self.transfer.end_step();
        self.transfer.times();
        for (counter, (_, bytes)) in self.moved.iter().flatten().zip(self.pass_traffic[pass].links()) {
            counter.increment(bytes);
        }
        if let Some(ticks) = self.recording.take() {
            self.recorded[pass] = Schedule::new(ticks);
        }
        Ok(())
    }

    fn chunk(&self, chunk: ChunkId) -> &Chunk {
        self.chunks[chunk.index()].as_ref().unwrap_or_else(|| panic!("{chunk:?} does not exist in these formats"))
    }

    /// All working copies, leased or idle.
    fn copies(&self) -> impl Iterator<Item = (&Chunk, &WorkingCopy)> {
        self.copies.iter().map(|&id| {
            let chunk = self.chunk(id);
            (chunk, chunk.copy().expect("chunks in the list have a working copy"))
        })
    }

    fn chunk_mut(&mut self, chunk: ChunkId) -> &mut Chunk {
        self.chunks[chunk.index()].as_mut().unwrap_or_else(|| panic!("{chunk:?} does not exist in these formats"))
    }

    fn sharded(&self, chunk: ChunkId) -> bool {
        self.layout.shards > 1 && self.layout.sharding.splits(chunk.role())
    }

    /// This rank's part of a group: first element and count.
    fn own_range(&self, chunk: ChunkId) -> (u64, u64) {
        let shard = self.layout.shard_elements(chunk.group());
        (shard * u64::from(self.backend.shard()), shard)
    }

    fn note_regions(&mut self) {
        debug_assert_eq!(
            self.window.used(),
            self.copies().map(|(_, copy)| self.window.rounded(copy.span.bytes)).sum::<u64>() + self.place_bytes(),
            "L1: the window holds exactly the working copies and the places of sums"
        );
        let lent = self.window.lent_used();
        self.ledger.set_live(Tier::Device, Category::Window, self.window.used() - lent);
        self.ledger.set_live(Tier::Device, Category::Activations, self.activations + lent);
        self.collector.record(self.pass, &self.ledger);
    }

    fn window_too_small(&self, chunk: ChunkId, bytes: u64) -> Error {
        let group = &self.layout.group(chunk.group()).name;
        Error::OutOfRoom {
            tier: Tier::Device,
            what: format!("no room in the window for the {} of {group} ({bytes} bytes)", chunk.role().name()),
            budget: self.plan.budgets.device,
            short_by: self.window.rounded(bytes).saturating_sub(self.window.free(self.window.own_end())).max(GRANULE),
            largest_users: self.ledger.largest_users(Tier::Device),
        }
    }

    /// Type of a chunk's elements.
    pub fn dtype(&self, chunk: ChunkId) -> DType {
        self.layout.dtype(chunk)
    }
}
