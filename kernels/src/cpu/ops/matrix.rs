//! The one door to the dense product: f32 tiles with strides, bounds checked here.

/// An f32 matrix inside a slice. Element (i, j) is at `i·row_stride + j·column_stride`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `rows` × `columns`, one row every `stride` elements.
    pub fn new(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        Matrix { data, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    fn holds_its_elements(&self) -> bool {
        let last = (self.rows.max(1) - 1) * self.row_stride + (self.columns.max(1) - 1) * self.column_stride;
        self.rows == 0 || self.columns == 0 || last < self.data.len()
    }
}

/// `c = a·b`, or `c += a·b`. `c` is row-major and dense: `[a.rows, b.columns]`. Without `accumulate`, what
/// `c` holds is not read.
///
/// # Panics
/// If the shapes do not fit each other or their slices.
pub fn multiply(a: Matrix<'_>, b: Matrix<'_>, c: &mut [f32], accumulate: bool) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product");
    assert!(a.holds_its_elements() && b.holds_its_elements() && c.len() >= a.rows * b.columns);
    // SAFETY: all elements that the strides reach lie inside the slices, as just asserted; `c` is borrowed
    // mutably, so it overlaps neither operand.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            1.0,
            a.data.as_ptr(),
            a.row_stride as isize,
            a.column_stride as isize,
            b.data.as_ptr(),
            b.row_stride as isize,
            b.column_stride as isize,
            if accumulate { 1.0 } else { 0.0 },
            c.as_mut_ptr(),
            b.columns as isize,
            1,
        );
    }
}
