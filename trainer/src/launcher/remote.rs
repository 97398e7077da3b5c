//! Other hosts, through the system's `ssh` and its own configuration.
//!
//! On each host runs another `castor run`, supervised over its standard input: it has the processes as its
//! children, so it can end them whatever becomes of the connection.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// First word of the line that a pre-flight prints.
const PREFLIGHT_WORD: &str = "castor-host";
/// Longest wait for a connection; ssh is also bound by `--timeout`.
const CONNECT: Duration = Duration::from_secs(10);

/// How other hosts are reached.
#[derive(Clone, Debug)]
pub(super) struct Ssh<'a> {
    /// The program `ssh`.
    pub program: &'a OsStr,
    /// `--ssh_port`
    pub port: Option<u16>,
    /// The program `castor` over there.
    pub castor: &'a Path,
    /// Folder to work in over there: the same as here.
    pub folder: &'a Path,
    /// `--timeout`
    pub timeout: Duration,
}

/// What a pre-flight found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Preflight {
    /// Number of CUDA devices.
    pub devices: u32,
    /// The port asked for, or a free one if that was 0.
    pub port: u16,
}

impl Preflight {
    /// The line to print on the host itself.
    pub(super) fn line(&self) -> String {
        let version = env!("CARGO_PKG_VERSION");
        format!("{PREFLIGHT_WORD} version={version} devices={} port={}", self.devices, self.port)
    }

    /// Finds the line in what the host printed; its shell may have printed a greeting before.
    fn read(output: &str) -> std::result::Result<Preflight, String> {
        let line = output
            .lines()
            .find_map(|line| line.trim().strip_prefix(PREFLIGHT_WORD))
            .ok_or("it does not answer as castor does")?;
        let field = |name: &str| {
            line.split_whitespace()
                .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
                .ok_or(format!("its answer lacks {name}"))
        };
        let (here, there) = (env!("CARGO_PKG_VERSION"), field("version")?);
        if here != there {
            return Err(format!("castor is version {there} there and {here} here"));
        }
        let bad = |_| "its answer is not readable".to_owned();
        Ok(Preflight { devices: field("devices")?.parse().map_err(bad)?, port: field("port")?.parse().map_err(bad)? })
    }
}

/// Quotes one word for a POSIX shell: everything between single quotes stands for itself.
fn quoted(word: &OsStr) -> Vec<u8> {
    let mut text = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => text.extend_from_slice(b"'\\''"),
            other => text.push(other),
        }
    }
    text.push(b'\'');
    text
}

impl Ssh<'_> {
    /// The command that runs `castor run …` on a host.
    pub(super) fn command(&self, host: &str, arguments: &[OsString]) -> Command {
        let mut line = b"cd ".to_vec();
        line.extend(quoted(self.folder.as_os_str()));
        line.extend_from_slice(b" && exec ");
        line.extend(quoted(self.castor.as_os_str()));
        line.extend_from_slice(b" 'run'");
        for argument in arguments {
            line.push(b' ');
            line.extend(quoted(argument));
        }
        let connect = CONNECT.min(self.timeout).as_secs();
        let mut command = Command::new(self.program);
        // BatchMode: a password prompt would wait for ever behind the ranks' output.
        command.args(["-T", "-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={connect}")]);
        // A host that loses power sends nothing: ask it every 5 s, give up after 3 silent answers.
        command.args(["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]);
        if let Some(port) = self.port {
            command.args(["-p", &port.to_string()]);
        }
        command.arg("--").arg(host.trim_matches(['[', ']'])).arg(OsString::from_vec(line));
        command
    }

    /// Asks every host, all at once, what it has. Each answer in the order of `hosts`; `ports` is what to try
    /// on each host, if anything.
    ///
    /// # Errors
    /// [`Error::Failed`] with one line per host that cannot take part.
    pub(super) fn preflight(&self, hosts: &[(&str, Option<u16>)]) -> Result<Vec<Preflight>> {
        let answers: Vec<std::result::Result<Preflight, String>> = std::thread::scope(|scope| {
            let asked: Vec<_> = hosts.iter().map(|(host, port)| scope.spawn(move || self.ask(host, *port))).collect();
            asked
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err("the check itself failed".into())))
                .collect()
        });
        let failures: Vec<String> = hosts
            .iter()
            .zip(&answers)
            .filter_map(|((host, _), answer)| Some(format!("host {host}: {}", answer.as_ref().err()?)))
            .collect();
        if failures.is_empty() {
            Ok(answers.into_iter().filter_map(|answer| answer.ok()).collect())
        } else {
            Err(Error::Failed(format!("nothing was started; {}", failures.join("\n  "))))
        }
    }

    fn ask(&self, host: &str, port: Option<u16>) -> std::result::Result<Preflight, String> {
        let mut arguments: Vec<OsString> = vec!["--preflight".into()];
        if let Some(port) = port {
            arguments.extend(["--master_port".into(), port.to_string().into()]);
        }
        let mut command = self.command(host, &arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().map_err(|error| format!("{} cannot be started here: {error}", self.program.display()))?;
        // The answer is one line, far below what a pipe holds: waiting before reading cannot block it.
        let deadline = Instant::now() + self.timeout.min(CONNECT * 3);
        loop {
            match child.try_wait() {
                Ok(Some(_)) => break,
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                Ok(None) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("no answer within {} s", self.timeout.min(CONNECT * 3).as_secs()));
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim().lines().last().unwrap_or("nothing was said about why").to_owned();
        match output.status.code() {
            Some(0) => Preflight::read(&String::from_utf8_lossy(&output.stdout)),
            Some(255) => Err(format!("ssh cannot reach it: {said}")),
            Some(126 | 127) => Err(format!(
                "{} does not run there ({said}); install it at that path or name it with --remote_castor",
                self.castor.display()
            )),
            _ => Err(said),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        let words = ["plain", "two words", "it's", "$HOME `id` \"x\" \\", "a=b;c|d&e>f", "", "gr\u{fc}n\n2", "*"];
        let mut line = b"printf '<%s>'".to_vec();
        for word in words {
            line.push(b' ');
            line.extend(quoted(OsStr::new(word)));
        }
        let output = Command::new("/bin/sh").arg("-c").arg(OsString::from_vec(line)).output().unwrap();
        let expected: String = words.iter().map(|word| format!("<{word}>")).collect();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }

    #[test]
    fn preflight_lines() {
        let found = Preflight { devices: 8, port: 29500 };
        assert_eq!(Preflight::read(&format!("Welcome!\n{}\n", found.line())), Ok(found.clone()));
        let other = found.line().replace(env!("CARGO_PKG_VERSION"), "9.9.9");
        assert!(Preflight::read(&other).unwrap_err().contains("9.9.9"));
        assert!(Preflight::read("hello").is_err());
    }
}
