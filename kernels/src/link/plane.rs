//! Swaps: one message to and one from every peer at once, over one set of sockets.
//!
//! Sending and receiving advance together, so no order of calls and no message size can lock the ranks
//! up. Each message says which call it belongs to; ranks that have gone different ways find out.

use super::mesh::{Connections, Socket};
use std::time::{Duration, Instant};

/// Which call a message belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Lengths = 1,
    Messages,
    Gather,
    ReduceScatter,
    AllReduce,
    RollCall,
}

impl Kind {
    const ALL: [Kind; 6] =
        [Kind::Lengths, Kind::Messages, Kind::Gather, Kind::ReduceScatter, Kind::AllReduce, Kind::RollCall];

    const fn name(self) -> &'static str {
        match self {
            Kind::Lengths | Kind::Messages => "exchange",
            Kind::Gather => "all-gather",
            Kind::ReduceScatter => "reduce-scatter",
            Kind::AllReduce => "all-reduce",
            Kind::RollCall => "roll call",
        }
    }
}

/// Why a swap ended early, and whose doing it seems to be.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The peer's connection is closed.
    Gone(u32),
    /// The peer did not answer in time.
    Late(u32),
    /// The peer makes another call.
    Diverged(u32, String),
}

/// Where messages go.
pub(super) trait Inbox {
    /// Memory for the message of the member at `place`, exactly as long as it.
    fn part(&mut self, place: usize) -> &mut [u8];
}

/// Kind, number of the call on this plane, bytes that follow: each 8 bytes, least significant first.
const HEADER: usize = 24;

/// A swap's state with one peer. Counts include the header.
#[derive(Clone, Copy)]
struct Progress {
    out_header: [u8; HEADER],
    in_header: [u8; HEADER],
    sent: usize,
    received: usize,
}

/// One set of sockets' place in the sequence of calls.
pub(super) struct Plane {
    calls: u64,
    peers: Vec<Progress>,
    polls: Vec<libc::pollfd>,
}

impl Plane {
    pub(super) fn new(world: u32) -> Plane {
        let start = Progress { out_header: [0; HEADER], in_header: [0; HEADER], sent: 0, received: 0 };
        Plane { calls: 0, peers: vec![start; world as usize], polls: Vec::with_capacity(world as usize) }
    }

    /// Sends `outbox(place)` to every other member and fills `inbox` with what they send. Every rank makes every
    /// call, with the members that it is one of: so calls are numbered alike whoever takes part.
    pub(super) fn swap<'a>(
        &mut self,
        sockets: &Connections,
        members: &[u32],
        kind: Kind,
        outbox: impl Fn(usize) -> &'a [u8],
        inbox: &mut impl Inbox,
        until: Instant,
    ) -> Result<(), Trouble> {
        self.calls += 1;
        for (place, &peer) in members.iter().enumerate() {
            let progress = &mut self.peers[peer as usize];
            progress.out_header = header(kind, self.calls, outbox(place).len());
            (progress.sent, progress.received) = (0, 0);
        }
        let others = || {
            let others = members.iter().enumerate();
            others.filter_map(|(place, &peer)| Some((place, peer, sockets[peer as usize].as_ref()?)))
        };
        loop {
            self.polls.clear();
            let (mut silent, mut slow) = (None, None);
            for (place, peer, socket) in others() {
                let progress = &self.peers[peer as usize];
                let sending = progress.sent < HEADER + outbox(place).len();
                let receiving = progress.received < HEADER + inbox.part(place).len();
                if sending || receiving {
                    let events = (if sending { libc::POLLOUT } else { 0 }) | (if receiving { libc::POLLIN } else { 0 });
                    self.polls.push(libc::pollfd { fd: socket.raw(), events, revents: 0 });
                    let first = if receiving { &mut silent } else { &mut slow };
                    first.get_or_insert(peer);
                }
            }
            // Who has not sent is to blame before who has not taken.
            let Some(first) = silent.or(slow) else { return Ok(()) };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Trouble::Late(first));
            }
            wait(&mut self.polls, left);
            let mut polls = self.polls.iter();
            let mut next = polls.next();
            for (place, peer, socket) in others() {
                let Some(poll) = next else { break };
                if poll.fd != socket.raw() {
                    continue;
                }
                next = polls.next();
                if poll.revents != 0 {
                    let progress = &mut self.peers[peer as usize];
                    // Receiving first: what a peer sent before it closed still counts.
                    progress.receive(socket, peer, kind, self.calls, inbox.part(place))?;
                    progress.send(socket, peer, outbox(place))?;
                }
            }
        }
    }
}

impl Progress {
    /// Sends as much as the socket takes now.
    fn send(&mut self, socket: &Socket, peer: u32, message: &[u8]) -> Result<(), Trouble> {
        while self.sent < HEADER + message.len() {
            let rest = if self.sent < HEADER { &self.out_header[self.sent..] } else { &message[self.sent - HEADER..] };
            match socket.send(rest) {
                Ok(bytes) => self.sent += bytes,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Trouble::Gone(peer)),
            }
        }
        Ok(())
    }

    /// Receives as much as is there now.
    fn receive(
        &mut self,
        socket: &Socket,
        peer: u32,
        kind: Kind,
        call: u64,
        message: &mut [u8],
    ) -> Result<(), Trouble> {
        while self.received < HEADER + message.len() {
            let rest = if self.received < HEADER {
                &mut self.in_header[self.received..]
            } else {
                &mut message[self.received - HEADER..]
            };
            match socket.receive(rest) {
                Ok(0) => return Err(Trouble::Gone(peer)),
                Ok(bytes) => self.received += bytes,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Trouble::Gone(peer)),
            }
            if self.received == HEADER && self.in_header != header(kind, call, message.len()) {
                let theirs = describe(&self.in_header);
                let ours = describe(&header(kind, call, message.len()));
                let how =
                    format!("it makes {theirs} where this rank makes {ours}; all ranks must run the same program");
                return Err(Trouble::Diverged(peer, how));
            }
        }
        Ok(())
    }
}

fn header(kind: Kind, call: u64, bytes: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    for (field, value) in header.chunks_exact_mut(8).zip([kind as u64, call, bytes as u64]) {
        field.copy_from_slice(&value.to_le_bytes());
    }
    header
}

fn describe(header: &[u8; HEADER]) -> String {
    let field = |index: usize| header[index * 8..][..8].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let kind = Kind::ALL.iter().find(|&&kind| kind as u64 == field(0)).map_or("an unknown call", |kind| kind.name());
    format!("call {} ({kind}, {} bytes)", field(1), field(2))
}

/// Waits until a socket is ready or `left` is over.
fn wait(polls: &mut [libc::pollfd], left: Duration) {
    // Rounded up, so as not to spin through the last millisecond.
    let milliseconds = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
    // SAFETY: the pointer and the count are those of one slice. Failures (interruption, a lack of kernel
    // memory) leave nothing ready; the caller looks at the clock and polls again.
    if unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, milliseconds) } < 0 {
        polls.iter_mut().for_each(|poll| poll.revents = 0);
    }
}

/// A member whose connection has closed or carries a last word, after at most `patience`.
pub(super) fn departed(sockets: &Connections, members: &[u32], patience: Duration) -> Option<u32> {
    let poll = |socket: &Socket| libc::pollfd { fd: socket.raw(), events: libc::POLLIN, revents: 0 };
    let peers: Vec<u32> = members.iter().copied().filter(|&member| sockets[member as usize].is_some()).collect();
    let mut polls: Vec<libc::pollfd> =
        peers.iter().filter_map(|&peer| sockets[peer as usize].as_ref()).map(poll).collect();
    wait(&mut polls, patience);
    polls.iter().position(|poll| poll.revents != 0).map(|place| peers[place])
}

/// Tells every peer that `culprit` is why this rank stops.
pub(super) fn leave_last_word(sockets: &Connections, culprit: u32) {
    for socket in sockets.iter().flatten() {
        // A peer that is gone needs no telling, and four bytes always fit into an unused socket.
        let _ = socket.send(&culprit.to_le_bytes());
    }
}

/// Whom `peer`, whose connection is closed, named as the reason; none if it left without a word.
pub(super) fn last_word(sockets: &Connections, peer: u32, patience: Duration) -> Option<u32> {
    let socket = sockets[peer as usize].as_ref()?;
    let until = Instant::now() + patience;
    let mut word = [0; 4];
    let mut received = 0;
    while received < word.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        wait(&mut [libc::pollfd { fd: socket.raw(), events: libc::POLLIN, revents: 0 }], left);
        match socket.receive(&mut word[received..]) {
            Ok(0) => return None,
            Ok(bytes) => received += bytes,
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
            Err(_) => return None,
        }
    }
    Some(u32::from_le_bytes(word))
}
