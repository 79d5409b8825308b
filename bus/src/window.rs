//! The window: the one region of memory that host and guest share, and the rings in it.
//!
//! Guarantees of [`Window`]: the memory behind it cannot shrink while it is mapped (sealed memfd, checked by both
//! sides), so an access never faults; every access is either one atomic word or a copy to or from private memory. No
//! Rust reference to plain data in the window is ever made, not even for a moment; references to atomics are.

use crate::abi::{
    ABI_MAJOR, CACHE_LINE, HOST_GENERATION_OFFSET, RESET_GENERATION_OFFSET, RING_WORDS_LENGTH, RingLocation,
    WINDOW_MAGIC, WindowHeader,
};
use crate::ring::{Extent, FenceSite, RingMemory, Word};
use core::fmt;
use core::mem::size_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};
use zerocopy::{FromZeros, IntoBytes};

const MAGIC_OFFSET: u64 = 0;
const MAGIC_LENGTH: usize = size_of::<u64>();

/// Largest window that a guest accepts from a host. Bytes.
pub const LARGEST_WINDOW: u64 = 1 << 30;

/// A mapped window. Cheap to share by [`Arc`].
pub struct Window {
    region: MmapRegion,
    file: Arc<File>,
    size: u64,
}

/// Why a window cannot be created or used.
#[derive(Debug, Error)]
pub enum WindowError {
    /// The system refused the memory.
    #[error("cannot {action} a window of {size} bytes: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Bytes.
        size: u64,
        /// The reason.
        source: io::Error,
    },
    /// The size is not a power of two, or too small or large.
    #[error("{0} bytes is no size for a window: it must be a power of two from 4096 to {LARGEST_WINDOW}")]
    Size(u64),
    /// The other side could shrink the memory under us.
    #[error("the window that the host passed is not sealed against shrinking")]
    NotSealed,
    /// Not a window.
    #[error("the memory that the host passed does not start with the magic of a vbus window")]
    NoMagic,
    /// The two ABIs do not fit.
    #[error(
        "the host's window has ABI {major}.{minor}, this side speaks {ABI_MAJOR}.{}: use matching versions",
        crate::abi::ABI_MINOR
    )]
    Version {
        /// Of the host.
        major: u16,
        /// Of the host.
        minor: u16,
    },
    /// A ring lies outside the window, or not on a cache line.
    #[error("a ring at {0:?} does not lie inside the window")]
    Location(RingLocation),
}

impl Window {
    /// Creates a window of zeroes: sealed, and pre-faulted so that the data path never waits for a page.
    ///
    /// `size` is in bytes, a power of two. For the host.
    pub fn create(size: u64) -> Result<Self, WindowError> {
        let fail = |action| move |errno: rustix::io::Errno| WindowError::System { action, size, source: errno.into() };
        let file = rustix::fs::memfd_create("vbus-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(fail("create"))?;
        check_size(size)?;
        rustix::fs::ftruncate(&file, size).map_err(fail("allocate"))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(fail("seal"))?;
        Self::map(file, size)
    }

    /// Maps a window that the host created. The header's constant fields are checked, here and only here.
    ///
    /// For the guest.
    pub fn open(file: OwnedFd) -> Result<Self, WindowError> {
        let window = Self::adopt(file)?;
        if !window.has_header() {
            return Err(WindowError::NoMagic);
        }
        let header = window.header();
        if header.abi_major != ABI_MAJOR {
            return Err(WindowError::Version { major: header.abi_major, minor: header.abi_minor });
        }
        if header.window_size != window.size {
            return Err(WindowError::Size(header.window_size));
        }
        Ok(window)
    }

    /// Maps a window whose header means nothing yet. For a process of the host that was handed it.
    pub fn adopt(file: OwnedFd) -> Result<Self, WindowError> {
        let fail = |errno: rustix::io::Errno| WindowError::System { action: "open", size: 0, source: errno.into() };
        // The seals first: a size that was read before them may be another one by now.
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(fail)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(WindowError::NotSealed);
        }
        let stat = rustix::fs::fstat(&file).map_err(fail)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        check_size(size)?;
        Self::map(file, size)
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The descriptor to pass on.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A copy of the header. The host never relies on it: its own layout is private.
    pub fn header(&self) -> WindowHeader {
        let mut header = WindowHeader::new_zeroed();
        if let Ok(slice) = self.region.get_slice(0, size_of::<WindowHeader>()) {
            slice.copy_to(header.as_mut_bytes());
        }
        header
    }

    /// Writes the header, its magic last. For the host, before the guest has the window.
    ///
    /// This may happen in another process than the one that passes the window on. Without an order, that one could see some
    /// field while others are still being copied, and the guest would read zeroes for the places of its rings.
    pub fn write_header(&self, header: &WindowHeader) {
        let bytes = header.as_bytes().get(MAGIC_LENGTH..).unwrap_or_default();
        if let Ok(slice) = self.region.get_slice(MAGIC_LENGTH, bytes.len()) {
            slice.copy_from(bytes);
        }
        // Release: who sees the magic sees everything that was written above, see `has_header`.
        self.word(MAGIC_OFFSET, |word| {
            word.store(header.magic, Ordering::Release);
            0
        });
    }

    /// Whether [`Self::write_header`] is done, in whatever process.
    pub fn has_header(&self) -> bool {
        // Acquire: pairs with the store of the magic, so that what is done with the window from here on, be it to pass it to
        // a guest, comes after all of the header.
        self.word(MAGIC_OFFSET, |word| word.load(Ordering::Acquire)) == WINDOW_MAGIC
    }

    /// How many resets the host has completed.
    pub fn host_generation(&self) -> u64 {
        // Acquire: a guest that sees the new generation must see the zeroed indices as well.
        self.word(HOST_GENERATION_OFFSET, |word| word.load(Ordering::Acquire))
    }

    /// Publishes the end of a reset. For the host.
    pub fn set_host_generation(&self, generation: u64) {
        // Release: see `host_generation`.
        self.word(HOST_GENERATION_OFFSET, |word| {
            word.store(generation, Ordering::Release);
            0
        });
    }

    /// The generation that the guest wants next. For the host; the guest may write anything here.
    pub fn reset_generation(&self) -> u64 {
        // Acquire: pairs with the guest's store, which follows its last access to the rings.
        self.word(RESET_GENERATION_OFFSET, |word| word.load(Ordering::Acquire))
    }

    /// Asks for a reset; the guest then rings vector 0. For the guest.
    pub fn set_reset_generation(&self, generation: u64) {
        // Release: our accesses to the rings of the old generation come first.
        self.word(RESET_GENERATION_OFFSET, |word| {
            word.store(generation, Ordering::Release);
            0
        });
    }

    fn map(file: OwnedFd, size: u64) -> Result<Self, WindowError> {
        let fail = |source| WindowError::System { action: "map", size, source };
        let length = usize::try_from(size).map_err(|_| WindowError::Size(size))?;
        let file = Arc::new(File::from(file));
        let region = MmapRegion::build(
            Some(FileOffset::from_arc(Arc::clone(&file), 0)),
            length,
            (ProtFlags::READ | ProtFlags::WRITE).bits() as i32,
            (MapFlags::SHARED | MapFlags::POPULATE).bits() as i32,
        )
        .map_err(|error| fail(io::Error::other(error)))?;
        Ok(Self { region, file, size })
    }

    fn word(&self, offset: u64, access: impl FnOnce(&AtomicU64) -> u64) -> u64 {
        self.region.get_atomic_ref::<AtomicU64>(offset as usize).map_or(0, access)
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Window").field("size", &self.size).finish_non_exhaustive()
    }
}

fn check_size(size: u64) -> Result<(), WindowError> {
    if size.is_power_of_two() && (4096..=LARGEST_WINDOW).contains(&size) {
        Ok(())
    } else {
        Err(WindowError::Size(size))
    }
}

/// One ring of a window. The location was checked once; every access stays inside it.
#[derive(Debug)]
pub struct WindowRing {
    window: Arc<Window>,
    location: RingLocation,
    words: NonNull<u8>,
}

// SAFETY: `words` points into the mapping that `window` keeps alive, and is only used for atomic accesses. It outlives the
// guard that it came from, which keeps nothing mapped by itself with vm-memory's mmap backend, the only one in use.
unsafe impl Send for WindowRing {}
// SAFETY: as above; all accesses through `&self` are atomic or copies that tolerate concurrent writers.
unsafe impl Sync for WindowRing {}

impl WindowRing {
    /// A ring at `location`, which is checked here.
    pub fn new(window: Arc<Window>, location: RingLocation) -> Result<Self, WindowError> {
        let inside = |offset: u64, length: u64| {
            offset.is_multiple_of(CACHE_LINE)
                && offset >= size_of::<WindowHeader>() as u64
                && offset.checked_add(length).is_some_and(|end| end <= window.size)
        };
        let usable = location.length.is_power_of_two()
            && inside(location.words, RING_WORDS_LENGTH)
            && inside(location.data, location.length);
        let words = window
            .region
            .get_slice(location.words as usize, RING_WORDS_LENGTH as usize)
            .ok()
            .filter(|_| usable)
            .and_then(|slice| NonNull::new(slice.ptr_guard_mut().as_ptr()));
        match words {
            Some(words) => Ok(Self { window, location, words }),
            None => Err(WindowError::Location(location)),
        }
    }

    /// A handle to some bytes of the records, for scatter and gather input and output. `None` if they are not inside.
    pub fn slice(&self, extent: Extent) -> Option<VolatileSlice<'_>> {
        let end = extent.offset.checked_add(extent.length)?;
        if end > self.location.length {
            return None;
        }
        let start = self.location.data.checked_add(extent.offset)?;
        self.window.region.get_slice(start as usize, extent.length as usize).ok()
    }

    /// Zeroes indices and arm words. For the host, during a reset.
    pub fn clear(&self) {
        // Relaxed: what tells the guest of the ring is published with Release after this: the new host generation for the
        // control rings, the reply to DEVSHM for those of a device.
        self.store(Word::Produced, 0, Ordering::Relaxed);
        self.store(Word::Consumed, 0, Ordering::Relaxed);
        self.store(Word::WakeAt, crate::abi::NOT_ARMED, Ordering::Relaxed);
        self.store(Word::SpaceWantedAt, crate::abi::NOT_ARMED, Ordering::Relaxed);
    }

    /// Where the ring lies.
    pub fn location(&self) -> RingLocation {
        self.location
    }

    fn atomic(&self, word: Word) -> &AtomicU64 {
        // SAFETY: `words` points at RING_WORDS_LENGTH bytes inside the mapping, on a cache line (checked in `new`);
        // `Word::offset` stays below that and is a multiple of 64; the mapping lives as long as `window`, hence as
        // `self`. The memory is shared with another process, which is what atomics are for.
        unsafe { AtomicU64::from_ptr(self.words.as_ptr().add(word.offset() as usize).cast()) }
    }
}

impl RingMemory for WindowRing {
    fn capacity(&self) -> u64 {
        self.location.length
    }

    fn load(&self, word: Word, order: Ordering) -> u64 {
        self.atomic(word).load(order)
    }

    fn store(&self, word: Word, value: u64, order: Ordering) {
        self.atomic(word).store(value, order);
    }

    fn full_fence(&self, _site: FenceSite) {
        // SeqCst: see the sites in `ring::signal`; nothing weaker orders a store before a later load.
        fence(Ordering::SeqCst);
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        if let Some(slice) = self.slice(Extent { offset, length: into.len() as u64 }) {
            slice.copy_to(into);
        }
    }

    fn write(&self, offset: u64, from: &[u8]) {
        if let Some(slice) = self.slice(Extent { offset, length: from.len() as u64 }) {
            slice.copy_from(from);
        }
    }

    fn copy_within(&self, from: u64, to: u64, length: u64) {
        let (source, target) = (self.slice(Extent { offset: from, length }), self.slice(Extent { offset: to, length }));
        if let (Some(source), Some(target)) = (source, target) {
            source.copy_to_volatile_slice(target);
        }
    }
}
