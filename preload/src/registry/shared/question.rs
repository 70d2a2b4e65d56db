//! Requests to an exporter, through the scheduler, for the chunks of a range.

use super::handle::ExportHandle;
use crate::{
    connection::{self, outbox, presence::Patience},
    driver::types::*,
    sys::{
        futex,
        sync::{Mutex, Rank, await_client_thread},
        time,
    },
};
use alloc::vec::Vec;
use core::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use nvshare_wire::{ClientMessage, client::Sharing};
use rustix::fd::OwnedFd;

/// The longest wait for an exporter's answer. The exporter may be stopped.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait until an exporter's memory is back on the GPU: a few turns of other clients.
const RETURN_TIMEOUT: Duration = Duration::from_secs(120);
/// The interval between checks whether the scheduler is back, and between requests to a busy exporter.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The pending request. There is at most one.
static QUESTION: Mutex<Option<Question>> = Mutex::new(Rank::Question, None);
/// Counts answers. The requesting thread sleeps on this word.
static ANSWERS: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
struct Question {
    ticket: u32,
    answer: Option<ExporterAnswer>,
}

#[derive(Debug)]
pub struct ExporterAnswer {
    outcome: Sharing,
    pub bytes: u64,
    pub chunk: u64,
    pub descriptors: Vec<OwnedFd>,
}

/// Stores an answer that has arrived. If no request waits for it, its descriptors are closed.
pub fn on_answer(ticket: u32, outcome: Sharing, bytes: u64, chunk: u64, descriptors: Vec<OwnedFd>) {
    if let Some(question) = QUESTION.lock().as_mut().filter(|q| q.ticket == ticket && q.answer.is_none()) {
        question.answer = Some(ExporterAnswer { outcome, bytes, chunk, descriptors });
    }
    ANSWERS.fetch_add(1, Ordering::SeqCst);
    futex::wake_all(&ANSWERS);
}

/// Requests the chunks of a range, beginning with chunk `first`.
pub fn ask(handle: &ExportHandle, first: u32) -> Result<ExporterAnswer, CUresult> {
    static TICKETS: AtomicU32 = AtomicU32::new(0);
    let _waiting = await_client_thread();
    let mut patience = Patience::new(ANSWER_TIMEOUT);
    let mut spent = Duration::ZERO;
    let mut asked = false;
    let mut met = connection::generation();
    let result = loop {
        let seen = ANSWERS.load(Ordering::SeqCst);
        let mut question = QUESTION.lock();
        match question.as_mut().and_then(|q| q.answer.take()) {
            Some(ExporterAnswer { outcome: Sharing::Busy, .. }) if spent < RETURN_TIMEOUT => {
                drop(question);
                time::sleep(POLL_INTERVAL);
                spent += patience.duration() + POLL_INTERVAL;
                (asked, patience) = (false, Patience::new(ANSWER_TIMEOUT));
                continue;
            }
            Some(answer) => break Ok(answer),
            None if patience.is_over() => break Err(ERROR_MAP_FAILED),
            None => {}
        }
        // A new scheduler does not know the request, so the request is repeated.
        let now_met = connection::generation();
        asked &= connection::is_connected() && core::mem::replace(&mut met, now_met) == now_met;
        if !asked {
            let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
            *question = Some(Question { ticket, answer: None });
            let ExportHandle { exporter, secret, range, id: allocation, .. } = *handle;
            drop(question);
            let open = ClientMessage::Open { ticket, exporter, secret, range, allocation, first };
            asked = connection::is_connected() && outbox::flush() && connection::send(&open);
        } else {
            drop(question);
        }
        patience.wait_at_most(&ANSWERS, seen, POLL_INTERVAL);
    };
    *QUESTION.lock() = None;
    let answer = result?;
    match answer.outcome {
        Sharing::Done => Ok(answer),
        Sharing::Unknown => Err(ERROR_INVALID_VALUE), // the driver's answer for memory that no longer exists
        Sharing::Failed | Sharing::Busy => Err(ERROR_MAP_FAILED),
    }
}
