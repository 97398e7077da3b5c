//! What a run says: while it trains, at its end, and afterwards.
//!
//! - [`metrics`]: the lines that users of Hugging Face and ColossalAI know, in their exact forms.
//! - [`progress`]: the bar, or plain lines where there is no terminal.
//! - [`log`]: `train_log.jsonl`, `train_results.json`, `all_results.json`.
//! - [`memory`]: `memory.json`, every byte of every tier by category at every tick.
//! - [`html`]: both of them as one page that opens offline.
//!
//! It measures nothing but this process's own peak ([`peak_host_bytes`]); all numbers are handed in.

mod chart;
pub mod html;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod progress;
mod style;

use std::fmt::Write as _;
use std::path::Path;

use crate::error::{Error, Result, counted};
use log::RunLog;
use memory::MemoryReport;

/// Name of the page that `castor report` writes into the run's folder.
pub const PAGE: &str = "report.html";

/// `castor report RUN_DIR`: prints a summary and writes `report.html`.
///
/// # Errors
/// [`Error::Usage`] if the folder holds neither `train_log.jsonl` nor `memory.json`, or one is not readable.
pub fn main(run_dir: &Path) -> Result<()> {
    let memory = MemoryReport::read(run_dir)?;
    let log = RunLog::read(run_dir)?;
    if memory.is_none() && log.is_none() {
        return Err(Error::Usage(format!(
            "{} is not the folder of a run: it holds neither {} nor {}",
            run_dir.display(),
            log::FILE,
            memory::FILE
        )));
    }
    let title = run_dir
        .canonicalize()
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .unwrap_or_else(|| "run".into());
    let page = run_dir.join(PAGE);
    write_whole(&page, html::page(&title, log.as_ref(), memory.as_ref()).as_bytes())?;
    let mut text = summary(log.as_ref(), memory.as_ref());
    let _ = writeln!(text, "\nThe page: {}", page.display());
    use std::io::Write;
    std::io::stdout().lock().write_all(text.as_bytes()).map_err(|error| Error::Failed(format!("cannot print: {error}")))
}

/// A run in a screenful of text.
pub fn summary(log: Option<&log::Run>, memory: Option<&MemoryReport>) -> String {
    let mut text = String::new();
    if let Some(run) = log
        && let (Some(first), Some(last)) = (run.steps.first(), run.steps.last())
    {
        let skipped = run.steps.iter().filter(|step| step.skipped).count();
        let _ = writeln!(
            text,
            "Steps {}–{} · loss {:.4} → {:.4} · {} skipped · {} tokens/s when steady",
            first.step,
            last.step,
            first.loss,
            last.loss,
            skipped,
            run.tokens_per_second().map_or("n/a".into(), |rate| format!("{rate:.0}")),
        );
    }
    if let Some(why) = log.and_then(log::Run::inexact) {
        let _ = writeln!(text, "Inexact: {why}");
    }
    if let Some((saves, seconds, held)) = log.and_then(log::Run::saving) {
        let saves = counted(saves as u64, "checkpoints");
        let _ = writeln!(text, "{saves} written in {seconds:.2} s, for {held:.2} s of which the run waited");
    }
    for plan in log.map_or(&[][..], |run| &run.plans) {
        let log::PlanRecord { step, reason, before_s, after_s, .. } = plan;
        let _ = writeln!(text, "Another plan after step {step} ({reason}): {before_s:.3} → {after_s:.3} s a step");
    }
    let Some(memory) = memory else {
        return text;
    };
    let _ = writeln!(text, "\nMemory of rank {} of {} (MiB)", memory.rank, memory.world);
    let _ = writeln!(
        text,
        "  {:<8}{:>12}{:>16}{:>15}{:>12}{:>16}",
        "tier", "budget", "peak predicted", "peak measured", "reserved", "seen by system"
    );
    for tier in &memory.tiers {
        let _ = writeln!(
            text,
            "  {:<8}{:>12}{:>16}{:>15}{:>12}{:>16}",
            tier.tier,
            style::mib(tier.budget_bytes),
            style::mib(tier.predicted_peak_bytes),
            style::mib(tier.measured_peak_bytes),
            tier.reserved_bytes.map_or("n/a".into(), style::mib),
            tier.system_bytes.map_or("n/a".into(), style::mib),
        );
    }
    let _ = writeln!(text, "\nMoved per step (MiB)");
    let _ = writeln!(text, "  {:<20}{:>12}{:>12}{:>12}", "link", "planned", "counted", "busy, ms");
    for link in &memory.links {
        let _ = writeln!(
            text,
            "  {:<20}{:>12}{:>12}{:>12}",
            link.link,
            style::mib(link.planned_bytes_per_step),
            style::mib(link.counted_bytes_per_step),
            link.busy_seconds_per_step.map_or("n/a".into(), |seconds| format!("{:.1}", seconds * 1e3)),
        );
    }
    let _ = writeln!(
        text,
        "\nThe step waited {:.1} ms for moves, what came with the first step, evaluations and saves divided among all; \
         a steady step takes {:.1} ms.",
        memory.stall_seconds_per_step * 1e3,
        memory.step_seconds * 1e3
    );
    text
}

/// Peak resident memory of this process in bytes (`VmHWM`, what `getrusage` calls `ru_maxrss`); none where the
/// system does not tell.
pub fn peak_host_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Resident memory of this process now, in bytes.
pub fn resident_host_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

fn status_bytes(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Writes a file so that a reader finds the old one or the new one whole.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    let failed = |error: std::io::Error| {
        Error::Failed(format!("{}: {} bytes cannot be written: {error}", path.display(), bytes.len()))
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    // Temporary files are private; a report is as readable as any other output of the run.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(open).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_at_least_what_is_resident() {
        // Tests beside this one take memory: what is resident is read first.
        let now = resident_host_bytes().unwrap();
        let peak = peak_host_bytes().unwrap();
        assert!(now > 0 && peak >= now);
    }

    #[test]
    fn a_folder_without_a_run_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = main(folder.path()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("train_log.jsonl"), "{error}");
    }
}
