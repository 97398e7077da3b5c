//! Other budgets for a run that goes on: what `castor replan` leaves in its folder, and what the run makes of it.
//!
//! The file appears whole, rank 0 looks for it between two steps and takes it away: each is answered once. Who asks and
//! who trains share nothing but the folder.

use crate::error::{Error, Result};
use crate::report::{log, write_whole};
use crate::settings::Budget;
use castor_kernels::Tier;
use castor_runtime::Bytes;
use castor_runtime::plan::Budgets;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Name of the file in the run's folder.
pub const FILE: &str = "replan.json";

/// The budgets that are to be others, as they were typed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// `--device_memory`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_memory: Option<String>,
    /// `--host_memory`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory: Option<String>,
    /// `--nvme_capacity`
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvme_capacity: Option<String>,
}

/// `castor replan RUN_DIR`: asks the run that goes on in a folder for other budgets.
///
/// # Errors
/// [`Error::Usage`] if no run goes on there, or nothing is asked; [`Error::Failed`] if the file cannot be written.
pub fn main(run_dir: &Path, request: &Request) -> Result<()> {
    if *request == Request::default() {
        return Err(Error::Usage(
            "nothing is asked for; give --device_memory, --host_memory or --nvme_capacity with the new budget".into(),
        ));
    }
    if let Some(reason) = log::goes_on(run_dir)? {
        return Err(Error::Usage(format!("{}: {reason}", run_dir.display())));
    }
    request.leave(run_dir)?;
    println!("Asked: the run answers after the step that it is in, in its own output");
    Ok(())
}

impl Request {
    /// Leaves it in a run's folder. What one that waits there asks for besides is asked for again.
    ///
    /// # Errors
    /// [`Error::Failed`] with path and reason.
    pub fn leave(&self, run_dir: &Path) -> Result<()> {
        let path = place(run_dir);
        let waiting = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Request>(&bytes).ok());
        let waiting = waiting.unwrap_or_default();
        let request = Request {
            device_memory: self.device_memory.clone().or(waiting.device_memory),
            host_memory: self.host_memory.clone().or(waiting.host_memory),
            nvme_capacity: self.nvme_capacity.clone().or(waiting.nvme_capacity),
        };
        let bytes =
            serde_json::to_vec(&request).map_err(|error| Error::Failed(format!("{}: {error}", path.display())))?;
        write_whole(&path, &bytes)
    }

    /// Whether one waits in a run's folder.
    pub fn waits(run_dir: &Path) -> bool {
        place(run_dir).exists()
    }

    /// Takes what waits in a run's folder, if anything.
    ///
    /// # Errors
    /// [`Error::Usage`] if it is no request; [`Error::Failed`] if it cannot be read or removed.
    pub fn take(run_dir: &Path) -> Result<Option<Request>> {
        let path = place(run_dir);
        let failed = |error: std::io::Error| Error::Failed(format!("{}: {error}", path.display()));
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(failed)?,
        };
        std::fs::remove_file(&path).map_err(failed)?;
        serde_json::from_slice(&bytes).map(Some).map_err(|error| {
            let advice = "`castor replan` writes what a run understands";
            Error::Usage(format!("{}: {error}; {advice}", path.display()))
        })
    }

    /// The budgets that it asks for, in place of the `present` ones, of a rank that could have had `room` when the run
    /// began.
    ///
    /// # Errors
    /// [`Error::Usage`] if a value is no budget, or more than the rank could have.
    pub fn budgets(&self, present: &Budgets, room: &Budgets) -> Result<Budgets> {
        let bytes = |flag: &str, text: &Option<String>, tier: Tier| {
            let (now, most) = (present.of(tier), room.of(tier).max(present.of(tier)));
            let Some(text) = text else { return Ok(now) };
            let refused = |reason: String| Err(Error::Usage(format!("--{flag} {text}: {reason}")));
            if tier == Tier::Nvme && present.nvme_folder.is_none() {
                return refused("the run has no disk tier; --nvme gives it one when it starts".into());
            }
            match Budget::parse(text).map(|budget| budget.bytes(most)) {
                None => refused("auto, a size such as 80GiB, or a share such as 50% was expected".into()),
                Some(bytes) if bytes > most => refused(format!("a rank of this run has at most {}", Bytes(most))),
                Some(bytes) => Ok(bytes),
            }
        };
        Ok(Budgets {
            device: bytes("device_memory", &self.device_memory, Tier::Device)?,
            host: bytes("host_memory", &self.host_memory, Tier::Host)?,
            nvme: bytes("nvme_capacity", &self.nvme_capacity, Tier::Nvme)?,
            nvme_folder: present.nvme_folder.clone(),
        })
    }
}

impl std::fmt::Display for Request {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let asked = [
            ("device_memory", &self.device_memory),
            ("host_memory", &self.host_memory),
            ("nvme_capacity", &self.nvme_capacity),
        ];
        let asked = asked.into_iter().filter_map(|(flag, text)| Some(format!("--{flag} {}", text.as_ref()?)));
        f.write_str(&asked.collect::<Vec<_>>().join(" "))
    }
}

fn place(run_dir: &Path) -> PathBuf {
    run_dir.join(FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asks(device: Option<&str>, nvme: Option<&str>) -> Request {
        let text = |text: Option<&str>| text.map(str::to_owned);
        Request { device_memory: text(device), nvme_capacity: text(nvme), ..Request::default() }
    }

    #[test]
    fn a_request_is_taken_once_and_what_is_none_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Request::take(folder.path()).unwrap(), None);
        let request = asks(Some("8MiB"), None);
        asks(Some("9MiB"), Some("1GiB")).leave(folder.path()).unwrap();
        request.leave(folder.path()).unwrap();
        assert!(Request::waits(folder.path()));
        assert_eq!(
            Request::take(folder.path()).unwrap(),
            Some(asks(Some("8MiB"), Some("1GiB"))),
            "the later, and both"
        );
        assert_eq!(Request::take(folder.path()).unwrap(), None);
        for broken in ["{", "8", r#"{"device": "8MiB"}"#] {
            std::fs::write(folder.path().join(FILE), broken).unwrap();
            let said = Request::take(folder.path()).unwrap_err().to_string();
            assert!(said.contains(FILE) && said.contains("castor replan"), "{said}");
            assert!(!Request::waits(folder.path()), "nobody is asked twice");
        }
    }

    #[test]
    fn budgets_are_of_what_the_rank_could_have() {
        let present = Budgets { device: 100, host: 50, ..Budgets::default() };
        let room = Budgets { device: 200, host: 40, ..Budgets::default() };
        let of = |request: Request| request.budgets(&present, &room);
        assert_eq!(of(asks(Some("50%"), None)).unwrap(), Budgets { device: 100, ..present.clone() });
        assert_eq!(of(asks(Some("auto"), None)).unwrap().device, 200);
        assert_eq!(of(asks(Some("17"), None)).unwrap(), Budgets { device: 17, ..present.clone() });
        for (request, reason) in [
            (asks(Some("201"), None), "--device_memory 201: a rank of this run has at most 200"),
            (asks(Some("much"), None), "--device_memory much: auto, a size"),
            (asks(None, Some("1GiB")), "--nvme_capacity 1GiB: the run has no disk tier"),
        ] {
            let said = of(request).unwrap_err().to_string();
            assert!(said.starts_with(reason), "{said}");
        }
        // What the run was given is not too much, whatever the machine says.
        let host = Request { host_memory: Some("50".into()), ..Request::default() };
        assert_eq!(of(host.clone()).unwrap(), present);
        assert_eq!(host.to_string(), "--host_memory 50");
    }
}
