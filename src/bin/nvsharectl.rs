//! `nvsharectl`: dispatches the command line to the commands in `nvshare::ctl`.

use std::io::Write;
use std::process::ExitCode;

#[cfg(feature = "cdi")]
use nvshare::ctl::arguments::Cdi;
use nvshare::ctl::arguments::{Arguments, Preload, Setting, Verb};
#[cfg(feature = "cdi")]
use nvshare::ctl::cdi;
use nvshare::ctl::status::{self, Style};
#[cfg(feature = "top")]
use nvshare::ctl::top;
use nvshare::ctl::{
    CtlError, Target, adopt, debug, driver, games, hibernate, lock, moves, pause, place, preload, pressure, replay,
    report, room, rules, run, settings, simulate, timeline, why,
};

fn main() -> ExitCode {
    match carry_out(Arguments::of_process()) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("nvsharectl: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}

fn carry_out(arguments: Arguments) -> Result<u8, CtlError> {
    let json = arguments.is_json();
    let target = arguments.control.map_or(Target::Anywhere, Target::Control);
    let time_quantum = arguments.set_tq.map(|value| Setting::TimeQuantum { value });
    let anti_thrash = arguments.anti_thrash.map(|value| Setting::AntiThrash { value });
    let options: Vec<Setting> = time_quantum.into_iter().chain(anti_thrash).collect();
    let done = match arguments.command {
        None if !options.is_empty() => settings::set(&target, &options),
        None | Some(Verb::Status(_)) => show(&target, json),
        #[cfg(feature = "top")]
        Some(Verb::Top { iterations }) => top::top(&target, iterations),
        Some(Verb::Get(_)) => print(&settings::get(&target, json)?),
        Some(Verb::Set(setting)) => settings::set(&target, &[setting]),
        Some(Verb::SetRule { name, keys }) => rules::set(&target, &name, &keys),
        Some(Verb::UnsetRule { name }) => rules::set(&target, &name, &[]),
        Some(Verb::Reset) => print(&settings::reset(&target)?),
        Some(Verb::Reload) => settings::reload(&target),
        Some(Verb::ReleaseDriver { lasts }) => print(&driver::release(&target, lasts)?),
        Some(Verb::Pressure(_)) => print(&pressure::show(&target, json)?),
        Some(Verb::Why { program, .. }) => print(&why::show(&target, &program, json)?),
        Some(Verb::Report { since, by, csv, .. }) => {
            let form = match (json, csv) {
                (true, _) => report::Form::Json,
                (false, true) => report::Form::Csv,
                (false, false) => report::Form::Table,
            };
            print(&report::show(&target, since, by, form)?)
        }
        Some(Verb::Pause { program }) => pause::pause(&target, &program),
        Some(Verb::Resume { program }) => pause::resume(&target, &program),
        Some(Verb::Migrate { program, to }) => moves::migrate(&target, &program, &to),
        Some(Verb::Images(command)) => print(&hibernate::carry_out(&target, command, json)?),
        Some(Verb::Drain { gpu }) => print(&moves::drain(&target, &gpu)?),
        Some(Verb::Undrain { gpu }) => moves::undrain(&target, &gpu),
        Some(Verb::Run { library, gpus, memory, portable, command }) => {
            let request = place::GpuRequest { gpus, memory };
            run::run(&target, library.as_deref(), request, portable.as_deref(), &command).and_then(|line| print(&line))
        }
        Some(Verb::Lock { gpu, who, why, on_loss, command }) => {
            return lock::lock(&target, &lock::LockRequest { gpu, who, why, on_loss }, &command);
        }
        Some(Verb::MakeRoom { size, gpu, lasts, games, command }) => {
            let bytes = size.unwrap_or(games::DEFAULT);
            let request = room::RoomRequest { gpu, bytes, lasts };
            return if games { games::follow(&target, &request) } else { room::keep(&target, &request, &command) };
        }
        Some(Verb::Simulate { replay: Some(bundle), .. }) => {
            let answer = replay::replay(&bundle, json)?;
            print(&answer.text)?;
            return Ok(answer.exit_code);
        }
        Some(Verb::Simulate { policy, file, timeline, replay: None, .. }) => {
            // clap requires either a file or `--replay`.
            let file = file.unwrap_or_default();
            print(&simulate::simulate(&file, &policy, timeline.as_deref(), json)?)
        }
        Some(Verb::Debug { output, command_lines }) => print(&debug::debug(&target, output.as_deref(), command_lines)?),
        Some(Verb::Timeline { output, gpu, since, bundle, .. }) => {
            let source = bundle.map_or(timeline::Source::Scheduler(target), timeline::Source::Bundle);
            let form = match output {
                Some(output) => timeline::Form::Svg(output),
                None if json => timeline::Form::Json,
                None => timeline::Form::Text,
            };
            print(&timeline::timeline(&source, gpu.as_deref(), since, &form)?)
        }
        #[cfg(feature = "cdi")]
        Some(Verb::Cdi(command)) => containers(command, &target),
        Some(Verb::Adopt { server, container: true, .. }) => print(&adopt::container(&server)),
        Some(Verb::Adopt { server, library, .. }) => print(&adopt::adopt(&target, &server, library.as_deref())?),
        Some(Verb::Release { server }) => print(&adopt::release(&target, &server)?),
        Some(Verb::Preload(command)) => return toggle(&command, &target, json),
    };
    done.map(|()| 0)
}

#[cfg(feature = "cdi")]
fn containers(command: Cdi, target: &Target) -> Result<(), CtlError> {
    match command {
        // Remarks are printed to standard error, because standard output may receive the file.
        Cdi::Generate(asked) => cdi::generate(target, &asked, |text| eprintln!("{text}")),
        Cdi::Install(asked) => cdi::install(&asked, |text| eprintln!("nvsharectl: {text}")),
        Cdi::MergePreload => cdi::on_create_container(std::io::stdin()),
    }
}

fn toggle(command: &Preload, target: &Target, json: bool) -> Result<u8, CtlError> {
    let answer = match command {
        Preload::Status { of, .. } => preload::status(target, of, json)?,
        Preload::Verify { library, .. } => preload::verify(library.as_deref(), json)?,
        Preload::Enable { library, of } => preload::enable(library.as_deref(), of)?,
        Preload::Disable { of } => preload::disable(of)?,
    };
    print(&answer.text)?;
    Ok(answer.exit_code)
}

fn show(target: &Target, json: bool) -> Result<(), CtlError> {
    let status = status::ask(target)?;
    if json {
        return print(&format!("{:#}\n", status.json()));
    }
    let waits = why::of_all(target, &status.clients)?;
    print(&status::text(&status, &waits, Style::of_stdout()))
}

/// Prints `text`. A closed pipe (`| head`) is not an error.
fn print(text: &str) -> Result<(), CtlError> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(CtlError::Failed(format!("cannot print: {e}"))),
        _ => Ok(()),
    }
}
