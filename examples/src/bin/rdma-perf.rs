//! `rdma-perf`: latency, bandwidth and message rate of messages, writes, reads and atomics, with perftest's columns.
//!
//! ```console
//! server$ rdma-perf server -a 10.1.2.3
//! client$ rdma-perf send-lat -a 10.1.2.3 -s 2
//! client$ rdma-perf write-bw -a 10.1.2.3 --all --json result.json
//! ```
//!
//! The server serves any test that a client asks for; what is asked travels in the private data of the connection request.
//! Latencies of `send-lat` and `write-lat` are half of a round trip, the others whole ones, as in perftest. MB are 2^20
//! bytes, as there.

use std::error::Error as StdError;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand, ValueEnum};
use hdrhistogram::Histogram;
use rdmacm::{
    AcceptOptions, Access, ConnectRequest, Connection, ConnectionOptions, Connector, EndpointOptions, Listener,
    MemoryRegion, RemoteRegion, Wait, verbs,
};
use rdmacm_examples::{fail, look_up};

type Result<T, E = Box<dyn StdError + Send + Sync>> = std::result::Result<T, E>;

/// Measures what RDMA does here.
#[derive(Debug, Parser)]
#[command(name = "rdma-perf", about, disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Serve clients, one after the other or many at once.
    Server {
        /// Address to listen on.
        #[arg(short = 'a', value_name = "ADDRESS", default_value = "0.0.0.0")]
        address: String,
        /// Port.
        #[arg(short = 'p', default_value_t = 18_515)]
        port: u16,
        /// End after this many clients (each size of a test is one).
        #[arg(long)]
        clients: Option<u64>,
    },
    /// Latency of messages: half the time until the answer.
    SendLat(Measure),
    /// Latency of writes, which the other side sees by polling its memory: half the time until its write.
    WriteLat(Measure),
    /// Latency of reads.
    ReadLat(Measure),
    /// Latency of compare-and-swap.
    CasLat(Measure),
    /// Latency of fetch-and-add.
    AddLat(Measure),
    /// Bandwidth and rate of messages.
    SendBw(Measure),
    /// Bandwidth and rate of writes.
    WriteBw(Measure),
    /// Bandwidth and rate of reads.
    ReadBw(Measure),
}

#[derive(Args, Clone, Debug)]
struct Measure {
    /// The server's address.
    #[arg(short = 'a', value_name = "ADDRESS")]
    address: String,
    /// The server's port.
    #[arg(short = 'p', default_value_t = 18_515)]
    port: u16,
    /// Bytes of each operation [default: 2 for latency, 65536 for bandwidth].
    #[arg(short = 's', value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=1 << 23))]
    size: Option<u32>,
    /// All powers of two from 2 to 8 MiB (messages: to 1 MiB).
    #[arg(long, conflicts_with = "size")]
    all: bool,
    /// How often [default: 1000 for latency, 5000 for bandwidth].
    #[arg(short = 'n', value_name = "COUNT", value_parser = clap::value_parser!(u64).range(10..))]
    count: Option<u64>,
    /// Seconds for each size, instead of a count.
    #[arg(short = 'D', value_name = "SECONDS", conflicts_with = "count")]
    duration: Option<u64>,
    /// Operations in flight (bandwidth).
    #[arg(short = 't', default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=4096))]
    depth: u32,
    /// Operations posted with one doorbell (bandwidth) [default: a quarter of the depth, at most 16].
    #[arg(short = 'l', value_name = "LIST", value_parser = clap::value_parser!(u32).range(1..=4096))]
    list: Option<u32>,
    /// How both sides wait.
    #[arg(long, value_enum, default_value_t = Mode::Adaptive)]
    wait: Mode,
    /// Print the distribution of the latencies.
    #[arg(long)]
    histogram: bool,
    /// Write the results to this file, as a JSON array; `-` is the standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Poll without end.
    Busy,
    /// Sleep at once.
    Sleep,
    /// Poll for a short time, then sleep.
    Adaptive,
}

impl Mode {
    fn wait(self) -> Wait {
        match self {
            Mode::Busy => Wait::Busy,
            Mode::Sleep => Wait::Sleep,
            Mode::Adaptive => Wait::Adaptive,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    SendLat = 1,
    WriteLat,
    ReadLat,
    CasLat,
    AddLat,
    SendBw,
    WriteBw,
    ReadBw,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::SendLat,
        Kind::WriteLat,
        Kind::ReadLat,
        Kind::CasLat,
        Kind::AddLat,
        Kind::SendBw,
        Kind::WriteBw,
        Kind::ReadBw,
    ];

    fn name(self) -> &'static str {
        match self {
            Kind::SendLat => "send-lat",
            Kind::WriteLat => "write-lat",
            Kind::ReadLat => "read-lat",
            Kind::CasLat => "cas-lat",
            Kind::AddLat => "add-lat",
            Kind::SendBw => "send-bw",
            Kind::WriteBw => "write-bw",
            Kind::ReadBw => "read-bw",
        }
    }

    fn is_latency(self) -> bool {
        !matches!(self, Kind::SendBw | Kind::WriteBw | Kind::ReadBw)
    }

    fn sends(self) -> bool {
        matches!(self, Kind::SendLat | Kind::SendBw)
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail("rdma-perf", &*error),
    }
}

fn run(task: Task) -> Result<()> {
    match task {
        Task::Server { address, port, clients } => serve(&address, port, clients),
        Task::SendLat(measure) => client(Kind::SendLat, &measure),
        Task::WriteLat(measure) => client(Kind::WriteLat, &measure),
        Task::ReadLat(measure) => client(Kind::ReadLat, &measure),
        Task::CasLat(measure) => client(Kind::CasLat, &measure),
        Task::AddLat(measure) => client(Kind::AddLat, &measure),
        Task::SendBw(measure) => client(Kind::SendBw, &measure),
        Task::WriteBw(measure) => client(Kind::WriteBw, &measure),
        Task::ReadBw(measure) => client(Kind::ReadBw, &measure),
    }
}

// What both sides agree on.

/// One test of one size.
#[derive(Clone, Copy, Debug)]
struct Plan {
    kind: Kind,
    mode: Mode,
    size: u32,
    depth: u32,
}

impl Plan {
    fn to_bytes(self) -> [u8; 10] {
        let mut bytes = [self.kind as u8, self.mode as u8, 0, 0, 0, 0, 0, 0, 0, 0];
        bytes[2..6].copy_from_slice(&self.size.to_be_bytes());
        bytes[6..].copy_from_slice(&self.depth.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Plan> {
        let bytes: &[u8; 10] = bytes.try_into().ok()?;
        let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        Some(Plan {
            kind: Kind::ALL.into_iter().find(|&kind| kind as u8 == bytes[0])?,
            mode: [Mode::Busy, Mode::Sleep, Mode::Adaptive].into_iter().find(|&mode| mode as u8 == bytes[1])?,
            size: number(2).clamp(1, 1 << 23),
            depth: number(6).clamp(1, 4096),
        })
    }

    fn options(self) -> ConnectionOptions {
        // Messages that are no part of the test carry a region: 24 bytes.
        let message = if self.kind.sends() { self.size.max(24) } else { 24 };
        let endpoint = EndpointOptions::default()
            .message_size(message as usize)
            .max_inline(220)
            .send_depth(if self.kind.is_latency() { 16 } else { self.depth })
            .recv_depth(if self.kind == Kind::SendBw { 2 * self.depth } else { 4 })
            .signal_every(if self.kind.is_latency() { 0 } else { (self.depth / 4).max(1) })
            .wait(self.mode.wait());
        ConnectionOptions::new().endpoint(endpoint)
    }
}

// The server.

fn serve(address: &str, port: u16, clients: Option<u64>) -> Result<()> {
    let listener = Listener::bind(&*look_up(address, port)?)?;
    println!("rdma-perf: listening on {}", listener.local_addr());
    let mut threads = Vec::new();
    for _ in 0..clients.unwrap_or(u64::MAX) {
        let request = listener.request()?;
        threads.retain(|thread: &thread::JoinHandle<()>| !thread.is_finished());
        threads.push(thread::spawn(move || {
            let peer = request.peer_addr();
            if let Err(error) = answer(request) {
                eprintln!("rdma-perf: {peer}: {error}");
            }
        }));
    }
    for thread in threads {
        let _ = thread.join();
    }
    Ok(())
}

fn answer(request: ConnectRequest) -> Result<()> {
    let Some(plan) = request.private_data().data().and_then(Plan::from_bytes) else {
        return Ok(request.reject(b"not a test of rdma-perf")?);
    };
    let region = request.register(plan.size.max(8) as usize, Access::REMOTE_ALL)?;
    let options = AcceptOptions::new().options(plan.options()).private_data(&region.remote().to_bytes());
    let mut connection = request.accept_with(&options)?;
    let ended = match plan.kind {
        Kind::SendLat => echo(&mut connection),
        Kind::WriteLat => write_back(&mut connection, &region, plan.size as usize),
        Kind::SendBw => loop {
            if let Err(error) = connection.recv_buf() {
                break Err(error.into());
            }
        },
        // The client does everything; what comes is its end.
        _ => connection.recv_buf().map(|_| ()).map_err(Into::into),
    };
    match ended {
        // Every test ends with the client's disconnecting.
        Err(error) if !is_the_end(&*error) => Err(error),
        _ => Ok(()),
    }
}

fn is_the_end(error: &(dyn StdError + Send + Sync + 'static)) -> bool {
    let reason = error.downcast_ref::<rdmacm::Error>();
    matches!(reason, Some(rdmacm::Error::Verbs(verbs::Error::Closed(rdmacm::CloseReason::Peer))))
}

fn echo(connection: &mut Connection) -> Result<()> {
    loop {
        let message = connection.recv_buf()?;
        connection.send(&message)?;
    }
}

/// Waits for each write of the client to arrive, and writes the same number back.
fn write_back(connection: &mut Connection, region: &MemoryRegion, size: usize) -> Result<()> {
    let mut bytes = [0; 24];
    connection.recv(&mut bytes)?;
    let target = RemoteRegion::from_bytes(&bytes);
    let local = connection.register(size.max(8), Access::LOCAL_WRITE)?;
    let mut number = 0_u8;
    loop {
        number = number.wrapping_add(1);
        if !poll_for(region, size, number, connection)? {
            return Ok(());
        }
        local.write_at(size - 1, &[number])?;
        post(connection, &local, size, &target)?;
    }
}

/// Polls the last byte until it is the number. `false` if the connection ended first.
fn poll_for(region: &MemoryRegion, size: usize, number: u8, connection: &Connection) -> Result<bool> {
    let mut byte = [0];
    loop {
        for _ in 0..1000 {
            region.read_at(size - 1, &mut byte)?;
            if byte[0] == number {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        if connection.cause().is_some() {
            return Ok(false);
        }
        // Where there are fewer processors than pollers, the other one must get its turn.
        thread::yield_now();
    }
}

fn post(connection: &mut Connection, local: &MemoryRegion, size: usize, target: &RemoteRegion) -> Result<()> {
    loop {
        match connection.sender().post_write(local, 0..size, target, 0, None) {
            Ok(_) => return Ok(()),
            Err(rdmacm::Error::Verbs(verbs::Error::WouldBlock)) => {
                connection.sender().wait_any()?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

// The client.

/// What was measured for one size.
struct Outcome {
    plan: Plan,
    count: u64,
    time: Duration,
    /// In nanoseconds; empty for bandwidth.
    latencies: Histogram<u64>,
    /// In MB/s.
    peak: f64,
    /// Processor time of this thread.
    cpu: Duration,
}

fn client(kind: Kind, measure: &Measure) -> Result<()> {
    let sizes: Vec<u32> = match (measure.all, measure.size) {
        (true, _) => (1..=if kind.sends() { 20 } else { 23 }).map(|bits| 1 << bits).collect(),
        (false, Some(size)) => vec![size],
        (false, None) if matches!(kind, Kind::CasLat | Kind::AddLat) => vec![8],
        (false, None) => vec![if kind.is_latency() { 2 } else { 65_536 }],
    };
    let mut results = Vec::new();
    for (n, size) in sizes.into_iter().enumerate() {
        let plan = Plan { kind, mode: measure.wait, size, depth: measure.depth };
        let mut connector = Connector::new().options(plan.options());
        connector = connector.private_data(&plan.to_bytes());
        let mut connection = connector.connect(&*look_up(&measure.address, measure.port)?)?;
        if n == 0 {
            describe(&connection, plan)?;
        }
        let outcome = run_one(&mut connection, plan, measure)?;
        print_line(&outcome, measure)?;
        results.push(outcome);
        connection.disconnect()?;
    }
    if let Some(file) = &measure.json {
        let text = json(&results);
        match &**file {
            "-" => println!("{text}"),
            file => fs::write(file, text + "\n")?,
        }
    }
    Ok(())
}

/// The device and the way, then the names of the columns.
fn describe(connection: &Connection, plan: Plan) -> Result<()> {
    let (device, qp) = (connection.device(), connection.queue_pair_attributes()?);
    let port = device.context().port(qp.port)?;
    let local = connection.local_addr().ip();
    let gid = device.context().gid_table()?.into_iter().find(|entry| {
        entry.kind == verbs::GidType::RoceV2
            && (entry.ipv4().map(Into::into) == Some(local) || std::net::IpAddr::from(entry.gid) == local)
    });
    println!(
        "{}: device {} port {}, {:?}, GID index {}, MTU {}, {:?} waiting",
        plan.kind.name(),
        device.name(),
        qp.port,
        port.link_layer,
        gid.map_or("none".to_owned(), |gid| gid.index.to_string()),
        qp.path_mtu,
        plan.mode
    );
    match plan.kind.is_latency() {
        true => println!(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   \
             99% percentile[usec]   99.9% percentile[usec]"
        ),
        false => println!(" #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]"),
    }
    Ok(())
}

fn run_one(connection: &mut Connection, plan: Plan, measure: &Measure) -> Result<Outcome> {
    let remote = connection.private_data().data().and_then(|data| data.try_into().ok());
    let remote = RemoteRegion::from_bytes(remote.ok_or("the server did not say where its memory is")?);
    let region = connection.register(plan.size.max(8) as usize, Access::REMOTE_ALL)?;
    let mut work = Work { connection, plan, remote, region, local: None, number: 0 };
    work.prepare()?;
    let mut outcome =
        Outcome { plan, count: 0, time: Duration::ZERO, latencies: Histogram::new(3)?, peak: 0.0, cpu: Duration::ZERO };
    let count = match (measure.count, measure.duration) {
        (_, Some(_)) => u64::MAX,
        (Some(count), None) => count,
        (None, None) if plan.kind.is_latency() => 1000,
        (None, None) => 5000,
    };
    let limit = measure.duration.map(Duration::from_secs);
    if plan.kind.is_latency() {
        for _ in 0..20 {
            work.once()?;
        }
    }
    let (start, cpu) = (Instant::now(), cpu_time());
    let mut told = start;
    let over = |now: Instant| limit.is_some_and(|limit| now - start >= limit);
    if plan.kind.is_latency() {
        let half = if matches!(plan.kind, Kind::SendLat | Kind::WriteLat) { 2 } else { 1 };
        let mut before = start;
        while outcome.count < count && !over(before) {
            work.once()?;
            let now = Instant::now();
            outcome.latencies.record((now - before).as_nanos() as u64 / half)?;
            outcome.count += 1;
            before = now;
            progress(&mut told, now, start, outcome.count);
        }
    } else {
        let list = u64::from(measure.list.unwrap_or((plan.depth / 4).clamp(1, 16)).min(plan.depth));
        let (mut mark, mut marked) = (start, 0);
        loop {
            let now = Instant::now();
            if outcome.count >= count || over(now) {
                break;
            }
            work.many(list.min(count - outcome.count))?;
            outcome.count += list.min(count - outcome.count);
            // The best of the stretches of at least two queues full.
            if outcome.count - marked >= 2 * u64::from(plan.depth) {
                let now = Instant::now();
                outcome.peak = outcome.peak.max(megabytes(plan.size, outcome.count - marked, now - mark));
                (mark, marked) = (now, outcome.count);
            }
            progress(&mut told, now, start, outcome.count);
        }
        work.connection.flush()?;
    }
    outcome.time = start.elapsed();
    outcome.cpu = cpu_time().saturating_sub(cpu);
    let average = megabytes(plan.size, outcome.count, outcome.time);
    outcome.peak = outcome.peak.max(average);
    Ok(outcome)
}

struct Work<'a> {
    connection: &'a mut Connection,
    plan: Plan,
    remote: RemoteRegion,
    /// What the server may write to.
    region: MemoryRegion,
    /// What is sent.
    local: Option<MemoryRegion>,
    number: u8,
}

impl Work<'_> {
    fn prepare(&mut self) -> Result<()> {
        let size = self.plan.size.max(8) as usize;
        if self.plan.kind == Kind::WriteLat {
            let bytes = self.region.remote().to_bytes();
            self.connection.send(&bytes)?;
            self.local = Some(self.connection.register(size, Access::LOCAL_WRITE)?);
        }
        Ok(())
    }

    /// One operation, until its end is seen.
    fn once(&mut self) -> Result<()> {
        let size = self.plan.size as usize;
        match self.plan.kind {
            Kind::SendLat => {
                self.message()?;
                self.connection.recv_buf()?;
            }
            Kind::WriteLat => {
                self.number = self.number.wrapping_add(1);
                let local = self.local.as_ref().expect("prepared");
                local.write_at(size - 1, &[self.number])?;
                post(self.connection, local, size, &self.remote)?;
                if !poll_for(&self.region, size, self.number, self.connection)? {
                    return Err(self.connection.cause().map_or("the connection is over".into(), Into::into));
                }
            }
            Kind::ReadLat => self.connection.read(&self.region, 0..size, &self.remote, 0)?,
            Kind::CasLat => {
                self.connection.compare_and_swap(&self.remote, 0, 0, 0)?;
            }
            Kind::AddLat => {
                self.connection.fetch_and_add(&self.remote, 0, 1)?;
            }
            _ => unreachable!("bandwidth is measured with many"),
        }
        Ok(())
    }

    /// A message of the size, copied if it fits into the request, else from a registered buffer.
    fn message(&mut self) -> Result<()> {
        const SMALL: [u8; 220] = [7; 220];
        let size = self.plan.size as usize;
        if let Some(data) = SMALL.get(..size) {
            return Ok(self.connection.send(data)?);
        }
        let mut buffer = self.connection.alloc()?;
        buffer.set_len(size);
        self.connection.send_buf(buffer).map_err(|(error, _)| error.into())
    }

    /// Posts that many operations with one doorbell, waiting for room as long as needed.
    fn many(&mut self, count: u64) -> Result<()> {
        let size = self.plan.size as usize;
        if self.plan.kind == Kind::SendBw && size > 220 {
            // Each in a buffer of its own, which is waited for.
            for _ in 0..count {
                self.message()?;
            }
            return Ok(());
        }
        const SMALL: [u8; 220] = [7; 220];
        let sender = self.connection.sender();
        let mut left = count;
        while left > 0 {
            let mut batch = sender.batch();
            while left > 0 {
                let added = match self.plan.kind {
                    Kind::SendBw => batch.send(&SMALL[..size]),
                    Kind::ReadBw => batch.read(&self.region, 0..size, &self.remote, 0),
                    _ => batch.write(&self.region, 0..size, &self.remote, 0, None),
                };
                match added {
                    Ok(()) => left -= 1,
                    Err(verbs::Error::WouldBlock) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            batch.post()?;
            if left > 0 {
                sender.wait_any()?;
            }
        }
        Ok(())
    }
}

/// Tells once a second how far a long run is, on the standard error output.
fn progress(told: &mut Instant, now: Instant, start: Instant, count: u64) {
    if now - *told >= Duration::from_secs(1) {
        *told = now;
        let _ = writeln!(std::io::stderr(), "rdma-perf: {count} after {:.0} s", (now - start).as_secs_f64());
    }
}

/// Processor time that this thread used; zero where the kernel does not say.
fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0))
}

// Results.

fn megabytes(size: u32, count: u64, time: Duration) -> f64 {
    f64::from(size) * count as f64 / time.as_secs_f64() / f64::from(1 << 20)
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

fn print_line(outcome: &Outcome, measure: &Measure) -> Result<()> {
    let Outcome { plan, count, time, latencies, peak, cpu } = outcome;
    if !plan.kind.is_latency() {
        let average = megabytes(plan.size, *count, *time);
        let rate = *count as f64 / time.as_secs_f64() / 1e6;
        println!(" {:<10} {count:<14} {peak:<18.2} {average:<20.2} {rate:.6}", plan.size);
    } else {
        let at = |quantile: f64| micros(latencies.value_at_quantile(quantile));
        println!(
            " {:<6} {count:<14} {:<14.2} {:<14.2} {:<16.2} {:<14.2} {:<16.2} {:<22.2} {:.2}",
            plan.size,
            micros(latencies.min()),
            micros(latencies.max()),
            at(0.5),
            latencies.mean() / 1000.0,
            latencies.stdev() / 1000.0,
            at(0.99),
            at(0.999)
        );
    }
    if measure.histogram && plan.kind.is_latency() {
        let mut last = 0;
        for step in latencies.iter_log(1000, 2.0) {
            let seen = step.count_since_last_iteration();
            let upper = step.value_iterated_to() + 1;
            if seen > 0 {
                let bar = "#".repeat((60 * seen / *count) as usize);
                println!("   {:>10.1} to {:>10.1} usec {seen:>10} {bar}", micros(last), micros(upper));
            }
            last = upper;
        }
    }
    log_cpu(*cpu, *time);
    std::io::stdout().flush()?;
    Ok(())
}

fn log_cpu(cpu: Duration, time: Duration) {
    if cpu > Duration::ZERO {
        let _ = writeln!(
            std::io::stderr(),
            "rdma-perf: {:.0} % of a processor",
            100.0 * cpu.as_secs_f64() / time.as_secs_f64()
        );
    }
}

fn json(results: &[Outcome]) -> String {
    let mut text = String::from("[");
    for (n, Outcome { plan, count, time, latencies, peak, cpu }) in results.iter().enumerate() {
        text.push_str(if n == 0 { "\n" } else { ",\n" });
        let mut field = |name: &str, value: &dyn std::fmt::Display| {
            let first = text.ends_with('\n');
            let start = if first { "  {" } else { ", " };
            write!(text, "{start}\"{name}\": {value}").expect("writing to a string");
        };
        field("test", &format_args!("\"{}\"", plan.kind.name()));
        field("wait", &format_args!("\"{:?}\"", plan.mode));
        field("bytes", &plan.size);
        field("iterations", count);
        field("seconds", &time.as_secs_f64());
        field("cpu_seconds", &cpu.as_secs_f64());
        if plan.kind.is_latency() {
            for (name, quantile) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("p9999", 0.9999)] {
                field(&format!("{name}_usec"), &micros(latencies.value_at_quantile(quantile)));
            }
            field("min_usec", &micros(latencies.min()));
            field("max_usec", &micros(latencies.max()));
            field("mean_usec", &(latencies.mean() / 1000.0));
            field("stdev_usec", &(latencies.stdev() / 1000.0));
        } else {
            field("mb_per_second", &megabytes(plan.size, *count, *time));
            field("peak_mb_per_second", peak);
            field("mpps", &(*count as f64 / time.as_secs_f64() / 1e6));
        }
        text.push('}');
    }
    text.push_str("\n]");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn a_plan_survives_its_bytes_and_garbage_is_none() {
        for kind in Kind::ALL {
            let plan = Plan { kind, mode: Mode::Sleep, size: 12345, depth: 77 };
            let back = Plan::from_bytes(&plan.to_bytes()).expect("whole");
            assert_eq!((back.kind, back.mode, back.size, back.depth), (kind, Mode::Sleep, 12345, 77));
        }
        assert!(Plan::from_bytes(&[]).is_none() && Plan::from_bytes(&[99; 10]).is_none());
    }

    #[test]
    fn results_are_valid_json() {
        let mut latencies = Histogram::new(3).expect("a histogram");
        latencies.record(1500).expect("recorded");
        let plan = Plan { kind: Kind::ReadLat, mode: Mode::Busy, size: 8, depth: 1 };
        let second = Duration::from_secs(1);
        let outcome = Outcome { plan, count: 1, time: second, latencies, peak: 1.0, cpu: second };
        let text = json(&[outcome]);
        assert!(text.starts_with("[\n  {\"test\": \"read-lat\", \"wait\": \"Busy\", \"bytes\": 8,"), "{text}");
        assert!(text.contains("\"p50_usec\": 1.5") && text.ends_with("}\n]"), "{text}");
    }
}
