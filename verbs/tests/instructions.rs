//! How many instructions an operation costs above a bare loop over the C interface, counted with callgrind on a device
//! that does nothing. The loops are in `benches/instructions.rs`; this builds it optimised, runs it, and compares.

use std::path::PathBuf;
use std::process::Command;

const ROUNDS: u64 = 10_000;

/// (operation, the bare loop that does the same, instructions that it may cost above that).
///
/// The bare loops reuse one request for all rounds and check nothing. Figures change a little with the compiler: the bounds
/// are some 5 % above what was measured.
const BOUNDS: [(&str, &str, u64); 9] = [
    ("send", "bare_unsignalled", 80),
    // With the copy into the slot.
    ("send_copied", "bare_unsignalled", 115),
    // With taking the buffer from its pool and putting it back, and holding it meanwhile.
    ("send_buf", "bare_unsignalled", 250),
    ("recv", "bare_recv", 110),
    ("recv_buf", "bare_recv", 130),
    ("write", "bare_write", 120),
    ("read", "bare_write", 115),
    // With holding the region until it is done.
    ("posted_write", "bare_write", 290),
    ("posted_write_shared", "bare_unsignalled", 120),
];

#[test]
fn operations_cost_little_above_a_bare_loop() {
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("SKIP: no valgrind");
        return;
    }
    let program = build();
    let mut over = Vec::new();
    for (name, bare, bound) in BOUNDS {
        let cost = count(&program, name).saturating_sub(count(&program, bare)) as f64 / ROUNDS as f64;
        println!("{name}: {cost:.1} instructions above {bare}, at most {bound}");
        if cost > bound as f64 {
            over.push(name);
        }
    }
    assert!(over.is_empty(), "these cost more than they may: {over:?}");
}

/// Builds the loops as benchmarks are built, and finds the program.
fn build() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["bench", "-p", env!("CARGO_PKG_NAME"), "--bench", "instructions", "--no-run", "--message-format=json"])
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("JSON is UTF-8");
    let path = text.lines().rev().find_map(|line| {
        let (_, rest) = line.split_once("\"executable\":\"")?;
        rest.split_once('"').map(|(path, _)| path)
    });
    PathBuf::from(path.expect("cargo names the program"))
}

/// Instructions of all rounds of a loop, with what they call.
fn count(program: &PathBuf, name: &str) -> u64 {
    let file = std::env::temp_dir().join(format!("instructions-{}-{name}", std::process::id()));
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(format!("--toggle-collect=counted_{name}"))
        .arg(program)
        .args([name, &ROUNDS.to_string()])
        .output()
        .expect("valgrind runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&file).expect("callgrind writes its result");
    std::fs::remove_file(&file).expect("it can be removed");
    let sum = text.lines().find_map(|line| line.strip_prefix("summary:").or(line.strip_prefix("totals:")));
    sum.and_then(|sum| sum.trim().parse().ok()).expect("a sum")
}
