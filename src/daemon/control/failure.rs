//! The error of a call: an error of the interface or of D-Bus itself.

use zbus::message::{Header, Message};
use zbus::names::ErrorName;
use zbus::{DBusError, fdo};

use crate::bus::Error;

#[derive(Debug)]
pub enum Failure {
    Ours(Error),
    DBus(fdo::Error),
}

impl Failure {
    fn error(&self) -> &dyn DBusError {
        match self {
            Self::Ours(error) => error,
            Self::DBus(error) => error,
        }
    }
}

impl DBusError for Failure {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        self.error().create_reply(call)
    }

    fn name(&self) -> ErrorName<'_> {
        self.error().name()
    }

    fn description(&self) -> Option<&str> {
        self.error().description()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

impl From<fdo::Error> for Failure {
    fn from(error: fdo::Error) -> Self {
        Self::DBus(error)
    }
}
