//! Requests in flight: cutting a transfer into pieces, and the three ways of carrying pieces out.
//!
//! Every completion is looked at; short ones are continued, interrupted ones repeated. A transfer returns
//! only when none of its pieces is in flight, whatever went wrong.

use crossbeam::channel::{Receiver, Sender, bounded};
use io_uring::{IoUring, opcode, types};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Bytes of one request.
const PIECE_BYTES: u64 = 1 << 20;

/// Requests of one transfer in flight.
const DEPTH: usize = 8;

/// Threads of the pread/pwrite rungs.
const WORKERS: usize = 4;

/// The kernel registers buffers of at most this length.
const REGISTERED_BYTES: u64 = 1 << 30;

/// Bytes to move between memory and file.
#[derive(Clone, Copy)]
pub(super) struct Transfer {
    pub(super) write: bool,
    pub(super) address: *mut u8,
    pub(super) bytes: u64,
    pub(super) offset: u64,
}

/// One request of a transfer.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    write: bool,
    address: *mut u8,
    pub(super) bytes: u32,
    pub(super) offset: u64,
}

// SAFETY: a piece is the description of a request; whoever carries it out relies on `carry_out`'s caller for
// the memory, on whatever thread that happens.
unsafe impl Send for Piece {}

/// A way of carrying pieces out.
pub(super) trait Queue: Send {
    /// Takes a piece; `tag` comes back with its completion.
    ///
    /// # Safety
    /// The piece's memory stays valid until [`Queue::reap`] has returned its tag.
    unsafe fn submit(&mut self, tag: usize, piece: Piece);

    /// Waits for a completion: its tag, and the bytes done.
    fn reap(&mut self) -> (usize, io::Result<usize>);

    /// Registers memory where that helps; whether it did.
    ///
    /// # Safety
    /// The memory stays mapped for as long as the queue lives.
    unsafe fn register(&mut self, _base: *mut u8, _bytes: u64) -> bool {
        false
    }
}

/// Number of pieces in flight. A bug that unwinds past them would free memory that the kernel or a worker
/// still uses: a second panic while unwinding ends the process instead.
struct InFlight(usize);

impl Drop for InFlight {
    fn drop(&mut self) {
        assert!(self.0 == 0, "{} requests are still in flight", self.0);
    }
}

/// Carries `transfer` out; returns when nothing of it is in flight any more. The error comes with the piece
/// that failed first.
///
/// # Safety
/// `transfer`'s memory is valid for the duration of the call: to read for writes, to write for reads.
pub(super) unsafe fn carry_out(queue: &mut dyn Queue, transfer: Transfer) -> Result<(), (Piece, io::Error)> {
    let mut slots: [Option<Piece>; DEPTH] = [None; DEPTH];
    let mut in_flight = InFlight(0);
    let mut issued = 0;
    let mut failed = None;
    loop {
        while failed.is_none() && issued < transfer.bytes {
            let Some(tag) = slots.iter().position(Option::is_none) else { break };
            let bytes = PIECE_BYTES.min(transfer.bytes - issued);
            let piece = Piece {
                write: transfer.write,
                address: transfer.address.wrapping_add(issued as usize),
                bytes: bytes as u32,
                offset: transfer.offset + issued,
            };
            issued += bytes;
            slots[tag] = Some(piece);
            in_flight.0 += 1;
            // SAFETY: the memory is valid for the call, which ends after the piece was reaped.
            unsafe { queue.submit(tag, piece) };
        }
        if in_flight.0 == 0 {
            return failed.map_or(Ok(()), Err);
        }
        let (tag, result) = queue.reap();
        let Some(piece) = slots[tag].take() else { panic!("completion {tag} of no request") };
        in_flight.0 -= 1;
        let rest = match result {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "nothing was transferred: the file is shorter")),
            Ok(done) => Ok(Piece {
                address: piece.address.wrapping_add(done),
                bytes: piece.bytes - done as u32,
                offset: piece.offset + done as u64,
                ..piece
            }),
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => Ok(piece),
            Err(e) => Err(e),
        };
        match rest {
            Ok(rest) if rest.bytes > 0 && failed.is_none() => {
                slots[tag] = Some(rest);
                in_flight.0 += 1;
                // SAFETY: as above.
                unsafe { queue.submit(tag, rest) };
            }
            Ok(_) => {}
            Err(error) => failed = failed.or(Some((piece, error))),
        }
    }
}

/// io_uring.
pub(super) struct RingQueue {
    ring: IoUring,
    file: Arc<File>,
    /// Address and length of the registered memory.
    registered: Option<(usize, u64)>,
}

impl RingQueue {
    pub(super) fn new(file: Arc<File>) -> io::Result<RingQueue> {
        Ok(RingQueue { ring: IoUring::new(2 * DEPTH as u32)?, file, registered: None })
    }

    /// Index of the registered buffer in which the whole piece lies.
    fn buffer(&self, piece: &Piece) -> Option<u16> {
        let (base, bytes) = self.registered?;
        let start = piece.address.addr().checked_sub(base)? as u64;
        let last = start + u64::from(piece.bytes) - 1;
        let index = start / REGISTERED_BYTES;
        (last < bytes && last / REGISTERED_BYTES == index).then(|| u16::try_from(index).ok())?
    }
}

impl Queue for RingQueue {
    unsafe fn submit(&mut self, tag: usize, piece: Piece) {
        let file = types::Fd(self.file.as_raw_fd());
        let Piece { write, address, bytes, offset } = piece;
        let entry = match (write, self.buffer(&piece)) {
            (false, Some(index)) => opcode::ReadFixed::new(file, address, bytes, index).offset(offset).build(),
            (true, Some(index)) => opcode::WriteFixed::new(file, address, bytes, index).offset(offset).build(),
            (false, None) => opcode::Read::new(file, address, bytes).offset(offset).build(),
            (true, None) => opcode::Write::new(file, address, bytes).offset(offset).build(),
        };
        // SAFETY: the caller keeps the memory valid until the completion; the file is open as long as `self`.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(tag as u64)) };
        assert!(pushed.is_ok(), "the ring has room for every request in flight");
    }

    fn reap(&mut self) -> (usize, io::Result<usize>) {
        loop {
            // New requests first, so that the disk has as many as it can.
            let waiting = self.ring.completion().is_empty();
            if waiting || !self.ring.submission().is_empty() {
                match self.ring.submit_and_wait(usize::from(waiting)) {
                    Ok(_) => {}
                    Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {
                        std::thread::yield_now();
                    }
                    // Requests may be in flight, so this cannot be returned as an error; see `InFlight`.
                    Err(e) => panic!("io_uring_enter refused a valid ring: {e}"),
                }
            }
            if let Some(entry) = self.ring.completion().next() {
                let result = match entry.result() {
                    done if done >= 0 => Ok(done as usize),
                    errno => Err(io::Error::from_raw_os_error(-errno)),
                };
                return (entry.user_data() as usize, result);
            }
        }
    }

    unsafe fn register(&mut self, base: *mut u8, bytes: u64) -> bool {
        if bytes == 0 {
            return false;
        }
        let buffers: Vec<libc::iovec> = (0..bytes.div_ceil(REGISTERED_BYTES))
            .map(|index| {
                let start = index * REGISTERED_BYTES;
                libc::iovec {
                    iov_base: base.wrapping_add(start as usize).cast(),
                    iov_len: REGISTERED_BYTES.min(bytes - start) as usize,
                }
            })
            .collect();
        // SAFETY: the caller keeps the memory mapped for as long as the ring lives.
        let registered = unsafe { self.ring.submitter().register_buffers(&buffers) }.is_ok();
        self.registered = registered.then_some((base.addr(), bytes));
        registered
    }
}

struct Job {
    tag: usize,
    piece: Piece,
    done: Sender<(usize, io::Result<usize>)>,
}

/// Threads that read and write where they are told. They end when both their queues are dropped.
pub(super) struct Workers {
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts threads on `file`, with a queue for reads and one for writes.
    pub(super) fn start(file: &Arc<File>) -> io::Result<(WorkerQueue, WorkerQueue, Workers)> {
        let (jobs, next) = bounded::<Job>(2 * DEPTH);
        let queue = || {
            let (done, finished) = bounded(DEPTH);
            WorkerQueue { jobs: jobs.clone(), done, finished }
        };
        let queues = (queue(), queue());
        let mut workers = Workers { threads: Vec::new() };
        for index in 0..WORKERS {
            let (file, next) = (Arc::clone(file), next.clone());
            let thread = std::thread::Builder::new().name(format!("castor-file-{index}"));
            workers.threads.push(thread.spawn(move || work(&file, &next))?);
        }
        Ok((queues.0, queues.1, workers))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            // A worker that panicked has said so on its own.
            let _ = thread.join();
        }
    }
}

fn work(file: &File, next: &Receiver<Job>) {
    for Job { tag, piece, done } in next {
        let bytes = piece.bytes as usize;
        let result = if piece.write {
            // SAFETY: the submitter keeps the memory valid until it has the completion sent below.
            file.write_at(unsafe { std::slice::from_raw_parts(piece.address, bytes) }, piece.offset)
        } else {
            // SAFETY: as above, and nobody else uses the memory meanwhile.
            file.read_at(unsafe { std::slice::from_raw_parts_mut(piece.address, bytes) }, piece.offset)
        };
        // The submitter waits for every completion, so there is always somebody to send to.
        let _ = done.send((tag, result));
    }
}

/// pread and pwrite by [`Workers`].
pub(super) struct WorkerQueue {
    jobs: Sender<Job>,
    done: Sender<(usize, io::Result<usize>)>,
    finished: Receiver<(usize, io::Result<usize>)>,
}

impl Queue for WorkerQueue {
    unsafe fn submit(&mut self, tag: usize, piece: Piece) {
        let sent = self.jobs.send(Job { tag, piece, done: self.done.clone() });
        assert!(sent.is_ok(), "the file's threads are gone: they panicked");
    }

    fn reap(&mut self) -> (usize, io::Result<usize>) {
        match self.finished.recv() {
            Ok(completion) => completion,
            Err(_) => unreachable!("the queue holds a sender of its own completions"),
        }
    }
}

/// Copies to and from a shared map.
pub(super) struct MapQueue {
    map: Arc<memmap2::MmapRaw>,
    finished: VecDeque<(usize, usize)>,
}

impl MapQueue {
    pub(super) fn new(map: Arc<memmap2::MmapRaw>) -> MapQueue {
        MapQueue { map, finished: VecDeque::with_capacity(DEPTH) }
    }
}

impl Queue for MapQueue {
    unsafe fn submit(&mut self, tag: usize, piece: Piece) {
        let bytes = piece.bytes as usize;
        assert!(piece.offset as usize + bytes <= self.map.len(), "a piece lies inside of the file");
        // SAFETY: the map is as long as the file, which contains the piece (checked).
        let place = unsafe { self.map.as_mut_ptr().add(piece.offset as usize) };
        let (from, to) =
            if piece.write { (piece.address.cast_const(), place) } else { (place.cast_const(), piece.address) };
        // SAFETY: the caller vouches for the memory, the check above for the map; they are different maps.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        self.finished.push_back((tag, bytes));
    }

    fn reap(&mut self) -> (usize, io::Result<usize>) {
        let Some((tag, bytes)) = self.finished.pop_front() else { panic!("reaped without a request") };
        (tag, Ok(bytes))
    }
}
