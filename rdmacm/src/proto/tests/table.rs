//! The reviewed table of all transitions, `transitions.txt`.

use std::fmt::Write as _;
use std::path::Path;

use super::{CALLS, EIO, STATES, STATUSES, events, inputs, name};
use crate::proto::connection;
use crate::proto::listener::{self, Listener};
use crate::proto::{Failure, Input, Notice, Output};

/// One state's part of the table: what each input leads to, and on one line what is ignored.
fn describe<S: Copy + PartialEq + std::fmt::Debug>(
    table: &mut String,
    title: &str,
    state: S,
    on: impl Fn(Input) -> (S, Vec<Output>),
) {
    // The next state and the outputs; `None` when nothing happens.
    let outcome = |input| {
        let (next, outputs) = on(input);
        let outputs: Vec<_> = outputs.iter().map(|output| describe_output(*output, input)).collect();
        (next != state || !outputs.is_empty()).then(|| {
            let outputs = if outputs.is_empty() { "-".to_owned() } else { outputs.join("; ") };
            format!("{:18} {outputs}", format!("{next:?}"))
        })
    };
    // What most failed calls lead to, so that one line can stand for them.
    let failure = |call| outcome(Input::Failed(call, EIO));
    let agree = |wanted: &Option<String>| CALLS.iter().filter(|&&call| failure(call) == *wanted).count();
    let usual = CALLS.map(failure).into_iter().max_by_key(agree).expect("there are calls");

    writeln!(table, "\n{title} {state:?}").expect("a String takes everything");
    let mut described = Vec::new();
    for input in inputs() {
        let outcome = outcome(input);
        let label = match input {
            Input::Event(event, _) => format!("event {event:?}"),
            Input::Failed(..) if outcome == usual => "call failed".to_owned(),
            Input::Failed(call, _) => format!("{call:?} failed"),
            wish => format!("{wish:?}"),
        };
        if !described.contains(&(label.clone(), outcome.clone())) {
            described.push((label, outcome));
        }
    }
    for (label, outcome) in &described {
        if let Some(outcome) = outcome {
            writeln!(table, "  {label:22} -> {outcome}").expect("a String takes everything");
        }
    }
    let ignored = |events: bool| {
        let labels = described.iter().filter(|(_, outcome)| outcome.is_none()).map(|(label, _)| label);
        let labels = labels.filter(|label| label.starts_with("event ") == events);
        labels.map(|label| label.trim_start_matches("event ")).collect::<Vec<_>>().join(", ")
    };
    writeln!(table, "  ignored: {}", ignored(false)).expect("a String takes everything");
    writeln!(table, "  ignored events: {}", ignored(true)).expect("a String takes everything");
}

/// An output in few words; what came with the input is called `it`.
fn describe_output(output: Output, input: Input) -> String {
    match (output, input) {
        (Output::Call(call), _) => format!("{call:?}()"),
        (Output::Arm(step), _) => format!("deadline for {step:?}"),
        (Output::Disarm, _) => "no deadline".to_owned(),
        (Output::Tell(Notice::Failed(Failure::Event(told, status))), Input::Event(event, given))
            if told == event && status == given =>
        {
            "tell Failed(it)".to_owned()
        }
        (Output::Tell(Notice::Failed(Failure::Call(told, errno))), Input::Failed(call, given))
            if told == call && errno == given =>
        {
            "tell Failed(it)".to_owned()
        }
        (Output::Tell(notice), _) => format!("tell {notice:?}"),
    }
}

fn table() -> String {
    let mut table = "The transitions of proto/, written by the test `the_table_is_the_reviewed_one`.\n\
         Each line: input -> next state, then what the driver must do, in order. `Connect()` is a call of librdmacm,\n\
         `it` the event or failed call that came in. A line `call failed` stands for every call that has no line of its own.\n"
        .to_owned();
    for state in STATES {
        describe(&mut table, "connection", state, |input| connection::step(state, input));
    }
    for (state, machine) in listener_states() {
        describe(&mut table, "listener", state, |input| {
            let mut machine = machine.clone();
            let outputs = machine.on(input);
            (machine.state(), outputs)
        });
    }
    table
}

fn listener_states() -> [(listener::State, Listener); 3] {
    let idle = Listener::new();
    let mut listening = Listener::new();
    listening.on(Input::Listen);
    let mut released = Listener::new();
    released.on(Input::Release);
    [idle, listening, released].map(|machine| (machine.state(), machine))
}

#[test]
fn the_table_is_the_reviewed_one() {
    let table = table();
    if std::env::var_os("RDMACM_UPDATE_SNAPSHOTS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/proto/transitions.txt");
        std::fs::write(&path, &table).expect("the source folder can be written");
    } else {
        let reviewed = include_str!("../transitions.txt");
        let line = table.lines().zip(reviewed.lines()).find(|(now, then)| now != then);
        assert!(
            table == reviewed,
            "a transition changed, first at {line:?}; if that is meant, run the test with RDMACM_UPDATE_SNAPSHOTS=1 \
             and review the difference of transitions.txt"
        );
    }
}

#[test]
fn the_status_of_an_event_never_decides_where_it_leads() {
    for state in STATES {
        for event in events() {
            let next = |status| connection::step(state, Input::Event(event, status));
            let shape = |status| {
                let (next, outputs) = next(status);
                (
                    name(next),
                    outputs
                        .iter()
                        .map(|output| describe_output(*output, Input::Event(event, status)))
                        .collect::<Vec<_>>(),
                )
            };
            for status in STATUSES {
                assert_eq!(shape(status).0, shape(0).0, "{state:?}, {event:?}, {status}");
                assert_eq!(shape(status).1, shape(0).1, "{state:?}, {event:?}, {status}");
            }
        }
    }
}
