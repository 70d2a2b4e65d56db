use super::*;
use crate::bus::status::Status;
use crate::bus::{Client, Gpu, GpuUse, Pressure};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;
use std::collections::HashMap;

mod picture;

const GIB: u64 = 1 << 30;

fn client(id: u64, name: &str, places: (&str, &str), usage: GpuUse) -> Client {
    Client {
        id,
        pid: 1200 + id as u32,
        name: name.into(),
        command: Some(format!("{name} --serve")),
        slice: places.0.into(),
        unit: places.1.into(),
        sleep: "awake".into(),
        gpus: vec![GpuUse { uuid: "GPU-1".into(), engine: "swap".into(), ..usage }],
        ..Client::default()
    }
}

fn usage(state: &str, resident: u64, swapped: u64) -> GpuUse {
    GpuUse {
        state: state.into(),
        resident,
        swapped,
        demand: resident + swapped,
        allowance: resident,
        ..GpuUse::default()
    }
}

fn snapshot(at: Instant, held: f64) -> Snapshot {
    let holder = GpuUse { lock_time: held, share_due: Some(500), pinned: GIB / 2, ..usage("holding", 11 * GIB, 0) };
    let waiter = GpuUse { wait_time: 12.0, share_due: Some(250), ..usage("waiting", GIB, 9 * GIB) };
    let comes =
        GpuUse { wait_time: 70.0, share_due: Some(250), allowance: 4 * GIB, ..usage("waiting", 3 * GIB, 4 * GIB) };
    let (services, people) = ("system.slice", "user-1000.slice");
    let mut asleep = client(4, "python3", (people, "jupyter.service"), usage("idle", 0, 2 * GIB));
    (asleep.sleep, asleep.paused) = ("sleeping".into(), true);
    let gpu = Gpu {
        uuid: "GPU-1".into(),
        kind: "gpu".into(),
        name: "Simulated GPU".into(),
        index: Some(0),
        total: 24 * GIB,
        overhead: Some(3 * GIB),
        contexts: Some(GIB),
        holders: vec![1],
        queue: vec![3, 2],
        turn_ends: Some(HashMap::from([(1, 3.25)])),
        expected_starts: Some(HashMap::from([(3, 3.6), (2, 12.4)])),
        swapped_in_bytes: Some((held * 1e9) as u64),
        swapped_out_bytes: Some((held * 5e8) as u64),
        link_rate: Some(24 * GIB),
        ..Gpu::default()
    };
    let pressure =
        Pressure { kind: "gpu".into(), name: "GPU-1".into(), some_avg10: 81.5, full_avg10: 2.0, ..Pressure::default() };
    Snapshot {
        status: Status {
            version: "0.1.0".into(),
            time_quantum: 30,
            anti_thrash: "auto".into(),
            policy: "fcfs".into(),
            gpus: vec![gpu],
            clients: vec![
                client(1, "ollama", (services, "ollama.service"), holder),
                client(2, "python3", (people, "train.scope"), waiter),
                client(3, "comfyui", (services, "comfyui.service"), comes),
                asleep,
            ],
            ..Status::default()
        },
        pressure: vec![pressure],
        at,
    }
}

/// A screen after two seconds without changes.
fn ui(has_colour: bool) -> Ui {
    let mut ui = Ui::new(has_colour);
    let begin = Instant::now();
    ui.update(snapshot(begin, 10.0));
    ui.update(snapshot(begin + Duration::from_secs(2), 11.0));
    ui
}

fn drawn(ui: &Ui, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal in memory");
    let (screen, mut table) = (ui.screen(), TableState::new());
    terminal.draw(|frame| screen.draw(frame.area(), frame.buffer_mut(), &mut table)).expect("it is drawn");
    terminal.backend().buffer().clone()
}

fn press(ui: &mut Ui, code: KeyCode) -> Option<Action> {
    ui.key(KeyEvent::new(code, KeyModifiers::NONE))
}

const EXPECTED: &str = "\
nvshare 0.1.0  1 GPU  4 programs  quantum 30s  anti-thrash auto  policy fcfs
GPU 0  Simulated GPU  24 GiB                pressure, 10s: some 81.5%, full 2.0%
[##################################=============!!cccxxxxxxx...................]
# holder 10.5G  = others 4G  ! pinned 512M  c contexts 1G  x other programs 2G
. free 6G
holder  ollama (1201), 3.2s left                  in 477M/s, out 238M/s of 24G/s
queue   comfyui (1203) about 4s, python3 (1202) about 13s

PROGRAM                  STATE                ON GPU SWAPPED  DUE  HAD    WAITED
system.slice                                     14G      4G  75%  50%  1min 10s
  ollama.service                                 11G      0B  50%  50%      0.0s
    1201 ollama --serve  runs, 3.2s left         11G      0B  50%  50%      0.0s
  comfyui.service                                 3G      4G  25%   0%  1min 10s
    1203 comfyui --serve waits, about 4s          3G      4G  25%   0%  1min 10s
user-1000.slice                                   1G     11G  25%   0%       12s
  train.scope                                     1G      9G  25%   0%       12s
    1202 python3 --serve waits, about 13s         1G      9G  25%   0%       12s
  jupyter.service                                 0B      2G    -   0%      0.0s
    1204 python3 --serve paused                   0B      2G    -   0%      0.0s

up/down select  s sort  p pause  m migrate  w why  ? help  q quit   by memory
";

#[test]
fn eighty_columns_show_all_without_colour() {
    let shown = lines(&drawn(&ui(false), 80, 21));
    assert_eq!(shown, EXPECTED, "\n{shown}");
    let buffer = drawn(&ui(false), 80, 21);
    assert!(buffer.content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    let coloured = drawn(&ui(true), 80, 21);
    assert_eq!(lines(&coloured), shown, "colour adds nothing that cannot be read");
    assert!(coloured.content().iter().any(|cell| cell.fg == Color::Green));
}

/// `NVSHARE_DRAW=1 cargo nextest run -p nvshare the_readme_shows_this_screen` draws the pictures
/// again.
#[test]
fn the_readme_shows_this_screen() {
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    for theme in picture::THEMES {
        let (file, svg) = (docs.join(theme.file), theme.draw(&drawn(&ui(true), 80, 21)));
        if std::env::var_os("NVSHARE_DRAW").is_some() {
            std::fs::write(&file, &svg).expect("the picture can be written");
        }
        let there = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(there == svg, "docs/{} shows another screen: run this test with NVSHARE_DRAW=1", theme.file);
        let readme = include_str!("../../../README.md");
        assert!(readme.contains(&format!("\"docs/{}\"", theme.file)), "the README does not show docs/{}", theme.file);
    }
}

#[test]
fn without_a_terminal_the_screen_is_printed() {
    let mut ui = ui(false);
    ui.is_text = true;
    let text = ui.text(80);
    for part in ["1201 ollama --serve", "user-1000.slice", "holder  ollama (1201), 3.2s left"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("quit"), "nobody can press keys: {text}");
}

#[test]
fn the_screen_fills_any_terminal_size() {
    for (width, height) in [(80, 4), (40, 8), (10, 2), (1, 1), (200, 60)] {
        let text = lines(&drawn(&ui(true), width, height));
        assert_eq!(text.lines().count(), usize::from(height));
    }
    assert!(lines(&drawn(&ui(false), 40, 8)).contains("[####"));
}

#[test]
fn program_names_cannot_send_escape_sequences() {
    let evil = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}x\n\r\u{200b}";
    let mut shot = snapshot(Instant::now(), 1.0);
    shot.status.gpus[0].name = evil.into();
    for client in &mut shot.status.clients {
        (client.name, client.command) = (evil.into(), Some(evil.into()));
        (client.unit, client.slice) = (evil.into(), evil.into());
        client.gpus[0].state = if client.id == 2 { evil.into() } else { "waiting".into() };
    }
    let mut ui = Ui::new(true);
    ui.update(shot);
    ui.say(evil);
    ui.popup = Some(Popup::new(evil, &[evil.into()]));
    let buffer = drawn(&ui, 80, 24);
    let is_bad = |c: char| c.is_control() || ('\u{200b}'..='\u{202e}').contains(&c);
    let symbols: String = buffer.content().iter().map(|cell| cell.symbol()).collect();
    assert!(!symbols.contains(is_bad), "{symbols:?}");
    assert!(symbols.contains("?]0;owned??[2J"), "what can be read of it stays");
    // Escape sequences of ratatui's own drawing are allowed.
    assert!(!ui.text(80).replace('\n', "").contains(is_bad));
}

#[test]
fn keys_act_on_the_selected_program() {
    let mut ui = ui(false);
    assert_eq!(press(&mut ui, KeyCode::Char('p')), None);
    assert!(ui.message.as_ref().is_some_and(|(text, _)| text.contains("select a program")), "{:?}", ui.message);
    press(&mut ui, KeyCode::Down);
    press(&mut ui, KeyCode::Down);
    let about = |action: Option<Action>| match action {
        Some(Action::Pause(program)) => format!("pause {}", program.pid),
        Some(Action::Resume(program)) => format!("resume {}", program.pid),
        Some(Action::Migrate(program, gpu)) => format!("migrate {} {gpu}", program.pid),
        Some(Action::Why(program)) => format!("why {}", program.pid),
        other => format!("{other:?}"),
    };
    assert_eq!(about(press(&mut ui, KeyCode::Char('w'))), "why 1203");
    assert_eq!(about(press(&mut ui, KeyCode::Char('p'))), "pause 1203");
    // The program stays selected when the order changes.
    press(&mut ui, KeyCode::Char('s'));
    press(&mut ui, KeyCode::Char('s'));
    assert_eq!(ui.sort, Sort::Waited);
    assert_eq!(about(press(&mut ui, KeyCode::Char('w'))), "why 1203");
    press(&mut ui, KeyCode::Up);
    for _ in 0..10 {
        press(&mut ui, KeyCode::Down);
    }
    assert_eq!(about(press(&mut ui, KeyCode::Char('p'))), "resume 1204", "the last one is paused");
    // The typed name of the GPU may contain letters that are keys otherwise.
    assert_eq!(press(&mut ui, KeyCode::Char('m')), None);
    for c in "q1".chars() {
        assert_eq!(press(&mut ui, KeyCode::Char(c)), None);
    }
    assert!(lines(&drawn(&ui, 80, 24)).contains("Esc cancels): q1"));
    press(&mut ui, KeyCode::Backspace);
    press(&mut ui, KeyCode::Backspace);
    press(&mut ui, KeyCode::Char('1'));
    assert_eq!(about(press(&mut ui, KeyCode::Enter)), "migrate 1204 1");
    assert_eq!(press(&mut ui, KeyCode::Char('q')), Some(Action::Quit));
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(ui.key(interrupt), Some(Action::Quit));
}

#[test]
fn reasons_are_shown_in_a_popup_until_a_key_is_pressed() {
    let mut ui = ui(false);
    let sentences =
        ["It has waited for GPU 0 for 4.2s, and one program is ahead of it.", "It is expected to run in about 3.0s."];
    ui.popup = Some(Popup::new("python3 (1202)", &sentences.map(str::to_owned)));
    let shown = lines(&drawn(&ui, 80, 21));
    for part in [" python3 (1202) ", "It has waited for GPU 0 for 4.2s", "It is expected to run in about 3.0s."] {
        assert!(shown.contains(part), "{shown}");
    }
    assert_eq!(press(&mut ui, KeyCode::Char('q')), None, "it only ends this");
    assert!(!lines(&drawn(&ui, 80, 21)).contains("It is expected"));
}

#[test]
fn the_sort_key_changes_the_order() {
    let first = |sort: Sort| {
        let mut ui = ui(false);
        ui.sort = sort;
        ui.rows().into_iter().find_map(|row| row.program).expect("a program").pid
    };
    assert_eq!(first(Sort::Memory), 1201);
    assert_eq!(first(Sort::Waited), 1203);
    assert_eq!(first(Sort::Name), 1203);
}

#[test]
fn many_gpus_have_one_line_each() {
    let mut shot = snapshot(Instant::now(), 1.0);
    for number in 1..8 {
        let uuid = format!("GPU-{}", number + 1);
        let gpu = Gpu { uuid, index: Some(number), holders: vec![], queue: vec![], ..shot.status.gpus[0].clone() };
        shot.status.gpus.push(gpu);
    }
    shot.status.clients[1].gpus.push(GpuUse { uuid: "GPU-8".into(), ..usage("idle", GIB, 0) });
    let mut ui = Ui::new(false);
    ui.update(shot);
    let shown = lines(&drawn(&ui, 80, 26));
    assert!(shown.contains("0    [#####"), "{shown}");
    assert!(shown.contains("] 18G of 24G  ollama (1201), 3.2s left, 2 wait"), "{shown}");
    assert_eq!(shown.matches("1202 python3").count(), 2, "it uses two: {shown}");
    assert!(shown.contains("GPU  ON GPU") || shown.contains("GPU   ON GPU"), "{shown}");
}

#[test]
fn states_have_short_descriptions() {
    let state = |change: fn(&mut Client)| {
        let mut shot = snapshot(Instant::now(), 1.0);
        change(&mut shot.status.clients[1]);
        let rows = model::rows(&shot, &History::default(), Sort::Name);
        rows.into_iter().find(|row| row.program.as_ref().is_some_and(|p| p.pid == 1202)).expect("a row").state
    };
    assert_eq!(state(|_| ()), "waits, about 13s");
    assert_eq!(
        state(|client| client.gpus[0].allowance = 2 * GIB),
        "waits, about 13s",
        "without the lock, nothing comes"
    );
    let comes = |client: &mut Client| (client.gpus[0].state, client.gpus[0].allowance) = ("holding".into(), 2 * GIB);
    assert_eq!(state(comes), "returning 10 %");
    assert_eq!(state(|client| client.sleep = "preparing".into()), "leaving 90 %");
    assert_eq!(state(|client| client.sleep = "restoring".into()), "returning, driver");
    assert_eq!(state(|client| client.sleep = "sleeping".into()), "asleep");
    assert_eq!(state(|client| client.stopped = true), "stopped");
    assert_eq!(state(|client| client.gpus[0].state = "attaching".into()), "waits for room");
    assert_eq!(state(|client| client.gpus[0].state = "stuck".into()), "work does not end");
    assert_eq!(state(|client| client.gpus.clear()), "uses no GPU");
    assert_eq!(state(|client| client.id = 77), "waits", "when is not known");
}

#[test]
fn programs_that_hold_a_gpu_together_share_its_time() {
    let mut ui = Ui::new(false);
    let begin = Instant::now();
    for (second, held) in [(0, 5.0), (2, 7.0)] {
        let mut shot = snapshot(begin + Duration::from_secs(second), held);
        // Both programs have held the GPU for the whole time.
        shot.status.clients[1].gpus[0].lock_time = held;
        ui.update(shot);
    }
    let had = |pid: u32| {
        let row = ui.rows().into_iter().find(|row| row.program.as_ref().is_some_and(|program| program.pid == pid));
        row.and_then(|row| row.amounts.had).expect("it is known")
    };
    assert_eq!((had(1201), had(1202), had(1203)), (0.5, 0.5, 0.0));
}

#[test]
fn a_holder_without_moving_memory_is_shown_as_running() {
    let mut ui = Ui::new(false);
    let begin = Instant::now();
    for second in [0, 2] {
        let mut shot = snapshot(begin + Duration::from_secs(second), 5.0);
        let usage = &mut shot.status.clients[0].gpus[0];
        (usage.swapped, usage.allowance) = (GIB, 12 * GIB);
        ui.update(shot);
    }
    let row = ui.rows().into_iter().find(|row| row.program.as_ref().is_some_and(|program| program.pid == 1201));
    assert_eq!(row.expect("a row").state, "runs, 3.2s left");
}

#[test]
fn problems_are_shown_below_the_head() {
    let mut ui = ui(false);
    let problem =
        "the configuration has an error: /etc/nvshare/nvshare.toml:2:16: time-quantum: \"banana\" is not a duration";
    if let Some(shot) = &mut ui.snapshot {
        shot.status.problems = vec![problem.into()];
    }
    let shown = lines(&drawn(&ui, 80, 24));
    let below: Vec<&str> = shown.lines().skip(1).take(2).collect();
    assert_eq!(below.join(" "), problem);
    let mut nothing = Ui::new(false);
    nothing.update(Snapshot {
        status: Status { problems: vec![problem.into()], ..Status::default() },
        pressure: Vec::new(),
        at: Instant::now(),
    });
    nothing.is_text = true;
    assert!(nothing.text(80).contains("the configuration has an error"), "{}", nothing.text(80));
}

#[test]
fn a_narrow_screen_omits_columns_but_keeps_names() {
    let shown = lines(&drawn(&ui(false), 60, 24));
    assert!(shown.contains("user-1000.slice") && shown.contains("1201 ollama"), "{shown}");
    assert!(shown.contains("SWAPPED") && !shown.contains("WAITED"), "{shown}");
}

#[test]
fn a_key_explains_columns_and_keys() {
    let mut ui = ui(false);
    assert_eq!(press(&mut ui, KeyCode::Char('?')), None);
    let shown = lines(&drawn(&ui, 80, 24));
    assert!(shown.contains("share of GPU time: granted by rules") && shown.contains("Ctrl-C"), "{shown}");
}
