//! What the command line says about arms and workloads: `NAME[:key=value,…]`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use venet::offload::Groups;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;

/// One configuration under comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    /// As it was given.
    pub text: String,
    /// What carries the frames.
    pub kind: ArmKind,
    /// Where the threads of the data path run.
    pub placement: Placement,
    /// When the pumps notify.
    pub policy: Policy,
    /// Offloads to offer and to ask for.
    pub offloads: Groups,
    /// The keys that were given, for the report.
    pub given: BTreeMap<String, String>,
}

/// What carries the frames of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmKind {
    /// Shims, rings and the daemon.
    Venet,
    /// One thread per guest that copies between its two TAPs: the floor.
    Forwarder,
    /// The kernel alone.
    Veth,
}

/// One load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// As it was given.
    pub text: String,
    /// What it does.
    pub kind: WorkloadKind,
    /// Bytes of one request and of one reply, of one write, or of one datagram.
    pub size: usize,
    /// How many of it at once.
    pub sessions: usize,
}

/// What a load does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadKind {
    /// One request and one reply at a time over TCP.
    TcpRequestResponse,
    /// From the first guest to the second over TCP.
    TcpStream,
    /// From the second guest to the first over TCP.
    TcpMaerts,
    /// From the first guest to the second, open loop: as fast as the sender's socket takes them.
    UdpStream,
}

/// The arms of a run without `--arm`.
pub const DEFAULT_ARMS: [&str; 3] = ["venet", "forwarder", "veth"];
/// The loads of a run without `--workload`.
pub const DEFAULT_WORKLOADS: [&str; 4] = ["tcp_rr", "tcp_stream", "tcp_maerts", "udp_stream"];

impl FromStr for Arm {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, mut keys) = split(text)?;
        let kind = match name {
            "venet" => ArmKind::Venet,
            "forwarder" => ArmKind::Forwarder,
            "veth" => ArmKind::Veth,
            _ => return Err(format!("there is no arm {name:?}: expected venet, forwarder or veth")),
        };
        let given = keys.clone();
        let mut placement = Placement::None;
        let mut policy = Policy::default();
        let mut offloads = Groups::ALL;
        if kind != ArmKind::Veth {
            take(&mut keys, "cpus", &mut placement)?;
            take(&mut keys, "offloads", &mut offloads)?;
        }
        if kind == ArmKind::Venet {
            take(&mut keys, "policy", &mut policy)?;
        }
        let known = match kind {
            ArmKind::Venet => "cpus, offloads and policy",
            ArmKind::Forwarder => "cpus and offloads",
            ArmKind::Veth => "none",
        };
        nothing_left(&keys, text, known)?;
        Ok(Self { text: text.into(), kind, placement, policy, offloads, given })
    }
}

impl FromStr for Workload {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, mut keys) = split(text)?;
        let (kind, size, sizes) = match name {
            "tcp_rr" => (WorkloadKind::TcpRequestResponse, 256, 1..=1 << 20),
            "tcp_stream" => (WorkloadKind::TcpStream, 1 << 16, 1..=1 << 20),
            "tcp_maerts" => (WorkloadKind::TcpMaerts, 1 << 16, 1..=1 << 20),
            "udp_stream" => (WorkloadKind::UdpStream, 1472, 1..=65507),
            _ => {
                let names = DEFAULT_WORKLOADS.join(", ");
                return Err(format!("there is no workload {name:?}: expected one of {names}"));
            }
        };
        let mut workload = Self { text: text.into(), kind, size, sessions: 1 };
        take(&mut keys, "size", &mut workload.size)?;
        take(&mut keys, "sessions", &mut workload.sessions)?;
        nothing_left(&keys, text, "size and sessions")?;
        if !sizes.contains(&workload.size) {
            return Err(format!("{text:?}: size must be from {} to {}", sizes.start(), sizes.end()));
        }
        if !(1..=1024).contains(&workload.sessions) {
            return Err(format!("{text:?}: sessions must be from 1 to 1024"));
        }
        Ok(workload)
    }
}

fn split(text: &str) -> Result<(&str, BTreeMap<String, String>), String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let mut keys = BTreeMap::new();
    for word in rest.split(',').filter(|word| !word.is_empty()) {
        let Some((key, value)) = word.split_once('=') else {
            return Err(format!("{text:?}: {word:?} is no key=value"));
        };
        if keys.insert(key.into(), value.into()).is_some() {
            return Err(format!("{text:?}: {key} is given twice"));
        }
    }
    Ok((name, keys))
}

fn take<T: FromStr<Err: fmt::Display>>(
    keys: &mut BTreeMap<String, String>,
    key: &str,
    into: &mut T,
) -> Result<(), String> {
    if let Some(value) = keys.remove(key) {
        *into = value.parse().map_err(|error| format!("{key}={value}: {error}"))?;
    }
    Ok(())
}

fn nothing_left(keys: &BTreeMap<String, String>, text: &str, known: &str) -> Result<(), String> {
    match keys.keys().next() {
        Some(key) => Err(format!("{text:?}: unknown key {key:?}; known are: {known}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_has_the_defaults_of_netperf() {
        let workload: Workload = "tcp_rr".parse().unwrap();
        assert_eq!((workload.size, workload.sessions, workload.text.as_str()), (256, 1, "tcp_rr"));
        assert_eq!("udp_stream".parse::<Workload>().unwrap().size, 1472);
    }

    #[test]
    fn keys_are_taken() {
        let arm: Arm = "venet:cpus=0+1,policy=immediate,offloads=none".parse().unwrap();
        assert_eq!(arm.placement, Placement::Cpus(vec![0, 1]));
        assert_eq!(arm.policy, Policy::Immediate);
        assert_eq!(arm.given.len(), 3);
        let workload: Workload = "udp_stream:size=64,sessions=4".parse().unwrap();
        assert_eq!((workload.size, workload.sessions), (64, 4));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let message = |text: &str| text.parse::<Arm>().unwrap_err();
        assert!(message("vnet").contains("\"vnet\"") && message("vnet").contains("forwarder"));
        assert!(message("venet:cpu=0").contains("unknown key \"cpu\""));
        assert!(message("veth:cpus=0").contains("unknown key \"cpus\""));
        assert!(message("forwarder:policy=immediate").contains("policy"));
        assert!(message("venet:policy=sometimes").contains("event-index"));
        assert!(message("venet:cpus=0,cpus=1").contains("twice"));
        let message = |text: &str| text.parse::<Workload>().unwrap_err();
        assert!(message("tcp_rr:size=0").contains("from 1 to"));
        assert!(message("udp_stream:size=65508").contains("65507"));
        assert!(message("tcp_rr:sessions=x").contains("sessions=x"));
        assert!(message("tcp_rr:size").contains("no key=value"));
    }
}
