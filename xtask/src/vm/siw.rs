//! Soft-iWARP for the test machine. Debian's kernels do not have it, but its source builds out of tree.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use super::kernel::Kernel;

/// Returns siw.ko for a kernel.
pub(crate) fn prepare(_kernel: &Kernel, _cache: &Path) -> Result<PathBuf> {
    bail!("not built yet")
}
