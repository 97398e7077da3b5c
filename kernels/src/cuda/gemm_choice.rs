//! Chooses how a product is launched: the algorithm, and into how many parts it is cut.
//!
//! The library's own guess is often several percent off. So at the first use of a product what the library
//! offers for the whole and for every cut is timed on the real operands, in two stages: all of it shortly,
//! then the best few again. The choice is remembered on disk (`algorithms`).

use super::algorithms::Choice;
use super::driver::check;
use super::gemm::{Gemm, Prepared, WORKSPACE_BYTES, Workspace};
use super::gemm_layout::{Cut, Handles, Key, Operands, checked, set};
use crate::{DType, Result};
use cudarc::cublaslt::sys::{self as lt, cublasLtMatmulDescAttributes_t as Attribute, cublasStatus_t};
use cudarc::driver::sys::{self, CUstream};
use std::ffi::c_void;
use std::time::{Duration, Instant};

/// Algorithms asked of the library for each cut.
const HEURISTICS: usize = 32;
/// No further candidate is tried when the first stage has taken this long. Candidates come in the order of
/// the library's own estimate, so the least likely ones are left out.
const FIRST_STAGE: Duration = Duration::from_millis(250);
/// Timed launches of a candidate in the first stage.
const FIRST_ROUNDS: u32 = 2;
/// Candidates of the second stage, and its rounds; in each round every candidate is launched once, so that
/// a change of the clocks meets all alike.
const FINALISTS: usize = 5;
const FINAL_ROUNDS: u32 = 4;

impl Gemm {
    /// Makes the handles and chooses cut and algorithm. None if the library has none.
    pub(super) fn prepare(
        &self,
        stream: CUstream,
        workspace: Workspace,
        key: Key,
        operands: Operands,
    ) -> Result<Option<Prepared>> {
        let workspace_bytes = workspace.bytes.min(WORKSPACE_BYTES);
        // The library may look at the bias' address when it is asked for algorithms.
        let offered = |cut: Cut| -> Result<(Handles, Vec<lt::cublasLtMatmulAlgo_t>)> {
            let handles = Handles::new(key, self.tf32, cut)?;
            if let Some(bias) = operands.bias {
                set(handles.description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
            }
            let algorithms = self.candidates(&handles, key, workspace_bytes)?;
            Ok((handles, algorithms))
        };
        let cuts = Cut::all(key.product, key.shape);
        // A remembered choice counts only while the library still offers it for this very product. In place
        // the same product without the addition, which differs by the write-back only, stands in.
        let in_place = key.adds && operands.c == operands.d;
        let remembered = {
            let algorithms = self.algorithms.lock();
            let twin = (in_place && self.tunes).then(|| algorithms.get(Key { adds: false, ..key }, self.tf32));
            algorithms.get(key, self.tf32).or(twin.flatten())
        };
        if let Some(Choice { cut, algorithm }) = remembered
            && cuts.contains(&cut)
        {
            let (handles, algorithms) = offered(cut)?;
            if let Some(algorithm) = algorithms.into_iter().find(|offer| offer.data == algorithm) {
                return Ok(Some(Prepared { handles, cut, algorithm }));
            }
        }
        let (handles, algorithms) = offered(Cut::WHOLE)?;
        let Some(&first) = algorithms.first() else {
            return Ok(None);
        };
        // In place the target must keep its value, which the timing can promise for 16 bits only.
        if !self.tunes || in_place && (key.result == DType::F32 || key.bias) {
            return Ok(Some(Prepared { handles, cut: Cut::WHOLE, algorithm: first }));
        }
        let (mut prepared, mut offers) =
            (vec![Prepared { handles, cut: Cut::WHOLE, algorithm: first }], vec![algorithms]);
        for &cut in &cuts[1..] {
            let (handles, algorithms) = offered(cut)?;
            prepared.push(Prepared { handles, cut, algorithm: first });
            offers.push(algorithms);
        }
        // The best guess of every cut, then the second best, and so on.
        let mut contest = Vec::new();
        for rank in 0..HEURISTICS {
            contest.extend(offers.iter().enumerate().filter_map(|(at, offers)| Some((at, *offers.get(rank)?))));
        }
        let Some((at, algorithm)) = self.fastest(stream, workspace, key, &mut prepared, &contest, operands)? else {
            return Ok(Some(prepared.swap_remove(0)));
        };
        let mut chosen = prepared.swap_remove(at);
        chosen.algorithm = algorithm;
        self.algorithms.lock().put(key, self.tf32, Choice { cut: chosen.cut, algorithm: algorithm.data });
        Ok(Some(chosen))
    }

    fn candidates(&self, handles: &Handles, key: Key, workspace_bytes: u64) -> Result<Vec<lt::cublasLtMatmulAlgo_t>> {
        use lt::cublasLtMatmulPreferenceAttributes_t as Preference;
        let mut preference = std::ptr::null_mut();
        // SAFETY: writes one handle.
        checked("cublasLtMatmulPreferenceCreate", unsafe { lt::cublasLtMatmulPreferenceCreate(&mut preference) })?;
        let prefer = |attribute, value: *const c_void, bytes: usize| {
            // SAFETY: a live handle, and a value of the attribute's size.
            checked("cublasLtMatmulPreferenceSetAttribute", unsafe {
                lt::cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes)
            })
        };
        let no_reduction = 0u32;
        let ask = || {
            prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace_bytes).cast(), 8)?;
            prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const no_reduction).cast(), 4)?;
            for attribute in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                prefer(attribute, (&raw const key.alignment).cast(), 4)?;
            }
            let mut results =
                [const { std::mem::MaybeUninit::<lt::cublasLtMatmulHeuristicResult_t>::zeroed() }; HEURISTICS];
            let mut count = 0;
            // SAFETY: live handles; writes at most HEURISTICS results and their count.
            let status = unsafe {
                lt::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    handles.description,
                    handles.a,
                    handles.b,
                    handles.c,
                    handles.c,
                    preference,
                    HEURISTICS as i32,
                    results.as_mut_ptr().cast(),
                    &mut count,
                )
            };
            if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
                return Ok(Vec::new());
            }
            checked("cublasLtMatmulAlgoGetHeuristic", status)?;
            Ok(results[..count.max(0) as usize]
                .iter()
                // SAFETY: zero is a valid value of every field, and the library has filled these.
                .map(|result| unsafe { result.assume_init_ref() })
                .filter(|r| {
                    r.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS && r.workspaceSize as u64 <= workspace_bytes
                })
                .map(|r| r.algo)
                .collect())
        };
        let found = ask();
        // SAFETY: made above, destroyed once.
        unsafe { lt::cublasLtMatmulPreferenceDestroy(preference) };
        found
    }

    /// Times the contestants (a cut by its place in `cuts`, and an algorithm) on the real operands and returns
    /// the fastest; none if the device refuses them all. What is in the result afterwards is what was there
    /// before, or something the following launch overwrites.
    fn fastest(
        &self,
        stream: CUstream,
        workspace: Workspace,
        key: Key,
        cuts: &mut [Prepared],
        contest: &[(usize, lt::cublasLtMatmulAlgo_t)],
        operands: Operands,
    ) -> Result<Option<(usize, lt::cublasLtMatmulAlgo_t)>> {
        // In place the smallest factor there is makes every product vanish when it is rounded to 16 bits,
        // while the arithmetic stays the same.
        let alpha = if key.adds && operands.c == operands.d { f32::from_bits(1) } else { 1.0 };
        let mut time = |(at, algorithm): (usize, lt::cublasLtMatmulAlgo_t), rounds: u32| -> Result<f32> {
            let prepared = &mut cuts[at];
            prepared.algorithm = algorithm;
            let mut milliseconds = 0.0;
            // SAFETY: live handles of the current context; one float is written.
            unsafe {
                check("cuEventRecord", sys::cuEventRecord(self.clock[0], stream))?;
                for _ in 0..rounds {
                    self.launch(stream, workspace, key, prepared, operands, alpha)?;
                }
                check("cuEventRecord", sys::cuEventRecord(self.clock[1], stream))?;
                check("cuEventSynchronize", sys::cuEventSynchronize(self.clock[1]))?;
                check(
                    "cuEventElapsedTime",
                    sys::cuEventElapsedTime_v2(&mut milliseconds, self.clock[0], self.clock[1]),
                )?;
            }
            Ok(milliseconds)
        };
        let started = Instant::now();
        let mut times = Vec::new();
        for &contestant in contest {
            // The first run loads the kernel; what is refused is no candidate.
            if time(contestant, 1).is_ok() {
                times.push((time(contestant, FIRST_ROUNDS)?, contestant));
            }
            if started.elapsed() > FIRST_STAGE {
                break;
            }
        }
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        times.truncate(FINALISTS);
        for finalist in &mut times {
            finalist.0 = 0.0;
        }
        for _ in 0..FINAL_ROUNDS {
            for (sum, contestant) in &mut times {
                *sum += time(*contestant, 1)?;
            }
        }
        Ok(times.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, contestant)| contestant))
    }
}
