//! The command line of guest-shim.

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
use guest_shim::agent::{self, AgentConfig};
use guest_shim::guest_interface::Cidr;
use guest_shim::status;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use venet::offload::Groups;
use venet::pump::placement::Placement;
use venet::pump::policy::Policy;

/// A network interface in a guest, connected to a host-bridge through shared memory.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Order,
}

const EXAMPLES: &str = "Examples:
  guest-shim run --connect /run/vbus/guest1.sock --ifname venet0 --netns guest1 --address 10.0.0.2/24
  guest-shim run --connect /run/vbus/guest1.sock --ifname venet0 --persist --status /run/vbus/shim1.sock
  guest-shim status --status /run/vbus/shim1.sock --json";

#[derive(Subcommand)]
enum Order {
    /// Serve the interface until SIGTERM
    Run(Run),
    /// Show the connection, the link and the counters of a running shim
    Status {
        /// The socket that the shim was started with
        #[arg(long)]
        status: PathBuf,
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
}

#[derive(clap::Args)]
struct Run {
    /// The daemon's socket
    #[arg(long)]
    connect: PathBuf,
    /// Name of the interface
    #[arg(long, default_value = "venet0")]
    ifname: String,
    /// Network namespace of the guest: a name that `ip netns` knows, or a path
    #[arg(long)]
    netns: Option<String>,
    /// Address with prefix length, such as 10.0.0.2/24; sets the interface up. May be repeated
    #[arg(long)]
    address: Vec<Cidr>,
    /// Set the interface up even without an address
    #[arg(long)]
    up: bool,
    /// The interface outlives the shim, and the next shim adopts it
    #[arg(long)]
    persist: bool,
    /// Offloads to ask for: all, none, or a list of csum, tso4, tso6, uso, ecn, link
    #[arg(long, default_value = "all")]
    offloads: Groups,
    /// When to notify: event-index or immediate
    #[arg(long, default_value = "event-index")]
    policy: Policy,
    /// CPUs to run on, as 0 or 0+2-3; or none
    #[arg(long, default_value = "none")]
    cpus: Placement,
    /// Where `guest-shim status` asks
    #[arg(long)]
    status: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_writer(std::io::stderr).init();
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "guest-shim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(order: Order) -> Result<()> {
    match order {
        Order::Run(run) => agent::run(AgentConfig {
            connect: run.connect,
            interface: run.ifname,
            namespace: run.netns,
            addresses: run.address,
            up: run.up,
            persist: run.persist,
            groups: run.offloads,
            policy: run.policy,
            placement: run.cpus,
            status: run.status,
        }),
        Order::Status { status, json } => {
            let status = status::ask(&status)?;
            let text = if json { serde_json::to_string_pretty(&status)? + "\n" } else { status::table(&status) };
            Ok(std::io::stdout().write_all(text.as_bytes())?)
        }
        Order::Completions { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "guest-shim", &mut std::io::stdout());
            Ok(())
        }
        Order::Man => Ok(clap_mangen::Man::new(Arguments::command()).render(&mut std::io::stdout())?),
    }
}
