//! The text of the metrics. The text is created from a view of the scheduling loop's state, and shared
//! by all scrapers within `SHARED_FOR`.

use std::time::{Duration, Instant};

use hyper::body::Bytes;
use tokio::sync::Mutex;
use tracing::error;

use super::{snapshot::Snapshot, text};
use crate::daemon::control::views::Views;

/// Scrapers within this time share one text. So the number of scrapers does not affect the scheduling
/// loop.
const SHARED_FOR: Duration = Duration::from_millis(100);
/// Time to wait for a view. A scheduling loop that works answers within 0.1 s.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Source {
    views: Views,
    /// The newest text, and the time of the request for it.
    newest: Mutex<Option<(Instant, Bytes)>>,
}

impl Source {
    pub fn new(views: Views) -> Self {
        Self { views, newest: Mutex::new(None) }
    }

    /// The text of the metrics. `None` if the scheduling loop does not answer.
    pub async fn text(&self) -> Option<Bytes> {
        // The first scraper requests the text. Other scrapers wait for the lock, and then share the
        // text.
        let mut newest = self.newest.lock().await;
        if let Some((at, text)) = &*newest
            && at.elapsed() < SHARED_FOR
        {
            return Some(text.clone());
        }
        let asked = Instant::now();
        let view = tokio::time::timeout(PATIENCE, self.views.next()).await.ok()??;
        let text = text::written(Snapshot::new(&view)).inspect_err(|e| error!("cannot write metrics: {e}")).ok()?;
        let text = Bytes::from(text);
        *newest = Some((asked, text.clone()));
        Some(text)
    }
}
