//! Devices that were removed: making librdmacm let go of their contexts.
//!
//! The kernel keeps the removal of a Soft-RoCE or Soft-iWARP device waiting until every process has closed it, and
//! librdmacm keeps each device open. It closes one that has vanished when the last reference on it is given back, but only
//! after it has looked at the device list and found it missing (`cma.c`, `sync_devices_list`). With no device left at all
//! that look fails, and the context stays open until the process ends.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::context::{ContextAddress, DeviceReference};

/// The device leaves the list some milliseconds after its event.
const INTERVAL: Duration = Duration::from_millis(50);
/// A device that is still listed after this was not removed after all, or is the last one.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Contexts that librdmacm must be made to look for.
#[derive(Debug, Default)]
pub(super) struct Removed {
    /// With the time of the removal.
    contexts: HashMap<ContextAddress, Instant>,
    next: Option<Instant>,
}

impl Removed {
    pub(super) fn add(&mut self, context: ContextAddress, now: Instant) {
        self.contexts.entry(context).or_insert(now);
        self.next.get_or_insert(now + INTERVAL);
    }

    /// When to look again.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.next
    }

    /// Looks, if it is time.
    pub(super) fn look(&mut self, now: Instant) {
        if self.next.is_none_or(|next| next > now) {
            return;
        }
        match DeviceReference::all() {
            Ok(present) => {
                self.contexts.retain(|context, since| {
                    let listed = present.iter().any(|device| device.address() == *context);
                    listed && now.duration_since(*since) < GIVE_UP
                });
            }
            // With no device left there is no list.
            Err(error) => {
                log::trace!("{}: {}", error.call, error.errno);
                self.contexts.retain(|_, since| now.duration_since(*since) < GIVE_UP);
            }
        }
        self.next = (!self.contexts.is_empty()).then_some(now + INTERVAL);
    }
}
