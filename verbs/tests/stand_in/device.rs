//! A stand-in for libibverbs and a device: every C function that the crate calls, and an `ibv_context` whose queue
//! pairs are connected to themselves. It moves the bytes, keeps verbs' rules of completion and of flushing, counts
//! what is alive, and does wrong what a test asks of it.
//!
//! The functions have the names of the C library's, and the linker prefers them. A test that includes this module
//! therefore never reaches a real device.

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};
use verbs::sys::{self, ibv_qp_state as State, ibv_wc_opcode as Wc, ibv_wr_opcode as Wr};
use verbs::{Context, WorkStatus};

/// Places in each ring.
const RING: usize = 512;

/// A device, and what can go wrong with it.
#[repr(C)]
pub(crate) struct StandIn {
    /// First, so that a pointer to it is a pointer to the whole.
    context: sys::ibv_context,
    queues: Mutex<()>,
    /// Send-side requests are kept back until [`StandIn::release`].
    pub(crate) hold: AtomicBool,
    /// Nothing is moved and nothing is received: send-side requests complete, no more. For counting instructions.
    pub(crate) idle: AtomicBool,
    /// What `ibv_destroy_qp` fails with; 0 for success.
    pub(crate) destroy_qp: AtomicI32,
    /// What `ibv_dereg_mr` fails with; 0 for success.
    pub(crate) dereg_mr: AtomicI32,
    /// What `ibv_post_send` fails with; 0 for success.
    pub(crate) post_send: AtomicI32,
    tampers: AtomicBool,
    tamper: Mutex<Option<Tamper>>,
    /// What is alive.
    pub(crate) domains: AtomicUsize,
    pub(crate) regions: AtomicUsize,
    pub(crate) queues_alive: AtomicUsize,
    pub(crate) pairs: AtomicUsize,
}

/// Changes a completion before it is told.
type Tamper = Box<dyn FnMut(&mut sys::ibv_wc) + Send>;

// SAFETY: the raw pointers of the context are constant; the rest is atomic or behind locks.
unsafe impl Send for StandIn {}
// SAFETY: as above.
unsafe impl Sync for StandIn {}

impl StandIn {
    /// A new device, and its opened context.
    pub(crate) fn new() -> (Arc<StandIn>, Context) {
        // SAFETY: plain data, function pointers that may be null, and a C mutex that nobody uses.
        let mut context: sys::ibv_context = unsafe { MaybeUninit::zeroed().assume_init() };
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        let device = Arc::new(StandIn {
            context,
            queues: Mutex::new(()),
            hold: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            destroy_qp: AtomicI32::new(0),
            dereg_mr: AtomicI32::new(0),
            post_send: AtomicI32::new(0),
            tampers: AtomicBool::new(false),
            tamper: Mutex::new(None),
            domains: AtomicUsize::new(0),
            regions: AtomicUsize::new(0),
            queues_alive: AtomicUsize::new(0),
            pairs: AtomicUsize::new(0),
        });
        let raw = ptr::from_ref(&device.context).cast_mut();
        // SAFETY: the context lives as long as the `Arc`, which is kept.
        let opened = unsafe { Context::from_raw(raw, device.clone()) };
        (device, opened)
    }

    /// Has every completion changed by `tamper` from now on.
    pub(crate) fn tamper(&self, tamper: impl FnMut(&mut sys::ibv_wc) + Send + 'static) {
        *self.tamper.lock().expect("no panic") = Some(Box::new(tamper));
        self.tampers.store(true, Ordering::SeqCst);
    }

    /// Carries out what was kept back on this queue pair.
    pub(crate) fn release(&self, qp: &verbs::QueuePair) {
        self.hold.store(false, Ordering::SeqCst);
        let _lock = self.lock();
        // SAFETY: one of ours, alive, and its queues locked.
        unsafe {
            let qp = qp.as_raw().cast::<Qp>();
            while let Some(request) = (*qp).held.pop_front() {
                carry_out(self, qp, &request);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.queues.lock().expect("no panic")
    }

    unsafe fn of<'a>(context: *mut sys::ibv_context) -> &'a StandIn {
        // SAFETY: the caller's context is the first field of one of ours, which is alive.
        unsafe { &*context.cast::<StandIn>() }
    }
}

#[repr(C)]
struct Channel {
    raw: sys::ibv_comp_channel,
    events: EventFd,
    cq: *mut sys::ibv_cq,
}

#[repr(C)]
struct Cq {
    raw: sys::ibv_cq,
    ring: [MaybeUninit<sys::ibv_wc>; RING],
    head: usize,
    tail: usize,
    armed: bool,
}

#[repr(C)]
struct Qp {
    raw: sys::ibv_qp,
    receives: Ring<Receive>,
    held: VecDeque<Request>,
    error: bool,
}

#[derive(Clone, Copy)]
struct Receive {
    wr_id: u64,
    addr: u64,
    len: u32,
}

struct Ring<T> {
    places: [MaybeUninit<T>; RING],
    head: usize,
    tail: usize,
}

impl<T: Copy> Ring<T> {
    fn new() -> Ring<T> {
        Ring { places: [const { MaybeUninit::uninit() }; RING], head: 0, tail: 0 }
    }

    fn push(&mut self, value: T) -> bool {
        if self.tail - self.head == RING {
            return false;
        }
        self.places[self.tail % RING].write(value);
        self.tail += 1;
        true
    }

    fn pop(&mut self) -> Option<T> {
        if self.head == self.tail {
            return None;
        }
        // SAFETY: written by `push`.
        let value = unsafe { self.places[self.head % RING].assume_init_read() };
        self.head += 1;
        Some(value)
    }
}

/// A send-side request, with inline data copied.
struct Request {
    wr_id: u64,
    opcode: u32,
    signalled: bool,
    imm: u32,
    pieces: [sys::ibv_sge; 4],
    count: usize,
    inline: Option<Vec<u8>>,
    remote: u64,
    compare_add: u64,
    swap: u64,
}

impl Request {
    fn len(&self) -> usize {
        self.pieces[..self.count].iter().map(|piece| piece.length as usize).sum()
    }

    /// Copies the local bytes to `to`.
    unsafe fn gather(&self, mut to: *mut u8) {
        if let Some(inline) = &self.inline {
            // SAFETY: the caller's target is large enough.
            return unsafe { ptr::copy_nonoverlapping(inline.as_ptr(), to, inline.len()) };
        }
        for piece in &self.pieces[..self.count] {
            // SAFETY: registered by the one who posted; the caller's target is large enough.
            unsafe {
                ptr::copy(ptr::with_exposed_provenance(piece.addr as usize), to, piece.length as usize);
                to = to.add(piece.length as usize);
            }
        }
    }

    /// Copies bytes from `from` to the local pieces.
    unsafe fn scatter(&self, mut from: *const u8) {
        for piece in &self.pieces[..self.count] {
            // SAFETY: as above.
            unsafe {
                ptr::copy(from, ptr::with_exposed_provenance_mut(piece.addr as usize), piece.length as usize);
                from = from.add(piece.length as usize);
            }
        }
    }
}

unsafe fn complete(device: &StandIn, cq: *mut Cq, mut wc: sys::ibv_wc) {
    if device.tampers.load(Ordering::Relaxed)
        && let Some(tamper) = &mut *device.tamper.lock().expect("no panic")
    {
        tamper(&mut wc);
    }
    // SAFETY: the queue is alive, and locked by the caller.
    unsafe {
        assert!((*cq).tail - (*cq).head < RING.min((*cq).raw.cqe as usize), "a completion queue overruns");
        (*cq).ring[(*cq).tail % RING].write(wc);
        (*cq).tail += 1;
        if (*cq).armed {
            (*cq).armed = false;
            let channel = (*cq).raw.channel.cast::<Channel>();
            (*channel).events.write(1).expect("an event");
        }
    }
}

fn completion(wr_id: u64, opcode: u32, status: WorkStatus, len: usize) -> sys::ibv_wc {
    // SAFETY: plain data.
    let mut wc: sys::ibv_wc = unsafe { MaybeUninit::zeroed().assume_init() };
    wc.wr_id = wr_id;
    wc.status = status.0;
    // Garbage with an error, as the rules allow.
    wc.opcode = if status == WorkStatus::SUCCESS { opcode } else { 0xdead };
    wc.byte_len = if status == WorkStatus::SUCCESS { len as u32 } else { 0xdead_beef };
    wc
}

unsafe fn carry_out(device: &StandIn, qp: *mut Qp, request: &Request) {
    let len = request.len();
    // SAFETY: the caller has locked the queues of a live queue pair; the program registered the memory.
    unsafe {
        let send_cq = (*qp).raw.send_cq.cast::<Cq>();
        if (*qp).error {
            return complete(device, send_cq, completion(request.wr_id, 0, WorkStatus::FLUSHED, 0));
        }
        let remote = ptr::with_exposed_provenance_mut::<u8>(request.remote as usize);
        let mut status = WorkStatus::SUCCESS;
        match request.opcode {
            Wr::IBV_WR_SEND | Wr::IBV_WR_SEND_WITH_IMM => match (*qp).receives.pop() {
                None => status = WorkStatus::RNR_RETRY_EXCEEDED,
                Some(receive) => {
                    let mut got = completion(receive.wr_id, Wc::IBV_WC_RECV, WorkStatus::SUCCESS, len);
                    if len > receive.len as usize {
                        status = WorkStatus::REMOTE_INVALID_REQUEST;
                        got.status = WorkStatus::LOCAL_LENGTH.0;
                    } else {
                        request.gather(ptr::with_exposed_provenance_mut(receive.addr as usize));
                    }
                    with_imm(&mut got, request, Wr::IBV_WR_SEND_WITH_IMM);
                    complete(device, (*qp).raw.recv_cq.cast(), got);
                }
            },
            Wr::IBV_WR_RDMA_WRITE => request.gather(remote),
            Wr::IBV_WR_RDMA_WRITE_WITH_IMM => match (*qp).receives.pop() {
                None => status = WorkStatus::RNR_RETRY_EXCEEDED,
                Some(receive) => {
                    request.gather(remote);
                    let opcode = Wc::IBV_WC_RECV_RDMA_WITH_IMM;
                    let mut got = completion(receive.wr_id, opcode, WorkStatus::SUCCESS, len);
                    with_imm(&mut got, request, Wr::IBV_WR_RDMA_WRITE_WITH_IMM);
                    complete(device, (*qp).raw.recv_cq.cast(), got);
                }
            },
            Wr::IBV_WR_RDMA_READ => request.scatter(remote),
            Wr::IBV_WR_ATOMIC_CMP_AND_SWP | Wr::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let word = remote.cast::<u64>();
                let old = word.read();
                request.scatter(ptr::from_ref(&old).cast());
                if request.opcode == Wr::IBV_WR_ATOMIC_FETCH_AND_ADD {
                    word.write(old.wrapping_add(request.compare_add));
                } else if old == request.compare_add {
                    word.write(request.swap);
                }
            }
            other => panic!("an unknown operation {other}"),
        }
        if request.signalled || status != WorkStatus::SUCCESS {
            complete(device, send_cq, completion(request.wr_id, request.opcode, status, len));
        }
    }
}

fn with_imm(wc: &mut sys::ibv_wc, request: &Request, opcode: u32) {
    if request.opcode == opcode {
        wc.wc_flags |= sys::ibv_wc_flags::IBV_WC_WITH_IMM.0;
        wc.imm_data_invalidated_rkey_union.imm_data = request.imm;
    }
}

unsafe fn flush(device: &StandIn, qp: *mut Qp) {
    // SAFETY: the caller has locked the queues of a live queue pair.
    unsafe {
        (*qp).error = true;
        while let Some(request) = (*qp).held.pop_front() {
            carry_out(device, qp, &request);
        }
        while let Some(receive) = (*qp).receives.pop() {
            let wc = completion(receive.wr_id, 0, WorkStatus::FLUSHED, 0);
            complete(device, (*qp).raw.recv_cq.cast(), wc);
        }
    }
}

// The fast calls, through the context.

unsafe extern "C" fn poll_cq(cq: *mut sys::ibv_cq, max: c_int, wc: *mut sys::ibv_wc) -> c_int {
    // SAFETY: the caller keeps verbs' rules; the rest is ours.
    unsafe {
        let device = StandIn::of((*cq).context);
        let cq = cq.cast::<Cq>();
        if device.idle.load(Ordering::Relaxed) {
            return take(cq, max, wc);
        }
        let _lock = device.lock();
        take(cq, max, wc)
    }
}

#[inline(always)]
unsafe fn take(cq: *mut Cq, max: c_int, wc: *mut sys::ibv_wc) -> c_int {
    // SAFETY: as the callers say.
    unsafe {
        let mut n = 0;
        while n < max && (*cq).head < (*cq).tail {
            let from = (*cq).ring[(*cq).head % RING].as_ptr();
            ptr::copy_nonoverlapping(from, wc.add(n as usize), 1);
            (*cq).head += 1;
            n += 1;
        }
        n
    }
}

unsafe extern "C" fn req_notify_cq(cq: *mut sys::ibv_cq, _solicited: c_int) -> c_int {
    // SAFETY: as above.
    unsafe {
        let _lock = StandIn::of((*cq).context).lock();
        (*cq.cast::<Cq>()).armed = true;
    }
    0
}

unsafe extern "C" fn post_send(
    qp: *mut sys::ibv_qp,
    mut wr: *mut sys::ibv_send_wr,
    bad: *mut *mut sys::ibv_send_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let device = StandIn::of((*qp).context);
        let qp = qp.cast::<Qp>();
        if device.idle.load(Ordering::Relaxed) {
            while !wr.is_null() {
                if (*wr).send_flags & sys::ibv_send_flags::IBV_SEND_SIGNALED.0 != 0 {
                    let cq = (*qp).raw.send_cq.cast::<Cq>();
                    let wc = (*cq).ring[(*cq).tail % RING].as_mut_ptr();
                    (*wc).wr_id = (*wr).wr_id;
                    (*wc).status = 0;
                    (*cq).tail += 1;
                }
                wr = (*wr).next;
            }
            return 0;
        }
        let _lock = device.lock();
        while !wr.is_null() {
            let errno = device.post_send.load(Ordering::Relaxed);
            if errno != 0 {
                *bad = wr;
                return errno;
            }
            let request = request(wr);
            if device.hold.load(Ordering::Relaxed) && !(*qp).error {
                (*qp).held.push_back(request);
            } else {
                carry_out(device, qp, &request);
            }
            wr = (*wr).next;
        }
    }
    0
}

unsafe fn request(wr: *mut sys::ibv_send_wr) -> Request {
    // SAFETY: as above; which view of the union is meant is told by the operation.
    unsafe {
        let count = (*wr).num_sge as usize;
        let mut pieces = [sys::ibv_sge { addr: 0, length: 0, lkey: 0 }; 4];
        ptr::copy_nonoverlapping((*wr).sg_list, pieces.as_mut_ptr(), count);
        let atomic = matches!((*wr).opcode, Wr::IBV_WR_ATOMIC_CMP_AND_SWP | Wr::IBV_WR_ATOMIC_FETCH_AND_ADD);
        let mut request = Request {
            wr_id: (*wr).wr_id,
            opcode: (*wr).opcode,
            signalled: (*wr).send_flags & sys::ibv_send_flags::IBV_SEND_SIGNALED.0 != 0,
            imm: (*wr).imm_data_invalidated_rkey_union.imm_data,
            pieces,
            count,
            inline: None,
            remote: if atomic { (*wr).wr.atomic.remote_addr } else { (*wr).wr.rdma.remote_addr },
            compare_add: if atomic { (*wr).wr.atomic.compare_add } else { 0 },
            swap: if atomic { (*wr).wr.atomic.swap } else { 0 },
        };
        if (*wr).send_flags & sys::ibv_send_flags::IBV_SEND_INLINE.0 != 0 && request.len() > 0 {
            let mut bytes = vec![0; request.len()];
            request.gather(bytes.as_mut_ptr());
            request.inline = Some(bytes);
        }
        request
    }
}

unsafe extern "C" fn post_recv(
    qp: *mut sys::ibv_qp,
    mut wr: *mut sys::ibv_recv_wr,
    bad: *mut *mut sys::ibv_recv_wr,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let device = StandIn::of((*qp).context);
        let qp = qp.cast::<Qp>();
        let idle = device.idle.load(Ordering::Relaxed);
        let _lock = if idle { None } else { Some(device.lock()) };
        while !wr.is_null() {
            let (addr, len) = match (*wr).num_sge {
                0 => (0, 0),
                _ => ((*(*wr).sg_list).addr, (*(*wr).sg_list).length),
            };
            if idle {
                // Received at once.
                let cq = (*qp).raw.recv_cq.cast::<Cq>();
                let wc = (*cq).ring[(*cq).tail % RING].as_mut_ptr();
                (*wc).wr_id = (*wr).wr_id;
                (*wc).status = 0;
                (*wc).opcode = Wc::IBV_WC_RECV;
                (*wc).byte_len = 8;
                (*wc).wc_flags = 0;
                (*cq).tail += 1;
            } else if (*qp).error {
                let wc = completion((*wr).wr_id, 0, WorkStatus::FLUSHED, 0);
                complete(device, (*qp).raw.recv_cq.cast(), wc);
            } else if !(*qp).receives.push(Receive { wr_id: (*wr).wr_id, addr, len }) {
                *bad = wr;
                return Errno::ENOMEM as c_int;
            }
            wr = (*wr).next;
        }
    }
    0
}

// The other calls, by their names.

fn boxed<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn zeroed<T>() -> T {
    // SAFETY: used for C structures of plain data and pointers only.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(_: *mut sys::ibv_context, attr: *mut sys::ibv_device_attr) -> c_int {
    // SAFETY: the caller's structure is writable.
    unsafe {
        (*attr).max_qp_wr = 400;
        (*attr).max_cqe = 500;
        (*attr).max_sge = 4;
        (*attr).phys_port_cnt = 1;
        (*attr).atomic_cap = sys::ibv_atomic_cap::IBV_ATOMIC_HCA;
        (*attr).max_mr_size = u64::MAX;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(_: *mut sys::ibv_context, port: u8, attr: *mut sys::ibv_port_attr) -> c_int {
    if port != 1 {
        return Errno::EINVAL as c_int;
    }
    // SAFETY: the caller's structure is writable.
    unsafe {
        (*attr).max_msg_sz = 1 << 30;
        (*attr).active_mtu = 5;
        (*attr).max_mtu = 5;
        (*attr).state = sys::ibv_port_state::IBV_PORT_ACTIVE;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut sys::ibv_context) -> *mut sys::ibv_pd {
    // SAFETY: the caller's context is alive.
    unsafe { StandIn::of(context) }.domains.fetch_add(1, Ordering::SeqCst);
    let mut pd: sys::ibv_pd = zeroed();
    pd.context = context;
    boxed(pd)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(pd: *mut sys::ibv_pd) -> c_int {
    // SAFETY: made by `ibv_alloc_pd`, freed once.
    unsafe {
        let pd = Box::from_raw(pd);
        StandIn::of(pd.context).domains.fetch_sub(1, Ordering::SeqCst);
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut sys::ibv_mr {
    if access & sys::ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as c_int != 0 {
        Errno::EINVAL.set();
        return ptr::null_mut();
    }
    // SAFETY: the caller's domain is alive.
    unsafe { StandIn::of((*pd).context) }.regions.fetch_add(1, Ordering::SeqCst);
    let mut mr: sys::ibv_mr = zeroed();
    // SAFETY: the caller's domain is alive.
    mr.context = unsafe { (*pd).context };
    (mr.pd, mr.addr, mr.length) = (pd, addr, len);
    (mr.lkey, mr.rkey) = (11, 22);
    boxed(mr)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut sys::ibv_pd,
    addr: *mut c_void,
    len: usize,
    _iova: u64,
    access: c_uint,
) -> *mut sys::ibv_mr {
    // SAFETY: as the caller says.
    unsafe { ibv_reg_mr(pd, addr, len, access as c_int) }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_dmabuf_mr(_: *mut sys::ibv_pd, _: u64, _: usize, _: u64, _: c_int, _: c_int) -> *mut sys::ibv_mr {
    Errno::EOPNOTSUPP.set();
    ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(mr: *mut sys::ibv_mr) -> c_int {
    // SAFETY: made by `ibv_reg_mr`; freed once, on success.
    unsafe {
        let device = StandIn::of((*mr).context);
        let errno = device.dereg_mr.load(Ordering::SeqCst);
        if errno == 0 {
            device.regions.fetch_sub(1, Ordering::SeqCst);
            drop(Box::from_raw(mr));
        }
        errno
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut sys::ibv_context) -> *mut sys::ibv_comp_channel {
    let events = EventFd::from_flags(EfdFlags::EFD_SEMAPHORE | EfdFlags::EFD_NONBLOCK).expect("a descriptor");
    let mut raw: sys::ibv_comp_channel = zeroed();
    (raw.context, raw.fd) = (context, events.as_raw_fd());
    boxed(Channel { raw, events, cq: ptr::null_mut() }).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut sys::ibv_comp_channel) -> c_int {
    // SAFETY: made by `ibv_create_comp_channel`, freed once.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut sys::ibv_context,
    depth: c_int,
    _user: *mut c_void,
    channel: *mut sys::ibv_comp_channel,
    _vector: c_int,
) -> *mut sys::ibv_cq {
    let mut raw: sys::ibv_cq = zeroed();
    (raw.context, raw.channel, raw.cqe) = (context, channel, depth);
    let ring = [const { MaybeUninit::uninit() }; RING];
    let cq = boxed(Cq { raw, ring, head: 0, tail: 0, armed: false }).cast();
    // SAFETY: both are alive.
    unsafe {
        StandIn::of(context).queues_alive.fetch_add(1, Ordering::SeqCst);
        if let Some(channel) = NonNull::new(channel.cast::<Channel>()) {
            (*channel.as_ptr()).cq = cq;
        }
    }
    cq
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(cq: *mut sys::ibv_cq) -> c_int {
    // SAFETY: made by `ibv_create_cq`, freed once.
    unsafe {
        StandIn::of((*cq).context).queues_alive.fetch_sub(1, Ordering::SeqCst);
        drop(Box::from_raw(cq.cast::<Cq>()));
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut sys::ibv_comp_channel,
    cq: *mut *mut sys::ibv_cq,
    _user: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller's channel is alive and its pointer writable.
    unsafe {
        let channel = channel.cast::<Channel>();
        match (*channel).events.read() {
            Ok(_) => {
                *cq = (*channel).cq;
                0
            }
            Err(errno) => {
                errno.set();
                -1
            }
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(_: *mut sys::ibv_cq, _: c_uint) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(pd: *mut sys::ibv_pd, attr: *mut sys::ibv_qp_init_attr) -> *mut sys::ibv_qp {
    let mut raw: sys::ibv_qp = zeroed();
    // SAFETY: the caller's objects are alive.
    unsafe {
        (raw.context, raw.pd) = ((*pd).context, pd);
        (raw.send_cq, raw.recv_cq, raw.qp_num) = ((*attr).send_cq, (*attr).recv_cq, 77);
        StandIn::of(raw.context).pairs.fetch_add(1, Ordering::SeqCst);
    }
    boxed(Qp { raw, receives: Ring::new(), held: VecDeque::new(), error: false }).cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(qp: *mut sys::ibv_qp) -> c_int {
    // SAFETY: made by `ibv_create_qp`; freed once, on success.
    unsafe {
        let device = StandIn::of((*qp).context);
        let errno = device.destroy_qp.load(Ordering::SeqCst);
        if errno == 0 {
            device.pairs.fetch_sub(1, Ordering::SeqCst);
            drop(Box::from_raw(qp.cast::<Qp>()));
        }
        errno
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(qp: *mut sys::ibv_qp, attr: *mut sys::ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's queue pair is alive and its structure readable.
    unsafe {
        let state = sys::ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
        if mask & state != 0 && (*attr).qp_state == State::IBV_QPS_ERR {
            let device = StandIn::of((*qp).context);
            let _lock = device.lock();
            flush(device, qp.cast());
        }
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp(
    _: *mut sys::ibv_qp,
    _: *mut sys::ibv_qp_attr,
    _: c_int,
    _: *mut sys::ibv_qp_init_attr,
) -> c_int {
    0
}

const _: () = assert!(offset_of!(StandIn, context) == 0 && offset_of!(Cq, raw) == 0 && offset_of!(Qp, raw) == 0);
