//! `castor parity`: one forward and backward on a given batch, held against expected numbers.
//!
//! Batches, expectations and results are safetensors files. A result file has the form of an expectation (`logits`,
//! `loss`, `grad_norm`, `grad.<Hugging Face name>`), so that two runs can be compared with each other. Every rank
//! computes the whole batch, so that the numbers do not depend on how many there are.

use crate::{
    auto,
    engine::{self, Engine, StepInputs},
    error::{Error, Result},
    inputs::MicroBatch,
    optimizer::Clip,
    rendezvous::World,
    session::{self, Hardware},
    settings::Settings,
};
use castor_runtime::GroupId;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::{collections::BTreeMap, fmt, path::Path, sync::Arc};

/// `castor parity`: one forward and backward on a batch, printed and held against what is expected.
///
/// # Errors
/// [`Error::Failed`] (exit 1) if a tensor is off by more than `tolerance`; bad input; what the world refuses.
pub fn main(
    settings: &Settings,
    batch: &Path,
    expect: Option<&Path>,
    out: Option<&Path>,
    tolerance: f64,
) -> Result<()> {
    let batch = Batch::read(batch)?;
    let world = World::from_env()?;
    // The batch says how long rows are.
    let settings = &Settings { max_length: batch.sequence as usize, ..settings.clone() };
    let (config, notices) = settings.model_shape()?;
    let hardware = Hardware::open(settings, &world)?;
    let mut options = session::options(settings, config, batch.sequence, batch.rows(), 1, 1);
    options.evaluates = true;
    // Gradients are looked at, and so need homes.
    options.clip = Clip::Exact;
    options.shards = session::shards(settings, world.world, world.local_world)?;
    let (blueprint, plan, _) = auto::plan(settings, options, &hardware, world.world)?;
    let mut engine = session::engine(Arc::clone(&hardware.backend), &blueprint, plan)?;
    let said = session::load(settings, &mut engine)?;
    let report = run(&mut engine, &batch, expect, out, tolerance)?;
    if world.rank == 0 {
        for notice in settings.notices.iter().chain(&notices).chain(&hardware.notices).chain(&said) {
            eprintln!("castor: {notice}");
        }
        print!("{report}");
    }
    match report.worst() {
        Some((name, error)) if !report.passed() => {
            Err(Error::Failed(format!("{name} is off by {error:.2e}, more than --tolerance {tolerance:.0e}")))
        }
        _ => Ok(()),
    }
}

/// A batch of rows.
#[derive(Clone, Debug)]
pub struct Batch {
    /// S
    pub sequence: u64,
    /// Token ids `[B,S]`.
    pub ids: Vec<i32>,
    /// Label of each token `[B,S]`, -100 where none counts.
    pub labels: Vec<i32>,
}

impl Batch {
    /// Reads `input_ids` and `labels`, or `input_ids.0` and `labels.0`: integers `[B,S]`.
    ///
    /// # Errors
    /// If the file or a tensor is missing or has another form.
    pub fn read(path: &Path) -> Result<Self> {
        Batch::read_numbered(path, 0)
    }

    /// Reads `input_ids.{index}` and `labels.{index}`, or the plain names for index 0.
    ///
    /// # Errors
    /// As [`Batch::read`].
    pub fn read_numbered(path: &Path, index: usize) -> Result<Self> {
        let bytes = read_file(path)?;
        let file = parse(path, &bytes)?;
        let tensor = |name: &str| {
            let numbered = format!("{name}.{index}");
            let plain = if index == 0 { file.tensor(name) } else { file.tensor(&numbered) };
            plain
                .or_else(|_| file.tensor(&numbered))
                .map_err(|_| wrong(path, format!("holds neither {name} nor {numbered}")))
        };
        let ids = tensor("input_ids")?;
        let labels = tensor("labels")?;
        let &[rows, sequence] = ids.shape() else {
            return Err(wrong(path, format!("input_ids has shape {:?}; it must be [rows, tokens]", ids.shape())));
        };
        if rows == 0 || sequence < 2 {
            return Err(wrong(
                path,
                format!("input_ids has shape {:?}; at least one row of two tokens is needed", ids.shape()),
            ));
        }
        if labels.shape() != ids.shape() {
            return Err(wrong(
                path,
                format!("input_ids has shape {:?} and labels {:?}; they must agree", ids.shape(), labels.shape()),
            ));
        }
        Ok(Batch {
            sequence: sequence as u64,
            ids: integers(path, "input_ids", &ids)?,
            labels: integers(path, "labels", &labels)?,
        })
    }

    /// B
    pub fn rows(&self) -> u64 {
        self.ids.len() as u64 / self.sequence
    }

    /// As a micro-batch.
    pub fn micro(&self) -> MicroBatch<'_> {
        MicroBatch { ids: &self.ids, labels: &self.labels, starts: None }
    }
}

/// What one forward and backward gave.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// By name: shape and f32 values.
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// How far results are from what was expected.
#[derive(Clone, Debug)]
pub struct Report {
    /// Mean loss of the tokens that count.
    pub loss: f64,
    /// Global gradient norm.
    pub grad_norm: f64,
    /// Tokens that count.
    pub tokens: u64,
    /// What was compared, if anything was expected.
    pub comparison: Option<Comparison>,
    /// Largest error that passes.
    pub tolerance: f64,
}

/// Results held against a file.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// By name: ‖result − expected‖ / ‖expected‖.
    pub errors: BTreeMap<String, f64>,
    /// Tensors of the file that are none of the results, and so were not compared.
    pub unknown: Vec<String>,
}

impl Report {
    /// ‖result − expected‖ / ‖expected‖ of what was compared.
    pub fn errors(&self) -> impl Iterator<Item = (&str, f64)> {
        self.comparison.iter().flat_map(|held| &held.errors).map(|(name, error)| (name.as_str(), *error))
    }

    /// The tensor that is farthest off.
    pub fn worst(&self) -> Option<(&str, f64)> {
        self.errors().max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Whether every tensor is within the tolerance.
    pub fn passed(&self) -> bool {
        self.errors().all(|(_, error)| error <= self.tolerance)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tokens    {}", self.tokens)?;
        writeln!(f, "loss      {:.7}", self.loss)?;
        writeln!(f, "grad_norm {:.7}", self.grad_norm)?;
        for (name, error) in self.errors() {
            let verdict = if error <= self.tolerance { "ok" } else { "BEYOND" };
            writeln!(f, "{error:9.2e} {verdict:6} {name}")?;
        }
        if let Some(Comparison { errors, unknown }) = &self.comparison {
            write!(f, "compared  {} of {} tensors", errors.len(), errors.len() + unknown.len())?;
            match unknown.as_slice() {
                [] => writeln!(f)?,
                unknown => writeln!(f, "; no results here are called {}", unknown.join(", "))?,
            }
        }
        if let Some((name, error)) = self.worst() {
            writeln!(f, "worst     {error:.2e} in {name} (tolerance {:.1e})", self.tolerance)?;
        }
        Ok(())
    }
}

/// Computes a batch and compares it with `expect`; writes what came out to `out`.
///
/// # Errors
/// If a file cannot be used, nothing in the batch counts, or the world below refuses. Differences are no errors: ask
/// [`Report::passed`].
pub fn run(
    engine: &mut Engine,
    batch: &Batch,
    expect: Option<&Path>,
    out: Option<&Path>,
    tolerance: f64,
) -> Result<Report> {
    let micro = batch.micro();
    let counted = micro.counted(batch.sequence);
    if counted == 0 {
        return Err(Error::Usage(
            "no token of the batch counts: every label is -100 or stands first in its row".into(),
        ));
    }
    let results = compute(engine, batch, counted)?;
    let mut report = Report {
        loss: f64::from(results.tensors["loss"].1[0]),
        grad_norm: f64::from(results.tensors["grad_norm"].1[0]),
        tokens: counted,
        comparison: None,
        tolerance,
    };
    if let Some(path) = expect {
        report.comparison = Some(results.compare(path)?);
    }
    if let Some(path) = out {
        results.write(path)?;
    }
    Ok(report)
}

/// One forward and backward: logits, loss, gradient norm, and each gradient by its Hugging Face name.
///
/// # Errors
/// If the world below refuses.
pub fn compute(engine: &mut Engine, batch: &Batch, counted: u64) -> Result<Results> {
    let micros = [batch.micro()];
    let vocabulary = engine.options().config.vocab_size as usize;
    let mut logits = Vec::with_capacity(batch.ids.len() * vocabulary);
    let ops = Arc::clone(engine.manager().backend());
    engine.observe(&micros, &mut |_, _, view| {
        let mut bytes = vec![0; view.span.bytes as usize];
        ops.download(view.span, &mut bytes)?;
        logits.extend(engine::widen(&bytes, view.dtype));
        Ok(())
    })?;
    let tokens = engine.total(counted)?;
    let step = engine.gradients(&StepInputs { micros: &micros, tokens })?;
    let mut results = Results::default();
    let shape = vec![batch.rows() as usize, batch.sequence as usize, vocabulary];
    results.tensors.insert("logits".into(), (shape, logits));
    results.add_scalar("loss", step.loss);
    results.add_scalar("grad_norm", step.grad_norm);
    let groups = engine.groups().clone();
    for group in (0..groups.count() as u32).map(GroupId) {
        let gradient = engine.read_gradient(group, step.loss_scale)?;
        for part in groups.parts_of(group) {
            let shape = part.shape.iter().map(|&d| d as usize).collect();
            let values = engine.slice(part, &gradient).to_vec();
            let name = format!("grad.{}", part.name);
            results.tensors.insert(name, (shape, values));
        }
    }
    Ok(results)
}

impl Results {
    fn add_scalar(&mut self, name: &str, value: f64) {
        self.tensors.insert(name.into(), (vec![1], vec![value as f32]));
    }

    /// Relative error of every tensor of `path` that is a result's.
    ///
    /// # Errors
    /// If the file cannot be read, or a tensor has another shape, or there is nothing to compare.
    pub fn compare(&self, path: &Path) -> Result<Comparison> {
        let bytes = read_file(path)?;
        let file = parse(path, &bytes)?;
        let mut held = Comparison::default();
        for (name, (shape, values)) in &self.tensors {
            let Ok(expected) = file.tensor(name) else {
                continue;
            };
            // PyTorch's scalars have no dimension.
            let is_scalar = expected.shape().is_empty() && *shape == [1];
            if expected.shape() != shape && !is_scalar {
                return Err(wrong(path, format!("{name} has shape {:?}; the model's is {shape:?}", expected.shape())));
            }
            let expected = floats(path, name, &expected)?;
            held.errors.insert(name.clone(), relative_error(values, &expected));
        }
        if held.errors.is_empty() {
            return Err(wrong(path, "holds none of logits, loss, grad_norm, grad.<tensor name>".into()));
        }
        held.unknown =
            file.names().into_iter().filter(|name| !self.tensors.contains_key(*name)).map(str::to_string).collect();
        held.unknown.sort_unstable();
        Ok(held)
    }

    /// Writes all tensors.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let failed = |reason: String| Error::Failed(format!("{}: cannot be written: {reason}", path.display()));
        let views: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| {
                let bytes = bytemuck::cast_slice(values);
                TensorView::new(Dtype::F32, shape.clone(), bytes).map(|view| (name, view))
            })
            .collect::<std::result::Result<_, _>>()
            .map_err(|e| failed(e.to_string()))?;
        safetensors::serialize_to_file(views, None, path).map_err(|e| failed(e.to_string()))
    }
}

/// ‖a − b‖ / ‖b‖, or ‖a‖ where b is zero.
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    let scale = if norm == 0.0 { 1.0 } else { norm.sqrt() };
    difference.sqrt() / scale
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| Error::Usage(format!("{}: cannot be read: {error}", path.display())))
}

fn parse<'b>(path: &Path, bytes: &'b [u8]) -> Result<SafeTensors<'b>> {
    SafeTensors::deserialize(bytes).map_err(|error| wrong(path, format!("is not a safetensors file: {error}")))
}

fn wrong(path: &Path, what: String) -> Error {
    Error::Usage(format!("{}: {what}", path.display()))
}

fn integers(path: &Path, name: &str, tensor: &TensorView) -> Result<Vec<i32>> {
    let narrow = |value: i64| {
        i32::try_from(value).map_err(|_| wrong(path, format!("{name} holds {value}, which is no token id")))
    };
    match tensor.dtype() {
        Dtype::I64 => each(tensor, i64::from_le_bytes).map(narrow).collect(),
        Dtype::I32 => Ok(each(tensor, i32::from_le_bytes).collect()),
        other => Err(wrong(path, format!("{name} is {other:?}; it must be I64 or I32"))),
    }
}

fn floats(path: &Path, name: &str, tensor: &TensorView) -> Result<Vec<f32>> {
    match tensor.dtype() {
        Dtype::F64 => Ok(each(tensor, f64::from_le_bytes).map(|x| x as f32).collect()),
        Dtype::F32 => Ok(each(tensor, f32::from_le_bytes).collect()),
        Dtype::F16 => Ok(each(tensor, |b| half::f16::from_le_bytes(b).to_f32()).collect()),
        Dtype::BF16 => Ok(each(tensor, |b| half::bf16::from_le_bytes(b).to_f32()).collect()),
        other => Err(wrong(path, format!("{name} is {other:?}; it must be a float type"))),
    }
}

fn each<'t, const N: usize, T>(
    tensor: &'t TensorView,
    read: impl Fn([u8; N]) -> T + 't,
) -> impl Iterator<Item = T> + 't {
    let element = move |bytes: &[u8]| {
        let mut own = [0; N];
        own.copy_from_slice(bytes);
        read(own)
    };
    tensor.data().chunks_exact(N).map(element)
}
