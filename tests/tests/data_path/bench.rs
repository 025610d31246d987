//! Two domains, and endpoints between them that are connected by hand.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rdmacm::verbs::{
    self, Access, Context, Endpoint, EndpointOptions, GidType, Path, ProtectionDomain, QueuePairEnd, QueuePairState,
};

/// The domains of the two ends: on two devices where there are two, so that packets cross a wire.
pub(crate) struct Bench {
    pub(crate) a: ProtectionDomain,
    pub(crate) b: ProtectionDomain,
    pub(crate) path: Path,
}

/// The bench, or `None` after saying that the test is skipped.
fn bench() -> Option<Bench> {
    let devices = verbs::devices().expect("the list of devices");
    let (Some(first), Some(second)) = (devices.first(), devices.get(1).or(devices.first())) else {
        assert!(std::env::var_os("RDMACM_TEST_MACHINE").is_none(), "the test machine has RDMA devices");
        println!("SKIP: no RDMA device");
        return None;
    };
    let domain = |context: Context| ProtectionDomain::new(&context).expect("a domain");
    let a = domain(first.open().expect("the first device"));
    let b = domain(second.open().expect("the second device"));
    let mtu = a.context().port(1).expect("port 1").active_mtu;
    let mut path = Path::new(1, 0, mtu);
    // 0.27 s, seven times: a busy machine is not taken for a peer that is gone.
    path.ack_timeout = 16;
    Some(Bench { a, b, path })
}

pub(crate) fn gid(pd: &ProtectionDomain) -> verbs::GidEntry {
    let table = pd.context().gid_table().expect("the GID table");
    let v4 = |e: &&verbs::GidEntry| e.kind == GidType::RoceV2 && e.ipv4().is_some();
    *table.iter().find(v4).or(table.first()).expect("a GID")
}

fn end(endpoint: &Endpoint, pd: &ProtectionDomain, psn: u32) -> QueuePairEnd {
    let lid = pd.context().port(1).expect("port 1").lid;
    QueuePairEnd { gid: gid(pd).gid, qp_num: endpoint.control().queue_pair().qp_num(), psn, lid }
}

impl Bench {
    pub(crate) fn pair(&self, options: &EndpointOptions) -> (Endpoint, Endpoint) {
        self.pair_of(options, options)
    }

    pub(crate) fn pair_of(&self, options_a: &EndpointOptions, options_b: &EndpointOptions) -> (Endpoint, Endpoint) {
        let make = |pd, options: &EndpointOptions| {
            let builder = verbs::EndpointBuilder::new(pd, options).expect("resources");
            builder.create(1, Access::REMOTE_ALL).expect("a queue pair")
        };
        let (a, b) = (make(&self.a, options_a), make(&self.b, options_b));
        let (end_a, end_b) = (end(&a, &self.a, 100), end(&b, &self.b, 200));
        for (endpoint, pd, own, peer) in [(&a, &self.a, &end_a, &end_b), (&b, &self.b, &end_b, &end_a)] {
            let mut path = self.path.clone();
            path.gid_index = u8::try_from(gid(pd).index).expect("a small table");
            let control = endpoint.control();
            control.queue_pair().to_ready_to_receive(&path, peer).expect("ready to receive");
            control.queue_pair().to_ready_to_send(&path, own.psn).expect("ready to send");
            assert_eq!(control.queue_pair().state().expect("a state"), QueuePairState::ReadyToSend);
        }
        (a, b)
    }
}

/// Runs a test that must end within two minutes.
pub(crate) fn watched(test: impl FnOnce(Bench) + Send + 'static) {
    let Some(bench) = bench() else { return };
    let (done, wait) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        test(bench);
        drop(done);
    });
    if wait.recv_timeout(Duration::from_secs(120)) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("the test hangs");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

pub(crate) fn options() -> EndpointOptions {
    EndpointOptions::default()
}
