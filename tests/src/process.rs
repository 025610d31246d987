//! Other programs: started with captured output, ended in time.

use std::ffi::OsStr;
use std::fmt;
use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::network::host_argument;
use crate::wait_for;

/// How long a server may take until it listens.
const READY: Duration = Duration::from_secs(10);

/// Whose rping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// rdma-core's.
    C,
    /// This project's.
    Ours,
}

impl Kind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::C, Self::Ours];

    /// The program.
    #[must_use]
    pub fn rping(self) -> Command {
        match self {
            Self::C => Command::new("rping"),
            Self::Ours => Command::new(our_program("rping")),
        }
    }

    /// `rping -s` on this address, with more arguments; returns when it listens.
    ///
    /// # Panics
    ///
    /// If it cannot be started, ends at once, or does not listen in time.
    #[must_use]
    pub fn server<I: AsRef<OsStr>>(self, address: SocketAddr, arguments: impl IntoIterator<Item = I>) -> Program {
        let mut command = self.rping();
        command.arg("-s").args(["-a", &host_argument(address), "-p", &address.port().to_string()]).args(arguments);
        let mut program = Program::start(format!("{self:?} rping server"), command);
        wait_for(&format!("{program} to listen"), READY, || {
            assert!(!program.has_ended(), "{program} ended before it listened:\n{}", program.finish(READY));
            // The kernel says so a moment before it is true: then the program goes on to wait for clients.
            (is_listening(address) && program.sleeps()).then_some(())
        });
        program
    }

    /// `rping -c` to this address, with more arguments.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    #[must_use]
    pub fn client<I: AsRef<OsStr>>(self, address: SocketAddr, arguments: impl IntoIterator<Item = I>) -> Program {
        let mut command = self.rping();
        command.arg("-c").args(["-a", &host_argument(address), "-p", &address.port().to_string()]).args(arguments);
        Program::start(format!("{self:?} rping client"), command)
    }
}

/// A program of the examples: `RDMACM_BIN_DIR` names their folder, or they lie beside the tests.
///
/// # Panics
///
/// If it is not there.
#[must_use]
pub fn our_program(name: &str) -> PathBuf {
    let folder = std::env::var_os("RDMACM_BIN_DIR").map_or_else(
        || {
            let test = std::env::current_exe().expect("this program has a path");
            test.ancestors().nth(2).expect("tests lie in target/debug/deps").to_owned()
        },
        PathBuf::from,
    );
    let program = folder.join(name);
    assert!(program.exists(), "{} is missing: build it with `cargo build -p rdmacm-examples`", program.display());
    program
}

/// Whether somebody listens on the port of this address, as the kernel says.
///
/// # Panics
///
/// If the program `rdma` (package iproute2) cannot be run.
#[must_use]
pub fn is_listening(address: SocketAddr) -> bool {
    has_id("LISTEN", "src-addr", address.port())
}

/// Whether a client of this host is connected, or about to be, to the port of this address.
///
/// # Panics
///
/// If the program `rdma` (package iproute2) cannot be run.
#[must_use]
pub fn is_connected(address: SocketAddr) -> bool {
    has_id("CONNECT", "dst-addr", address.port())
}

/// Whether the kernel has an id in this state, with this port in the address named so.
fn has_id(state: &str, address: &str, port: u16) -> bool {
    let output = Command::new("rdma").args(["resource", "show", "cm_id"]).output().expect("iproute2 is installed");
    let (state, port) = (format!(" state {state} "), format!(":{port}"));
    String::from_utf8_lossy(&output.stdout).lines().any(|line| {
        let mut words = line.split(' ');
        line.contains(&state)
            && words.any(|word| word == address)
            && words.next().is_some_and(|end| end.ends_with(&port))
    })
}

/// A running program.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    output: Option<[JoinHandle<String>; 2]>,
}

/// What a program left behind.
#[derive(Clone, Debug)]
pub struct Finished {
    name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error output.
    pub stderr: String,
}

impl Program {
    /// Starts it.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    #[must_use]
    pub fn start(name: impl Into<String>, mut command: Command) -> Self {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {command:?}: {error}"));
        let output = [collect(child.stdout.take()), collect(child.stderr.take())];
        Self { name, child, output: Some(output) }
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended.
    ///
    /// # Panics
    ///
    /// If the system does not say.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("the child is ours").is_some()
    }

    /// Whether all its threads wait for something.
    fn sleeps(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.id()));
        tasks.into_iter().flatten().flatten().all(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            status.contains("State:\tS")
        })
    }

    /// Sends SIGKILL, and waits until the process is gone.
    ///
    /// # Panics
    ///
    /// If the system does not let us.
    pub fn kill(&mut self) {
        self.child.kill().expect("the child is ours");
        self.child.wait().expect("the child is ours");
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    ///
    /// If that takes longer than `limit`.
    #[track_caller]
    pub fn finish(&mut self, limit: Duration) -> Finished {
        let start = Instant::now();
        let mut patience = Duration::from_millis(1);
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child is ours") {
                break status;
            }
            if start.elapsed() > limit {
                self.child.kill().expect("the child is ours");
                self.child.wait().expect("the child is ours");
                let [stdout, stderr] = self.collected();
                panic!("{self} did not end within {limit:?}:\n{stdout}{stderr}");
            }
            thread::sleep(patience);
            patience = (patience * 2).min(Duration::from_millis(20));
        };
        let [stdout, stderr] = self.collected();
        Finished { name: self.name.clone(), status, stdout, stderr }
    }

    fn collected(&mut self) -> [String; 2] {
        self.output
            .take()
            .map(|output| output.map(|thread| thread.join().expect("the reader does not panic")))
            .unwrap_or_default()
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.id())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Finished {
    /// Checks its exit status.
    ///
    /// # Panics
    ///
    /// If it is another, with all output.
    #[track_caller]
    pub fn expect_status(self, status: i32) -> Self {
        assert_eq!(self.status.code(), Some(status), "{self}");
        self
    }

    /// Checks that it was successful.
    ///
    /// # Panics
    ///
    /// If not, with all output.
    #[track_caller]
    pub fn expect_success(self) -> Self {
        self.expect_status(0)
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n{}{}", self.name, self.status, self.stdout, self.stderr)
    }
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    let mut pipe = pipe.expect("all output is piped");
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // A program that is killed ends its output; whatever came before is what there is.
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
