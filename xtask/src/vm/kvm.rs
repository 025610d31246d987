//! Whether guests can run with KVM here.
//!
//! A `/dev/kvm` that can be opened proves nothing: in some virtual machines and containers it is there, and a guest hangs at
//! its first instruction. So a real guest is booted, and has a few seconds to end itself.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::kernel::lock;
use super::qemu::{Accelerator, Hardware};

/// A guest with KVM needs less than 1 s for this.
const PATIENCE: Duration = Duration::from_secs(6);

/// qemu's status when the guest has written 0x2a to the isa-debug-exit port, as `guest/init` does: 2 * 0x2a + 1.
const PROBE_STATUS: i32 = 85;

/// Whether a guest boots with KVM; asked once per boot of the host, the answer is kept below `cache`.
///
/// # Errors
///
/// When the answer cannot be written. A qemu that does not start is the answer "no".
pub(crate) fn works(kernel: &Path, initrd: &Path, cache: &Path) -> Result<bool> {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(false);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let _lock = lock(cache, "kvm")?;
    let path = cache.join("kvm.answer");
    let known = fs::read_to_string(&path).unwrap_or_default();
    if let Some(answer) = known.strip_prefix(&boot) {
        return Ok(answer == "yes");
    }
    let answer = boots(kernel, initrd)?;
    let word = if answer { "yes" } else { "no" };
    eprintln!("test machine: does a guest boot with KVM here? {word}");
    fs::write(&path, format!("{boot}{word}"))?;
    Ok(answer)
}

fn boots(kernel: &Path, initrd: &Path) -> Result<bool> {
    let hardware = Hardware {
        accelerator: Accelerator::Kvm,
        cpus: 1,
        memory: "512M",
        kernel,
        initrd,
        kernel_options: "rdmacm_probe",
        console: Path::new("/dev/null"),
    };
    let mut command = hardware.command();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(mut qemu) = command.spawn() else {
        return Ok(false);
    };
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = qemu.try_wait()? {
            return Ok(status.code() == Some(PROBE_STATUS));
        }
        if Instant::now() >= deadline {
            qemu.kill()?;
            qemu.wait()?;
            return Ok(false);
        }
        sleep(Duration::from_millis(20));
    }
}
