//! Soft-iWARP for the test machine. No Debian kernel has it, but its source builds out of tree, against the packages with the
//! kernel's headers. Nothing is installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::apt;
use super::kernel::{Kernel, Series, lock, remove_folder};
use crate::process;

/// Returns siw.ko for a kernel below `cache`, and builds it first if it is not there yet: about 160 MB of downloads, 20 s.
///
/// # Errors
///
/// When a package cannot be downloaded, or the build fails.
pub(crate) fn prepare(kernel: &Kernel, cache: &Path) -> Result<PathBuf> {
    let module = cache.join(format!("siw-{}.ko", kernel.release));
    if module.exists() {
        return Ok(module);
    }
    let _lock = lock(cache, "siw")?;
    if module.exists() {
        return Ok(module);
    }
    eprintln!("test machine: building siw for Linux {} (about 160 MB of downloads, once)", kernel.release);
    let folder = cache.join("siw.unfinished");
    remove_folder(&folder)?;
    fs::create_dir_all(&folder)?;
    let headers = unpack_headers(kernel, &folder)?;
    let source = unpack_source(kernel.series, &folder)?;
    process::run(
        Command::new("make")
            .args(["-s", "-C"])
            .arg(&headers)
            .arg(format!("M={}", source.display()))
            // No type information for the module: it would need pahole.
            .args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]),
    )?;
    let built = source.join("siw.ko");
    process::run(Command::new("strip").arg("--strip-debug").arg(&built))?;
    fs::rename(&built, &module)?;
    remove_folder(&folder)?;
    Ok(module)
}

/// Unpacks what modules are built against, and returns the folder for `make -C`.
fn unpack_headers(kernel: &Kernel, folder: &Path) -> Result<PathBuf> {
    let release = &kernel.release;
    let package = format!("linux-headers-{release}");
    // Beside the headers for this architecture: those for all, the build tools, and the compiler's version. The exact
    // names are the package's own dependencies, and fit the kernel only if all are of one day.
    let mut packages = apt::dependencies(&package)?;
    packages.retain(|name| name.starts_with("linux-headers-") || name.starts_with("linux-kbuild-"));
    packages.push(package);
    for package in &packages {
        let archive = apt::download(folder, package)?;
        process::run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(folder))?;
    }
    let headers = folder.join(format!("usr/src/linux-headers-{release}"));
    // The makefile includes the common one by its installed path.
    let makefile = headers.join("Makefile");
    let text = fs::read_to_string(&makefile).with_context(|| format!("cannot read {}", makefile.display()))?;
    let here = format!("{}/usr/src/", folder.display());
    fs::write(&makefile, text.replace("/usr/src/", &here))?;
    Ok(headers)
}

/// Unpacks the folder with siw's source, and makes it build as a module.
fn unpack_source(series: Series, folder: &Path) -> Result<PathBuf> {
    let archive = apt::download(folder, &format!("linux-source-{}", series.name()))?;
    let name = format!("linux-source-{}", series.name());
    let source = folder.join("siw");
    fs::create_dir_all(&source)?;
    // The package holds a tar file of the whole kernel: dpkg-deb | tar | tar, without storing it.
    let mut dpkg = Command::new("dpkg-deb").arg("--fsys-tarfile").arg(&archive).stdout(Stdio::piped()).spawn()?;
    let package = dpkg.stdout.take().expect("the output was asked to be a pipe");
    let mut outer = Command::new("tar")
        .args(["-xO", &format!("./usr/src/{name}.tar.xz")])
        .stdin(package)
        .stdout(Stdio::piped())
        .spawn()?;
    let kernel = outer.stdout.take().expect("the output was asked to be a pipe");
    process::run(
        Command::new("tar")
            .args(["-xJ", "--strip-components=5", "-C"])
            .arg(&source)
            .arg(format!("{name}/drivers/infiniband/sw/siw"))
            .stdin(kernel),
    )?;
    let complete = outer.wait()?.success() && dpkg.wait()?.success();
    ensure!(complete, "{} cannot be unpacked", archive.display());
    let makefile = source.join("Makefile");
    let text = fs::read_to_string(&makefile)?;
    fs::write(&makefile, text.replace("$(CONFIG_RDMA_SIW)", "m"))?;
    Ok(source)
}
