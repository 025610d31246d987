//! The layering check: which module may name which other, and where `unsafe` may be.
//!
//! It reads the sources as text, without comments, strings and character literals. That is less than a compiler knows, and
//! enough for rules that are kept in good will: it finds the slip that a reviewer overlooks.

mod source;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use self::source::{Token, tokens};

/// The only files that name the C bindings; everything else uses what they make of them.
const SYS: &[&str] = &["verbs/src/sys", "rdmacm/src/sys"];

/// Compares the bindings with the installed C headers, so it names them.
const LAYOUT_TEST: &str = "tests/tests/layout";

/// Files that may hold `unsafe`: the `sys` files, and the owner of each C object, because only the owner knows how long the
/// object lives. A name stands for the file and for the folder of that name.
const UNSAFE: &[&str] = &[
    "verbs/src/sys",
    "verbs/src/device",
    "verbs/src/async_event", // owns the device's queue of asynchronous events
    "verbs/src/pd",
    "verbs/src/mr",
    "verbs/src/pages", // owns mapped memory, and copies in and out while the device may write
    "verbs/src/pool",
    "verbs/src/cq",
    "verbs/src/srq",
    "verbs/src/qp",
    "verbs/src/ah",
    "verbs/src/mw",
    "verbs/src/endpoint", // owns no object, but posts buffers that the device then uses
    "verbs/src/wait",     // owns no object, but polls file descriptors
    "rdmacm/src/sys",
    "rdmacm/src/addr", // reads sockaddr structures
    "rdmacm/src/channel",
    "rdmacm/src/id",      // owns rdma_cm_id
    "rdmacm/src/context", // owns references on librdmacm's devices
    "rdmacm/src/driver",
    "rdmacm/src/connection",
];

/// Pure modules: data in, data out. They must run without a device, so they know no module that has one.
const PURE: &[&str] = &["rdmacm/src/proto", "rdmacm/src/stream/protocol"];

/// What a pure module must not name.
const IMPURE: &[&str] = &["sys", "channel", "verbs", "rdma_sys"];

/// The data path, which takes no lock in steady state.
const DATA_PATH: &[&str] =
    &["verbs/src/endpoint", "verbs/src/inflight", "verbs/src/wait", "verbs/src/pool", "verbs/src/cq", "verbs/src/qp"];

/// Locks in data-path files that are not on the data path, each with the reason.
const LOCKS_ALLOWED: &[(&str, &str)] = &[
    // Halves whose device did not stop in time are parked there when they are dropped, never while they are used.
    ("verbs/src/endpoint", "Mutex"),
];

/// Files that forbid `unsafe` to themselves and to their submodules.
const FORBID_UNSAFE: &[&str] = &["rdmacm/src/proto/mod.rs", "rdmacm/src/stream/protocol.rs", "verbs/src/inflight.rs"];

/// Folders that are checked.
const FOLDERS: &[&str] = &["verbs/src", "rdmacm/src", "examples/src", "tests/src", "tests/tests"];

/// A rule that a file breaks.
#[derive(Debug, PartialEq, Eq)]
struct Violation {
    path: String,
    /// 0: the file as a whole.
    line: usize,
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Checks the workspace.
///
/// # Errors
///
/// When a rule is broken; the message has one line for each place. When a file cannot be read.
pub(crate) fn check(root: &Path) -> Result<()> {
    let mut files = Vec::new();
    for folder in FOLDERS {
        read_sources(root, folder, &mut files)?;
    }
    files.sort();
    let violations = violations(&files);
    if !violations.is_empty() {
        let lines: Vec<_> = violations.iter().map(Violation::to_string).collect();
        bail!("the layering is broken:\n{}", lines.join("\n"));
    }
    println!("layering: {} files, all rules are kept", files.len());
    Ok(())
}

fn read_sources(root: &Path, folder: &str, files: &mut Vec<(String, String)>) -> Result<()> {
    let path = root.join(folder);
    let entries = fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            read_sources(root, &name, files)?;
        } else if name.ends_with(".rs") {
            let text = fs::read_to_string(entry.path()).with_context(|| format!("cannot read {name}"))?;
            files.push((name, text));
        }
    }
    Ok(())
}

/// All violations in files, given as pairs of path and text.
fn violations(files: &[(String, String)]) -> Vec<Violation> {
    let mut found = Vec::new();
    for (path, text) in files {
        let tokens = tokens(text);
        for token in &tokens {
            if let Some(what) = broken_rule(path, token) {
                found.push(Violation { path: path.clone(), line: token.line, what });
            }
        }
        if FORBID_UNSAFE.contains(&path.as_str()) && !forbids_unsafe(&tokens) {
            let what = "must begin with #![forbid(unsafe_code)]".to_owned();
            found.push(Violation { path: path.clone(), line: 0, what });
        }
    }
    for path in FORBID_UNSAFE {
        if !files.iter().any(|(known, _)| known == path) {
            let what = "is gone: move the rule to the file that took its place (xtask/src/layering.rs)".to_owned();
            found.push(Violation { path: (*path).to_owned(), line: 0, what });
        }
    }
    found
}

/// The rule that a word breaks in a file.
fn broken_rule(path: &str, token: &Token<'_>) -> Option<String> {
    let word = token.word;
    let library = path.starts_with("verbs/src/") || path.starts_with("rdmacm/src/");
    let lock_is_allowed = LOCKS_ALLOWED.iter().any(|(module, lock)| belongs(path, module) && *lock == word);
    match word {
        "rdmacm" if path.starts_with("verbs/src/") => {
            Some("names `rdmacm`: verbs knows nothing of connection management".to_owned())
        }
        "rdma_sys" if !any_belongs(path, SYS) && !belongs(path, LAYOUT_TEST) => {
            Some("names `rdma_sys`: only the two sys files do".to_owned())
        }
        "unsafe" if (library && !any_belongs(path, UNSAFE)) || path.starts_with("examples/") => {
            Some("has `unsafe`: it belongs to the file that owns the C object".to_owned())
        }
        "Mutex" | "RwLock" if any_belongs(path, DATA_PATH) && !lock_is_allowed => {
            Some(format!("names `{word}`: the data path takes no lock"))
        }
        _ if any_belongs(path, PURE) && IMPURE.contains(&word) && token.in_path => {
            Some(format!("names `{word}`: this module must work without a device"))
        }
        _ => None,
    }
}

/// Whether a file is the module's: `verbs/src/cq.rs` and `verbs/src/cq/poll.rs` are both `verbs/src/cq`'s.
fn belongs(path: &str, module: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

fn any_belongs(path: &str, modules: &[&str]) -> bool {
    modules.iter().any(|module| belongs(path, module))
}

fn forbids_unsafe(tokens: &[Token<'_>]) -> bool {
    tokens.windows(2).any(|pair| pair[0].word == "forbid" && pair[1].word == "unsafe_code")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The complaints about one file, beside those about files that the test did not make.
    fn complaints(path: &str, text: &str) -> Vec<String> {
        violations(&[(path.to_owned(), text.to_owned())])
            .iter()
            .filter(|violation| violation.path == path)
            .map(Violation::to_string)
            .collect()
    }

    #[track_caller]
    fn refused(path: &str, text: &str) {
        assert_eq!(complaints(path, text).len(), 1, "{path}: {text}");
    }

    #[track_caller]
    fn accepted(path: &str, text: &str) {
        assert_eq!(complaints(path, text), Vec::<String>::new(), "{path}: {text}");
    }

    #[test]
    fn verbs_never_names_rdmacm() {
        refused("verbs/src/cq.rs", "use rdmacm::Error;");
        accepted("verbs/src/cq.rs", "// rdmacm does this\n/* rdmacm */ const A: &str = \"rdmacm\";");
        accepted("rdmacm/src/lib.rs", "use rdmacm::Error;");
    }

    #[test]
    fn only_sys_names_the_bindings() {
        refused("verbs/src/qp.rs", "use rdma_sys::ibv_qp;");
        refused("rdmacm/src/channel.rs", "let id: *mut rdma_sys::rdma_cm_id;");
        refused("tests/tests/messages.rs", "use rdma_sys::ibv_qp;");
        accepted("tests/tests/layout.rs", "use rdma_sys::ibv_qp;");
        accepted("verbs/src/sys.rs", "pub use rdma_sys::ibv_qp;");
        accepted("rdmacm/src/sys/events.rs", "pub use rdma_sys::rdma_cm_event;");
    }

    #[test]
    fn unsafe_stays_with_the_owners() {
        refused("verbs/src/lib.rs", "unsafe { x() }");
        refused("rdmacm/src/listener.rs", "unsafe impl Send for X {}");
        refused("examples/src/bin/rping.rs", "unsafe { x() }");
        accepted("verbs/src/cq.rs", "unsafe { x() }");
        accepted("verbs/src/cq/poll.rs", "unsafe { x() }");
        accepted("rdmacm/src/listener.rs", "#![forbid(unsafe_code)] // unsafe");
        refused("verbs/src/cqs.rs", "unsafe { x() }");
    }

    #[test]
    fn pure_modules_know_no_device() {
        refused("rdmacm/src/proto/client.rs", "use crate::sys;");
        refused("rdmacm/src/proto/client.rs", "use crate::{error::Error, channel as c};");
        refused("rdmacm/src/proto/client.rs", "fn f(e: crate::channel::Event) {}");
        refused("rdmacm/src/proto/client.rs", "fn f(q: verbs::QueuePair) {}");
        refused("rdmacm/src/stream/protocol/sender.rs", "use super::super::sys;");
        accepted("rdmacm/src/proto/client.rs", "let channel = 1; let verbs = channel;");
        accepted("rdmacm/src/proto/client.rs", "/// As [`crate::channel::Event`].\nfn f() {}");
        accepted("rdmacm/src/stream/ring.rs", "use crate::sys;");
    }

    #[test]
    fn the_data_path_has_no_locks() {
        refused("verbs/src/pool.rs", "free: Mutex<Vec<u32>>,");
        refused("verbs/src/inflight.rs", "#![forbid(unsafe_code)] free: std::sync::RwLock<u8>,");
        accepted("verbs/src/endpoint.rs", "static GRAVEYARD: Mutex<u8> = Mutex::new(0);");
        refused("verbs/src/endpoint.rs", "static GRAVEYARD: RwLock<u8>;");
        accepted("verbs/src/device.rs", "known: Mutex<u8>,");
    }

    #[test]
    fn safe_modules_forbid_unsafe() {
        refused("rdmacm/src/proto/mod.rs", "//! #![forbid(unsafe_code)]\nmod client;");
        accepted("rdmacm/src/proto/mod.rs", "//! Pure.\n#![forbid(unsafe_code)]\nmod client;");
        assert_eq!(violations(&[]).len(), FORBID_UNSAFE.len(), "missing files are reported");
    }

    #[test]
    fn a_violation_names_its_line() {
        let text = "/* a\nb */\n\nuse rdmacm::X;";
        assert!(complaints("verbs/src/cq.rs", text)[0].starts_with("verbs/src/cq.rs:4: names `rdmacm`"));
    }
}
