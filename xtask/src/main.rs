//! `cargo xtask`: the project's commands. Each is a module; `cargo xtask help` lists them.

mod artifacts;
mod bench;
mod demo;
mod layering;
mod libclang;
mod process;
mod report;
mod setup;
mod test;
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
    /// Install what the other commands need (on Debian, as root); they also do it by themselves
    Setup,
    /// Let our rping and the C rping ping each other over a real kernel RDMA device, of this host or in the test machine
    Demo,
    /// Compare the time of one ping with the C rping's, in the test machine; writes docs/bench/rping.md
    Bench,
    /// The part of `bench` that runs in the test machine
    #[command(hide = true)]
    GuestBench(bench::Request),
    /// Run everything that continuous integration runs: checks, tests on this host, tests in the test machine
    Test {
        /// Leave the test machine out
        #[arg(long)]
        host_only: bool,
        /// Only run tests with this in their name, and leave out the checks of formatting, lints, documentation and layering
        #[arg(long, value_name = "NAME")]
        filter: Option<String>,
        #[command(flatten)]
        device: DeviceTestArgs<900>,
    },
    /// Run the tests in the test machine with RDMACM_SOAK=1, which makes some of them very long
    Soak {
        /// Only run tests with this in their name
        #[arg(long, value_name = "NAME")]
        filter: Option<String>,
        #[command(flatten)]
        device: DeviceTestArgs<7200>,
    },
    /// Check which module names which other, and where `unsafe` is (part of `test`)
    Layering,
}

/// How tests run in the test machine.
#[derive(Args, Debug)]
struct DeviceTestArgs<const TIMEOUT: u64> {
    /// Debian kernel series of the test machine
    #[arg(long, value_enum, default_value_t)]
    kernel: vm::Series,
    /// End the test machine after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = TIMEOUT)]
    timeout: u64,
    /// Tests of one binary that run at once in the test machine
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: u32,
}

impl<const TIMEOUT: u64> DeviceTestArgs<TIMEOUT> {
    fn options(self, host_only: bool, filter: Option<String>) -> test::Options {
        test::Options {
            host_only,
            filter,
            timeout: Duration::from_secs(self.timeout),
            kernel: self.kernel,
            threads: self.threads,
        }
    }
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
        Task::Demo => demo::run().map(|()| 0),
        Task::Bench => bench::run().map(|()| 0),
        Task::GuestBench(request) => bench::run_in_guest(&request).map(|()| 0),
        Task::Setup => setup::run().map(|()| 0),
        Task::Test { host_only, filter, device } => test::run(&device.options(host_only, filter)).map(|()| 0),
        Task::Soak { filter, device } => test::soak(&device.options(false, filter)).map(|()| 0),
        Task::Layering => layering::check(&process::workspace_root()).map(|()| 0),
        Task::Vm(args) => {
            let mut needs = vec![setup::Need::Machine];
            needs.extend(args.siw.then_some(setup::Need::Siw));
            setup::ensure(&needs)?;
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
