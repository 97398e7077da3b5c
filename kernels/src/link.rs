//! The development transport of CPU ranks: a full mesh of sockets, sums in rank order.
//!
//! Owns the sockets of one rank and the buffers of a collective. Every pair of ranks has three: one for the
//! collectives' thread, one for control messages from the main thread, and one that carries nothing but
//! the name of a rank that failed, so that every survivor blames the same one. It is made to give the same
//! bits on every rank and in every run, not to be fast.

mod mesh;
mod plane;
mod sums;

use crate::{Among, DType, Error, Result};
use mesh::{Connections, Sockets};
use parking_lot::Mutex;
use plane::{Inbox, Kind, Plane, Trouble};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Bytes that each pair of ranks swaps at once within a sum.
const PIECE_BYTES: usize = 1 << 20;

/// How long a survivor waits for a failed peer's last word.
const LAST_WORD: Duration = Duration::from_secs(1);

/// How long to wait for others, and who holds what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkOptions {
    /// For each call, until all peers have answered.
    pub deadline: Duration,
    /// Neighbouring ranks that data is split over; divides the world. None: all.
    pub shards: Option<u32>,
}

impl Default for LinkOptions {
    /// Ten minutes, split over all.
    fn default() -> Self {
        LinkOptions { deadline: Duration::from_secs(600), shards: None }
    }
}

/// Ranks that make a call together, ascending, and which of them this one is.
struct Members {
    ranks: Vec<u32>,
    own: usize,
}

impl Members {
    fn new(rank: u32, ranks: impl Iterator<Item = u32>) -> Members {
        let ranks: Vec<u32> = ranks.collect();
        let Some(own) = ranks.iter().position(|&member| member == rank) else {
            unreachable!("rank {rank} is none of {ranks:?}")
        };
        Members { ranks, own }
    }
}

/// One rank's connections to all others. Two threads may use it at once: one for [`Link::exchange`], one for
/// the collectives. All ranks make the same calls in the same order.
///
/// After the first failure every call returns it again.
pub struct Link {
    rank: u32,
    world: u32,
    /// In the order of [`Among`].
    members: [Members; 3],
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
    /// If `rank` is not below `world`, or the shards do not divide it.
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
        let shards = options.shards.unwrap_or(world);
        assert!(shards > 0 && world.is_multiple_of(shards), "{world} ranks are not whole groups of {shards}");
        let first = rank / shards * shards;
        let members = [
            Members::new(rank, 0..world),
            Members::new(rank, first..first + shards),
            Members::new(rank, (rank % shards..world).step_by(shards as usize)),
        ];
        Link {
            rank,
            world,
            members,
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

    /// Number of ranks that data is split over.
    pub fn shards(&self) -> u32 {
        self.ranks_among(Among::Shards).len() as u32
    }

    /// The ranks that make a call with this one, ascending.
    pub fn ranks_among(&self, among: Among) -> &[u32] {
        &self.members[among as usize].ranks
    }

    /// How long each call waits for peers.
    pub fn deadline(&self) -> Duration {
        self.deadline
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
        let all = self.ranks_among(Among::All);
        self.settle(plane.swap(control, all, Kind::Lengths, |_| &length, &mut lengths, until))?;
        let read = |bytes: &Vec<u8>| bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
        let mut messages = Messages(lengths.0.iter().map(|bytes| vec![0; read(bytes)]).collect());
        self.settle(plane.swap(control, all, Kind::Messages, |_| message, &mut messages, until))?;
        messages.0[self.rank as usize].copy_from_slice(message);
        Ok(messages.0)
    }

    /// `full` is all shards in order, this rank's filled in; the others' become theirs.
    ///
    /// # Errors
    /// As [`Link::exchange`].
    ///
    /// # Panics
    /// If `full` is not whole shards.
    pub fn all_gather(&self, full: &mut [u8]) -> Result<()> {
        let mut data = self.data.lock();
        let until = self.begin()?;
        let Members { ranks, own } = &self.members[Among::Shards as usize];
        let bytes = self.shard_bytes(full);
        let (before, rest) = full.split_at_mut(own * bytes);
        let (shard, after) = rest.split_at_mut(bytes);
        let shard = &*shard;
        let mut shards = Shards { own: *own, bytes, before, after };
        self.settle(data.plane.swap(&self.sockets.data, ranks, Kind::Gather, |_| shard, &mut shards, until))
    }

    /// This rank's shard of the sum of `full` over the ranks that together hold all shards is written to `out`, or if
    /// there is none in place of this rank's shard of `full`. Summed in rank order in f32 (f64 in f64) and rounded
    /// once.
    ///
    /// # Errors
    /// As [`Link::exchange`], and [`Error::Unsupported`] for types without sums.
    ///
    /// # Panics
    /// If `full` is not whole shards, or `out` is not as long as a shard.
    pub fn reduce_scatter(&self, dtype: DType, full: &mut [u8], mut out: Option<&mut [u8]>) -> Result<()> {
        let bytes = self.shard_bytes(full);
        assert!(out.as_ref().is_none_or(|out| out.len() == bytes), "the target is not as long as a shard");
        let members = &self.members[Among::Shards as usize];
        let data = &mut *self.data.lock();
        let until = self.begin()?;
        data.make_room(self.world, bytes);
        for start in (0..bytes).step_by(PIECE_BYTES) {
            let length = PIECE_BYTES.min(bytes - start);
            let part = |place: usize| &full[place * bytes + start..][..length];
            self.sum_piece(data, members, Kind::ReduceScatter, dtype, length, part, until)?;
            match &mut out {
                Some(out) => out[start..][..length].copy_from_slice(&data.sum[..length]),
                None => full[members.own * bytes + start..][..length].copy_from_slice(&data.sum[..length]),
            }
        }
        Ok(())
    }

    /// `values` become their sums over these ranks, in rank order in f32 (f64 in f64), rounded once.
    ///
    /// # Errors
    /// As [`Link::reduce_scatter`].
    pub fn all_reduce(&self, among: Among, dtype: DType, values: &mut [u8]) -> Result<()> {
        let members = &self.members[among as usize];
        let data = &mut *self.data.lock();
        let until = self.begin()?;
        data.make_room(self.world, values.len());
        for start in (0..values.len()).step_by(PIECE_BYTES) {
            let length = PIECE_BYTES.min(values.len() - start);
            let own = &values[start..][..length];
            self.sum_piece(data, members, Kind::AllReduce, dtype, length, |_| own, until)?;
            values[start..][..length].copy_from_slice(&data.sum[..length]);
        }
        Ok(())
    }

    /// A peer among these ranks that has ended or given up, if one has within `patience`. For work that they do
    /// together and that does not go through this link.
    pub fn departed(&self, among: Among, patience: Duration) -> Option<u32> {
        plane::departed(&self.sockets.last_words, self.ranks_among(among), patience)
    }

    /// The failure that a peer's departure is, traced to the rank where it began; kept.
    pub fn blame(&self, departed: u32) -> Error {
        match self.settle(Err(Trouble::Gone(departed))) {
            Err(error) => error,
            Ok(()) => unreachable!("trouble settles as an error"),
        }
    }

    /// For a rank whose work with the others hangs outside of this link: finds out who is still there. Every rank
    /// whose work hangs calls it.
    ///
    /// # Errors
    /// [`Error::Peer`] naming the first that does not answer within `patience`.
    pub fn roll_call(&self, patience: Duration) -> Result<()> {
        let mut data = self.data.lock();
        self.begin()?;
        let mut nothing = Messages(vec![Vec::new(); self.world as usize]);
        let (all, until) = (self.ranks_among(Among::All), Instant::now() + patience);
        self.settle(data.plane.swap(&self.sockets.data, all, Kind::RollCall, |_| &[], &mut nothing, until))
    }

    /// Closes every connection now, waking whoever waits on one: for a rank that cannot go on. Peers see it
    /// as gone.
    pub fn abandon(&self) {
        for connections in [&self.sockets.data, &self.sockets.control, &self.sockets.last_words] {
            shut_down(connections);
        }
    }

    /// Sends `part(place)` to each member, and leaves the sum over the members of what came in `data.sum`.
    #[expect(clippy::too_many_arguments, reason = "the two sums differ in each of them")]
    fn sum_piece<'a>(
        &self,
        data: &mut Data,
        members: &Members,
        kind: Kind,
        dtype: DType,
        length: usize,
        part: impl Fn(usize) -> &'a [u8],
        until: Instant,
    ) -> Result<()> {
        let Members { ranks, own } = members;
        let received = &mut data.received[..(ranks.len() - 1) * length];
        let (before, after) = received.split_at_mut(own * length);
        let mut pieces = Shards { own: *own, bytes: length, before, after };
        self.settle(data.plane.swap(&self.sockets.data, ranks, kind, &part, &mut pieces, until))?;
        let own_part = part(*own);
        let received = &data.received;
        let of = |place: usize| match place.cmp(own) {
            std::cmp::Ordering::Less => &received[place * length..][..length],
            std::cmp::Ordering::Equal => own_part,
            std::cmp::Ordering::Greater => &received[(place - 1) * length..][..length],
        };
        sums::in_rank_order(dtype, ranks.len(), of, &mut data.sum[..length])
    }

    /// Bytes of each shard of `full`.
    #[track_caller]
    fn shard_bytes(&self, full: &[u8]) -> usize {
        let shards = self.shards() as usize;
        assert!(full.len().is_multiple_of(shards), "{} bytes are not {shards} equal shards", full.len());
        full.len() / shards
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

/// Equal shards of all members but one, around that one.
struct Shards<'a> {
    own: usize,
    bytes: usize,
    before: &'a mut [u8],
    after: &'a mut [u8],
}

impl Inbox for Shards<'_> {
    /// Nothing comes from oneself.
    fn part(&mut self, place: usize) -> &mut [u8] {
        match place.cmp(&self.own) {
            std::cmp::Ordering::Less => &mut self.before[place * self.bytes..][..self.bytes],
            std::cmp::Ordering::Equal => &mut [],
            std::cmp::Ordering::Greater => &mut self.after[(place - self.own - 1) * self.bytes..][..self.bytes],
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
