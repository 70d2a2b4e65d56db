//! Tests that each shell accepts the completions written for it, and that the completions offer
//! `nvsharectl`'s commands. Shells that are not installed are skipped.

use std::path::Path;
use std::process::{Command, Output};

use clap::CommandFactory;
use nvshare::ctl::arguments::Arguments;

/// Creates a directory with the written completions.
fn written() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let status = Command::new(env!("CARGO_BIN_EXE_nvshare-completions")).arg(directory.path()).status();
    assert!(status.expect("the program").success());
    directory
}

/// Returns the output of a shell with these arguments, or `None` if the shell is not installed.
fn ask(shell: &str, arguments: &[&str], directory: &Path) -> Option<String> {
    let run = Command::new(shell).args(arguments).current_dir(directory).env("HOME", directory).output();
    let Ok(Output { status, stdout, stderr }) = run else {
        eprintln!("not asked: {shell}");
        return None;
    };
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success() && said.is_empty(), "{shell} {arguments:?}: {status}\n{said}");
    Some(String::from_utf8(stdout).expect("UTF-8"))
}

fn subcommands() -> Vec<String> {
    let names: Vec<String> = Arguments::command().get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    assert!(names.len() > 5, "{names:?}");
    names
}

#[test]
fn bash_offers_subcommands_options_and_values() {
    let directory = written();
    let complete = |line: &str| {
        // bash passes these arguments: the program, the word to complete, and the word before it.
        let script = "source ./nvsharectl.bash && COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1)) && \
                      _nvsharectl \"$1\" \"${@: -1}\" \"${@: -2:1}\" && printf '%s\\n' \"${COMPREPLY[@]}\"";
        let words: Vec<&str> = ["--norc", "-c", script, "bash"].into_iter().chain(line.split(' ')).collect();
        ask("bash", &words, directory.path()).map(|said| said.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    let Some(all) = complete("nvsharectl ") else { return };
    for name in subcommands() {
        assert!(all.contains(&name), "{name}: {all:?}");
    }
    for (line, offered) in [
        ("nvsharectl prel", vec!["preload"]),
        ("nvsharectl preload e", vec!["enable"]),
        ("nvsharectl set time", vec!["time-quantum"]),
        ("nvsharectl set anti-thrash o", vec!["on", "off"]),
        ("nvsharectl -S a", vec!["auto"]),
        ("nvsharectl lock --w", vec!["--who", "--why"]),
    ] {
        assert_eq!(complete(line).expect("bash"), offered, "{line}");
    }
}

#[test]
fn bash_offers_units_programs_rules_and_commands() {
    let directory = written();
    let programs = directory.path().join("bin");
    std::fs::create_dir(&programs).expect("a directory");
    // Imitates systemctl's answer for each scope.
    let text = "#!/bin/sh\n[ $1 = --user ] && echo comfyui.service enabled || echo ollama.service enabled disabled\n";
    let status = "#!/bin/sh\n[ $1 = --json ] && echo '{\"clients\":[{\"pid\":1202,\"uid\":0},{\"pid\":0}]}' || printf '%s\\n' \
                  'time-quantum = 30' '# nvshare.toml:3' '[[rule]]' 'name = \"fixed\"' '# set at run time' '[[rule]]' \
                  'name = \"adopted a.service\"' 'weight = 5'\n";
    for (name, text) in [("systemctl", text), ("nvsharectl", status)] {
        let script = programs.join(name);
        std::fs::write(&script, text).expect("a script");
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("its mode");
    }
    let complete = |line: &str| {
        let script = "PATH=$PWD/bin:$PATH; source ./nvsharectl.bash && COMP_WORDS=(\"$@\") COMP_CWORD=$(($# - 1)) && \
                      _nvsharectl_of_this_host \"$1\" \"${@: -1}\" \"${@: -2:1}\" && printf '%s\\n' \"${COMPREPLY[@]}\"";
        let words: Vec<&str> = ["--norc", "-c", script, "bash"].into_iter().chain(line.split(' ')).collect();
        ask("bash", &words, directory.path()).map(|said| said.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    for (line, offered) in [
        ("nvsharectl adopt o", "ollama.service"),
        ("nvsharectl adopt --user c", "comfyui.service"),
        ("nvsharectl preload enable --unit ", "ollama.service"),
        ("nvsharectl adopt --res", "--restart"),
        ("nvsharectl why ", "1202"),
        ("nvsharectl migrate 1", "1202"),
        ("nvsharectl migrate 1202 --t", "--to"),
        ("nvsharectl unset-rule ", "adopted\\ a.service"),
        ("nvsharectl run -- systemct", "systemctl"),
        ("nvsharectl prel", "preload"),
    ] {
        let Some(said) = complete(line) else { return };
        assert!(said.iter().any(|word| word == offered), "{line}: {said:?}");
    }
    let rules = complete("nvsharectl unset-rule ").expect("bash");
    assert_eq!(rules.len(), 1, "only rules that can be unset: {rules:?}");
}

#[test]
fn zsh_loads_the_completion_function() {
    let directory = written();
    // compinit finds the function by the file's first line.
    let script = "fpath=($PWD $fpath); autoload -U compinit && compinit -u -d ./dump && print -r -- $_comps[nvsharectl] && \
                  zcompile _nvsharectl";
    let Some(said) = ask("zsh", &["-f", "-c", script], directory.path()) else { return };
    assert_eq!(said.trim(), "_nvsharectl");
    let text = std::fs::read_to_string(directory.path().join("_nvsharectl")).expect("a file");
    for name in subcommands() {
        assert!(text.contains(&format!("\n'{name}:")), "{name}");
    }
}

#[test]
fn fish_offers_subcommands_and_options() {
    let directory = written();
    let complete = |line: &str| {
        let script = format!("source nvsharectl.fish; complete --do-complete '{line}'");
        let said = ask("fish", &["--no-config", "-c", &script], directory.path())?;
        Some(said.lines().map(|line| line.split('\t').next().unwrap_or(line).to_owned()).collect::<Vec<_>>())
    };
    let Some(all) = complete("nvsharectl ") else { return };
    for name in subcommands() {
        assert!(all.contains(&name), "{name}: {all:?}");
    }
    assert_eq!(complete("nvsharectl preload e").expect("fish"), ["enable"]);
    assert_eq!(complete("nvsharectl lock --w").expect("fish"), ["--who", "--why"]);
}
