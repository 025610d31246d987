//! The structures shared with C, compared with the installed headers by a C program.

use std::fmt::Write as _;
use std::process::Command;

#[test]
fn layouts_are_those_of_the_installed_headers() {
    // Names that rdma-sys gave to what is anonymous in C.
    let c_field = |field: &str| match field {
        "imm_data_invalidated_rkey_union" => "imm_data".to_string(),
        "bind_mw_tso_union" => "bind_mw".to_string(),
        other => other.to_string(),
    };
    let mut program =
        String::from("#include <infiniband/verbs.h>\n#include <stdio.h>\n#include <stddef.h>\nint main(void) {\n");
    for (structure, field, _) in verbs::sys::LAYOUT {
        match *field {
            "" => writeln!(program, "printf(\"%zu\\n\", sizeof(struct {structure}));"),
            field => writeln!(program, "printf(\"%zu\\n\", offsetof(struct {structure}, {}));", c_field(field)),
        }
        .expect("writing to a string");
    }
    program.push_str("return 0; }\n");

    let folder = std::env::temp_dir().join(format!("verbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the C program");
    let (source, binary) = (folder.join("layout.c"), folder.join("layout"));
    std::fs::write(&source, program).expect("writing the C program");
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&binary).status();
    let Ok(compiled) = compiled else {
        eprintln!("SKIP: no C compiler");
        return;
    };
    assert!(compiled.success(), "the C program compiles");
    let output = Command::new(&binary).output().expect("running the C program");
    std::fs::remove_dir_all(&folder).expect("removing the folder");

    let text = String::from_utf8(output.stdout).expect("numbers");
    let figures: Vec<usize> = text.lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(figures.len(), verbs::sys::LAYOUT.len());
    for ((structure, field, ours), theirs) in verbs::sys::LAYOUT.iter().zip(figures) {
        assert_eq!(*ours, theirs, "{structure}.{field}");
    }
}
