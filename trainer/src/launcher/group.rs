//! A group of processes that lives and dies together.
//!
//! Starts the members, waits, and at the first failure stops all others: TERM, then KILL after the grace.
//! It knows nothing of ranks, hosts or ssh beyond a label, and whether a member is a process (which gets
//! signals) or another launcher behind ssh (which gets the same as words on its standard input).
//!
//! Every member leads a process group of its own, so that what it started ends with it. A member that has
//! ended is first seen without being reaped, its group is killed, and only then is it reaped: its number
//! cannot have been taken by a stranger in between.

use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

use super::output::{Console, Route, Tail, carry, say};
use super::signals::{Event, Events, KILL, STOP, signal_name, signal_word};
use crate::error::{Error, Result};

/// A launcher behind ssh is itself given the grace; this much more for the way there and back.
const REMOTE_MARGIN: Duration = Duration::from_millis(500);
/// Longest sleep without an event; a lost SIGCHLD costs no more than this.
const POLL: Duration = Duration::from_millis(200);
/// How long to wait for the last output of a member that has ended.
const DRAIN: Duration = Duration::from_secs(1);

/// What a member's output looks like on the launcher's console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Show {
    /// The member writes to the launcher's own streams.
    Inherit,
    /// Every line, behind this prefix.
    Lines(String),
    /// Not at all.
    Nothing,
}

/// A member to start.
pub(super) struct Member {
    /// "rank 1 on host a" or "host b".
    pub label: String,
    /// What to run. Standard streams are set by the group.
    pub command: Command,
    /// Whether it is a launcher behind ssh.
    pub remote: bool,
    /// Console form of its output.
    pub show: Show,
    /// Files for its standard output and error, and where they lie.
    pub files: Option<(std::fs::File, std::fs::File, String)>,
}

/// How the group ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Every member ended with 0.
    Done,
    /// A member failed with this exit code (128 + signal if it was killed).
    Failed(u8),
    /// Ended by a signal that was passed on.
    Interrupted(i32),
    /// The supervising launcher asked for it or is gone.
    Stopped,
}

struct Running {
    label: String,
    remote: bool,
    child: Child,
    pid: Pid,
    carriers: Vec<JoinHandle<()>>,
    tail: Option<Arc<Tail>>,
    log: Option<String>,
    status: Option<ExitStatus>,
}

impl Running {
    fn start(mut member: Member) -> Result<Running> {
        let command = &mut member.command;
        command.process_group(0);
        command.stdin(if member.remote { Stdio::piped() } else { Stdio::null() });
        let piped = member.show != Show::Inherit || member.files.is_some();
        let stream = || {
            if piped { Stdio::piped() } else { Stdio::inherit() }
        };
        command.stdout(stream()).stderr(stream());
        let mut child = command.spawn().map_err(|error| {
            Error::Failed(format!("{}: {} cannot be started: {error}", member.label, command.get_program().display()))
        })?;
        // A launcher behind ssh reports its own ranks' last lines; here they have just been passed through.
        let tail = (piped && !member.remote).then(Arc::<Tail>::default);
        let (mut out_file, mut err_file, mut log) = (None, None, None);
        if let Some((out, err, place)) = member.files {
            (out_file, err_file, log) = (Some(out), Some(err), Some(place));
        }
        let console = |console| match &member.show {
            Show::Lines(prefix) => Some((console, prefix.clone())),
            Show::Inherit => Some((console, String::new())),
            Show::Nothing => None,
        };
        let mut carriers = Vec::new();
        if let Some(stream) = child.stdout.take() {
            let (console, file) = (console(Console::Stdout), out_file.take());
            carriers.push(carry(stream, Route { console, file, tail: None }));
        }
        if let Some(stream) = child.stderr.take() {
            let (console, file) = (console(Console::Stderr), err_file.take());
            carriers.push(carry(stream, Route { console, file, tail: tail.clone() }));
        }
        Ok(Running {
            label: member.label,
            remote: member.remote,
            pid: Pid::from_child(&child),
            child,
            carriers,
            tail,
            log,
            status: None,
        })
    }

    /// Whether it has just ended. Kills what is left of its process group before reaping it.
    fn has_just_ended(&mut self) -> bool {
        if self.status.is_some() {
            return false;
        }
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if !matches!(rustix::process::waitid(WaitId::Pid(self.pid), look), Ok(Some(_))) {
            return false;
        }
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        self.status = self.child.wait().ok();
        self.drain();
        self.status.is_some()
    }

    /// Lets the carriers finish; a stranger that holds the pipe open must not hold up the launcher.
    fn drain(&mut self) {
        let deadline = Instant::now() + DRAIN;
        for carrier in self.carriers.drain(..) {
            while !carrier.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn tell(&mut self, word: &str) {
        if let Some(stdin) = &mut self.child.stdin {
            let _ = stdin.write_all(format!("{word}\n").as_bytes());
        }
    }

    fn pass_on(&mut self, signal: i32) {
        if self.remote {
            self.tell(&signal_word(signal));
        } else if let Some(signal) = Signal::from_named_raw(signal)
            && self.status.is_none()
        {
            let _ = rustix::process::kill_process_group(self.pid, signal);
        }
    }

    fn stop(&mut self) {
        if self.remote {
            self.tell(STOP);
        } else {
            self.pass_on(Signal::TERM.as_raw());
            // One that was stopped (SIGSTOP) hears nothing until it goes on.
            self.pass_on(Signal::CONT.as_raw());
        }
    }

    fn kill(&mut self) {
        if self.status.is_none() {
            // Words first: the launcher over there kills its ranks even if ssh is gone by then.
            self.tell(KILL);
            self.child.stdin = None;
            if !self.remote {
                let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
            }
        }
    }

    fn cut(&mut self) {
        if self.status.is_none() {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }
}

/// Exit code of an ended member; 128 + signal if a signal ended it.
fn code_of(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => 1,
    }
}

/// The signal on whose request a member ended in order, if so: `castor train` ends with 128 + signal then.
fn interruption(status: ExitStatus, passed_on: Option<i32>) -> Option<i32> {
    let by_request = [Signal::HUP, Signal::INT, Signal::TERM, Signal::USR1].map(Signal::as_raw);
    match (status.code(), status.signal()) {
        (Some(code), _) => by_request.into_iter().find(|signal| 128 + signal == code),
        (None, signal) => signal.filter(|_| signal == passed_on),
    }
}

/// Why the group is being stopped.
#[derive(Clone, Copy)]
struct Stopping {
    kill_at: Instant,
    kills: u32,
}

/// Starts the members and watches over them until all have ended.
///
/// `grace` lies between TERM and KILL after a failure. After an interruption the others have `patience` from
/// the moment when the first member ended, because they may be writing a checkpoint.
///
/// # Errors
/// If a member cannot be started; those already started are stopped.
pub(super) fn run(members: Vec<Member>, events: &Events, grace: Duration, patience: Duration) -> Result<Outcome> {
    let mut group: Vec<Running> = Vec::with_capacity(members.len());
    for member in members {
        match Running::start(member) {
            Ok(running) => group.push(running),
            Err(error) => {
                watch(&mut group, events, grace, patience, Some(Outcome::Failed(1)));
                return Err(error);
            }
        }
    }
    Ok(watch(&mut group, events, grace, patience, None))
}

fn watch(
    group: &mut [Running],
    events: &Events,
    grace: Duration,
    patience: Duration,
    decided: Option<Outcome>,
) -> Outcome {
    let mut outcome = decided;
    let mut stopping: Option<Stopping> = None;
    let mut signal: Option<i32> = None;
    let mut overdue = false;
    let after = |wait: Duration| Some(Stopping { kill_at: Instant::now() + wait, kills: 0 });
    if outcome.is_some() {
        group.iter_mut().for_each(Running::stop);
        stopping = after(grace);
    }
    loop {
        let mut failed: Vec<(usize, ExitStatus)> = group
            .iter_mut()
            .enumerate()
            .filter_map(|(index, member)| {
                let ended = member.has_just_ended();
                Some((index, member.status.filter(|_| ended)?))
            })
            .filter(|(_, status)| !status.success())
            .collect();
        // Of several that ended together, one killed by a signal is the cause and the others its victims.
        failed.sort_by_key(|(_, status)| status.signal().is_none());
        for (index, status) in failed {
            // What ends after it was killed is no failure of its own.
            if outcome.is_some() || stopping.is_some_and(|state| state.kills > 0) {
                break;
            }
            if let Some(by) = interruption(status, signal) {
                if signal.is_none() {
                    say(&format!(
                        "{} ended on signal {}; asking the others to end",
                        group[index].label,
                        signal_name(by)
                    ));
                    group.iter_mut().for_each(Running::stop);
                }
                signal = signal.or(Some(by));
                stopping = stopping.or(after(patience));
            } else {
                report(&group[index], status);
                outcome = Some(Outcome::Failed(code_of(status)));
                group.iter_mut().for_each(Running::stop);
                stopping = after(grace);
            }
        }
        let alive = group.iter().filter(|member| member.status.is_none()).count();
        if alive == 0 {
            if overdue {
                say("some ranks did not end on TERM and were killed");
            }
            return match (outcome, signal) {
                (Some(outcome), _) => outcome,
                (None, Some(signal)) => Outcome::Interrupted(signal),
                (None, None) => Outcome::Done,
            };
        }
        let mut wait = POLL;
        if let Some(state) = &mut stopping {
            if Instant::now() >= state.kill_at {
                if state.kills == 0 {
                    overdue = true;
                    group.iter_mut().for_each(Running::kill);
                } else {
                    group.iter_mut().for_each(Running::cut);
                }
                state.kills += 1;
                state.kill_at = Instant::now() + REMOTE_MARGIN;
            }
            wait = wait.min(state.kill_at.saturating_duration_since(Instant::now()));
        }
        match events.next(wait) {
            None | Some(Event::Child) => {}
            Some(Event::Signal(number)) => {
                let ends = number != Signal::USR1.as_raw();
                if ends && (signal.is_some() || outcome.is_some()) {
                    say(&format!("signal {} again: killing the ranks", signal_name(number)));
                    group.iter_mut().for_each(Running::kill);
                    stopping = Some(Stopping { kill_at: Instant::now() + REMOTE_MARGIN, kills: 1 });
                } else {
                    group.iter_mut().for_each(|member| member.pass_on(number));
                }
                if ends {
                    signal = signal.or(Some(number));
                }
            }
            Some(Event::Stop | Event::Orphaned) => {
                outcome = outcome.or(Some(Outcome::Stopped));
                group.iter_mut().for_each(Running::stop);
                if stopping.is_none_or(|state| state.kills == 0) {
                    stopping = after(grace);
                }
            }
            Some(Event::Kill) => {
                outcome = outcome.or(Some(Outcome::Stopped));
                group.iter_mut().for_each(Running::kill);
                stopping = Some(Stopping { kill_at: Instant::now() + REMOTE_MARGIN, kills: 1 });
            }
        }
    }
}

/// Says who failed first, how, and what it said last.
fn report(member: &Running, status: ExitStatus) {
    let how = match (status.signal(), status.code()) {
        (Some(9), _) => "was killed by signal 9 (KILL), often by the system because host memory ran out".to_owned(),
        (Some(signal), _) => format!("was ended by signal {}", signal_name(signal)),
        (None, Some(255)) if member.remote => "cannot be reached any more: ssh ended with 255".to_owned(),
        (None, Some(code)) => format!("failed with exit code {code}"),
        (None, None) => "ended for an unknown reason".to_owned(),
    };
    let place = member.log.as_ref().map(|log| format!("; its output is in {log}"));
    say(&format!("{} {how}{}", member.label, place.unwrap_or_default()));
    let lines = member.tail.as_ref().map(|tail| tail.lines()).unwrap_or_default();
    if !lines.is_empty() {
        say("the last it wrote on standard error:");
        for line in lines {
            let _ = writeln!(std::io::stderr().lock(), "  | {line}");
        }
    }
}
