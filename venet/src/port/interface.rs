//! Network interfaces by ioctl: up and down, MTU, address, bridge membership.
//!
//! All of it works on the network namespace of the calling thread. Source: `netdevice(7)`, and for bridges the kernel's
//! `include/uapi/linux/sockios.h`.

use core::mem::{size_of, zeroed};
use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};

/// From `include/uapi/linux/sockios.h`.
const SIOCBRADDBR: libc::c_ulong = 0x89a0;
/// From `include/uapi/linux/sockios.h`.
const SIOCBRADDIF: libc::c_ulong = 0x89a2;

/// Does something to one interface of the calling thread's network namespace.
#[derive(Debug)]
pub struct Interfaces(OwnedFd);

impl Interfaces {
    /// A handle to the interfaces of the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        let (family, kind) = (rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM);
        Ok(Self(rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?))
    }

    /// The index of an interface. `NotFound` if there is none of that name.
    pub fn index(&self, name: &str) -> io::Result<u32> {
        let request = self.ioctl(libc::SIOCGIFINDEX, name, |_| {})?;
        // SAFETY: SIOCGIFINDEX filled in the index.
        Ok(unsafe { request.ifr_ifru.ifru_ifindex } as u32)
    }

    /// Whether an interface is set up.
    pub fn is_up(&self, name: &str) -> io::Result<bool> {
        Ok(self.flags(name)? & libc::IFF_UP as libc::c_short != 0)
    }

    /// Whether an interface is up and has a carrier.
    pub fn is_running(&self, name: &str) -> io::Result<bool> {
        Ok(self.flags(name)? & libc::IFF_RUNNING as libc::c_short != 0)
    }

    /// Sets an interface up or down.
    pub fn set_up(&self, name: &str, up: bool) -> io::Result<()> {
        let flags = self.flags(name)?;
        let bit = libc::IFF_UP as libc::c_short;
        let flags = if up { flags | bit } else { flags & !bit };
        self.ioctl(libc::SIOCSIFFLAGS, name, |request| request.ifr_ifru.ifru_flags = flags).map(drop)
    }

    /// Payload of the longest frame in bytes.
    pub fn mtu(&self, name: &str) -> io::Result<u32> {
        let request = self.ioctl(libc::SIOCGIFMTU, name, |_| {})?;
        // SAFETY: SIOCGIFMTU filled in the MTU.
        Ok(unsafe { request.ifr_ifru.ifru_mtu } as u32)
    }

    /// Sets the MTU.
    pub fn set_mtu(&self, name: &str, mtu: u32) -> io::Result<()> {
        self.ioctl(libc::SIOCSIFMTU, name, |request| request.ifr_ifru.ifru_mtu = mtu as libc::c_int).map(drop)
    }

    /// Sets the length of the transmit queue in frames.
    pub fn set_transmit_queue_length(&self, name: &str, frames: u32) -> io::Result<()> {
        // The kernel's ifr_qlen shares its place with the metric.
        self.ioctl(libc::SIOCSIFTXQLEN, name, |request| request.ifr_ifru.ifru_metric = frames as libc::c_int).map(drop)
    }

    /// The hardware address.
    pub fn mac(&self, name: &str) -> io::Result<[u8; 6]> {
        let request = self.ioctl(libc::SIOCGIFHWADDR, name, |_| {})?;
        // SAFETY: SIOCGIFHWADDR filled in the address.
        let address = unsafe { request.ifr_ifru.ifru_hwaddr };
        let mut mac = [0; 6];
        mac.iter_mut().zip(address.sa_data).for_each(|(to, from)| *to = from as u8);
        Ok(mac)
    }

    /// Sets the hardware address.
    pub fn set_mac(&self, name: &str, mac: [u8; 6]) -> io::Result<()> {
        self.ioctl(libc::SIOCSIFHWADDR, name, |request| {
            // SAFETY: an all-zero sockaddr is valid.
            let mut address: libc::sockaddr = unsafe { zeroed() };
            address.sa_family = libc::ARPHRD_ETHER;
            address.sa_data.iter_mut().zip(mac).for_each(|(to, from)| *to = from as libc::c_char);
            request.ifr_ifru.ifru_hwaddr = address;
        })
        .map(drop)
    }

    /// Gives the interface an address.
    pub fn add_address(&self, name: &str, address: IpAddr, prefix: u8) -> io::Result<()> {
        match address {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32u32.saturating_sub(u32::from(prefix))).unwrap_or(0);
                let set = |request, address| {
                    self.ioctl(request, name, |request| request.ifr_ifru.ifru_addr = ipv4(address)).map(drop)
                };
                set(libc::SIOCSIFADDR, address)?;
                set(libc::SIOCSIFNETMASK, Ipv4Addr::from(mask))
            }
            IpAddr::V6(address) => {
                let (family, kind) = (rustix::net::AddressFamily::INET6, rustix::net::SocketType::DGRAM);
                let socket = rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
                let request = libc::in6_ifreq {
                    ifr6_addr: libc::in6_addr { s6_addr: address.octets() },
                    ifr6_prefixlen: u32::from(prefix),
                    ifr6_ifindex: self.index(name)? as libc::c_int,
                };
                // SAFETY: SIOCSIFADDR on an IPv6 socket reads one in6_ifreq.
                check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &request) }).or_else(already_there)
            }
        }
    }

    /// Creates a bridge.
    pub fn create_bridge(&self, name: &str) -> io::Result<()> {
        let request = request(name)?;
        // SAFETY: SIOCBRADDBR reads a name with its terminating zero.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), SIOCBRADDBR, request.ifr_name.as_ptr()) })
    }

    /// Whether `name` is a bridge. Needs CAP_NET_ADMIN.
    pub fn is_bridge(&self, name: &str) -> io::Result<bool> {
        // No interface has the index 0, so that this changes nothing: a bridge says so, and anything else is no bridge.
        match self.ioctl(SIOCBRADDIF, name, |request| request.ifr_ifru.ifru_ifindex = 0) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(true),
            Err(error) => Err(error),
            Ok(_) => Ok(true),
        }
    }

    /// Makes `port` a port of `bridge`; it may be one already.
    pub fn join_bridge(&self, bridge: &str, port: &str) -> io::Result<()> {
        let index = self.index(port)? as libc::c_int;
        self.ioctl(SIOCBRADDIF, bridge, |request| request.ifr_ifru.ifru_ifindex = index).map(drop)
    }

    fn flags(&self, name: &str) -> io::Result<libc::c_short> {
        let request = self.ioctl(libc::SIOCGIFFLAGS, name, |_| {})?;
        // SAFETY: SIOCGIFFLAGS filled in the flags.
        Ok(unsafe { request.ifr_ifru.ifru_flags })
    }

    fn ioctl(&self, number: libc::c_ulong, name: &str, fill: impl FnOnce(&mut libc::ifreq)) -> io::Result<libc::ifreq> {
        let mut request = request(name)?;
        fill(&mut request);
        // SAFETY: all requests that are used here read and write one ifreq.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), number as libc::Ioctl, &mut request) })?;
        Ok(request)
    }
}

/// A request about the interface `name`. `InvalidInput` if no interface can have that name.
pub(super) fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let bad = name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '\0', ':', ' ']);
    if bad {
        let message = format!("{name:?} is no interface name: at most 15 characters, none of them /, : or a space");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    request.ifr_name.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as libc::c_char);
    Ok(request)
}

/// The name of an interface by its index, in the calling thread's network namespace.
pub fn name_of(index: u32) -> io::Result<String> {
    let mut name = [0; libc::IFNAMSIZ];
    // SAFETY: if_indextoname writes at most IFNAMSIZ bytes.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
    if found.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: if_indextoname wrote a string with its terminating zero.
    Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
}

fn ipv4(address: Ipv4Addr) -> libc::sockaddr {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
        sin_zero: [0; 8],
    };
    const { assert!(size_of::<libc::sockaddr_in>() == size_of::<libc::sockaddr>()) };
    // SAFETY: both are plain data of the same size; that is how the sockets interface passes addresses.
    unsafe { core::mem::transmute(address) }
}

fn already_there(error: io::Error) -> io::Result<()> {
    if error.raw_os_error() == Some(libc::EEXIST) { Ok(()) } else { Err(error) }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
