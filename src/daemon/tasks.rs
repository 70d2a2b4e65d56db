//! Periodic jobs of the scheduling loop. Each job sleeps until a signal from the core tells that there
//! may be work.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use tokio::select;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{spawn_blocking, spawn_local};

use crate::daemon::checkpoint::{Helpers, Operation, Prepared};
use crate::daemon::control::status_line;
use crate::daemon::control::views::Views;
use crate::daemon::core::{Checkpoint, CheckpointRequest, Core, EXIT_TIME, Published, SAMPLE_QUIET, replace};
use crate::daemon::gpu::nvml::Query;
use crate::daemon::hibernate;
use crate::daemon::swap_files::Keeper;
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::StoredSwapFile;
use crate::daemon::usage::HoursUsed;
use crate::scheduler::ClientId;
use crate::sys::clock;

/// Intervals between samples of memory: while clients are active, and while they are idle.
const SAMPLE_BUSY: Duration = Duration::from_millis(200);
const SAMPLE_IDLE: Duration = Duration::from_secs(5);

/// Waits for the samples after the last client has disconnected. At the first, most exited processes have freed
/// their memory. At the second, all have. Without the second sample, memory of a slow process would count as another
/// program's when the next client connects. Without clients, no further samples are taken.
const LAST_WAITS: [Duration; 2] = [SAMPLE_BUSY, EXIT_TIME];

/// Interval between samples of host memory while idle clients have memory that other programs may need.
const HOST_PERIOD: Duration = Duration::from_secs(1);

/// Minimum time between two updates of the holders, clients and GPUs that D-Bus announces. Each update
/// copies all holders and clients.
const PUBLISHING_PERIOD: Duration = Duration::from_millis(100);

/// Minimum time between two announcements of a GPU's changes. Each looks at all clients.
const CHANGES_PERIOD: Duration = Duration::from_millis(500);

/// Minimum time between two announcements of limits to all clients.
const LIMITS_PERIOD: Duration = Duration::from_millis(100);

/// Maximum number of clients that are sent their limits in one step. The loop then serves other
/// clients.
const LIMITS_AT_ONCE: usize = 64;

/// Interval between two saves of programs' usage. A crash can lose the usage of this time.
const USAGE_PERIOD: Duration = Duration::from_secs(60);

/// Interval of the checks for programs that have used up their `gpu-hours`.
const HOURS_PERIOD: Duration = Duration::from_secs(5);

/// Interval of the checks of stopped processes.
const STOPPED_PERIOD: Duration = Duration::from_millis(200);

/// Minimum time between two updates of the status line. Locks can change hands many times a second.
const STATUS_PERIOD: Duration = Duration::from_secs(1);

/// Starts the task that handles the scheduler's requests to checkpoint and restore clients'
/// processes.
pub fn start_checkpoints(core: &Rc<RefCell<Core>>, helpers: Helpers) {
    let (request, mut requests) = mpsc::unbounded_channel();
    core.borrow_mut().host.sleep.use_helpers(request);
    let (core, helpers, prepared) = (core.clone(), Rc::new(helpers), Rc::new(RefCell::new(Prepared::default())));
    spawn_local(async move {
        while let Some(request) = requests.recv().await {
            let CheckpointRequest { client, operation, process, identity, pairs, mut awaited } = match request {
                Checkpoint::Prepare(client, identity) => {
                    prepared.borrow_mut().keep(Instant::now(), client, || helpers.prepare(&identity.tenant));
                    continue;
                }
                Checkpoint::Do(request) => request,
            };
            let (core, helpers, prepared) = (core.clone(), helpers.clone(), prepared.clone());
            spawn_local(async move {
                let helper = prepared.borrow_mut().take(client);
                let asked = helpers.ask(helper, operation, process, identity.uid, &identity.tenant, pairs);
                let (answer, helper) = select! {
                    answer = asked => answer,
                    () = awaited.closed() => return,
                };
                drop(awaited);
                core.borrow_mut().checkpointed(client, operation, &answer);
                // A client that moves to another GPU is woken immediately. The helper that put the client to sleep is
                // kept for the wake.
                if operation == Operation::Inspect || core.borrow().model.is_to_wake(client) {
                    prepared.borrow_mut().keep(Instant::now(), client, || helper);
                }
            });
        }
    });
}

/// Starts the thread that creates files for memory that fits neither on GPUs nor in RAM. `stored`: the
/// files that an earlier daemon created.
///
/// # Errors
/// No thread can be started.
pub fn start_swap_files(core: &Rc<RefCell<Core>>, stored: Vec<StoredSwapFile>) -> std::io::Result<()> {
    let (report, mut reports) = mpsc::unbounded_channel();
    core.borrow_mut().host.files.use_keeper(Keeper::start(report)?);
    {
        let Core { model, host, .. } = &mut *core.borrow_mut();
        stored.into_iter().for_each(|stored| host.files.inherit(model, stored));
    }
    let core = core.clone();
    spawn_local(async move {
        while let Some(report) = reports.recv().await {
            core.borrow_mut().swap_file_report(report);
        }
    });
    Ok(())
}

/// Starts all other jobs except [`keep_status_line`].
pub fn start(core: &Rc<RefCell<Core>>) {
    hibernate::settle_at_start();
    spawn_local(tick(core.clone()));
    spawn_local(sample_memory(core.clone()));
    spawn_local(check_stopped(core.clone()));
    spawn_local(publish(core.clone(), PUBLISHING_PERIOD, |core, published| {
        replace(&mut published.holders, core.model.holders())
            | replace(&mut published.clients, core.model.client_pids())
            | replace(&mut published.gpus, core.model.present_gpus())
            | replace(&mut published.attached, core.model.has_attachments())
    }));
    spawn_local(publish(core.clone(), CHANGES_PERIOD, |core, published| {
        replace(&mut published.states, core.model.gpu_states())
    }));
    spawn_local(announce_rules(core.clone()));
    spawn_local(save_usage(core.clone()));
}

/// Calls the scheduler whenever one of its deadlines expires.
async fn tick(core: Rc<RefCell<Core>>) {
    let timer = core.borrow().io.timer.clone();
    while timer.expired().await.is_ok() {
        core.borrow_mut().tick();
    }
}

/// Samples memory: often while clients are active, and rarely while they are idle. On a nearly full GPU, samples
/// often enough to notice other programs' growth in time.
async fn sample_memory(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().io.signals.clone();
    let mut last_waits = LAST_WAITS.into_iter();
    loop {
        core.borrow().io.query_nvml(Query::Sample);
        core.borrow_mut().sample_host();
        let period = core.borrow().model.sample_period();
        let wait = if !core.borrow().model.has_clients() {
            last_waits.next().unwrap_or(Duration::MAX)
        } else {
            last_waits = LAST_WAITS.into_iter();
            if clock::now().saturating_sub(signals.last_activity.get()) < SAMPLE_QUIET {
                tokio::time::sleep(period.min(SAMPLE_BUSY)).await;
                continue;
            }
            period.min(SAMPLE_IDLE)
        };
        select! {
            () = signals.activity.notified() => {}
            () = tokio::time::sleep(wait) => {}
            () = watch_host(&core) => {}
        }
    }
}

/// Samples host memory while other programs may need memory that idle clients can give back, or processes may
/// write to the files of clients that have left. Does not return.
async fn watch_host(core: &RefCell<Core>) {
    let is_watched = |core: &Core| match core.model.has_clients() {
        true => core.model.allocates_ahead() || core.host.files.are_used(&core.model.config),
        false => core.host.files.has_left_files(),
    };
    while is_watched(&core.borrow()) {
        tokio::time::sleep(HOST_PERIOD).await;
        core.borrow_mut().sample_host();
    }
    std::future::pending().await
}

/// Checks stopped processes until they continue.
async fn check_stopped(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().io.signals.clone();
    loop {
        signals.stopped.notified().await;
        loop {
            tokio::time::sleep(STOPPED_PERIOD).await;
            if !core.borrow_mut().check_stopped() {
                break;
            }
        }
    }
}

/// Sends clients their rules on GPUs that were found after the clients connected.
async fn announce_rules(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().io.signals.clone();
    loop {
        signals.limits.notified().await;
        let mut last = Some(ClientId(0));
        while let Some(client) = last {
            last = core.borrow_mut().model.announce_rules_after(client, LIMITS_AT_ONCE);
            tokio::task::yield_now().await;
        }
        tokio::time::sleep(LIMITS_PERIOD).await;
    }
}

/// Publishes a part of the state for D-Bus after each event, at most once in `period`.
async fn publish(core: Rc<RefCell<Core>>, period: Duration, update: fn(&Core, &mut Published) -> bool) {
    let mut events = core.borrow().io.signals.events.subscribe();
    loop {
        {
            let core = core.borrow();
            core.io.publish(|published| update(&core, published));
        }
        tokio::time::sleep(period).await;
        let _ = events.changed().await; // the sender does not end before the loop
    }
}

/// Adds the GPU time that earlier daemons counted, once the time has been read from disk.
pub fn load_hours(core: &Rc<RefCell<Core>>, saved: oneshot::Receiver<Result<HoursUsed, String>>) {
    let core = core.clone();
    spawn_local(async move {
        if let Ok(saved) = saved.await {
            core.borrow_mut().load_hours(saved);
        }
    });
}

/// Saves programs' usage at each full minute of the clock, so that no saved period belongs to two
/// hours. If any rule has `gpu-hours`, the used GPU time is checked more often.
async fn save_usage(core: Rc<RefCell<Core>>) {
    loop {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let passed = Duration::new(since.as_secs() % USAGE_PERIOD.as_secs(), since.subsec_nanos());
        let left = USAGE_PERIOD.saturating_sub(passed);
        tokio::time::sleep(left.min(HOURS_PERIOD)).await;
        let mut core = core.borrow_mut();
        if left <= HOURS_PERIOD {
            core.record_usage();
            core.observe.usage.save();
        } else if core.model.limits_hours() {
            core.record_usage();
        }
        core.check_hours();
    }
}

/// Keeps the line that `systemctl status` shows up to date.
pub async fn keep_status_line(core: &Rc<RefCell<Core>>, views: &Views) {
    let mut published = core.borrow().io.published.subscribe();
    let mut shown = String::new();
    while let Some(view) = views.next().await {
        let line =
            spawn_blocking(move || status_line::format(view.problems(), &view.list_gpus(), &view.list_clients()));
        let line = line.await.unwrap_or_default();
        if line != shown {
            systemd::status(&line);
            shown = line;
        }
        tokio::time::sleep(STATUS_PERIOD).await;
        let _ = published.changed().await; // the sender does not end before the loop
    }
}
