//! Checks the built `libnvshare.so`. Every process of a host may load the library, so it needs no
//! other libraries, exports only its hooks, and costs little.

use std::path::PathBuf;
use std::process::Command;

use test_support::{artifact, steps};

/// Returns the output of `readelf` for the library. `readelf` is in binutils, which is installed
/// with any C compiler.
fn readelf(option: &str) -> String {
    let output =
        Command::new("readelf").args(["-W", option]).arg(artifact("libnvshare.so")).env("LC_ALL", "C").output();
    String::from_utf8(output.expect("readelf runs").stdout).expect("text")
}

/// Names of dynamic symbols, defined or not.
fn symbols(defined: bool) -> Vec<String> {
    let table = readelf("--dyn-syms");
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // A version may follow the name.
    let rows = rows.filter(|row| row.len() >= 8 && row[0] != "Num:" && (row[6] != "UND") == defined);
    rows.map(|row| row[7].to_owned()).collect()
}

#[test]
fn the_library_needs_only_the_c_library() {
    let dynamic = readelf("-d");
    let needed: Vec<&str> = dynamic.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(matches!(&needed[..], [one] if one.contains("[libc.so.6]")), "{needed:?}");
    assert!(dynamic.contains("[libnvshare.so]"), "it has a SONAME: {dynamic}");
    assert!(dynamic.contains("NODELETE"), "it is never unloaded: {dynamic}");
}

#[test]
fn the_library_needs_no_symbol_newer_than_glibc_2_17() {
    let undefined = symbols(false);
    assert!(undefined.iter().any(|name| name.starts_with("malloc@")), "{undefined:?}");
    for name in undefined {
        let Some((_, version)) = name.split_once("@GLIBC_") else { panic!("{name} has no version") };
        let mut numbers = version.split(['.', ' ']).filter_map(|n| n.parse::<u32>().ok());
        let version = (numbers.next().expect("a version"), numbers.next().unwrap_or(0));
        assert!(version <= (2, 17), "{name} is too new for old systems and containers");
    }
}

/// Some programs replace the beginning of functions that they find by a jump, and move the replaced
/// instructions elsewhere. Debug and release builds have the same first instructions.
#[test]
#[cfg(target_arch = "x86_64")]
fn exported_functions_begin_with_instructions_that_work_anywhere() {
    use iced_x86::{Decoder, DecoderOptions, FlowControl};
    use object::{Object, ObjectSection, ObjectSymbol};

    /// The longest usual jump.
    const REPLACED: u64 = 14;
    let file = std::fs::read(artifact("libnvshare.so")).expect("the library");
    let file = object::File::parse(&*file).expect("an ELF file");
    let text = file.section_by_name(".text").expect("code");
    let code = text.data().expect("contents");
    let exported: Vec<_> = file.dynamic_symbols().filter(|symbol| symbol.is_definition()).collect();
    assert!(exported.len() > 500, "{}", exported.len());
    for symbol in exported {
        let (name, at) = (symbol.name().expect("a name"), symbol.address());
        let offset = usize::try_from(at - text.address()).expect("an offset");
        let mut end = at;
        for instruction in &mut Decoder::with_ip(64, &code[offset..], at, DecoderOptions::NONE) {
            if instruction.ip() >= at + REPLACED {
                let target = instruction.near_branch_target();
                assert!(!(at + 1..at + REPLACED).contains(&target), "{name} jumps into its beginning");
                break;
            }
            end = instruction.next_ip();
            assert!(!instruction.is_ip_rel_memory_operand(), "{name}: {instruction}");
            assert_eq!(instruction.flow_control(), FlowControl::Next, "{name}: {instruction}");
        }
        assert_eq!(end, at + REPLACED, "{name}: the first {REPLACED} bytes are whole instructions");
    }
}

/// The NVML functions that may have to return the same values as CUDA.
const NVML: [&str; 7] = [
    "nvmlDeviceGetCount",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMemoryInfo_v2",
];

#[test]
fn the_library_exports_only_its_hooks() {
    let exported = symbols(true);
    assert!(exported.iter().any(|name| name == "cuLaunchKernel"));
    for name in exported {
        let is_of_nvml = NVML.contains(&&*name);
        let is_hook = ["dlopen", "dlsym"].contains(&&*name)
            || is_of_nvml
            || name.strip_prefix("cu").is_some_and(|n| n.starts_with(char::is_uppercase));
        assert!(is_hook, "{name} is exported");
    }
}

#[test]
fn loading_the_library_executes_few_instructions() {
    let run = |library: Option<PathBuf>| {
        let mut command = Command::new("/bin/true");
        command.env_clear();
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
        }
        match steps::instructions(&mut command) {
            Ok(count) => Some(count),
            Err(e) => {
                test_support::skip(format_args!("ptrace(2), to count instructions: {e}"));
                None
            }
        }
    };
    let (Some(without), Some(with)) = (run(None), run(Some(artifact("libnvshare.so")))) else { return };
    let cost = with - without;
    eprintln!("/bin/true: {without} instructions, {cost} more with the library");
    assert!(cost > 1000, "it was not loaded");
    // This is a debug build. The released library needs less than half of these instructions (the
    // figure `load-cost-true-instructions`, see `bench/guest.rs`).
    assert!(cost <= 75_000, "{cost} more instructions");
}
