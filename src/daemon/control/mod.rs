//! What D-Bus callers request of the scheduling loop beside the core's own functions: changes of settings
//! and rules, reloads, and orders that are saved.
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
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Mutex, oneshot};
use tokio::task::{spawn_blocking, spawn_local};
use tracing::{info, warn};
use zbus::{BoxDBusError, fdo};

use crate::bus::Error;
use crate::config::rules::Addition;
use crate::config::{Config, LogLevel};
use crate::daemon::connections::Connections;
use crate::daemon::connections::claims::ClaimSockets;
use crate::daemon::core::Core;
use crate::daemon::core::claims::Claims;
use crate::daemon::core::pods::{Pods, Refused};
use crate::daemon::gpu::nvml::Query;
use crate::daemon::logging;
use crate::daemon::state_file::Saving;
use crate::daemon::systemd;
use crate::daemon::usage::{self, UsageAnswer};
use changes::{Changed, Changes};
use last_good::{LastGood, in_effect_despite};

/// The daemon, for requests whose callers are already authorized.
pub struct Control {
    pub core: Rc<RefCell<Core>>,
    pub connections: Rc<Connections>,
    /// `None` if the daemon serves no claims.
    pub claims: RefCell<Option<ClaimSockets>>,
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
}

impl Control {
    /// Answers a query about the recorded usage, which includes the usage up to now.
    pub fn read_usage(&self, query: usage::Query, reply: oneshot::Sender<UsageAnswer>) {
        let mut core = self.core.borrow_mut();
        core.record_usage();
        core.observe.usage.read(query, reply);
    }

    /// Replaces the list of this node's pods. Returns the refused rules.
    pub fn set_pods(&self, pods: Pods) -> Refused {
        self.core.borrow_mut().change_containers(|known, rules| known.set_pods(pods, rules))
    }

    /// Replaces the list of this node's claims. Returns the refused claims.
    ///
    /// # Errors
    /// The daemon serves no claims.
    pub fn set_claims(&self, claims: Claims) -> fdo::Result<Refused> {
        let none = || fdo::Error::NotSupported("this scheduler does not serve claims. Start it with --claims".into());
        self.claims.borrow_mut().as_mut().map(|sockets| sockets.set(claims)).ok_or_else(none)
    }

    /// Pauses a program (`true`), or resumes it (`false`). Returns once the order is in effect and, if
    /// possible, saved for the next daemon. `users`: the users whose programs the caller may control.
    ///
    /// # Errors
    /// No such program exists, or it cannot be resumed now.
    pub async fn pause(&self, pid: u32, is_paused: bool, users: &BTreeSet<u32>) -> fdo::Result<()> {
        let order = self.core.borrow_mut().with_host(|host, model, events| {
            if !is_paused {
                host.departures.check_resume(model, pid)?;
            }
            host.sleep.pause(model, events, pid, is_paused, users)
        });
        saved(order?).await;
        Ok(())
    }

    /// Drains a GPU (`true`), or allows its use again (`false`). Returns as [`Self::pause`] does.
    ///
    /// # Errors
    /// The GPU does not exist.
    pub async fn drain(&self, gpu: &str, drained: bool) -> fdo::Result<()> {
        let order =
            self.core.borrow_mut().with_host(|host, model, events| host.moves.drain(model, events, gpu, drained));
        saved(order?).await;
        Ok(())
    }

    /// Moves a program to another GPU. Replies once the move has succeeded or failed. `users`: the users
    /// whose programs the caller may move.
    pub fn migrate(&self, pid: u32, gpu: &str, users: &BTreeSet<u32>, reply: oneshot::Sender<fdo::Result<()>>) {
        let mut core = self.core.borrow_mut();
        core.with_host(|host, model, events| host.moves.begin(model, events, (pid, gpu), users, reply));
    }

    /// Releases the driver for at most this time. Returns the programs that still use it.
    pub async fn release_driver(&self, lasts: Duration) -> Vec<u64> {
        let (done, released) = oneshot::channel();
        self.core.borrow().io.query_nvml(Query::Release(lasts, done));
        let programs = self.core.borrow().model.programs();
        let _ = released.await; // closed without an NVML thread
        programs
    }

    /// Handles an imminent suspend of the host (`true`), or its end (`false`). Replies once all evictable
    /// memory has been evicted from the GPUs.
    pub fn suspend(&self, suspended: bool, done: oneshot::Sender<()>) {
        self.core.borrow_mut().with_host(|_, model, events| events.extend(model.suspend(suspended)));
        spawn_local(evacuate(self.core.clone(), done));
    }

    /// Reads the configuration files again. `by`: the caller, for the log.
    ///
    /// # Errors
    /// The files are invalid. The configuration then stays unchanged.
    pub async fn reload(&self, by: &str) -> Result<(), String> {
        let _one_at_a_time = self.loading.lock().await;
        systemd::reloading();
        let config = self.load().await;
        // The turn begins only after the files were read, so that the configuration includes
        // changes that were made during the read.
        let turn = self.changes.begin().await;
        let result = config.map(|mut config| {
            turn.apply(&mut config);
            self.configure(config, by);
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

    /// Changes settings at run time.
    ///
    /// # Errors
    /// The change cannot be saved, and has no effect.
    pub async fn set(&self, change: impl FnOnce(&mut Changed), by: &str) -> fdo::Result<()> {
        self.change(by, |changed| {
            change(changed);
            Ok(())
        })
        .await
    }

    /// Sets or removes a rule at run time.
    ///
    /// # Errors
    /// The rule contradicts another one, or the change cannot be saved. It then has no effect.
    pub async fn set_rule(&self, addition: Addition, by: &str) -> fdo::Result<()> {
        let name = addition.name().to_owned();
        let keys = addition.rule().map(|rule| rule.to_table().to_string().trim_end().replace('\n', ", "));
        self.change(by, |changed| {
            let core = self.core.borrow();
            let contradicted = addition.rule().and_then(|rule| core.model.config.rules.contradicted(rule));
            contradicted.map_or_else(|| changed.rule.set(addition), Err).map_err(fdo::Error::InvalidArgs)
        })
        .await?;
        match keys {
            Some(keys) => info!(name: "rules-changed", rule = name, by, "rule {name:?} was set by {by}: {keys}"),
            None => info!(name: "rules-changed", rule = name, by, "rule {name:?} was removed by {by}"),
        }
        Ok(())
    }

    /// Changes settings or rules, saves the change, and puts it into effect.
    async fn change(&self, by: &str, change: impl FnOnce(&mut Changed) -> fdo::Result<()>) -> fdo::Result<()> {
        let mut turn = self.changes.begin().await;
        turn.change(change).await?;
        let mut core = self.core.borrow_mut();
        let mut config = core.model.config.clone();
        turn.apply(&mut config);
        core.configure(config, by);
        Ok(())
    }

    /// Discards the changes made at run time.
    ///
    /// # Errors
    /// The configuration files are invalid, or the change cannot be saved. Then nothing changes.
    pub async fn reset(&self, by: &str) -> Result<(), BoxDBusError> {
        let _one_at_a_time = self.loading.lock().await;
        // Reads the files before discarding the changes, so that an error in the files leaves
        // everything unchanged.
        let config = self.load().await.map_err(Error::InvalidConfiguration)?;
        let mut turn = self.changes.begin().await;
        let discard = |changed: &mut Changed| {
            *changed = Changed::default();
            Ok(())
        };
        turn.change(discard).await?;
        self.configure(config, by);
        info!(name: "settings-reset", by, "settings and rules that were set at run time were reset by {by}");
        Ok(())
    }

    /// Reads the configuration files on another thread. Rules in the files name users and groups, and a
    /// directory service may take long to look these names up.
    async fn load(&self) -> Result<Config, String> {
        let (path, last_good) = (self.config.clone(), self.last_good.clone());
        let read = spawn_blocking(move || last_good.load(path.as_deref()).map_err(|e| e.to_string()));
        let read = read.await.unwrap_or_else(|e| Err(e.to_string()));
        let is_default = self.is_default.get() && read.is_err();
        self.is_default.set(is_default);
        let error = read.as_ref().err().map(|e| in_effect_despite(e, is_default));
        self.core.borrow_mut().set_problems(|problems| problems.configuration = error);
        let mut config = read?;
        config.settings.time_quantum = self.time_quantum.unwrap_or(config.settings.time_quantum);
        Ok(config)
    }

    fn configure(&self, config: Config, by: &str) {
        self.log.set(self.log_level.unwrap_or(config.log_level));
        self.core.borrow_mut().configure(config, by);
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

/// Waits until an order is saved for the next daemon, if possible.
async fn saved(saving: Saving) {
    // Without a state directory, nothing can be saved.
    if let Ok(Err(e)) = saving.await {
        warn!("cannot save an order for the next scheduler in {e}. A restart will undo the order");
    }
}
