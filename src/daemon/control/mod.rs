//! Requests of the D-Bus object, carried out on the scheduling loop: lists, changed settings and rules, reloading.
//!
//! - [`changes`]: settings changed at run time.
//! - [`status_line`]: the line that `systemctl status` shows.

pub mod changes;
pub mod status_line;

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tracing::{info, warn};

use crate::bus::Error;
use crate::config::rules::Addition;
use crate::config::{Config, LogLevel};
use crate::daemon::bus::Request;
use crate::daemon::connections::{Connections, lock};
use crate::daemon::core::Core;
use crate::daemon::logging;
use crate::daemon::systemd;
use changes::Changes;

/// Answers requests.
pub struct Control {
    /// The configuration file, if it is not the usual one.
    pub config: Option<PathBuf>,
    /// The log level, if the command line sets it.
    pub log_level: Option<LogLevel>,
    pub log: logging::Control,
    pub changes: Changes,
}

impl Control {
    /// Carries out a request of the D-Bus object, which has authorised the caller.
    pub fn answer(&mut self, core: &Rc<RefCell<Core>>, connections: &Rc<Connections>, request: Request) {
        // It is no error if the caller no longer waits for the answer.
        match request {
            Request::Clients(reply) => drop(reply.send(core.borrow().list_clients())),
            Request::Gpus(reply) => drop(reply.send(core.borrow().list_gpus())),
            Request::Set(change, reply) => {
                let mut core = core.borrow_mut();
                let mut config = core.config.clone();
                change.apply(&mut config.settings);
                core.configure(config);
                self.changes.change(change, reply);
            }
            Request::Rules(reply) => {
                let core = core.borrow();
                let all = core.config.rules.all().map(|rule| (rule.to_table(), rule.origin.to_string()));
                drop(reply.send(all.collect()));
            }
            Request::SetRule(addition, reply) => {
                let written = self.set_rule(core, *addition).map_err(Error::InvalidArgument);
                answer_once_written(written, reply);
            }
            Request::SetPods(pods, reply) => drop(reply.send(core.borrow_mut().set_pods(pods))),
            Request::Lock(request, reply) => drop(reply.send(lock::acquire(core, connections, request))),
            Request::Debug(reply) => drop(reply.send(Box::new(core.borrow().debug_snapshot()))),
            Request::Reload(reply) => drop(reply.send(self.reload(core))),
            Request::Reset(reply) => answer_once_written(self.reset(core), reply),
        }
    }

    /// Reads the configuration file again.
    ///
    /// # Errors
    /// If the file is wrong. Then nothing changes.
    pub fn reload(&self, core: &RefCell<Core>) -> Result<(), String> {
        systemd::reloading();
        let result = self.configure(core, &self.changes);
        match &result {
            Ok(()) => info!(name: "configuration-read", "the configuration was reloaded"),
            Err(e) => warn!(name: "configuration-wrong", "the configuration is unchanged: {e}"),
        }
        systemd::ready();
        result
    }

    /// Sets or removes a rule at run time. The receiver is notified when that is saved.
    fn set_rule(&mut self, core: &RefCell<Core>, addition: Addition) -> Result<oneshot::Receiver<()>, String> {
        if let Some(text) = addition.rule().and_then(|rule| core.borrow().config.rules.contradicted(rule)) {
            return Err(text);
        }
        let (done, written) = oneshot::channel();
        let name = addition.name().to_owned();
        self.changes.set_rule(addition, done)?;
        let mut core = core.borrow_mut();
        let mut config = core.config.clone();
        self.changes.apply(&mut config);
        core.configure(config);
        info!(name: "rules-changed", "rule {name:?} was set or removed at run time");
        Ok(written)
    }

    /// Forgets the changes made at run time. The receiver is notified when that is saved.
    fn reset(&mut self, core: &RefCell<Core>) -> Result<oneshot::Receiver<()>, String> {
        self.configure(core, &Changes::default())?;
        info!(name: "settings-reset", "settings changed at run time were reset");
        let (done, written) = oneshot::channel();
        self.changes.reset(done);
        Ok(written)
    }

    fn configure(&self, core: &RefCell<Core>, changes: &Changes) -> Result<(), String> {
        let mut config = Config::load(self.config.as_deref()).map_err(|e| e.to_string())?;
        changes.apply(&mut config);
        self.log.set(self.log_level.unwrap_or(config.log_level));
        core.borrow_mut().configure(config);
        Ok(())
    }
}

/// Answers once a change is saved, without blocking the scheduling loop.
fn answer_once_written<E: 'static>(written: Result<oneshot::Receiver<()>, E>, reply: oneshot::Sender<Result<(), E>>) {
    match written {
        Ok(written) => drop(spawn_local(async move {
            let _ = written.await;
            let _ = reply.send(Ok(()));
        })),
        Err(e) => drop(reply.send(Err(e))),
    }
}
