//! Waiting for work that other ranks take part in: notices that one is gone or hangs, and finds out which.
//!
//! NCCL does not tell: between GPUs of one host a peer's death leaves the collective spinning. So the waiting thread
//! looks at what the [`Link`] shows, but only when nothing moves: no stream reaches another mark. A rank that ended in
//! order has done its part of every collective, and what is left of those takes no time.

use super::marks::Marks;
use super::nccl::Nccl;
use crate::link::Link;
use crate::{Error, Result};
use std::time::{Duration, Instant};

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// How long nothing may move after a peer has ended.
const AFTER_THE_END: Duration = Duration::from_secs(2);

/// How long a failure that NCCL noticed waits for the link to show whose it is.
const WHOSE: Duration = Duration::from_secs(1);

/// Most of the deadline that is kept for the roll call.
const ROLL_CALL: Duration = Duration::from_secs(10);

/// One wait.
pub(crate) struct Watch<'a> {
    link: &'a Link,
    nccl: &'a Nccl,
    marks: &'a Marks,
    reached: u64,
    moved: Instant,
    looked: Instant,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(link: &'a Link, nccl: &'a Nccl, marks: &'a Marks) -> Self {
        let now = Instant::now();
        Watch { link, nccl, marks, reached: 0, moved: now, looked: now }
    }

    /// Looks now and then.
    ///
    /// # Errors
    /// [`Error::Peer`] naming the rank that is gone or silent; [`Error::Device`] if all are there and nothing moves for
    /// as long as the link's deadline.
    pub(crate) fn look(&mut self) -> Result<()> {
        if self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.looked = Instant::now();
        if let Err(error) = self.nccl.failure() {
            return Err(self.link.departed(WHOSE).map_or(error, |peer| self.link.blame(peer)));
        }
        let reached = self.marks.reached_in_all()?;
        if reached != self.reached {
            (self.reached, self.moved) = (reached, Instant::now());
            return Ok(());
        }
        let still = self.moved.elapsed();
        if still >= AFTER_THE_END
            && self.marks.collectives_wait()?
            && let Some(peer) = self.link.departed(Duration::ZERO)
        {
            return Err(self.link.blame(peer));
        }
        let deadline = self.link.deadline();
        let roll_call = ROLL_CALL.min(deadline / 4);
        if still >= deadline - roll_call {
            self.link.roll_call(roll_call)?;
            return Err(Error::Device {
                call: "waiting for the device".into(),
                reason: format!(
                    "rank {}: nothing moved for {} s although all ranks answer; give --timeout more seconds if that is \
                     how long the work takes",
                    self.link.rank(),
                    still.as_secs()
                ),
            });
        }
        Ok(())
    }
}
