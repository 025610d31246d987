//! Every structure shared with C, compared with the installed headers: a C program prints sizes and offsets.

#![cfg(target_pointer_width = "64")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use rdma_sys::{rdma_addr, rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_route, rdma_ud_param};
use rdmacm::verbs::sys::LAYOUT;

macro_rules! layout {
    ($($type:ident { $($field:ident),* $(,)? })*) => {
        &[$((stringify!($type), "", size_of::<$type>()),
            $((stringify!($type), stringify!($field), offset_of!($type, $field)),)*)*]
    };
}

/// (structure, field or "", bytes) of the connection manager's part, as the bindings have it.
const CM_LAYOUT: &[(&str, &str, usize)] = layout! {
    rdma_cm_id {
        verbs, channel, context, qp, route, ps, port_num, event, send_cq_channel, send_cq, recv_cq_channel, recv_cq, srq, pd,
        qp_type,
    }
    rdma_cm_event { id, listen_id, event, status, param }
    rdma_conn_param {
        private_data, private_data_len, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count,
        srq, qp_num,
    }
    rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey }
    rdma_event_channel { fd }
    rdma_route { addr, path_rec, num_paths }
    rdma_addr {}
};

/// Names that the bindings give to C's anonymous members.
fn c_field(structure: &str, field: &str) -> Option<String> {
    Some(match (structure, field) {
        ("ibv_send_wr", "imm_data_invalidated_rkey_union") | ("ibv_wc", "imm_data_invalidated_rkey_union") => {
            "imm_data".to_owned()
        }
        ("ibv_send_wr", "bind_mw_tso_union") => "bind_mw".to_owned(),
        (_, field) => field.to_owned(),
    })
}

/// What the headers say, for the same list.
fn ask_the_headers(wanted: &[(&str, &str, usize)]) -> BTreeMap<(String, String), usize> {
    let mut program = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\nint main(void) {\n",
    );
    for (structure, field, _) in wanted {
        let what = match c_field(structure, field) {
            Some(_) if field.is_empty() => format!("sizeof(struct {structure})"),
            Some(c) => format!("offsetof(struct {structure}, {c})"),
            None => continue,
        };
        writeln!(program, "printf(\"{structure} {field} %zu\\n\", {what});").expect("a String takes everything");
    }
    program += "return 0; }\n";

    let folder = tempfile();
    let source = folder.join("layout.c");
    let binary = folder.join("layout");
    std::fs::write(&source, program).expect("the temporary folder can be written");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let output = Command::new(compiler)
        .arg("-o")
        .args([&binary, &source])
        .stdin(Stdio::null())
        .output()
        .expect("a C compiler is installed: the bindings need its headers too");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&binary).output().expect("it was just made");
    std::fs::remove_dir_all(&folder).expect("the folder is ours");
    String::from_utf8(output.stdout)
        .expect("names and numbers")
        .lines()
        .map(|line| {
            let (names, bytes) = line.rsplit_once(' ').expect("three words");
            let (structure, field) = names.split_once(' ').expect("three words");
            ((structure.to_owned(), field.to_owned()), bytes.parse().expect("a number"))
        })
        .collect()
}

fn tempfile() -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("rdmacm-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
    folder
}

#[test]
fn structures_are_those_of_the_installed_headers() {
    let ours = [LAYOUT, CM_LAYOUT].concat();
    let headers = ask_the_headers(&ours);
    assert_eq!(headers.len(), ours.len(), "each name is asked for once");
    let mut wrong = String::new();
    for (structure, field, bytes) in &ours {
        let c = headers[&((*structure).to_owned(), (*field).to_owned())];
        if c != *bytes {
            writeln!(wrong, "{structure}.{field}: {bytes} here, {c} in C").expect("a String takes everything");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    // The comparison itself: it finds what is wrong.
    assert_eq!(headers[&("rdma_cm_id".to_owned(), String::new())], 416);
}
