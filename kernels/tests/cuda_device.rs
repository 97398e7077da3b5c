//! The CUDA backend on a real device, against the CPU backend on the same bytes.
//!
//! Its own harness: without a device it says so and counts what it skipped (with `CASTOR_REQUIRE_CUDA=1`
//! that is a failure), instead of passing in silence. An argument selects the cases whose names contain it.

#[path = "cuda_device/attention.rs"]
mod attention;
#[path = "cuda_device/operators.rs"]
mod operators;
#[path = "cuda_device/order.rs"]
mod order;
#[path = "cuda_device/rig.rs"]
mod rig;
#[path = "cuda_device/updates.rs"]
mod updates;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// A case: its name and what it does.
pub type Case = (&'static str, fn());

fn main() -> ExitCode {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let all = [operators::CASES, attention::CASES, updates::CASES, order::CASES].concat();
    let cases: Vec<Case> = all
        .into_iter()
        .filter(|(name, _)| filter.as_ref().is_none_or(|filter| name.contains(filter.as_str())))
        .collect();
    let absent = match castor_kernels::cuda::device_count() {
        Ok(0) => Some("the driver sees no device".to_owned()),
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    };
    if let Some(reason) = absent {
        println!("cuda_device: skipped all {} cases: {reason}", cases.len());
        let required = std::env::var_os("CASTOR_REQUIRE_CUDA").is_some();
        return if required { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let mut failed = Vec::new();
    for (name, case) in &cases {
        let start = std::time::Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(case)).is_ok();
        println!("{name} ... {} ({:.1} s)", if passed { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        if !passed {
            failed.push(*name);
        }
    }
    println!("cuda_device: {} passed, {} failed: {failed:?}", cases.len() - failed.len(), failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
