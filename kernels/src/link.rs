//! The development transport of CPU ranks: a full mesh of sockets, sums in rank order.
//!
//! Owns the sockets of one rank and the buffers of a collective. Every pair of ranks has three: one for the
//! collectives' thread, one for control messages from the main thread, and one that carries nothing but
//! the name of a rank that failed, so that every survivor blames the same one. It is made to give the same
//! bits on every rank and in every run, not to be fast.

mod mesh;
mod plane;
mod sums;

use crate::{DType, Error, Result};
use mesh::{Connections, Sockets};
use parking_lot::Mutex;
use plane::{Inbox, Kind, Plane, Trouble};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Bytes that each pair of ranks swaps at once within a sum.
const PIECE_BYTES: usize = 1 << 20;

/// How long a survivor waits for a failed peer's last word.
const LAST_WORD: Duration = Duration::from_secs(1);

/// How long to wait for others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkOptions {
    /// For each call, until all peers have answered.
    pub deadline: Duration,
}

impl Default for LinkOptions {
    /// Ten minutes.
    fn default() -> Self {
        LinkOptions { deadline: Duration::from_secs(600) }
    }
}

/// One rank's connections to all others. Two threads may use it at once: one for [`Link::exchange`], one for
/// the collectives. All ranks make the same calls in the same order.
///
/// After the first failure every call returns it again.
pub struct Link {
    rank: u32,
    world: u32,
    deadline: Duration,
    /// Outside of the locks: a thread that waits on a socket is woken by closing it.
    sockets: Sockets,
    data: Mutex<Data>,
    control: Mutex<Plane>,
    failure: Mutex<Option<Error>>,
}

/// What the collectives need to sum.
struct Data {
    plane: Plane,
    /// A piece of every other rank, in rank order.
    received: Vec<u8>,
    /// The sum of a piece.
    sum: Vec<u8>,
}

impl Link {
    /// Meets the other ranks: rank 0 listens at `master`, the others find it there; then each pair connects.
    /// Waits at most `timeout` for the others to appear.
    ///
    /// # Errors
    /// [`Error::Device`] if rank 0 cannot listen at `master`, [`Error::Peer`] naming the ranks that did not
    /// appear, on every rank that did.
    ///
    /// # Panics
    /// If `rank` is not below `world`.
    pub fn rendezvous(
        rank: u32,
        world: u32,
        master: SocketAddr,
        timeout: Duration,
        options: LinkOptions,
    ) -> Result<Link> {
        assert!(rank < world, "rank {rank} of {world}");
        let sockets = mesh::meet(rank, world, master, timeout)?;
        Ok(Link::new(rank, world, sockets, options))
    }

    /// All ranks of a world inside this process, one for each thread of it.
    ///
    /// # Errors
    /// [`Error::Device`] if the system gives no sockets.
    pub fn in_process(world: u32, options: LinkOptions) -> Result<Vec<Link>> {
        let ranks = mesh::pairs(world)?;
        Ok((0..).zip(ranks).map(|(rank, sockets)| Link::new(rank, world, sockets, options)).collect())
    }

    fn new(rank: u32, world: u32, sockets: Sockets, options: LinkOptions) -> Link {
        Link {
            rank,
            world,
            deadline: options.deadline,
            sockets,
            data: Mutex::new(Data { plane: Plane::new(world), received: Vec::new(), sum: Vec::new() }),
            control: Mutex::new(Plane::new(world)),
            failure: Mutex::new(None),
        }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Every rank's `message`, in rank order. Messages may differ in length.
    ///
    /// # Errors
    /// [`Error::Peer`] if a rank is gone, late, or makes another call.
    pub fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut plane = self.control.lock();
        let until = self.begin()?;
        let control = &self.sockets.control;
        let length = (message.len() as u64).to_le_bytes();
        let mut lengths = Messages(vec![length.to_vec(); self.world as usize]);
        self.settle(plane.swap(control, Kind::Lengths, |_| &length, &mut lengths, until))?;
        let read = |bytes: &Vec<u8>| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
        let mut messages = Messages(lengths.0.iter().map(|bytes| vec![0; read(bytes)]).collect());
        self.settle(plane.swap(control, Kind::Messages, |_| message, &mut messages, until))?;
        messages.0[self.rank as usize].copy_from_slice(message);
        Ok(messages.0)
    }

    /// `full` is one equal shard per rank in rank order, this rank's filled in; the others' become theirs.
    ///
    /// # Errors
    /// As [`Link::exchange`].
    ///
    /// # Panics
    /// If `full` is not whole shards.
    pub fn all_gather(&self, full: &mut [u8]) -> Result<()> {
        let mut data = self.data.lock();
        let until = self.begin()?;
        let (rank, bytes) = (self.rank as usize, self.shard_bytes(full));
        let (before, rest) = full.split_at_mut(rank * bytes);
        let (own, after) = rest.split_at_mut(bytes);
        let own = &*own;
        let mut shards = Shards { rank, bytes, before, after };
        self.settle(data.plane.swap(&self.sockets.data, Kind::Gather, |_| own, &mut shards, until))
    }

    /// This rank's shard of the sum over the ranks of `full` is written to `out`, or if there is none in place
    /// of this rank's shard of `full`. Summed in rank order in f32 (f64 in f64) and rounded once.
    ///
    /// # Errors
    /// As [`Link::exchange`], and [`Error::Unsupported`] for types without sums.
    ///
    /// # Panics
    /// If `full` is not whole shards, or `out` is not as long as a shard.
    pub fn reduce_scatter(&self, dtype: DType, full: &mut [u8], mut out: Option<&mut [u8]>) -> Result<()> {
        let bytes = self.shard_bytes(full);
        assert!(out.as_ref().is_none_or(|out| out.len() == bytes), "the target is not as long as a shard");
        let data = &mut *self.data.lock();
        let until = self.begin()?;
        data.make_room(self.world, bytes);
        for start in (0..bytes).step_by(PIECE_BYTES) {
            let length = PIECE_BYTES.min(bytes - start);
            let part = |rank: usize| &full[rank * bytes + start..][..length];
            self.sum_piece(data, Kind::ReduceScatter, dtype, length, part, until)?;
            match &mut out {
                Some(out) => out[start..][..length].copy_from_slice(&data.sum[..length]),
                None => full[self.rank as usize * bytes + start..][..length].copy_from_slice(&data.sum[..length]),
            }
        }
        Ok(())
    }

    /// `values` become their sums over the ranks, in rank order in f32 (f64 in f64), rounded once.
    ///
    /// # Errors
    /// As [`Link::reduce_scatter`].
    pub fn all_reduce(&self, dtype: DType, values: &mut [u8]) -> Result<()> {
        let data = &mut *self.data.lock();
        let until = self.begin()?;
        data.make_room(self.world, values.len());
        for start in (0..values.len()).step_by(PIECE_BYTES) {
            let length = PIECE_BYTES.min(values.len() - start);
            let own = &values[start..][..length];
            self.sum_piece(data, Kind::AllReduce, dtype, length, |_| own, until)?;
            values[start..][..length].copy_from_slice(&data.sum[..length]);
        }
        Ok(())
    }

    /// Closes every connection now, waking whoever waits on one: for a rank that cannot go on. Peers see it
    /// as gone.
    pub fn abandon(&self) {
        for connections in [&self.sockets.data, &self.sockets.control, &self.sockets.last_words] {
            shut_down(connections);
        }
    }

    /// Sends `part(rank)` to each rank, and leaves the sum over the ranks of what came in `data.sum`.
    fn sum_piece<'a>(
        &self,
        data: &mut Data,
        kind: Kind,
        dtype: DType,
        length: usize,
        part: impl Fn(usize) -> &'a [u8],
        until: Instant,
    ) -> Result<()> {
        let rank = self.rank as usize;
        let received = &mut data.received[..(self.world as usize - 1) * length];
        let (before, after) = received.split_at_mut(rank * length);
        let mut pieces = Shards { rank, bytes: length, before, after };
        self.settle(data.plane.swap(&self.sockets.data, kind, &part, &mut pieces, until))?;
        let own = part(rank);
        let received = &data.received;
        let of = |from: usize| match from.cmp(&rank) {
            std::cmp::Ordering::Less => &received[from * length..][..length],
            std::cmp::Ordering::Equal => own,
            std::cmp::Ordering::Greater => &received[(from - 1) * length..][..length],
        };
        sums::in_rank_order(dtype, self.world as usize, of, &mut data.sum[..length])
    }

    /// Bytes of each rank's shard of `full`.
    #[track_caller]
    fn shard_bytes(&self, full: &[u8]) -> usize {
        let world = self.world as usize;
        assert!(full.len().is_multiple_of(world), "{} bytes are not {world} equal shards", full.len());
        full.len() / world
    }

    /// Start of a call: until when it may take, or the failure that was before.
    fn begin(&self) -> Result<Instant> {
        match &*self.failure.lock() {
            Some(error) => Err(error.clone()),
            None => Ok(Instant::now() + self.deadline),
        }
    }

    /// End of a swap. Trouble is traced to the rank where it began, told to all peers and kept.
    fn settle(&self, result: std::result::Result<(), Trouble>) -> Result<()> {
        let Err(trouble) = result else { return Ok(()) };
        let mut failure = self.failure.lock();
        if let Some(error) = &*failure {
            return Err(error.clone());
        }
        let (rank, reason) = match trouble {
            Trouble::Gone(peer) => match plane::last_word(&self.sockets.last_words, peer, LAST_WORD) {
                Some(rank) if rank == self.rank => {
                    (rank, format!("this rank did not answer rank {peer} in time, which gave up"))
                }
                Some(rank) => (rank, format!("it failed first, says rank {peer}, which stopped because of it")),
                None => (peer, "it closed its connection: its process ended or gave up; look at its own output".into()),
            },
            Trouble::Late(peer) => {
                let seconds = self.deadline.as_secs_f64();
                (
                    peer,
                    format!(
                        "it did not answer within {seconds} s; it hangs or is stopped, or --timeout is too short for it"
                    ),
                )
            }
            Trouble::Diverged(peer, how) => (peer, how),
        };
        plane::leave_last_word(&self.sockets.last_words, rank);
        // Wakes the peers that wait for this rank: they read its last word.
        shut_down(&self.sockets.data);
        shut_down(&self.sockets.control);
        let error = Error::Peer { rank, reason };
        *failure = Some(error.clone());
        Err(error)
    }
}

fn shut_down(connections: &Connections) {
    for socket in connections.iter().flatten() {
        // A socket that is no longer connected is as good as shut down.
        let _ = socket.shut_down();
    }
}

impl Data {
    /// Room for sums of `bytes` bytes among `world` ranks: grows at the first calls only.
    fn make_room(&mut self, world: u32, bytes: usize) {
        let piece = PIECE_BYTES.min(bytes);
        if self.sum.len() < piece {
            self.sum.resize(piece, 0);
            self.received.resize((world as usize - 1) * piece, 0);
        }
    }
}

/// Equal shards of all ranks but one, around that one.
struct Shards<'a> {
    rank: usize,
    bytes: usize,
    before: &'a mut [u8],
    after: &'a mut [u8],
}

impl Inbox for Shards<'_> {
    fn part(&mut self, rank: usize) -> &mut [u8] {
        if rank < self.rank {
            &mut self.before[rank * self.bytes..][..self.bytes]
        } else {
            &mut self.after[(rank - self.rank - 1) * self.bytes..][..self.bytes]
        }
    }
}

/// A message of each rank.
struct Messages(Vec<Vec<u8>>);

impl Inbox for Messages {
    fn part(&mut self, rank: usize) -> &mut [u8] {
        &mut self.0[rank]
    }
}

#[cfg(test)]
mod tests;
