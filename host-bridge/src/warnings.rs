//! What would swallow traffic silently, said at the start.

use std::fs;
use std::path::Path;
use std::process::Command;
use venet::port::interface::Interfaces;

/// Sentences about the bridge and its port that an operator should know, each with what to do. `bridge_mtu` is the bridge's
/// without this port.
pub fn about(bridge: &str, bridge_mtu: u32, port: &str, mtu: u32) -> Vec<String> {
    let mut warnings = Vec::new();
    let Ok(interfaces) = Interfaces::open() else { return warnings };
    if interfaces.is_up(bridge).is_ok_and(|up| !up) {
        warnings.push(format!("the bridge {bridge} is down: no frame passes; set it up with: ip link set {bridge} up"));
    }
    if bridge_mtu != mtu {
        warnings.push(format!(
            "MTUs differ: {bridge} has {bridge_mtu}, {port} has {mtu}; longer frames than {} are dropped silently",
            bridge_mtu.min(mtu)
        ));
    }
    warnings.extend(spanning_tree(Path::new("/sys/class/net"), bridge, port));
    warnings.extend(filtering(Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables"), &forward_policy()));
    warnings
}

/// With the spanning tree protocol a new port forwards only after twice the forward delay.
pub fn spanning_tree(sysfs: &Path, bridge: &str, port: &str) -> Option<String> {
    let number = |path: std::path::PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let directory = sysfs.join(bridge).join("bridge");
    let on = number(directory.join("stp_state"))?;
    // In hundredths of a second.
    let delay = number(directory.join("forward_delay"))?;
    if on == 0 || delay == 0 {
        return None;
    }
    let seconds = delay.saturating_mul(2).div_ceil(100);
    Some(format!(
        "{bridge} runs the spanning tree protocol: {port} forwards only {seconds} s after its guest connects; \
         if there are no loops: ip link set {bridge} type bridge stp_state 0"
    ))
}

/// Bridged frames walk iptables on many distributions, and container engines set the FORWARD policy to DROP.
pub fn filtering(switch: &Path, policy: &Option<String>) -> Option<String> {
    let on = fs::read_to_string(switch).is_ok_and(|text| text.trim() == "1");
    if on && policy.as_deref() == Some("DROP") {
        let advice = "bridge-nf-call-iptables is on and the policy of iptables' FORWARD chain is DROP: bridged frames may be \
                      dropped; allow them, or: sysctl net.bridge.bridge-nf-call-iptables=0";
        return Some(advice.into());
    }
    None
}

/// The policy of the FORWARD chain, if there is an iptables to ask.
fn forward_policy() -> Option<String> {
    let output = Command::new("iptables").args(["-S", "FORWARD"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().next()?.strip_prefix("-P FORWARD ").map(str::to_owned)
}
