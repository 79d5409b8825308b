//! Namespaces of our own, so that a run needs no root and touches nothing on the host.

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::process::{getegid, geteuid};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Where sockets and the names of network namespaces live: a file system of our own, in memory.
pub const DIRECTORY: &str = "/run";

/// Moves the process into a user namespace (if it is not root already), a network namespace and a mount namespace of its
/// own. The process must have one thread.
pub fn enter_own() -> Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    // SAFETY: the process has one thread, and no descriptor table or working directory is shared afterwards.
    let privileged = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) };
    if let Err(error) = privileged {
        if error != rustix::io::Errno::PERM {
            bail!("cannot create network and mount namespaces: {error}");
        }
        let flags = UnshareFlags::NEWUSER | UnshareFlags::NEWNET | UnshareFlags::NEWNS;
        // SAFETY: as above.
        unsafe { rustix::thread::unshare_unsafe(flags) }.map_err(user_namespaces_are_off)?;
        map_user(user, group).context("cannot set up the user namespace")?;
    }
    let private = MountPropagationFlags::REC | MountPropagationFlags::PRIVATE;
    mount_change("/", private).map_err(user_namespaces_are_off)?;
    mount("vbus-ab", DIRECTORY, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755")
        .with_context(|| format!("cannot mount a file system of our own at {DIRECTORY}"))?;
    fs::create_dir(Path::new(DIRECTORY).join("netns")).context("cannot create a directory for namespaces")?;
    Ok(())
}

/// Says what to do where this kernel or this system lets ordinary users have no user namespace.
fn user_namespaces_are_off(error: rustix::io::Errno) -> anyhow::Error {
    anyhow::anyhow!(
        "cannot create a user namespace ({error}): they are switched off on this system.\n\
         Run vbus-ab as root, or switch them on, whichever of these exists:\n  \
         sysctl user.max_user_namespaces=10000\n  \
         sysctl kernel.unprivileged_userns_clone=1                 (Debian)\n  \
         sysctl kernel.apparmor_restrict_unprivileged_userns=0     (Ubuntu)"
    )
}

/// The caller is root inside, and nobody else exists there.
fn map_user(user: u32, group: u32) -> Result<()> {
    let write = |file: &str, text: String| fs::write(file, text).with_context(|| format!("cannot write {file}"));
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/uid_map", format!("0 {user} 1"))?;
    write("/proc/self/gid_map", format!("0 {group} 1"))
}

/// A network namespace that has a name, as `ip netns` gives one.
#[derive(Debug)]
pub struct NetworkNamespace {
    /// The name.
    pub name: String,
    file: File,
}

impl NetworkNamespace {
    /// Creates one; the calling thread is in it afterwards.
    pub fn create(name: &str) -> Result<Self> {
        // SAFETY: a new network namespace affects sockets that this thread opens later, and nothing else.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.context("cannot create a network namespace")?;
        let path = Self::path(name);
        File::create_new(&path).with_context(|| format!("cannot create {}", path.display()))?;
        mount_bind("/proc/thread-self/ns/net", &path).with_context(|| format!("cannot name the namespace {name}"))?;
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // Neighbour discovery would be load that nobody asked for. Best effort: /proc/sys may be read-only in a container.
        let _ = fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
        let _ = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
        venet::port::interface::Interfaces::open()?.set_up("lo", true).context("cannot set lo up")?;
        Ok(Self { name: name.into(), file })
    }

    /// Moves the calling thread into it.
    pub fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| format!("cannot enter the network namespace {}", self.name))
    }

    /// A descriptor of it.
    pub fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn path(name: &str) -> PathBuf {
        Path::new(DIRECTORY).join("netns").join(name)
    }
}
