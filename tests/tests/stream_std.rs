//! What std's own tests expect of `TcpStream` and `TcpListener`, for ours.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{RdmaListener, RdmaStream};
use rdmacm_tests::{Family, Lab, lab};

/// Runs a test with an address of each family.
fn each_ip(test: impl Fn(&Lab, SocketAddr) -> io::Result<()>) -> io::Result<()> {
    let Some(lab) = lab(120) else { return Ok(()) };
    for family in [Family::V4, Family::V6] {
        test(&lab, lab.server(family))?;
    }
    Ok(())
}

/// A server's thread, which accepts one stream and does something with it.
fn serve<T: Send + 'static>(
    listener: RdmaListener,
    work: impl FnOnce(RdmaStream) -> io::Result<T> + Send + 'static,
) -> thread::JoinHandle<io::Result<T>> {
    thread::spawn(move || work(listener.accept()?.0))
}

fn join<T>(thread: thread::JoinHandle<io::Result<T>>) -> io::Result<T> {
    thread.join().expect("no panic")
}

#[test]
fn bind_error() -> io::Result<()> {
    let Some(_lab) = lab(20) else { return Ok(()) };
    let error = RdmaListener::bind("1.1.1.1:9999").expect_err("not ours");
    assert_eq!(error.kind(), ErrorKind::AddrNotAvailable, "{error}");
    let error = RdmaListener::bind("127.0.0.1:0").expect_err("loopback");
    assert_eq!(error.kind(), ErrorKind::AddrNotAvailable, "{error}");
    Ok(())
}

#[test]
fn connect_error() -> io::Result<()> {
    each_ip(|_, address| {
        let error = RdmaStream::connect(address).expect_err("nobody listens");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
        Ok(())
    })
}

#[test]
fn connect_timeout_to_unroutable_and_valid_addresses() -> io::Result<()> {
    each_ip(|lab, address| {
        let error = RdmaStream::connect_timeout(&address, Duration::ZERO).expect_err("zero");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, Ok);
        drop(RdmaStream::connect_timeout(&address, Duration::from_secs(2))?);
        drop(join(server)?);
        // Nobody has this address in our network.
        let mut nobody = lab.server(Family::V4);
        nobody.set_ip("10.77.0.99".parse().expect("a literal"));
        let start = Instant::now();
        let error = RdmaStream::connect_timeout(&nobody, Duration::from_millis(500)).expect_err("nobody");
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::HostUnreachable), "{error:?}");
        assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
        Ok(())
    })
}

#[test]
fn smoke_and_read_eof_and_write_close() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, |mut stream| {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            assert_eq!(byte, [99]);
            assert_eq!(stream.read(&mut byte)?, 0);
            assert_eq!(stream.read(&mut byte)?, 0);
            // The peer is gone for good; once that is known, writing fails.
            let start = Instant::now();
            loop {
                match stream.write_all(&[0]) {
                    Ok(()) => assert!(start.elapsed() < Duration::from_secs(5)),
                    Err(error) => {
                        let expected =
                            [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::ConnectionAborted];
                        assert!(expected.contains(&error.kind()), "{error}");
                        return Ok(());
                    }
                }
            }
        });
        let mut stream = RdmaStream::connect(address)?;
        assert_eq!(stream.write(&[99])?, 1);
        drop(stream);
        join(server)
    })
}

#[test]
fn partial_read() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, |mut stream| {
            stream.write_all(&[10])?;
            let mut byte = [0];
            stream.read_exact(&mut byte)
        });
        let mut stream = RdmaStream::connect(address)?;
        let mut buffer = [0; 10];
        assert_eq!(stream.read(&mut buffer)?, 1);
        stream.write_all(&[1])?;
        join(server)
    })
}

#[test]
fn read_and_write_vectored() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, Ok);
        let mut client = RdmaStream::connect(address)?;
        let mut server = join(server)?;
        server.write_all(&[10, 11, 12, 13, 14])?;
        let (mut a, mut b, mut c, mut d) = ([], [0; 4], [0], [0; 3]);
        let slices =
            &mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b), IoSliceMut::new(&mut c), IoSliceMut::new(&mut d)];
        assert_eq!(client.read_vectored(slices)?, 5);
        assert_eq!((b, c), ([10, 11, 12, 13], [14]));
        assert_eq!(client.write_vectored(&[IoSlice::new(&a), IoSlice::new(&[10]), IoSlice::new(&[11, 12])])?, 3);
        let mut buffer = [0; 4];
        assert_eq!(server.read(&mut buffer)?, 3);
        assert_eq!(buffer, [10, 11, 12, 0]);
        Ok(())
    })
}

#[test]
fn many_connections_one_after_the_other_and_interleaved() -> io::Result<()> {
    each_ip(|_, address| {
        const COUNT: u8 = 10;
        let listener = RdmaListener::bind(address)?;
        let server = thread::spawn(move || -> io::Result<()> {
            let mut workers = Vec::new();
            for stream in listener.incoming().take(2 * usize::from(COUNT)) {
                let mut stream = stream?;
                workers.push(thread::spawn(move || {
                    let mut byte = [0];
                    stream.read_exact(&mut byte).map(|()| byte[0])
                }));
            }
            let mut seen: Vec<_> =
                workers.into_iter().map(|worker| worker.join().expect("no panic")).collect::<io::Result<_>>()?;
            seen.sort_unstable();
            let expected: Vec<_> = (0..COUNT).flat_map(|number| [number, number]).collect();
            assert_eq!(seen, expected);
            Ok(())
        });
        for number in 0..COUNT {
            RdmaStream::connect(address)?.write_all(&[number])?;
        }
        // All open at once, written to in the opposite order.
        let mut streams: Vec<_> = (0..COUNT).map(|_| RdmaStream::connect(address)).collect::<io::Result<_>>()?;
        for (number, stream) in streams.iter_mut().enumerate().rev() {
            stream.write_all(&[number as u8])?;
        }
        drop(streams);
        join(server)
    })
}

#[test]
fn socket_and_peer_name() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        assert_eq!(listener.local_addr()?, address);
        let server = serve(listener, |stream| stream.peer_addr());
        let stream = RdmaStream::connect(address)?;
        assert_eq!(stream.peer_addr()?, address);
        assert_eq!(join(server)?, stream.local_addr()?);
        Ok(())
    })
}

#[test]
fn double_bind_and_bind_again() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let error = RdmaListener::bind(address).expect_err("taken");
        assert_eq!(error.kind(), ErrorKind::AddrInUse, "{error}");
        // A stream outlives its listener, and does not hold the port.
        let server = serve(listener, Ok);
        let mut client = RdmaStream::connect(address)?;
        let mut server = join(server)?;
        let again = RdmaListener::bind(address)?;
        client.write_all(&[1])?;
        server.read_exact(&mut [0])?;
        drop(again);
        Ok(())
    })
}

#[test]
fn clones_read_and_write() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, |mut stream| {
            let mut buffer = [0; 2];
            stream.read_exact(&mut buffer)?;
            assert_eq!(
                {
                    buffer.sort_unstable();
                    buffer
                },
                [1, 2]
            );
            stream.write_all(&[3])?;
            stream.write_all(&[4])
        });
        let first = RdmaStream::connect(address)?;
        let second = first.try_clone()?;
        let (done, result) = channel();
        for (number, mut stream) in [(1, first), (2, second)] {
            let done = done.clone();
            thread::spawn(move || {
                let mut byte = [0];
                let read = stream.write_all(&[number]).and_then(|()| stream.read_exact(&mut byte));
                done.send(read.map(|()| byte[0])).expect("the test waits");
            });
        }
        let mut bytes = [result.recv().expect("sent")?, result.recv().expect("sent")?];
        bytes.sort_unstable();
        assert_eq!(bytes, [3, 4]);
        join(server)
    })
}

#[test]
fn shutdown_smoke() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, |mut stream| {
            let mut byte = [0];
            assert_eq!(stream.read(&mut byte)?, 0);
            stream.write_all(&[1])
        });
        let mut stream = RdmaStream::connect(address)?;
        stream.shutdown(Shutdown::Write)?;
        assert!(stream.write(&[1]).is_err());
        let mut byte = [0, 0];
        assert_eq!(stream.read(&mut byte)?, 1);
        assert_eq!(byte[0], 1);
        join(server)
    })
}

#[test]
fn close_readwrite_smoke() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let (over, wait) = channel::<()>();
        let server = serve(listener, move |stream| {
            let _ = wait.recv();
            drop(stream);
            Ok(())
        });
        let mut byte = [0];
        let mut first = RdmaStream::connect(address)?;
        let mut second = first.try_clone()?;
        first.shutdown(Shutdown::Write)?;
        assert!(first.write(&[0]).is_err() && second.write(&[0]).is_err());
        first.shutdown(Shutdown::Read)?;
        assert_eq!(first.read(&mut byte)?, 0);
        assert_eq!(second.read(&mut byte)?, 0);
        // Through a new handle too.
        let mut third = first.try_clone()?;
        assert!(third.write(&[0]).is_err());
        assert_eq!(third.read(&mut byte)?, 0);
        // Closing again is no panic.
        let _ = second.shutdown(Shutdown::Read);
        let _ = second.shutdown(Shutdown::Write);
        let _ = third.shutdown(Shutdown::Both);
        drop((first, second, third, over));
        join(server)
    })
}

#[test]
fn clone_while_reading() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let client = thread::spawn(move || -> io::Result<()> {
            let mut stream = RdmaStream::connect(address)?;
            thread::sleep(Duration::from_millis(200));
            stream.write_all(&[1])?;
            // Until the other side has read it.
            assert_eq!(stream.read(&mut [0])?, 0);
            Ok(())
        });
        let (mut stream, _) = listener.accept()?;
        let clone = stream.try_clone()?;
        let cloning = thread::spawn(move || clone.try_clone());
        assert_eq!(stream.read(&mut [0, 0])?, 1);
        drop((stream, cloning.join().expect("no panic")?));
        join(client)
    })
}

#[test]
fn clone_accept() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let other = listener.try_clone()?;
        let clients: Vec<_> = (0..2).map(|_| thread::spawn(move || RdmaStream::connect(address))).collect();
        let acceptors = [listener, other].map(|listener| thread::spawn(move || listener.accept()));
        for acceptor in acceptors {
            join(acceptor)?;
        }
        for client in clients {
            join(client)?;
        }
        Ok(())
    })
}

#[test]
fn timeouts_and_options_are_what_was_set() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, Ok);
        let stream = RdmaStream::connect(address)?;
        let mut server = join(server)?;
        let duration = Duration::new(15, 0);
        assert_eq!((stream.read_timeout()?, stream.write_timeout()?), (None, None));
        stream.set_read_timeout(Some(duration))?;
        assert_eq!(stream.read_timeout()?, Some(duration));
        stream.set_write_timeout(Some(duration))?;
        assert_eq!(stream.write_timeout()?, Some(duration));
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        assert_eq!((stream.read_timeout()?, stream.write_timeout()?), (None, None));
        stream.set_read_timeout(Some(Duration::MAX))?;
        assert!(stream.read_timeout()?.is_some_and(|time| time > Duration::from_secs(1 << 30)));

        // A read with a timeout gets what is there in time.
        let mut stream = stream;
        stream.set_read_timeout(Some(Duration::from_millis(1000)))?;
        let start = Instant::now();
        let error = stream.read(&mut [0; 10]).expect_err("nothing is there");
        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
        assert!(start.elapsed() > Duration::from_millis(400));
        server.write_all(b"hello world")?;
        let mut buffer = [0; 11];
        stream.read_exact(&mut buffer)?;
        assert_eq!(&buffer, b"hello world");
        let error = stream.read_exact(&mut [0; 10]).expect_err("nothing more");
        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");

        assert!(!stream.nodelay()?);
        stream.set_nodelay(true)?;
        assert!(stream.nodelay()?);
        stream.set_nodelay(false)?;
        assert!(!stream.nodelay()?);
        stream.set_linger(Some(Duration::from_secs(1)))?;
        assert_eq!(stream.linger()?, Some(Duration::from_secs(1)));
        stream.set_linger(None)?;
        assert_eq!(stream.linger()?, None);
        assert!(format!("{stream:?}").contains(&address.to_string()));
        Ok(())
    })
}

#[test]
fn peek() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        let server = serve(listener, |mut stream| {
            stream.write_all(&[1, 3, 3, 7])?;
            // Until the other side is through.
            stream.read(&mut [0]).map(drop)
        });
        let mut stream = RdmaStream::connect(address)?;
        let mut buffer = [0; 10];
        for _ in 0..2 {
            let length = stream.peek(&mut buffer)?;
            assert_eq!(buffer[..length], [1, 3, 3, 7]);
        }
        let length = stream.read(&mut buffer)?;
        assert_eq!(buffer[..length], [1, 3, 3, 7]);
        stream.set_nonblocking(true)?;
        assert_eq!(stream.peek(&mut buffer).expect_err("nothing is there").kind(), ErrorKind::WouldBlock);
        stream.shutdown(Shutdown::Write)?;
        join(server)
    })
}

#[test]
fn nonblocking() -> io::Result<()> {
    each_ip(|_, address| {
        let listener = RdmaListener::bind(address)?;
        listener.set_nonblocking(true)?;
        assert_eq!(listener.accept().expect_err("nobody").kind(), ErrorKind::WouldBlock);
        listener.set_nonblocking(false)?;
        let server = serve(listener, Ok);
        let mut stream = RdmaStream::connect(address)?;
        let _server = join(server)?;
        stream.set_nonblocking(false)?;
        stream.set_nonblocking(true)?;
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).expect_err("nothing is there").kind(), ErrorKind::WouldBlock);
        // A linger of nothing resets.
        stream.set_linger(Some(Duration::ZERO))?;
        drop(stream);
        let error = (&_server).read(&mut byte).expect_err("no goodbye");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        Ok(())
    })
}
