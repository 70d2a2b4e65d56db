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
use crate::daemon::hub::Hub;
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
    pub fn answer(&mut self, hub: &Rc<RefCell<Hub>>, shared: &Rc<Shared>, request: Request) {
        // An answer that nobody waits for any more is no error.
        match request {
            Request::Clients(reply) => drop(reply.send(hub.borrow().list_clients())),
            Request::Gpus(reply) => drop(reply.send(hub.borrow().list_gpus())),
            Request::Set(change, reply) => {
                let mut hub = hub.borrow_mut();
                let mut config = hub.config.clone();
                change.apply(&mut config.settings);
                hub.configure(config);
                self.changes.change(change, reply);
            }
            Request::Rules(reply) => {
                let hub = hub.borrow();
                let all = hub.config.rules.all().map(|rule| (rule.to_table(), rule.origin.to_string()));
                drop(reply.send(all.collect()));
            }
            Request::SetRule(addition, reply) => {
                let written = self.set_rule(hub, *addition).map_err(Error::InvalidArgument);
                answer_once_written(written, reply);
            }
            Request::SetPods(pods, reply) => drop(reply.send(hub.borrow_mut().set_pods(pods))),
            Request::Lock(request, reply) => drop(reply.send(lock::acquire(hub, shared, request))),
            Request::Debug(reply) => drop(reply.send(Box::new(hub.borrow().debug_snapshot()))),
            Request::Reload(reply) => drop(reply.send(self.reload(hub))),
            Request::Reset(reply) => answer_once_written(self.reset(hub), reply),
        }
    }

    /// Reads the configuration file again. One that is wrong changes nothing.
    pub fn reload(&self, hub: &RefCell<Hub>) -> Result<(), String> {
        systemd::reloading();
        let result = self.configure(hub, &self.changes);
        match &result {
            Ok(()) => info!(name: "configuration-read", "the configuration was read again"),
            Err(e) => warn!(name: "configuration-wrong", "the configuration stays as it was: {e}"),
        }
        systemd::ready();
        result
    }

    /// Sets a rule at run time, or takes one away. What is returned hears when that is on the disk.
    fn set_rule(&mut self, hub: &RefCell<Hub>, addition: Addition) -> Result<oneshot::Receiver<()>, String> {
        if let Some(text) = addition.rule().and_then(|rule| hub.borrow().config.rules.contradicted(rule)) {
            return Err(text);
        }
        let (done, written) = oneshot::channel();
        let name = addition.name().to_owned();
        self.changes.set_rule(addition, done)?;
        let mut hub = hub.borrow_mut();
        let mut config = hub.config.clone();
        self.changes.apply(&mut config);
        hub.configure(config);
        info!(name: "rules-changed", "rule {name:?} was set or taken away at run time");
        Ok(written)
    }

    /// Forgets what was changed at run time. What is returned hears when that is on the disk.
    fn reset(&mut self, hub: &RefCell<Hub>) -> Result<oneshot::Receiver<()>, String> {
        self.configure(hub, &Changes::default())?;
        info!(name: "settings-reset", "settings that were changed at run time are forgotten");
        let (done, written) = oneshot::channel();
        self.changes.reset(done);
        Ok(written)
    }

    fn configure(&self, hub: &RefCell<Hub>, changes: &Changes) -> Result<(), String> {
        let mut config = Config::load(self.options.config.as_deref()).map_err(|e| e.to_string())?;
        changes.apply(&mut config);
        self.log.set(self.options.log_level.unwrap_or(config.log_level));
        hub.borrow_mut().configure(config);
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
