//! The line that `systemctl status` shows: who holds what, and who waits.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use crate::bus;
use crate::daemon::core::{Core, views::ClientView};
use crate::daemon::systemd;

/// Turns change many times a second; the line does not.
const PAUSE: Duration = Duration::from_secs(1);
/// So much of it is read.
const MAX_LENGTH: usize = 400;

/// Tells systemd whenever something has changed, for as long as the daemon runs.
pub async fn keep_current(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().signals.clone();
    let mut told = String::new();
    loop {
        let now = line(&core.borrow().list_gpus(), &core.borrow().list_clients());
        if now != told {
            systemd::status(&now);
            told = now;
        }
        tokio::time::sleep(PAUSE).await;
        signals.turns.notified().await;
    }
}

fn line(gpus: &[bus::Gpu], clients: &[ClientView]) -> String {
    let names: HashMap<u64, String> = clients
        .iter()
        .map(|client| (client.id.0, format!("{} (pid {})", client.identity.name, client.identity.pid)))
        .collect();
    let mut line = match clients.len() {
        0 => "No programs".to_owned(),
        1 => "1 program".to_owned(),
        n => format!("{n} programs"),
    };
    for gpu in gpus.iter().filter(|gpu| !gpu.holders.is_empty() || !gpu.queue.is_empty()) {
        let holders: Vec<&str> = gpu.holders.iter().filter_map(|id| Some(names.get(id)?.as_str())).collect();
        let number = gpu.index.map_or_else(|| gpu.uuid.clone(), |index| index.to_string());
        line += &format!("; GPU {number}: {}", if holders.is_empty() { "nobody".into() } else { holders.join(", ") });
        if !gpu.queue.is_empty() {
            line += &format!(", {} waiting", gpu.queue.len());
        }
        if gpu.thrashing {
            line += ", thrashing";
        }
    }
    if line.len() > MAX_LENGTH {
        let end = (0..=MAX_LENGTH).rev().find(|at| line.is_char_boundary(*at)).unwrap_or(0);
        line.truncate(end);
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use super::*;
    use crate::identity::Identity;
    use crate::scheduler::ClientId;

    fn client(id: u64, name: &str) -> ClientView {
        let identity = Identity { pid: 100 + id as i32, name: name.into(), ..Identity::default() };
        ClientView {
            id: ClientId(id),
            identity: Arc::new(identity),
            library: String::new(),
            rule: Default::default(),
            env_limits: Default::default(),
            gang_peers: Vec::new(),
            placed: Vec::new(),
            connected: SystemTime::UNIX_EPOCH,
            stopped: false,
            uses: Vec::new(),
        }
    }

    #[test]
    fn it_names_holders_and_counts_waiters() {
        assert_eq!(line(&[], &[]), "No programs");
        let clients = [client(1, "python"), client(2, "trainer")];
        let busy = bus::Gpu { index: Some(0), holders: vec![1], queue: vec![2], ..bus::Gpu::default() };
        let idle = bus::Gpu { index: Some(1), ..bus::Gpu::default() };
        assert_eq!(line(&[busy.clone(), idle], &clients), "2 programs; GPU 0: python (pid 101), 1 waiting");
        let crowded = bus::Gpu { holders: vec![1, 2], queue: vec![], thrashing: true, ..busy };
        assert_eq!(line(&[crowded], &clients), "2 programs; GPU 0: python (pid 101), trainer (pid 102), thrashing");
    }

    #[test]
    fn it_has_an_end() {
        let clients: Vec<ClientView> = (0..500).map(|id| client(id, "größer")).collect();
        let gpu = bus::Gpu { index: Some(0), holders: (0..500).collect(), ..bus::Gpu::default() };
        assert!(line(&[gpu], &clients).len() <= MAX_LENGTH + '…'.len_utf8());
    }
}
