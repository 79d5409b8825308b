//! The data process, as the supervisor holds it: started, told what to do, and ended.

use crate::channel::{self, Order};
use crate::supervisor::Reexecute;
use anyhow::{Context, Result};
use rustix::net::SocketType;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long the data process may take to end when asked.
const PATIENCE_AT_THE_END: Duration = Duration::from_secs(2);

pub(crate) struct DataProcessHandle {
    /// Orders and answers; its end is the end of the data process.
    pub(crate) socket: OwnedFd,
    child: Child,
    started: Instant,
}

impl DataProcessHandle {
    pub(crate) fn spawn(reexecute: &Reexecute, user: &str) -> Result<Self> {
        let (family, kind) = (rustix::net::AddressFamily::UNIX, SocketType::SEQPACKET);
        let (ours, theirs) = rustix::net::socketpair(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1 << 20)?;
        // What runs now, even if its file was replaced or is out of sight.
        let child = Command::new("/proc/self/exe")
            .arg0("host-bridge")
            .args(&reexecute.0)
            .arg(user)
            .stdin(theirs)
            .stdout(std::process::Stdio::null())
            .spawn()
            .context("cannot start this program again as data process")?;
        Ok(Self { socket: ours, child, started: Instant::now() })
    }

    /// Whether it gave up right after its start, by itself: its successor would as well.
    pub(crate) fn gave_up(&self, status: ExitStatus) -> bool {
        status.code().is_some() && self.started.elapsed() < Duration::from_secs(1)
    }

    /// Its process number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends an order that a data process which just ended no longer needs: its successor starts with no guest. One that
    /// lives and does not read would go on without the order, and serve a guest that is gone: it is killed.
    pub(crate) fn tell(&mut self, order: &Order) {
        match channel::send(self.socket.as_fd(), order, &[]) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                tracing::error!("the data process does not read its orders and is killed");
                let _ = self.child.kill();
            }
            Err(error) => tracing::debug!("the data process cannot be told: {error}"),
            Ok(()) => {}
        }
    }

    /// Asks it to end, and makes it end if it does not.
    pub(crate) fn end(&mut self) -> Result<ExitStatus> {
        // The end of the socket ends the data process, and with it the last descriptors of the TAPs.
        if let Ok(replacement) = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC) {
            self.socket = replacement;
        }
        if !self.ends_within(PATIENCE_AT_THE_END) {
            tracing::error!("the data process does not end by itself and is killed");
            let _ = self.child.kill();
        }
        Ok(self.child.wait()?)
    }

    /// Waits for its end; `false` if it did not come.
    fn ends_within(&mut self, limit: Duration) -> bool {
        let asked = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if asked.elapsed() < limit => std::thread::sleep(Duration::from_millis(1)),
                Ok(None) => return false,
                Ok(Some(_)) | Err(_) => return true,
            }
        }
    }
}
