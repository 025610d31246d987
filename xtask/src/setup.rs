//! Installing what the other commands need, on Debian; saying what is needed, elsewhere.

use std::collections::HashSet;
use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::libclang::{self, Libclang};
use crate::process;

/// What a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Building the workspace: the C libraries, and libclang for rdma-sys.
    Build,
    /// Running the test machine, with the C programs that the tests talk to.
    Machine,
    /// Building siw.ko.
    Siw,
}

impl Need {
    /// Debian's packages for it, without libclang, of which there are several.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Build => &["gcc", "libc6-dev", "pkg-config", "libibverbs-dev", "librdmacm-dev"],
            Self::Machine => &[
                "qemu-system-x86",
                "busybox-static",
                "kmod",
                "procps", // the tests stop and continue programs with kill(1)
                "xz-utils",
                "zstd",
                "iproute2",
                "rdma-core",
                "ibverbs-providers",
                "ibverbs-utils",
                "rdmacm-utils",
                "perftest",
                "valgrind",
            ],
            // The compiler that Debian builds its kernels with is its default one.
            Self::Siw => &["make", "gcc"],
        }
    }
}

/// `cargo xtask setup`: installs everything, and says what a plain `cargo build` needs.
///
/// # Errors
///
/// As for [`ensure`].
pub(crate) fn run() -> Result<()> {
    ensure(&[Need::Build, Need::Machine])?;
    match libclang::choose()? {
        Libclang::Default => println!("setup: all is there, `cargo build` works as it is"),
        Libclang::At(folder) => println!(
            "setup: all is there. For commands other than `cargo xtask`, since the newest libclang here is too new for \
             rdma-sys:\n\n    export LIBCLANG_PATH={}\n",
            process::quote(folder)
        ),
        Libclang::Missing => bail!("libclang is still missing after its package was installed"),
    }
    Ok(())
}

/// Installs what is missing; when nothing is, it takes a few milliseconds and does not touch the network.
///
/// # Errors
///
/// When something is missing and this process is not root, or this is not Debian; the message has the command to run or the
/// packages to install. When apt fails.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    let mut wanted: Vec<&str> = needs.iter().flat_map(|need| need.packages()).copied().collect();
    let clang_is_missing = needs.contains(&Need::Build) && libclang::choose()? == Libclang::Missing;
    if !is_debian() {
        return ensure_elsewhere(&wanted, needs, clang_is_missing);
    }
    let installed = installed(&wanted)?;
    wanted.retain(|package| !installed.contains(*package));
    if wanted.is_empty() && !clang_is_missing {
        return Ok(());
    }
    let mut packages: Vec<String> = wanted.into_iter().map(str::to_owned).collect();
    if !is_root() {
        if clang_is_missing {
            packages.extend(libclang::packages()?);
        }
        bail!(
            "some packages are missing, and only root can install them. Please run:\n\n    \
             sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends {}'\n",
            packages.join(" ")
        );
    }
    // The lists of a fresh machine are empty, and libclang's packages are looked up in them.
    apt(&["update", "-q"])?;
    if clang_is_missing {
        packages.extend(libclang::packages()?);
    }
    println!("setup: installing {}", packages.join(" "));
    let mut arguments = vec!["install", "-y", "-q", "--no-install-recommends"];
    arguments.extend(packages.iter().map(String::as_str));
    apt(&arguments)
}

/// A cargo command for the workspace, with a libclang that rdma-sys can be built with.
///
/// # Errors
///
/// When there is none.
pub(crate) fn cargo() -> Result<Command> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(program);
    cargo.current_dir(process::workspace_root()).stdin(Stdio::null());
    if let Libclang::At(folder) = libclang::choose()? {
        cargo.env("LIBCLANG_PATH", folder);
    }
    Ok(cargo)
}

/// Whether this process may install packages.
pub(crate) fn is_root() -> bool {
    // The owner of /proc/self is this process's effective user.
    fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}

fn is_debian() -> bool {
    fs::read_to_string("/etc/os-release").is_ok_and(|release| release.lines().any(|line| line == "ID=debian"))
}

/// On other distributions only the libraries can be checked, and nothing is installed.
fn ensure_elsewhere(wanted: &[&str], needs: &[Need], clang_is_missing: bool) -> Result<()> {
    let libraries = ["--exists", "libibverbs", "librdmacm"];
    if needs == [Need::Build] && !clang_is_missing && process::succeeds(Command::new("pkg-config").args(libraries)) {
        return Ok(());
    }
    bail!(
        "this is not Debian, so nothing is installed for you. Please install what your distribution has in place of \
         Debian's packages {}, and a libclang of version {} or older (set LIBCLANG_PATH to its folder). The test machine \
         boots Debian's kernel package and needs a Debian host; `cargo xtask test --host-only` runs everything else",
        wanted.join(" "),
        libclang::NEWEST_USABLE
    )
}

/// Those of `packages` that are installed.
fn installed(packages: &[&str]) -> Result<HashSet<String>> {
    // It ends with 1 when it does not know one of them, and still lists the others.
    let listing = Command::new("dpkg-query")
        .args(["-W", "-f", "${Package} ${db:Status-Status}\n"])
        .args(packages)
        .output()
        .context("cannot start `dpkg-query`")?;
    Ok(String::from_utf8_lossy(&listing.stdout)
        .lines()
        .filter_map(|line| line.strip_suffix(" installed"))
        .map(str::to_owned)
        .collect())
}

fn apt(arguments: &[&str]) -> Result<()> {
    process::run(Command::new("apt-get").args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null()))
}
