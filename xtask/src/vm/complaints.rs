//! Finding the kernel's complaints about itself in its log.

/// Texts that begin a report of a kernel bug. `WARNING: CPU` is the head of a WARN_ON; a bare `WARNING:` is also in messages
/// that are only advice.
const MARKS: &[&str] = &[
    "BUG:",
    "kernel BUG at",
    "Oops:",
    "WARNING: CPU:",
    "WARNING: possible",
    "WARNING: suspicious",
    "KASAN:",
    "KFENCE:",
    "UBSAN:",
    "general protection fault",
    "Kernel panic",
    "refcount_t:",
    "list_add corruption",
    "list_del corruption",
    "blocked for more than",
    "detected stall",
    "self-detected stall",
    "soft lockup",
    "hard LOCKUP",
];

/// Lines that are shown of each complaint: its head, the registers, the call trace.
const LINES_SHOWN: usize = 30;

/// The lines of a kernel log that report a bug, a warning or a stall, each with the lines after it; empty for a healthy kernel.
pub(crate) fn find(log: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut shown_until = 0;
    for (number, line) in log.lines().enumerate() {
        if MARKS.iter().any(|mark| line.contains(mark)) && number >= shown_until {
            shown_until = number + LINES_SHOWN;
        }
        if number < shown_until {
            found.push(line);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_healthy_log_has_no_complaints() {
        let log = "[    0.1] Linux version 6.1.0\n[    0.2] Spectre V2 : WARNING: Unprivileged eBPF is enabled\n\
                   [    1.2] rdma_rxe: loaded\n[    2.0] infiniband rxe0: set active\n";
        assert_eq!(find(log), Vec::<&str>::new());
    }

    #[test]
    fn warnings_oopses_and_stalls_are_found() {
        for line in [
            "[ 1.0] WARNING: CPU: 1 PID: 77 at drivers/infiniband/core/cma.c:1",
            "[ 1.0] BUG: kernel NULL pointer dereference, address: 0000000000000008",
            "[ 1.0] INFO: task rdma:99 blocked for more than 120 seconds.",
            "[ 1.0] rcu: INFO: rcu_preempt self-detected stall on CPU",
            "[ 1.0] watchdog: BUG: soft lockup - CPU#0 stuck for 26s!",
            "[ 1.0] BUG: KASAN: use-after-free in rxe_completer",
            "[ 1.0] Kernel panic - not syncing: sysrq triggered crash",
        ] {
            assert_eq!(find(line), [line]);
        }
    }

    #[test]
    fn a_complaint_is_shown_with_what_follows() {
        let log = format!("before\nBUG: x\n{}", "trace\n".repeat(100));
        let found = find(&log);
        assert_eq!(found.len(), LINES_SHOWN);
        assert_eq!(found[0], "BUG: x");
    }
}
