//! The trainer's error: what ends a run, and with which exit code.

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What ends a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line, a configuration or an input is wrong (exit 2).
    #[error("{0}")]
    Usage(String),
    /// The plan does not fit the budgets (exit 3).
    #[error("{0}")]
    DoesNotFit(String),
    /// The run failed (exit 1).
    #[error("{0}")]
    Failed(String),
    /// The run was interrupted by this signal (exit 128 + signal).
    #[error("interrupted by signal {0}")]
    Interrupted(i32),
    /// The hardware layer refused.
    #[error(transparent)]
    Kernels(#[from] castor_kernels::Error),
}

/// A number of things as it is said: "1 rank", "2 ranks". `things` is the plural of a noun that only takes an s.
pub(crate) fn counted(count: u64, things: &str) -> String {
    let one = things.strip_suffix('s').filter(|_| count == 1);
    format!("{count} {}", one.unwrap_or(things))
}

impl Error {
    /// Exit code of `castor`.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::DoesNotFit(_) => 3,
            Error::Failed(_) | Error::Kernels(_) => 1,
            Error::Interrupted(signal) => 128 + *signal as u8,
        }
    }

    /// Says on standard error what ended `castor`. Returns the exit code.
    pub fn say(&self) -> u8 {
        eprintln!("castor: error: {self}");
        self.exit_code()
    }
}

impl From<castor_runtime::error::Error> for Error {
    fn from(error: castor_runtime::error::Error) -> Self {
        match error {
            castor_runtime::error::Error::Kernels(error) => Error::Kernels(error),
            short => Error::DoesNotFit(short.to_string()),
        }
    }
}
