//! A server that echoes messages, and a client that sends one: `echo serve 0.0.0.0:7471`, `echo ask 10.1.2.3:7471 hello`.

use rdmacm::{Connection, Error, Listener};

fn serve(address: &str) -> Result<(), Error> {
    let listener = Listener::bind(address)?;
    println!("listening on {}", listener.local_addr());
    loop {
        let mut connection = listener.accept()?;
        std::thread::spawn(move || {
            let peer = connection.peer_addr();
            loop {
                let outcome = connection.recv_buf().and_then(|message| connection.send(&message));
                if let Err(error) = outcome {
                    return println!("{peer}: {error}");
                }
            }
        });
    }
}

fn ask(address: &str, message: &str) -> Result<(), Error> {
    let mut connection = Connection::connect(address)?;
    connection.send(message.as_bytes())?;
    println!("{}", String::from_utf8_lossy(&connection.recv_buf()?));
    connection.disconnect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => serve(address),
        ["ask", address, message] => ask(address, message),
        _ => {
            eprintln!("usage: echo serve ADDRESS:PORT | echo ask ADDRESS:PORT MESSAGE");
            std::process::exit(2);
        }
    };
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
