//! What the host must not forget when one of its processes dies: kept in a memfd that never reaches a guest.
//!
//! The state is a list of numbered fields. A reader takes the fields it knows and steps over the others, so the last
//! release reads what the next one wrote and the other way round. Two slots are written in turn, and each carries a
//! count and a checksum, so that a process that dies while writing leaves the previous state readable.

use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Numbers of the fields. A number is never used again for anything else.
pub mod field {
    /// Generation of the connection, u64.
    pub const GENERATION: u16 = 1;
    /// Identifies the connection, u64.
    pub const PEER_ID: u16 = 2;
    /// One ring: window offsets and length (three u64), largest payload (u64).
    pub const RING: u16 = 3;
    /// Offload groups that are in use, u64.
    pub const FEATURES: u16 = 4;
    /// Sequence number of the last verb (u32), and its reply.
    pub const LAST_REPLY: u16 = 5;
}

/// A numbered field: a number, and bytes whose meaning the number gives.
pub type Field = (u16, Vec<u8>);

/// A connection's private state.
#[derive(Debug)]
pub struct PrivateState {
    file: File,
    count: u64,
}

impl PrivateState {
    /// Fresh, empty state.
    pub fn create() -> io::Result<Self> {
        let file = rustix::fs::memfd_create("vbus-private-state", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, 2 * SLOT_LENGTH)?;
        Ok(Self { file: File::from(file), count: 0 })
    }

    /// State that another process wrote, and its fields.
    pub fn open(file: OwnedFd) -> io::Result<(Self, Vec<Field>)> {
        let file = File::from(file);
        let slots = [read_slot(&file, 0)?, read_slot(&file, 1)?];
        let newest = slots.into_iter().flatten().max_by_key(|(count, _)| *count);
        let (count, fields) = newest.unwrap_or_default();
        Ok((Self { file, count }, fields))
    }

    /// Replaces all fields.
    pub fn store(&mut self, fields: &[Field]) -> io::Result<()> {
        let mut body = Vec::new();
        for (number, bytes) in fields {
            let length = u16::try_from(bytes.len()).map_err(|_| io::Error::other("a field is too long"))?;
            body.extend_from_slice(&number.to_le_bytes());
            body.extend_from_slice(&length.to_le_bytes());
            body.extend_from_slice(bytes);
        }
        if body.len() as u64 > SLOT_LENGTH - SLOT_HEADER_LENGTH {
            return Err(io::Error::other("the private state does not fit its slot"));
        }
        let count = self.count.wrapping_add(1);
        let slot = (count % 2).wrapping_mul(SLOT_LENGTH);
        self.file.write_all_at(&body, slot.wrapping_add(SLOT_HEADER_LENGTH))?;
        let mut header = Vec::with_capacity(SLOT_HEADER_LENGTH as usize);
        header.extend_from_slice(&count.to_le_bytes());
        header.extend_from_slice(&(body.len() as u64).to_le_bytes());
        header.extend_from_slice(&checksum(count, &body).to_le_bytes());
        self.file.write_all_at(&header, slot)?;
        self.count = count;
        Ok(())
    }

    /// The descriptor to keep and hand over.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

const SLOT_LENGTH: u64 = 16 * 1024;
const SLOT_HEADER_LENGTH: u64 = 24;

fn read_slot(file: &File, slot: u64) -> io::Result<Option<(u64, Vec<Field>)>> {
    let mut bytes = vec![0; SLOT_LENGTH as usize];
    file.read_exact_at(&mut bytes, slot.wrapping_mul(SLOT_LENGTH))?;
    let (header, body) = bytes.split_at(SLOT_HEADER_LENGTH as usize);
    let word = |index: usize| {
        let bytes = header.chunks_exact(8).nth(index).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    let (count, length, sum) = (word(0), word(1), word(2));
    let Some(mut rest) = body.get(..length as usize).filter(|body| count > 0 && sum == checksum(count, body)) else {
        return Ok(None);
    };
    let mut fields = Vec::new();
    while let Some((&[n0, n1, l0, l1], after)) = rest.split_first_chunk::<4>() {
        let length = usize::from(u16::from_le_bytes([l0, l1]));
        let Some((bytes, next)) = after.split_at_checked(length) else { return Ok(None) };
        fields.push((u16::from_le_bytes([n0, n1]), bytes.to_vec()));
        rest = next;
    }
    Ok(Some((count, fields)))
}

/// FNV-1a: enough to tell a torn write from a whole one; nobody hostile can write here.
fn checksum(count: u64, body: &[u8]) -> u64 {
    count
        .to_le_bytes()
        .iter()
        .chain(body)
        .fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
