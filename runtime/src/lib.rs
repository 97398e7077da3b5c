//! Where bytes are, and when they move: chunks, tiers, ticks and plans.
//!
//! No mathematics, no model, no printing: a trainer describes groups of tensors ([`layout`]), says what it
//! uses when by simply running ([`schedule`]), and gets leases on chunks from [`tensor_mgr`]. The modules
//! stand in the order in which they are best read, which is also the order of dependency.
#![forbid(unsafe_code)]

pub mod chunk;
pub mod clock;
pub mod error;
pub mod fence;
pub mod layout;
pub mod ledger;
pub mod limits;
pub mod mem_stats;
pub mod plan;
pub mod policy;
pub mod region;
pub mod schedule;
pub mod tensor_mgr;
pub mod timeline;
pub mod transfer;
pub mod units;

pub use error::{Error, Result};
pub use ledger::Category;
pub use schedule::{Access, Part, Pass};
pub use tensor_mgr::{Contribution, Lease, StatefulTensorMgr};
pub use units::{Bytes, ChunkId, GroupId, Role, Tick};
