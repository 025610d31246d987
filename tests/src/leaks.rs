//! What a process holds, before and after.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The kinds of object that `rdma resource show` counts.
const KINDS: [&str; 7] = ["cm_id", "qp", "cq", "srq", "mr", "pd", "ctx"];

/// How long what was given back may still be counted: the kernel ends a connection's id and queue pair in the background.
const GRACE: Duration = Duration::from_secs(5);

/// The file descriptors of this process, and the RDMA objects of the whole host.
///
/// The kernel knows the objects of a thread, not those of a process, and forgets whose they were when the thread ends. So
/// everything is counted, and no other program may use RDMA meanwhile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    files: usize,
    objects: BTreeMap<&'static str, usize>,
}

impl Holdings {
    /// What there is now.
    ///
    /// # Panics
    ///
    /// If the kernel cannot be asked.
    #[must_use]
    pub fn now() -> Self {
        let files = fs::read_dir("/proc/self/fd").expect("/proc is mounted").count();
        let resources = resources();
        let count = |kind| -> usize {
            let key = format!("\"{kind}\":");
            resources.split(&key).skip(1).map(leading_number).sum()
        };
        let objects = KINDS.into_iter().map(|kind| (kind, count(kind))).collect();
        Self { files, objects }
    }

    /// Checks that this process holds no more files and queue pairs than at the time of `self`, while other programs may
    /// hold more connection ids: a stopped server keeps a client's request after the client is gone.
    ///
    /// # Panics
    ///
    /// If more is held, even after a grace period.
    #[track_caller]
    pub fn expect_own_unchanged(&self) {
        let mut allowed = self.clone();
        allowed.objects.insert("cm_id", usize::MAX);
        allowed.expect_unchanged();
    }

    /// Checks that no more is held than at the time of `self`.
    ///
    /// # Panics
    ///
    /// If more is held, even after a grace period for what the kernel ends in the background.
    #[track_caller]
    pub fn expect_unchanged(&self) {
        if let Err(left) = self.unchanged_within(GRACE) {
            panic!("{left}");
        }
    }

    /// Waits until no more is held than at the time of `self`, for at most `grace`.
    ///
    /// # Errors
    ///
    /// What was held before and is held now, in words.
    ///
    /// # Panics
    ///
    /// If the kernel cannot be asked.
    pub fn unchanged_within(&self, grace: Duration) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let now = Self::now();
            if now.files <= self.files && self.objects.iter().all(|(kind, count)| now.objects[kind] <= *count) {
                return Ok(());
            }
            if start.elapsed() >= grace {
                return Err(format!("left behind: before {self}, now {now}\n{}", open_files()));
            }
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl fmt::Display for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files", self.files)?;
        self.objects.iter().try_for_each(|(kind, count)| write!(f, ", {count} {kind}"))
    }
}

/// The counts of all devices, as JSON.
fn resources() -> String {
    let output = Command::new("rdma").args(["-j", "resource", "show"]).output().expect("iproute2 is installed");
    assert!(output.status.success(), "rdma resource show: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn leading_number(text: &str) -> usize {
    let digits = text.find(|next: char| !next.is_ascii_digit()).unwrap_or(text.len());
    text[..digits].parse().unwrap_or_else(|_| panic!("rdma gives a number, not {text}"))
}

fn open_files() -> String {
    let mut text = String::new();
    for entry in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        text += &format!("  {} -> {}\n", entry.file_name().to_string_lossy(), target.display());
    }
    text
}

/// Bytes of memory of this process: resident, and pinned for devices.
///
/// # Panics
///
/// If the kernel cannot be asked.
#[must_use]
pub fn memory() -> (usize, usize) {
    let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let field = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_else(|| panic!("no {name} in:\n{status}"));
        line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number of kB") * 1024
    };
    (field("VmRSS:"), field("VmPin:"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_open_is_counted() {
        let count = || fs::read_dir("/proc/self/fd").expect("/proc is mounted").count();
        let before = count();
        let file = fs::File::open("/proc/self/status").expect("/proc is mounted");
        assert_eq!(count(), before + 1);
        drop(file);
        assert!(memory().0 > 0);
    }
}
