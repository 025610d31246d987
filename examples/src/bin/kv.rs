//! `kv`: a small key-value store whose clients do the work. The server opens its table to them and sleeps; a look-up is
//! one RDMA read, an update takes a lock in the table with an RDMA compare-and-swap, and writes the entry and the free lock
//! with one doorbell. The server's processor is needed for connecting only.
//!
//! ```console
//! server$ kv server -a 10.1.2.3
//! client$ kv put -a 10.1.2.3 colour blue
//! client$ kv get -a 10.1.2.3 colour
//! client$ kv check -a 10.1.2.3 --clients 8     # counters and texts from eight threads; nothing may be lost or torn
//! ```
//!
//! # The table
//!
//! Buckets of 128 bytes; a key lies in the first bucket from its hash on that had room when it came, of at most 16.
//! Numbers are little-endian.
//!
//! | bytes | |
//! | --- | --- |
//! | 0..8 | lock: 0, or the number of the client that changes the bucket |
//! | 8..16 | version: 0 for an empty bucket, grows with each change |
//! | 16..24 | length of the key (4) and of the value (4) |
//! | 24..32 | checksum of version, lengths, key and value |
//! | 32..64 | key |
//! | 64..128 | value |
//!
//! A reader takes no lock. It sees by the checksum that it read while somebody wrote, and reads again. Should a client die
//! with a lock, the server, which hears of its end, opens the lock; an entry that was half written by then is empty.

use std::error::Error as StdError;
use std::fmt;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use rdmacm::{
    AcceptOptions, Access, Connection, ConnectionOptions, Connector, EndpointOptions, Listener, MemoryRegion,
    RemoteRegion,
};
use rdmacm_examples::{fail, look_up};

type Result<T, E = Box<dyn StdError + Send + Sync>> = std::result::Result<T, E>;

/// A key-value store on one-sided RDMA operations.
#[derive(Debug, Parser)]
#[command(name = "kv", about, disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a table.
    Server {
        #[command(flatten)]
        server: Place,
        /// Buckets in the table.
        #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
        buckets: u32,
        /// End after this many clients.
        #[arg(long)]
        clients: Option<u64>,
    },
    /// Print the value of a key.
    Get {
        #[command(flatten)]
        server: Place,
        key: String,
    },
    /// Set the value of a key.
    Put {
        #[command(flatten)]
        server: Place,
        key: String,
        value: String,
    },
    /// Add to the number that is the value of a key, 0 if it has none, and print the sum.
    Add {
        #[command(flatten)]
        server: Place,
        key: String,
        #[arg(allow_negative_numbers = true)]
        number: i64,
    },
    /// Change and read the table from many threads at once, and check that nothing was lost or torn.
    Check {
        #[command(flatten)]
        server: Place,
        /// Clients, each with a connection of its own.
        #[arg(long, default_value_t = 8)]
        clients: u64,
        /// Rounds of each client: one addition, one text written, two texts read.
        #[arg(long, default_value_t = 1000)]
        rounds: u64,
    },
}

#[derive(Args, Clone, Debug)]
struct Place {
    /// The server's address.
    #[arg(short = 'a', value_name = "ADDRESS")]
    address: String,
    /// The server's port.
    #[arg(short = 'p', default_value_t = 7475)]
    port: u16,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(status) => status,
        Err(error) => fail("kv", &*error),
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Server { server, buckets, clients } => serve(&server, buckets, clients)?,
        Command::Get { server, key } => match Client::connect(&server)?.get(key.as_bytes())? {
            Some(value) => println!("{}", String::from_utf8_lossy(&value)),
            None => {
                eprintln!("kv: no such key");
                return Ok(ExitCode::FAILURE);
            }
        },
        Command::Put { server, key, value } => {
            Client::connect(&server)?.update(key.as_bytes(), |_| Ok(value.as_bytes().to_vec()))?;
        }
        Command::Add { server, key, number } => {
            println!("{}", Client::connect(&server)?.add(key.as_bytes(), number)?);
        }
        Command::Check { server, clients, rounds } => check(&server, clients, rounds)?,
    }
    Ok(ExitCode::SUCCESS)
}

// The table.

const BUCKET: usize = 128;
const KEY: usize = 32;
const VALUE: usize = 64;
/// Buckets in which a key may lie.
const PROBES: u64 = 16;

/// The contents of a bucket, without its lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Entry {
    version: u64,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Entry {
    /// Bytes 8 to 128 of a bucket.
    fn to_bytes(&self) -> [u8; BUCKET - 8] {
        let mut bytes = [0; BUCKET - 8];
        bytes[..8].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.key.len() as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.value.len() as u32).to_le_bytes());
        bytes[24..24 + self.key.len()].copy_from_slice(&self.key);
        bytes[24 + KEY..24 + KEY + self.value.len()].copy_from_slice(&self.value);
        let sum = checksum(&bytes);
        bytes[16..24].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// `None` when the bytes were read while somebody wrote them.
    fn from_bytes(bytes: &[u8]) -> Option<Entry> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let length = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
        let version = number(0);
        if version == 0 && bytes.iter().all(|&byte| byte == 0) {
            return Some(Entry::default());
        }
        let (key, value) = (length(8), length(12));
        if key > KEY || value > VALUE || number(16) != checksum(bytes) {
            return None;
        }
        let (keys, values) = bytes[24..].split_at(KEY);
        Some(Entry { version, key: keys[..key].to_vec(), value: values[..value].to_vec() })
    }
}

/// FNV-1a of everything but the checksum itself.
fn checksum(bytes: &[u8]) -> u64 {
    hash(bytes[..16].iter().chain(&bytes[24..]))
}

fn hash<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

// The server.

/// Neither side sends messages.
fn options() -> ConnectionOptions {
    ConnectionOptions::new()
        .endpoint(EndpointOptions::default().message_size(8).recv_depth(1).send_depth(8).max_inline(BUCKET as u32))
}

fn serve(server: &Place, buckets: u32, clients: Option<u64>) -> Result<()> {
    let listener = Listener::bind(&*look_up(&server.address, server.port)?)?;
    println!("kv: {buckets} buckets on {}", listener.local_addr());
    let mut table: Option<MemoryRegion> = None;
    let mut threads = Vec::new();
    for number in 1..=clients.unwrap_or(u64::MAX) {
        let request = listener.request()?;
        let table = match &table {
            Some(table) => table,
            // On the device that the first client came by.
            None => table.insert(request.register(buckets as usize * BUCKET, Access::REMOTE_ALL)?),
        };
        if !table.protection_domain().same_as(request.protection_domain()) {
            request.reject(b"the table is on another device")?;
            continue;
        }
        // Where the table is, and the client's number.
        let mut welcome = table.remote().to_bytes().to_vec();
        welcome.extend(number.to_le_bytes());
        let table = table.clone();
        threads.retain(|thread: &thread::JoinHandle<()>| !thread.is_finished());
        threads.push(thread::spawn(move || {
            let options = AcceptOptions::new().options(options()).private_data(&welcome);
            match request.accept_with(&options) {
                Ok(mut connection) => {
                    // Nothing comes but the end.
                    let _ = connection.recv(&mut []);
                    drop(connection);
                    open_locks(&table, number);
                }
                Err(error) => eprintln!("kv: client {number}: {error}"),
            }
        }));
    }
    for thread in threads {
        let _ = thread.join();
    }
    Ok(())
}

/// Opens the locks of a client that is gone. What it left half written is emptied.
fn open_locks(table: &MemoryRegion, client: u64) {
    for at in (0..table.len()).step_by(BUCKET) {
        let lock = table.load_u64(at).expect("aligned and in the table");
        if lock != client {
            continue;
        }
        println!("kv: client {client} left a lock at bucket {}", at / BUCKET);
        let mut bytes = [0; BUCKET - 8];
        table.read_at(at + 8, &mut bytes).expect("in the table");
        if Entry::from_bytes(&bytes).is_none() {
            table.fill(at + 8..at + BUCKET, 0).expect("in the table");
        }
        table.store_u64(at, 0).expect("aligned and in the table");
    }
}

// The client.

struct Client {
    connection: Connection,
    table: RemoteRegion,
    number: u64,
    /// A bucket read, a bucket to be written, and the free lock.
    local: MemoryRegion,
    /// Reads that met a writer.
    torn: u64,
    /// Attempts to take a lock that somebody had.
    waited: u64,
}

const READ: usize = 0;
const WRITE: usize = BUCKET;
const FREE: usize = 2 * BUCKET;

impl Client {
    fn connect(server: &Place) -> Result<Client> {
        let connection = Connector::new().options(options()).connect(&*look_up(&server.address, server.port)?)?;
        let welcome = connection.private_data().data().unwrap_or_default().to_vec();
        let (Some(table), Some(number)) = (welcome.first_chunk::<24>(), welcome.last_chunk::<8>()) else {
            return Err("this is no kv server".into());
        };
        let (table, number) = (RemoteRegion::from_bytes(table), u64::from_le_bytes(*number));
        let local = connection.register(FREE + 8, Access::LOCAL_WRITE)?;
        Ok(Client { connection, table, number, local, torn: 0, waited: 0 })
    }

    /// Where the buckets that may hold a key begin.
    fn places(&self, key: &[u8]) -> impl Iterator<Item = u64> + use<> {
        let (buckets, first) = (self.table.len() / BUCKET as u64, hash(key));
        (0..PROBES.min(buckets)).map(move |n| (first % buckets + n) % buckets * BUCKET as u64)
    }

    fn read(&mut self, at: u64) -> Result<Entry> {
        let mut bytes = [0; BUCKET];
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            self.connection.read(&self.local, READ..READ + BUCKET, &self.table, at)?;
            self.local.read_at(READ, &mut bytes)?;
            if let Some(entry) = Entry::from_bytes(&bytes[8..]) {
                return Ok(entry);
            }
            self.torn += 1;
            if Instant::now() > end {
                return Err(format!("bucket {} stays half written", at / BUCKET as u64).into());
            }
        }
    }

    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        for at in self.places(key) {
            let entry = self.read(at)?;
            if entry.version == 0 {
                return Ok(None);
            }
            if entry.key == key {
                return Ok(Some(entry.value));
            }
        }
        Ok(None)
    }

    /// Replaces the value of a key, empty if it has none, by what `change` makes of it.
    fn update(&mut self, key: &[u8], change: impl FnOnce(Vec<u8>) -> Result<Vec<u8>>) -> Result<()> {
        if key.len() > KEY {
            return Err(format!("a key has at most {KEY} bytes").into());
        }
        for at in self.places(key) {
            let entry = self.read(at)?;
            if entry.version != 0 && entry.key != key {
                continue;
            }
            self.lock(at)?;
            // Somebody may have taken the bucket before it was locked.
            let Entry { version, key: there, value } = self.read(at)?;
            if version != 0 && there != key {
                self.unlock(at, None)?;
                continue;
            }
            let changed = change(value).and_then(|value| match value.len() {
                0..=VALUE => Ok(value),
                _ => Err(format!("a value has at most {VALUE} bytes").into()),
            });
            return match changed {
                Ok(value) => self.unlock(at, Some(&Entry { version: version + 1, key: key.to_vec(), value })),
                Err(error) => self.unlock(at, None).and(Err(error)),
            };
        }
        Err("there is no room for this key".into())
    }

    fn add(&mut self, key: &[u8], number: i64) -> Result<i64> {
        let mut sum = 0;
        self.update(key, |value| {
            let before: i64 = match &value[..] {
                [] => 0,
                text => std::str::from_utf8(text)?.parse()?,
            };
            sum = before.checked_add(number).ok_or("the sum is too large")?;
            Ok(sum.to_string().into_bytes())
        })?;
        Ok(sum)
    }

    fn lock(&mut self, at: u64) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(30);
        while self.connection.compare_and_swap(&self.table, at, 0, self.number)? != 0 {
            self.waited += 1;
            if Instant::now() > end {
                return Err(format!("bucket {} stays locked", at / BUCKET as u64).into());
            }
            thread::yield_now();
        }
        Ok(())
    }

    /// Writes the new entry, if there is one, and then the free lock: in this order, with one doorbell.
    fn unlock(&mut self, at: u64, entry: Option<&Entry>) -> Result<()> {
        let sender = self.connection.sender();
        let mut batch = sender.batch();
        if let Some(entry) = entry {
            self.local.write_at(WRITE + 8, &entry.to_bytes())?;
            batch.write(&self.local, WRITE + 8..WRITE + BUCKET, &self.table, at + 8, None)?;
        }
        batch.write(&self.local, FREE..FREE + 8, &self.table, at, None)?;
        let ticket = batch.post()?;
        Ok(sender.wait(ticket)?)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("number", &self.number).finish_non_exhaustive()
    }
}

// The check.

const COUNTERS: u64 = 4;
const TEXTS: u64 = 16;

fn check(server: &Place, clients: u64, rounds: u64) -> Result<()> {
    let mut first = Client::connect(server)?;
    let before = sum(&mut first)?;
    let start = Instant::now();
    let server = Arc::new(server.clone());
    let threads: Vec<_> = (1..=clients)
        .map(|n| {
            let server = Arc::clone(&server);
            thread::spawn(move || work(&server, n, rounds))
        })
        .collect();
    let (mut torn, mut waited) = (0, 0);
    for thread in threads {
        let client = thread.join().map_err(|_| "a client panicked")??;
        (torn, waited) = (torn + client.torn, waited + client.waited);
    }
    let time = start.elapsed();
    let added = sum(&mut first)? - before;
    let expected = i64::try_from(clients * rounds)?;
    println!(
        "kv: {clients} clients, {:.0} updates/s, {:.0} look-ups/s; {torn} reads met a writer, {waited} attempts a lock",
        (2 * clients * rounds) as f64 / time.as_secs_f64(),
        (2 * clients * rounds) as f64 / time.as_secs_f64()
    );
    if added != expected {
        return Err(format!("{} of {expected} additions were lost", expected - added).into());
    }
    println!("kv: {expected} additions, none lost; no value torn");
    Ok(())
}

fn sum(client: &mut Client) -> Result<i64> {
    (0..COUNTERS).map(|n| client.add(format!("counter {n}").as_bytes(), 0)).sum()
}

fn work(server: &Place, number: u64, rounds: u64) -> Result<Client> {
    let mut client = Client::connect(server)?;
    let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    for round in 0..rounds {
        client.add(format!("counter {}", next(COUNTERS)).as_bytes(), 1)?;
        // The same number eight times: a mixture of two texts would show even if the checksums failed.
        let word = (number << 32 | round).to_le_bytes();
        client.update(format!("text {}", next(TEXTS)).as_bytes(), |_| Ok(word.repeat(VALUE / 8)))?;
        for _ in 0..2 {
            let key = format!("text {}", next(TEXTS));
            if let Some(value) = client.get(key.as_bytes())?
                && (value.len() != VALUE || value.chunks(8).any(|chunk| chunk != &value[..8]))
            {
                return Err(format!("the value of {key:?} is torn: {value:?}").into());
            }
        }
    }
    Ok(client)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn an_entry_survives_its_bytes_and_a_torn_one_is_recognised() {
        let entry = Entry { version: 7, key: b"colour".to_vec(), value: vec![9; VALUE] };
        let bytes = entry.to_bytes();
        assert_eq!(Entry::from_bytes(&bytes), Some(entry.clone()));
        let newer = Entry { version: 8, value: vec![8; VALUE], ..entry }.to_bytes();
        for cut in 1..bytes.len() {
            let torn = [&newer[..cut], &bytes[cut..]].concat();
            let seen = Entry::from_bytes(&torn);
            assert!(torn == newer || torn == bytes || seen.is_none(), "cut at {cut}");
        }
        assert_eq!(Entry::from_bytes(&[0; BUCKET - 8]), Some(Entry::default()), "an empty bucket");
    }
}
