//! Writes the completions of `nvsharectl`'s command line for bash, zsh and fish.
//! `src/ctl/arguments.rs` defines the command line. The generator is a separate program, so that
//! nvsharectl does not contain it.
//!
//! ```text
//! nvshare-completions DIRECTORY
//! ```

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use nvshare::ctl::arguments::Arguments;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(directory), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: nvshare-completions DIRECTORY");
        return ExitCode::from(2);
    };
    match write(Path::new(&directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("nvshare-completions: {}: {e}", directory.display());
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Arguments::command(), "nvsharectl", directory)?;
    }
    let mut bash = File::options().append(true).open(directory.join("nvsharectl.bash"))?;
    bash.write_all(BASH.as_bytes())
}

/// Completions that clap does not generate: units of this host, programs and rules that the
/// scheduler knows, and commands with their own completion.
const BASH: &str = r#"
_nvsharectl_of_this_host() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} at scope=--system
    for ((at = 1; at < COMP_CWORD; at++)); do
        case ${COMP_WORDS[at]} in
        --user) scope=--user ;;
        --)
            if declare -F _command_offset >/dev/null; then
                _command_offset $((at + 1))
            else
                mapfile -t COMPREPLY < <(compgen -c -- "$word")
            fi
            return
            ;;
        esac
    done
    case ${COMP_WORDS[1]}:$before:$word in
    adopt:*:-* | release:*:-*) ;;
    adopt:* | release:* | preload:--unit:*)
        mapfile -t COMPREPLY < <(compgen -W "$(systemctl "$scope" list-unit-files --type=service --no-legend --plain 2>/dev/null |
            cut -d ' ' -f 1)" -- "$word")
        return
        ;;
    why:why:* | pause:pause:* | resume:resume:* | migrate:migrate:* | hibernate:hibernate:*)
        mapfile -t COMPREPLY < <(compgen -W "$(nvsharectl --json 2>/dev/null | grep -o '"pid": *[1-9][0-9]*' | grep -o '[0-9]*$')" -- "$word")
        return
        ;;
    unset-rule:unset-rule:*)
        local IFS=$'\n'
        mapfile -t COMPREPLY < <(compgen -W "$(nvsharectl get 2>/dev/null |
            sed -n '/^# set at run time$/,/^name = /s/^name = "\(.*\)"$/\1/p')" -- "$word")
        ((${#COMPREPLY[@]})) && mapfile -t COMPREPLY < <(printf '%q\n' "${COMPREPLY[@]}")
        return
        ;;
    esac
    _nvsharectl "$@"
}
complete -F _nvsharectl_of_this_host -o bashdefault -o default nvsharectl
"#;
