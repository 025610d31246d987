//! The test machine: a virtual machine with a real kernel RDMA stack, for hosts that have none.
//!
//! qemu boots Debian's kernel with the host's own files as the root folder, brings up two Soft-RoCE devices that are connected
//! by a veth pair, runs one command there, and ends with its exit status. `docs/test-machine.md` has the whole story.

mod apt;
mod complaints;
mod initrd;
mod kernel;
mod kvm;
mod qemu;
mod siw;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};

pub(crate) use kernel::Series;

use self::kernel::Kernel;
use self::qemu::{Accelerator, Hardware};
use crate::process;

/// Exit status of a run that has no result, because the guest hung or its kernel died.
pub(crate) const STATUS_NO_RESULT: i32 = 251;

/// Exit status of a run whose command was successful while the guest's kernel reported a bug.
pub(crate) const STATUS_KERNEL_COMPLAINED: i32 = 252;

const STAGE2: &str = include_str!("../../guest/stage2.sh");

/// Lines of the console that are shown when there is no result.
const CONSOLE_LINES: usize = 60;

/// So long before its end a guest writes to its console what its programs are waiting for.
const LAST_WORDS: Duration = Duration::from_secs(30);

/// Variables of the host that the guest gets, if they are set; a name that ends in `*` stands for all that begin so.
const PASSED_VARIABLES: &[&str] = &[
    "PATH",
    "HOME",
    "TERM",
    "LANG",
    "CARGO_HOME",
    "RUSTUP_HOME",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "RUST_TEST_*",
    "PROPTEST_*",
    "RDMACM_*",
];

/// Set by Ctrl-C and by termination; the run then ends the guest and cleans up.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// What to boot.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// Debian kernel series.
    pub(crate) kernel: Series,
    /// The guest is ended when it takes longer, from its start.
    pub(crate) timeout: Duration,
    pub(crate) cpus: u32,
    /// As qemu reads it: `3G`.
    pub(crate) memory: String,
    /// Count instructions instead of time; see [`Accelerator::InstructionCount`].
    pub(crate) instruction_count: bool,
    /// Build siw.ko and put it into the guest.
    pub(crate) siw: bool,
    /// MTU of the veth pair in bytes; the RDMA MTU is the next lower power of two.
    pub(crate) mtu: u32,
    /// Put a netem qdisc on both links. An idle one costs 4 to 8 % of the speed.
    pub(crate) netem: bool,
    /// A folder that the guest can write as `/run/vm`, and that is kept. Default: a temporary one.
    pub(crate) out: Option<PathBuf>,
    /// Variables for the command, beside those of the host.
    pub(crate) environment: Vec<(String, String)>,
    /// The folder in which the command runs.
    pub(crate) folder: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self {
            kernel: Series::default(),
            timeout: Duration::from_secs(600),
            cpus: 2,
            memory: "3G".to_owned(),
            instruction_count: false,
            siw: false,
            mtu: 4200,
            netem: true,
            out: None,
            environment: Vec::new(),
            folder: std::env::current_dir().unwrap_or_else(|_| process::workspace_root()),
        }
    }
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The command's exit status, [`STATUS_NO_RESULT`] or [`STATUS_KERNEL_COMPLAINED`].
    pub(crate) status: i32,
    /// Everything that the command wrote.
    pub(crate) output: String,
    /// What `uname -r` says in the guest.
    pub(crate) kernel_release: String,
    /// What executed the guest, in words.
    pub(crate) accelerator: &'static str,
}

impl Machine {
    /// Boots the machine, runs the command in it, and passes its output on while it runs.
    ///
    /// # Errors
    ///
    /// When the machine cannot be prepared or started, or the run was interrupted. A command that fails and a guest that dies
    /// are no errors, but a status in the [`Outcome`].
    pub(crate) fn run(&self, command: &[String]) -> Result<Outcome> {
        ensure!(!command.is_empty(), "no command was given: cargo xtask vm -- COMMAND");
        ensure!(
            cfg!(target_arch = "x86_64"),
            "the test machine is an x86-64 one, with the host's own programs in it: it needs an x86-64 host"
        );
        catch_interrupts()?;
        let cache = process::target_dir().join("vm");
        let kernel = Kernel::prepare(self.kernel, &cache)?;
        let siw = if self.siw { Some(siw::prepare(&kernel, &cache)?) } else { None };
        let initrd = initrd::prepare(&kernel, siw.as_deref(), &cache)?;
        let accelerator = if self.instruction_count {
            Accelerator::InstructionCount
        } else if kvm::works(&kernel.vmlinux(), &initrd, &cache)? {
            Accelerator::Kvm
        } else {
            Accelerator::Tcg
        };

        let share = Share::open(self.out.as_deref(), &cache)?;
        self.write_request(&share.folder, command)?;
        let console = share.folder.join("console");
        let hardware = Hardware {
            accelerator,
            cpus: if self.instruction_count { 1 } else { self.cpus },
            memory: &self.memory,
            kernel: &kernel.vmlinux(),
            initrd: &initrd,
            kernel_options: "",
            console: &console,
        };
        let mut qemu = hardware.command();
        qemu.args(["-serial", "stdio"]);
        qemu::share_folder(&mut qemu, "root", Path::new("/"), true);
        qemu::share_folder(&mut qemu, "share", &share.folder, false);
        let (end, output) = boot(&mut qemu, self.timeout)?;

        let read = |name: &str| fs::read(share.folder.join(name)).unwrap_or_default();
        let console = String::from_utf8_lossy(&read("console")).into_owned();
        let log = String::from_utf8_lossy(&read("dmesg")).into_owned() + &console;
        let mut status = String::from_utf8_lossy(&read("status")).trim().parse().ok();
        let complaints = complaints::find(&log);
        if status.is_none() {
            explain(end, self.timeout, &console, complaints.is_empty());
        }
        if !complaints.is_empty() {
            eprintln!("test machine: the guest's kernel reported a bug:");
            for line in complaints.iter().take(100) {
                eprintln!("  {line}");
            }
            if status == Some(0) {
                status = Some(STATUS_KERNEL_COMPLAINED);
            }
        }
        Ok(Outcome {
            status: status.unwrap_or(STATUS_NO_RESULT),
            output,
            kernel_release: kernel.release,
            accelerator: accelerator.describe(),
        })
    }

    /// Writes the files that `guest/stage2.sh` reads.
    fn write_request(&self, share: &Path, command: &[String]) -> Result<()> {
        let mut environment = String::new();
        let mut set = |name: &str, value: &str| {
            environment.push_str(&format!("{name}={}\n", process::quote(value)));
        };
        for (name, value) in std::env::vars_os() {
            let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) else {
                continue; // not text: nothing that a test could depend on
            };
            if is_passed(&name) {
                set(&name, &value);
            }
        }
        let library = process::workspace_root().join("xtask/guest");
        set("RDMACM_TEST_MACHINE", "1");
        set("RDMACM_GUEST_LIB", &library.to_string_lossy());
        let last_words = self.timeout.saturating_sub(LAST_WORDS).max(self.timeout / 2);
        set("LAST_WORDS_AFTER", &last_words.as_secs().to_string());
        set("PAIR_MTU", &self.mtu.to_string());
        set("PAIR_NETEM", if self.netem { "1" } else { "0" });
        for (name, value) in &self.environment {
            set(name, value);
        }
        let words: Vec<_> = command.iter().map(process::quote).collect();
        for (name, contents) in [
            ("stage2.sh", STAGE2),
            ("environment", &environment),
            ("command", &words.join(" ")),
            ("folder", &self.folder.to_string_lossy()),
        ] {
            fs::write(share.join(name), contents)
                .with_context(|| format!("cannot write {name} into {}", share.display()))?;
        }
        Ok(())
    }
}

fn is_passed(name: &str) -> bool {
    PASSED_VARIABLES.iter().any(|passed| match passed.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == *passed,
    })
}

/// Why qemu ended.
#[derive(Clone, Copy, Debug)]
enum End {
    /// By itself; with its result in the share if all went well.
    Exited,
    /// We ended it, because its time was over.
    TimedOut,
}

/// Runs qemu to its end, at most for `timeout`.
fn boot(command: &mut Command, timeout: Duration) -> Result<(End, String)> {
    let mut qemu = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start qemu-system-x86_64; `cargo xtask setup` installs it")?;
    let stdout = qemu.stdout.take().expect("the output was asked to be a pipe");
    let copier = std::thread::spawn(move || process::copy_output(stdout));
    let deadline = Instant::now() + timeout;
    let end = loop {
        // First, because Ctrl-C in a terminal reaches qemu too, which then exits.
        if INTERRUPTED.load(Ordering::Relaxed) {
            break Err(anyhow!("interrupted"));
        }
        if qemu.try_wait()?.is_some() {
            break Ok(End::Exited);
        }
        if Instant::now() >= deadline {
            break Ok(End::TimedOut);
        }
        sleep(Duration::from_millis(20));
    };
    if !matches!(end, Ok(End::Exited)) {
        qemu.kill()?;
        qemu.wait()?;
    }
    let output = copier.join().expect("copying the output does not panic");
    Ok((end?, output))
}

/// Says why there is no result, and what the guest's console showed last, unless the kernel's complaints are shown anyway.
fn explain(end: End, timeout: Duration, console: &str, show_console: bool) {
    match end {
        End::TimedOut => {
            eprintln!("test machine: no result after {} s (--timeout), the guest was ended", timeout.as_secs())
        }
        End::Exited => eprintln!("test machine: no result, the guest ended by itself: its kernel died or did not boot"),
    }
    if show_console {
        let lines: Vec<_> = console.lines().collect();
        eprintln!("test machine: the end of its console:");
        for line in &lines[lines.len().saturating_sub(CONSOLE_LINES)..] {
            eprintln!("  {line}");
        }
    }
}

/// The folder that host and guest share in one run.
struct Share {
    folder: PathBuf,
    /// Held while the run lasts: a folder whose lock is free was left by a process that was killed.
    lock: Option<File>,
}

impl Share {
    fn open(out: Option<&Path>, cache: &Path) -> Result<Self> {
        let runs = cache.join("runs");
        if let Some(out) = out {
            fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
            let folder = out.canonicalize()?;
            for stale in ["status", "dmesg", "console"] {
                let _ = fs::remove_file(folder.join(stale)); // mostly not there
            }
            return Ok(Self { folder, lock: None });
        }
        fs::create_dir_all(&runs).with_context(|| format!("cannot make {}", runs.display()))?;
        let _guard = kernel::lock(cache, "runs")?;
        for entry in fs::read_dir(&runs)? {
            let left = entry?.path();
            let abandoned = File::open(left.join("lock")).map_or(true, |lock| lock.try_lock().is_ok());
            if abandoned {
                let _ = fs::remove_dir_all(left); // another user's: not ours to remove
            }
        }
        let folder = runs.join(std::process::id().to_string());
        kernel::remove_folder(&folder)?;
        fs::create_dir_all(&folder)?;
        let lock = File::create(folder.join("lock"))?;
        lock.lock()?;
        Ok(Self { folder, lock: Some(lock) })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.lock.is_some() {
            let _ = fs::remove_dir_all(&self.folder); // the next run tries again
        }
    }
}

/// Makes Ctrl-C and termination end the guest and clean up, instead of ending this process where it stands.
fn catch_interrupts() -> Result<()> {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if ONCE.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed)).context("cannot catch Ctrl-C")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_variables_reach_the_guest() {
        assert!(is_passed("PATH"));
        assert!(is_passed("RDMACM_SOAK"));
        assert!(is_passed("RUST_TEST_THREADS"));
        assert!(!is_passed("CARGO_MANIFEST_DIR"));
        assert!(!is_passed("PATHS"));
    }
}
