//! rdma-core's programs over our streams.

use std::fs;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rdmacm_tests::process::{Finished, is_listening, our_program};
use rdmacm_tests::{Family, Kind, Program, lab, rounds, wait_for};

/// Server and client, of which at least one is ours.
const PAIRS: [(Kind, Kind); 3] = [(Kind::C, Kind::Ours), (Kind::Ours, Kind::C), (Kind::Ours, Kind::Ours)];
const PATIENCE: Duration = Duration::from_secs(200);

fn tool(kind: Kind, name: &str) -> Command {
    match kind {
        Kind::C => Command::new(name),
        Kind::Ours => Command::new(our_program(name)),
    }
}

/// Starts a server and waits until it listens.
#[track_caller]
fn serve(kind: Kind, name: &str, address: SocketAddr, arguments: &[&str]) -> Program {
    let mut command = tool(kind, name);
    command.args(["-p", &address.port().to_string()]).args(arguments);
    let mut server = Program::start(format!("{kind:?} {name} server"), command);
    wait_for("the server to listen", Duration::from_secs(10), || {
        assert!(!server.has_ended(), "{}", server.finish(PATIENCE));
        is_listening(address).then_some(())
    });
    server
}

#[track_caller]
fn rstream(pair: (Kind, Kind), address: SocketAddr, arguments: &[&str]) -> (Finished, Finished) {
    let host = address.ip().to_string();
    let mut server = serve(pair.0, "rstream", address, &[&["-b", &host], arguments].concat());
    let mut command = tool(pair.1, "rstream");
    command.args(["-s", &host, "-p", &address.port().to_string()]).args(arguments);
    let client = Program::start(format!("{:?} rstream client", pair.1), command).finish(PATIENCE).expect_success();
    (server.finish(PATIENCE).expect_success(), client)
}

#[test]
fn rstream_verifies_its_data_in_all_pairs_and_modes() {
    let Some(lab) = lab(900) else { return };
    for (size, count) in [(1, 300), (64, 300), (1000, 300), (4096, 100), (65_536, 30), (100_001, 20), (1 << 20, 4)] {
        for mode in ["b", "n"] {
            // Two programs that spin take their time here.
            if mode == "n" && rounds(0, 1) == 0 && ![64, 65_536].contains(&size) {
                continue;
            }
            for pair in PAIRS {
                let (size, count) = (size.to_string(), (count * rounds(1, 20)).to_string());
                let arguments = ["-T", mode, "-T", "v", "-S", &size, "-C", &count, "-I", "2"];
                let (server, client) = rstream(pair, lab.server(Family::V4), &arguments);
                for output in [server, client] {
                    assert!(output.stdout.contains("custom "), "{pair:?} {arguments:?}: {output}");
                    assert!(!output.stdout.contains("verification failed"), "{pair:?} {arguments:?}: {output}");
                }
            }
        }
    }
}

#[test]
fn rstream_works_with_small_buffers_and_over_ipv6() {
    let Some(lab) = lab(300) else { return };
    for pair in PAIRS {
        for family in [Family::V4, Family::V6] {
            let arguments = ["-T", "b", "-T", "v", "-S", "50000", "-C", "20", "-B", "5000"];
            rstream(pair, lab.server(family), &arguments);
        }
    }
}

#[test]
fn rstream_prints_what_the_c_program_prints() {
    let Some(lab) = lab(120) else { return };
    let arguments = ["-T", "b", "-S", "1500", "-C", "1000", "-I", "3"];
    let words = |output: &Finished| -> Vec<Vec<String>> {
        // Times differ; everything else is the same, at the same place.
        let line = |line: &str| line.get(..42).unwrap_or(line).split_whitespace().map(str::to_owned).collect();
        output.stdout.lines().map(line).collect()
    };
    let (c_server, c_client) = rstream((Kind::C, Kind::C), lab.server(Family::V4), &arguments);
    let (server, client) = rstream((Kind::Ours, Kind::Ours), lab.server(Family::V4), &arguments);
    assert_eq!(words(&server), words(&c_server));
    assert_eq!(words(&client), words(&c_client));
    assert_eq!(client.stdout.lines().next(), c_client.stdout.lines().next());
    assert_eq!(client.stdout.lines().nth(1).map(str::len), c_client.stdout.lines().nth(1).map(str::len));
}

/// A file of numbers that do not repeat soon.
fn make_file(path: &Path, bytes: usize) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut left = bytes;
    while left > 0 {
        let chunk: Vec<u8> = (0..8192)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            })
            .collect();
        let size = chunk.len().min(left);
        file.write_all(&chunk[..size])?;
        left -= size;
    }
    Ok(())
}

fn same(a: &Path, b: &Path) -> io::Result<bool> {
    let (mut a, mut b) = (fs::File::open(a)?, fs::File::open(b)?);
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let read = a.read(&mut left)?;
        if read == 0 {
            return Ok(true);
        }
        b.read_exact(&mut right[..read])?;
        if left[..read] != right[..read] {
            return Ok(false);
        }
    }
}

#[test]
fn rcopy_copies_files_in_all_pairs() -> io::Result<()> {
    let Some(lab) = lab(900) else { return Ok(()) };
    let folder = std::env::temp_dir().join(format!("rcopy-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let megabytes = rounds(6, 256);
    for (number, bytes) in [1, 4096, megabytes << 20].into_iter().enumerate() {
        let source = folder.join(format!("source-{number}"));
        make_file(&source, bytes)?;
        for pair in PAIRS {
            let address = lab.server(Family::V4);
            let mut server = serve(pair.0, "rcopy", address, &[]);
            let target = folder.join(format!("target-{number}-{:?}-{:?}", pair.0, pair.1));
            let mut command = tool(pair.1, "rcopy");
            command.arg(&source).arg(format!("{}:{}", address.ip(), target.display()));
            command.args(["-p", &address.port().to_string()]);
            let client =
                Program::start(format!("{:?} rcopy client", pair.1), command).finish(PATIENCE).expect_success();
            assert!(client.stdout.contains(&format!("{bytes} bytes in ")), "{pair:?}: {client}");
            assert!(same(&source, &target)?, "{pair:?}, {bytes} bytes: the files differ");
            fs::remove_file(&target)?;
            server.kill();
        }
    }
    fs::remove_dir_all(folder)
}
