//! The calls into librdmacm, and nothing else.
//!
//! The only file of this crate that names `rdma_sys`. It adds the constants that the bindings lack, asserts the layout
//! of every struct shared with C, and turns the C conventions of failure into `Result`. Every call to the library goes
//! through a function here, so that a stand-in for the library has one seam.

use std::ffi::{c_int, c_void};
use std::mem::{offset_of, size_of};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc::{sockaddr, sockaddr_storage};

pub(crate) use rdma_sys::{rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel};
pub(crate) use verbs::sys::{ibv_context, ibv_pd, ibv_qp_init_attr, in_child, watch_forks};

/// `RDMA_OPTION_ID` of `rdma/rdma_cma.h`: options of one id.
const RDMA_OPTION_ID: c_int = 0;

/// The options of `RDMA_OPTION_ID` (`rdma/rdma_cma.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum IdOption {
    /// `RDMA_OPTION_ID_TOS`, one byte.
    Tos = 0,
    /// `RDMA_OPTION_ID_REUSEADDR`, an int.
    ReuseAddr = 1,
    /// `RDMA_OPTION_ID_AFONLY`, an int.
    AfOnly = 2,
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`, one byte.
    AckTimeout = 3,
}

// The layout that librdmacm was compiled with (rdma/rdma_cma.h, x86-64 and every other 64-bit ABI); the `layout` test
// of the `tests` package asks the installed headers.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<rdma_cm_id>() == 416);
    assert!(offset_of!(rdma_cm_id, verbs) == 0);
    assert!(offset_of!(rdma_cm_id, channel) == 8);
    assert!(offset_of!(rdma_cm_id, context) == 16);
    assert!(offset_of!(rdma_cm_id, qp) == 24);
    assert!(offset_of!(rdma_cm_id, route) == 32);
    assert!(offset_of!(rdma_cm_id, ps) == 344);
    assert!(offset_of!(rdma_cm_id, port_num) == 348);
    assert!(offset_of!(rdma_cm_id, event) == 352);
    assert!(offset_of!(rdma_cm_id, pd) == 400);
    assert!(offset_of!(rdma_cm_id, qp_type) == 408);
    assert!(size_of::<rdma_cm_event>() == 80);
    assert!(offset_of!(rdma_cm_event, id) == 0);
    assert!(offset_of!(rdma_cm_event, listen_id) == 8);
    assert!(offset_of!(rdma_cm_event, event) == 16);
    assert!(offset_of!(rdma_cm_event, status) == 20);
    assert!(offset_of!(rdma_cm_event, param) == 24);
    assert!(size_of::<rdma_conn_param>() == 24);
    assert!(offset_of!(rdma_conn_param, private_data_len) == 8);
    assert!(offset_of!(rdma_conn_param, responder_resources) == 9);
    assert!(offset_of!(rdma_conn_param, initiator_depth) == 10);
    assert!(offset_of!(rdma_conn_param, flow_control) == 11);
    assert!(offset_of!(rdma_conn_param, retry_count) == 12);
    assert!(offset_of!(rdma_conn_param, rnr_retry_count) == 13);
    assert!(offset_of!(rdma_conn_param, srq) == 14);
    assert!(offset_of!(rdma_conn_param, qp_num) == 16);
    assert!(size_of::<rdma_event_channel>() == 4);
    assert!(size_of::<rdma_sys::rdma_addr>() == 296);
    assert!(size_of::<rdma_sys::rdma_route>() == 312);
    assert!(size_of::<sockaddr_storage>() == 128);
};

/// What a failed call left behind: its name and errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallError {
    pub(crate) call: &'static str,
    pub(crate) errno: Errno,
}

type CallResult<T> = Result<T, CallError>;

/// The convention of librdmacm's int functions: 0, or -1 with errno set. Old versions returned -errno.
fn cvt(call: &'static str, result: c_int) -> CallResult<()> {
    match result {
        0 => Ok(()),
        -1 => Err(CallError { call, errno: Errno::last() }),
        other => Err(CallError { call, errno: Errno::from_raw(other.saturating_abs()) }),
    }
}

fn cvt_ptr<T>(call: &'static str, pointer: *mut T) -> CallResult<*mut T> {
    if pointer.is_null() { Err(CallError { call, errno: Errno::last() }) } else { Ok(pointer) }
}

/// `rdma_create_event_channel`.
pub(crate) fn create_event_channel() -> CallResult<*mut rdma_event_channel> {
    // SAFETY: takes no argument; the result is checked for NULL.
    cvt_ptr("rdma_create_event_channel", unsafe { rdma_sys::rdma_create_event_channel() })
}

/// `rdma_destroy_event_channel`.
///
/// # Safety
/// `channel` came from [`create_event_channel`], was not destroyed, and no id lives on it.
pub(crate) unsafe fn destroy_event_channel(channel: *mut rdma_event_channel) {
    if in_child() {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { rdma_sys::rdma_destroy_event_channel(channel) }
}

/// The file descriptor of a channel.
///
/// # Safety
/// `channel` is live.
pub(crate) unsafe fn event_channel_fd(channel: *mut rdma_event_channel) -> RawFd {
    // SAFETY: the caller's promise; `fd` is the struct's only field and never changes.
    unsafe { (*channel).fd }
}

/// `rdma_create_id` in `RDMA_PS_TCP`, which implies a reliable connected queue pair.
///
/// # Safety
/// `channel` is live and outlives the id.
pub(crate) unsafe fn create_id(channel: *mut rdma_event_channel, context: usize) -> CallResult<*mut rdma_cm_id> {
    let mut id = ptr::null_mut();
    // SAFETY: `channel` by the caller's promise; `id` is a valid place for the result; the context is an opaque number.
    cvt("rdma_create_id", unsafe {
        rdma_sys::rdma_create_id(channel, &raw mut id, context as *mut c_void, rdma_sys::rdma_port_space::RDMA_PS_TCP)
    })?;
    cvt_ptr("rdma_create_id", id)
}

/// `rdma_destroy_id`.
///
/// # Safety
/// `id` is live, every event fetched for it was acknowledged, nobody uses it during or after the call.
pub(crate) unsafe fn destroy_id(id: *mut rdma_cm_id) -> CallResult<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    cvt("rdma_destroy_id", unsafe { rdma_sys::rdma_destroy_id(id) })
}

/// `rdma_set_option` at level `RDMA_OPTION_ID`. The library takes one-byte options as `u8`, flags as `int`.
///
/// # Safety
/// `id` is live.
pub(crate) unsafe fn set_option(id: *mut rdma_cm_id, option: IdOption, value: u8) -> CallResult<()> {
    let byte = value;
    let int = c_int::from(value);
    let (place, size) = match option {
        IdOption::Tos | IdOption::AckTimeout => ((&raw const byte).cast::<c_void>(), size_of::<u8>()),
        IdOption::ReuseAddr | IdOption::AfOnly => ((&raw const int).cast::<c_void>(), size_of::<c_int>()),
    };
    // SAFETY: `id` by the caller's promise; `place` is valid for `size` bytes, which the call only reads.
    cvt("rdma_set_option", unsafe {
        rdma_sys::rdma_set_option(id, RDMA_OPTION_ID, option as c_int, place.cast_mut(), size)
    })
}

/// `rdma_bind_addr`.
///
/// # Safety
/// `id` is live; `address` points to a complete socket address of its family.
pub(crate) unsafe fn bind_addr(id: *mut rdma_cm_id, address: *const sockaddr) -> CallResult<()> {
    // SAFETY: the caller's promise; the call only reads the address.
    cvt("rdma_bind_addr", unsafe { rdma_sys::rdma_bind_addr(id, address.cast_mut().cast()) })
}

/// `rdma_listen`.
///
/// # Safety
/// `id` is live.
pub(crate) unsafe fn listen(id: *mut rdma_cm_id, backlog: c_int) -> CallResult<()> {
    // SAFETY: the caller's promise.
    cvt("rdma_listen", unsafe { rdma_sys::rdma_listen(id, backlog) })
}

/// `rdma_resolve_addr`.
///
/// # Safety
/// `id` is live; `source` is null or points to a complete socket address, `destination` to one of the same family.
pub(crate) unsafe fn resolve_addr(
    id: *mut rdma_cm_id,
    source: *const sockaddr,
    destination: *const sockaddr,
    timeout: Duration,
) -> CallResult<()> {
    // SAFETY: the caller's promise; the call only reads the addresses.
    cvt("rdma_resolve_addr", unsafe {
        rdma_sys::rdma_resolve_addr(id, source.cast_mut().cast(), destination.cast_mut().cast(), millis(timeout))
    })
}

/// `rdma_resolve_route`.
///
/// # Safety
/// `id` is live and was bound to a device by an ADDR_RESOLVED event: the library reads through `id->verbs`.
pub(crate) unsafe fn resolve_route(id: *mut rdma_cm_id, timeout: Duration) -> CallResult<()> {
    // SAFETY: the caller's promise.
    cvt("rdma_resolve_route", unsafe { rdma_sys::rdma_resolve_route(id, millis(timeout)) })
}

/// `rdma_create_qp`.
///
/// # Safety
/// `id` is live, bound to a device and used by nobody else meanwhile; `pd` and the completion queues that `attr` names
/// are live and of the same device context.
pub(crate) unsafe fn create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: &mut ibv_qp_init_attr) -> CallResult<()> {
    // SAFETY: the caller's promise; `attr` is exclusively borrowed for the granted capabilities.
    cvt("rdma_create_qp", unsafe { rdma_sys::rdma_create_qp(id, pd, attr) })
}

/// `rdma_connect`.
///
/// # Safety
/// `id` is live and bound to a device; `param` points to its private data for the call.
pub(crate) unsafe fn connect(id: *mut rdma_cm_id, param: &mut rdma_conn_param) -> CallResult<()> {
    // SAFETY: the caller's promise.
    cvt("rdma_connect", unsafe { rdma_sys::rdma_connect(id, param) })
}

/// `rdma_accept`.
///
/// # Safety
/// `id` is a live child of a listener that carries a queue pair; `param` points to its private data for the call.
pub(crate) unsafe fn accept(id: *mut rdma_cm_id, param: &mut rdma_conn_param) -> CallResult<()> {
    // SAFETY: the caller's promise.
    cvt("rdma_accept", unsafe { rdma_sys::rdma_accept(id, param) })
}

/// `rdma_reject` with `data` as private data, at most 255 bytes of it.
///
/// # Safety
/// `id` is a live child of a listener.
pub(crate) unsafe fn reject(id: *mut rdma_cm_id, data: &[u8]) -> CallResult<()> {
    let length = u8::try_from(data.len()).unwrap_or(u8::MAX);
    // SAFETY: `id` by the caller's promise; `data` is valid for `length` bytes, which the call only reads.
    cvt("rdma_reject", unsafe { rdma_sys::rdma_reject(id, data.as_ptr().cast(), length) })
}

/// `rdma_notify` with `IBV_EVENT_COMM_EST`, the only event it takes.
///
/// # Safety
/// `id` is live.
pub(crate) unsafe fn notify_established(id: *mut rdma_cm_id) -> CallResult<()> {
    // SAFETY: the caller's promise.
    cvt("rdma_notify", unsafe { rdma_sys::rdma_notify(id, rdma_sys::ibv_event_type::IBV_EVENT_COMM_EST) })
}

/// `rdma_disconnect`.
///
/// # Safety
/// `id` is live, and so is the queue pair that it carries.
pub(crate) unsafe fn disconnect(id: *mut rdma_cm_id) -> CallResult<()> {
    // SAFETY: the caller's promise.
    cvt("rdma_disconnect", unsafe { rdma_sys::rdma_disconnect(id) })
}

/// `rdma_get_cm_event`; `None` when a non-blocking channel has nothing to say.
///
/// # Safety
/// `channel` is live, in non-blocking mode, and read by this thread only.
pub(crate) unsafe fn get_cm_event(channel: *mut rdma_event_channel) -> CallResult<Option<*mut rdma_cm_event>> {
    let mut event = ptr::null_mut();
    // SAFETY: `channel` by the caller's promise; `event` is a valid place for the result.
    match cvt("rdma_get_cm_event", unsafe { rdma_sys::rdma_get_cm_event(channel, &raw mut event) }) {
        Ok(()) => Ok(Some(cvt_ptr("rdma_get_cm_event", event)?)),
        Err(CallError { errno: Errno::EAGAIN, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `rdma_ack_cm_event`.
///
/// # Safety
/// `event` came from [`get_cm_event`] and was not acknowledged; nothing it points to is used afterwards.
pub(crate) unsafe fn ack_cm_event(event: *mut rdma_cm_event) {
    // SAFETY: the caller's promise. The call fails only for NULL, which `get_cm_event` excludes.
    unsafe { rdma_sys::rdma_ack_cm_event(event) };
}

/// The connection parameters of an event of the connect family.
///
/// # Safety
/// `event` is a live event of a reliable connected id (`RDMA_PS_TCP`), whose parameters are the `conn` member of the union.
pub(crate) unsafe fn event_conn(event: *const rdma_cm_event) -> rdma_conn_param {
    // SAFETY: the caller's promise; librdmacm allocates events zeroed, so every bit of the union is initialised.
    unsafe { (*event).param.conn }
}

/// The source address of an id, as the library stores it: 128 bytes, large enough for every family.
///
/// # Safety
/// `id` is live and no call is changing its addresses.
pub(crate) unsafe fn source_address(id: *const rdma_cm_id) -> sockaddr_storage {
    // SAFETY: the caller's promise; a raw place projection, so that no reference to the shorter `sockaddr` is made.
    unsafe { (&raw const (*id).route.addr.src_addr_union).cast::<sockaddr_storage>().read() }
}

/// The destination address of an id; see [`source_address`].
///
/// # Safety
/// As [`source_address`].
pub(crate) unsafe fn destination_address(id: *const rdma_cm_id) -> sockaddr_storage {
    // SAFETY: as in `source_address`.
    unsafe { (&raw const (*id).route.addr.dst_addr_union).cast::<sockaddr_storage>().read() }
}

/// `rdma_get_devices`: the open contexts, each with a reference that [`release_device`] gives back. The library counts one
/// reference for each element of a list, and `rdma_free_devices` gives back those of the elements that it finds, then frees
/// the array (`cma.c`); so a list can be taken apart into references of single devices.
pub(crate) fn device_references() -> CallResult<Vec<NonNull<ibv_context>>> {
    let mut count: c_int = 0;
    Errno::clear();
    // SAFETY: `count` is a valid place for the result.
    let list = unsafe { rdma_sys::rdma_get_devices(&raw mut count) };
    if list.is_null() {
        return match Errno::last_raw() {
            0 => Ok(Vec::new()),
            errno => Err(CallError { call: "rdma_get_devices", errno: Errno::from_raw(errno) }),
        };
    }
    let length = usize::try_from(count).unwrap_or(0);
    // SAFETY: the list holds `count` pointers and a terminating NULL, and lives until it is freed below.
    let contexts = unsafe { std::slice::from_raw_parts(list, length) };
    let contexts = contexts.iter().filter_map(|&raw| NonNull::new(raw.cast())).collect();
    // SAFETY: the library allocated the array with malloc for the caller to free; the references stay.
    unsafe { nix::libc::free(list.cast()) };
    Ok(contexts)
}

/// Gives a reference on a device back; the last one of a device that has vanished closes its context.
///
/// # Safety
/// `context` came from [`device_references`], this reference was not given back, and nothing made on the context is used
/// afterwards by its owner.
pub(crate) unsafe fn release_device(context: NonNull<ibv_context>) {
    if in_child() {
        return;
    }
    // SAFETY: malloc and its result are checked; the array has room for the pointer and the terminating NULL, and the
    // library frees it.
    unsafe {
        let list = nix::libc::malloc(2 * size_of::<*mut ibv_context>()).cast::<*mut ibv_context>();
        if list.is_null() {
            log::warn!("no memory to give a device reference back; it is leaked");
            return;
        }
        list.write(context.as_ptr());
        list.add(1).write(ptr::null_mut());
        rdma_sys::rdma_free_devices(list.cast());
    }
}

/// Whole milliseconds for the C calls, rounded up so that a short wait does not become none.
fn millis(duration: Duration) -> c_int {
    let rounded = duration.as_nanos().div_ceil(1_000_000);
    c_int::try_from(rounded).unwrap_or(c_int::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minus_one_takes_errno_and_other_values_carry_it() {
        assert_eq!(cvt("f", 0), Ok(()));
        Errno::EINVAL.set();
        assert_eq!(cvt("f", -1), Err(CallError { call: "f", errno: Errno::EINVAL }));
        assert_eq!(cvt("f", -22), Err(CallError { call: "f", errno: Errno::EINVAL }));
    }

    #[test]
    fn a_short_wait_is_never_rounded_to_none() {
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::from_micros(1500)), 2);
        assert_eq!(millis(Duration::MAX), c_int::MAX);
    }
}
