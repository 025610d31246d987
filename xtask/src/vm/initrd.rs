//! The test machine's initrd: busybox, `guest/init` and the kernel modules, as an uncompressed cpio archive (the emulated
//! CPU is slow at unpacking). The rest of the guest's files are the host's, through 9p.

use std::collections::HashSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::kernel::{Kernel, lock};
use crate::process;

const INIT: &str = include_str!("../../guest/init");

/// Modules that are needed to reach the host's files.
const BOOT_MODULES: &[&str] = &["virtio_pci", "9pnet_virtio", "9p", "overlay"];

/// Modules for the RDMA stack. crc32_generic: rxe asks the kernel's crypto API for it, and there is no modprobe in the guest
/// that would load it (6.12 then refuses to make a device).
const RDMA_MODULES: &[&str] = &["crc32_generic", "veth", "dummy", "sch_netem", "rdma_rxe", "rdma_ucm", "ib_umad"];

/// Modules that siw needs; `guest/siw.sh` loads them.
const SIW_MODULES: &[&str] = &["iw_cm", "crc32c_generic", "libcrc32c"];

/// Returns the initrd for a kernel, and makes it first if it is not there yet.
///
/// # Errors
///
/// When a module or busybox is missing, or the file cannot be written.
pub(crate) fn prepare(kernel: &Kernel, siw: Option<&Path>, cache: &Path) -> Result<PathBuf> {
    // The name tells what is inside, so that an edited init or a new kernel never meets an old initrd.
    let mut contents = DefaultHasher::new();
    (INIT, &kernel.release, BOOT_MODULES, RDMA_MODULES, siw).hash(&mut contents);
    let name = format!("initrd-{}-{:016x}.img", kernel.series.name(), contents.finish());
    let path = cache.join(&name);
    if path.exists() {
        return Ok(path);
    }
    let _lock = lock(cache, kernel.series.name())?;
    if path.exists() {
        return Ok(path);
    }
    let mut archive = Cpio::default();
    for folder in ["bin", "dev", "lower", "mods", "proc", "root", "sys", "up"] {
        archive.folder(folder);
    }
    archive.file("init", 0o755, INIT.as_bytes());
    archive.file("bin/busybox", 0o755, &read("/bin/busybox".as_ref())?);
    let mut known = HashSet::new();
    for (list, modules) in [("boot", BOOT_MODULES), ("rdma", RDMA_MODULES), ("siw", SIW_MODULES)] {
        let mut names = add_modules(&mut archive, kernel, modules, &mut known)?;
        if let ("siw", Some(file)) = (list, siw) {
            archive.file("mods/siw.ko", 0o644, &read(file)?);
            names.push_str("siw.ko\n");
        }
        archive.file(&format!("mods/{list}.list"), 0o644, names.as_bytes());
    }
    let unfinished = cache.join(format!("{name}.unfinished"));
    fs::write(&unfinished, archive.finish())?;
    fs::rename(&unfinished, &path)?;
    Ok(path)
}

/// Adds modules with all that they need and returns their file names in loading order, one a line.
fn add_modules(archive: &mut Cpio, kernel: &Kernel, modules: &[&str], known: &mut HashSet<String>) -> Result<String> {
    let mut names = String::new();
    for module in modules {
        for file in kernel.module_files(module)? {
            let name = file.file_name().context("a module's path ends in its file")?;
            let name = name.to_string_lossy();
            let packed = name.ends_with(".xz");
            let name = name.trim_end_matches(".xz").to_owned();
            if known.contains(&name) {
                continue;
            }
            let contents =
                if packed { process::output(Command::new("xz").arg("-dc").arg(&file))? } else { read(&file)? };
            archive.file(&format!("mods/{name}"), 0o644, &contents);
            names.push_str(&name);
            names.push('\n');
            known.insert(name);
        }
    }
    Ok(names)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// A cpio archive in the "newc" form that the kernel unpacks (Documentation/driver-api/early-userspace/buffer-format.rst).
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    entries: u32,
}

impl Cpio {
    fn folder(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, permissions: u32, contents: &[u8]) {
        self.entry(name, 0o100_000 | permissions, contents);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(contents.len()).expect("no file in an initrd has 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        // inode, mode, uid, gid, links, mtime, size, device (2), special device (2), name size, checksum
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(contents);
        self.align();
    }

    /// Headers and contents begin at multiples of 4 bytes.
    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_aligned_entries_and_a_trailer() {
        let mut archive = Cpio::default();
        archive.folder("bin");
        archive.file("bin/a", 0o755, b"12345");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        // 110 bytes of header, the name with its 0, padding: the second header begins at 116.
        assert_eq!(text.find("070701"), Some(0));
        assert_eq!(&text[110..113], "bin");
        assert_eq!(&text[116..122], "070701");
        assert_eq!(&text[116 + 14..116 + 22], "000081ed", "the mode of an executable file");
        assert_eq!(&text[116 + 54..116 + 62], "00000005", "the size");
        assert_eq!(text.matches("070701").count(), 3);
        assert!(text.contains("TRAILER!!!"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
