//! Views of the state, shared by all readers. The time to create a view on the scheduling loop is
//! proportional to the number of clients. So a view is created only if a reader waits, for all waiting
//! readers together, and at most once per [`PERIOD`]. Each view is newer than its reader's request: a
//! caller that changed a setting sees the change in its next view.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::task::spawn_local;

use crate::daemon::core::{Core, View};

/// Minimum time between two views.
const PERIOD: Duration = Duration::from_millis(100);
/// The pause after a view is at least this many times as long as creating the view took. So views take
/// at most `1 / REST` of the loop's time.
const REST: u32 = 20;

/// The readers that wait for the next view.
#[derive(Debug, Default, Clone)]
pub struct Views(Rc<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    readers: RefCell<Vec<oneshot::Sender<Arc<View>>>>,
    wake: Notify,
}

impl Views {
    /// Starts the task that answers requests, until the scheduling loop ends.
    pub fn start(&self, core: &Rc<RefCell<Core>>) {
        let (waiting, core) = (self.0.clone(), core.clone());
        spawn_local(async move {
            loop {
                waiting.wake.notified().await;
                let readers = waiting.readers.take();
                if readers.iter().all(oneshot::Sender::is_closed) {
                    continue;
                }
                let begin = Instant::now();
                let view = Arc::new(View::new(&core.borrow()));
                // If a reader has stopped waiting, sending it the view fails. That is not an error.
                readers.into_iter().for_each(|reader| drop(reader.send(view.clone())));
                drop_elsewhere(view);
                tokio::time::sleep(PERIOD.max(begin.elapsed() * REST)).await;
            }
        });
    }

    /// Sends the next view to the reader.
    pub fn answer(&self, reader: oneshot::Sender<Arc<View>>) {
        self.0.readers.borrow_mut().push(reader);
        self.0.wake.notify_one();
    }

    /// Waits for the next view. `None` if the scheduling loop ends.
    pub async fn next(&self) -> Option<Arc<View>> {
        let (reader, view) = oneshot::channel();
        self.answer(reader);
        view.await.ok()
    }
}

/// Frees a view on another thread. Freeing a view takes about as long as creating it.
fn drop_elsewhere(view: Arc<View>) {
    tokio::task::spawn_blocking(move || drop(view));
}
