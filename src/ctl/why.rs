//! `nvsharectl why`: the reasons why programs wait, in the scheduler's sentences.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{CtlError, Target, block_on, pause};
use crate::bus::{Client, EXPECTED, UNKNOWN_START};

/// The reasons why clients wait, as sentences by client id.
pub type Waits = BTreeMap<u64, Vec<String>>;

/// Returns the sentences about a program as JSON or as text, one per line. If the program has
/// several processes, the sentences about each process are below its process id.
///
/// # Errors
/// The program does not exist, or the scheduler does not answer.
pub fn show(target: &Target, program: &str, as_json: bool) -> Result<String, CtlError> {
    let all = block_on(async {
        let scheduler = target.connect().await?;
        let mut all = Vec::new();
        for pid in pause::pids(&scheduler, program).await? {
            all.push((pid, scheduler.explain(pid).await?));
        }
        Ok(all)
    })?;
    if as_json {
        let all: serde_json::Map<String, Value> =
            all.iter().map(|(pid, sentences)| (pid.to_string(), json!(sentences))).collect();
        return Ok(format!("{:#}\n", Value::Object(all)));
    }
    Ok(text(&all))
}

/// Returns the reasons why clients wait, for all clients whose process is known. Omits clients that
/// have just ended. Returns nothing if the scheduler is too old for the query.
///
/// # Errors
/// The scheduler cannot be reached.
pub fn of_all(target: &Target, clients: &[Client]) -> Result<Waits, CtlError> {
    let is_waiting =
        |client: &&Client| client.gpus.iter().any(|usage| ["waiting", "attaching"].contains(&&*usage.state));
    let waiting: Vec<&Client> = clients.iter().filter(is_waiting).filter(|client| client.pid > 0).collect();
    if waiting.is_empty() {
        return Ok(Waits::new());
    }
    block_on(async {
        let scheduler = target.connect().await?;
        let mut waits = Waits::new();
        for client in waiting {
            if let Ok(sentences) = scheduler.explain(client.pid).await {
                waits.insert(client.id, sentences);
            }
        }
        Ok(waits)
    })
}

/// Returns the sentence with the reason. This is the second sentence, because the first says that
/// the program waits. If the second sentence gives only the expected time, returns the first.
pub fn reason(sentences: &[String]) -> Option<&str> {
    let second = sentences.get(1).filter(|sentence| !sentence.starts_with(EXPECTED) && *sentence != UNKNOWN_START);
    second.or(sentences.first()).map(String::as_str)
}

fn text(all: &[(u32, Vec<String>)]) -> String {
    let mut out = String::new();
    for (pid, sentences) in all {
        let indent = if all.len() > 1 { "  " } else { "" };
        if all.len() > 1 {
            out += &format!("Process {pid}:\n");
        }
        sentences.iter().for_each(|sentence| out += &format!("{indent}{sentence}\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sentence_has_a_line() {
        let one = (7, vec!["It waits.".to_owned(), "Not for long.".to_owned()]);
        assert_eq!(text(std::slice::from_ref(&one)), "It waits.\nNot for long.\n");
        let other = (8, vec!["It uses no GPU.".to_owned()]);
        assert_eq!(text(&[one, other]), "Process 7:\n  It waits.\n  Not for long.\nProcess 8:\n  It uses no GPU.\n");
    }
}
