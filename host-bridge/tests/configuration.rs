//! What a configuration may say, what it means where it says nothing, and what is said about one that cannot work.

use host_bridge::config::{Class, Config, ConfigError, DeviceConfig, GuestConfig};
use host_bridge::warnings::{filtering, spanning_tree};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use venet::offload::Groups;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;

const SMALLEST: &str = "[[guest]]\nname = \"g1\"\nsocket = \"/run/g1\"\n[[guest.device]]\nbridge = \"br0\"\n";

/// Reads a configuration from a file, as the daemon does.
fn read(text: &str) -> Result<Config, ConfigError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("host-bridge.toml");
    fs::write(&path, text).unwrap();
    Config::read(&path)
}

fn refusal(text: &str) -> String {
    read(text).expect_err(text).to_string()
}

#[test]
fn an_unknown_key_is_named_with_its_place_at_every_level() {
    let cases = [
        ("contrl = \"/run/c\"\n", SMALLEST, "", "contrl", 1),
        (SMALLEST, "", "offload = \"all\"\n", "offload", 6),
        ("[[guest]]\nname = \"g1\"\nsockt = \"/run/g1\"\n", "socket = \"/run/g1\"\n", "", "sockt", 3),
        ("[[guest]]\nname = \"g1\"\nsocket = \"/run/g1\"\n[[guest.devices]]\n", "bridge = \"br0\"\n", "", "devices", 4),
        ("[[guests]]\n", "", "", "guests", 1),
    ];
    for (first, second, third, key, line) in cases {
        let said = refusal(&[first, second, third].concat());
        assert!(said.contains("/host-bridge.toml: "), "{said}");
        assert!(said.contains(&format!("unknown field `{key}`, expected ")), "{said}");
        assert!(said.contains(&format!("line {line}, column ")), "{said}");
    }
}

#[test]
fn what_is_no_toml_or_is_missing_is_named() {
    for (text, expected) in [
        ("[[guest]\n", "line 1"),
        ("[[guest]]\nsocket = \"/run/g1\"\n", "missing field `name`"),
        ("[[guest]]\nname = \"g1\"\n", "missing field `socket`"),
    ] {
        let said = refusal(text);
        assert!(said.contains("/host-bridge.toml: ") && said.contains(expected), "{said}");
    }
    let said = Config::read(Path::new("/nonexistent/host-bridge.toml")).unwrap_err().to_string();
    assert!(said.starts_with("cannot read /nonexistent/host-bridge.toml: No such file"), "{said}");
}

#[test]
fn a_value_of_the_wrong_kind_is_named() {
    for (line, expected) in [
        ("offloads = \"tso5\"", "unknown offload \"tso5\""),
        ("mac = \"52:54:00:12:34\"", "\"52:54:00:12:34\" is no MAC address"),
        ("mac = \"52:54:00:12:34:100\"", "is no MAC address"),
        ("class = \"venet-vale\"", "unknown variant `venet-vale`"),
        ("mtu = -1", "mtu"),
        ("policy = \"never\"", "never"),
        ("cpus = \"x\"", "x"),
    ] {
        let said = refusal(&format!("{SMALLEST}{line}\n"));
        assert!(said.contains(expected) && said.contains("line 6"), "{said}");
    }
    for mode in ["rw", "0668", "7777", "-1"] {
        let said = refusal(&SMALLEST.replace("[[guest.device]]", &format!("mode = \"{mode}\"\n[[guest.device]]")));
        assert!(said.contains(&format!("\"{mode}\" is no mode: expected octal digits as \"0660\"")), "{said}");
    }
}

#[test]
fn what_is_absent_has_its_default() {
    let config = read(SMALLEST).unwrap();
    let device = DeviceConfig { bridge: Some("br0".into()), ..DeviceConfig::default() };
    let guest = GuestConfig {
        name: "g1".into(),
        socket: "/run/g1".into(),
        mode: 0o660,
        group: None,
        devices: vec![device.clone()],
    };
    let expected = Config { control: "/run/vbus/control.sock".into(), user: "nobody".into(), guests: vec![guest] };
    assert_eq!(config, expected);
    assert_eq!((device.name.as_str(), device.class, device.ring), ("venet0", Class::VenetTap, 524_288));
    assert_eq!((device.offloads, device.policy, device.cpus), (Groups::ALL, Policy::EventIndex, Placement::None));
    assert_eq!((device.tap, device.mac, device.mtu), (None, None, None));
    assert_eq!(read("").unwrap().guests, []);

    let config = Config::single("br0", Path::new("/run/vbus/g1.sock"), DeviceConfig::default()).unwrap();
    assert_eq!(config.control, Path::new("/run/vbus/g1.sock.control"));
    assert_eq!((config.guests[0].name.as_str(), config.guests[0].mode), ("g1", 0o660));
    assert_eq!(config.guests[0].devices[0].bridge.as_deref(), Some("br0"));
}

#[test]
fn everything_can_be_configured() {
    let text = r#"
        control = "/run/c"
        user = "vbus"
        [[guest]]
        name = "g1"
        socket = "/run/g1"
        mode = "0600"
        group = "kvm"
        [[guest.device]]
        name = "left"
        bridge = "br0"
        tap = "tap7"
        mac = "52:54:00:12:34:5f"
        mtu = 9000
        offloads = "csum,tso4"
        policy = "immediate"
        cpus = "0+2-3"
        ring = 262144
        [[guest.device]]
        name = "right"
        class = "venet-loopback"
    "#;
    let config = read(text).unwrap();
    assert_eq!((config.control.to_str(), config.user.as_str()), (Some("/run/c"), "vbus"));
    let guest = &config.guests[0];
    assert_eq!((guest.mode, guest.group.as_deref()), (0o600, Some("kvm")));
    let [left, right] = &guest.devices[..] else { panic!("two devices") };
    assert_eq!((left.tap_name(guest), left.guest_mac(guest)), ("tap7".into(), [0x52, 0x54, 0, 0x12, 0x34, 0x5f]));
    assert_eq!((left.mtu, left.policy, left.ring), (Some(9000), Policy::Immediate, 262_144));
    assert_eq!((left.cpus.to_string(), left.offloads.to_string()), ("0+2+3".into(), "csum,tso4,link".into()));
    assert_eq!((right.class, &right.bridge), (Class::VenetLoopback, &None));
}

/// The smallest configuration with changes, and what is said about it.
fn wrong(change: impl FnOnce(&mut Config)) -> String {
    let mut config = read(SMALLEST).unwrap();
    change(&mut config);
    let error = config.check().expect_err("it is refused");
    assert!(matches!(error, ConfigError::Value { .. }));
    error.to_string()
}

fn wrong_device(change: impl FnOnce(&mut DeviceConfig)) -> String {
    wrong(|config| change(&mut config.guests[0].devices[0]))
}

#[test]
fn rings_that_do_not_fit_a_window_together_are_refused() {
    let message = wrong(|config| {
        let device = config.guests[0].devices[0].clone();
        // 8 × 2 × 64 MiB are the largest window, and its header comes on top.
        config.guests[0].devices = (0..8)
            .map(|number| DeviceConfig {
                name: format!("d{number}"),
                tap: Some(format!("tap{number}")),
                ring: 1 << 26,
                ..device.clone()
            })
            .collect();
    });
    assert_eq!(message, "guest g1: its rings together do not fit a window; make them smaller");
}

#[test]
fn what_cannot_work_is_refused_with_guest_device_and_reason() {
    let second = |config: &mut Config| {
        let mut guest = config.guests[0].clone();
        (guest.name, guest.socket) = ("g2".into(), "/run/g2".into());
        config.guests.push(guest);
    };
    let ring = |bytes: u64| {
        format!(
            "guest g1, device venet0: a ring of {bytes} bytes cannot carry records of 65558 bytes: \
             it must be a power of two of at least 131200 bytes"
        )
    };
    let cases = [
        (
            wrong(|config| {
                second(config);
                config.guests[1].name = "g1".into();
            }),
            "guest g1: there are two guests of this name".into(),
        ),
        (
            wrong(|config| {
                second(config);
                config.guests[1].socket = "/run/g1".into();
            }),
            "guest g2: the socket /run/g1 is used twice".into(),
        ),
        (wrong(|config| config.control = "/run/g1".into()), "guest g1: the socket /run/g1 is used twice".into()),
        (
            wrong(|config| config.guests[0].devices.clear()),
            "guest g1: a guest needs from 1 to 16 [[guest.device]]".into(),
        ),
        (
            wrong(|config| config.guests[0].devices = vec![DeviceConfig::default(); 17]),
            "guest g1: a guest needs from 1 to 16 [[guest.device]]".into(),
        ),
        (
            wrong(|config| {
                let device = config.guests[0].devices[0].clone();
                config.guests[0].devices.push(device);
            }),
            "guest g1, device venet0: the guest has two devices of this name".into(),
        ),
        (wrong_device(|device| device.bridge = None), "guest g1, device venet0: class venet-tap needs a bridge".into()),
        (
            wrong(|config| {
                second(config);
                config.guests[1].devices[0].tap = Some("vb-g1".into());
            }),
            "guest g2, device venet0: the TAP vb-g1 is used twice".into(),
        ),
        (
            wrong_device(|device| device.tap = Some("sixteen-letters-".into())),
            "guest g1, device venet0: the name of a TAP has at most 15 characters; set tap".into(),
        ),
        (wrong_device(|device| device.mtu = Some(67)), "guest g1, device venet0: mtu must be from 68 to 65521".into()),
        (
            wrong_device(|device| device.mtu = Some(65522)),
            "guest g1, device venet0: mtu must be from 68 to 65521".into(),
        ),
        (
            wrong_device(|device| device.mac = Some("53:54:00:12:34:56".parse().unwrap())),
            "guest g1, device venet0: mac is a group address; its first byte must be even".into(),
        ),
        (wrong_device(|device| device.ring = 131_072), ring(131_072)),
        (wrong_device(|device| device.ring = 300_000), ring(300_000)),
        (
            wrong_device(|device| device.ring = 1 << 27),
            "guest g1, device venet0: a ring has at most 67108864 bytes".into(),
        ),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
}

#[test]
fn what_just_works_is_not_refused() {
    let changes: [fn(&mut DeviceConfig); 6] = [
        |device| device.mtu = Some(68),
        |device| device.mtu = Some(65521),
        |device| device.ring = 262_144,
        |device| device.ring = 1 << 26,
        |device| device.tap = Some("fifteen-letters".into()),
        |device| (device.class, device.bridge) = (Class::VenetLoopback, None),
    ];
    for change in changes {
        let mut config = read(SMALLEST).unwrap();
        change(&mut config.guests[0].devices[0]);
        config.check().unwrap();
    }
}

fn guest(name: &str, devices: usize) -> GuestConfig {
    let device = |number| DeviceConfig { name: format!("venet{number}"), ..DeviceConfig::default() };
    GuestConfig {
        name: name.into(),
        socket: "/run/g".into(),
        mode: 0o660,
        group: None,
        devices: (0..devices).map(device).collect(),
    }
}

#[test]
fn taps_have_names_that_the_kernel_takes_and_one_each() {
    for name in ["g", "guest1", "a-guest.with_signs", "a-guest-with-a-rather-long-name", "gäst", "客"] {
        let guest = guest(name, 16);
        let names: BTreeSet<String> = guest.devices.iter().map(|device| device.tap_name(&guest)).collect();
        assert_eq!(names.len(), 16, "{names:?}");
        for name in names {
            assert!(name.len() <= 15 && name.starts_with("vb-"), "{name}");
            assert!(name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-'), "{name}");
        }
    }
    let named = guest("guest-1", 12);
    let name = |number: usize| named.devices[number].tap_name(&named);
    assert_eq!((name(0), name(1), name(11)), ("vb-guest1".into(), "vb-guest1-1".into(), "vb-guest1-11".into()));
}

#[test]
fn addresses_are_stable_local_and_of_one_interface() {
    let mut seen = BTreeSet::new();
    for name in ["g1", "g2", "g", "1", "a-guest-with-a-rather-long-name"] {
        let guest = guest(name, 16);
        for device in &guest.devices {
            let mac = device.guest_mac(&guest);
            assert_eq!(mac, device.guest_mac(&guest.clone()));
            assert_eq!((mac[0] & 1, mac[0] & 2), (0, 2), "unicast, and locally administered");
            assert!(seen.insert(mac), "{mac:x?} twice");
        }
    }
    // A guest's neighbours and leases know it by this address: another release must not make another one.
    let guest = guest("g1", 1);
    assert_eq!(host_bridge::config::format_mac(guest.devices[0].guest_mac(&guest)), "52:ef:e0:33:4f:d1");
}

#[test]
fn spanning_tree_is_warned_of_if_it_delays() {
    let sysfs = tempfile::tempdir().unwrap();
    let warning = || spanning_tree(sysfs.path(), "br0", "vb-g1");
    assert_eq!(warning(), None, "no bridge");
    let bridge = sysfs.path().join("br0/bridge");
    fs::create_dir_all(&bridge).unwrap();
    for (state, delay, seconds) in
        [("1\n", "1500\n", Some(30)), ("1\n", "201\n", Some(5)), ("2\n", "400\n", Some(8)), ("0\n", "1500\n", None)]
            .into_iter()
            .chain([("1\n", "0\n", None), ("?\n", "1500\n", None), ("1\n", "\n", None)])
    {
        fs::write(bridge.join("stp_state"), state).unwrap();
        fs::write(bridge.join("forward_delay"), delay).unwrap();
        let expected = seconds.map(|seconds| {
            format!(
                "br0 runs the spanning tree protocol: vb-g1 forwards only {seconds} s after its guest connects; \
                 if there are no loops: ip link set br0 type bridge stp_state 0"
            )
        });
        assert_eq!(warning(), expected, "state {state:?}, delay {delay:?}");
    }
}

#[test]
fn filtering_is_warned_of_if_it_drops() {
    let directory = tempfile::tempdir().unwrap();
    let switch = directory.path().join("bridge-nf-call-iptables");
    let policy = |name: &str| Some(name.to_owned());
    assert_eq!(filtering(&switch, &policy("DROP")), None, "the kernel has no such switch");
    for (state, policy, warned) in [
        ("1\n", policy("DROP"), true),
        ("1", policy("DROP"), true),
        ("0\n", policy("DROP"), false),
        ("1\n", policy("ACCEPT"), false),
        ("1\n", None, false),
    ] {
        fs::write(&switch, state).unwrap();
        let warning = filtering(&switch, &policy);
        assert_eq!(warning.is_some(), warned, "{state:?}, {policy:?}");
        if let Some(warning) = warning {
            assert!(warning.contains("FORWARD chain is DROP"), "{warning}");
            assert!(warning.contains("sysctl net.bridge.bridge-nf-call-iptables=0"), "{warning}");
        }
    }
}
