//! One product of a linear layer in cuBLASLt's terms: what it is named by, its handles, and how it is cut.
//!
//! Everything is row-major outside and column-major inside; a row-major matrix is its transpose read
//! column-major, so no byte is moved:
//!
//! | product | A, op | B, op | m × n × k |
//! |---|---|---|---|
//! | y = x·wᵀ | w, T | x, N | O × T × I |
//! | d_x = d_y·w | w, N | d_y, N | I × T × O |
//! | d_w = d_yᵀ·x | x, N | d_y, T | I × O × T |
//!
//! A product can be launched in equal parts of m or of n. No sum over k is touched by that, so it means the
//! same; it can be faster, because the parts of a large product find more of their operands in the cache.

use crate::ops::Linear;
use crate::{DType, Error, Result};
use cudarc::cublaslt::sys::{self as lt, cublasLtMatmulDescAttributes_t as Attribute};
use cudarc::cublaslt::sys::{cublasComputeType_t, cublasStatus_t, cudaDataType_t};
use serde::{Deserialize, Serialize};

/// Parts of a cut are multiples of the largest tile, so that none is wasted.
const PART_MULTIPLE: u64 = 128;
/// Smaller parts do not fill the device.
const PART_LEAST: u64 = 2048;

/// Which of the three products of a linear layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Product {
    Forward,
    BackwardInput,
    BackwardWeight,
}

/// What makes two products the same to cuBLASLt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) product: Product,
    pub(crate) shape: Linear,
    /// Type of both operands.
    pub(crate) operands: DType,
    /// Type of the result and of what it is added to.
    pub(crate) result: DType,
    /// Whether the result is added to something (beta = 1).
    pub(crate) adds: bool,
    pub(crate) bias: bool,
    /// Power of two, at most 16, that all addresses are multiples of. More is not claimed, so that the
    /// choice of an algorithm, and with it the bits, does not depend on where a tensor happens to lie.
    pub(crate) alignment: u32,
}

/// The handles of one part of a product. They live as long as the process.
pub(crate) struct Handles {
    pub(crate) description: lt::cublasLtMatmulDesc_t,
    pub(crate) a: lt::cublasLtMatrixLayout_t,
    pub(crate) b: lt::cublasLtMatrixLayout_t,
    pub(crate) c: lt::cublasLtMatrixLayout_t,
}

// SAFETY: handles of a thread-safe library, used under a lock.
unsafe impl Send for Handles {}

/// The operands of one product, by address.
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) c: u64,
    pub(crate) d: u64,
    pub(crate) bias: Option<u64>,
}
/// The side of the result that is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Side {
    M,
    N,
}

/// A product in equal parts, launched one after another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Cut {
    pub(crate) side: Side,
    pub(crate) parts: u64,
}

impl Cut {
    /// The product in one piece.
    pub(crate) const WHOLE: Cut = Cut { side: Side::N, parts: 1 };

    /// Every cut of a product that may be worth trying, the whole first.
    pub(crate) fn all(product: Product, shape: Linear) -> Vec<Cut> {
        let [m, n, _] = layout(product, shape).0;
        let sides: &[(Side, u64)] = match product {
            Product::Forward => &[(Side::M, m), (Side::N, n)],
            Product::BackwardInput | Product::BackwardWeight => &[(Side::N, n)],
        };
        let mut all = vec![Cut::WHOLE];
        for parts in [2, 4] {
            let fits = |length: u64| length.is_multiple_of(parts * PART_MULTIPLE) && length / parts >= PART_LEAST;
            all.extend(sides.iter().filter(|(_, length)| fits(*length)).map(|&(side, _)| Cut { side, parts }));
        }
        all
    }

    /// m × n of one part.
    fn part(self, m: u64, n: u64) -> [u64; 2] {
        match self.side {
            Side::M => [m / self.parts, n],
            Side::N => [m, n / self.parts],
        }
    }

    /// Where part `index` starts in A, B, the result and the bias, in elements.
    fn offsets(self, product: Product, shape: Linear, index: u64) -> [u64; 4] {
        let ([m, n, k], [a_transposed, b_transposed]) = layout(product, shape);
        let [part_m, part_n] = self.part(m, n);
        match self.side {
            Side::M => {
                let at = index * part_m;
                [if a_transposed { at * k } else { at }, 0, at, at]
            }
            Side::N => {
                let at = index * part_n;
                [0, if b_transposed { at } else { at * k }, at * m, 0]
            }
        }
    }
}

impl Operands {
    /// The addresses of part `index` of a cut.
    pub(crate) fn part(self, key: Key, cut: Cut, index: u64) -> Operands {
        let [a, b, result, bias] = cut.offsets(key.product, key.shape, index);
        Operands {
            a: self.a + key.operands.bytes(a),
            b: self.b + key.operands.bytes(b),
            c: self.c + key.result.bytes(result),
            d: self.d + key.result.bytes(result),
            bias: self.bias.map(|address| address + key.result.bytes(bias)),
        }
    }
}

/// Turns cuBLASLt's answer into a result that names the call.
pub(crate) fn checked(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Device { call: call.to_owned(), reason: format!("{status:?}") })
}
impl Drop for Handles {
    fn drop(&mut self) {
        // SAFETY: handles made by `Handles::new`, destroyed once. Null ones were not made.
        unsafe {
            for layout in [self.a, self.b, self.c] {
                if !layout.is_null() {
                    let _ = lt::cublasLtMatrixLayoutDestroy(layout);
                }
            }
            if !self.description.is_null() {
                let _ = lt::cublasLtMatmulDescDestroy(self.description);
            }
        }
    }
}

pub(crate) fn key(product: Product, shape: Linear, operands: DType, result: DType, adds: bool, at: Operands) -> Key {
    let addresses = at.a | at.b | at.c | at.d | at.bias.unwrap_or(0) | 16;
    let alignment = 1 << addresses.trailing_zeros();
    Key { product, shape, operands, result, adds, bias: at.bias.is_some(), alignment }
}

fn data_type(dtype: DType) -> Result<cudaDataType_t> {
    match dtype {
        DType::F32 => Ok(cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(cudaDataType_t::CUDA_R_16F),
        DType::Bf16 => Ok(cudaDataType_t::CUDA_R_16BF),
        other => Err(Error::Unsupported {
            what: format!("a matrix product in {other:?}"),
            backend: "cuda",
            instead: "use f32, f16 or bf16".into(),
        }),
    }
}

pub(crate) fn set<T>(description: lt::cublasLtMatmulDesc_t, attribute: Attribute, value: &T) -> Result<()> {
    // SAFETY: a live handle, and a value of the attribute's size (all callers pass the documented type).
    checked("cublasLtMatmulDescSetAttribute", unsafe {
        lt::cublasLtMatmulDescSetAttribute(description, attribute, (&raw const *value).cast(), size_of::<T>())
    })
}

/// (m, n, k) and for A and B whether they are read transposed, in cuBLAS's column-major terms.
fn layout(product: Product, shape: Linear) -> ([u64; 3], [bool; 2]) {
    let Linear { tokens, inputs, outputs } = shape;
    match product {
        Product::Forward => ([outputs, tokens, inputs], [true, false]),
        Product::BackwardInput => ([inputs, tokens, outputs], [false, false]),
        Product::BackwardWeight => ([inputs, outputs, tokens], [false, true]),
    }
}

impl Handles {
    /// The handles of one part of a product.
    pub(crate) fn new(key: Key, tf32: bool, cut: Cut) -> Result<Handles> {
        let ([m, n, k], transposed) = layout(key.product, key.shape);
        let [part_m, part_n] = cut.part(m, n);
        let (operand, result) = (data_type(key.operands)?, data_type(key.result)?);
        let compute = match tf32 && key.operands == DType::F32 {
            true => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let mut made = Handles {
            description: std::ptr::null_mut(),
            a: std::ptr::null_mut(),
            b: std::ptr::null_mut(),
            c: std::ptr::null_mut(),
        };
        // Rows and columns of the part, and the distance of columns in the whole.
        let (a_rows, a_columns, a_stride) = if transposed[0] { (k, part_m, k) } else { (part_m, k, m) };
        let (b_rows, b_columns, b_stride) = if transposed[1] { (part_n, k, n) } else { (k, part_n, k) };
        let create = |layout: &mut lt::cublasLtMatrixLayout_t, dtype, rows: u64, columns: u64, stride: u64| {
            // SAFETY: writes one handle.
            checked("cublasLtMatrixLayoutCreate", unsafe {
                lt::cublasLtMatrixLayoutCreate(layout, dtype, rows, columns, stride as i64)
            })
        };
        // SAFETY: writes one handle.
        checked("cublasLtMatmulDescCreate", unsafe {
            lt::cublasLtMatmulDescCreate(&mut made.description, compute, cudaDataType_t::CUDA_R_32F)
        })?;
        create(&mut made.a, operand, a_rows, a_columns, a_stride)?;
        create(&mut made.b, operand, b_rows, b_columns, b_stride)?;
        create(&mut made.c, result, part_m, part_n, m)?;
        // CUBLAS_OP_N = 0, CUBLAS_OP_T = 1
        set(made.description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(transposed[0]))?;
        set(made.description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(transposed[1]))?;
        if key.bias {
            let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            set(made.description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table at the top of this file, on numbers: column-major products of row-major memory.
    #[test]
    fn layouts_are_the_products_of_a_linear_layer() {
        let shape = Linear { tokens: 3, inputs: 4, outputs: 5 };
        let (t, i, o) = (3, 4, 5);
        let number = |row: usize, column: usize, seed: usize| ((row * 7 + column * 3 + seed) % 11) as f64;
        let matrix = |rows: usize, columns: usize, seed| -> Vec<f64> {
            (0..rows * columns).map(|at| number(at / columns, at % columns, seed)).collect()
        };
        let (x, w, dy) = (matrix(t, i, 1), matrix(o, i, 2), matrix(t, o, 3));
        let gemm = |product, a: &[f64], b: &[f64]| {
            let ([m, n, k], [ta, tb]) = layout(product, shape);
            let (m, n, k) = (m as usize, n as usize, k as usize);
            let (lda, ldb) = (if ta { k } else { m }, if tb { n } else { k });
            let mut d = vec![0.0; m * n];
            for column in 0..n {
                for row in 0..m {
                    for at in 0..k {
                        let left = if ta { a[row * lda + at] } else { a[at * lda + row] };
                        let right = if tb { b[at * ldb + column] } else { b[column * ldb + at] };
                        d[column * m + row] += left * right;
                    }
                }
            }
            d
        };
        let rows = |rows: usize, columns: usize, at: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..rows * columns).map(|e| at(e / columns, e % columns)).collect()
        };
        assert_eq!(
            gemm(Product::Forward, &w, &x),
            rows(t, o, &|r, c| (0..i).map(|k| x[r * i + k] * w[c * i + k]).sum())
        );
        assert_eq!(
            gemm(Product::BackwardInput, &w, &dy),
            rows(t, i, &|r, c| (0..o).map(|k| dy[r * o + k] * w[k * i + c]).sum())
        );
        assert_eq!(
            gemm(Product::BackwardWeight, &x, &dy),
            rows(o, i, &|r, c| (0..t).map(|k| dy[k * o + r] * x[k * i + c]).sum())
        );
    }

    /// Offsets on numbers: the parts of a cut are the product, each element written once.
    #[test]
    fn parts_of_a_cut_are_the_whole() {
        let shape = Linear { tokens: 8, inputs: 5, outputs: 12 };
        let value = |at: usize, seed: usize| ((at * 7 + seed * 3) % 11) as f64;
        for product in [Product::Forward, Product::BackwardInput, Product::BackwardWeight] {
            let ([m, n, k], [ta, tb]) = layout(product, shape);
            let (lda, ldb) = (if ta { k } else { m }, if tb { n } else { k });
            let element = |row: u64, column: u64, a: u64, b: u64| -> f64 {
                (0..k)
                    .map(|at| {
                        let left = a + if ta { row * lda + at } else { at * lda + row };
                        let right = b + if tb { at * ldb + column } else { column * ldb + at };
                        value(left as usize, 1) * value(right as usize, 2)
                    })
                    .sum()
            };
            for cut in [Side::M, Side::N].map(|side| Cut { side, parts: 4 }) {
                if (if cut.side == Side::M { m } else { n }) % 4 != 0 {
                    continue;
                }
                let mut written = vec![None; (m * n) as usize];
                for index in 0..cut.parts {
                    let [a, b, d, bias] = cut.offsets(product, shape, index);
                    let [part_m, part_n] = cut.part(m, n);
                    assert_eq!(bias, d % m, "the bias follows the rows");
                    for column in 0..part_n {
                        for row in 0..part_m {
                            let place = &mut written[(d + column * m + row) as usize];
                            assert!(place.replace(element(row, column, a, b)).is_none(), "written twice");
                        }
                    }
                }
                for (at, found) in written.into_iter().enumerate() {
                    assert_eq!(found, Some(element(at as u64 % m, at as u64 / m, 0, 0)), "{product:?} {cut:?}");
                }
            }
        }
    }

    #[test]
    fn cuts_keep_whole_tiles_and_large_parts() {
        let cuts = |product, tokens, outputs| {
            let all = Cut::all(product, Linear { tokens, inputs: 4096, outputs });
            assert_eq!(all[0], Cut::WHOLE);
            all[1..].iter().map(|cut| (cut.side, cut.parts)).collect::<Vec<_>>()
        };
        let (m, n) = (Side::M, Side::N);
        assert_eq!(cuts(Product::Forward, 16384, 22016), [(m, 2), (n, 2), (m, 4), (n, 4)]);
        assert_eq!(cuts(Product::Forward, 4096, 32000), [(m, 2), (n, 2)]);
        assert_eq!(cuts(Product::BackwardInput, 16384, 22016), [(n, 2), (n, 4)]);
        assert_eq!(cuts(Product::BackwardWeight, 16384, 4096), [(n, 2)]);
        assert_eq!(cuts(Product::BackwardWeight, 16384, 4000), []);
    }
}
