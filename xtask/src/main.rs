//! `cargo xtask`: the project's commands. Each is a module; `cargo xtask help` lists them.

mod process;
mod setup;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

/// The commands of the rdmacm project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run a command in the test machine: a virtual machine with two connected Soft-RoCE devices
    ///
    /// The command runs in this folder, on this host's files (it may write anywhere, nothing reaches the host except what is
    /// written to /run/vm, see --out). The exit status is the command's; 251: the guest hung or its kernel died, 252: the
    /// command was successful, but the guest's kernel reported a bug.
    Vm(VmArgs),
}

#[derive(Args, Debug)]
struct VmArgs {
    /// Debian kernel series
    #[arg(long, value_enum, default_value_t)]
    kernel: vm::Series,
    /// End the guest after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 2)]
    cpus: u32,
    /// Memory, as qemu reads it
    #[arg(long, value_name = "SIZE", default_value = "3G")]
    memory: String,
    /// Let the guest's clock count instructions instead of time: for exact comparisons (one CPU, no KVM)
    #[arg(long)]
    icount: bool,
    /// Build the Soft-iWARP module and put it into the guest (see xtask/guest/siw.sh)
    #[arg(long)]
    siw: bool,
    /// MTU of the link between the two devices in bytes; 4200 gives the RDMA MTU 4096, 1500 gives 1024
    #[arg(long, value_name = "BYTES", default_value_t = 4200)]
    mtu: u32,
    /// Leave netem out (it costs 4 to 8 % of the speed): faults of the link cannot be set then
    #[arg(long)]
    no_netem: bool,
    /// Keep what the guest writes to /run/vm in this folder, with its console and kernel log
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// The command and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("cargo xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<u8> {
    match task {
        Task::Vm(args) => {
            let machine = vm::Machine {
                kernel: args.kernel,
                timeout: Duration::from_secs(args.timeout),
                cpus: args.cpus,
                memory: args.memory,
                instruction_count: args.icount,
                siw: args.siw,
                mtu: args.mtu,
                netem: !args.no_netem,
                out: args.out,
                ..vm::Machine::default()
            };
            let outcome = machine.run(&args.command)?;
            Ok(u8::try_from(outcome.status).unwrap_or(u8::MAX))
        }
    }
}
