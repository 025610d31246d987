//! Two ends joined by a model of the wire, and a peer that sends anything.

use std::collections::VecDeque;
use std::net::Shutdown;

use proptest::prelude::*;

use super::*;

/// Where an end's memory begins, for its peer: the array, then the ring.
const BASE: u64 = 0x7f00_0000_0000;
const KEY: u32 = 0xabc;

/// A message on its way: what it writes, where, and its word.
#[derive(Clone, Debug)]
struct Packet {
    addr: u64,
    key: u32,
    bytes: Vec<u8>,
    word: u32,
}

/// One end, with its memory.
struct End {
    opening: Opening,
    sender: Sender,
    incoming: Incoming,
    memory: Vec<u8>,
    out: VecDeque<Packet>,
    sent: u64,
    read: u64,
}

const RING: usize = ENTRIES * Sge::LEN;

fn hello(order: Order, credits: u16, half: u32) -> Hello {
    let buffer = Sge { addr: BASE + RING as u64, key: KEY, len: half };
    Hello { order, ..Hello::new(credits, (BASE, KEY), buffer) }
}

fn pattern(position: u64) -> u8 {
    (position.wrapping_mul(167) >> 3) as u8
}

impl End {
    fn new(ours: Hello, peers: Hello) -> Self {
        // As it goes over the wire.
        let peers = Hello::from_bytes(&peers.to_bytes()).expect("an honest peer");
        let opening = Opening { ours, peers };
        Self {
            opening,
            sender: Sender::new(&opening),
            incoming: Incoming::new(&opening),
            memory: vec![0; RING + 2 * ours.buffer.len as usize],
            out: VecDeque::new(),
            sent: 0,
            read: 0,
        }
    }

    /// Sends up to `want` bytes of the pattern, in segments of at most `chunk`.
    fn write(&mut self, mut want: usize, chunk: usize) -> usize {
        let mut done = 0;
        for credit in self.incoming.take_credits() {
            self.sender.credit(credit.limit, credit.entry).expect("an honest peer");
        }
        while want > 0
            && let Some(segment) = self.sender.segment(want.min(chunk))
        {
            let bytes = (0..segment.len as u64).map(|i| pattern(self.sent + i)).collect();
            let word = self.sender.sent(&segment).word();
            self.out.push_back(Packet { addr: segment.addr, key: segment.key, bytes, word });
            self.sent += segment.len as u64;
            want -= segment.len;
            done += segment.len;
        }
        done
    }

    /// Reads up to `want` bytes, which must be the pattern's.
    fn read(&mut self, want: usize) -> usize {
        let mut done = 0;
        while done < want {
            let range = self.incoming.receiver.readable(0, want - done);
            if range.is_empty() {
                break;
            }
            for place in range.clone() {
                assert_eq!(self.memory[RING + place], pattern(self.read), "byte {}", self.read);
                self.read += 1;
            }
            self.incoming.receiver.consume(range.len());
            done += range.len();
            self.incoming.receiver.invariants();
        }
        done
    }

    fn tell(&mut self) {
        if let Some(update) = self.incoming.receiver.update(&self.opening) {
            let word = update.message.word();
            let (addr, key, bytes) =
                update.entry.map_or((0, 0, Vec::new()), |entry| (entry.addr, entry.key, entry.bytes.to_vec()));
            self.out.push_back(Packet { addr, key, bytes, word });
        }
        self.incoming.receiver.invariants();
    }

    /// What the device and then the program do with a packet.
    fn arrive(&mut self, packet: &Packet) -> Result<Event, Violation> {
        if !packet.bytes.is_empty() {
            assert_eq!(packet.key, KEY);
            let at = packet.addr.checked_sub(BASE).expect("not below the memory") as usize;
            self.memory[at..at + packet.bytes.len()].copy_from_slice(&packet.bytes);
        }
        self.message(packet.word, packet.bytes.len() as u32)
    }

    fn message(&mut self, word: u32, written: u32) -> Result<Event, Violation> {
        let memory = &self.memory;
        let event = self.incoming.message(Some(word), written, |index| {
            memory[index * Sge::LEN..(index + 1) * Sge::LEN].try_into().expect("an entry")
        });
        self.incoming.receiver.invariants();
        event
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { by: usize, len: usize, chunk: usize },
    Read { by: usize, len: usize },
    Deliver { to: usize, count: usize },
    Tell { by: usize },
}

fn steps(count: usize) -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![1..20_usize, 1..5000_usize, Just(1 << 20)];
    let step = prop_oneof![
        (0..2_usize, len.clone(), prop_oneof![1..9_usize, Just(2048), Just(1 << 20)])
            .prop_map(|(by, len, chunk)| Step::Write { by, len, chunk }),
        (0..2_usize, len).prop_map(|(by, len)| Step::Read { by, len }),
        (0..2_usize, 1..8_usize).prop_map(|(to, count)| Step::Deliver { to, count }),
        (0..2_usize).prop_map(|by| Step::Tell { by }),
    ];
    prop::collection::vec(step, 0..count)
}

fn deliver(ends: &mut [End; 2], to: usize, count: usize) {
    for _ in 0..count {
        let Some(packet) = ends[1 - to].out.pop_front() else { return };
        ends[to].arrive(&packet).expect("an honest peer");
    }
}

proptest! {
    #[test]
    fn every_byte_arrives_in_order(
        steps in steps(200), credits in (1_u16..40, 1_u16..40), halves in (1_u32..3000, 1_u32..3000), big: bool,
    ) {
        // The order of a model peer's own memory is this machine's; what is told in the other order is checked elsewhere.
        let _ = big;
        let a = hello(Order::NATIVE, credits.0, halves.0);
        let b = hello(Order::NATIVE, credits.1, halves.1);
        let mut ends = [End::new(a, b), End::new(b, a)];
        for step in steps {
            match step {
                Step::Write { by, len, chunk } => drop(ends[by].write(len, chunk)),
                Step::Read { by, len } => drop(ends[by].read(len)),
                Step::Deliver { to, count } => deliver(&mut ends, to, count),
                Step::Tell { by } => ends[by].tell(),
            }
        }
        // Whatever happened, it goes on: both can send much more than everything holds.
        for by in 0..2 {
            let goal = ends[by].sent + 20_000;
            let mut rounds = 0;
            while ends[by].sent < goal {
                let want = (goal - ends[by].sent) as usize;
                ends[by].write(want, 512);
                deliver(&mut ends, 1 - by, usize::MAX);
                ends[1 - by].read(usize::MAX);
                ends[1 - by].tell();
                deliver(&mut ends, by, usize::MAX);
                rounds += 1;
                prop_assert!(rounds < 50_000, "stuck at {} of {goal}", ends[by].sent);
            }
            deliver(&mut ends, 1 - by, usize::MAX);
            ends[1 - by].read(usize::MAX);
            prop_assert_eq!(ends[by].sent, ends[1 - by].read);
        }
    }

    #[test]
    fn no_peer_makes_it_panic_or_believe_in_bytes_that_are_not_there(
        words in prop::collection::vec((any::<u32>(), 0_u32..6, any::<u32>()), 0..100), entries: Vec<u8>,
        credits in 1_u16.., half in 1_u32..100_000,
    ) {
        hostile(&words, &entries, credits, half);
    }

    #[test]
    fn any_private_data_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..60), patch in any::<[u8; 4]>()) {
        let _ = Hello::from_bytes(&bytes);
        // One that is nearly right.
        let mut nearly = hello(Order::Big, 384, 65536).to_bytes();
        nearly[usize::from(patch[0]) % HELLO_LEN] = patch[1];
        nearly[usize::from(patch[2]) % HELLO_LEN] = patch[3];
        if let Ok(peers) = Hello::from_bytes(&nearly) {
            let opening = Opening { ours: hello(Order::NATIVE, 16, 1024), peers };
            let mut receiver = Receiver::new(&opening);
            let update = receiver.update(&opening).expect("the second half is free");
            prop_assert!(update.entry.is_some());
            let _ = Sender::new(&opening).segment(100);
        }
    }

    #[test]
    fn an_entry_survives_its_bytes(addr: u64, key: u32, len: u32) {
        let sge = Sge { addr, key, len };
        for order in [Order::Little, Order::Big] {
            prop_assert_eq!(Sge::from_bytes(&sge.to_bytes(order), order), sge);
        }
    }

    #[test]
    fn a_word_is_read_as_it_was_written(value in 1..1_u32 << 29, limit: u16, entry: bool) {
        let cases = [
            (Message::Data(value), value), (Message::Credit { limit, entry }, if entry { 16 } else { 0 }),
            (Message::Shutdown, 0), (Message::Disconnect, 0), (Message::Keepalive, 0),
        ];
        for (message, written) in cases {
            prop_assert_eq!(Message::read(Some(message.word()), written), Ok(message));
        }
    }
}

/// Feeds an end with words, each with a length that is right, wrong or arbitrary, and with entries full of anything.
fn hostile(words: &[(u32, u32, u32)], entries: &[u8], credits: u16, half: u32) {
    let ours = hello(Order::NATIVE, credits, half);
    let mut end = End::new(ours, hello(Order::NATIVE, credits, half));
    for (place, byte) in end.memory[..RING].iter_mut().zip(entries.iter().cycle()) {
        *place = *byte;
    }
    for &(word, choice, other) in words {
        // Half of them nearly honest.
        let (word, written) = match choice {
            0 => (word % half.max(1) % (1 << 29), word % half.max(1)),
            1 => ((4 << 29) | (word & 0xffff), other % 2 * 16),
            2 => ((7 << 29) | (word % 4), 0),
            3 => (word, word & 0x1fff_ffff),
            _ => (word, other),
        };
        let before = end.incoming.receiver.available();
        let event = end.message(word, written);
        let gained = end.incoming.receiver.available() - before;
        assert!(gained <= written as usize && end.incoming.receiver.available() <= 2 * half as usize);
        for credit in end.incoming.take_credits() {
            let _ = end.sender.credit(credit.limit, credit.entry);
        }
        while let Some(segment) = end.sender.segment(usize::MAX) {
            assert!(segment.addr.checked_add(segment.len as u64).is_some());
            end.sender.sent(&segment);
        }
        let readable = end.incoming.receiver.readable(0, usize::MAX);
        assert!(readable.end <= 2 * half as usize);
        end.incoming.receiver.consume(readable.len());
        end.incoming.receiver.update(&end.opening);
        end.incoming.receiver.invariants();
        if event.is_err() {
            // The connection would end here; to go on must do no harm either.
        }
    }
}

#[test]
fn millions_of_hostile_messages() {
    // A fuzzer's work for those who ask for it.
    let rounds = if std::env::var("RDMACM_SOAK").is_ok_and(|value| value == "1") { 2_000_000 } else { 2_000 };
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as u32
    };
    for _ in 0..rounds {
        let words: Vec<_> = (0..random() % 40).map(|_| (random(), random() % 6, random())).collect();
        let entries: Vec<_> = (0..RING).map(|_| random() as u8 & if random() % 4 == 0 { 0xff } else { 0 }).collect();
        hostile(&words, &entries, (random() as u16).max(1), random() % 70_000 + 1);
    }
}

#[test]
fn the_private_data_is_rsockets() {
    // As seen on the wire: 384 credits, an array of two entries, 64 KiB of buffer.
    let entries = Sge { addr: 0x0102_0304_0506_0708, key: 0x1112_1314, len: 2 };
    let buffer = Sge { addr: 0x2122_2324_2526_2728, key: 0x3132_3334, len: 0x1_0000 };
    let hello = Hello { order: Order::Little, credits: 384, entries, buffer };
    let wire = [
        1, 2, 1, 0x80, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 2, 0x21, 0x22, 0x23, 0x24,
        0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34, 0, 1, 0, 0,
    ];
    assert_eq!(hello.to_bytes(), wire);
    let mut padded = wire.to_vec();
    padded.resize(196, 0);
    assert_eq!(Hello::from_bytes(&padded), Ok(hello));
    assert_eq!(Hello::from_bytes(&wire[..39]), Err(Violation::HelloTooShort(39)));
    assert_eq!(Hello::from_bytes(&[]), Err(Violation::HelloTooShort(0)));
    assert_eq!(Hello::from_bytes(&[2; 40]), Err(Violation::Version(2)));
    assert_eq!(Hello::from_bytes(&[2]), Err(Violation::Version(2)));
    for zeroed in [2..4, 20..24, 36..40] {
        let mut bad = wire;
        bad[zeroed].fill(0);
        assert_eq!(Hello::from_bytes(&bad), Err(Violation::BadHello));
    }
    let mut wraps = wire;
    wraps[24..32].fill(0xff);
    assert_eq!(Hello::from_bytes(&wraps), Err(Violation::BadHello));
}

#[test]
fn entries_are_written_in_the_peers_byte_order() {
    for order in [Order::Little, Order::Big] {
        let opening = Opening { ours: hello(Order::NATIVE, 16, 4096), peers: hello(order, 16, 4096) };
        let mut receiver = Receiver::new(&opening);
        let update = receiver.update(&opening).expect("the second half is free from the start");
        let entry = update.entry.expect("with its entry");
        let half1 = Sge { addr: BASE + RING as u64 + 4096, key: KEY, len: 4096 };
        assert_eq!(Sge::from_bytes(&entry.bytes, order), half1);
        assert_eq!((entry.addr, entry.key), (BASE + 16, KEY), "into entry 1 first");
        assert_eq!(update.message, Message::Credit { limit: 16, entry: true });
        assert_eq!(receiver.update(&opening), None, "once");
    }
}

fn receiver(credits: u16, half: u32) -> (Receiver, Opening) {
    let opening = Opening { ours: hello(Order::NATIVE, credits, half), peers: hello(Order::NATIVE, credits, half) };
    (Receiver::new(&opening), opening)
}

#[test]
fn data_beyond_what_was_published_is_refused() {
    let (mut receiver, opening) = receiver(16, 100);
    assert_eq!(receiver.data(101), Err(Violation::TooMuchData { bytes: 101, room: 100 }));
    receiver.data(100).expect("the first half");
    assert_eq!(receiver.data(1), Err(Violation::TooMuchData { bytes: 1, room: 0 }), "the second is not published");
    receiver.update(&opening).expect("publishes it");
    receiver.data(60).expect("a part");
    assert_eq!(receiver.data(41), Err(Violation::TooMuchData { bytes: 41, room: 40 }));
    receiver.consume(99);
    assert_eq!(receiver.update(&opening), None, "the first half is not read to its end");
    receiver.consume(1);
    assert!(receiver.update(&opening).expect("now it is").entry.is_some());
    assert_eq!(receiver.data(41), Err(Violation::TooMuchData { bytes: 41, room: 40 }), "not across the end of a half");
}

#[test]
fn credits_are_renewed_when_half_are_used() {
    let (mut receiver, opening) = receiver(16, 1000);
    receiver.update(&opening).expect("the second half");
    for n in 1..=40_u16 {
        receiver.data(1).expect("room");
        let limit = receiver.update(&opening).map(|update| update.message);
        let expected = n.is_multiple_of(8).then_some(Message::Credit { limit: n + 16, entry: false });
        assert_eq!(limit, expected, "after {n}");
    }
}

#[test]
fn limits_must_not_run_backwards_nor_beyond_the_queue() {
    let opening = Opening { ours: hello(Order::NATIVE, 16, 100), peers: hello(Order::NATIVE, 16, 100) };
    for start in [0_u16, 65_530] {
        let mut sender = Sender::new(&opening);
        for n in 0..start {
            sender.credit(n.wrapping_add(16), None).expect("an honest limit");
            sender.skip();
        }
        assert!(sender.credit(start.wrapping_add(17), None).is_err(), "more than the queue holds");
        assert!(sender.credit(start.wrapping_add(14), None).is_err(), "less than was granted");
        sender.credit(start.wrapping_add(16), None).expect("all of it");
        assert!(sender.credit(start.wrapping_sub(1), None).is_err(), "behind what was sent");
    }
}

#[test]
fn entries_must_be_free_and_possible() {
    let opening = Opening { ours: hello(Order::NATIVE, 16, 100), peers: hello(Order::NATIVE, 16, 100) };
    let mut sender = Sender::new(&opening);
    let sge = Sge { addr: 4096, key: 1, len: 100 };
    assert_eq!(sender.credit(16, Some(Sge { len: 0, ..sge })), Err(Violation::BadEntry));
    assert_eq!(sender.credit(16, Some(Sge { addr: u64::MAX - 50, ..sge })), Err(Violation::BadEntry));
    sender.credit(16, Some(sge)).expect("entry 1 is free");
    assert_eq!(sender.credit(16, Some(sge)), Err(Violation::EntryInUse), "entry 0 was not filled yet");
    let segment = sender.segment(1000).expect("room");
    assert_eq!(segment.len, 100, "not across the end of a half");
    sender.sent(&segment);
    assert_eq!(sender.segment(1000).expect("room").addr, 4096);
    sender.credit(16, Some(sge)).expect("entry 0 was filled");
}

#[test]
fn words_that_mean_nothing_are_refused() {
    for kind in [1, 2, 3, 5] {
        assert_eq!(Message::read(Some(kind << 29), 0), Err(Violation::ReservedKind(kind as u8)));
    }
    assert_eq!(Message::read(Some(6 << 29), 24), Err(Violation::NoMappings));
    assert_eq!(Message::read(Some(7 << 29 | 3), 0), Err(Violation::UnknownControl(3)));
    assert_eq!(Message::read(Some(7 << 29), 1), Err(Violation::WrongLength { announced: 0, written: 1 }));
    assert_eq!(Message::read(None, 5), Err(Violation::NoWord));
    assert_eq!(Message::read(Some(0), 0), Err(Violation::WrongLength { announced: 0, written: 0 }));
    assert_eq!(Message::read(Some(10), 9), Err(Violation::WrongLength { announced: 10, written: 9 }));
    assert_eq!(
        Message::read(Some(4 << 29 | 70_000), 0),
        Ok(Message::Credit { limit: 70_000_u32 as u16, entry: false })
    );
    assert_eq!(Message::read(Some(4 << 29), 8), Err(Violation::WrongLength { announced: 16, written: 8 }));
}

#[test]
fn data_after_the_end_is_refused() {
    for end in [Message::Shutdown, Message::Disconnect] {
        let ours = hello(Order::NATIVE, 16, 100);
        let mut peer = End::new(ours, ours);
        peer.message(Message::Data(1).word(), 1).expect("room");
        peer.message(end.word(), 0).expect("an end");
        assert_eq!(peer.message(Message::Data(1).word(), 1), Err(Violation::DataAfterEnd));
        assert_eq!(peer.incoming.receiver.available(), 1, "what came before stays");
    }
}

#[test]
fn more_credits_wait_than_an_honest_peer_has_halves() {
    let ours = hello(Order::NATIVE, 16, 100);
    let mut end = End::new(ours, ours);
    let word = Message::Credit { limit: 16, entry: true }.word();
    for _ in 0..=ENTRIES {
        end.message(word, 16).expect("they may wait");
    }
    assert_eq!(end.message(word, 16), Err(Violation::EntryInUse));
    end.message(word, 0).expect("a limit alone joins the last");
}

#[test]
fn shutting_down_says_what_rsocket_says() {
    let open = Ends::default();
    let (half, said) = open.shut(Shutdown::Write);
    assert_eq!(said, Some(Message::Shutdown));
    assert!(half.reads() && !half.writes() && !half.is_over());
    assert_eq!(half.shut(Shutdown::Write).1, None, "once");
    assert_eq!(half.shut(Shutdown::Read).1, Some(Message::Disconnect), "nothing is left open");
    assert_eq!(half.shut(Shutdown::Both).1, Some(Message::Disconnect));
    let over = half.on_shutdown();
    assert!(over.is_over() && over.peer_ended() && !over.peer_gone());
    assert_eq!(over.shut(Shutdown::Both).1, Some(Message::Disconnect));

    let (deaf, said) = open.shut(Shutdown::Read);
    assert_eq!(said, None, "the peer is not told that nobody reads");
    assert!(!deaf.reads() && deaf.writes());
    assert_eq!(deaf.shut(Shutdown::Write).1, Some(Message::Disconnect));

    assert_eq!(open.on_shutdown().shut(Shutdown::Write).1, Some(Message::Disconnect), "the second to close says so");
    let (gone, said) = open.on_disconnect().shut(Shutdown::Both);
    assert_eq!(said, None, "nobody is there to hear it");
    assert!(gone.is_over() && !gone.reads() && !gone.writes());
    let (both, _) = open.shut(Shutdown::Both);
    assert_eq!(both.shut(Shutdown::Both).1, None);
    assert_eq!(Ends::from_bits(both.bits()), both);
}
