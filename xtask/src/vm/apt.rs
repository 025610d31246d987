//! The three things that are asked of apt: which package is meant, download it, refresh the lists.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process;
use crate::setup;

/// The first dependency of one of `metapackages` whose name begins with `prefix`: the ABI number in a kernel package's name
/// changes with each security update, so it is never written down.
///
/// # Errors
///
/// When the package lists have none, even after they were refreshed.
pub(crate) fn find_dependency(metapackages: &[String], prefix: &str) -> Result<String> {
    if let Some(package) = look_up(metapackages, prefix)? {
        return Ok(package);
    }
    refresh(&format!("no package {prefix}* is known"))?;
    look_up(metapackages, prefix)?.with_context(|| {
        format!("no package {prefix}* is known to apt: {} are not in its sources", metapackages.join(" and "))
    })
}

fn look_up(metapackages: &[String], prefix: &str) -> Result<Option<String>> {
    for metapackage in metapackages {
        let found = dependencies(metapackage)?.into_iter().find(|package| package.starts_with(prefix));
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// What a package depends on; nothing, if apt does not know it.
///
/// # Errors
///
/// When apt-cache cannot be started.
pub(crate) fn dependencies(package: &str) -> Result<Vec<String>> {
    let listing = Command::new("apt-cache").args(["depends", package]).output().context("cannot start `apt-cache`")?;
    Ok(String::from_utf8_lossy(&listing.stdout)
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::to_owned)
        .collect())
}

/// Downloads a package into `folder` and returns the file; it is not installed.
///
/// # Errors
///
/// When apt cannot fetch it, even after its lists were refreshed.
pub(crate) fn download(folder: &Path, package: &str) -> Result<PathBuf> {
    if !process::succeeds(&mut download_command(folder, package)) {
        refresh(&format!("{package} cannot be downloaded"))?;
        process::run(download_command(folder, package).stdout(Stdio::null()))?;
    }
    let prefix = format!("{package}_");
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            return Ok(entry.path());
        }
    }
    bail!("`apt-get download {package}` left no file in {}", folder.display())
}

fn download_command(folder: &Path, package: &str) -> Command {
    let mut command = Command::new("apt-get");
    command.current_dir(folder).args(["download", "-q", package]);
    if setup::is_root() {
        // apt drops root for downloads, and then cannot write into our folder.
        command.args(["-o", "APT::Sandbox::User=root"]);
    }
    command
}

/// Refreshes the package lists: those of a fresh machine are empty, and old ones name files that are gone.
fn refresh(why: &str) -> Result<()> {
    if !setup::is_root() {
        bail!("{why}: run `sudo apt-get update` and try again");
    }
    eprintln!("{why}: refreshing the package lists");
    process::run(Command::new("apt-get").args(["update", "-q"]).stdout(Stdio::null()))
}
