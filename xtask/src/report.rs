//! Reading what libtest prints.

/// The sums of one or several runs of test programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) ignored: u32,
    /// Tests that said that they did nothing, in a line that begins with `SKIP:`.
    pub(crate) skipped: u32,
    /// What else went wrong, in sentences.
    pub(crate) trouble: Vec<String>,
}

impl Report {
    /// Reads the closing lines: `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; ...`.
    pub(crate) fn read(output: &str) -> Self {
        let mut report = Self::default();
        for line in output.lines() {
            // A test that prints past libtest's capture continues libtest's own line `test name ... `.
            let line = line.trim_start();
            if line.starts_with("SKIP:") || line.contains(" ... SKIP:") {
                report.skipped += 1;
            }
            let Some(result) = line.strip_prefix("test result: ") else {
                continue;
            };
            let (_, counts) = result.split_once(". ").unwrap_or_default();
            for count in counts.split("; ") {
                match count.split_once(' ') {
                    Some((number, "passed")) => report.passed += number.parse().unwrap_or(0),
                    Some((number, "failed")) => report.failed += number.parse().unwrap_or(0),
                    Some((number, "ignored")) => report.ignored += number.parse().unwrap_or(0),
                    _ => {}
                }
            }
        }
        report
    }

    /// Adds another run.
    pub(crate) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
        self.skipped += other.skipped;
        self.trouble.extend_from_slice(&other.trouble);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_summed() {
        let output = "running 2 tests\ntest a ... ok\n\
            test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s\n\
            test result: FAILED. 10 passed; 3 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.00s\n";
        let report = Report::read(output);
        assert_eq!((report.passed, report.failed, report.ignored, report.skipped), (12, 3, 1, 0));
    }

    #[test]
    fn skips_are_found_in_captured_and_in_direct_output() {
        let output = "test a ... SKIP: no RDMA device\nok\n---- b stdout ----\nSKIP: no RDMA device\nI SKIP: this\n";
        assert_eq!(Report::read(output).skipped, 2);
    }
}
