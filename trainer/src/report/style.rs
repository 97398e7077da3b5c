//! Numbers as people read them.

use super::metrics::thousands;

/// Bytes in MiB with one decimal, thousands separated: `1,024.0`.
pub(crate) fn mib(bytes: u64) -> String {
    let tenths = (bytes as f64 / f64::from(1 << 20) * 10.0).round() as u64;
    format!("{}.{}", thousands(tenths / 10), tenths % 10)
}

/// Seconds as `H:MM:SS`.
pub(crate) fn clock(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    format!("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
}
