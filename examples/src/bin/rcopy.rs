//! Copies a file over a byte stream, compatible with rdma-core's rcopy.
//!
//! ```console
//! $ rcopy
//! $ rcopy big.img 10.1.2.3:/srv/big.img
//! ```
//!
//! The server writes whatever file a client names, with the rights of its user: it is a demonstration for trusted networks, as
//! the C program is.
//!
//! Each message begins with a header of 16 bytes, in host byte order: version 0 (1), command (1), length of the message (2), data
//! (4), id (8). A response is the command with its highest bit set, and a status (an errno) as data.
//!
//! | command | data | what follows |
//! |---|---|---|
//! | 1, open | mode of the file | its name, padded with zeros to a multiple of 8 |
//! | 3, write | | the size of the file (8), which counts as part of the message, then its bytes |
//! | 2, close | | |

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rdmacm::{RdmaListener, RdmaStream};
use rdmacm_examples::{fail, look_up};

const PORT: u16 = 7427;

const OPEN: u8 = 1;
const CLOSE: u8 = 2;
const WRITE: u8 = 3;
const RESPONSE: u8 = 0x80;

/// Bytes that are copied at a time.
const CHUNK: usize = 256 * 1024;

const USAGE: &str = "usage 1: rcopy [options]
\t     starts the server application
\t[-p  port_number]
usage 2: rcopy source server[:destination] [options]
\t     source - file name and path
\t     server - name or address; an IPv6 address in brackets
\t     destination - file name and path
\t[-p  port_number]";

#[derive(Debug, PartialEq, Eq)]
struct Options {
    port: u16,
    /// The file, the server, and the file there; `None` for a server.
    copy: Option<(PathBuf, String, String)>,
}

fn parse(words: impl Iterator<Item = String>) -> Option<Options> {
    let (mut port, mut places) = (PORT, Vec::new());
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        match word.strip_prefix("-p") {
            Some("") => port = words.next()?.parse().ok()?,
            Some(joined) => port = joined.parse().ok()?,
            None if word.starts_with('-') => return None,
            None => places.push(word),
        }
    }
    let copy = match places.as_slice() {
        [] => None,
        [source, target] => {
            let (host, path) = match target.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                Some((host, rest)) => (host, rest.strip_prefix(':')),
                None => target.split_once(':').map_or((target.as_str(), None), |(host, path)| (host, Some(path))),
            };
            Some((PathBuf::from(source), host.to_owned(), path.unwrap_or(source).to_owned()))
        }
        _ => return None,
    };
    Some(Options { port, copy })
}

fn main() -> ExitCode {
    let Some(options) = parse(std::env::args().skip(1)) else {
        println!("{USAGE}");
        return ExitCode::from(1);
    };
    let outcome = match &options.copy {
        None => serve(options.port),
        Some((source, host, path)) => copy(source, host, path, options.port),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail("rcopy", &error),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    command: u8,
    length: u16,
    data: u32,
    id: u64,
}

impl Header {
    const LEN: usize = 16;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[1] = self.command;
        bytes[2..4].copy_from_slice(&self.length.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.data.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.id.to_ne_bytes());
        bytes
    }

    /// Reads one; `None` when the peer has nothing more to say.
    fn receive(stream: &mut impl Read) -> io::Result<Option<Self>> {
        let mut bytes = [0; Self::LEN];
        match stream.read(&mut bytes)? {
            0 => return Ok(None),
            read => stream.read_exact(&mut bytes[read..])?,
        }
        let header = Self {
            command: bytes[1],
            length: u16::from_ne_bytes([bytes[2], bytes[3]]),
            data: u32::from_ne_bytes(bytes[4..8].try_into().expect("four bytes")),
            id: u64::from_ne_bytes(bytes[8..].try_into().expect("eight bytes")),
        };
        if bytes[0] != 0 || usize::from(header.length) < Self::LEN {
            let text = format!("invalid version {} or length {}", bytes[0], header.length);
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        Ok(Some(header))
    }
}

fn command(command: u8, length: usize, data: u32) -> io::Result<Header> {
    let length =
        u16::try_from(length).map_err(|_| io::Error::new(ErrorKind::InvalidInput, "the file's name is too long"))?;
    Ok(Header { command, length, data, id: 0 })
}

// The client.

fn copy(source: &PathBuf, host: &str, path: &str, port: u16) -> io::Result<()> {
    let mut file = File::open(source)?;
    let metadata = file.metadata()?;
    let mut stream = RdmaStream::connect(&look_up(host, port)?[..])?;
    print!("opening...");
    let mut name = path.as_bytes().to_vec();
    name.resize((name.len() + 8) & !7, 0);
    stream.write_all(&command(OPEN, Header::LEN + name.len(), metadata.mode())?.to_bytes())?;
    stream.write_all(&name)?;
    response(&mut stream, OPEN)?;

    print!("transferring...");
    io::stdout().flush()?;
    let size = metadata.len();
    stream.write_all(&command(WRITE, Header::LEN + 8, 0)?.to_bytes())?;
    stream.write_all(&size.to_ne_bytes())?;
    let start = Instant::now();
    let sent = transfer(&mut file, &mut stream, size)?;
    if sent != size {
        return Err(io::Error::new(ErrorKind::UnexpectedEof, "the file became shorter while it was copied"));
    }
    response(&mut stream, WRITE)?;
    let time = start.elapsed();

    print!("closing...");
    stream.write_all(&command(CLOSE, Header::LEN, 0)?.to_bytes())?;
    response(&mut stream, CLOSE)?;
    println!("done");
    stream.shutdown(std::net::Shutdown::Both)?;
    println!("{}", rate(size, time));
    Ok(())
}

fn response(stream: &mut impl Read, to: u8) -> io::Result<()> {
    let header = Header::receive(stream)?.ok_or(ErrorKind::UnexpectedEof)?;
    if header.command != to | RESPONSE || usize::from(header.length) != Header::LEN {
        let text = format!(
            "invalid length {} or bad command response {:x}:{:x}",
            header.length,
            header.command,
            to | RESPONSE
        );
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    match header.data {
        0 => Ok(()),
        status => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(status.to_ne_bytes()))),
    }
}

fn rate(bytes: u64, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    format!("{bytes} bytes in {seconds:.2} seconds = {:.2} Gb/sec", bytes as f64 * 8. / 1e9 / seconds)
}

/// Copies up to `size` bytes; how many there were.
fn transfer(from: &mut impl Read, to: &mut impl Write, size: u64) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK];
    let mut done = 0;
    while done < size {
        let most = usize::try_from(size - done).map_or(CHUNK, |left| left.min(CHUNK));
        match from.read(&mut buffer[..most])? {
            0 => break,
            read => {
                to.write_all(&buffer[..read])?;
                done += read as u64;
            }
        }
    }
    Ok(done)
}

// The server.

fn serve(port: u16) -> io::Result<()> {
    let listener = RdmaListener::bind(("0.0.0.0", port))?;
    loop {
        print!("waiting for connection...");
        io::stdout().flush()?;
        let (stream, client) = listener.accept()?;
        println!("client: {}", client.ip());
        if let Err(error) = serve_one(stream) {
            println!("...{error}");
        }
    }
}

fn serve_one(mut stream: RdmaStream) -> io::Result<()> {
    let mut file: Option<File> = None;
    while let Some(header) = Header::receive(&mut stream)? {
        let result = match header.command {
            OPEN => open(&mut stream, &header, file.is_some()).map(|opened| file = Some(opened)),
            WRITE => write(&mut stream, &header, file.as_mut()),
            CLOSE => {
                println!("closing...done");
                file = None;
                Ok(())
            }
            _ => Err(io::Error::from_raw_os_error(EINVAL)),
        };
        let status = result.as_ref().err().map_or(0, |error| error.raw_os_error().unwrap_or(EIO));
        let data = u32::from_ne_bytes(status.to_ne_bytes());
        let response = Header { command: header.command | RESPONSE, length: Header::LEN as u16, data, id: header.id };
        stream.write_all(&response.to_bytes())?;
        result?;
    }
    stream.shutdown(std::net::Shutdown::Both)
}

const EIO: i32 = 5;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

fn open(stream: &mut impl Read, header: &Header, busy: bool) -> io::Result<File> {
    let mut name = vec![0; usize::from(header.length) - Header::LEN];
    stream.read_exact(&mut name)?;
    let name: Vec<u8> = name.into_iter().take_while(|byte| *byte != 0).collect();
    let name = String::from_utf8_lossy(&name);
    print!("opening: {name}, ");
    if busy {
        println!("cannot open another file");
        return Err(io::Error::from_raw_os_error(EBUSY));
    }
    let mode = header.data & 0o7777;
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(mode).open(&*name)
}

fn write(stream: &mut impl Read, header: &Header, file: Option<&mut File>) -> io::Result<()> {
    print!("transferring");
    let Some(file) = file else {
        println!("...file not opened");
        return Err(io::Error::from_raw_os_error(EINVAL));
    };
    if usize::from(header.length) != Header::LEN + 8 {
        println!("...invalid message length {}", header.length);
        return Err(io::Error::from_raw_os_error(EINVAL));
    }
    let mut size = [0; 8];
    stream.read_exact(&mut size)?;
    let size = u64::from_ne_bytes(size);
    print!("...{size} bytes...");
    io::stdout().flush()?;
    match transfer(stream, file, size)? {
        received if received == size => Ok(()),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(line: &str) -> Option<Options> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn places_are_taken_apart() {
        let copy = |source: &str, host: &str, path: &str| Some((source.into(), host.to_owned(), path.to_owned()));
        assert_eq!(options(""), Some(Options { port: PORT, copy: None }));
        assert_eq!(options("-p 99"), Some(Options { port: 99, copy: None }));
        assert_eq!(options("a host"), Some(Options { port: PORT, copy: copy("a", "host", "a") }));
        assert_eq!(options("a host:/b -p9"), Some(Options { port: 9, copy: copy("a", "host", "/b") }));
        assert_eq!(options("a [fd77::1]:/b"), Some(Options { port: PORT, copy: copy("a", "fd77::1", "/b") }));
        assert_eq!(options("a [fd77::1]"), Some(Options { port: PORT, copy: copy("a", "fd77::1", "a") }));
        for wrong in ["a", "a b c", "-x", "-p", "-p many"] {
            assert_eq!(options(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn headers_survive_the_wire() {
        let header = Header { command: OPEN, length: 40, data: 0o100_644, id: 7 };
        let bytes = header.to_bytes();
        assert_eq!(Header::receive(&mut &bytes[..]).expect("whole"), Some(header));
        assert_eq!(Header::receive(&mut &[][..]).expect("an end"), None);
        assert!(Header::receive(&mut &bytes[..9]).is_err());
        assert!(Header::receive(&mut &[0; 16][..]).is_err(), "shorter than itself");
    }
}
