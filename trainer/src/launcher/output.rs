//! What ranks print: passed through, prefixed, written to files, and its end kept for the failure report.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// Lines of standard error kept for the failure report.
const TAIL_LINES: usize = 20;
/// A line longer than this is passed on in pieces, so that a rank that prints no newline costs no memory.
const LINE_BYTES: u64 = 64 << 10;

/// Says something in the launcher's own name. A closed terminal is no reason to fail.
pub(super) fn say(sentence: &str) {
    let _ = writeln!(std::io::stderr().lock(), "castor run: {sentence}");
}

/// One of the launcher's own two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Console {
    Stdout,
    Stderr,
}

impl Console {
    /// Writes a whole line under the stream's lock, so that lines of several ranks never mix.
    fn line(self, prefix: &str, line: &[u8]) {
        let mut whole = Vec::with_capacity(prefix.len() + line.len() + 1);
        whole.extend_from_slice(prefix.as_bytes());
        whole.extend_from_slice(line);
        if !line.ends_with(b"\n") {
            whole.push(b'\n');
        }
        // Nobody may be reading any more; the pipes are drained all the same, so that ranks never block.
        let _ = match self {
            Console::Stdout => std::io::stdout().lock().write_all(&whole),
            Console::Stderr => std::io::stderr().lock().write_all(&whole),
        };
    }
}

/// The last lines of a stream.
#[derive(Default)]
pub(super) struct Tail(Mutex<VecDeque<String>>);

impl Tail {
    fn push(&self, line: &[u8]) {
        let mut lines = self.0.lock();
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.0.lock().iter().cloned().collect()
    }
}

/// Where a rank's stream goes.
pub(super) struct Route {
    /// Onto the console, behind this prefix.
    pub console: Option<(Console, String)>,
    /// Into a file.
    pub file: Option<File>,
    /// Into the failure report.
    pub tail: Option<Arc<Tail>>,
}

/// Starts a thread that carries a stream to where it goes, until its end.
pub(super) fn carry(stream: impl Read + Send + 'static, mut route: Route) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            if let Some(file) = &mut route.file
                && let Err(error) = file.write_all(&line)
            {
                say(&format!("a rank's log file cannot be written ({error}); its output is lost from here on"));
                route.file = None;
            }
            if let Some((console, prefix)) = &route.console {
                console.line(prefix, &line);
            }
            if let Some(tail) = &route.tail {
                tail.push(&line);
            }
        }
    })
}

/// Creates a log file and the folders above it.
pub(super) fn log_file(path: &Path) -> Result<File> {
    let create = || {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        File::create(path)
    };
    create().map_err(|error| Error::Usage(format!("--log_dir: {}: {error}", path.display())))
}
