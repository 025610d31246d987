//! The one file that names `rdma_sys`: raw types, missing constants, and one function for each C call in use.
//!
//! Every call to libibverbs that this crate makes goes through a function here, so that the library can be
//! replaced by a stand-in with the same C interface. The functions add nothing but the error convention:
//! a pointer that is null, an errno that is returned, or `-1` with `errno` set become [`Errno`] (see
//! [`cvt_ptr`], [`cvt_errno`] and [`cvt_minus_one`]).
//!
//! rdma-sys 0.3.0 is right about the plain verbs but wrong or silent in a few places; those are written
//! here: `ibv_query_port` (its version leaves part of the structure uninitialised), the GID table (not
//! bound at all), and the extended-verbs test (compares a 64-bit pointer with a 32-bit mark).
//!
//! This module is public only for the sister crate and is no part of the stable interface.
#![allow(missing_docs)] // raw C names, documented by their man pages
#![allow(clippy::missing_safety_doc)] // the contract of each function is the contract of the C call it names

mod layout;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;

#[cfg(target_pointer_width = "64")]
pub use layout::LAYOUT;
pub use rdma_sys::{
    atomic_t, bind_mw_t, bind_mw_tso_union_t, ibv_access_flags, ibv_ah_attr, ibv_atomic_cap, ibv_comp_channel,
    ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_global_route, ibv_mr, ibv_mtu,
    ibv_mw, ibv_mw_bind_info, ibv_mw_type, ibv_node_type, ibv_pd, ibv_port_attr, ibv_port_state, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_send_flags,
    ibv_send_wr, ibv_sge, ibv_srq, ibv_transport_type, ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status,
    ibv_wr_opcode, imm_data_invalidated_rkey_union_t, qp_type_t, rdma_t, wr_t, xrc_t,
};

/// `IBV_LINK_LAYER_*`: an anonymous enum that bindgen leaves out.
pub const IBV_LINK_LAYER_UNSPECIFIED: u8 = 0;
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

/// `enum ibv_gid_type`, the meaning of `ibv_gid_entry::gid_type`.
pub const IBV_GID_TYPE_IB: u32 = 0;
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

unsafe extern "C" {
    fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        entry_size: usize,
    ) -> isize;
}

pub type Result<T> = std::result::Result<T, Errno>;

/// A call that returns a pointer, null on failure with `errno` set (the creating verbs).
#[inline]
pub fn cvt_ptr<T>(raw: *mut T) -> Result<NonNull<T>> {
    NonNull::new(raw).ok_or_else(Errno::last)
}

/// A call that returns 0, or an errno value. Some providers return `-1` with `errno` set, or a negative
/// errno; both are understood.
#[inline]
pub fn cvt_errno(rc: c_int) -> Result<()> {
    if rc == 0 { Ok(()) } else { Err(errno_of(rc)) }
}

#[cold]
fn errno_of(rc: c_int) -> Errno {
    match rc {
        -1 => Errno::last(),
        rc => Errno::from_raw(rc.wrapping_abs()),
    }
}

/// A call that returns `-1` with `errno` set, and something else on success.
#[inline]
pub fn cvt_minus_one(rc: c_int) -> Result<c_int> {
    if rc == -1 { Err(Errno::last()) } else { Ok(rc) }
}

// Devices.

pub unsafe fn get_device_list() -> Result<(NonNull<*mut ibv_device>, usize)> {
    let mut count: c_int = 0;
    // SAFETY: `count` is writable for the call.
    let list = cvt_ptr(unsafe { rdma_sys::ibv_get_device_list(&raw mut count) })?;
    Ok((list, usize::try_from(count).unwrap_or(0)))
}

pub unsafe fn free_device_list(list: NonNull<*mut ibv_device>) {
    // SAFETY: the caller passes a list of `get_device_list`, once.
    unsafe { rdma_sys::ibv_free_device_list(list.as_ptr()) }
}

pub unsafe fn device_name(device: NonNull<ibv_device>) -> String {
    // SAFETY: the caller's device is alive; its name is a NUL-terminated array inside it.
    unsafe {
        let name: *const c_char = rdma_sys::ibv_get_device_name(device.as_ptr());
        if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    }
}

/// The name of the device's node in /dev/infiniband, such as `uverbs0`.
pub unsafe fn device_node(device: NonNull<ibv_device>) -> String {
    // SAFETY: the caller's device is alive; the array inside it is NUL-terminated and constant.
    unsafe { CStr::from_ptr((&raw const (*device.as_ptr()).dev_name).cast()).to_string_lossy().into_owned() }
}

pub unsafe fn device_guid(device: NonNull<ibv_device>) -> u64 {
    // SAFETY: the caller's device is alive.
    u64::from_be(unsafe { rdma_sys::ibv_get_device_guid(device.as_ptr()) })
}

pub unsafe fn open_device(device: NonNull<ibv_device>) -> Result<NonNull<ibv_context>> {
    // SAFETY: the caller's device is alive.
    cvt_ptr(unsafe { rdma_sys::ibv_open_device(device.as_ptr()) })
}

pub unsafe fn close_device(context: NonNull<ibv_context>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the context and nothing made on it is left.
    cvt_errno(unsafe { rdma_sys::ibv_close_device(context.as_ptr()) })
}

pub unsafe fn query_device(context: NonNull<ibv_context>) -> Result<ibv_device_attr> {
    not_in_child()?;
    let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
    // SAFETY: the context is alive; the structure is plain data, zeroed, so valid even if partly written.
    unsafe {
        cvt_errno(rdma_sys::ibv_query_device(context.as_ptr(), attr.as_mut_ptr()))?;
        Ok(attr.assume_init())
    }
}

/// `ibv_query_port` as the C macro does it: the extended entry point where the provider has one, else the
/// old one, which knows nothing of the last field.
pub unsafe fn query_port(context: NonNull<ibv_context>, port: u8) -> Result<ibv_port_attr> {
    not_in_child()?;
    let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the context is alive; an extended context is the last field of its `verbs_context`, whose
    // `sz` says how much of it the library filled; the old entry point writes a prefix of the structure.
    unsafe {
        let rc = match extended(context) {
            Some(ext)
                if (*ext.as_ptr()).sz
                    >= size_of::<rdma_sys::verbs_context>() - offset_of!(rdma_sys::verbs_context, query_port) =>
            {
                match (*ext.as_ptr()).query_port {
                    Some(query) => query(context.as_ptr(), port, attr.as_mut_ptr(), size_of::<ibv_port_attr>()),
                    None => rdma_sys::ibv_query_port(context.as_ptr(), port, attr.as_mut_ptr().cast()),
                }
            }
            _ => rdma_sys::ibv_query_port(context.as_ptr(), port, attr.as_mut_ptr().cast()),
        };
        cvt_errno(rc)?;
        Ok(attr.assume_init())
    }
}

/// The `verbs_context` around an extended context (`verbs_get_ctx` in C).
unsafe fn extended(context: NonNull<ibv_context>) -> Option<NonNull<rdma_sys::verbs_context>> {
    // SAFETY: the context is alive; libibverbs marks an extended one with an all-ones `abi_compat`.
    unsafe {
        if (*context.as_ptr()).abi_compat.addr() != usize::MAX {
            return None;
        }
        let outer = context.as_ptr().byte_sub(offset_of!(rdma_sys::verbs_context, context));
        NonNull::new(outer.cast())
    }
}

pub unsafe fn query_gid_table(context: NonNull<ibv_context>, max: usize) -> Result<Vec<ibv_gid_entry>> {
    not_in_child()?;
    let mut entries: Vec<ibv_gid_entry> = Vec::with_capacity(max);
    // SAFETY: the context is alive; at most `max` entries are written, and the count written is returned.
    unsafe {
        let n = _ibv_query_gid_table(context.as_ptr(), entries.as_mut_ptr(), max, 0, size_of::<ibv_gid_entry>());
        if n < 0 {
            return Err(errno_of(n as c_int));
        }
        entries.set_len((n as usize).min(max));
    }
    Ok(entries)
}

/// The name of a network interface (`if_indextoname`), or `None` when there is none with this index.
pub fn interface_name(index: u32) -> Option<String> {
    let mut name = [0 as c_char; nix::libc::IF_NAMESIZE];
    // SAFETY: the array has the `IF_NAMESIZE` bytes that the call may write, and a NUL at its end.
    unsafe {
        if nix::libc::if_indextoname(index as c_uint, name.as_mut_ptr()).is_null() {
            return None;
        }
        Some(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

// Forks.

/// Set in a process that was forked from one that had opened a device.
static IN_CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this process was forked after a device was opened. Its copies of the parent's objects must not be used: the
/// kernel refuses some calls on them (`ib_uverbs_write` compares credentials), others would act on the parent's objects,
/// and the queues are shared memory. So the functions here make no call then: what creates or uses something is refused
/// with `EPERM`, what destroys something leaves it to the parent.
#[inline]
pub fn in_child() -> bool {
    IN_CHILD.load(Ordering::Relaxed)
}

fn not_in_child() -> Result<()> {
    if in_child() { Err(Errno::EPERM) } else { Ok(()) }
}

/// Has forks noticed from now on.
pub fn watch_forks() {
    extern "C" fn child() {
        IN_CHILD.store(true, Ordering::Relaxed);
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to an atomic, which is allowed in the child of a process with threads.
        let rc = unsafe { nix::libc::pthread_atfork(None, None, Some(child)) };
        if rc != 0 {
            log::warn!("pthread_atfork: {}; forks go unnoticed", Errno::from_raw(rc));
        }
    });
}

// Protection domains and memory.

pub unsafe fn alloc_pd(context: NonNull<ibv_context>) -> Result<NonNull<ibv_pd>> {
    not_in_child()?;
    // SAFETY: the caller's context is alive.
    cvt_ptr(unsafe { rdma_sys::ibv_alloc_pd(context.as_ptr()) })
}

pub unsafe fn dealloc_pd(pd: NonNull<ibv_pd>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the domain.
    cvt_errno(unsafe { rdma_sys::ibv_dealloc_pd(pd.as_ptr()) })
}

pub unsafe fn reg_mr(pd: NonNull<ibv_pd>, addr: NonNull<u8>, len: usize, access: u32) -> Result<NonNull<ibv_mr>> {
    not_in_child()?;
    // SAFETY: the caller's domain is alive and owns `len` bytes at `addr` until the region is deregistered.
    cvt_ptr(unsafe { rdma_sys::ibv_reg_mr(pd.as_ptr(), addr.as_ptr().cast::<c_void>(), len, access as c_int) })
}

/// `ibv_reg_mr` with a device address of the caller's choice.
pub unsafe fn reg_mr_iova(
    pd: NonNull<ibv_pd>,
    addr: NonNull<u8>,
    len: usize,
    iova: u64,
    access: u32,
) -> Result<NonNull<ibv_mr>> {
    not_in_child()?;
    // SAFETY: as for `reg_mr`.
    cvt_ptr(unsafe { rdma_sys::ibv_reg_mr_iova2(pd.as_ptr(), addr.as_ptr().cast::<c_void>(), len, iova, access) })
}

pub unsafe fn reg_dmabuf_mr(
    pd: NonNull<ibv_pd>,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: u32,
) -> Result<NonNull<ibv_mr>> {
    not_in_child()?;
    // SAFETY: the caller's domain is alive and its descriptor open; the kernel keeps what is behind it.
    cvt_ptr(unsafe { rdma_sys::ibv_reg_dmabuf_mr(pd.as_ptr(), offset, len, iova, fd, access as c_int) })
}

pub unsafe fn dereg_mr(mr: NonNull<ibv_mr>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the region.
    cvt_errno(unsafe { rdma_sys::ibv_dereg_mr(mr.as_ptr()) })
}

// Memory windows.

/// `IBV_DEVICE_MEM_WINDOW_TYPE_2A` and `_2B` of the device's capability flags.
pub const DEVICE_MEM_WINDOW_TYPE_2: u32 = (1 << 23) | (1 << 24);

/// `ibv_alloc_mw` of type 2.
pub unsafe fn alloc_mw(pd: NonNull<ibv_pd>) -> Result<NonNull<ibv_mw>> {
    not_in_child()?;
    // SAFETY: the caller's domain is alive.
    match unsafe { rdma_sys::ibv_alloc_mw(pd.as_ptr(), ibv_mw_type::IBV_MW_TYPE_2) } {
        Some(mw) => cvt_ptr(mw),
        None => Err(Errno::EOPNOTSUPP),
    }
}

pub unsafe fn dealloc_mw(mw: NonNull<ibv_mw>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the window, which the provider made, so it can unmake it.
    cvt_errno(unsafe { rdma_sys::ibv_dealloc_mw(mw.as_ptr()) })
}

// Completion channels and queues.

pub unsafe fn create_comp_channel(context: NonNull<ibv_context>) -> Result<NonNull<ibv_comp_channel>> {
    not_in_child()?;
    // SAFETY: the caller's context is alive.
    cvt_ptr(unsafe { rdma_sys::ibv_create_comp_channel(context.as_ptr()) })
}

pub unsafe fn destroy_comp_channel(channel: NonNull<ibv_comp_channel>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the channel.
    cvt_errno(unsafe { rdma_sys::ibv_destroy_comp_channel(channel.as_ptr()) })
}

pub unsafe fn create_cq(
    context: NonNull<ibv_context>,
    depth: c_int,
    channel: Option<NonNull<ibv_comp_channel>>,
    vector: c_int,
) -> Result<NonNull<ibv_cq>> {
    not_in_child()?;
    let channel = channel.map_or(ptr::null_mut(), NonNull::as_ptr);
    // SAFETY: the caller's context and channel are alive, the channel for as long as the queue.
    cvt_ptr(unsafe { rdma_sys::ibv_create_cq(context.as_ptr(), depth, ptr::null_mut(), channel, vector) })
}

pub unsafe fn destroy_cq(cq: NonNull<ibv_cq>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the queue and has acknowledged its events.
    cvt_errno(unsafe { rdma_sys::ibv_destroy_cq(cq.as_ptr()) })
}

/// Reads one event off the channel; which queue it is for is returned.
pub unsafe fn get_cq_event(channel: NonNull<ibv_comp_channel>) -> Result<*mut ibv_cq> {
    not_in_child()?;
    let mut cq = ptr::null_mut();
    let mut user = ptr::null_mut();
    // SAFETY: the caller's channel is alive, the out-pointers are writable.
    cvt_minus_one(unsafe { rdma_sys::ibv_get_cq_event(channel.as_ptr(), &raw mut cq, &raw mut user) })?;
    Ok(cq)
}

pub unsafe fn ack_cq_events(cq: NonNull<ibv_cq>, count: u32) {
    if in_child() {
        return;
    }
    // SAFETY: the caller's queue is alive, and `count` of its events were read and not yet acknowledged.
    unsafe { rdma_sys::ibv_ack_cq_events(cq.as_ptr(), count) }
}

/// `ibv_poll_cq`: how many completions were written to `wc`, or a negative number.
#[inline]
pub unsafe fn poll_cq(cq: NonNull<ibv_cq>, max: c_int, wc: *mut ibv_wc) -> c_int {
    if in_child() {
        return -1;
    }
    // SAFETY: the caller's queue is alive and `wc` has room for `max` completions.
    unsafe {
        match (*(*cq.as_ptr()).context).ops.poll_cq {
            Some(poll) => poll(cq.as_ptr(), max, wc),
            None => -1,
        }
    }
}

pub unsafe fn req_notify_cq(cq: NonNull<ibv_cq>, solicited_only: bool) -> Result<()> {
    not_in_child()?;
    // SAFETY: the caller's queue is alive.
    cvt_errno(unsafe { rdma_sys::ibv_req_notify_cq(cq.as_ptr(), solicited_only.into()) })
}

// Queue pairs.

pub unsafe fn create_qp(pd: NonNull<ibv_pd>, attr: &mut ibv_qp_init_attr) -> Result<NonNull<ibv_qp>> {
    not_in_child()?;
    // SAFETY: the caller's domain is alive, and so are the queues named in `attr`.
    cvt_ptr(unsafe { rdma_sys::ibv_create_qp(pd.as_ptr(), attr) })
}

pub unsafe fn destroy_qp(qp: NonNull<ibv_qp>) -> Result<()> {
    if in_child() {
        return Ok(());
    }
    // SAFETY: the caller owns the queue pair.
    cvt_errno(unsafe { rdma_sys::ibv_destroy_qp(qp.as_ptr()) })
}

pub unsafe fn modify_qp(qp: NonNull<ibv_qp>, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> Result<()> {
    not_in_child()?;
    // SAFETY: the caller's queue pair is alive; `attr` is only read.
    cvt_errno(unsafe { rdma_sys::ibv_modify_qp(qp.as_ptr(), attr, mask.0 as c_int) })
}

pub unsafe fn query_qp(qp: NonNull<ibv_qp>, mask: ibv_qp_attr_mask) -> Result<(ibv_qp_attr, ibv_qp_init_attr)> {
    not_in_child()?;
    let (mut attr, mut init) = (zeroed_qp_attr(), zeroed_qp_init_attr());
    // SAFETY: the caller's queue pair is alive; both structures are writable.
    cvt_errno(unsafe { rdma_sys::ibv_query_qp(qp.as_ptr(), &raw mut attr, mask.0 as c_int, &raw mut init) })?;
    Ok((attr, init))
}

/// `struct ibv_async_event` with the event as the number that it is in C: newer libraries have more than the bindings know.
#[repr(C)]
struct RawAsyncEvent {
    /// A pointer to the object, or in its first four bytes a port number.
    element: *mut c_void,
    event_type: c_uint,
}

const _: () = assert!(size_of::<RawAsyncEvent>() == size_of::<rdma_sys::ibv_async_event>());

/// What an asynchronous event names; which field means something depends on the event.
#[derive(Clone, Copy, Debug)]
pub struct AsyncElement {
    /// The address of the object.
    pub address: usize,
    /// The number of the port.
    pub port: u32,
    /// The number of the queue pair, for the events that are known to name one.
    pub qp_num: Option<u32>,
}

/// The descriptor that becomes readable with asynchronous events.
///
/// # Safety
/// `context` is open.
pub unsafe fn async_fd(context: NonNull<ibv_context>) -> RawFd {
    // SAFETY: open, as the caller says; the field is constant.
    unsafe { (*context.as_ptr()).async_fd }
}

/// `ibv_get_async_event` and `ibv_ack_async_event`: number and element of the next event.
///
/// # Safety
/// `context` is open.
pub unsafe fn next_async_event(context: NonNull<ibv_context>) -> Result<(u32, AsyncElement)> {
    not_in_child()?;
    let mut raw = RawAsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
    let place: *mut rdma_sys::ibv_async_event = (&raw mut raw).cast();
    // SAFETY: open, as the caller says; the place has the size and layout of the C struct.
    cvt_minus_one(unsafe { rdma_sys::ibv_get_async_event(context.as_ptr(), place) })?;
    // IBV_EVENT_QP_FATAL to PATH_MIG_ERR, and QP_LAST_WQE_REACHED.
    let names_qp = matches!(raw.event_type, 1..=7 | 16);
    // SAFETY: these events name a queue pair of this process, whose destruction waits for the acknowledgement below.
    let qp_num = names_qp.then(|| unsafe { (*raw.element.cast::<ibv_qp>()).qp_num });
    let address = raw.element.addr();
    #[expect(clippy::cast_possible_truncation, reason = "the union's int lies in the first four bytes")]
    let port = if cfg!(target_endian = "little") { address as u32 } else { (address >> 32) as u32 };
    // SAFETY: fetched above, acknowledged once.
    unsafe { rdma_sys::ibv_ack_async_event(place) };
    Ok((raw.event_type, AsyncElement { address, port, qp_num }))
}

pub fn zeroed_qp_attr() -> ibv_qp_attr {
    // SAFETY: plain data; all zeroes is a valid value of every field.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

pub fn zeroed_qp_init_attr() -> ibv_qp_init_attr {
    // SAFETY: plain data and raw pointers; all zeroes is a valid value of every field.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[inline]
pub fn zeroed_send_wr() -> ibv_send_wr {
    // SAFETY: plain data and raw pointers; all zeroes is a valid value of every field.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// `ibv_post_send` of a list: 0, or an errno value. Which one failed is not told: all of them count as posted then.
#[inline]
pub unsafe fn post_send(qp: NonNull<ibv_qp>, wr: *mut ibv_send_wr) -> c_int {
    if in_child() {
        return Errno::EPERM as c_int;
    }
    let mut bad = ptr::null_mut();
    // SAFETY: the caller's queue pair is alive, `wr` heads a list of valid requests that is read during
    // the call only, and the memory they name stays registered and alive until their completions.
    unsafe { rdma_sys::ibv_post_send(qp.as_ptr(), wr, &raw mut bad) }
}

/// `ibv_post_recv`: 0, or an errno value.
#[inline]
pub unsafe fn post_recv(qp: NonNull<ibv_qp>, wr: *mut ibv_recv_wr) -> c_int {
    if in_child() {
        return Errno::EPERM as c_int;
    }
    let mut bad = ptr::null_mut();
    // SAFETY: as for `post_send`.
    unsafe { rdma_sys::ibv_post_recv(qp.as_ptr(), wr, &raw mut bad) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_error_conventions() {
        assert_eq!(cvt_errno(0), Ok(()));
        assert_eq!(cvt_errno(12), Err(Errno::ENOMEM));
        assert_eq!(cvt_errno(-22), Err(Errno::EINVAL));
        Errno::ENODEV.set();
        assert_eq!(cvt_errno(-1), Err(Errno::ENODEV));
        Errno::EACCES.set();
        assert_eq!(cvt_minus_one(-1), Err(Errno::EACCES));
        assert_eq!(cvt_minus_one(3), Ok(3));
        Errno::ENOMEM.set();
        assert_eq!(cvt_ptr::<u8>(ptr::null_mut()), Err(Errno::ENOMEM));
    }

    #[test]
    fn an_interface_that_does_not_exist_has_no_name() {
        assert_eq!(interface_name(0), None);
        assert_eq!(interface_name(1).as_deref(), Some("lo"));
    }
}
