//! The device nodes: the only sign of the removal of a device on which this process has no id.

use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// Where the kernel keeps them. A node goes before the kernel waits for those who still use its device
/// (`uverbs_main.c`, `ib_uverbs_remove_one`).
const FOLDER: &str = "/dev/infiniband";

/// Watches the folder of the device nodes.
#[derive(Debug)]
pub(super) struct Nodes {
    inotify: Inotify,
}

impl Nodes {
    /// `None` where there is no folder or no watch to be had: such removals then go unnoticed until the manager ends.
    pub(super) fn watch() -> Option<Self> {
        let watch = || -> Result<Self, Errno> {
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
            inotify.add_watch(FOLDER, AddWatchFlags::IN_DELETE)?;
            Ok(Self { inotify })
        };
        watch().inspect_err(|errno| log::debug!("{FOLDER} is not watched: {errno}")).ok()
    }

    /// The names of the nodes that vanished since the last look.
    pub(super) fn vanished(&self) -> Vec<String> {
        let mut names = Vec::new();
        // Ends with EAGAIN.
        while let Ok(events) = self.inotify.read_events() {
            names.extend(events.into_iter().filter_map(|event| event.name?.into_string().ok()));
        }
        names
    }
}

impl AsFd for Nodes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}
