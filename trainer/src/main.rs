//! The binary `castor`: parses the command line, hands over, and turns the outcome into an exit code.

use std::path::Path;
use std::process::ExitCode;

use castor_kernels::cuda;
use castor_trainer::cli::{self, Command};
use castor_trainer::data::{self, Tokenizer};
use castor_trainer::doctor::{self, Finding, Probes};
use castor_trainer::error::Result;
use castor_trainer::launcher::{self, Setup};
use castor_trainer::replan::request;
use castor_trainer::{checkpoint, measure, parity, plan, report, sample, train};

fn main() -> ExitCode {
    match run() {
        Ok(code) => ExitCode::from(code),
        Err(error) => ExitCode::from(error.say()),
    }
}

fn run() -> Result<u8> {
    match cli::parse(std::env::args_os())? {
        Command::Text(text) => print!("{text}"),
        Command::Run(arguments) => {
            let devices = || Ok(cuda::device_count()? as u32);
            return launcher::main(&arguments, &Setup::of_this_process(&devices)?);
        }
        Command::Train(settings) => {
            launcher::follow_launcher()?;
            train::main(&settings)?;
        }
        Command::Plan { settings, wanted } => plan::main(&settings, wanted)?,
        Command::Parity { settings, batch, expect, out, tolerance } => {
            launcher::follow_launcher()?;
            parity::main(&settings, &batch, expect.as_deref(), out.as_deref(), tolerance)?;
        }
        Command::DataPack { spec, tokenizer, out } => {
            let summary = data::pack(&spec, &Tokenizer::open(&tokenizer)?, &out)?;
            for notice in &summary.notices {
                eprintln!("castor: {notice}");
            }
            let counted = match summary.tokens == summary.counted {
                true => String::new(),
                false => format!(" ({} count in the loss)", summary.counted),
            };
            println!("{} tokens{counted} of {} documents in {}", summary.tokens, summary.documents, out.display());
        }
        Command::Sample { settings, request } => sample::main(&settings, &request)?,
        Command::Report(run_dir) => report::main(&run_dir)?,
        Command::Replan { run_dir, request: asked } => request::main(&run_dir, &asked)?,
        Command::Doctor { bench, settings } => {
            survey(settings.memory.nvme.as_deref().unwrap_or(Path::new(".")));
            if bench {
                println!();
                measure::main(&settings)?;
            }
        }
        Command::Export { checkpoint: from, out, dtype } => {
            for notice in checkpoint::export(&from, &out, dtype)? {
                eprintln!("castor: {notice}");
            }
        }
    }
    Ok(0)
}

/// Prints what was found. `folder`: where chunks would be offloaded to.
fn survey(folder: &Path) {
    let cuda = || {
        let finding = |found: cuda::Found| match found.state {
            Ok(usable) => Finding::found(found.library, format!("{} at {}", usable.version, usable.path.display())),
            Err(reason) => Finding::missing(found.library, reason, found.purpose),
        };
        cuda::survey().into_iter().map(finding).collect()
    };
    let findings = doctor::survey(folder, &Probes { cuda: &cuda, block_io: &doctor::block_io });
    print!("{}", doctor::render(&findings));
}
