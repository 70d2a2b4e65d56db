//! Lists of clients and of GPUs, which cost the scheduling loop time in proportion to the number of clients. They are made
//! at most once in [`PERIOD`], for all who asked since the last ones: each answer is newer than its question.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::task::spawn_local;

use crate::bus;
use crate::daemon::core::Core;
use crate::daemon::core::views::ClientView;

/// Shortest time between two lists.
const PERIOD: Duration = Duration::from_millis(50);

/// Those who wait for lists.
#[derive(Debug, Default)]
pub struct Lists(Rc<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    clients: RefCell<Vec<oneshot::Sender<Arc<Vec<ClientView>>>>>,
    gpus: RefCell<Vec<oneshot::Sender<Arc<Vec<bus::Gpu>>>>>,
    wake: Notify,
}

impl Lists {
    /// Answers for as long as the scheduling loop runs.
    pub fn start(&self, core: &Rc<RefCell<Core>>) {
        let (waiting, core) = (self.0.clone(), core.clone());
        spawn_local(async move {
            loop {
                waiting.wake.notified().await;
                // It is no error if the caller no longer waits for the answer.
                let (clients, gpus) = (waiting.clients.take(), waiting.gpus.take());
                if !clients.is_empty() {
                    let list = Arc::new(core.borrow().list_clients());
                    clients.into_iter().for_each(|reply| drop(reply.send(list.clone())));
                    tokio::task::yield_now().await;
                }
                if !gpus.is_empty() {
                    let list = Arc::new(core.borrow().list_gpus());
                    gpus.into_iter().for_each(|reply| drop(reply.send(list.clone())));
                }
                tokio::time::sleep(PERIOD).await;
            }
        });
    }

    pub fn clients(&self, reply: oneshot::Sender<Arc<Vec<ClientView>>>) {
        self.0.clients.borrow_mut().push(reply);
        self.0.wake.notify_one();
    }

    pub fn gpus(&self, reply: oneshot::Sender<Arc<Vec<bus::Gpu>>>) {
        self.0.gpus.borrow_mut().push(reply);
        self.0.wake.notify_one();
    }
}
