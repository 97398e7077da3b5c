use super::*;

/// Memory aligned for direct I/O.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Aligned {
    fn new(bytes: usize) -> Aligned {
        let memory = vec![0; bytes + BLOCK_BYTES as usize];
        let start = memory.as_ptr().align_offset(BLOCK_BYTES as usize);
        Aligned { memory, start, bytes }
    }

    fn random(bytes: usize, seed: u64) -> Aligned {
        let mut aligned = Aligned::new(bytes);
        for (index, word) in aligned.all().chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&crate::rng::bits(seed, index as u64, 0).to_le_bytes());
        }
        aligned
    }

    fn all(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// The file on `rung`, or None (said aloud) where this machine does not have it.
fn on(rung: Rung, folder: &Path, bytes: u64) -> Option<BlockFile> {
    let options = BlockOptions { rung: Some(rung), ..BlockOptions::default() };
    match BlockFile::create(folder, bytes, &options) {
        Ok(file) => Some(file),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn every_rung_brings_back_what_was_written() {
    let folder = folder();
    for rung in Rung::ALL {
        let Some(file) = on(rung, folder.path(), 16 << 20) else { continue };
        assert_eq!(file.rung(), rung);
        // One block, a piece less a block, pieces and a bit, more pieces than are in flight at once.
        let mut offset = 0;
        for blocks in [1, 255, 257, 600, 2900] {
            let bytes = blocks * BLOCK_BYTES as usize;
            let mut written = Aligned::random(bytes, blocks as u64);
            let mut read = Aligned::new(bytes);
            file.write(offset, written.all()).expect("write");
            file.read(offset, read.all()).expect("read");
            assert!(written.all() == read.all(), "{rung:?}: {blocks} blocks");
            offset += if blocks < 600 { bytes as u64 } else { 0 };
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 0, "{rung:?} left a name behind");
    }
}

#[test]
fn registered_memory_brings_back_what_was_written() {
    let folder = folder();
    let Some(file) = on(Rung::Ring, folder.path(), 8 << 20) else { return };
    let mut memory = Aligned::random(8 << 20, 3);
    let expected = memory.all()[..4 << 20].to_vec();
    // SAFETY: the memory outlives the file, which is dropped below.
    unsafe { file.register(memory.all().as_mut_ptr(), 8 << 20) };
    let (source, target) = memory.all().split_at_mut(4 << 20);
    file.write(0, source).expect("write");
    file.read(0, target).expect("read");
    assert!(target == expected);
    // Memory that is not registered still works.
    let mut other = Aligned::new(4 << 20);
    file.read(0, other.all()).expect("read");
    assert!(other.all() == expected);
    drop(file);
}

#[test]
fn reads_and_writes_run_beside_each_other() {
    let folder = folder();
    for rung in Rung::ALL {
        let Some(file) = on(rung, folder.path(), 8 << 20) else { continue };
        let half = 4 << 20;
        let mut first = Aligned::random(half, 1);
        let mut second = Aligned::random(half, 2);
        file.write(0, first.all()).expect("write");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..5 {
                    file.write(half as u64, second.all()).expect("write");
                }
            });
            let mut read = Aligned::new(half);
            for _ in 0..5 {
                file.read(0, read.all()).expect("read");
                assert!(read.all() == first.all(), "{rung:?}");
            }
        });
        let mut read = Aligned::new(half);
        file.read(half as u64, read.all()).expect("read");
        assert!(read.all() == second.all(), "{rung:?}");
    }
}

#[test]
fn changed_data_is_an_error_unless_checksums_are_off() {
    use std::os::unix::fs::FileExt;
    let folder = folder();
    for checksums in [true, false] {
        let options = BlockOptions { rung: Some(Rung::Buffered), checksums, ..BlockOptions::default() };
        let file = BlockFile::create(folder.path(), 1 << 16, &options).expect("buffered files work everywhere");
        let mut memory = Aligned::random(8192, 1);
        file.write(4096, memory.all()).expect("write");
        file.file.write_all_at(&[memory.all()[100] ^ 1], 4196).expect("corrupt");
        let result = file.read(4096, memory.all());
        if checksums {
            let error = result.expect_err("the corruption is found").to_string();
            assert!(error.contains("checksum") && error.contains("8192 bytes at offset 4096"), "{error}");
            // Written again, it is good again.
            file.write(4096, memory.all()).expect("write");
            file.read(4096, memory.all()).expect("read");
        } else {
            result.expect("nobody looks");
        }
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error() {
    let folder = folder();
    for rung in [Rung::Ring, Rung::Direct, Rung::Buffered] {
        let Some(file) = on(rung, folder.path(), 4 << 20) else { continue };
        file.file.set_len(1 << 20).expect("truncate");
        let mut memory = Aligned::new(4 << 20);
        let error = file.read(0, memory.all()).expect_err("the end is missing").to_string();
        assert!(error.contains("shorter"), "{rung:?}: {error}");
    }
}

#[test]
fn folders_that_cannot_be_written_are_errors_that_name_them() {
    let folder = folder();
    let missing = folder.path().join("missing");
    let error = BlockFile::create(&missing, 4096, &BlockOptions::default()).err().expect("no folder").to_string();
    assert!(error.contains("missing") && error.contains("must exist"), "{error}");
    // Nobody can create files there, not even root.
    let error =
        BlockFile::create(Path::new("/proc/self"), 4096, &BlockOptions::default()).err().expect("no disk").to_string();
    assert!(error.contains("/proc/self"), "{error}");
}

#[test]
fn a_full_disk_is_an_error_with_path_size_and_advice() {
    let folder = folder();
    let error = BlockFile::create(folder.path(), 1 << 60, &BlockOptions::default()).err().expect("no such disk");
    let Error::File { path, call, bytes, reason, .. } = error else { panic!("{error}") };
    assert!(path.starts_with(folder.path()));
    assert_eq!((call, bytes), ("fallocate", 1 << 60));
    assert!(reason.contains("bytes are free here") && reason.contains("smaller NVMe budget"), "{reason}");
}

/// The system's own refusal, in a child process whose files may not grow beyond 64 KiB.
#[test]
fn a_file_size_limit_is_an_error_with_advice() {
    const CHILD: &str = "CASTOR_TEST_FILE_LIMIT";
    if std::env::var_os(CHILD).is_none() {
        let name = "block_io::tests::a_file_size_limit_is_an_error_with_advice";
        let child = std::process::Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", name, "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .expect("start the child");
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
        return;
    }
    let limit = libc::rlimit { rlim_cur: 1 << 16, rlim_max: 1 << 16 };
    // SAFETY: sets a limit of this process (the child) from a valid structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    // SAFETY: ignoring a signal installs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let folder = folder();
    let error = BlockFile::create(folder.path(), 1 << 20, &BlockOptions::default()).err().expect("the limit holds");
    assert!(error.to_string().contains("ulimit -f"), "{error}");
    assert!(BlockFile::create(folder.path(), 1 << 16, &BlockOptions::default()).is_ok());
}
