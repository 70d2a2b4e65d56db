//! The line that `systemctl status` shows: problems, the holders of each GPU, and the number of waiting programs.

use std::collections::HashMap;

use crate::bus;
use crate::daemon::core::ClientView;

/// Maximum length of the line in bytes. Longer lines are truncated.
const MAX_LENGTH: usize = 400;

/// Formats the line.
pub fn format(problems: &[String], gpus: &[bus::Gpu], clients: &[ClientView]) -> String {
    let names: HashMap<u64, String> = clients
        .iter()
        .map(|client| (client.id.0, format!("{} (pid {})", client.identity.name, client.identity.pid)))
        .collect();
    let mut line: String = problems.iter().map(|problem| format!("{problem}; ")).collect();
    line += &match clients.len() {
        0 => "No programs".to_owned(),
        1 => "1 program".to_owned(),
        n => format!("{n} programs"),
    };
    for gpu in gpus.iter().filter(|gpu| !gpu.holders.is_empty() || !gpu.queue.is_empty()) {
        let holders: Vec<&str> = gpu.holders.iter().filter_map(|id| Some(names.get(id)?.as_str())).collect();
        let number = gpu.index.map_or_else(|| gpu.uuid.clone(), |index| index.to_string());
        line +=
            &format!("; GPU {number}: {}", if holders.is_empty() { "no holder".into() } else { holders.join(", ") });
        if !gpu.queue.is_empty() {
            line += &format!(", {} waiting", gpu.queue.len());
        }
    }
    if line.len() > MAX_LENGTH {
        line.truncate(line.floor_char_boundary(MAX_LENGTH));
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;

    fn client(id: u64, name: &str) -> ClientView {
        ClientView::named(id, Identity { pid: 100 + id as i32, name: name.into(), ..Identity::default() })
    }

    #[test]
    fn the_status_line_names_holders_and_counts_waiters() {
        assert_eq!(format(&[], &[], &[]), "No programs");
        let clients = [client(1, "python"), client(2, "trainer")];
        let busy = bus::Gpu { index: Some(0), holders: vec![1], queue: vec![2], ..bus::Gpu::default() };
        let idle = bus::Gpu { index: Some(1), ..bus::Gpu::default() };
        assert_eq!(format(&[], &[busy.clone(), idle], &clients), "2 programs; GPU 0: python (pid 101), 1 waiting");
        let crowded = bus::Gpu { holders: vec![1, 2], queue: vec![], ..busy };
        assert_eq!(format(&[], &[crowded], &clients), "2 programs; GPU 0: python (pid 101), trainer (pid 102)");
        let problem = ["the configuration has an error: a.toml:1:1: no".to_owned()];
        assert_eq!(format(&problem, &[], &[]), "the configuration has an error: a.toml:1:1: no; No programs");
    }

    #[test]
    fn the_status_line_is_truncated() {
        let clients: Vec<ClientView> = (0..500).map(|id| client(id, "größer")).collect();
        let gpu = bus::Gpu { index: Some(0), holders: (0..500).collect(), ..bus::Gpu::default() };
        assert!(format(&[], &[gpu], &clients).len() <= MAX_LENGTH + '…'.len_utf8());
    }
}
