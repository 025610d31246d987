//! Building with cargo and learning which programs came out.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;

/// Runs a cargo build command and returns the programs that it made, or that were up to date.
///
/// # Errors
///
/// When the build fails.
pub(crate) fn build(cargo: &mut Command) -> Result<Vec<PathBuf>> {
    cargo.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let messages = process::output(cargo)?;
    let messages = String::from_utf8(messages).context("cargo's messages are not text")?;
    Ok(messages.lines().filter_map(executable).collect())
}

/// The program in one of cargo's messages. A program that is only built because a test may start it is not asked for.
fn executable(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    Some(PathBuf::from(message.get("executable")?.as_str()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_messages_about_programs_count() {
        let program = r#"{"reason":"compiler-artifact","executable":"/t/debug/deps/device-1"}"#;
        assert_eq!(executable(program), Some(PathBuf::from("/t/debug/deps/device-1")));
        assert_eq!(executable(r#"{"reason":"compiler-artifact","executable":null}"#), None);
        assert_eq!(executable(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(executable("warning: text"), None);
    }
}
