//! A port that sends every frame back: for measuring rings and pump without a kernel behind them, and for tests.

use super::Port;
use crate::offload::{Groups, HEADER_LENGTH};
use crate::queue::Pieces;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

/// Frames that wait at most; the next one has to wait.
const MOST_FRAMES: usize = 64;

/// Gives back what was sent, in order.
#[derive(Debug, Default)]
pub struct Loopback {
    frames: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
}

impl Port for Loopback {
    fn receive(&mut self, header: &mut [u8; HEADER_LENGTH], room: Pieces<'_>) -> io::Result<usize> {
        let frame = self.frames.pop_front().ok_or(io::ErrorKind::WouldBlock)?;
        let (front, mut rest) = frame.split_at_checked(HEADER_LENGTH).unwrap_or_default();
        header.iter_mut().zip(front).for_each(|(to, from)| *to = *from);
        let length = rest.len();
        for piece in room.into_iter().flatten() {
            let (now, later) = rest.split_at(rest.len().min(piece.len()));
            piece.copy_from(now);
            rest = later;
        }
        self.spare.push(frame);
        Ok(length)
    }

    fn send(&mut self, front: &[u8], rest: Pieces<'_>) -> io::Result<()> {
        if self.frames.len() >= MOST_FRAMES {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut frame = self.spare.pop().unwrap_or_default();
        frame.clear();
        frame.extend_from_slice(front);
        for piece in rest.into_iter().flatten() {
            let start = frame.len();
            frame.resize(start.saturating_add(piece.len()), 0);
            if let Some(target) = frame.get_mut(start..) {
                piece.copy_to(target);
            }
        }
        self.frames.push_back(frame);
        Ok(())
    }

    fn readiness(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn set_offloads(&mut self, groups: Groups) -> io::Result<Groups> {
        Ok(groups)
    }

    fn set_carrier(&mut self, _up: bool) -> io::Result<()> {
        Ok(())
    }
}
