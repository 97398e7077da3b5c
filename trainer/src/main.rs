//! The binary `castor`: parses the command line, hands over, and turns the outcome into an exit code.

use std::io::Write;
use std::process::ExitCode;

use castor_trainer::cli::{self, Command};
use castor_trainer::data::{self, Tokenizer};
use castor_trainer::error::{Error, Result};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("castor: error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run() -> Result<()> {
    match cli::parse(std::env::args_os())? {
        Command::Text(text) => say(&text),
        Command::DataPack { spec, tokenizer, out } => {
            let summary = data::pack(&spec, &Tokenizer::open(&tokenizer)?, &out)?;
            for notice in &summary.notices {
                eprintln!("castor: {notice}");
            }
            say(&format!("{} tokens of {} documents in {}\n", summary.tokens, summary.documents, out.display()));
        }
        _ => {
            return Err(Error::Failed("this build has only `data pack` and --print_config".into()));
        }
    }
    Ok(())
}

/// Prints to a reader who may have gone (`castor --help | head -1`), which is no failure.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
