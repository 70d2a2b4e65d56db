//! Views of the state, shared by all readers. The time to create a view on the scheduling loop is
//! proportional to the number of clients. So a view is created only if a reader waits, for all waiting
//! readers together, and at most once per [`PERIOD`]. Each view is newer than its reader's request: a
//! caller that changed a setting sees the change in its next view.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use crate::daemon::core::{Core, View};

/// Minimum time between two views.
const PERIOD: Duration = Duration::from_millis(100);
/// The pause after a view is at least this many times as long as creating the view took. So views take
/// at most `1 / REST` of the loop's time.
const REST: u32 = 20;

/// Requests views, from any thread.
#[derive(Debug, Clone)]
pub struct Views(mpsc::UnboundedSender<oneshot::Sender<Arc<View>>>);

/// The readers that wait for the next view.
pub type Readers = mpsc::UnboundedReceiver<oneshot::Sender<Arc<View>>>;

impl Views {
    pub fn channel() -> (Self, Readers) {
        let (readers, waiting) = mpsc::unbounded_channel();
        (Self(readers), waiting)
    }

    /// Waits for the next view. `None` if the scheduling loop ends.
    pub async fn next(&self) -> Option<Arc<View>> {
        let (reader, view) = oneshot::channel();
        self.0.send(reader).ok()?;
        view.await.ok()
    }
}

/// Answers requests for views, until the scheduling loop ends.
pub async fn answer(core: Rc<RefCell<Core>>, mut waiting: Readers) {
    let mut readers = Vec::new();
    while waiting.recv_many(&mut readers, usize::MAX).await > 0 {
        readers.retain(|reader| !reader.is_closed());
        if readers.is_empty() {
            continue;
        }
        let begin = Instant::now();
        let view = Arc::new(View::new(&core.borrow()));
        // If a reader has stopped waiting, sending it the view fails. That is not an error.
        readers.drain(..).for_each(|reader| drop(reader.send(view.clone())));
        // Freeing a view takes about the time of creating it.
        tokio::task::spawn_blocking(move || drop(view));
        tokio::time::sleep(PERIOD.max(begin.elapsed() * REST)).await;
    }
}
