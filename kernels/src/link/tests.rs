use super::*;
use half::{bf16, f16};
use std::net::{Ipv4Addr, TcpListener};

/// Runs `body` on every rank of a world, each on its thread; results in rank order.
fn ranks<T: Send>(links: Vec<Link>, body: impl Fn(&Link) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = links.into_iter().map(|link| scope.spawn(|| body(&{ link }))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

fn in_process(world: u32) -> Vec<Link> {
    Link::in_process(world, LinkOptions::default()).expect("sockets")
}

/// An address of this machine where nobody listens.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("its address")
}

/// Values of `rank`: of very different sizes, so that the order of sums shows in their bits.
fn value(rank: u32, index: usize) -> f32 {
    let bits = crate::rng::bits(u64::from(rank), index as u64, 0);
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    sign * (1.0 + crate::rng::uniform(7, bits, 0)) * 2f32.powi((bits >> 8) as i32 % 12)
}

fn bytes_of(dtype: DType, rank: u32, count: usize) -> Vec<u8> {
    let values = (0..count).map(|index| value(rank, index));
    match dtype {
        DType::F64 => values.flat_map(|x| (f64::from(x) / 3.0).to_le_bytes()).collect(),
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// The definition: one after the other, in f32 or f64, rounded once.
fn serial_sum(dtype: DType, world: u32, count: usize) -> Vec<u8> {
    let narrow = |index: usize, round: fn(f32) -> f32| {
        (1..world).fold(round(value(0, index)), |sum, rank| sum + round(value(rank, index)))
    };
    (0..count)
        .flat_map(|index| match dtype {
            DType::F64 => {
                let wide = |rank| f64::from(value(rank, index)) / 3.0;
                (1..world).fold(wide(0), |sum, rank| sum + wide(rank)).to_le_bytes().to_vec()
            }
            DType::F32 => narrow(index, |x| x).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(narrow(index, |x| f16::from_f32(x).to_f32())).to_le_bytes().to_vec(),
            _ => bf16::from_f32(narrow(index, |x| bf16::from_f32(x).to_f32())).to_le_bytes().to_vec(),
        })
        .collect()
}

#[test]
fn collectives_equal_serial_sums_bit_for_bit() {
    for world in [1, 2, 3, 5] {
        // More than one piece in f32, and a number that no block divides.
        let shard = if world == 2 { 300_001 } else { 1037 };
        let count = shard * world as usize;
        ranks(in_process(world), |link| {
            for dtype in [DType::F64, DType::F32, DType::F16, DType::Bf16] {
                let own = bytes_of(dtype, link.rank(), count);
                let expected = serial_sum(dtype, world, count);
                let bytes = dtype.bytes(shard as u64) as usize;
                let mine = link.rank() as usize * bytes..(link.rank() as usize + 1) * bytes;

                let mut all = own.clone();
                link.all_reduce(Among::All, dtype, &mut all).expect("all-reduce");
                assert!(all == expected, "{dtype:?} of {world}: all-reduce");

                let (mut full, mut out) = (own.clone(), vec![0; bytes]);
                link.reduce_scatter(dtype, &mut full, Some(&mut out)).expect("reduce-scatter");
                assert!(out == expected[mine.clone()], "{dtype:?} of {world}: reduce-scatter");
                assert!(full == own, "{dtype:?} of {world}: the source is only read");

                link.reduce_scatter(dtype, &mut full, None).expect("reduce-scatter in place");
                assert!(full[mine] == out, "{dtype:?} of {world}: reduce-scatter in place");

                link.all_gather(&mut full).expect("all-gather");
                assert!(full == expected, "{dtype:?} of {world}: all-gather");
            }
        });
    }
}

/// Six ranks that hold two, three or all shards: each collective is that of its ranks alone.
#[test]
fn collectives_run_among_the_ranks_that_they_concern() {
    const SHARD: usize = 1037;
    for shards in [1, 2, 3, 6] {
        let options = LinkOptions { shards: Some(shards), ..LinkOptions::default() };
        let count = SHARD * shards as usize;
        ranks(Link::in_process(6, options).expect("sockets"), |link| {
            let sum_of = |members: &[u32], count: usize| -> Vec<u8> {
                let sum =
                    |index: usize| members[1..].iter().fold(value(members[0], index), |sum, &m| sum + value(m, index));
                (0..count).flat_map(|index| sum(index).to_le_bytes()).collect()
            };
            let own = bytes_of(DType::F32, link.rank(), count);
            for among in [Among::All, Among::Shards, Among::Replicas] {
                let mut all = own.clone();
                link.all_reduce(among, DType::F32, &mut all).expect("all-reduce");
                assert!(all == sum_of(link.ranks_among(among), count), "{shards} shards, among {among:?}");
            }
            let (first, place) = (link.rank() / shards * shards, (link.rank() % shards) as usize);
            assert_eq!(link.ranks_among(Among::Shards), (first..first + shards).collect::<Vec<_>>());
            let expected = sum_of(link.ranks_among(Among::Shards), count);
            let mut full = own.clone();
            link.reduce_scatter(DType::F32, &mut full, None).expect("reduce-scatter");
            let mine = place * SHARD * 4..(place + 1) * SHARD * 4;
            assert!(full[mine.clone()] == expected[mine], "{shards} shards: reduce-scatter");
            link.all_gather(&mut full).expect("all-gather");
            assert!(full == expected, "{shards} shards: all-gather");
        });
    }
}

/// For work beside the link: who has ended is seen at once, who is silent is named by a roll call.
#[test]
fn the_departed_and_the_silent_are_found_without_a_call_of_theirs() {
    let mut links = in_process(3);
    assert_eq!(links[0].departed(Among::All, Duration::ZERO), None);
    links.iter().for_each(|link| assert!(link.ranks_among(Among::Shards) == [0, 1, 2]));
    drop(links.remove(1));
    assert_eq!(links[0].departed(Among::All, Duration::from_secs(60)), Some(1));
    assert!(matches!(links[0].blame(1), Error::Peer { rank: 1, .. }));
    // Rank 2 learns of it from the last word of rank 0, or from rank 1's own end.
    let gone = links[1].departed(Among::All, Duration::from_secs(60)).expect("two are");
    assert!(matches!(links[1].blame(gone), Error::Peer { rank: 1, .. }));

    let mut links = in_process(3);
    // The lowest silent rank is blamed, however late the others start.
    let silent = links.remove(0);
    ranks(links, |link| {
        let error = link.roll_call(Duration::from_millis(50)).expect_err("rank 0 is silent");
        assert!(matches!(error, Error::Peer { rank: 0, .. }), "{error}");
    });
    drop(silent);
    ranks(in_process(3), |link| link.roll_call(Duration::from_secs(60)).expect("all are there"));
}

#[test]
fn exchanges_run_beside_collectives() {
    ranks(in_process(3), |link| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    let mut full = bytes_of(DType::F32, link.rank(), 3000);
                    link.all_reduce(Among::All, DType::F32, &mut full).expect("all-reduce");
                    assert!(full == serial_sum(DType::F32, 3, 3000));
                }
            });
            for round in 0..20u8 {
                let message = vec![round + link.rank() as u8; link.rank() as usize * 1000];
                let messages = link.exchange(&message).expect("exchange");
                for (rank, message) in messages.iter().enumerate() {
                    assert!(*message == vec![round + rank as u8; rank * 1000], "round {round}, rank {rank}");
                }
            }
        });
    });
}

#[test]
fn a_dead_peer_is_named_by_every_survivor() {
    for (world, dead) in [(2, 1), (3, 0), (5, 3)] {
        let errors = ranks(in_process(world), |link| {
            link.exchange(b"all here").expect("all are alive");
            if link.rank() == dead {
                return None;
            }
            let mut values = vec![0; 4 << 20];
            let error = link.all_reduce(Among::All, DType::F32, &mut values).expect_err("one is gone");
            // It is kept, on both planes.
            let again = link.exchange(b"anyone?").expect_err("still gone");
            assert_eq!(error.to_string(), again.to_string());
            Some(error)
        });
        for error in errors.into_iter().flatten() {
            let Error::Peer { rank, .. } = error else { panic!("{error}") };
            assert_eq!(rank, dead, "{error}");
        }
    }
}

#[test]
fn a_silent_peer_is_named_after_the_deadline() {
    let options = LinkOptions { deadline: Duration::from_millis(50), ..LinkOptions::default() };
    let mut links = Link::in_process(3, options).expect("sockets");
    // Rank 0 is alive and says nothing. (The lowest missing rank is blamed, however late the others start.)
    let silent = links.remove(0);
    for error in ranks(links, |link| link.exchange(b"here").expect_err("one is silent")) {
        let Error::Peer { rank, .. } = error else { panic!("{error}") };
        assert_eq!(rank, 0, "{error}");
    }
    let error = silent.exchange(b"late").expect_err("the others have given up");
    assert!(matches!(error, Error::Peer { rank: 0, .. }), "{error}");
}

#[test]
fn ranks_that_make_different_calls_find_out() {
    let errors = ranks(in_process(2), |link| {
        let mut values = vec![0; 8];
        if link.rank() == 0 {
            link.all_gather(&mut values)
        } else {
            link.all_reduce(Among::All, DType::F32, &mut values)
        }
        .expect_err("the calls differ")
        .to_string()
    });
    assert!(errors.iter().any(|e| e.contains("all-gather") && e.contains("all-reduce")), "{errors:?}");
}

#[test]
fn an_abandoned_link_wakes_its_own_waiting_thread() {
    let links = in_process(2);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| links[0].all_reduce(Among::All, DType::F32, &mut [0; 4]));
        links[0].abandon();
        assert!(waiting.join().expect("no panic").is_err());
    });
}

#[test]
fn ranks_meet_over_tcp() {
    for world in [1, 2, 3, 5] {
        let master = free_address();
        let all: Vec<Vec<u8>> = (0..world as u8).map(|rank| vec![rank; 5]).collect();
        std::thread::scope(|scope| {
            // Rank 0 last: the others have to try again.
            for rank in (0..world).rev() {
                let all = &all;
                scope.spawn(move || {
                    let timeout = Duration::from_secs(60);
                    let link = Link::rendezvous(rank, world, master, timeout, LinkOptions::default()).expect("meet");
                    assert!(link.exchange(&all[rank as usize]).expect("exchange") == *all);
                    let mut values = bytes_of(DType::F32, rank, 777);
                    link.all_reduce(Among::All, DType::F32, &mut values).expect("all-reduce");
                    assert!(values == serial_sum(DType::F32, world, 777));
                });
            }
        });
    }
}

#[test]
fn missing_ranks_are_named_to_all_that_came() {
    let master = free_address();
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let came: Vec<_> = [0, 2]
            .map(|rank| {
                scope.spawn(move || {
                    let timeout = Duration::from_secs(1);
                    Link::rendezvous(rank, 4, master, timeout, LinkOptions::default()).err().expect("two are missing")
                })
            })
            .into_iter()
            .collect();
        came.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for error in errors {
        let Error::Peer { rank, reason } = &error else { panic!("{error}") };
        assert_eq!(*rank, 1, "{error}");
        assert!(reason.contains("1, 3 did not come"), "{error}");
    }
}

/// Launchers of several hosts that were given the same number, or other numbers of ranks.
#[test]
fn ranks_that_are_not_one_world_find_out_at_the_rendezvous() {
    for (guests, words) in [([(1, 3), (1, 3)], "two processes"), ([(1, 2), (2, 3)], "one of 2 ranks; rank 0 expects 3")]
    {
        let master = free_address();
        let meet = move |(rank, world): (u32, u32)| {
            let timeout = Duration::from_secs(60);
            Link::rendezvous(rank, world, master, timeout, LinkOptions::default()).err().expect("no world")
        };
        let host = std::thread::scope(|scope| {
            let host = scope.spawn(move || meet((0, 3)));
            // The guests are told, or find nobody there any more: neither is waited for a minute.
            guests.into_iter().for_each(|guest| drop(std::thread::spawn(move || meet(guest))));
            host.join().expect("no panic")
        });
        assert!(matches!(host, Error::Peer { rank: 1, .. }) && host.to_string().contains(words), "{host}");
    }
}

#[test]
fn a_port_in_use_and_a_missing_master_are_one_sentence() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let master = taken.local_addr().expect("its address");
    let short = Duration::from_millis(50);
    let error = Link::rendezvous(0, 2, master, short, LinkOptions::default()).err().expect("taken").to_string();
    assert!(error.contains(&master.to_string()) && error.contains("the port is in use"), "{error}");
    drop(taken);
    let error = Link::rendezvous(1, 2, master, short, LinkOptions::default()).err().expect("nobody").to_string();
    assert!(error.contains("rank 0") && error.contains(&master.to_string()), "{error}");
}
