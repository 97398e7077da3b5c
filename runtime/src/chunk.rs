//! A chunk's state: where its bytes are, and what may happen to it next.
//!
//! Every chunk has a *home*: one place in one tier, for good. If the home is not where the bytes are used
//! (another tier, or only this rank's shard of a whole chunk), a *working copy* in the device's window
//! serves for a while. The states form one enum; every change is a method here, and an illegal one is a
//! bug that panics with chunk, state and tick.

use crate::fence::Fence;
use crate::schedule::Access;
use crate::units::ChunkId;
use castor_kernels::Span;

/// A copy of a chunk, or of this rank's part of it, in the device's window.
#[derive(Clone, Copy, Debug)]
pub struct WorkingCopy {
    /// Where it is.
    pub span: Span,
    /// Whether it is the whole chunk.
    pub whole: bool,
    /// When its bytes are there.
    pub ready: Fence,
    /// When everybody who reads it is done.
    pub used: Fence,
    /// Count of ticks (over all passes) at which it is next wanted: the latest is dropped first.
    pub due: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// At home only.
    Resident,
    /// A copy is on its way or there, clean, and nobody holds it.
    Present(WorkingCopy),
    /// In use; without a copy the lease is on the home itself.
    Leased { copy: Option<WorkingCopy>, access: Access },
}

/// One chunk.
#[derive(Debug)]
pub struct Chunk {
    id: ChunkId,
    state: State,
    /// Where its bytes stay.
    pub home: Span,
    /// When the last write to the home is done.
    pub home_ready: Fence,
    /// When the last read of the home is done.
    pub home_used: Fence,
}

impl Chunk {
    /// A chunk at home.
    pub const fn new(id: ChunkId, home: Span) -> Chunk {
        Chunk { id, state: State::Resident, home, home_ready: Fence::OPEN, home_used: Fence::OPEN }
    }

    /// Its name.
    pub const fn id(&self) -> ChunkId {
        self.id
    }

    /// Its working copy, whether leased or not.
    pub const fn copy(&self) -> Option<&WorkingCopy> {
        match &self.state {
            State::Present(copy) | State::Leased { copy: Some(copy), .. } => Some(copy),
            State::Resident | State::Leased { copy: None, .. } => None,
        }
    }

    /// Its working copy if nobody holds it.
    pub const fn idle_copy(&self) -> Option<&WorkingCopy> {
        match &self.state {
            State::Present(copy) => Some(copy),
            _ => None,
        }
    }

    /// Whether somebody holds a lease.
    pub const fn leased(&self) -> bool {
        matches!(self.state, State::Leased { .. })
    }

    /// A copy was issued.
    pub fn fetch(&mut self, copy: WorkingCopy) {
        match self.state {
            State::Resident => self.state = State::Present(copy),
            _ => self.illegal("fetch"),
        }
    }

    /// Moves the tick at which an idle copy is wanted.
    pub fn expect_at(&mut self, due: u64) {
        if let State::Present(copy) = &mut self.state {
            copy.due = due;
        }
    }

    /// The idle copy is dropped: it is clean (L5).
    pub fn drop_copy(&mut self) -> WorkingCopy {
        match self.state {
            State::Present(copy) => {
                self.state = State::Resident;
                copy
            }
            _ => self.illegal("drop"),
        }
    }

    /// A lease on the idle copy begins.
    pub fn lease_copy(&mut self, access: Access) -> WorkingCopy {
        match self.state {
            State::Present(copy) => {
                self.state = State::Leased { copy: Some(copy), access };
                copy
            }
            _ => self.illegal("lease a copy"),
        }
    }

    /// A lease on the home itself begins.
    pub fn lease_home(&mut self, access: Access) {
        match self.state {
            State::Resident => self.state = State::Leased { copy: None, access },
            _ => self.illegal("lease the home"),
        }
    }

    /// When what is leased may be written: its bytes are there, and nobody reads them any more.
    pub fn leased_free(&self) -> Fence {
        match &self.state {
            State::Leased { copy: Some(copy), .. } => copy.ready.and(copy.used),
            State::Leased { copy: None, .. } => self.home_ready.and(self.home_used),
            _ => self.illegal("write"),
        }
    }

    /// What is leased has new bytes once `fence` is passed.
    pub fn written(&mut self, fence: Fence) {
        match &mut self.state {
            State::Leased { copy: Some(copy), .. } => copy.ready = fence,
            State::Leased { copy: None, .. } => self.home_ready = fence,
            _ => self.illegal("write"),
        }
    }

    /// The lease ends. A copy, if there was one, stays as an idle copy; `written` says when new bytes are there.
    ///
    /// # Panics
    /// If `access` is not the one that was leased.
    pub fn release(&mut self, access: Access, written: Option<Fence>, used: Fence, due: u64) {
        match self.state {
            State::Leased { access: leased, .. } if leased != access => self.illegal("release another access"),
            State::Leased { copy: Some(copy), .. } => {
                let ready = written.unwrap_or(copy.ready);
                self.state = State::Present(WorkingCopy { ready, used: copy.used.and(used), due, ..copy });
            }
            State::Leased { copy: None, .. } => self.state = State::Resident,
            _ => self.illegal("release"),
        }
    }

    #[cold]
    fn illegal(&self, wanted: &str) -> ! {
        panic!("{:?} ({}): cannot {wanted} in state {:?}", self.id, self.id.role().name(), self.state)
    }
}
