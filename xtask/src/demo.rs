//! `cargo xtask demo`: our rping and the C rping ping each other over a real kernel RDMA device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::process::{self, heading};
use crate::setup::{self, Need};
use crate::{artifacts, vm};

/// An RDMA device of this host that can be used by address.
#[derive(Debug)]
struct Device {
    name: String,
    address: String,
}

/// `cargo xtask demo`.
///
/// # Errors
///
/// When something cannot be installed or built, or one of the pairs fails.
pub(crate) fn run() -> Result<()> {
    setup::ensure(&[Need::Build, Need::Machine])?;
    heading("building rping");
    let rping = build_rping()?;
    let (output, good, place) = match host_device() {
        Some(device) => {
            heading(&format!("this host has the RDMA device {} with address {}", device.name, device.address));
            let (status, output) = process::tee(Command::new("bash").args(script(&rping, &device.address)))?;
            (output, status.success(), format!("{} (this host)", device.name))
        }
        None => {
            explain_test_machine();
            let machine = vm::Machine { timeout: Duration::from_secs(300), ..vm::Machine::default() };
            let mut command = vec!["bash".to_owned()];
            command.extend(script(&rping, "10.77.0.1"));
            let outcome = machine.run(&command)?;
            let place = format!("rxe0 (Soft-RoCE, test machine, Linux {})", outcome.kernel_release);
            (outcome.output, outcome.status == 0, place)
        }
    };
    let pairs = output.lines().rev().find_map(|line| line.strip_prefix("pairs: ")).unwrap_or("0");
    println!("\ndemo: {pairs} rping pairs exchanged verified pings over {place}");
    ensure!(good, "not all pairs were successful");
    Ok(())
}

/// Builds the rping example as users would run it.
///
/// # Errors
///
/// When the build fails.
pub(crate) fn build_rping() -> Result<PathBuf> {
    artifacts::build(setup::cargo()?.args(["build", "--release", "-p", "rdmacm-examples", "--bin", "rping"]))?
        .into_iter()
        .find(|program| program.ends_with("rping"))
        .context("the package rdmacm-examples has no program rping")
}

fn script(rping: &Path, address: &str) -> [String; 3] {
    let script = process::workspace_root().join("xtask/guest/demo.sh");
    [script.display().to_string(), rping.display().to_string(), address.to_owned()]
}

/// The first RDMA device that this process may use and that has an IP address.
fn host_device() -> Option<Device> {
    let usable = fs::File::options().read(true).write(true).open("/dev/infiniband/rdma_cm").is_ok();
    let mut names: Vec<_> = fs::read_dir("/sys/class/infiniband").ok()?.flatten().map(|entry| entry.path()).collect();
    names.sort();
    for device in names {
        let name = device.file_name()?.to_string_lossy().into_owned();
        if !usable {
            println!(
                "{name} is an RDMA device, but /dev/infiniband/rdma_cm cannot be used (modprobe rdma_ucm? permissions?)"
            );
            return None;
        }
        if let Some(address) = net_devices(&device).iter().find_map(|netdev| address_of(netdev)) {
            return Some(Device { name, address });
        }
        println!("{name} is an RDMA device, but its network device has no IP address");
    }
    None
}

/// The network devices of an RDMA device. The kernel shows them in different places: by GID (RoCE), as the netdev that a
/// software device was made on, and beside the PCI device (InfiniBand).
fn net_devices(device: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let by_gid = fs::read_dir(device.join("ports/1/gid_attrs/ndevs")).into_iter().flatten().flatten();
    let files = by_gid.map(|entry| entry.path()).chain([device.join("parent")]);
    names.extend(files.filter_map(|file| fs::read_to_string(file).ok()).map(|name| name.trim().to_owned()));
    let beside = fs::read_dir(device.join("device/net")).into_iter().flatten().flatten();
    names.extend(beside.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    names
}

/// The first IPv4 address of a network device, or else its first global IPv6 address.
fn address_of(netdev: &str) -> Option<String> {
    ["-4", "-6"].iter().find_map(|family| {
        let mut ip = Command::new("ip");
        ip.args(["-o", family, "addr", "show", "dev", netdev, "scope", "global"]);
        let listing = process::output(&mut ip).ok()?;
        // `2: eth0    inet 192.0.2.1/24 brd ...`
        let listing = String::from_utf8(listing).ok()?;
        let address = listing.split_whitespace().nth(3)?;
        Some(address.split('/').next()?.to_owned())
    })
}

/// Says why the test machine is used, and what one can do about it.
fn explain_test_machine() {
    if process::succeeds(Command::new("modprobe").args(["-n", "rdma_rxe"])) {
        heading("this host has no RDMA device, but its kernel can make one (Soft-RoCE) on any network interface");
        println!("    sudo modprobe rdma_rxe && sudo modprobe rdma_ucm");
        println!("    sudo rdma link add rxe0 type rxe netdev INTERFACE");
        println!("After that, this demo uses it. For now it goes on in the test machine.");
    } else {
        heading("this host has no RDMA device, and its kernel cannot make one: starting the test machine");
    }
}
