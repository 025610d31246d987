//! Choosing a libclang that rdma-sys 0.3.0 can be built with.
//!
//! Its bindgen (0.59) cannot digest the names that libclang 16 and newer give to anonymous types: the build ends with
//! `"ib_uverbs_flow_action_esp_encap_union_(anonymous_at_...)" is not a valid Ident`. Without LIBCLANG_PATH bindgen takes the
//! newest libclang that it finds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};

/// The newest version that works.
pub(crate) const NEWEST_USABLE: u32 = 15;

/// Versions that Debian has or had, in the order in which we would install them. 14 is Debian 12's default.
const PACKAGED: &[u32] = &[14, 15, 13, 11];

/// Where distributions put libclang: Debian one folder for each version, others one for all.
const COMMON_FOLDERS: &[&str] = &["/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib", "/usr/local/lib"];

/// What cargo needs to be told about libclang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Libclang {
    /// Nothing: bindgen finds a usable one by itself, or LIBCLANG_PATH already names it.
    Default,
    /// LIBCLANG_PATH must be this folder, since bindgen would take a newer one.
    At(PathBuf),
    /// There is no usable one.
    Missing,
}

/// Looks at the libclangs of this machine.
///
/// # Errors
///
/// When LIBCLANG_PATH is set, and names one that is too new.
pub(crate) fn choose() -> Result<Libclang> {
    if let Some(folder) = std::env::var_os("LIBCLANG_PATH") {
        let folder = PathBuf::from(folder);
        if let Some(version) = version_of(&folder).filter(|version| *version > NEWEST_USABLE) {
            bail!(
                "LIBCLANG_PATH is {}, which has libclang {version}; rdma-sys 0.3.0 needs version {NEWEST_USABLE} or older: \
                 unset it, or let it name another folder",
                folder.display()
            );
        }
        return Ok(Libclang::Default);
    }
    let mut folders: Vec<PathBuf> = COMMON_FOLDERS.iter().map(PathBuf::from).collect();
    if let Ok(entries) = fs::read_dir("/usr/lib") {
        let llvm = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("llvm-"));
        folders.extend(llvm.map(|entry| entry.path().join("lib")));
    }
    let found = folders.into_iter().filter_map(|folder| Some((version_of(&folder)?, folder))).collect();
    Ok(pick(found))
}

/// Decides among the libclangs that were found: version and folder of each.
fn pick(found: Vec<(u32, PathBuf)>) -> Libclang {
    let default_is_wrong = found.iter().any(|(version, _)| *version > NEWEST_USABLE);
    let usable = found.into_iter().filter(|(version, folder)| *version <= NEWEST_USABLE && !is_shared(folder)).max();
    match usable {
        Some((_, folder)) if default_is_wrong => Libclang::At(folder),
        Some(_) => Libclang::Default,
        None => Libclang::Missing,
    }
}

/// Folders where several versions may lie: naming one in LIBCLANG_PATH would not choose among them.
fn is_shared(folder: &Path) -> bool {
    folder == Path::new("/usr/lib/x86_64-linux-gnu")
}

/// The packages that bring a usable libclang with its own headers.
///
/// # Errors
///
/// When the package lists have none, as on Debian 13; the message says what to do.
pub(crate) fn packages() -> Result<[String; 2]> {
    for version in PACKAGED {
        let packages = [format!("libclang1-{version}"), format!("libclang-common-{version}-dev")];
        let known = |package: &String| {
            process_output("apt-cache", &["policy", package])
                .lines()
                .any(|line| line.trim().strip_prefix("Candidate: ").is_some_and(|candidate| candidate != "(none)"))
        };
        if packages.iter().all(known) {
            return Ok(packages);
        }
    }
    bail!(
        "rdma-sys 0.3.0 needs libclang {NEWEST_USABLE} or older, and apt knows no package of one (Debian 13 has 17 and newer). \
         Take one from Debian 12, e.g. by adding its repository at a low priority and installing libclang1-14 and \
         libclang-common-14-dev, or unpack LLVM 15 from https://github.com/llvm/llvm-project/releases and set LIBCLANG_PATH \
         to its lib folder"
    )
}

/// The version of the newest libclang in a folder.
fn version_of(folder: &Path) -> Option<u32> {
    fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            version_in_name(&name).or_else(|| {
                // A `libclang.so.1` or `libclang.so`: the folder, or the file that it is a link to, has the version.
                let target = fs::read_link(entry.path()).ok();
                let target = target.as_ref().and_then(|path| path.file_name()).and_then(|name| name.to_str());
                name.starts_with("libclang.so")
                    .then(|| target.and_then(version_in_name).or_else(|| version_in_folder(folder)))?
            })
        })
        .max()
}

/// `libclang-14.so.1`, `libclang-14.so.14.0.6`, `libclang.so.15.0.7` and the like.
fn version_in_name(name: &str) -> Option<u32> {
    let rest = name.strip_prefix("libclang")?;
    let digits =
        rest.strip_prefix('-').or_else(|| rest.strip_prefix(".so."))?.split(|c: char| !c.is_ascii_digit()).next()?;
    // `libclang.so.1` has the version of Debian's interface, which is 1 for all.
    digits.parse().ok().filter(|version| *version > 1 && name.contains(".so"))
}

/// `/usr/lib/llvm-14/lib`.
fn version_in_folder(folder: &Path) -> Option<u32> {
    folder.parent()?.file_name()?.to_str()?.strip_prefix("llvm-")?.parse().ok()
}

fn process_output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output();
    output.map_or_else(|_| String::new(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_names() {
        for (name, version) in [
            ("libclang-14.so.1", Some(14)),
            ("libclang-14.so.14.0.6", Some(14)),
            ("libclang.so.15.0.7", Some(15)),
            ("libclang.so.18", Some(18)),
            ("libclang.so.1", None),
            ("libclang.so", None),
            ("libclang-cpp.so.14", None),
            ("libclang-14.a", None),
        ] {
            assert_eq!(version_in_name(name), version, "{name}");
        }
        assert_eq!(version_in_folder(Path::new("/usr/lib/llvm-14/lib")), Some(14));
        assert_eq!(version_in_folder(Path::new("/usr/lib64")), None);
    }

    #[test]
    fn the_newest_usable_one_is_taken_and_named_only_if_a_newer_one_is_there() {
        let at = |version| (version, PathBuf::from(format!("/usr/lib/llvm-{version}/lib")));
        assert_eq!(pick(vec![]), Libclang::Missing);
        assert_eq!(pick(vec![at(16)]), Libclang::Missing);
        assert_eq!(pick(vec![at(14)]), Libclang::Default);
        assert_eq!(pick(vec![at(11), at(16), at(14)]), Libclang::At("/usr/lib/llvm-14/lib".into()));
    }
}
