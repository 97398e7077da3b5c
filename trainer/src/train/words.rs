//! What a session says and writes before its first step and after its last.

use super::{Leg, Run};
use crate::account;
use crate::engine::StepResult;
use crate::error::{Error, Result};
use crate::optimizer::Clip;
use crate::replan::request::Request;
use crate::report::log::{self, RunLog};
use crate::report::metrics::{self, Header, TrainMetrics};
use crate::report::progress::{self, Progress};
use crate::report::{self, PAGE, html};
use crate::settings::Resume;
use castor_kernels::Tier;
use castor_runtime::plan::Budgets;
use serde_json::json;
use std::collections::BTreeMap;

impl Run<'_> {
    /// What is said before the first step.
    pub(super) fn introduce(&mut self, leg: &mut Leg, notices: &[String]) -> Result<()> {
        let directory = &self.settings.output.dir;
        std::fs::create_dir_all(directory).map_err(|error| {
            Error::Usage(format!("--output_dir {}: {error}; give a folder that can be written", directory.display()))
        })?;
        for notice in notices {
            eprintln!("castor: {notice}");
        }
        let ledger = *leg.engine.manager().ledger();
        eprint!("{}", account::placement(leg.engine.manager()));
        let header = Header {
            examples: self.examples,
            epochs: (self.steps as f64 / self.sampler.steps_per_epoch() as f64).ceil() as u64,
            batch_per_device: self.settings.batch_size,
            total_batch: self.sampler.rows_per_step(),
            accumulation: self.settings.gradient_accumulation_steps,
            steps: self.steps,
            parameters: self.config.parameters(),
        };
        print!("{}", header.block());
        println!("{}", metrics::model_params(self.config.parameters()));
        println!("{}", metrics::booster_init_cuda(ledger.total(Tier::Device)));
        println!("{}", metrics::booster_init_cpu(report::peak_host_bytes().unwrap_or(0)));
        let device = leg.engine.manager().backend().device();
        let after = (self.settings.output.resume != Resume::No).then_some(self.begun);
        self.log = Some(RunLog::begin(
            directory,
            after,
            json!({
                "castor": env!("CARGO_PKG_VERSION"),
                "world": self.world.world,
                "plugin": self.settings.memory.plugin.name,
                "backend": device.backend,
                "device": device.name,
                "parameters": self.config.parameters(),
                "steps": self.steps,
                "tokenizer": self.tokenizer(),
                "inexact": self.inexact(leg),
            }),
        )?);
        // One that was left when no run went on is not for this one.
        if let Err(error) = Request::take(directory) {
            eprintln!("castor: {error}");
        }
        let shown = shown(&leg.hardware.budgets);
        self.progress = Progress::start(self.steps, self.begun, self.logging_steps(), shown);
        Ok(())
    }

    /// What makes results inexact, in this session or one that it goes on from.
    fn inexact(&self, leg: &Leg) -> Option<&'static str> {
        let before = leg.engine.progress().lagged;
        let of_before = before.then_some("gradients of earlier sessions were clipped by the norm of the step before");
        self.settings.optimizer.inexact().or(of_before)
    }

    /// What `castor sample` finds the tokenizer by: `bytes`, or its whole path. Of token files one that was not named
    /// is not known.
    fn tokenizer(&self) -> Option<String> {
        let name = &self.settings.tokenizer;
        if name == "bytes" {
            return self.rows.is_of_text().then(|| name.clone());
        }
        Some(std::fs::canonicalize(name).ok()?.display().to_string())
    }

    /// What is said and written after the last step.
    pub(super) fn conclude(&mut self, leg: &mut Leg, seconds: f64) -> Result<()> {
        self.progress.finish();
        if !self.speaks {
            return Ok(());
        }
        let directory = &self.settings.output.dir;
        if let Ok(Some(request)) = Request::take(directory) {
            println!("{request}: this came after the last step");
        }
        let steps = self.records;
        let non_embedding = self.config.parameters() - self.config.vocab_size * self.config.hidden_size;
        let trained = TrainMetrics {
            epoch: (self.begun + steps) as f64 / self.sampler.steps_per_epoch() as f64,
            total_flos: 6.0 * self.tokens as f64 * non_embedding as f64,
            train_loss: (self.losses.count > 0).then(|| self.losses.sum / self.losses.count as f64),
            train_runtime: seconds,
            train_samples: self.samples,
            train_steps: steps,
            train_tokens: self.tokens,
        };
        let step_seconds = self.progress.rate().seconds_per_step().unwrap_or(seconds / steps.max(1) as f64);
        let (made, warm, budgets) = (leg.made, leg.warm, &leg.hardware.budgets);
        let memory = account::memory(leg.engine.manager(), self.world, budgets, (made, warm), step_seconds);
        memory.write(directory)?;
        let mut results = trained.values();
        results.extend(self.inexact(leg).map(|why| ("inexact".into(), json!(why))));
        results.extend((self.changes > 0).then(|| ("plan_changes".into(), json!(self.changes))));
        log::write_results(directory, "train", &results)?;
        if let Some((_, found)) = self.evaluated {
            let values = BTreeMap::from([
                ("eval_loss".into(), json!(found.loss)),
                ("perplexity".into(), json!(found.loss.exp())),
                ("eval_tokens".into(), json!(found.tokens)),
            ]);
            log::write_results(directory, "eval", &values)?;
        }
        if let Some(log) = self.log.take() {
            log.end(json!(results))?;
        }
        let log = RunLog::read(directory)?;
        let title = directory.file_name().map_or("run".into(), |name| name.to_string_lossy().into_owned());
        report::write_whole(&directory.join(PAGE), html::page(&title, log.as_ref(), Some(&memory)).as_bytes())?;
        print!("{}", trained.block());
        if self.skipped > 0 {
            println!("{} of {steps} updates were skipped: the gradient norm was not finite", self.skipped);
        }
        println!("{}", metrics::max_cuda_usage(self.device_peak));
        print!("{}", report::summary(log.as_ref(), Some(&memory)));
        println!("The report: {}", directory.join(PAGE).display());
        Ok(())
    }
}

/// Budgets as they are shown beside the steps.
pub(super) fn shown(budgets: &Budgets) -> progress::Budgets {
    progress::Budgets { device: budgets.device, host: budgets.host, nvme: budgets.nvme }
}

/// What is said of the first step without an update.
pub(super) fn not_finite(step: u64, result: &StepResult, clip: Clip) -> String {
    let scale = match result.loss_scale {
        1.0 => String::new(),
        scale => format!(" at the loss scale {scale:e}"),
    };
    let kept = match clip {
        Clip::Exact => "the update is skipped and the weights stay as they are",
        Clip::Lagged => "groups of such gradients are not updated",
    };
    format!(
        "step {step}: loss {:.4}, gradient norm {:.4}{scale}: the norm is not finite, so {kept}; such steps are counted \
         from here on, and a run that makes only such ends with an error",
        result.loss, result.grad_norm
    )
}
