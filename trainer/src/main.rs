//! The binary `castor`: parses the command line, hands over, and turns the outcome into an exit code.

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
        Command::Text(text) => print!("{text}"),
        Command::DataPack { spec, tokenizer, out } => {
            let summary = data::pack(&spec, &Tokenizer::open(&tokenizer)?, &out)?;
            for notice in &summary.notices {
                eprintln!("castor: {notice}");
            }
            println!("{} tokens of {} documents in {}", summary.tokens, summary.documents, out.display());
        }
        other => return Err(Error::Failed(format!("this build has no {other:?}"))),
    }
    Ok(())
}
