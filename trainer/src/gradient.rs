//! A gradient in the making: micro-batches add to it in place, or each forms its own, which is summed over the ranks by
//! itself (`--sync_each_batch`).
//!
//! In place, what is summed over the ranks is the sum of a step's micro-batches, and a gradient that is split over
//! ranks must be whole until it is formed. One by one, only what one micro-batch adds is ever whole, and the order of
//! sums is that of the micro-batches, however many of them go through the model together.
//!
//! Where gradients have no homes, a gradient lives under one lease until its update.

use castor_kernels::{View, ops::Into};
use castor_runtime::{Access, ChunkId, Contribution, Lease, Part, Result, StatefulTensorMgr};

/// A gradient to which micro-batches add.
#[derive(Debug)]
pub(crate) struct Gradient {
    lease: Lease,
    /// Whether each micro-batch is summed over the ranks by itself.
    one_by_one: bool,
}

/// Where what a micro-batch adds to a gradient is formed.
#[derive(Debug)]
pub(crate) struct Forming {
    /// The group's gradient, whole.
    pub view: View,
    /// How it gets there.
    pub into: Into,
    apart: Option<Contribution>,
}

impl Gradient {
    /// Begins a round's `part` of the gradient in `chunk`.
    ///
    /// # Errors
    /// If the manager refuses.
    pub fn begin(mgr: &mut StatefulTensorMgr, chunk: ChunkId, part: Part, one_by_one: bool) -> Result<Self> {
        let access = match one_by_one {
            true => Access::SumShard(part),
            false if mgr.layout().keeps_gradients => Access::Produce(part),
            false => Access::Transient,
        };
        Ok(Gradient { lease: mgr.acquire(chunk, access)?, one_by_one })
    }

    /// Where the next micro-batch forms what it adds; `into` is how it gets into a gradient that is formed in place.
    pub fn form(&self, mgr: &mut StatefulTensorMgr, into: Into) -> Forming {
        match self.one_by_one.then(|| mgr.contribution(&self.lease)) {
            Some(apart) => Forming { view: apart.view(), into: Into::Replace, apart: Some(apart) },
            None => Forming { view: self.lease.view(), into, apart: None },
        }
    }

    /// Takes in what a micro-batch formed, once its operators were called.
    ///
    /// # Errors
    /// If the manager refuses.
    pub fn add(&mut self, mgr: &mut StatefulTensorMgr, formed: Forming) -> Result<()> {
        match formed.apart {
            Some(apart) => mgr.contribute(&mut self.lease, apart),
            None => Ok(()),
        }
    }

    /// Ends the round's part of the gradient. If it has no home, its lease goes on, on what this rank updates of it.
    ///
    /// # Errors
    /// If the manager refuses.
    pub fn end(mut self, mgr: &mut StatefulTensorMgr) -> Result<Option<Lease>> {
        if mgr.layout().keeps_gradients {
            mgr.release(self.lease)?;
            return Ok(None);
        }
        mgr.reduce_here(&mut self.lease)?;
        Ok(Some(self.lease))
    }
}
