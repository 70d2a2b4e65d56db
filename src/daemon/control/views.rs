//! Views of the state for all readers. A view costs the scheduling loop time in proportion to the number of clients, so it is
//! made at most once in [`PERIOD`], only if there is a reader, and for all readers that have requested one since the last view.
//! Each view is newer than the request, so a caller whose change was answered reads the changed state.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};
use tokio::task::spawn_local;

use crate::daemon::core::{Core, View};

/// Shortest time between two views.
const PERIOD: Duration = Duration::from_millis(100);
/// The loop spends at most one part in this many of its time on views.
const REST: u32 = 20;

/// The readers that wait for a view.
#[derive(Debug, Default, Clone)]
pub struct Views(Rc<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    readers: RefCell<Vec<oneshot::Sender<Arc<View>>>>,
    wake: Notify,
}

impl Views {
    /// Answers requests until the scheduling loop ends.
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
                let view = Arc::new(core.borrow().view());
                // A reader may have stopped waiting, which is no error.
                readers.into_iter().for_each(|reader| drop(reader.send(view.clone())));
                drop_elsewhere(view);
                tokio::time::sleep(PERIOD.max(begin.elapsed() * REST)).await;
            }
        });
    }

    /// Answers with the next view.
    pub fn answer(&self, reader: oneshot::Sender<Arc<View>>) {
        self.0.readers.borrow_mut().push(reader);
        self.0.wake.notify_one();
    }

    /// The next view. `None`: the scheduling loop ends.
    pub async fn next(&self) -> Option<Arc<View>> {
        let (reader, view) = oneshot::channel();
        self.answer(reader);
        view.await.ok()
    }
}

/// Freeing a view takes about the same time as making it.
fn drop_elsewhere(view: Arc<View>) {
    tokio::task::spawn_blocking(move || drop(view));
}
