//! What administrators ask of the scheduling loop: to show things, to change settings, to read the configuration again.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tracing::{info, warn};

use crate::bus::Error;
use crate::config::Config;
use crate::config::rules::Addition;
use crate::daemon::Options;
use crate::daemon::bus::Request;
use crate::daemon::changes::Changes;
use crate::daemon::clients::Shared;
use crate::daemon::core::Core;
use crate::daemon::lock;
use crate::daemon::logging;
use crate::daemon::systemd;

pub struct Control {
    pub options: Options,
    pub log: logging::Control,
    pub changes: Changes,
}

impl Control {
    /// Answers the D-Bus object. Callers have been authorised there.
    pub fn answer(&mut self, core: &Rc<RefCell<Core>>, shared: &Rc<Shared>, request: Request) {
        // An answer that nobody waits for any more is no error.
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
            Request::Lock(request, reply) => drop(reply.send(lock::acquire(core, shared, request))),
            Request::Debug(reply) => drop(reply.send(Box::new(core.borrow().debug_snapshot()))),
            Request::Reload(reply) => drop(reply.send(self.reload(core))),
            Request::Reset(reply) => answer_once_written(self.reset(core), reply),
        }
    }

    /// Reads the configuration file again. One that is wrong changes nothing.
    pub fn reload(&self, core: &RefCell<Core>) -> Result<(), String> {
        systemd::reloading();
        let result = self.configure(core, &self.changes);
        match &result {
            Ok(()) => info!(name: "configuration-read", "the configuration was read again"),
            Err(e) => warn!(name: "configuration-wrong", "the configuration stays as it was: {e}"),
        }
        systemd::ready();
        result
    }

    /// Sets a rule at run time, or takes one away. What is returned hears when that is on the disk.
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
        info!(name: "rules-changed", "rule {name:?} was set or taken away at run time");
        Ok(written)
    }

    /// Forgets what was changed at run time. What is returned hears when that is on the disk.
    fn reset(&mut self, core: &RefCell<Core>) -> Result<oneshot::Receiver<()>, String> {
        self.configure(core, &Changes::default())?;
        info!(name: "settings-reset", "settings that were changed at run time are forgotten");
        let (done, written) = oneshot::channel();
        self.changes.reset(done);
        Ok(written)
    }

    fn configure(&self, core: &RefCell<Core>, changes: &Changes) -> Result<(), String> {
        let mut config = Config::load(self.options.config.as_deref()).map_err(|e| e.to_string())?;
        changes.apply(&mut config);
        self.log.set(self.options.log_level.unwrap_or(config.log_level));
        core.borrow_mut().configure(config);
        Ok(())
    }
}

/// Says yes when it is on the disk, without keeping anybody waiting for that.
fn answer_once_written<E: 'static>(written: Result<oneshot::Receiver<()>, E>, reply: oneshot::Sender<Result<(), E>>) {
    match written {
        Ok(written) => drop(spawn_local(async move {
            let _ = written.await;
            let _ = reply.send(Ok(()));
        })),
        Err(e) => drop(reply.send(Err(e))),
    }
}
