//! Lines in the forms that Hugging Face's Trainer and ColossalAI print, so that scripts which read those read
//! these. The words, units and rounding are theirs; the numbers are of what was really done in this session
//! (theirs count planned samples and, after a resume, all steps).

use std::collections::BTreeMap;

use serde_json::Value;

/// What a training session did.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainMetrics {
    /// Epochs passed, over all sessions of the run.
    pub epoch: f64,
    /// 6 × tokens × non-embedding parameters, this session.
    pub total_flos: f64,
    /// Mean loss of this session's steps; none if nothing was trained.
    pub train_loss: Option<f64>,
    /// Seconds from after the model was built to the end of training.
    pub train_runtime: f64,
    /// Rows trained on in this session, over all ranks.
    pub train_samples: u64,
    /// Optimizer steps of this session, skipped ones included.
    pub train_steps: u64,
    /// Tokens of those rows.
    pub train_tokens: u64,
}

impl TrainMetrics {
    /// Keys and raw values, as `train_results.json` holds them. Rates are absent if nothing was trained.
    pub fn values(&self) -> BTreeMap<String, Value> {
        let mut values = BTreeMap::new();
        let mut put = |key: &str, value: Value| values.insert(key.to_owned(), value);
        put("epoch", self.epoch.into());
        put("total_flos", self.total_flos.into());
        put("train_runtime", round(self.train_runtime, 4).into());
        put("train_samples", self.train_samples.into());
        if let Some(loss) = self.train_loss {
            put("train_loss", loss.into());
        }
        if self.train_steps > 0 && self.train_runtime > 0.0 {
            let rate = |count: u64| round(count as f64 / self.train_runtime, 3);
            put("train_samples_per_second", rate(self.train_samples).into());
            put("train_steps_per_second", rate(self.train_steps).into());
            put("train_tokens_per_second", rate(self.train_tokens).into());
        }
        values
    }

    /// The block `***** train metrics *****`, with a newline at its end.
    pub fn block(&self) -> String {
        block("train", &self.values())
    }
}

/// A metrics block in Hugging Face's form: keys sorted and padded to the longest, values right-aligned.
pub fn block(split: &str, values: &BTreeMap<String, Value>) -> String {
    let shown: Vec<(&String, String)> = values.iter().map(|(key, value)| (key, shown(key, value))).collect();
    let keys = shown.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    let width = shown.iter().map(|(_, value)| value.len()).max().unwrap_or(0);
    let mut text = format!("***** {split} metrics *****\n");
    for (key, value) in shown {
        text.push_str(&format!("  {key:<keys$} = {value:>width$}\n"));
    }
    text
}

fn shown(key: &str, value: &Value) -> String {
    let number = value.as_f64().unwrap_or(f64::NAN);
    if key.contains("_mem_") {
        format!("{}MB", number as u64 >> 20)
    } else if key.ends_with("_runtime") {
        duration(number)
    } else if key == "total_flos" {
        format!("{}GF", number as u64 >> 30)
    } else if value.is_f64() {
        python_float(round(number, 4))
    } else {
        value.to_string()
    }
}

/// `H:MM:SS.cc`, centiseconds truncated, days in front.
pub fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    let centi = ((seconds - whole as f64) * 100.0) as u64;
    let (days, rest) = (whole / 86_400, whole % 86_400);
    let days = match days {
        0 => String::new(),
        1 => "1 day, ".into(),
        days => format!("{days} days, "),
    };
    format!("{days}{}:{:02}:{:02}.{centi:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

/// What is said before training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Rows of the data set.
    pub examples: u64,
    /// Epochs, rounded up.
    pub epochs: u64,
    /// Rows per rank and micro-step.
    pub batch_per_device: u64,
    /// Rows per optimizer step over all ranks.
    pub total_batch: u64,
    /// Micro-steps per optimizer step.
    pub accumulation: u64,
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Trainable parameters.
    pub parameters: u64,
}

impl Header {
    /// The block `***** Running training *****`, with a newline at its end.
    pub fn block(&self) -> String {
        format!(
            "***** Running training *****\n  \
             Num examples = {}\n  \
             Num Epochs = {}\n  \
             Instantaneous batch size per device = {}\n  \
             Total train batch size (w. parallel, distributed & accumulation) = {}\n  \
             Gradient Accumulation steps = {}\n  \
             Total optimization steps = {}\n  \
             Number of trainable parameters = {}\n",
            thousands(self.examples),
            thousands(self.epochs),
            thousands(self.batch_per_device),
            thousands(self.total_batch),
            self.accumulation,
            thousands(self.steps),
            thousands(self.parameters)
        )
    }
}

/// One step as Hugging Face logs it. The gradient norm is that before clipping.
pub fn log_line(loss: f64, grad_norm: f64, learning_rate: f64, epoch: f64) -> String {
    format!(
        "{{'loss': {}, 'grad_norm': {}, 'learning_rate': {}, 'epoch': {}}}",
        python_float(round(loss, 4)),
        python_float(significant(grad_norm, 6)),
        python_float(significant(learning_rate, 6)),
        python_float(round(epoch, 4))
    )
}

/// ColossalAI's `Model params: 6.28 B`; its units are powers of 1024.
pub fn model_params(parameters: u64) -> String {
    const UNITS: [(u64, &str); 3] = [(1 << 30, "B"), (1 << 20, "M"), (1 << 10, "K")];
    let shown = UNITS
        .iter()
        .find(|(unit, _)| parameters >= *unit)
        .map_or(parameters.to_string(), |(unit, name)| format!("{:.2} {name}", parameters as f64 / *unit as f64));
    format!("Model params: {shown}")
}

/// ColossalAI's line after the model is built; its MB are MiB.
pub fn booster_init_cuda(peak_bytes: u64) -> String {
    format!("Booster init max CUDA memory: {} MB", colossal_mb(peak_bytes))
}

/// The same for the process's peak resident memory.
pub fn booster_init_cpu(peak_bytes: u64) -> String {
    format!("Booster init max CPU memory: {} MB", colossal_mb(peak_bytes))
}

/// ColossalAI's last line.
pub fn max_cuda_usage(peak_bytes: u64) -> String {
    format!("Max CUDA memory usage: {} MB", colossal_mb(peak_bytes))
}

fn colossal_mb(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / (1 << 20) as f64)
}

/// `1234567` as `1,234,567`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn round(value: f64, places: i32) -> f64 {
    let scale = 10f64.powi(places);
    let rounded = (value * scale).round_ties_even() / scale;
    // Beyond 2^53 / scale there is nothing after the point to round, and the product may overflow.
    if rounded.is_finite() { rounded } else { value }
}

fn significant(value: f64, digits: usize) -> f64 {
    format!("{value:.*e}", digits - 1).parse().unwrap_or(value)
}

/// A float as Python prints it: shortest digits, `2e-05`, `1e+16`, `nan`.
fn python_float(value: f64) -> String {
    if !value.is_finite() {
        return match (value.is_nan(), value > 0.0) {
            (true, _) => "nan".into(),
            (_, true) => "inf".into(),
            _ => "-inf".into(),
        };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    } else {
        format!("{value:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_as_hugging_face_prints_it() {
        // Widths, rounding and truncation as observed with transformers 4.57.6, plus the counted lines.
        let metrics = TrainMetrics {
            epoch: 2.0,
            total_flos: 1e8,
            train_loss: Some(4.277_789),
            train_runtime: 0.1892,
            train_samples: 20,
            train_steps: 6,
            train_tokens: 320,
        };
        let expected = "\
***** train metrics *****
  epoch                    =        2.0
  total_flos               =        0GF
  train_loss               =     4.2778
  train_runtime            = 0:00:00.18
  train_samples            =         20
  train_samples_per_second =    105.708
  train_steps_per_second   =     31.712
  train_tokens_per_second  =   1691.332
";
        assert_eq!(metrics.block(), expected);
    }

    #[test]
    fn a_session_that_trained_nothing_prints_no_rates() {
        let metrics = TrainMetrics {
            epoch: 2.0,
            total_flos: 0.0,
            train_loss: None,
            train_runtime: 0.003,
            train_samples: 0,
            train_steps: 0,
            train_tokens: 0,
        };
        assert!(!metrics.block().contains("per_second") && !metrics.block().contains("loss"));
    }

    #[test]
    fn durations() {
        for (seconds, text) in [
            (0.1892, "0:00:00.18"),
            (995.35, "0:16:35.35"),
            (86_400.0, "1 day, 0:00:00.00"),
            (180_001.5, "2 days, 2:00:01.50"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn log_line_is_a_python_dict() {
        assert_eq!(
            log_line(4.271_66, 1.07, 0.0, 0.4),
            "{'loss': 4.2717, 'grad_norm': 1.07, 'learning_rate': 0.0, 'epoch': 0.4}"
        );
        assert_eq!(
            log_line(f64::NAN, f64::INFINITY, 2e-5, 2.0),
            "{'loss': nan, 'grad_norm': inf, 'learning_rate': 2e-05, 'epoch': 2.0}"
        );
    }

    #[test]
    fn python_floats() {
        for (value, text) in
            [(1e16, "1e+16"), (123456.0, "123456.0"), (1e-4, "0.0001"), (1.5e-5, "1.5e-05"), (-0.25, "-0.25")]
        {
            assert_eq!(python_float(value), text);
        }
    }

    #[test]
    fn colossal_lines() {
        assert_eq!(model_params(6_738_415_616), "Model params: 6.28 B");
        assert_eq!(model_params(1_071_681_536), "Model params: 1022.04 M");
        assert_eq!(booster_init_cuda(1_597_914_153), "Booster init max CUDA memory: 1523.89 MB");
        assert_eq!(booster_init_cpu(1 << 20), "Booster init max CPU memory: 1.00 MB");
        assert_eq!(max_cuda_usage(0), "Max CUDA memory usage: 0.00 MB");
    }

    #[test]
    fn header_with_thousands() {
        let header = Header {
            examples: 1_000,
            epochs: 2,
            batch_per_device: 2,
            total_batch: 4,
            accumulation: 2,
            steps: 500,
            parameters: 6_738_415_616,
        };
        let block = header.block();
        assert!(block.contains("\n  Num examples = 1,000\n"));
        assert!(block.ends_with("  Number of trainable parameters = 6,738,415,616\n"));
        assert_eq!(block.lines().count(), 8);
    }
}
