//! `rping`: pings over RDMA, compatible with the program of that name in rdma-core.
//!
//! The client offers a buffer, the server reads it (RDMA read) and writes it back into a second one (RDMA write). Options,
//! wire protocol, what is printed to the standard output and exit statuses are those of the C program, so that each end
//! works with the other's.
//!
//! | step | client | server |
//! |---|---|---|
//! | 1 | fills the source, sends where it is | |
//! | 2 | | reads it, says "go ahead" |
//! | 3 | sends where the sink is | |
//! | 4 | | writes to it, says "go ahead" |
//! | 5 | compares | |
//!
//! Every message has 16 bytes: address (8), key (4) and size (4), big-endian. In "go ahead" they mean nothing.

use std::error::Error as StdError;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::thread;

use clap::Parser;
use rdmacm::{
    AcceptOptions, Access, ConnectRequest, Connection, ConnectionOptions, Connector, EndpointOptions, Listener,
    MemoryRegion, RemoteRegion,
};
use rdmacm_examples::{FAILED, MISUSED, fail, look_up};

/// Pings over RDMA: the client's buffer is read and written back by the server.
#[derive(Parser, Clone, Debug)]
#[command(name = "rping", about, disable_version_flag = true)]
struct Options {
    /// Be the server. To bind to any address with IPv6 use -a ::
    #[arg(short = 's', required_unless_present = "client", conflicts_with = "client")]
    server: bool,

    /// Be the client.
    #[arg(short = 'c', requires = "address")]
    client: bool,

    /// Address: the server's to connect to, or one to listen on [default: 0.0.0.0].
    #[arg(short = 'a', value_name = "ADDRESS")]
    address: Option<String>,

    /// Source address of the client.
    #[arg(short = 'I', value_name = "ADDRESS")]
    source: Option<String>,

    /// Port.
    #[arg(short = 'p', default_value_t = 7174)]
    port: u16,

    /// How often the client pings; 0: without end.
    #[arg(short = 'C', default_value_t = 0)]
    count: u64,

    /// Bytes of a ping. The server's is the most that it serves.
    #[arg(short = 'S', default_value_t = 64, value_parser = clap::value_parser!(u32).range(23..=65535))]
    size: u32,

    /// Print the data of each ping.
    #[arg(short = 'v')]
    verbose: bool,

    /// Compare the data that came back with what was sent.
    #[arg(short = 'V')]
    validate: bool,

    /// Print each step.
    #[arg(short = 'd')]
    debug: bool,

    /// Serve many clients, until stopped.
    #[arg(short = 'P')]
    persistent: bool,

    /// Not supported: the queue pair's states are librdmacm's work here.
    #[arg(short = 'q', hide = true)]
    own_queue_pair: bool,
}

type Result<T, E = Box<dyn StdError>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let options = match Options::try_parse() {
        Ok(options) => options,
        Err(error) => {
            // Help goes to the standard output and is no misuse.
            let status = if error.use_stderr() { MISUSED } else { 0 };
            return match error.print() {
                Ok(()) => ExitCode::from(status),
                Err(_) => ExitCode::from(FAILED),
            };
        }
    };
    if options.own_queue_pair {
        eprintln!(
            "rping: -q is not supported: librdmacm takes the queue pair through its states here, the program does not"
        );
        return ExitCode::from(MISUSED);
    }
    let outcome = if options.client { ping(&options) } else { serve(&options) };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail("rping", &*error),
    }
}

/// Prints a line of `-v` or `-d`.
macro_rules! print_line {
    ($($argument:tt)*) => { writeln!(io::stdout(), $($argument)*) };
}

/// The bytes of every message.
const MESSAGE: usize = 16;

/// What both ends ask of a connection: short messages, and never more than a few of them under way.
fn connection_options() -> ConnectionOptions {
    ConnectionOptions::new().endpoint(EndpointOptions::default().message_size(MESSAGE).send_depth(8).recv_depth(4))
}

/// Encodes where a buffer is.
fn encode(region: &RemoteRegion) -> [u8; MESSAGE] {
    let size = u32::try_from(region.len()).expect("at most 65535 bytes, by the range of -S");
    let mut message = [0; MESSAGE];
    message[..8].copy_from_slice(&region.addr().to_be_bytes());
    message[8..12].copy_from_slice(&region.rkey().to_be_bytes());
    message[12..].copy_from_slice(&size.to_be_bytes());
    message
}

/// Decodes where the peer's buffer is.
fn decode(message: &[u8; MESSAGE]) -> RemoteRegion {
    let (addr, rest) = message.split_first_chunk().expect("16 bytes begin with 8");
    let (rkey, size) = rest.split_first_chunk().expect("8 bytes begin with 4");
    let size = size.first_chunk().expect("4 bytes are left");
    RemoteRegion::new(u64::from_be_bytes(*addr), u64::from(u32::from_be_bytes(*size)), u32::from_be_bytes(*rkey))
}

fn receive(connection: &mut Connection) -> Result<[u8; MESSAGE], rdmacm::Error> {
    let mut message = [0; MESSAGE];
    let length = connection.recv(&mut message)?;
    if length != MESSAGE {
        return Err(rdmacm::Error::Misuse("the peer sent a message of another size than rping's 16 bytes"));
    }
    Ok(message)
}

/// The text of pings: "rdma-ping-N: ", then the characters 65 to 122 over and over, from the N-th on, and a NUL.
struct Pattern {
    /// The characters, long enough for every start.
    characters: Vec<u8>,
    size: usize,
}

impl Pattern {
    const FIRST: u8 = b'A';
    const COUNT: usize = (b'z' - b'A' + 1) as usize;

    fn new(size: usize) -> Self {
        let alphabet = (Self::FIRST..).take(Self::COUNT);
        Self { characters: alphabet.cycle().take(Self::COUNT + size).collect(), size }
    }

    /// The two parts of ping `number` before its NUL.
    fn parts(&self, number: u64) -> (String, &[u8]) {
        let mut header = format!("rdma-ping-{number}: ");
        header.truncate(self.size - 1);
        let start = usize::try_from(number % Self::COUNT as u64).expect("less than 58");
        let characters = &self.characters[start..start + self.size - 1 - header.len()];
        (header, characters)
    }
}

/// Where a C string ends, or the data does.
fn text(data: &[u8]) -> std::borrow::Cow<'_, str> {
    let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
    String::from_utf8_lossy(&data[..end])
}

// The client.

fn ping(options: &Options) -> Result<()> {
    let host = options.address.as_deref().expect("clap requires -a of a client");
    let mut connector = Connector::new().options(connection_options());
    if let Some(source) = &options.source {
        connector = connector.source(look_up(source, 0)?[0]);
    }
    let route = connector.resolve(&*look_up(host, options.port)?)?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let size = options.size as usize;
    let source = route.register(size, access)?;
    let sink = route.register(size, access)?;
    let mut connection = route.connect()?;
    if options.debug {
        print_line!("connected to {} from {}", connection.peer_addr(), connection.local_addr())?;
    }
    let outcome = ping_all(options, &mut connection, &source, &sink);
    match outcome {
        Ok(()) => connection.disconnect()?,
        // Like the C client: a server that leaves ends the pings, without an error.
        Err(error) if is_peers_end(&*error) => {}
        Err(error) => return Err(error),
    }
    eprintln!("client DISCONNECT EVENT...");
    Ok(())
}

fn is_peers_end(error: &(dyn StdError + 'static)) -> bool {
    error.downcast_ref::<rdmacm::Error>().is_some_and(rdmacm::Error::is_closed_by_peer)
}

fn ping_all(options: &Options, connection: &mut Connection, source: &MemoryRegion, sink: &MemoryRegion) -> Result<()> {
    let offers = [encode(&source.remote()), encode(&sink.remote())];
    let pattern = Pattern::new(source.len());
    let mut returned = vec![0; if options.verbose || options.validate { sink.len() } else { 0 }];
    let mut number = 0;
    while options.count == 0 || number < options.count {
        let (header, characters) = pattern.parts(number);
        // The last byte is a NUL from the start, and nobody writes to it.
        source.write_at(0, header.as_bytes())?;
        source.write_at(header.len(), characters)?;
        for (offer, region) in offers.iter().zip([source, sink]) {
            if options.debug {
                let remote = region.remote();
                print_line!("RDMA addr {:x} rkey {:x} len {}", remote.addr(), remote.rkey(), remote.len())?;
            }
            connection.send(offer)?;
            receive(connection)?;
        }
        if options.verbose || options.validate {
            sink.read_at(0, &mut returned)?;
        }
        if options.validate {
            let (start, rest) = returned.split_at(header.len());
            if start != header.as_bytes() || rest.strip_suffix(&[0]) != Some(characters) {
                return Err(format!("data mismatch in ping {number}: {:?} came back", text(&returned)).into());
            }
        }
        if options.verbose {
            print_line!("ping data: {}", text(&returned))?;
        }
        number += 1;
    }
    Ok(())
}

// The server.

fn serve(options: &Options) -> Result<()> {
    let host = options.address.as_deref().unwrap_or("0.0.0.0");
    let listener = Listener::bind(&*look_up(host, options.port)?)?;
    if options.debug {
        print_line!("listening on {}", listener.local_addr())?;
    }
    if !options.persistent {
        let request = listener.request()?;
        // One client is all that is served: others are refused at once, not when their patience ends.
        drop(listener);
        return serve_one(options, request);
    }
    loop {
        let request = listener.request()?;
        let options = options.clone();
        let peer = request.peer_addr();
        let serve = move || {
            if let Err(error) = serve_one(&options, request) {
                report(peer, &*error);
            }
        };
        if let Err(error) = thread::Builder::new().name(format!("client {peer}")).spawn(serve) {
            report(peer, &error);
        }
    }
}

/// One client's failure does not end a persistent server.
fn report(peer: SocketAddr, error: &dyn StdError) {
    eprintln!("rping: client {peer}: {error}");
}

fn serve_one(options: &Options, request: ConnectRequest) -> Result<()> {
    let size = options.size as usize;
    // Remote write, since iWARP carries an RDMA read out as the peer's write. The key stays here.
    let buffer = request.register(size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let mut connection = request.accept_with(&AcceptOptions::new().options(connection_options()))?;
    if options.debug {
        print_line!("connected with {} at {}", connection.peer_addr(), connection.local_addr())?;
    }
    match serve_pings(options, &mut connection, &buffer) {
        Err(error) if is_peers_end(&*error) => {
            eprintln!("server DISCONNECT EVENT...");
            Ok(())
        }
        other => other,
    }
}

/// Serves pings until the client goes, which is the error that this ends with.
fn serve_pings(options: &Options, connection: &mut Connection, buffer: &MemoryRegion) -> Result<()> {
    let go_ahead = [0; MESSAGE];
    let mut data = vec![0; if options.verbose { buffer.len() } else { 0 }];
    loop {
        let source = receive_offer(options, connection)?;
        let length = usize::try_from(source.len())?;
        if length > buffer.len() {
            return Err(
                format!("the client pings with {length} bytes, the -S of this server is {}", buffer.len()).into()
            );
        }
        connection.read(buffer, 0..length, &source, 0)?;
        if options.verbose {
            buffer.read_at(0, &mut data[..length])?;
            print_line!("server ping data: {}", text(&data[..length]))?;
        }
        connection.send(&go_ahead)?;
        let sink = receive_offer(options, connection)?;
        // The client's memory has the data before the message that follows the write arrives, and the client's next
        // message says that it has: there is nothing to wait for here.
        let mut answer = connection.sender().batch();
        answer.write(buffer, 0..length, &sink, 0, None)?;
        answer.send(&go_ahead)?;
        answer.post()?;
    }
}

fn receive_offer(options: &Options, connection: &mut Connection) -> Result<RemoteRegion> {
    let region = decode(&receive(connection)?);
    if options.debug {
        print_line!("Received rkey {:x} addr {:x} len {} from peer", region.rkey(), region.addr(), region.len())?;
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ping_text(size: usize, number: u64) -> Vec<u8> {
        let pattern = Pattern::new(size);
        let (header, characters) = pattern.parts(number);
        [header.as_bytes(), characters, &[0]].concat()
    }

    #[test]
    fn the_text_is_that_of_the_c_program() {
        // As rping of rdma-core 44 prints with -v -S 30 and -v -S 64.
        assert_eq!(ping_text(30, 0), b"rdma-ping-0: ABCDEFGHIJKLMNOP\0");
        assert_eq!(ping_text(64, 9), b"rdma-ping-9: JKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyzA\0");
        assert_eq!(ping_text(30, 58), b"rdma-ping-58: ABCDEFGHIJKLMNO\0");
    }

    #[test]
    fn every_size_and_number_fills_the_buffer() {
        for size in 23..200 {
            for number in [0, 1, 57, 58, 59, 999_999_999_999, u64::MAX] {
                assert_eq!(ping_text(size, number).len(), size, "size {size}, ping {number}");
            }
        }
    }

    #[test]
    fn messages_are_big_endian() {
        let region = RemoteRegion::new(0x0102_0304_0506_0708, 0x1112, 0x2122_2324);
        let message = encode(&region);
        assert_eq!(message, [1, 2, 3, 4, 5, 6, 7, 8, 0x21, 0x22, 0x23, 0x24, 0, 0, 0x11, 0x12]);
        assert_eq!(decode(&message), region);
    }

    #[test]
    fn options_are_those_of_the_c_program() {
        let parse = |line: &str| Options::try_parse_from(line.split(' '));
        let defaults = parse("rping -s").expect("enough for a server");
        assert_eq!((defaults.port, defaults.size, defaults.count), (7174, 64, 0));
        assert!(parse("rping -svVdP -p 1 -C 2 -S 23").is_ok());
        assert!(parse("rping -c -a fe80::1%eth0 -I 10.1.2.3 -S 65535").is_ok());
        for misuse in [
            "rping",
            "rping -c",
            "rping -s -c -a x",
            "rping -s -S 22",
            "rping -s -S 65536",
            "rping -s -C -1",
            "rping -s -t 3",
        ] {
            assert!(parse(misuse).is_err(), "{misuse}");
        }
    }
}
