//! What the tools share.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;

/// Looks up `host`, a name or an address, in the resolver's order.
///
/// Unlike the text form that [`SocketAddr`] parses, a link-local IPv6 address may name its interface: `fe80::1%eth0`.
///
/// # Errors
///
/// When the name is not known, with the name in the text.
pub fn look_up(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let found: Vec<_> = (host, port)
        .to_socket_addrs()
        .map_err(|error| io::Error::new(io::ErrorKind::NotFound, format!("{host}: {error}")))?
        .collect();
    if found.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address")));
    }
    Ok(found)
}

/// The status that C tools end with after `return -1`.
pub const FAILED: u8 = 255;

/// The status of C tools that were called the wrong way (EINVAL).
pub const MISUSED: u8 = 22;

/// Prints `error` with its causes on one line of the standard error output, and gives the status to end with.
///
/// A reader of our output that went away (`rping -v | head`) is no error to report.
pub fn fail(tool: &str, error: &(dyn std::error::Error + 'static)) -> ExitCode {
    if !is_broken_output(error) {
        eprintln!("{tool}: {}", Causes(error));
    }
    ExitCode::from(FAILED)
}

fn is_broken_output(error: &(dyn std::error::Error + 'static)) -> bool {
    // Errors of the library carry themselves inside an `io::Error`; a plain one is of our own output.
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe && error.get_ref().is_none())
}

/// An error and what caused it, each only if its text is not in the one before.
struct Causes<'a>(&'a (dyn std::error::Error + 'static));

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        f.write_str(&text)?;
        let mut error = self.0;
        while let Some(source) = error.source() {
            let cause = source.to_string();
            if !text.contains(&cause) {
                write!(f, ": {cause}")?;
            }
            (text, error) = (cause, source);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literal_addresses_are_looked_up_without_a_resolver() {
        assert_eq!(look_up("10.1.2.3", 7174).expect("a literal"), ["10.1.2.3:7174".parse().expect("a literal")]);
        assert_eq!(look_up("fd77::1:2", 9).expect("a literal"), ["[fd77::1:2]:9".parse().expect("a literal")]);
    }

    #[test]
    fn link_local_address_takes_the_name_of_its_interface() {
        let SocketAddr::V6(found) = look_up("fe80::1%lo", 9).expect("lo is everywhere")[0] else {
            panic!("an IPv6 address gave another");
        };
        assert_eq!(found.scope_id(), 1, "lo is the first interface");
    }

    #[test]
    fn unknown_names_are_named() {
        let error = look_up("no such host", 9).expect_err("no name has spaces");
        assert!(error.to_string().contains("no such host"), "{error}");
    }
}
