//! Running other programs, with errors that say which one failed and how.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdout, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail};

/// The workspace's root folder.
///
/// Cargo tells a running program where its package is; a program that was started without cargo falls back to the folder
/// that it was built in.
pub(crate) fn workspace_root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .filter(|package| package.ends_with("xtask"))
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    package.parent().expect("the xtask package is a folder in the workspace").to_path_buf()
}

/// The folder with everything that a build leaves behind.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(target) => workspace_root().join(target),
        None => workspace_root().join("target"),
    }
}

/// Prints a heading, so that a reader of a long log sees which step a line belongs to.
pub(crate) fn heading(text: &str) {
    println!("\n=== {text}");
    // A closed stdout is reported by the next print.
    let _ = std::io::stdout().flush();
}

/// A command line as one would type it.
pub(crate) fn display(command: &Command) -> String {
    let mut line = quote(command.get_program());
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&quote(argument));
    }
    line
}

/// Runs a command to its end.
///
/// # Errors
///
/// When it cannot be started, or ends with anything but 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = start_error(command.status(), command)?;
    check(status, command)
}

/// Runs a command to its end and returns what it wrote to its standard output.
///
/// # Errors
///
/// As for [`run`].
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = start_error(command.stderr(Stdio::inherit()).output(), command)?;
    check(output.status, command)?;
    Ok(output.stdout)
}

/// Runs a command, passes its standard output on while it runs, and returns how it ended and what it wrote.
///
/// # Errors
///
/// When it cannot be started.
pub(crate) fn tee(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut child = start_error(command.stdout(Stdio::piped()).spawn(), command)?;
    let stdout = child.stdout.take().expect("the output was asked to be a pipe");
    let output = copy_output(stdout);
    Ok((child.wait()?, output))
}

/// Passes a child's output on to ours until its end, and returns it.
pub(crate) fn copy_output(mut from: ChildStdout) -> String {
    let mut kept = Vec::new();
    let mut part = [0; 4096];
    while let Ok(length @ 1..) = from.read(&mut part) {
        kept.extend_from_slice(&part[..length]);
        let mut stdout = std::io::stdout().lock();
        // Nobody reads our output any more: the child still goes on to its end, for its status.
        let _ = stdout.write_all(&part[..length]).and_then(|()| stdout.flush());
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// Gives a command its input, and returns what it wrote to its standard output.
///
/// # Errors
///
/// As for [`run`].
pub(crate) fn filter(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = start_error(spawned, command)?;
    let mut stdin = child.stdin.take().expect("the input was asked to be a pipe");
    let output = std::thread::scope(|scope| {
        // Written from a second thread: the command may fill its output pipe before it has read all of its input.
        // A command that does not want all of the input says so by its exit status.
        scope.spawn(move || {
            let _ = stdin.write_all(input);
        });
        child.wait_with_output()
    })?;
    check(output.status, command)?;
    Ok(output.stdout)
}

/// Whether a command ends with 0; its output is thrown away. A command that cannot be started has not.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Quotes one word for a POSIX shell, where it needs to be.
pub(crate) fn quote(word: impl AsRef<OsStr>) -> String {
    let word = word.as_ref().to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn start_error<T>(started: std::io::Result<T>, command: &Command) -> Result<T> {
    started.with_context(|| format!("cannot start `{}`", command.get_program().to_string_lossy()))
}

fn check(status: ExitStatus, command: &Command) -> Result<()> {
    if !status.success() {
        bail!("`{}` ended with {status}", display(command));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_words_are_not_quoted_and_others_survive_a_shell() {
        assert_eq!(quote("target/vm"), "target/vm");
        for word in ["", "a b", "it's", "$HOME", "*", "a\nb"] {
            let script = format!("printf %s {}", quote(word));
            let echoed = output(Command::new("sh").args(["-c", &script])).expect("sh runs");
            assert_eq!(String::from_utf8_lossy(&echoed), word);
        }
    }

    #[test]
    fn an_error_names_the_command_and_its_status() {
        let error = run(Command::new("sh").args(["-c", "exit 3"])).expect_err("it exits with 3");
        assert_eq!(error.to_string(), "`sh -c 'exit 3'` ended with exit status: 3");
    }

    #[test]
    fn a_filter_may_write_more_than_a_pipe_holds() {
        let input = vec![b'x'; 1 << 20];
        assert_eq!(filter(&mut Command::new("cat"), &input).expect("cat runs"), input);
    }
}
