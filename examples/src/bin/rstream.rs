//! Measures byte streams: options and output of rdma-core's rstream, with which it can be paired.
//!
//! One end is the server; the other is given the server's address:
//!
//! ```console
//! $ rstream
//! $ rstream -s 10.1.2.3
//! ```

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rdmacm::{RdmaListener, RdmaStream, StreamOptions};
use rdmacm_examples::{fail, look_up};

/// Where a transfer ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Try without end.
    NonBlocking,
    Blocking,
}

#[derive(Clone)]
struct Options {
    server: Option<String>,
    bind: Option<String>,
    buffer: usize,
    inline: u32,
    iterations: usize,
    transfers: usize,
    size: usize,
    /// One run with these numbers, instead of the series.
    custom: bool,
    all_sizes: bool,
    port: u16,
    family: Addresses,
    mode: Mode,
    sockets: bool,
    verify: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            server: None,
            bind: None,
            buffer: 0,
            inline: 64,
            iterations: 1,
            transfers: 1000,
            size: 1000,
            custom: false,
            all_sizes: false,
            port: 7471,
            family: Addresses::Any,
            mode: Mode::NonBlocking,
            sockets: false,
            verify: false,
        }
    }
}

const USAGE: &str = "usage: rstream
\t[-s server_address]
\t[-b bind_address]
\t[-f address_format]
\t    name, ip, or ipv6
\t[-B buffer_size]
\t[-i inline_size]
\t[-I iterations]
\t[-C transfer_count]
\t[-S transfer_size or all]
\t[-p port_number]
\t[-k keepalive_time]
\t[-T test_option]
\t    s|sockets - use standard tcp/ip sockets
\t    a|async - asynchronous operation (as nonblocking)
\t    b|blocking - use blocking calls
\t    n|nonblocking - use nonblocking calls
\t    r|resolve - use rdma cm to resolve address (always done)
\t    v|verify - verify data";

/// The options with their values, as getopt takes them apart: `-S 64` and `-S64`.
fn parse(mut words: impl Iterator<Item = String>) -> Option<Options> {
    let mut options = Options::default();
    while let Some(word) = words.next() {
        let (letter, joined) = (word.strip_prefix('-')?.get(..1)?, word.get(2..)?);
        if !"sbfBiICSpkT".contains(letter) {
            return None;
        }
        let value = if joined.is_empty() { words.next()? } else { joined.to_owned() };
        match letter {
            "s" => options.server = Some(value),
            "b" => options.bind = Some(value),
            "f" => {
                options.family = match value.as_str() {
                    "name" => Addresses::Any,
                    "ip" => Addresses::V4,
                    "ipv6" => Addresses::V6,
                    _ => return refuse("-f is name, ip or ipv6: InfiniBand GIDs are not supported as addresses"),
                };
            }
            "B" => options.buffer = value.parse().ok()?,
            "i" => options.inline = value.parse().ok()?,
            "S" if value.eq_ignore_ascii_case("all") => options.all_sizes = true,
            "I" | "C" | "S" => {
                options.custom = true;
                let number = value.parse().ok()?;
                match letter {
                    "I" => options.iterations = number,
                    "C" => options.transfers = number,
                    _ => options.size = number,
                }
            }
            "p" => options.port = value.parse().ok()?,
            "k" => return refuse("-k is not supported: streams of this library have no keepalive yet"),
            _ => match value.to_ascii_lowercase().as_str() {
                "s" | "sockets" | "socket" => options.sockets = true,
                "b" | "block" | "blocking" => options.mode = Mode::Blocking,
                "a" | "async" | "n" | "nonblock" | "nonblocking" => options.mode = Mode::NonBlocking,
                "r" | "resolve" => {}
                "v" | "verify" => options.verify = true,
                _ => return None,
            },
        }
    }
    Some(options)
}

/// Says why an option of the C program is refused.
fn refuse(why: &str) -> Option<Options> {
    eprintln!("rstream: {why}");
    None
}

/// What kind of address is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Addresses {
    Any,
    V4,
    V6,
}

impl Addresses {
    /// The addresses of `host` that are of this kind.
    fn look_up(self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let mut addresses = look_up(host, port)?;
        addresses.retain(|address| match self {
            Self::Any => true,
            Self::V4 => address.is_ipv4(),
            Self::V6 => address.is_ipv6(),
        });
        if addresses.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("{host} has no address of the kind asked for"),
            ));
        }
        Ok(addresses)
    }
}

fn main() -> ExitCode {
    let Some(options) = parse(std::env::args().skip(1)) else {
        println!("{USAGE}");
        return ExitCode::from(1);
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail("rstream", &error),
    }
}

/// A stream of either kind.
trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// How connections are made, again and again.
enum Maker {
    Rdma { listener: RdmaListener },
    Tcp { listener: TcpListener },
    Client,
}

impl Maker {
    fn new(options: &Options, stream: &StreamOptions) -> io::Result<Self> {
        if options.server.is_some() {
            return Ok(Self::Client);
        }
        let address = options.bind.as_deref().unwrap_or("0.0.0.0");
        let addresses = options.family.look_up(address, options.port)?;
        Ok(match options.sockets {
            true => Self::Tcp { listener: TcpListener::bind(&addresses[..])? },
            false => Self::Rdma { listener: RdmaListener::bind_with(&addresses[..], stream)? },
        })
    }

    fn make(&self, options: &Options, stream: &StreamOptions) -> io::Result<Box<dyn Stream>> {
        let nonblocking = options.mode == Mode::NonBlocking;
        let tcp = |stream: TcpStream| -> io::Result<Box<dyn Stream>> {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(nonblocking)?;
            Ok(Box::new(stream))
        };
        let rdma = |stream: RdmaStream| -> io::Result<Box<dyn Stream>> {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(nonblocking)?;
            Ok(Box::new(stream))
        };
        match self {
            Self::Rdma { listener } => rdma(listener.accept()?.0),
            Self::Tcp { listener } => tcp(listener.accept()?.0),
            Self::Client => {
                let server = options.server.as_deref().unwrap_or_default();
                let addresses = options.family.look_up(server, options.port)?;
                if options.sockets {
                    return tcp(TcpStream::connect(&addresses[..])?);
                }
                let mut stream = stream.clone();
                if let Some(bind) = &options.bind {
                    stream = stream.source(source(options.family, bind)?);
                }
                rdma(RdmaStream::connect_with(&addresses[..], &stream)?)
            }
        }
    }
}

fn source(family: Addresses, bind: &str) -> io::Result<SocketAddr> {
    Ok(family.look_up(bind, 0)?[0])
}

fn run(options: &Options) -> io::Result<()> {
    let buffer = if options.buffer == 0 { 1 << 19 } else { options.buffer };
    // As with sockets, twice what was asked for.
    let stream = StreamOptions::new().receive_buffer(2 * buffer).send_buffer(2 * buffer);
    // The C program's default mode never sleeps.
    let stream = if options.mode == Mode::NonBlocking { stream.spin(Duration::from_secs(3600)) } else { stream };
    let latency = stream.clone().inline(options.inline);
    let maker = Maker::new(options, &latency)?;
    println!(
        "{:<10}{:<8}{:<8}{:<8}{:<8}{:>8} {:>10}{:>13}",
        "name", "bytes", "xfers", "iters", "total", "time", "Gb/sec", "usec/xfer"
    );
    if options.custom {
        let test = Test { name: "custom".to_owned(), options: options.clone() };
        return Run::new(maker.make(options, &latency)?, options).run(&test);
    }
    let sizes: Vec<usize> = sizes(options.all_sizes).collect();
    let mut run = Run::new(maker.make(options, &latency)?, options);
    for &size in &sizes {
        run.run(&Test::new("lat", size, size_to_count(size), 1, options))?;
    }
    drop(run);
    // A second connection, with the sizes of the others.
    let mut run = Run::new(maker.make(options, &stream.inline(0))?, options);
    for &size in &sizes {
        run.run(&Test::new("bw", size, 1, size_to_count(size), options))?;
    }
    Ok(())
}

/// The powers of two, and with `all` what lies half-way between them.
fn sizes(all: bool) -> impl Iterator<Item = usize> {
    let powers = (6..=22).map(|power| 1_usize << power);
    powers.flat_map(move |size| {
        let usual = [1 << 6, 1 << 12, 1 << 16, 1 << 20].contains(&size);
        let between = (all && size > 64).then_some(size + size / 2);
        (all || usual).then_some(size).into_iter().chain(between)
    })
}

fn size_to_count(size: usize) -> usize {
    match size {
        0x10_0000.. => 100,
        0x1_0000.. => 1000,
        0x400.. => 10_000,
        _ => 100_000,
    }
}

struct Test {
    name: String,
    options: Options,
}

impl Test {
    fn new(kind: &str, size: usize, iterations: usize, transfers: usize, options: &Options) -> Self {
        // The C program has room for four characters.
        let name: String = size_str(size as u64).chars().take(4).collect();
        Self {
            name: format!("{name}_{kind}").chars().take(9).collect(),
            options: Options { size, iterations, transfers, ..options.clone() },
        }
    }
}

/// One connection, with its data.
struct Run {
    stream: Box<dyn Stream>,
    client: bool,
    verify: bool,
    buffer: Vec<u8>,
    /// The next byte of the pattern that is sent, and that must arrive.
    next_sent: u8,
    next_received: u8,
    received: u64,
}

impl Run {
    fn new(stream: Box<dyn Stream>, options: &Options) -> Self {
        let largest = if options.custom { options.size.max(16) } else { (1 << 22) + (1 << 21) };
        Self {
            stream,
            client: options.server.is_some(),
            verify: options.verify,
            buffer: vec![0; largest],
            next_sent: 0,
            next_received: 0,
            received: 0,
        }
    }

    fn run(&mut self, test: &Test) -> io::Result<()> {
        let Options { size, transfers, iterations, .. } = test.options;
        self.turn(16, 1)?;
        let start = Instant::now();
        for _ in 0..iterations {
            self.turn(size, transfers)?;
        }
        show(test, start.elapsed());
        Ok(())
    }

    /// The client sends and the server answers.
    fn turn(&mut self, size: usize, transfers: usize) -> io::Result<()> {
        for sends in [self.client, !self.client] {
            for _ in 0..transfers {
                if sends { self.send(size)? } else { self.receive(size)? }
            }
        }
        Ok(())
    }

    fn send(&mut self, size: usize) -> io::Result<()> {
        if self.verify {
            for byte in &mut self.buffer[..size] {
                *byte = self.next_sent;
                self.next_sent = self.next_sent.wrapping_add(1);
            }
        }
        let mut done = 0;
        while done < size {
            match self.stream.write(&self.buffer[done..size]) {
                Ok(written) => done += written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn receive(&mut self, size: usize) -> io::Result<()> {
        let mut done = 0;
        while done < size {
            match self.stream.read(&mut self.buffer[done..size]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error),
            }
        }
        if self.verify {
            for &byte in &self.buffer[..size] {
                if byte != self.next_received {
                    let text = format!("data verification failed byte {}", self.received);
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                self.next_received = self.next_received.wrapping_add(1);
                self.received += 1;
            }
        }
        Ok(())
    }
}

fn show(test: &Test, time: Duration) {
    let Options { size, transfers, iterations, .. } = test.options;
    let micros = time.as_secs_f64() * 1e6;
    let bytes = iterations as u64 * transfers as u64 * size as u64 * 2;
    println!(
        "{:<10}{:<8}{:<8}{:<8}{:<8}{:8.2}s{:10.2}{:11.2}",
        test.name,
        size_str(size as u64),
        count_str(transfers),
        count_str(iterations),
        size_str(bytes),
        micros / 1e6,
        bytes as f64 * 8. / (1000. * micros),
        micros / iterations as f64 / (transfers * 2) as f64,
    );
}

/// As the C programs write sizes: 64, 1.5k, 12m.
fn size_str(size: u64) -> String {
    let (base, unit) = match size {
        0x4000_0000.. => (1 << 30, "g"),
        0x10_0000.. => (1 << 20, "m"),
        0x400.. => (1 << 10, "k"),
        _ => (1, ""),
    };
    match if size / base < 10 { size % base * 10 / base } else { 0 } {
        0 => format!("{}{unit}", size / base),
        fraction => format!("{}.{fraction}{unit}", size / base),
    }
}

fn count_str(count: usize) -> String {
    match count {
        1_000_000_000.. => format!("{}b", count / 1_000_000_000),
        1_000_000.. => format!("{}m", count / 1_000_000),
        1000.. => format!("{}k", count / 1000),
        _ => count.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> impl Iterator<Item = String> + '_ {
        line.split_whitespace().map(str::to_owned)
    }

    #[test]
    fn options_are_taken_as_getopt_does() {
        let options = parse(words("-s host -S64 -C 10 -T b -T v -p 9 -B 4096")).expect("right");
        assert!(options.custom && options.verify && options.mode == Mode::Blocking);
        assert_eq!((options.size, options.transfers, options.port, options.buffer), (64, 10, 9, 4096));
        assert!(parse(words("-S all")).is_some_and(|options| options.all_sizes && !options.custom));
        for wrong in ["-x", "host", "-S", "-S many", "-T q", "-", "-é"] {
            assert!(parse(words(wrong)).is_none(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_written_as_in_c() {
        for (size, text) in
            [(64, "64"), (1536, "1.5k"), (65536, "64k"), (1 << 20, "1m"), (12 << 20, "12m"), (3 << 30, "3g")]
        {
            assert_eq!(size_str(size), text);
        }
        assert_eq!(sizes(false).collect::<Vec<_>>(), [64, 4096, 65536, 1 << 20]);
        let all: Vec<_> = sizes(true).collect();
        assert_eq!((all.len(), all[1], all[2], all[32]), (33, 128, 192, (1 << 22) + (1 << 21)));
    }
}
