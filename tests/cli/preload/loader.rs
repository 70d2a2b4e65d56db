//! Compares nvsharectl's parser of `/etc/ld.so.preload` with the loader's.

use std::process::Command;

use nvshare::ctl::preload::entries;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::host::*;

/// Returns the names that the loader parses. The libraries do not exist, so the loader prints an
/// error for each name.
fn as_the_loader_reads(host: &Host, text: &[u8]) -> Vec<String> {
    host.write(text);
    let said = said(&mut Command::new("/bin/true"));
    let name = |line: &str| line.strip_prefix("ERROR: ld.so: object '")?.split("' from").next().map(str::to_owned);
    said.stderr.lines().map(|line| name(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

#[test]
fn preload_entries_are_parsed_as_by_the_loader() {
    on_a_host(|host| {
        let piece = prop::sample::select(vec![
            "a.so", "/b/c.so", "d", " ", "\t", "\n", ":", "#", "# e", "\r\n", "\n\n", "\u{b}",
        ]);
        let texts = prop::collection::vec(piece, 0..20).prop_map(|pieces| pieces.concat());
        let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
        let result = runner.run(&texts, |text| {
            let ours: Vec<_> =
                entries::names(text.as_bytes()).iter().map(|n| String::from_utf8_lossy(n).into_owned()).collect();
            prop_assert_eq!(as_the_loader_reads(host, text.as_bytes()), ours);
            Ok(())
        });
        result.unwrap_or_else(|e| panic!("{e}"));
    });
}
