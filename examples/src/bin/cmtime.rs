//! Times the setting up and taking down of many connections at once, like librdmacm's cmtime: `cmtime -b ADDRESS` on one side,
//! `cmtime -s ADDRESS -c 500` on the other.

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use rdmacm::{AcceptOptions, Connection, ConnectionOptions, Connector, EndpointOptions, Error, ListenerBuilder};
use rdmacm_examples::{fail, look_up};

/// Times the setting up and taking down of many connections at once.
#[derive(Parser)]
struct Arguments {
    /// Connect to this server
    #[arg(short = 's')]
    server: Option<String>,
    /// Serve on this address
    #[arg(short = 'b', default_value = "0.0.0.0")]
    bind: String,
    /// How many connections
    #[arg(short = 'c', default_value_t = 100)]
    connections: usize,
    #[arg(short = 'p', default_value_t = 7471)]
    port: u16,
    /// Threads that connect, or accept
    #[arg(short = 't', default_value_t = 32)]
    threads: usize,
}

/// As small as those of C's cmtime, which has no buffers at all.
fn options() -> ConnectionOptions {
    ConnectionOptions::new().endpoint(EndpointOptions::default().send_depth(1).recv_depth(1).message_size(64))
}

fn serve(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let address = look_up(&arguments.bind, arguments.port)?;
    let accept = AcceptOptions::new().options(options());
    let listener = ListenerBuilder::new().backlog(16 * 1024).accept_options(accept).bind(&address[..])?;
    let living: Mutex<Vec<Connection>> = Mutex::default();
    let keep = |connection| living.lock().expect("nobody panics with the list").push(connection);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| listener.incoming().flatten().for_each(keep));
        }
        // Those whose client left go.
        loop {
            thread::sleep(Duration::from_millis(1));
            let left: Vec<_> = {
                let mut living = living.lock().expect("nobody panics with the list");
                living.extract_if(.., |connection| connection.cause().is_some()).collect()
            };
            drop(left);
        }
    })
}

/// Runs `step` for each number below `count` on all threads, and says how long that took.
fn at_once(threads: usize, count: usize, step: impl Fn(usize) -> Result<(), Error> + Sync) -> Result<Duration, Error> {
    let (next, ready) = (AtomicUsize::new(0), Barrier::new(threads + 1));
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    ready.wait();
                    loop {
                        match next.fetch_add(1, Ordering::Relaxed) {
                            number if number < count => step(number)?,
                            _ => return Ok::<_, Error>(()),
                        }
                    }
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))?;
        Ok(start.elapsed())
    })
}

fn run(arguments: &Arguments, server: &str) -> Result<(), Box<dyn std::error::Error>> {
    let addresses = look_up(server, arguments.port)?;
    let connector = Connector::new().options(options()).deadline(Duration::from_secs(60));
    let Arguments { connections: count, threads, .. } = *arguments;
    // Opens the device, as C's does before it begins to count.
    connector.connect(&addresses[..])?.disconnect()?;
    let living: Mutex<Vec<Connection>> = Mutex::default();
    let set_up = at_once(threads, count, |_| {
        let connection = connector.connect(&addresses[..])?;
        living.lock().expect("nobody panics with the list").push(connection);
        Ok(())
    })?;
    let tear_down = at_once(threads, count, |_| {
        let connection = living.lock().expect("nobody panics with the list").pop();
        connection.map_or(Ok(()), Connection::disconnect)
    })?;
    println!("step              total ms   us / conn");
    for (name, took) in [("set up", set_up), ("tear down", tear_down)] {
        let micros = took.as_secs_f64() * 1e6;
        println!("{name:<13}: {:>11.2} {:>11.2}", micros / 1000.0, micros / count as f64);
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.server {
        Some(server) => run(&arguments, server),
        None => serve(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail("cmtime", &*error),
    }
}
