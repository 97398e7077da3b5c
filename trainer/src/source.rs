//! Where initial weights and training rows come from: the two traits between the step and the outside.

use crate::error::Result;

/// Weights by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`), row-major.
pub trait TensorSource {
    /// Fills `out` with elements `first .. first + out.len()` of the tensor, widened to f32.
    ///
    /// # Errors
    /// If the tensor is missing or cannot be read.
    fn read(&self, name: &str, first: u64, out: &mut [f32]) -> Result<()>;
}

/// Training rows of equal length.
pub trait Rows {
    /// Number of rows.
    fn len(&self) -> u64;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// S: tokens of a row.
    fn length(&self) -> usize;

    /// Fills `ids` and `labels` (both S long). `labels[t]` is the label *of* token t (it is predicted from
    /// token t−1, as in Hugging Face); -100 does not count.
    ///
    /// # Errors
    /// If the row cannot be read.
    fn row(&self, index: u64, ids: &mut [i32], labels: &mut [i32]) -> Result<()>;

    /// Fills `starts` (S long) with the position within the row of each token's document's first token: 0 where the
    /// document began before the row. `ids` are the row's. Unless overridden each row is one document.
    ///
    /// # Errors
    /// If the row cannot be read.
    fn starts(&self, _index: u64, _ids: &[i32], starts: &mut [i32]) -> Result<()> {
        starts.fill(0);
        Ok(())
    }
}
