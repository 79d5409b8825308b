//! What the data process gives up before it touches anything that a guest can influence.

use anyhow::{Context, Result};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::ffi::CString;

/// Gives up root, all groups and all capabilities, for good.
///
/// In a user namespace that maps only one user there is no other user to become; then the process stays the one that it
/// is, without capabilities. Returns whether another user was there.
pub fn drop_all(user: &str) -> Result<bool> {
    rustix::thread::set_no_new_privs(true).context("cannot set no_new_privs")?;
    // Before the user changes, since dropping from the bounding set needs a capability that root has.
    for number in 0..64 {
        // SAFETY: PR_CAPBSET_DROP takes a number; one that the kernel does not know, or that needs a capability which is
        // not there, is refused without harm.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) };
    }
    let became = if rustix::process::geteuid().is_root() { become_user(user)? } else { true };
    let nothing = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, nothing).context("cannot give up capabilities")?;
    Ok(became)
}

fn become_user(user: &str) -> Result<bool> {
    let name = CString::new(user).context("a user's name contains no zero byte")?;
    // SAFETY: getpwnam reads a string; the process has one thread, so the static result is not overwritten before it is read.
    let entry = unsafe { libc::getpwnam(name.as_ptr()).as_ref() };
    let entry = entry.with_context(|| format!("there is no user {user:?}; name another one in the configuration"))?;
    let (uid, gid) = (entry.pw_uid, entry.pw_gid);
    // SAFETY: plain system calls; the process has one thread.
    let groups = check(unsafe { libc::setgroups(0, core::ptr::null()) });
    // SAFETY: as above.
    let group = check(unsafe { libc::setresgid(gid, gid, gid) });
    // SAFETY: as above.
    let done = groups.and(group).and_then(|()| check(unsafe { libc::setresuid(uid, uid, uid) }));
    match done {
        Ok(()) => Ok(true),
        Err(_) if is_the_only_user() => Ok(false),
        Err(error) => {
            Err(error).with_context(|| format!("cannot become user {user:?}; it needs CAP_SETUID and CAP_SETGID"))
        }
    }
}

/// Whether this user namespace has no user but the one that we are.
fn is_the_only_user() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let counts = map.lines().map(|line| line.split_whitespace().nth(2).and_then(|count| count.parse::<u64>().ok()));
    counts.map(|count| count.unwrap_or(u64::MAX)).fold(0, u64::saturating_add) == 1
}

fn check(result: libc::c_int) -> std::io::Result<()> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
