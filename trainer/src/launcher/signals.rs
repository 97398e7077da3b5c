//! Signals, and the line protocol by which one launcher supervises another over ssh.

use std::io::BufRead;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};

use crate::error::{Error, Result};

/// What wakes the watcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A child may have ended.
    Child,
    /// Pass this signal on to the ranks.
    Signal(i32),
    /// Another host failed: stop in order.
    Stop,
    /// Stop at once.
    Kill,
    /// The supervising launcher is gone.
    Orphaned,
}

/// Words of the protocol, one a line, launcher to launcher.
pub(super) const STOP: &str = "stop";
pub(super) const KILL: &str = "kill";

pub(super) fn signal_word(signal: i32) -> String {
    format!("signal {signal}")
}

fn event_of(line: &str) -> Option<Event> {
    match line.trim() {
        STOP => Some(Event::Stop),
        KILL => Some(Event::Kill),
        other => other
            .strip_prefix("signal ")?
            .parse()
            .ok()
            .filter(|number| Signal::from_named_raw(*number).is_some())
            .map(Event::Signal),
    }
}

/// The source of events. Signals are caught while it lives.
pub(super) struct Events {
    receiver: Receiver<Event>,
    handle: Handle,
}

impl Events {
    /// Catches signals and, if `supervised`, listens on standard input.
    pub(super) fn listen(supervised: bool) -> Result<Events> {
        let mut signals = Signals::new(ending().chain([SIGCHLD]))
            .map_err(|error| Error::Failed(format!("signals cannot be caught: {error}")))?;
        let handle = signals.handle();
        let (sender, receiver) = channel();
        if supervised {
            listen_to_supervisor(sender.clone());
        }
        std::thread::spawn(move || {
            for signal in signals.forever() {
                let event = match signal {
                    SIGCHLD => Event::Child,
                    other => Event::Signal(other),
                };
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        Ok(Events { receiver, handle })
    }

    /// The next event, or none after `wait`.
    pub(super) fn next(&self, wait: std::time::Duration) -> Option<Event> {
        self.receiver.recv_timeout(wait).ok()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.handle.close();
    }
}

fn listen_to_supervisor(sender: Sender<Event>) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            if let Some(event) = event_of(&line)
                && sender.send(event).is_err()
            {
                return;
            }
        }
        let _ = sender.send(Event::Orphaned);
    });
}

/// The signals that ask a run to end, for the launcher and for ranks alike. What this process was started with ignored
/// stays so: HUP under `nohup`, INT behind a script's `&`. TERM is always heard.
pub(crate) fn ending() -> impl Iterator<Item = i32> {
    [SIGTERM, SIGINT, SIGHUP, SIGUSR1].into_iter().filter(|signal| *signal == SIGTERM || !is_ignored(*signal))
}

/// Whether this process was started with a signal ignored.
fn is_ignored(signal: i32) -> bool {
    let mask = std::fs::read_to_string("/proc/self/status").ok().and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
        u64::from_str_radix(line.trim(), 16).ok()
    });
    // Bit n−1 is signal n.
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Short name of a signal, "9 (KILL)".
pub(super) fn signal_name(signal: i32) -> String {
    let name = match Signal::from_named_raw(signal) {
        Some(Signal::HUP) => "HUP",
        Some(Signal::INT) => "INT",
        Some(Signal::QUIT) => "QUIT",
        Some(Signal::ILL) => "ILL",
        Some(Signal::ABORT) => "ABRT",
        Some(Signal::BUS) => "BUS",
        Some(Signal::FPE) => "FPE",
        Some(Signal::KILL) => "KILL",
        Some(Signal::USR1) => "USR1",
        Some(Signal::SEGV) => "SEGV",
        Some(Signal::PIPE) => "PIPE",
        Some(Signal::TERM) => "TERM",
        _ => return signal.to_string(),
    };
    format!("{signal} ({name})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_protocol_reads_what_it_writes_and_ignores_the_rest() {
        assert_eq!(event_of(&signal_word(SIGUSR1)), Some(Event::Signal(SIGUSR1)));
        assert_eq!(event_of(STOP), Some(Event::Stop));
        assert_eq!(event_of("kill\r"), Some(Event::Kill));
        for noise in ["", "signal", "signal 0", "signal 999", "Welcome!"] {
            assert_eq!(event_of(noise), None, "{noise}");
        }
    }
}
