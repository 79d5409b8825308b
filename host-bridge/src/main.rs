//! The command line of host-bridge.

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use host_bridge::config::{Config, DeviceConfig};
use host_bridge::supervisor::Reexecute;
use host_bridge::{data_process, status, supervisor};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use venet::offload::Groups;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;

/// Offers devices on a Linux bridge to guests, through shared memory.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Order,
}

const EXAMPLES: &str = "Examples:
  host-bridge run --bridge br0 --socket /run/vbus/guest1.sock
  host-bridge run --config /etc/vbus/host-bridge.toml
  host-bridge status --control /run/vbus/guest1.sock.control --json";

#[derive(Subcommand)]
enum Order {
    /// Serve guests until SIGTERM
    Run(Run),
    /// Show guests, devices, links, offloads and counters of a running daemon
    Status {
        /// The daemon's control socket: SOCKET.control, or what its configuration says
        #[arg(long, default_value = "/run/vbus/control.sock")]
        control: PathBuf,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    Man,
    #[command(hide = true)]
    DataProcess { user: String },
}

#[derive(clap::Args)]
struct Run {
    /// Configuration file, for any number of guests
    #[arg(long, conflicts_with_all = ["bridge", "socket"], required_unless_present = "bridge")]
    config: Option<PathBuf>,
    /// The bridge, for one guest
    #[arg(long, requires = "socket")]
    bridge: Option<String>,
    /// Where the one guest connects
    #[arg(long, requires = "bridge")]
    socket: Option<PathBuf>,
    /// Name of the one guest's TAP [default: made from the socket's name]
    #[arg(long, requires = "bridge")]
    tap: Option<String>,
    /// MTU of the one guest's device [default: that of the bridge]
    #[arg(long, requires = "bridge")]
    mtu: Option<u32>,
    /// Offloads to offer: all, none, or a list of csum, tso4, tso6, uso, ecn, link
    #[arg(long, requires = "bridge", default_value = "all")]
    offloads: Groups,
    /// When to notify: event-index or immediate
    #[arg(long, requires = "bridge", default_value = "event-index")]
    policy: Policy,
    /// CPUs for the one guest's pump, as 0 or 0+2-3; or none
    #[arg(long, requires = "bridge", default_value = "none")]
    cpus: Placement,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_writer(std::io::stderr).init();
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "host-bridge: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(order: Order) -> Result<()> {
    match order {
        Order::Run(run) => supervisor::run(config(run)?, &Reexecute(vec!["data-process".into()])),
        Order::Status { control, json } => {
            let status = status::ask(&control)?;
            let text = if json { serde_json::to_string_pretty(&status)? + "\n" } else { status::table(&status) };
            Ok(std::io::stdout().write_all(text.as_bytes())?)
        }
        Order::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "host-bridge", &mut std::io::stdout());
            Ok(())
        }
        Order::Man => Ok(clap_mangen::Man::new(Arguments::command()).render(&mut std::io::stdout())?),
        Order::DataProcess { user } => {
            let supervisor = std::io::stdin().as_fd().try_clone_to_owned().context("no supervisor")?;
            data_process::run(supervisor, &user)
        }
    }
}

fn config(run: Run) -> Result<Config> {
    match (run.config, run.bridge, run.socket) {
        (Some(path), ..) => Ok(Config::read(&path)?),
        (None, Some(bridge), Some(socket)) => {
            let device = DeviceConfig {
                tap: run.tap,
                mtu: run.mtu,
                offloads: run.offloads,
                policy: run.policy,
                cpus: run.cpus,
                ..DeviceConfig::default()
            };
            Ok(Config::single(&bridge, &socket, device)?)
        }
        _ => anyhow::bail!("give either --config, or --bridge and --socket"),
    }
}
