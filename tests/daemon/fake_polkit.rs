//! A fake polkit for a private bus. It gives configured answers and records the questions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use zbus::connection::Builder;
use zbus::{Connection, OwnedVariant};

use crate::private_bus::{Bus, eventually};

/// The answer to give.
#[derive(Debug, Clone, Copy, Default)]
pub enum Says {
    #[default]
    Yes,
    No,
    Challenge,
    Dismissed,
    Nothing,
}

/// A question to polkit.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The unique bus name of the connection that asks.
    pub asker: String,
    /// The unique bus name of the subject.
    pub subject: String,
    pub action: String,
    pub flags: u32,
    pub details: HashMap<String, String>,
    id: String,
}

#[derive(Debug, Default)]
struct Book {
    says: Says,
    asked: Vec<Asked>,
    cancelled: Vec<String>,
}

struct Authority(Arc<Mutex<Book>>);

#[zbus::interface(name = "org.freedesktop.PolicyKit1.Authority")]
impl Authority {
    async fn check_authorization(
        &self,
        subject: (String, HashMap<String, OwnedVariant>),
        action: String,
        details: HashMap<String, String>,
        flags: u32,
        id: String,
        #[zbus(header)] header: zbus::message::Header<'_>,
    ) -> ((bool, bool, HashMap<String, String>),) {
        assert_eq!((subject.0.as_str(), subject.1.len()), ("system-bus-name", 1));
        assert!(details.contains_key("program"), "{details:?}");
        let subject = String::try_from(subject.1["name"].clone()).expect("a name");
        let asker = header.sender().expect("a sender").to_string();
        let says = {
            let mut book = self.0.lock().expect("the book");
            book.asked.push(Asked { asker, subject, action, flags, details, id });
            book.says
        };
        let (authorized, challenge) = match says {
            Says::Yes => (true, false),
            Says::No | Says::Dismissed => (false, false),
            Says::Challenge => (false, true),
            Says::Nothing => std::future::pending().await,
        };
        let dismissed = matches!(says, Says::Dismissed).then(|| ("polkit.dismissed".to_owned(), "true".to_owned()));
        ((authorized, challenge, dismissed.into_iter().collect()),)
    }

    fn cancel_check_authorization(&self, id: String) {
        self.0.lock().expect("the book").cancelled.push(id);
    }
}

pub struct Polkit {
    book: Arc<Mutex<Book>>,
    pub connection: Connection,
}

impl Polkit {
    pub async fn start(bus: &Bus) -> Self {
        let book = Arc::new(Mutex::new(Book::default()));
        let connection = Builder::address(bus.address.as_str())
            .serve_at("/org/freedesktop/PolicyKit1/Authority", Authority(book.clone()))
            .name("org.freedesktop.PolicyKit1")
            .build()
            .await
            .expect("the bus");
        Self { book, connection }
    }

    pub fn say(&self, says: Says) {
        self.book.lock().expect("the book").says = says;
    }

    /// Takes the questions since the last call.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.book.lock().expect("the book").asked)
    }

    /// Waits for `times` questions, then takes them as [`asked`](Self::asked) does.
    pub async fn asked_times(&self, times: usize) -> Vec<Asked> {
        let so_far = || self.book.lock().expect("the book").asked.len();
        eventually(&format!("{times} questions"), async || (so_far() >= times).then_some(())).await;
        self.asked()
    }

    pub fn cancelled(&self) -> usize {
        self.book.lock().expect("the book").cancelled.len()
    }

    pub async fn is_cancelled(&self, asked: &Asked) {
        let is_so = async || self.book.lock().expect("the book").cancelled.contains(&asked.id).then_some(());
        eventually("the question to be cancelled", is_so).await;
    }
}
