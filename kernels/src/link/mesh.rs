//! How ranks find each other: the rendezvous at rank 0, and the three sockets between every two ranks.

use crate::{Error, Result};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A connected stream socket, of whatever family. Sends and receives never block and never signal.
pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Sends the beginning of `bytes`; how much.
    pub(super) fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: pointer and length are those of one slice that outlives the call.
        let sent = unsafe { libc::send(self.raw(), bytes.as_ptr().cast(), bytes.len(), flags) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives into the beginning of `out`; how much. 0: the peer closed.
    pub(super) fn receive(&self, out: &mut [u8]) -> io::Result<usize> {
        // SAFETY: pointer and length are those of one slice that outlives the call.
        let received = unsafe { libc::recv(self.raw(), out.as_mut_ptr().cast(), out.len(), libc::MSG_DONTWAIT) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    /// Closes both directions for every holder of the socket.
    pub(super) fn shut_down(&self) -> io::Result<()> {
        // SAFETY: the descriptor is open as long as `self`.
        let done = unsafe { libc::shutdown(self.raw(), libc::SHUT_RDWR) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A socket to each rank; none to oneself.
pub(super) type Connections = Vec<Option<Socket>>;

/// The sockets of one rank.
pub(super) struct Sockets {
    pub(super) data: Connections,
    pub(super) control: Connections,
    pub(super) last_words: Connections,
}

impl Sockets {
    fn new(world: u32) -> Sockets {
        let none = || (0..world).map(|_| None).collect();
        Sockets { data: none(), control: none(), last_words: none() }
    }

    fn plane(&mut self, plane: u32) -> Option<&mut Connections> {
        match plane {
            0 => Some(&mut self.data),
            1 => Some(&mut self.control),
            2 => Some(&mut self.last_words),
            _ => None,
        }
    }
}

/// Planes of [`Sockets`].
const PLANES: u32 = 3;

/// The "plane" of the connection on which ranks tell rank 0 where they are.
const RENDEZVOUS: u32 = PLANES;

/// Sockets of all ranks of a world inside one process.
pub(super) fn pairs(world: u32) -> Result<Vec<Sockets>> {
    let mut ranks: Vec<Sockets> = (0..world).map(|_| Sockets::new(world)).collect();
    for high in 0..world as usize {
        for low in 0..high {
            for plane in 0..PLANES {
                let (a, b) = UnixStream::pair().map_err(|e| Error::Device {
                    call: "socketpair".into(),
                    reason: format!("{e}; raise the limit of open files"),
                })?;
                for (from, to, end) in [(low, high, a), (high, low, b)] {
                    if let Some(connections) = ranks[from].plane(plane) {
                        connections[to] = Some(Socket(end.into()));
                    }
                }
            }
        }
    }
    Ok(ranks)
}

/// First words on every connection: sixteen letters, then world, rank, plane and port.
const GREETING: &[u8; 16] = b"castor link v1\r\n";
const HELLO: usize = GREETING.len() + 16;

/// Address of a rank: IPv6 (or mapped IPv4), then the port.
const ADDRESS: usize = 18;

/// Who is calling.
#[derive(Clone, Copy)]
struct Hello {
    world: u32,
    rank: u32,
    plane: u32,
    /// Where the caller listens, on the rendezvous.
    port: u32,
}

impl Hello {
    fn send(self, mut stream: &TcpStream) -> io::Result<()> {
        let mut bytes = [0; HELLO];
        bytes[..GREETING.len()].copy_from_slice(GREETING);
        for (field, value) in
            bytes[GREETING.len()..].chunks_exact_mut(4).zip([self.world, self.rank, self.plane, self.port])
        {
            field.copy_from_slice(&value.to_le_bytes());
        }
        stream.write_all(&bytes)
    }

    /// None if the caller is a stranger.
    fn receive(mut stream: &TcpStream) -> Option<Hello> {
        // Strangers that say nothing must not hold up the ranks.
        stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        let mut bytes = [0; HELLO];
        stream.read_exact(&mut bytes).ok()?;
        let field = |index: usize| read_u32(&bytes[GREETING.len() + index * 4..]);
        let hello = Hello { world: field(0), rank: field(1), plane: field(2), port: field(3) };
        bytes.starts_with(GREETING).then_some(hello)
    }
}

fn read_u32(bytes: &[u8]) -> u32 {
    bytes[..4].iter().rev().fold(0, |sum, &byte| sum << 8 | u32::from(byte))
}

/// Connects this rank to all others by way of rank 0 at `master`.
pub(super) fn meet(rank: u32, world: u32, master: SocketAddr, timeout: Duration) -> Result<Sockets> {
    let until = Instant::now() + timeout;
    let mut sockets = Sockets::new(world);
    if world == 1 {
        return Ok(sockets);
    }
    let (listener, addresses) =
        if rank == 0 { host(world, master, timeout)? } else { join(rank, world, master, timeout)? };
    // Everyone is there: what remains is quick, even if the last one came at the last moment.
    let until = until.max(Instant::now() + Duration::from_secs(10));
    for peer in 0..rank {
        for plane in 0..PLANES {
            let gone = |e: io::Error| {
                peer_error(peer, format!("it could not be reached at {}: {e}", addresses[peer as usize]))
            };
            let stream = connect(addresses[peer as usize], until).map_err(gone)?;
            Hello { world, rank, plane, port: 0 }.send(&stream).map_err(gone)?;
            keep(&mut sockets, plane, peer, stream)?;
        }
    }
    let missing = |sockets: &Sockets| {
        let lacks = |peer: &u32| {
            [&sockets.data, &sockets.control, &sockets.last_words].iter().any(|c| c[*peer as usize].is_none())
        };
        (rank + 1..world).find(lacks)
    };
    while let Some(peer) = missing(&sockets) {
        let Some(stream) = accept(&listener, until)? else {
            return Err(peer_error(peer, "it did not connect after the rendezvous; look at its own output".into()));
        };
        match Hello::receive(&stream) {
            Some(hello) if hello.world == world && hello.rank > rank && hello.rank < world => {
                keep(&mut sockets, hello.plane, hello.rank, stream)?;
            }
            _ => {}
        }
    }
    Ok(sockets)
}

/// Puts a connection in its place. Strangers' planes are ignored.
fn keep(sockets: &mut Sockets, plane: u32, peer: u32, stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true).map_err(|e| peer_error(peer, format!("its connection is not usable: {e}")))?;
    if let Some(connections) = sockets.plane(plane) {
        connections[peer as usize] = Some(Socket(stream.into()));
    }
    Ok(())
}

/// Rank 0 of the rendezvous: hears where everyone is and tells everyone.
fn host(world: u32, master: SocketAddr, timeout: Duration) -> Result<(TcpListener, Vec<SocketAddr>)> {
    let until = Instant::now() + timeout;
    let listener = listen(master)?;
    let mut guests: Vec<Option<(TcpStream, SocketAddr)>> = (0..world).map(|_| None).collect();
    let mut problem = None;
    while problem.is_none() && guests[1..].iter().any(Option::is_none) {
        let Some(stream) = accept(&listener, until)? else {
            let missing: Vec<u32> = (1..world).filter(|&rank| guests[rank as usize].is_none()).collect();
            let names: Vec<String> = missing.iter().map(u32::to_string).collect();
            let seconds = timeout.as_secs_f64();
            let reason = format!(
                "missing: of {world} ranks, {} did not come to {master} within {seconds} s; look at their own output",
                names.join(", ")
            );
            problem = Some((missing[0], reason));
            break;
        };
        let (Some(hello), Ok(from)) = (Hello::receive(&stream), stream.peer_addr()) else { continue };
        if hello.plane != RENDEZVOUS {
            continue;
        }
        let rank = hello.rank;
        if hello.world != world || rank == 0 || rank >= world {
            problem = Some((rank, format!("it says it is one of {} ranks; rank 0 expects {world}", hello.world)));
        } else if guests[rank as usize].is_some() {
            problem = Some((rank, format!("two processes at {master} say they are this rank")));
        } else {
            guests[rank as usize] = Some((stream, SocketAddr::new(from.ip(), hello.port as u16)));
        }
    }
    let mut reply = Vec::new();
    let mut addresses = vec![master];
    if let Some((rank, reason)) = &problem {
        reply.extend((rank + 1).to_le_bytes());
        reply.extend((reason.len() as u32).to_le_bytes());
        reply.extend(reason.as_bytes());
    } else {
        addresses.extend(guests[1..].iter().flatten().map(|(_, address)| *address));
        reply.extend(0u32.to_le_bytes());
        reply.extend(((addresses.len() * ADDRESS) as u32).to_le_bytes());
        for address in &addresses {
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            reply.extend(ip.octets());
            reply.extend(address.port().to_le_bytes());
        }
    }
    for (rank, (mut stream, _)) in (1..).zip(guests.into_iter().skip(1).flatten()) {
        let told = stream.write_all(&reply);
        if let (Err(e), None) = (told, &problem) {
            problem = Some((rank, format!("it left during the rendezvous: {e}")));
        }
    }
    problem.map_or(Ok((listener, addresses)), |(rank, reason)| Err(peer_error(rank, reason)))
}

/// The other ranks of the rendezvous: tell rank 0 where they are and hear where everyone is.
fn join(rank: u32, world: u32, master: SocketAddr, timeout: Duration) -> Result<(TcpListener, Vec<SocketAddr>)> {
    let until = Instant::now() + timeout;
    let seconds = timeout.as_secs_f64();
    let gone = |what: &str, e: io::Error| {
        peer_error(0, format!("{what} at {master} within {seconds} s: {e}; is it running, and is the address right?"))
    };
    let mut stream = connect(master, until).map_err(|e| gone("it could not be reached", e))?;
    let here = stream.local_addr().map_err(|e| gone("it could not be reached", e))?;
    let listener = listen(SocketAddr::new(here.ip(), 0))?;
    let port = listener.local_addr().map_err(|e| gone("it could not be reached", e))?.port();
    // Rank 0 gives up at about the same time and says who is missing: worth a little patience.
    let patience = until.saturating_duration_since(Instant::now()) + Duration::from_secs(5);
    let mut head = [0; 8];
    let mut body = Vec::new();
    let hello = Hello { world, rank, plane: RENDEZVOUS, port: u32::from(port) };
    let mut hear = || {
        stream.set_read_timeout(Some(patience))?;
        hello.send(&stream)?;
        stream.read_exact(&mut head)?;
        (&stream).take(u64::from(read_u32(&head[4..]))).read_to_end(&mut body)
    };
    hear().map_err(|e| gone("it did not answer", e))?;
    if let Some(culprit) = read_u32(&head).checked_sub(1) {
        return Err(peer_error(culprit, String::from_utf8_lossy(&body).into_owned()));
    }
    if body.len() != world as usize * ADDRESS {
        return Err(peer_error(0, format!("it sent {} bytes of addresses for {world} ranks", body.len())));
    }
    let mut addresses: Vec<SocketAddr> = body
        .chunks_exact(ADDRESS)
        .map(|bytes| {
            let mut ip = [0; 16];
            ip.copy_from_slice(&bytes[..16]);
            SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_le_bytes([bytes[16], bytes[17]]))
        })
        .collect();
    // Rank 0 may know itself by another name (0.0.0.0); this one is known to work.
    addresses[0] = master;
    Ok((listener, addresses))
}

/// Listens at `address`, not blocking.
fn listen(address: SocketAddr) -> Result<TcpListener> {
    let refused = |e: io::Error| {
        let hint = match e.kind() {
            io::ErrorKind::AddrInUse => "; the port is in use: end the other process or choose another port",
            io::ErrorKind::AddrNotAvailable => "; this machine has no such address: rank 0 must run at the master's",
            io::ErrorKind::PermissionDenied => "; choose a port above 1023",
            _ => "",
        };
        Error::Device { call: format!("listening at {address}"), reason: format!("{e}{hint}") }
    };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    Ok(listener)
}

/// The next caller, or none when time is up.
fn accept(listener: &TcpListener, until: Instant) -> Result<Option<TcpStream>> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                // On Linux an accepted socket blocks whatever its listener does.
                return Ok(Some(stream));
            }
            // Aborted before it was accepted, interrupted, or nobody there yet.
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted
                ) => {}
            Err(e) => {
                return Err(Error::Device {
                    call: "accept".into(),
                    reason: format!("{e}; raise the limit of open files"),
                });
            }
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Connects to `address`, trying again until time is up: it may not be listening yet.
fn connect(address: SocketAddr, until: Instant) -> io::Result<TcpStream> {
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&address, left.min(Duration::from_secs(2))) {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() >= until => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn peer_error(rank: u32, reason: String) -> Error {
    Error::Peer { rank, reason }
}
