//! page
use super::{log::Run, memory::MemoryReport};
/// page
pub fn page(_t: &str, _l: Option<&Run>, _m: Option<&MemoryReport>) -> String {
    String::new()
}
