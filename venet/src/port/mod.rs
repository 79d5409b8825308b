//! Where frames go: a TAP on a bridge, or back to where they came from.

pub mod interface;
pub mod loopback;
pub mod tap;

use crate::offload::{Groups, HEADER_LENGTH};
use crate::queue::Pieces;
use std::io;
use std::os::fd::BorrowedFd;

/// A place that frames come from and go to. Nothing blocks: `WouldBlock` says that the port is empty or full.
pub trait Port {
    /// Reads one frame into `room` and its offload header into `header`. Returns the frame's bytes; as many as the room
    /// has means that the frame was longer.
    fn receive(&mut self, header: &mut [u8; HEADER_LENGTH], room: Pieces<'_>) -> io::Result<usize>;

    /// Sends one frame: `front` starts with the offload header, the frame follows, and goes on in `rest`.
    fn send(&mut self, front: &[u8], rest: Pieces<'_>) -> io::Result<()>;

    /// What to watch, edge-triggered, for both directions. `None` if the port never makes anybody wait.
    fn readiness(&self) -> Option<BorrowedFd<'_>>;

    /// The groups that frames from and to this port may make use of from now on. Returns those that the port accepts, which
    /// may be fewer.
    fn set_offloads(&mut self, groups: Groups) -> io::Result<Groups>;

    /// Shows to the other end of the port whether frames pass.
    fn set_carrier(&mut self, up: bool) -> io::Result<()>;
}
