//! Listening sockets: a stale one is replaced, a live one refused, and mode and group are right from the start.

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, CWD, Gid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A listening UNIX socket; its path is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    inode: u64,
}

impl Listener {
    /// Listens at `path`. Two daemons that start at once cannot both have it: the loser finds it live.
    pub fn bind(path: &Path, kind: SocketType, mode: u32, group: Option<&str>) -> Result<Self> {
        let address = SocketAddrUnix::new(path)
            .with_context(|| format!("{} is no path for a socket: at most 107 bytes", path.display()))?;
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        }
        remove_stale(path, &address, kind)?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        // Nobody but us until group and mode are set.
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o777));
        let bound = rustix::net::bind(&socket, &address);
        rustix::process::umask(before);
        bound.with_context(|| format!("cannot bind {}", path.display()))?;
        if let Some(group) = group {
            let gid = group_id(group)?;
            rustix::fs::chownat(CWD, path, None, Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .with_context(|| format!("cannot give {} to group {group}", path.display()))?;
        }
        rustix::fs::chmod(path, rustix::fs::Mode::from_raw_mode(mode))
            .with_context(|| format!("cannot set the mode of {}", path.display()))?;
        rustix::net::listen(&socket, 16)?;
        let inode = rustix::fs::stat(path)?.st_ino;
        Ok(Self { socket, path: path.into(), inode })
    }

    /// The socket to accept from.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// The next connection; `None` if there is none now.
    pub fn accept(&self) -> Option<OwnedFd> {
        rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Only if it still is ours.
        if rustix::fs::stat(&self.path).is_ok_and(|stat| stat.st_ino == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn remove_stale(path: &Path, address: &SocketAddrUnix, kind: SocketType) -> Result<()> {
    let Ok(stat) = rustix::fs::lstat(path) else { return Ok(()) };
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_socket() {
        bail!("{} exists and is no socket; remove it or choose another path", path.display());
    }
    let probe =
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    match rustix::net::connect(&probe, address) {
        Err(rustix::io::Errno::CONNREFUSED) => {
            std::fs::remove_file(path).with_context(|| format!("cannot remove the stale socket {}", path.display()))
        }
        Err(rustix::io::Errno::NOENT) => Ok(()),
        _ => bail!("{} is in use by another process; stop that one first, or choose another path", path.display()),
    }
}

fn group_id(name: &str) -> Result<Gid> {
    let text = CString::new(name).context("a group's name contains no zero byte")?;
    // SAFETY: getgrnam reads a string; the supervisor has one thread, so the static result is not overwritten before it is
    // read.
    let entry = unsafe { libc::getgrnam(text.as_ptr()).as_ref() };
    let entry = entry.with_context(|| format!("there is no group {name:?}"))?;
    Ok(Gid::from_raw(entry.gr_gid))
}
