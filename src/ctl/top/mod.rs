//! `nvsharectl top`: shows GPUs and programs on the whole terminal, updates them every second, and
//! offers keys to control them. Without a terminal, or on a terminal that cannot move its cursor,
//! it prints the same data as text.
//!
//! All data comes from the scheduler over D-Bus or the control socket. Separate tasks query the
//! scheduler, so keys work even if the scheduler does not respond. `model` computes the displayed
//! data, and `screen` draws it.

mod model;
mod screen;
#[cfg(test)]
mod tests;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::widgets::TableState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use zbus::export::futures_core::Stream;

use super::{CtlError, Target, block_on, status};
use crate::bus::SchedulerProxy;
use crate::identity::printable;
use model::{History, Key, Program, Snapshot, Sort};
use screen::{Popup, Screen};

const PERIOD: Duration = Duration::from_secs(1);
/// The time for which a message replaces the line of keys.
const MESSAGE_TIME: Duration = Duration::from_secs(8);
/// The width without a terminal, which is the usual width of a terminal.
const WIDTH: u16 = 80;
const KEYS: &str = "up/down select  s sort  p pause  m migrate  w why  ? help  q quit";

const HELP: [&str; 8] = [
    "ON GPU, SWAPPED  memory on the GPU, and in host memory",
    "DUE, HAD         share of GPU time: granted by rules, and used in the last",
    "                 minute; programs that run together share that time",
    "WAITED           time spent waiting for turns",
    "up, down         select a program",
    "p, m, w          pause or resume it, migrate it, explain why it waits",
    "s                sort by memory, time had, waits, name",
    "q, Ctrl-C        quit",
];

/// Shows the screen until a key ends it, or until it has been updated `iterations` times.
///
/// # Errors
/// The scheduler does not answer the first query, or the terminal fails.
pub fn top(target: &Target, iterations: Option<u32>) -> Result<(), CtlError> {
    let is_dumb = std::env::var_os("TERM").is_none_or(|name| name.is_empty() || name == "dumb");
    let is_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    block_on(async {
        // Connects before changing the terminal, so that an error is printed normally.
        let scheduler = target.connect().await?;
        let first = fetch(&scheduler).await?;
        if !is_terminal || is_dumb {
            return print(&scheduler, first, iterations.unwrap_or(u32::MAX)).await;
        }
        let failed = |e: std::io::Error| CtlError::Failed(format!("cannot use the terminal: {e}"));
        let has_colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let mut terminal = ratatui::try_init().map_err(failed)?;
        let shown = show(&mut terminal, target, scheduler, first, Ui::new(has_colour), iterations).await;
        let restored = ratatui::try_restore();
        shown.map_err(failed)?;
        restored.map_err(failed)
    })
}

/// Queries all data of one screen.
async fn fetch(scheduler: &SchedulerProxy<'_>) -> Result<Snapshot, CtlError> {
    let status = status::fetch(scheduler).await?;
    // An older scheduler does not support `ListPressure`.
    let pressure = scheduler.list_pressure().await.unwrap_or_default();
    Ok(Snapshot { status, pressure, at: Instant::now() })
}

/// Prints the screen as text until standard output is closed.
async fn print(scheduler: &SchedulerProxy<'_>, first: Snapshot, iterations: u32) -> Result<(), CtlError> {
    let mut ui = Ui::new(false);
    ui.is_text = true;
    ui.update(first);
    for left in (0..iterations).rev() {
        let text = ui.text(WIDTH);
        match std::io::stdout().write_all(text.as_bytes()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => break,
            Err(e) => return Err(CtlError::Failed(format!("cannot print: {e}"))),
            Ok(()) => {}
        }
        if left > 0 {
            tokio::time::sleep(PERIOD).await;
            ui.update(fetch(scheduler).await?);
        }
    }
    Ok(())
}

/// The result of a request to the scheduler.
enum Reply {
    Snapshot(Box<Result<(SchedulerProxy<'static>, Snapshot), CtlError>>),
    Done(String),
    Why(Popup),
}

/// Shows the screen on a terminal.
async fn show(
    terminal: &mut ratatui::DefaultTerminal,
    target: &Target,
    scheduler: SchedulerProxy<'static>,
    first: Snapshot,
    mut ui: Ui,
    iterations: Option<u32>,
) -> std::io::Result<()> {
    let (answers, mut answered) = mpsc::unbounded_channel();
    let mut events = EventStream::new();
    let (mut ends, mut hangs_up) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + PERIOD, PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut left = iterations;
    ui.update(first);
    // `scheduler` is `None` while the connection is lost. At most one query is pending.
    let (mut scheduler, mut is_asking) = (Some(scheduler), false);
    let mut table = TableState::new();
    loop {
        let screen = ui.screen();
        terminal.draw(|frame| screen.draw(frame.area(), frame.buffer_mut(), &mut table))?;
        tokio::select! {
            event = std::future::poll_fn(|context| std::pin::Pin::new(&mut events).poll_next(context)) => {
                let Some(event) = event else { return Ok(()) };
                let Event::Key(key) = event? else { continue };
                match ui.key(key) {
                    Some(Action::Quit) => return Ok(()),
                    Some(action) => match &scheduler {
                        Some(scheduler) => drop(tokio::spawn(carry_out(action, scheduler.clone(), answers.clone()))),
                        None => ui.say("the scheduler does not answer"),
                    },
                    None => {}
                }
            }
            _ = ticks.tick() => {
                ui.forget_message();
                if let Some(left) = &mut left {
                    *left = left.saturating_sub(1);
                    if *left == 0 {
                        return Ok(());
                    }
                }
                if is_asking {
                    let age = ui.snapshot.as_ref().map_or(0, |snapshot| snapshot.at.elapsed().as_secs());
                    ui.say(&format!("the scheduler does not answer. These figures are {age} s old"));
                } else {
                    is_asking = true;
                    tokio::spawn(ask(target.clone(), scheduler.clone(), answers.clone()));
                }
            }
            Some(answer) = answered.recv() => match answer {
                Reply::Snapshot(result) => {
                    is_asking = false;
                    match *result {
                        Ok((connected, snapshot)) => {
                            scheduler = Some(connected);
                            ui.update(snapshot);
                        }
                        Err(e) => {
                            scheduler = None;
                            ui.say(&e.to_string());
                        }
                    }
                }
                Reply::Done(text) => ui.say(&text),
                Reply::Why(popup) => ui.popup = Some(popup),
            },
            _ = ends.recv() => return Ok(()),
            _ = hangs_up.recv() => return Ok(()),
        }
    }
}

async fn ask(target: Target, scheduler: Option<SchedulerProxy<'static>>, answers: mpsc::UnboundedSender<Reply>) {
    let answer = async {
        let scheduler = match scheduler {
            Some(scheduler) => scheduler,
            None => target.connect().await?,
        };
        let snapshot = fetch(&scheduler).await?;
        Ok((scheduler, snapshot))
    };
    let _ = answers.send(Reply::Snapshot(Box::new(answer.await)));
}

/// Carries out an action. An action that needs a password fails, because a password prompt would
/// need this terminal.
async fn carry_out(action: Action, scheduler: SchedulerProxy<'static>, answers: mpsc::UnboundedSender<Reply>) {
    let done = |result: zbus::Result<()>, text: String| match result {
        Ok(()) => Reply::Done(text),
        Err(e) => Reply::Done(printable(&CtlError::from(e).to_string())),
    };
    let answer = match action {
        Action::Quit => return,
        Action::Pause(program) => done(scheduler.pause(program.pid).await, format!("pausing {}", program.title())),
        Action::Resume(program) => done(scheduler.resume(program.pid).await, format!("resumed {}", program.title())),
        Action::Migrate(program, gpu) => {
            let moved = scheduler.migrate(program.pid, &gpu).await;
            done(moved, format!("{} is on GPU {gpu}", program.title()))
        }
        Action::Why(program) => match scheduler.explain(program.pid).await {
            Ok(sentences) => Reply::Why(Popup::new(&program.title(), &sentences)),
            Err(e) => done(Err(e), String::new()),
        },
    };
    let _ = answers.send(answer);
}

/// An action that a key requests.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Quit,
    Pause(Program),
    Resume(Program),
    Migrate(Program, String),
    Why(Program),
}

impl Program {
    fn title(&self) -> String {
        format!("{} ({})", self.name, self.pid)
    }
}

/// The displayed data, and the state that keys change.
#[derive(Debug, Default)]
struct Ui {
    has_colour: bool,
    /// Whether the output is printed as text, without keys.
    is_text: bool,
    sort: Sort,
    history: History,
    snapshot: Option<Snapshot>,
    selected: Option<Key>,
    popup: Option<Popup>,
    /// The program to migrate, and the part of the GPU's name typed so far.
    migrate: Option<(Program, String)>,
    message: Option<(String, Instant)>,
}

impl Ui {
    fn new(has_colour: bool) -> Self {
        Self { has_colour, ..Self::default() }
    }

    fn update(&mut self, snapshot: Snapshot) {
        self.history.add(&snapshot);
        self.snapshot = Some(snapshot);
    }

    fn say(&mut self, text: &str) {
        self.message = Some((printable(text), Instant::now()));
    }

    fn forget_message(&mut self) {
        self.message.take_if(|(_, since)| since.elapsed() >= MESSAGE_TIME);
    }

    fn rows(&self) -> Vec<model::Row> {
        self.snapshot.as_ref().map_or_else(Vec::new, |snapshot| model::rows(snapshot, &self.history, self.sort))
    }

    fn screen(&self) -> Screen {
        let Some(snapshot) = &self.snapshot else { return Screen::default() };
        let status = &snapshot.status;
        let rows = self.rows();
        let is_selected = |row: &model::Row| row.program.as_ref().map(|program| &program.key) == self.selected.as_ref();
        let selected = self.selected.is_some().then(|| rows.iter().position(is_selected)).flatten();
        let foot = match (&self.migrate, &self.message) {
            (Some((program, typed)), _) => {
                format!("move {} to GPU (number or UUID, Esc cancels): {typed}", program.title())
            }
            (_, Some((text, _))) => text.clone(),
            _ if self.is_text => String::new(),
            _ => format!("{KEYS}   by {}", self.sort.name()),
        };
        Screen {
            head: format!(
                "nvshare {}  {}  {}  quantum {}s  anti-thrash {}  policy {}",
                printable(&status.version),
                count(status.gpus.len(), "GPU"),
                count(status.clients.len(), "program"),
                status.time_quantum,
                printable(&status.anti_thrash),
                printable(&status.policy)
            ),
            problems: status.problems.iter().map(|problem| printable(problem)).collect(),
            panels: model::panels(snapshot, &self.history),
            rows,
            foot,
            has_colour: self.has_colour,
            selected,
            popup: self.popup.clone(),
        }
    }

    /// The whole screen as lines of text.
    fn text(&self, width: u16) -> String {
        let screen = self.screen();
        let mut buffer = Buffer::empty(Rect { x: 0, y: 0, width, height: screen.height(width) });
        screen.draw(buffer.area, &mut buffer, &mut TableState::new());
        lines(&buffer)
    }

    fn program(&self) -> Option<Program> {
        let is_selected = |program: &Program| Some(&program.key) == self.selected.as_ref();
        self.rows().into_iter().filter_map(|row| row.program).find(is_selected)
    }

    /// Selects the next or the previous process of the tree.
    fn step(&mut self, is_down: bool) {
        let keys: Vec<Key> = self.rows().into_iter().filter_map(|row| Some(row.program?.key)).collect();
        let at = keys.iter().position(|key| Some(key) == self.selected.as_ref());
        let next = match at {
            None => 0,
            Some(at) if is_down => (at + 1).min(keys.len() - 1),
            Some(at) => at.saturating_sub(1),
        };
        self.selected = keys.into_iter().nth(next);
    }

    fn key(&mut self, key: KeyEvent) -> Option<Action> {
        if key.kind == KeyEventKind::Release {
            return None;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return (key.code == KeyCode::Char('c')).then_some(Action::Quit);
        }
        if self.popup.take().is_some() {
            return None;
        }
        if let Some((program, mut typed)) = self.migrate.take() {
            match key.code {
                KeyCode::Enter if typed.is_empty() => return None,
                KeyCode::Enter => {
                    self.say(&format!("{} is moving to GPU {typed}", program.title()));
                    return Some(Action::Migrate(program, typed));
                }
                KeyCode::Esc => return None,
                KeyCode::Backspace => drop(typed.pop()),
                KeyCode::Char(c) => typed.push(c),
                _ => {}
            }
            self.migrate = Some((program, typed));
            return None;
        }
        match key.code {
            KeyCode::Char('q') => return Some(Action::Quit),
            KeyCode::Char(c @ ('p' | 'm' | 'w')) => return self.about_program(c),
            KeyCode::Char('?') => self.popup = Some(Popup::new("help", &HELP.map(str::to_owned))),
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Down | KeyCode::Char('j') => self.step(true),
            KeyCode::Up | KeyCode::Char('k') => self.step(false),
            KeyCode::Esc => (self.selected, self.message) = (None, None),
            _ => {}
        }
        None
    }

    fn about_program(&mut self, key: char) -> Option<Action> {
        let Some(program) = self.program() else {
            self.say("select a program first (keys up and down)");
            return None;
        };
        if program.pid == 0 {
            self.say("its process is in a PID namespace that the scheduler cannot see");
            return None;
        }
        match key {
            'p' if program.is_paused => Some(Action::Resume(program)),
            'p' => Some(Action::Pause(program)),
            'w' => Some(Action::Why(program)),
            _ => {
                self.migrate = Some((program, String::new()));
                None
            }
        }
    }
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn lines(buffer: &Buffer) -> String {
    let line = |y: u16| {
        let symbols = (buffer.area.left()..buffer.area.right()).filter_map(|x| Some(buffer.cell((x, y))?.symbol()));
        symbols.collect::<String>().trim_end().to_owned() + "\n"
    };
    (buffer.area.top()..buffer.area.bottom()).map(line).collect()
}
