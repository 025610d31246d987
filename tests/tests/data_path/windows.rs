//! Memory windows: the peer reaches exactly what was granted, until it is taken or given back.

use rdmacm::verbs::{Access, Endpoint, Error, MemoryRegion, RemoteRegion};

use crate::bench::{Bench, options, watched};

fn region(bench: &Bench) -> MemoryRegion {
    let region = MemoryRegion::new(&bench.b, 4096, Access::LOCAL_WRITE | Access::MW_BIND).expect("a region");
    region.fill(0..4096, 0x5a).expect("in range");
    region
}

/// The peer writes eight bytes, which is refused; the region is as it was.
fn refused(mut a: Endpoint, bench: &Bench, target: RemoteRegion, offset: u64, region: &MemoryRegion) {
    let local = MemoryRegion::new(&bench.a, 8, Access::LOCAL_WRITE).expect("a region");
    let mut before = [0; 4096];
    region.read_at(0, &mut before).expect("in range");
    let e = a.write(&local, 0..8, &target, offset).expect_err("refused");
    assert_eq!(e.kind(), std::io::ErrorKind::PermissionDenied, "{e}");
    let mut after = [0; 4096];
    region.read_at(0, &mut after).expect("in range");
    assert!(before == after, "the region is unchanged");
}

#[test]
fn a_grant_reaches_its_range_until_it_is_revoked_dropped_or_given_back() {
    watched(|bench| {
        for end in 0..5 {
            let (mut a, mut b) = bench.pair(&options());
            let region = region(&bench);
            let local = MemoryRegion::new(&bench.a, 4096, Access::LOCAL_WRITE).expect("a region");
            local.fill(0..4096, 0x77).expect("in range");
            let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
            let window = match b.sender().grant(&region, 1000..2000, rights) {
                Err(Error::Unsupported(why)) => return println!("{why}"),
                window => window.expect("granted"),
            };
            let target = window.remote();
            assert_eq!((target.addr(), target.len()), (region.remote().addr() + 1000, 1000));
            a.write(&local, 0..1000, &target, 0).expect("granted");
            a.read(&local, 0..1000, &target, 0).expect("granted");
            let mut seen = [0; 4096];
            region.read_at(0, &mut seen).expect("in range");
            assert!(seen[1000..2000].iter().all(|&byte| byte == 0x77));
            assert!(seen[..1000].iter().chain(&seen[2000..]).all(|&byte| byte == 0x5a));
            match end {
                0 => {
                    b.sender().revoke(window).expect("revoked");
                    refused(a, &bench, target, 0, &region);
                }
                1 => {
                    drop(window);
                    refused(a, &bench, target, 0, &region);
                }
                2 => {
                    a.sender().send_invalidate(b"it is yours again", &target).expect("sent");
                    assert_eq!(b.recv_buf().expect("received")[..], *b"it is yours again");
                    refused(a, &bench, target, 0, &region);
                }
                // One byte beyond the grant, though inside the region.
                // Soft-RoCE looks at the region's bounds only.
                3 if bench.b.context().name().starts_with("rxe") => {
                    let more = RemoteRegion::new(target.addr(), 4096, target.rkey());
                    refused(a, &bench, more, 4096 - 1000 - 7, &region);
                }
                3 => {
                    let more = RemoteRegion::new(target.addr(), target.len() + 8, target.rkey());
                    refused(a, &bench, more, 993, &region);
                }
                // Another connection.
                _ => {
                    let (other, _peer) = bench.pair(&options());
                    refused(other, &bench, target, 0, &region);
                    drop((window, a));
                }
            }
        }
    });
}

#[test]
fn grants_that_cannot_be_are_refused() {
    watched(|bench| {
        let (_a, mut b) = bench.pair(&options());
        let region = region(&bench);
        let misuse = |r: Result<_, Error>| assert!(matches!(r, Err(Error::Misuse(_) | Error::Unsupported(_))), "{r:?}");
        misuse(b.sender().grant(&region, 0..4097, Access::REMOTE_READ));
        misuse(b.sender().grant(&region, 5..5, Access::REMOTE_READ));
        misuse(b.sender().grant(&region, 0..8, Access::empty()));
        misuse(b.sender().grant(&region, 0..8, Access::LOCAL_WRITE));
        let plain = MemoryRegion::new(&bench.b, 8, Access::LOCAL_WRITE).expect("a region");
        misuse(b.sender().grant(&plain, 0..8, Access::REMOTE_READ));
        let unwritable = MemoryRegion::new(&bench.b, 8, Access::MW_BIND).expect("a region");
        misuse(b.sender().grant(&unwritable, 0..8, Access::REMOTE_WRITE));
        let foreign = MemoryRegion::new(&bench.a, 8, Access::LOCAL_WRITE | Access::MW_BIND).expect("a region");
        misuse(b.sender().grant(&foreign, 0..8, Access::REMOTE_READ));
        b.send(b"still works").expect("sent");
    });
}
