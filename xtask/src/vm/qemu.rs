//! The qemu command line.

use std::path::Path;
use std::process::Command;

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accelerator {
    /// The host's CPU.
    Kvm,
    /// qemu's translator.
    Tcg,
    /// qemu's translator, with a guest clock that advances by 1 ns for each guest instruction, and jumps to the next timer
    /// when the guest is idle. One CPU only. Times measured in such a guest are instruction counts: they repeat within 1 %
    /// whatever else the host does.
    InstructionCount,
}

impl Accelerator {
    /// In words, for reports.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Tcg => "TCG",
            Self::InstructionCount => "TCG, counting instructions",
        }
    }
}

/// What a machine is made of.
#[derive(Debug)]
pub(crate) struct Hardware<'a> {
    pub(crate) accelerator: Accelerator,
    pub(crate) cpus: u32,
    /// As qemu reads it: `3G`.
    pub(crate) memory: &'a str,
    pub(crate) kernel: &'a Path,
    pub(crate) initrd: &'a Path,
    /// Kernel options beside those that every machine needs.
    pub(crate) kernel_options: &'a str,
    /// Where the console is written to.
    pub(crate) console: &'a Path,
}

impl Hardware<'_> {
    /// The command that starts the machine with its console in a file; it has no disk, no network and no display.
    ///
    /// It is run by setpriv, so that it dies with the thread that started it even if that was killed.
    pub(crate) fn command(&self) -> Command {
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
        // Nehalem without `rep_good`: the kernel of a newer CPU copies by `rep movsb`, which TCG does byte by byte.
        let (cpu, clear) = match self.accelerator {
            Accelerator::Kvm => {
                qemu.args(["-accel", "kvm"]);
                ("host", "")
            }
            Accelerator::Tcg => {
                qemu.args(["-accel", "tcg,thread=multi"]);
                ("Nehalem", "clearcpuid=rep_good")
            }
            Accelerator::InstructionCount => {
                qemu.args(["-accel", "tcg,thread=single"]);
                qemu.args(["-icount", "shift=0,sleep=off"]);
                qemu.args(["-rtc", "clock=vm,base=2026-01-01"]);
                ("Nehalem", "clearcpuid=rep_good")
            }
        };
        qemu.args(["-cpu", cpu, "-m", self.memory, "-smp", &self.cpus.to_string()]);
        qemu.args(["-machine", "q35,hpet=off,smm=off,vmport=off,i8042=off"]);
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        qemu.arg("-serial").arg(format!("file:{}", self.console.display()));
        // A write to this port ends qemu at once; a clean power-off would take seconds.
        qemu.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        qemu.arg("-kernel").arg(self.kernel).arg("-initrd").arg(self.initrd);
        // panic=-1 with -no-reboot: a panic ends qemu. An oops is a panic; a warning is found in the log afterwards.
        qemu.arg("-append").arg(format!(
            "console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable no_timer_check nokaslr \
             cryptomgr.notests random.trust_cpu=on log_buf_len=1M {clear} {}",
            self.kernel_options
        ));
        qemu
    }
}

/// Adds a host folder that the guest can mount by `tag`.
pub(crate) fn share_folder(qemu: &mut Command, tag: &str, folder: &Path, read_only: bool) {
    let mut device = format!("local,id={tag},path={},security_model=none,multidevs=remap", folder.display());
    if read_only {
        device.push_str(",readonly=on");
    }
    qemu.arg("-fsdev").arg(device);
    qemu.args(["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
}
