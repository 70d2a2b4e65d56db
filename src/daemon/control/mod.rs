//! Carries out requests of the D-Bus object on the scheduling loop: views, changes of settings and
//! rules, and reloads.
//!
//! - [`changes`]: settings changed at run time.
//! - [`last_good`]: the last valid configuration. The daemon starts with this configuration if the
//!   files are invalid.
//! - [`status_line`]: the line that `systemctl status` shows.
//! - [`views`]: copies of the state, for readers.

pub mod changes;
pub mod last_good;
pub mod status_line;
pub mod views;

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Mutex, oneshot};
use tokio::task::{spawn_blocking, spawn_local};
use tracing::{info, warn};
use zbus::fdo;

use crate::bus::Error;
use crate::config::rules::Addition;
use crate::config::{Config, LogLevel};
use crate::daemon::bus::{Change, Failure, Request};
use crate::daemon::connections::claims::ClaimSockets;
use crate::daemon::connections::{Connections, lock, room};
use crate::daemon::core::bundle::Snapshot;
use crate::daemon::core::{Core, check_room};
use crate::daemon::gpu::nvml::Query;
use crate::daemon::hibernate;
use crate::daemon::logging;
use crate::daemon::state_file::Saving;
use crate::daemon::systemd;
use crate::scheduler::ClientId;
use changes::Changes;
use last_good::{LastGood, in_effect_despite};
use views::Views;

/// Carries out the D-Bus object's requests.
pub struct Control {
    /// The path of the configuration file. `None` for the default path.
    pub config: Option<PathBuf>,
    /// The log level, if set on the command line.
    pub log_level: Option<LogLevel>,
    /// The time quantum, if set on the command line.
    pub time_quantum: Option<Duration>,
    pub log: logging::Control,
    pub changes: Changes,
    pub last_good: LastGood,
    /// True if the files had an error at startup and the default configuration is in effect.
    pub is_default: Cell<bool>,
    /// Held while the configuration is read. Reloads then take effect in the order in which they were
    /// requested.
    pub loading: Mutex<()>,
    pub views: Views,
}

impl Control {
    /// Carries out a request of the D-Bus object, whose caller is already authorized.
    pub fn answer(
        self: &Rc<Self>,
        core: &Rc<RefCell<Core>>,
        connections: &Rc<Connections>,
        claims: Option<&mut ClaimSockets>,
        request: Request,
    ) {
        // If a caller has stopped waiting, sending its reply fails. That is not an error.
        match request {
            Request::View(reply) => self.views.answer(reply),
            Request::Usage(query, reply) => {
                core.borrow_mut().record_usage();
                core.borrow().observe.usage.read(query, reply);
            }
            Request::SetPods(pods, reply) => {
                drop(reply.send(core.borrow_mut().change_containers(|known, rules| known.set_pods(pods, rules))))
            }
            Request::SetClaims(new, reply) => {
                let none =
                    || fdo::Error::NotSupported("this scheduler does not serve claims. Start it with --claims".into());
                drop(reply.send(claims.map(|claims| claims.set(new)).ok_or_else(none)));
            }
            Request::CheckLock(request, reply) => drop(reply.send(lock::check(&core.borrow(), &request))),
            Request::Lock(request, reply) => drop(reply.send(lock::acquire(core, connections, request))),
            Request::CheckRoom(request, reply) => drop(reply.send(check_room(&core.borrow().model, &request))),
            Request::Room(request, reply) => room::make(core, request, reply),
            Request::TerminateLock(client, reply) => drop(reply.send(core.borrow().model.end_lock(ClientId(client)))),
            Request::UsersOf(pid, reply) => drop(reply.send(core.borrow().model.users_of(pid))),
            Request::Pause { pid, is_paused, users, reply } => {
                let pause = core.borrow_mut().with_host(|host, model, events| {
                    if !is_paused {
                        host.departures.check_resume(model, pid)?;
                    }
                    host.sleep.pause(model, events, pid, is_paused, &users)
                });
                answer_when_saved(pause, reply);
            }
            Request::UsersOfTree(pid, reply) => hibernate::answer_users_of_tree(core, pid, reply),
            Request::Hibernation(request, budget) => hibernate::answer(core, request, budget),
            Request::Migrate { pid, gpu, users, reply } => core
                .borrow_mut()
                .with_host(|host, model, events| host.moves.begin(model, events, (pid, &gpu), &users, reply)),
            Request::Drain(gpu, drained, reply) => {
                let drain =
                    core.borrow_mut().with_host(|host, model, events| host.moves.drain(model, events, &gpu, drained));
                answer_when_saved(drain, reply);
            }
            Request::Debug(view, reply) => drop(reply.send(Box::new(Snapshot::new(&core.borrow(), view)))),
            Request::ReleaseDriver(lasts, reply) => {
                let (done, released) = oneshot::channel();
                core.borrow().io.query_nvml(Query::Release(lasts, done));
                let programs = core.borrow().model.programs();
                spawn_local(async move {
                    let _ = released.await;
                    let _ = reply.send(programs);
                });
            }
            Request::Suspend(suspended, done) => {
                core.borrow_mut().with_host(|_, model, events| events.extend(model.suspend(suspended)));
                spawn_local(evacuate(core.clone(), done));
            }
            // The following requests read or write files, so they run in tasks that do not block
            // the scheduling loop.
            Request::Reload(by, reply) => {
                let (control, core) = (self.clone(), core.clone());
                spawn_local(async move { reply.send(control.reload(&core, &by).await) });
            }
            Request::Set(change, by, reply) => {
                let (control, core) = (self.clone(), core.clone());
                spawn_local(async move { reply.send(control.set(&core, change, &by).await) });
            }
            Request::SetRule(addition, by, reply) => {
                let (control, core) = (self.clone(), core.clone());
                spawn_local(async move { reply.send(control.set_rule(&core, *addition, &by).await) });
            }
            Request::Reset(by, reply) => {
                let (control, core) = (self.clone(), core.clone());
                spawn_local(async move { reply.send(control.reset(&core, &by).await) });
            }
        }
    }

    /// Reads the configuration files again. `by`: the caller, for the log.
    ///
    /// # Errors
    /// The files are invalid. The configuration then stays unchanged.
    pub async fn reload(&self, core: &RefCell<Core>, by: &str) -> Result<(), String> {
        let _one_at_a_time = self.loading.lock().await;
        systemd::reloading();
        let config = self.load(core).await;
        // The turn begins only after the files were read, so that the configuration includes
        // changes that were made during the read.
        let _turn = self.changes.begin().await;
        let result = config.map(|mut config| {
            self.changes.apply(&mut config);
            self.configure(core, config, by);
        });
        match &result {
            Ok(()) => info!(name: "configuration-read", by, "the configuration was reloaded by {by}"),
            Err(e) => {
                warn!(name: "configuration-wrong", "cannot reload the configuration, keeping the current one: {e}")
            }
        }
        systemd::ready();
        result
    }

    /// Changes a setting at run time.
    async fn set(&self, core: &RefCell<Core>, change: Change, by: &str) -> Result<(), Failure> {
        self.changes.begin().await.set(change).await?;
        let mut core = core.borrow_mut();
        let mut config = core.model.config.clone();
        change.apply(&mut config.settings);
        core.configure(config, by);
        Ok(())
    }

    /// Sets or removes a rule at run time.
    async fn set_rule(&self, core: &RefCell<Core>, addition: Addition, by: &str) -> Result<(), Failure> {
        let turn = self.changes.begin().await;
        if let Some(text) = addition.rule().and_then(|rule| core.borrow().model.config.rules.contradicted(rule)) {
            return Err(fdo::Error::InvalidArgs(text).into());
        }
        let name = addition.name().to_owned();
        let keys = addition.rule().map(|rule| rule.to_table().to_string().trim_end().replace('\n', ", "));
        turn.set_rule(addition).await?;
        let mut core = core.borrow_mut();
        let mut config = core.model.config.clone();
        self.changes.apply(&mut config);
        core.configure(config, by);
        match keys {
            Some(keys) => info!(name: "rules-changed", rule = name, by, "rule {name:?} was set by {by}: {keys}"),
            None => info!(name: "rules-changed", rule = name, by, "rule {name:?} was removed by {by}"),
        }
        Ok(())
    }

    /// Discards the changes made at run time.
    async fn reset(&self, core: &RefCell<Core>, by: &str) -> Result<(), Failure> {
        let _one_at_a_time = self.loading.lock().await;
        // Reads the files before discarding the changes, so that an error in the files leaves
        // everything unchanged.
        let config = self.load(core).await.map_err(Error::InvalidConfiguration)?;
        let turn = self.changes.begin().await;
        turn.reset().await?;
        self.configure(core, config, by);
        info!(name: "settings-reset", by, "settings and rules that were set at run time were reset by {by}");
        Ok(())
    }

    /// Reads the configuration files on another thread. Rules in the files name users and groups, and a
    /// directory service may take long to look these names up.
    async fn load(&self, core: &RefCell<Core>) -> Result<Config, String> {
        let (path, last_good) = (self.config.clone(), self.last_good.clone());
        let read = spawn_blocking(move || last_good.load(path.as_deref()).map_err(|e| e.to_string()));
        let read = read.await.unwrap_or_else(|e| Err(e.to_string()));
        let is_default = self.is_default.get() && read.is_err();
        self.is_default.set(is_default);
        let error = read.as_ref().err().map(|e| in_effect_despite(e, is_default));
        core.borrow_mut().set_problems(|problems| problems.configuration = error);
        let mut config = read?;
        config.settings.time_quantum = self.time_quantum.unwrap_or(config.settings.time_quantum);
        Ok(config)
    }

    fn configure(&self, core: &RefCell<Core>, config: Config, by: &str) {
        self.log.set(self.log_level.unwrap_or(config.log_level));
        core.borrow_mut().configure(config, by);
    }
}

/// Interval of the checks for evicted memory.
const EVACUATION_LOOK: Duration = Duration::from_millis(20);

/// Sends the answer once all evictable memory has been evicted from the GPUs, or the host has resumed.
async fn evacuate(core: Rc<RefCell<Core>>, done: oneshot::Sender<()>) {
    let is_evacuated = |core: &Core| core.model.is_evacuated();
    while !is_evacuated(&core.borrow()) {
        tokio::time::sleep(EVACUATION_LOOK).await;
    }
    let _ = done.send(());
}

/// Replies to the caller once its order is in effect and, if possible, saved for the next daemon.
fn answer_when_saved(ordered: fdo::Result<Saving>, reply: oneshot::Sender<fdo::Result<()>>) {
    spawn_local(async move {
        let result = match ordered {
            Ok(saving) => {
                // Without a state directory, nothing can be saved.
                if let Ok(Err(e)) = saving.await {
                    warn!("cannot save an order for the next scheduler in {e}. A restart will undo the order");
                }
                Ok(())
            }
            Err(e) => Err(e),
        };
        reply.send(result)
    });
}
