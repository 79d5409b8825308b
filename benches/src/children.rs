//! The processes of an arm: this program again, each killed by its number when it is no longer needed, and by the kernel
//! if this process dies first.

use crate::forwarder::{self, ForwarderConfig};
use anyhow::{Context, Result, bail};
use clap::Subcommand;
use guest_shim::agent::{self, AgentConfig};
use host_bridge::config::Config;
use host_bridge::supervisor::{self, Reexecute};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What this program does when it is one of an arm's processes.
#[derive(Clone, Debug, Subcommand)]
pub enum Role {
    /// The daemon, by its configuration file.
    #[command(hide = true)]
    Supervisor {
        /// The file.
        config: PathBuf,
    },
    /// The daemon's process that moves frames.
    #[command(hide = true)]
    DataProcess {
        /// Whom to become.
        user: String,
    },
    /// A shim, by [`ShimArguments`] as JSON.
    #[command(hide = true)]
    Shim {
        /// The JSON.
        arguments: String,
    },
    /// The floor, by [`ForwarderConfig`] as JSON.
    #[command(hide = true)]
    Forwarder {
        /// The JSON.
        config: String,
    },
}

/// What a shim is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShimArguments {
    /// The daemon's socket.
    pub connect: PathBuf,
    /// Name of the interface.
    pub interface: String,
    /// The guest's network namespace.
    pub namespace: String,
    /// Address with prefix length.
    pub address: String,
    /// Offloads to ask for.
    pub offloads: String,
    /// When to notify.
    pub policy: String,
    /// Where to run.
    pub cpus: String,
    /// Where the shim answers.
    pub status: PathBuf,
}

impl Role {
    /// Plays the role until it is over.
    pub fn play(self) -> Result<()> {
        if !matches!(self, Role::DataProcess { .. }) {
            set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        // As started the name would be `exe`.
        rustix::thread::set_name(c"vbus-ab")?;
        match self {
            Role::Supervisor { config } => {
                supervisor::run(Config::read(&config)?, &Reexecute(vec!["data-process".into()]))
            }
            Role::DataProcess { user } => {
                let supervisor = std::io::stdin().as_fd().try_clone_to_owned().context("no supervisor")?;
                host_bridge::data_process::run(supervisor, &user)
            }
            Role::Shim { arguments } => {
                let arguments: ShimArguments = serde_json::from_str(&arguments)?;
                agent::run(AgentConfig {
                    connect: arguments.connect,
                    interface: arguments.interface,
                    namespace: Some(arguments.namespace),
                    addresses: vec![arguments.address.parse().map_err(anyhow::Error::msg)?],
                    up: true,
                    persist: false,
                    groups: arguments.offloads.parse()?,
                    policy: arguments.policy.parse()?,
                    placement: arguments.cpus.parse()?,
                    status: Some(arguments.status),
                })
            }
            Role::Forwarder { config } => forwarder::run(&serde_json::from_str::<ForwarderConfig>(&config)?),
        }
    }
}

/// A running process of an arm. It is killed when this is dropped.
#[derive(Debug)]
pub struct Child {
    process: std::process::Child,
    role: &'static str,
}

impl Child {
    /// The daemon, in the calling thread's network namespace.
    pub fn supervisor(config: &Path) -> Result<Self> {
        Self::start("supervisor", config.as_os_str())
    }

    /// A shim.
    pub fn shim(arguments: &ShimArguments) -> Result<Self> {
        Self::start("shim", serde_json::to_string(arguments)?.as_ref())
    }

    /// The floor, in the calling thread's network namespace.
    pub fn forwarder(config: &ForwarderConfig) -> Result<Self> {
        Self::start("forwarder", serde_json::to_string(config)?.as_ref())
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// An error if it has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.process.try_wait()? {
            Some(status) => bail!("the {} ended ({status}); what it said is above", self.role),
            None => Ok(()),
        }
    }

    fn start(role: &'static str, argument: &std::ffi::OsStr) -> Result<Self> {
        // By its path it may not be found in a mount namespace of our own; and what runs may have been replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vbus-ab").arg(role).arg(argument).stdin(Stdio::null()).stdout(Stdio::null());
        if std::env::var_os("RUST_LOG").is_none() {
            command.env("RUST_LOG", "warn");
        }
        let process = command.spawn().with_context(|| format!("cannot start this program again as {role}"))?;
        Ok(Self { process, role })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
