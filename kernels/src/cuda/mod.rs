//! placeholder of branch `cu`; the real one comes from branch `cuda` and needs the modules named here.

pub(crate) mod launch;
mod launch_attention;
mod launch_update;
pub(crate) mod modules;
pub mod nvrtc;
pub mod programs;

use crate::DType;

/// Elements on the device.
#[derive(Clone, Copy)]
pub(crate) struct Ptr {
    pub address: u64,
    pub dtype: DType,
    pub elements: u64,
}
