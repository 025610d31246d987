//! Regions of all kinds of memory, used by the device.

use std::fs::{self, OpenOptions};
use std::io::Write;

use rdmacm::verbs::{Access, Error, MemoryRegion};

use crate::bench::{options, watched};

const LEN: usize = 10_000;

fn pattern(seed: usize) -> Vec<u8> {
    (0..LEN).map(|i| (i ^ (i >> 8) ^ seed) as u8).collect()
}

#[test]
fn a_vector_of_the_program_is_written_by_the_peer_and_comes_back() {
    watched(|bench| {
        let (mut a, _b) = bench.pair(&options());
        let local = MemoryRegion::builder(&bench.a, Access::LOCAL_WRITE).own(pattern(1)).map_err(|(e, _)| e);
        let target = MemoryRegion::builder(&bench.b, Access::REMOTE_ALL).own(vec![0; LEN]).map_err(|(e, _)| e);
        let (local, target) = (local.expect("a region"), target.expect("a region"));
        a.write(&local, 0..LEN, &target.remote(), 0).expect("written");
        assert!(target.into_bytes().expect("the last handle") == pattern(1));
    });
}

#[test]
fn constant_bytes_are_read_by_the_peer_and_refuse_to_be_written() {
    watched(|bench| {
        static TEXT: [u8; 5000] = [0x42; 5000];
        let (mut a, _b) = bench.pair(&options());
        let remote = MemoryRegion::builder(&bench.b, Access::REMOTE_READ).constant(&TEXT).expect("a region");
        let local = MemoryRegion::new(&bench.a, 5000, Access::LOCAL_WRITE).expect("a region");
        a.read(&local, 0..5000, &remote.remote(), 0).expect("read");
        assert_eq!(local.read_value::<[u8; 16]>(4900).expect("in range"), [0x42; 16]);
        let here = MemoryRegion::builder(&bench.a, Access::empty()).constant(&TEXT).expect("a region");
        let elsewhere = MemoryRegion::new(&bench.b, 5000, Access::REMOTE_ALL).expect("a region");
        a.write(&here, 0..5000, &elsewhere.remote(), 0).expect("written");
        assert_eq!(elsewhere.load_u64(0).expect("aligned"), u64::from_ne_bytes([0x42; 8]));
        let e = a.write(&local, 0..8, &remote.remote(), 0).expect_err("read-only");
        assert_eq!(e.kind(), std::io::ErrorKind::PermissionDenied, "{e}");
    });
}

#[test]
fn a_mapped_file_gets_what_the_peer_writes() {
    watched(|bench| {
        let (mut a, _b) = bench.pair(&options());
        let path = format!("/dev/shm/rdmacm-test-{}", std::process::id());
        let Ok(mut file) = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path) else {
            // The test machine mounts no tmpfs there on its own.
            fs::create_dir_all("/dev/shm").expect("a folder");
            println!("no tmpfs at /dev/shm");
            return;
        };
        file.write_all(&vec![0; 3 * 4096]).expect("room");
        let local = MemoryRegion::builder(&bench.a, Access::LOCAL_WRITE).own(pattern(2)).map_err(|(e, _)| e);
        let mapped = MemoryRegion::builder(&bench.b, Access::REMOTE_ALL).file(&file, 4096, 8192).expect("a region");
        a.write(&local.expect("a region"), 0..8192, &mapped.remote(), 0).expect("written");
        drop(mapped);
        let bytes = fs::read(&path).expect("the file");
        fs::remove_file(&path).expect("the file");
        assert!(bytes[..4096].iter().all(|&byte| byte == 0) && bytes[4096..] == pattern(2)[..8192]);
    });
}

#[test]
fn a_region_may_have_another_address_for_peers() {
    watched(|bench| {
        let (mut a, _b) = bench.pair(&options());
        let base = 0x7000_0000_0000;
        let remote = MemoryRegion::builder(&bench.b, Access::REMOTE_ALL).device_address(base).zeroed(LEN);
        let local = MemoryRegion::builder(&bench.a, Access::LOCAL_WRITE).device_address(base << 1).zeroed(LEN);
        let (local, remote) = (local.expect("a region"), remote.expect("a region"));
        assert_eq!(remote.remote().addr(), base);
        local.write_at(0, &pattern(3)).expect("in range");
        // Short enough to be inline, where that is possible, and long.
        for len in [8, LEN] {
            a.write(&local, 0..len, &remote.remote(), 0).expect("written");
            let mut seen = vec![0; len];
            remote.read_at(0, &mut seen).expect("in range");
            assert!(seen == pattern(3)[..len], "{len} bytes");
        }
        local.fill(0..LEN, 0).expect("in range");
        a.read(&local, 0..LEN, &remote.remote(), 0).expect("read");
        assert!(local.into_bytes().expect("the last handle") == pattern(3));
    });
}

#[test]
fn huge_pages_are_used_or_their_want_explained() {
    watched(|bench| {
        let none = MemoryRegion::builder(&bench.a, Access::LOCAL_WRITE).huge_pages().zeroed(1 << 40);
        let e = none.expect_err("nobody has that many");
        assert!(e.to_string().contains("vm.nr_hugepages"), "{e}");
        if !rdmacm_tests::in_test_machine() || fs::write("/proc/sys/vm/nr_hugepages", "4").is_err() {
            return;
        }
        match MemoryRegion::builder(&bench.a, Access::LOCAL_WRITE).huge_pages().zeroed(3 << 20) {
            Ok(region) => {
                region.store_u64((3 << 20) - 8, 7).expect("aligned");
                let remote = MemoryRegion::new(&bench.b, 64, Access::REMOTE_ALL).expect("a region");
                let (mut a, _b) = bench.pair(&options());
                a.write(&region, (3 << 20) - 8..3 << 20, &remote.remote(), 0).expect("written");
                assert_eq!(remote.load_u64(0).expect("aligned"), 7);
            }
            Err(e) => println!("the kernel found no huge pages: {e}"),
        }
    });
}

#[test]
fn what_the_device_cannot_do_is_said_so() {
    watched(|bench| {
        let paged = MemoryRegion::new(&bench.a, 4096, Access::LOCAL_WRITE | Access::ON_DEMAND);
        let null = fs::File::open("/dev/null").expect("it is everywhere");
        let dmabuf = MemoryRegion::builder(&bench.a, Access::LOCAL_WRITE).dmabuf(&null, 0, 4096);
        // Hardware may have on-demand paging; nothing is behind this descriptor anywhere.
        println!("{:?}", paged.as_ref().map(|_| ()));
        assert!(paged.is_ok() || matches!(paged, Err(Error::Unsupported(_))), "{paged:?}");
        assert!(dmabuf.is_err(), "{dmabuf:?}");
        MemoryRegion::new(&bench.a, 4096, Access::LOCAL_WRITE | Access::RELAXED_ORDERING).expect("ignored or obeyed");
    });
}

#[test]
fn memory_is_out_of_reach_before_it_is_used_again() {
    watched(|bench| {
        for round in 0..5_u8 {
            let (mut a, b) = bench.pair(&options());
            let region = MemoryRegion::new(&bench.b, 1 << 20, Access::REMOTE_ALL).expect("a region");
            let target = region.remote();
            let local = MemoryRegion::new(&bench.a, 1 << 20, Access::LOCAL_WRITE).expect("a region");
            local.fill(0..1 << 20, 0xee).expect("in range");
            let writer = std::thread::spawn(move || {
                loop {
                    if let Err(e) = a.write(&local, 0..1 << 20, &target, 0) {
                        return (e, a);
                    }
                }
            });
            std::thread::sleep(std::time::Duration::from_millis(20 * u64::from(round)));
            drop(region);
            // Most likely the same addresses, no longer registered.
            let pages: Vec<_> = (0..4).map(|_| vec![round; 1 << 20]).collect();
            let (e, a) = writer.join().expect("no panic");
            assert_eq!(e.kind(), std::io::ErrorKind::PermissionDenied, "{e}");
            assert!(pages.iter().flatten().all(|&byte| byte == round), "written after it was given back");
            drop((a, b));
        }
    });
}

#[test]
fn a_receive_that_timed_out_receives_later_and_not_into_freed_memory() {
    watched(|bench| {
        let (mut a, mut b) = bench.pair(&options());
        let mut buffer = vec![0x5a; 4096];
        let wait = std::time::Duration::from_millis(10);
        assert!(matches!(b.recv_timeout(&mut buffer, wait), Err(Error::TimedOut(_))));
        drop(buffer);
        let pattern: Vec<_> = (0..64).map(|_| vec![0x5a_u8; 4096]).collect();
        for i in 0..32_u8 {
            a.send(&vec![i; 4096]).expect("sent");
        }
        a.flush().expect("delivered");
        assert!(pattern.iter().flatten().all(|&byte| byte == 0x5a));
        assert!((0..32_u8).all(|i| b.recv_buf().expect("received")[4095] == i));
        // Dropped with receives posted while the peer sends.
        let control = a.control();
        let sender = std::thread::spawn(move || while a.send(&[0xee; 4096]).is_ok() {});
        std::thread::sleep(wait);
        drop(b);
        let pattern: Vec<_> = (0..64).map(|_| vec![0x5a_u8; 4096]).collect();
        std::thread::sleep(10 * wait);
        assert!(pattern.iter().flatten().all(|&byte| byte == 0x5a));
        control.close(rdmacm::verbs::CloseReason::Local);
        sender.join().expect("no panic");
    });
}
