//! The daemon's configuration: a TOML file, strict, so that a misspelt key is an error and not a surprise.

use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use thiserror::Error;
use venet::abi::{DEFAULT_RING_LENGTH, LARGEST_RECORD};
use venet::offload::Groups;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;

/// The whole configuration.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where `host-bridge status` asks.
    #[serde(default = "default_control")]
    pub control: PathBuf,
    /// The user that the data process runs as.
    #[serde(default = "default_user")]
    pub user: String,
    /// The guests.
    #[serde(default, rename = "guest")]
    pub guests: Vec<GuestConfig>,
}

/// One guest: a socket, and what is on its bus.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct GuestConfig {
    /// Names the guest in the log and in `status`.
    pub name: String,
    /// Where the guest connects.
    pub socket: PathBuf,
    /// Mode of the socket, in octal.
    #[serde(default = "default_mode", deserialize_with = "octal")]
    pub mode: u32,
    /// Group of the socket; that of the daemon if absent.
    pub group: Option<String>,
    /// The devices.
    #[serde(default, rename = "device")]
    pub devices: Vec<DeviceConfig>,
}

/// Which class a device is of.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub enum Class {
    /// Frames go to a TAP on a bridge.
    #[default]
    #[serde(rename = "venet-tap")]
    VenetTap,
    /// Frames go back to the guest.
    #[serde(rename = "venet-loopback")]
    VenetLoopback,
}

/// One device.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Names the device in `status` and to the guest.
    #[serde(default = "default_device")]
    pub name: String,
    /// The class.
    #[serde(default)]
    pub class: Class,
    /// The bridge whose port the TAP becomes. For `venet-tap`.
    pub bridge: Option<String>,
    /// Name of the TAP; made from the guest's name if absent. For `venet-tap`.
    pub tap: Option<String>,
    /// Address of the guest's interface; made from the names if absent, and then always the same.
    #[serde(default, deserialize_with = "optional_text")]
    pub mac: Option<Mac>,
    /// Payload of the longest frame in bytes; that of the bridge if absent.
    pub mtu: Option<u32>,
    /// Offloads to offer.
    #[serde(default = "all_groups", deserialize_with = "text")]
    pub offloads: Groups,
    /// When to notify.
    #[serde(default, deserialize_with = "text")]
    pub policy: Policy,
    /// CPUs that the pump may run on.
    #[serde(default, deserialize_with = "text")]
    pub cpus: Placement,
    /// Bytes of each ring, a power of two.
    #[serde(default = "default_ring")]
    pub ring: u64,
}

/// A configuration that cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file cannot be understood.
    #[error("{path}: {message}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        message: String,
    },
    /// A value that cannot work.
    #[error("{guest}{device}: {message}", device = .device.as_ref().map_or(String::new(), |name| format!(", device {name}")))]
    Value {
        /// Which guest.
        guest: String,
        /// Which device.
        device: Option<String>,
        /// What is wrong, and what would do.
        message: String,
    },
}

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let parse = |error: toml::de::Error| ConfigError::Parse { path: path.into(), message: error.to_string() };
        let config: Self = toml::from_str(&text).map_err(parse)?;
        config.check()?;
        Ok(config)
    }

    /// The configuration for one guest on one bridge.
    pub fn single(bridge: &str, socket: &Path, device: DeviceConfig) -> Result<Self, ConfigError> {
        let name = socket.file_stem().map_or_else(|| "guest".into(), |stem| stem.to_string_lossy().into_owned());
        let mut control = socket.as_os_str().to_owned();
        control.push(".control");
        let guest = GuestConfig {
            name,
            socket: socket.into(),
            mode: default_mode(),
            group: None,
            devices: vec![DeviceConfig { bridge: Some(bridge.into()), ..device }],
        };
        let config = Self { control: control.into(), user: default_user(), guests: vec![guest] };
        config.check()?;
        Ok(config)
    }

    /// Checks what the types do not say.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut names = BTreeSet::new();
        let mut sockets = BTreeSet::new();
        let mut taps = BTreeSet::new();
        for guest in &self.guests {
            let wrong = |device: Option<&DeviceConfig>, message: String| {
                let device = device.map(|device| device.name.clone());
                Err(ConfigError::Value { guest: format!("guest {}", guest.name), device, message })
            };
            if !names.insert(&guest.name) {
                return wrong(None, "there are two guests of this name".into());
            }
            if !sockets.insert(&guest.socket) || guest.socket == self.control {
                return wrong(None, format!("the socket {} is used twice", guest.socket.display()));
            }
            if guest.devices.is_empty() || guest.devices.len() > 16 {
                return wrong(None, "a guest needs from 1 to 16 [[guest.device]]".into());
            }
            let mut devices = BTreeSet::new();
            for device in &guest.devices {
                if !devices.insert(&device.name) {
                    return wrong(Some(device), "the guest has two devices of this name".into());
                }
                if device.class == Class::VenetTap && device.bridge.is_none() {
                    return wrong(Some(device), "class venet-tap needs a bridge".into());
                }
                if device.class == Class::VenetTap && !taps.insert(device.tap_name(guest)) {
                    return wrong(Some(device), format!("the TAP {} is used twice", device.tap_name(guest)));
                }
                if device.tap_name(guest).len() > 15 {
                    return wrong(Some(device), "the name of a TAP has at most 15 characters; set tap".into());
                }
                if device.mtu.is_some_and(|mtu| !(68..=65521).contains(&mtu)) {
                    return wrong(Some(device), "mtu must be from 68 to 65521".into());
                }
                if device.mac.is_some_and(|Mac(mac)| mac[0] & 1 == 1) {
                    return wrong(Some(device), "mac is a group address; its first byte must be even".into());
                }
                if let Err(error) = vbus::ring::check_capacity(device.ring, LARGEST_RECORD) {
                    return wrong(Some(device), error.to_string());
                }
                if device.ring > 1 << 26 {
                    return wrong(Some(device), "a ring has at most 67108864 bytes".into());
                }
            }
            let rings = guest.devices.iter().flat_map(|device| [device.ring; 2]).collect::<Vec<_>>();
            if vbus::layout::Layout::window_size(&rings) > vbus::window::LARGEST_WINDOW {
                return wrong(None, "its rings together do not fit a window; make them smaller".into());
            }
        }
        Ok(())
    }
}

impl DeviceConfig {
    /// The name of the device's TAP.
    pub fn tap_name(&self, guest: &GuestConfig) -> String {
        let made = || {
            let number = guest.devices.iter().position(|device| device.name == self.name).unwrap_or(0);
            let suffix = if number == 0 { String::new() } else { format!("-{number}") };
            let letters =
                guest.name.chars().filter(char::is_ascii_alphanumeric).take(12usize.saturating_sub(suffix.len()));
            format!("vb-{}{suffix}", letters.collect::<String>())
        };
        self.tap.clone().unwrap_or_else(made)
    }

    /// The address of the guest's interface.
    pub fn guest_mac(&self, guest: &GuestConfig) -> [u8; 6] {
        if let Some(Mac(mac)) = self.mac {
            return mac;
        }
        // FNV-1a over both names: the same after every restart, and locally administered.
        let hash = guest
            .name
            .bytes()
            .chain([0])
            .chain(self.name.bytes())
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let [a, b, c, d, e, ..] = hash.to_be_bytes();
        [0x52, a, b, c, d, e]
    }
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            name: default_device(),
            class: Class::default(),
            bridge: None,
            tap: None,
            mac: None,
            mtu: None,
            offloads: Groups::ALL,
            policy: Policy::default(),
            cpus: Placement::default(),
            ring: default_ring(),
        }
    }
}

/// A hardware address, as `52:54:00:12:34:56`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| format!("{text:?} is no MAC address: expected six bytes as 52:54:00:12:34:56"))
    }
}

/// An address as people read it.
pub fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn default_control() -> PathBuf {
    "/run/vbus/control.sock".into()
}

fn default_user() -> String {
    "nobody".into()
}

fn default_mode() -> u32 {
    0o660
}

fn default_device() -> String {
    "venet0".into()
}

fn default_ring() -> u64 {
    DEFAULT_RING_LENGTH
}

fn all_groups() -> Groups {
    Groups::ALL
}

fn octal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let text = String::deserialize(deserializer)?;
    let mode = u32::from_str_radix(text.trim_start_matches("0o"), 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no mode: expected octal digits as \"0660\"")))
}

fn text<'de, D: Deserializer<'de>, T: FromStr<Err: std::fmt::Display>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

fn optional_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: std::fmt::Display>,
{
    text(deserializer).map(Some)
}
