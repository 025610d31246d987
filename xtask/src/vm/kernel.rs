//! The test machine's kernel: Debian's package, downloaded and unpacked below `target/vm`. Nothing is installed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::apt;
use crate::process;

/// The kernels that the project is tested with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Series {
    /// Debian 12's own kernel, the default: rxe does its work in the caller's context, which is the fastest.
    #[default]
    #[value(name = "6.1")]
    V6_1,
    /// The newer long-term kernel: rxe works in kernel threads.
    #[value(name = "6.12")]
    V6_12,
}

impl Series {
    /// The two numbers, as in package names.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        }
    }

    /// Packages that depend on the newest kernel of this series. Debian's cloud kernels are not among them: they have
    /// neither rdma_rxe nor 9p.
    fn metapackages(self) -> [String; 2] {
        [format!("linux-image-{}-amd64", self.name()), "linux-image-amd64".to_owned()]
    }
}

/// A kernel on disk, ready to be booted.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Which series it belongs to.
    pub(crate) series: Series,
    /// What `uname -r` says, such as `6.1.0-57-amd64`.
    pub(crate) release: String,
    /// The folder with `vmlinux` and `lib/modules`.
    pub(crate) folder: PathBuf,
}

impl Kernel {
    /// Returns the kernel below `cache`, and downloads it first if it is not there yet.
    ///
    /// The newest package of the series is taken, as the host's package lists know it; a kernel that is there is kept until
    /// its folder is removed. Safe when several processes call it at once: one works, the others wait.
    ///
    /// # Errors
    ///
    /// When the package cannot be found, downloaded or unpacked.
    pub(crate) fn prepare(series: Series, cache: &Path) -> Result<Self> {
        let folder = cache.join(series.name());
        if let Some(kernel) = Self::open(series, &folder) {
            return Ok(kernel);
        }
        let _lock = lock(cache, series.name())?;
        if let Some(kernel) = Self::open(series, &folder) {
            return Ok(kernel);
        }
        // Made beside its place and renamed when it is complete, so that nobody ever sees half a kernel.
        let unfinished = cache.join(format!("{}.unfinished", series.name()));
        remove_folder(&unfinished)?;
        fs::create_dir_all(&unfinished)?;
        let package = apt::find_dependency(&series.metapackages(), &format!("linux-image-{}.", series.name()))?;
        let release = package.trim_start_matches("linux-image-").to_owned();
        eprintln!("test machine: downloading {package} (about 100 MB, once)");
        let archive = apt::download(&unfinished, &package)?;
        unpack(&archive, &unfinished)?;
        fs::remove_file(&archive)?;
        let compressed = unfinished.join(format!("boot/vmlinuz-{release}"));
        let vmlinux = extract_vmlinux(&fs::read(&compressed)?)
            .with_context(|| format!("cannot unpack {}", compressed.display()))?;
        fs::write(unfinished.join("vmlinux"), vmlinux)?;
        process::run(
            Command::new("depmod").arg("-b").arg(&unfinished).arg(&release).stderr(Stdio::null()), // it warns that modules that we do not unpack are missing
        )?;
        fs::write(unfinished.join("release"), &release)?;
        remove_folder(&folder)?;
        fs::rename(&unfinished, &folder)?;
        Ok(Self { series, release, folder })
    }

    fn open(series: Series, folder: &Path) -> Option<Self> {
        let release = fs::read_to_string(folder.join("release")).ok()?;
        Some(Self { series, release, folder: folder.to_path_buf() })
    }

    /// The kernel as an ELF file. qemu starts it directly, which spares the emulated CPU the decompression (3 s).
    pub(crate) fn vmlinux(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// The files of a module and of all modules that it needs, in the order in which they must be loaded.
    ///
    /// # Errors
    ///
    /// When the kernel has no such module.
    pub(crate) fn module_files(&self, module: &str) -> Result<Vec<PathBuf>> {
        let listing = process::output(
            Command::new("modprobe")
                // The host's own settings, such as module options, mean nothing here.
                .args(["-C", "/dev/null", "-d"])
                .arg(&self.folder)
                .args(["-S", &self.release, "--show-depends", module]),
        )?;
        // Lines are `insmod /path/to/module.ko` or `builtin name`.
        Ok(String::from_utf8_lossy(&listing)
            .lines()
            .filter_map(|line| line.strip_prefix("insmod "))
            .map(|path| PathBuf::from(path.trim()))
            .collect())
    }
}

/// Takes the lock `name` below `cache`, waiting for the process that has it. Dropping the file releases it.
pub(crate) fn lock(cache: &Path, name: &str) -> Result<File> {
    fs::create_dir_all(cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let path = cache.join(format!("{name}.lock"));
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// Removes a folder, if it is there.
pub(crate) fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Unpacks the kernel image and those modules that the machine may need: all of them would be 400 MB.
fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(archive)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start `dpkg-deb`")?;
    let tar_input = dpkg.stdout.take().expect("the output was asked to be a pipe");
    let mut tar = Command::new("tar");
    tar.args(["-x", "--wildcards", "-C"]).arg(folder).arg("./boot/vmlinuz-*");
    for part in [
        "modules.*",
        "kernel/arch/x86/crypto/*",
        "kernel/crypto/*",
        "kernel/drivers/infiniband/*",
        "kernel/drivers/net/*",
        "kernel/drivers/virtio/*",
        "kernel/fs/*",
        "kernel/lib/*",
        "kernel/net/*",
    ] {
        tar.arg(format!("./lib/modules/*/{part}"));
    }
    process::run(tar.stdin(tar_input))?;
    ensure!(dpkg.wait()?.success(), "dpkg-deb cannot read {}", archive.display());
    Ok(())
}

/// Takes the ELF kernel out of a bzImage. Offsets are from Linux's Documentation/arch/x86/boot.rst.
fn extract_vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    const SETUP_SECTORS: usize = 0x1f1;
    const PAYLOAD_OFFSET: usize = 0x248;
    const PAYLOAD_LENGTH: usize = 0x24c;
    let word = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the file is too short")?;
        let bytes = bytes.try_into().expect("the slice has 4 bytes");
        Ok(u32::from_le_bytes(bytes) as usize)
    };
    let setup_sectors = match *image.get(SETUP_SECTORS).context("the file is too short")? {
        0 => 4, // the value that very old loaders mean by 0
        sectors => usize::from(sectors),
    };
    let start = (setup_sectors + 1) * 512 + word(PAYLOAD_OFFSET)?;
    let end = start + word(PAYLOAD_LENGTH)?;
    let payload = image.get(start..end).context("the payload is not inside of the file")?;
    // The kernel's build appends the unpacked size to xz and zstd files (4 bytes); gzip has it in its own format.
    let (program, data) = if payload.starts_with(b"\xfd7zXZ\0") {
        ("xz", &payload[..payload.len() - 4])
    } else if payload.starts_with(b"\x28\xb5\x2f\xfd") {
        ("zstd", &payload[..payload.len() - 4])
    } else if payload.starts_with(b"\x1f\x8b") {
        ("gzip", payload)
    } else {
        bail!("the kernel is compressed in a way that is neither xz, zstd nor gzip");
    };
    let vmlinux = process::filter(Command::new(program).arg("-dc"), data)?;
    ensure!(vmlinux.starts_with(b"\x7fELF"), "the payload is not an ELF file");
    Ok(vmlinux)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage with one setup sector and the payload right behind the headers.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 1024];
        image[0x1f1] = 1;
        image[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend_from_slice(payload);
        image
    }

    #[test]
    fn the_kernel_is_unpacked_from_gzip_and_xz() {
        let kernel = b"\x7fELF and the rest";
        let packed = process::filter(Command::new("gzip").arg("-c"), kernel).expect("gzip runs");
        assert_eq!(extract_vmlinux(&image(&packed)).expect("it is a kernel"), kernel);
        let mut packed = process::filter(Command::new("xz").arg("-c"), kernel).expect("xz runs");
        packed.extend_from_slice(&(kernel.len() as u32).to_le_bytes());
        assert_eq!(extract_vmlinux(&image(&packed)).expect("it is a kernel"), kernel);
    }

    #[test]
    fn a_broken_image_is_an_error() {
        assert!(extract_vmlinux(&[]).is_err());
        assert!(extract_vmlinux(&image(b"something else")).is_err());
        let mut long = image(b"\x1f\x8b");
        long[0x24c] = 200;
        assert!(extract_vmlinux(&long).is_err());
    }
}
