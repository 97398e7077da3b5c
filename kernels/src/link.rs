//! skeleton
#![allow(missing_docs)]
use crate::{DType, Result};
use std::{net::SocketAddr, time::Duration};
pub struct LinkOptions { pub deadline: Duration }
pub struct Link { rank: u32, world: u32 }
impl Link {
    pub fn rendezvous(rank: u32, world: u32, _master: SocketAddr, _timeout: Duration, _options: LinkOptions) -> Result<Link> { Ok(Link { rank, world }) }
    pub fn in_process(world: u32, _options: LinkOptions) -> Result<Vec<Link>> { Ok((0..world).map(|rank| Link { rank, world }).collect()) }
    pub fn rank(&self) -> u32 { self.rank }
    pub fn world(&self) -> u32 { self.world }
    pub fn exchange(&self, m: &[u8]) -> Result<Vec<Vec<u8>>> { Ok(vec![m.to_vec()]) }
    pub fn all_gather(&self, _full: &mut [u8]) -> Result<()> { Ok(()) }
    pub fn reduce_scatter(&self, _d: DType, _full: &mut [u8], _out: Option<&mut [u8]>) -> Result<()> { Ok(()) }
    pub fn all_reduce(&self, _d: DType, _data: &mut [u8]) -> Result<()> { Ok(()) }
    pub fn abandon(&self) {}
}
