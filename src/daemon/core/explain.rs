//! Sentences about why a program does not run on a GPU, and when it is expected to run. About other
//! programs, the sentences reveal only what `ListClients` shows every user: names, process IDs and
//! rules.

use std::fmt::Write;
use std::time::Duration;

use zbus::fdo;

use super::model::{client_name, gpu_name};
use super::view::{CopiedClient, View};
use crate::bus::{EXPECTED, OTHER_DEVICE, UNKNOWN_START};
use crate::config::units;
use crate::scheduler::{
    Ahead, ClientId, Explanation, GpuId, HolderAhead, LockState, Obstacle, Reason, SleepPhase, Standstill,
};

/// Maximum number of programs in the queue that an explanation names. Further programs are only
/// counted.
const NAMED: usize = 5;
/// The estimates are no more accurate than this, so shorter times are reported as "less than 0.1s".
const SHORTEST: Duration = Duration::from_millis(100);
/// Maximum number of waits that one answer explains: the number of GPU slots of one connection.
const MAX_EXPLAINED: usize = nvshare_wire::MAX_SLOTS as usize;

/// Names of clients and GPUs, and the rule of a client.
trait Names {
    fn client(&self, client: ClientId) -> String;
    fn gpu(&self, gpu: GpuId) -> String;
    fn rule(&self, client: ClientId) -> Option<String>;
    /// The clients whose memory on a GPU other devices may access.
    fn reached_by_devices(&self, gpu: GpuId) -> Vec<ClientId>;
}

impl Names for View {
    fn client(&self, client: ClientId) -> String {
        client_name(client, self.clients.get(&client).map(|entry| &*entry.identity))
    }

    fn gpu(&self, gpu: GpuId) -> String {
        self.gpus.get(&gpu).map_or_else(|| gpu.0.to_string(), |entry| gpu_name(gpu, entry.kind, entry.index))
    }

    fn rule(&self, client: ClientId) -> Option<String> {
        let rule = self.rule_of(client)?;
        Some(if rule.name.is_empty() { format!("rule {}", rule.origin) } else { format!("rule {:?}", rule.name) })
    }

    fn reached_by_devices(&self, gpu: GpuId) -> Vec<ClientId> {
        let is_reached = |entry: &CopiedClient| entry.uses.get(&gpu).is_some_and(|shown| shown.other_device);
        self.clients.iter().filter(|(_, entry)| is_reached(entry)).map(|(client, _)| *client).collect()
    }
}

impl View {
    /// Explains a process's state in sentences, for each of its GPUs.
    ///
    /// Explains at most [`MAX_EXPLAINED`] waits. The time for each explanation is proportional to
    /// the length of the queue, and a process can have many connections.
    ///
    /// # Errors
    /// `InvalidArgs` if no client has this process ID.
    pub fn explain(&self, pid: u32) -> fdo::Result<Vec<String>> {
        let is_meant = |identity_pid: i32| pid > 0 && i64::from(identity_pid) == i64::from(pid);
        let clients = self.clients.iter().filter(|(_, client)| is_meant(client.identity.pid)).map(|(id, _)| *id);
        let clients: Vec<ClientId> = clients.collect();
        let refusal = self.refusals.sentence(pid, self.now);
        if let (true, Some(refusal)) = (clients.is_empty(), &refusal) {
            return Ok(vec![format!("It has ended. {refusal}")]);
        }
        if clients.is_empty() {
            return Err(fdo::Error::InvalidArgs(format!("no program under nvshare has process ID {pid}")));
        }
        let mut text = Vec::new();
        let mut left = MAX_EXPLAINED;
        for client in clients {
            if left == 0 {
                text.push("The process has more connections, which are not explained.".into());
                break;
            }
            let all: Vec<Explanation> = self.machine.explain(client, self.now).take(left).collect();
            left -= all.len();
            if all.is_empty() {
                text.push("It uses no GPU.".into());
            }
            for explanation in &all {
                text.extend(sentences(self, client, explanation));
            }
            if all.iter().filter(|explanation| explanation.waits.is_some()).count() > 1 {
                text.push("It runs when it holds all of these GPUs.".into());
            }
        }
        text.extend(refusal);
        Ok(text)
    }
}

impl View {
    /// A sentence about what a waiting client waits for on a GPU. `None` if the client does not wait.
    pub(super) fn obstacle_of(&self, client: u64, gpu: GpuId) -> Option<String> {
        let mut all = self.machine.explain(ClientId(client), self.now);
        all.find(|what| what.gpu == gpu).and_then(|what| obstacle_in_short(self, ClientId(client), &what))
    }
}

/// What a client waits for: its obstacle, or otherwise the program that runs before it and its moves.
fn obstacle_in_short(names: &impl Names, client: ClientId, what: &Explanation) -> Option<String> {
    what.waits?;
    let gpu = names.gpu(what.gpu);
    let first = match (&what.obstacle, what.ahead.len(), what.holders.first()) {
        (Some(obstacle), ..) => Some(obstacle_sentence(names, &gpu, obstacle)),
        (None, 0, Some(holder)) => Some(holder_sentence(names, client, &gpu, holder)),
        (None, 0, None) => None,
        (None, 1, _) => Some("One program in the queue runs first.".into()),
        (None, many, _) => Some(format!("{many} programs in the queue run first.")),
    };
    let all: Vec<String> = first.into_iter().chain(moves(what)).collect();
    Some(if all.is_empty() { "It is next.".into() } else { all.join(" ") })
}

/// The sentences about one client's wait for one GPU.
fn sentences(names: &impl Names, client: ClientId, what: &Explanation) -> Vec<String> {
    let gpu = names.gpu(what.gpu);
    let mut text = Vec::new();
    let obstacle = what.obstacle.as_ref().map(|obstacle| obstacle_sentence(names, &gpu, obstacle));
    let Some(waits) = what.waits else {
        text.push(match (what.state, what.holders.first()) {
            (LockState::Idle, _) if obstacle.is_some() => String::new(),
            (LockState::Idle | LockState::Waiting, _) | (_, None) => {
                format!("It does not wait for {gpu}, because it has no work for that GPU.")
            }
            (_, Some(own)) => holds(&gpu, own),
        });
        text.extend(obstacle);
        text.retain(|sentence| !sentence.is_empty());
        return text;
    };
    let before = what.ahead.len() + what.holders.len();
    let before = match before {
        0 => "and is next in the queue".to_owned(),
        1 => "and one program is ahead of it".to_owned(),
        many => format!("and {many} programs are ahead of it"),
    };
    let before = if obstacle.is_some() { String::new() } else { format!(", {before}") };
    text.push(format!("It has waited for {gpu} for {}{before}.", units::duration(waits)));
    text.extend(obstacle);
    text.extend(what.standstill.map(|standstill| standstill_sentence(names, &gpu, standstill)));
    text.extend(what.holders.iter().map(|holder| holder_sentence(names, client, &gpu, holder)));
    text.extend(what.ahead.iter().take(NAMED).map(|ahead| ahead_sentence(names, client, ahead)));
    if let Some(others) = what.ahead.get(NAMED..).filter(|others| !others.is_empty()) {
        let takes = others.iter().try_fold(Duration::ZERO, |sum, other| Some(sum.saturating_add(other.takes?)));
        let takes = takes.map_or(String::new(), |takes| format!(", for {} in total", about(takes)));
        let run = if others.len() == 1 { "program runs" } else { "programs run" };
        text.push(format!("Then {} more {run}{takes}.", others.len()));
    }
    text.extend(moves(what));
    text.push(match what.starts {
        Some(starts) if starts < SHORTEST => format!("{EXPECTED}immediately."),
        Some(starts) => format!("{EXPECTED}in {}.", about(starts)),
        None => UNKNOWN_START.into(),
    });
    text
}

/// The sentence about a client's own turn on a GPU that it holds.
fn holds(gpu: &str, own: &HolderAhead) -> String {
    match (own.state, own.left) {
        (LockState::Suspended, _) => {
            format!("It holds {gpu}, but its process is stopped. Other programs run until the process continues.")
        }
        (LockState::Holding, Some(left)) => format!("It holds {gpu}. Its turn ends in {}.", about(left)),
        (LockState::Holding, None) => format!("It holds {gpu}. Its turn has no time limit."),
        _ => format!("It holds {gpu} and was asked to release it. Its submitted work is still running."),
    }
}

/// Explains that memory that cannot be evicted leaves too little room on a GPU.
fn pinned_sentence(names: &impl Names, gpu: GpuId, bytes: u64) -> String {
    let mut text = format!(
        "{} of other programs' memory cannot be evicted from {}. The rest of the GPU is too small for this program.",
        units::size(bytes),
        names.gpu(gpu)
    );
    let mut reached: Vec<String> =
        names.reached_by_devices(gpu).into_iter().map(|client| names.client(client)).collect();
    if reached.len() > NAMED {
        let rest = reached.split_off(NAMED).len();
        reached.push(format!("{rest} more"));
    }
    if !reached.is_empty() {
        let _ = write!(text, " The memory of {} stays there: {OTHER_DEVICE}.", reached.join(", "));
    }
    text
}

fn obstacle_sentence(names: &impl Names, gpu: &str, obstacle: &Obstacle) -> String {
    match obstacle {
        Obstacle::Paused => "It is paused. `nvsharectl resume` continues it.".into(),
        Obstacle::Drained => {
            "A GPU that it uses is drained. Programs on that GPU move to other GPUs or sleep, and no new program may \
             use that GPU."
                .into()
        }
        Obstacle::Sleeps(phase) => match phase {
            SleepPhase::Preparing | SleepPhase::Checkpointing => format!("It is being taken off {gpu} to sleep."),
            SleepPhase::Waking => format!("It is waking up, and waits for free memory on {gpu}."),
            SleepPhase::Restoring => format!("It is waking up: the driver is restoring it on {gpu}."),
            SleepPhase::Lost => "It was taken off its GPUs, and the driver cannot restore it. Its CUDA calls \
                fail."
                .into(),
            SleepPhase::Settling => "It may be asleep. It gets no turn until nvshare-checkpoint reports its \
                state."
                .into(),
            SleepPhase::Locked => "Another program has locked its process (cuCheckpointProcessLock). It gets no \
                turn until that program unlocks it."
                .into(),
            SleepPhase::Checkpointed => format!(
                "Another program has checkpointed its process. Its room on {gpu} stays reserved, because that \
                 program ran without nvshare, or the scheduler was restarted since: a restore that does not wait \
                 for room would fail. If you start that program with `nvsharectl run`, other programs can use the \
                 room until the restore."
            ),
            SleepPhase::Lent => format!(
                "Another program has checkpointed its process. Other programs use its room on {gpu} until that \
                 program restores it."
            ),
            SleepPhase::Asleep | SleepPhase::Awake => "It is asleep, and wakes up when it calls the driver.".into(),
        },
        Obstacle::NoRoomToReturn(bytes) => format!(
            "It waits to be restored on {gpu}. {} of other programs' memory cannot be evicted from {gpu}, and the rest \
             is too small for the restore. It is restored as soon as enough of that memory is free.",
            units::size(*bytes)
        ),
        Obstacle::Stopped => "A signal or a debugger has stopped its process.".into(),
        Obstacle::Context { deferred: false } => format!("It waits for free memory for its CUDA context on {gpu}."),
        Obstacle::Context { deferred: true } => format!(
            "It waits to create a CUDA context on {gpu}. With that context, another program would have too little \
             memory to run."
        ),
        Obstacle::Memory(bytes) => {
            format!("It waits for other programs to free memory, because it requests {} in total.", units::size(*bytes))
        }
        Obstacle::Away(members) => {
            let members: Vec<String> = members.iter().map(|member| names.client(*member)).collect();
            let are = if members.len() == 1 { "is" } else { "are" };
            format!("It can run only together with {}, which {are} stopped, paused or asleep.", members.join(", "))
        }
        Obstacle::MappingFailed(left) => {
            format!("The driver could not map its memory in its last turn. The next attempt is in {}.", about(*left))
        }
        Obstacle::TimeMax(left) => {
            format!("It has used up its time-max on {gpu}. It may run again in {}.", about(*left))
        }
        Obstacle::OwnHold => format!("It was asked to release {gpu}, and has not yet released it."),
        Obstacle::Pinned(full, bytes) => pinned_sentence(names, *full, *bytes),
        Obstacle::Room(full, bytes) => format!(
            "{} of {} are kept free for other programs, as `nvsharectl status` shows. The rest of the GPU is too \
             small for this program.",
            units::size(*bytes),
            names.gpu(*full)
        ),
        Obstacle::Behind(other) => {
            format!(
                "It also needs {}, which another program uses or waits for. The rules give that program precedence.",
                names.gpu(*other)
            )
        }
        Obstacle::Suspended => "The host is about to suspend.".into(),
    }
}

fn standstill_sentence(names: &impl Names, gpu: &str, standstill: Standstill) -> String {
    let Standstill { holder, gpu: other, other_holder } = standstill;
    let (holder, other_holder, other) = (names.client(holder), names.client(other_holder), names.gpu(other));
    format!(
        "{holder} holds {gpu} and {other_holder} holds {other}, and the work of neither ends. If they are processes \
         of two jobs, each job waits for the GPU that the other job holds, and none of them will continue: end one \
         of the jobs. Start all processes of a job with the same NVSHARE_GANG, as libnvshare(7) explains, so that \
         they run together."
    )
}

fn holder_sentence(names: &impl Names, client: ClientId, gpu: &str, holder: &HolderAhead) -> String {
    let who = names.client(holder.client);
    match (holder.state, holder.left) {
        (LockState::Stuck | LockState::Undrainable, _) => {
            format!("{who} holds {gpu} and was asked to release it, but its work does not end.")
        }
        (LockState::Revoking, _) => format!("{who} holds {gpu} and was asked to release it. It is finishing its work."),
        (_, Some(left)) => format!("{who} holds {gpu}. Its turn ends in {}.", about(left)),
        (_, None) if holder.precedes => {
            let rule = names.rule(holder.client).or_else(|| names.rule(client));
            let by = rule.map_or(String::new(), |rule| format!(" ({rule})"));
            format!("{who} keeps {gpu} until it has no more work{by}.")
        }
        (_, None) => format!("{who} holds {gpu}. Its turn has no time limit."),
    }
}

fn ahead_sentence(names: &impl Names, client: ClientId, ahead: &Ahead) -> String {
    let clients: Vec<String> = ahead.clients.iter().map(|member| names.client(*member)).collect();
    let gang = if clients.len() == 1 { "" } else { "the gang of " };
    let first = ahead.clients.first().copied().unwrap_or(client);
    let of = |client: ClientId| names.rule(client).map_or(String::new(), |rule| format!(" ({rule})"));
    let why = match ahead.reason {
        Reason::Priority => format!("its priority is higher{}", of(first)),
        Reason::OtherIsIdle => format!("the waiting program runs only while no other program has work{}", of(client)),
        Reason::Interactive => format!("it is interactive and within its share{}", of(first)),
        Reason::BelowMinimum => format!("it has received less than its time-min{}", of(first)),
        Reason::GangTurn => "other programs of its gang have their turn".into(),
        Reason::Share => "its owner has used less of its share".into(),
        Reason::Aged => "it has waited longer than max-wait".into(),
        Reason::Earlier => "it asked earlier".into(),
        Reason::Shorter => "it is expected to need less time".into(),
        Reason::LessServed => "it has used less GPU time".into(),
    };
    let takes = ahead.takes.map_or("with no time limit".to_owned(), |takes| format!("for {}", about(takes)));
    format!("{gang}{} runs first, {takes}: {why}.", clients.join(" and "))
}

fn moves(what: &Explanation) -> Option<String> {
    let (leaves, comes) = (units::size(what.leaves), units::size(what.comes));
    let mut text = match (what.leaves, what.comes) {
        (0, 0) => return None,
        (_, 0) => format!("{leaves} must be evicted from the GPU first"),
        (0, _) => format!("{comes} of its memory must be restored first"),
        _ => format!("{leaves} must be evicted from the GPU first and {comes} of its memory restored"),
    };
    let _ = write!(text, ", which takes {}.", about(what.moving));
    Some(text)
}

/// Formats an estimated time.
fn about(duration: Duration) -> String {
    if duration < SHORTEST { "less than 0.1s".into() } else { format!("about {}", units::duration(duration)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Uuid;

    struct Fake;

    impl Names for Fake {
        fn client(&self, client: ClientId) -> String {
            format!("program {}", client.0)
        }
        fn gpu(&self, _: GpuId) -> String {
            "GPU 0".into()
        }
        fn rule(&self, client: ClientId) -> Option<String> {
            (client.0 == 9).then(|| "rule \"render\"".into())
        }
        fn reached_by_devices(&self, gpu: GpuId) -> Vec<ClientId> {
            if gpu == GpuId(Uuid([7; 16])) { vec![ClientId(9)] } else { Vec::new() }
        }
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn waiting() -> Explanation {
        Explanation {
            gpu: GpuId(Uuid([1; 16])),
            state: LockState::Waiting,
            waits: Some(Duration::from_millis(4200)),
            ..Explanation::default()
        }
    }

    fn holder(client: u64, state: LockState, left: Option<Duration>) -> HolderAhead {
        HolderAhead { client: ClientId(client), state, left, precedes: left.is_none() }
    }

    fn ahead(client: u64, reason: Reason) -> Ahead {
        Ahead { clients: vec![ClientId(client)], reason, takes: Some(s(2)) }
    }

    fn of(what: &Explanation) -> Vec<String> {
        sentences(&Fake, ClientId(1), what)
    }

    #[test]
    fn a_waiting_clients_queue_moves_and_start_time_are_explained() {
        let what = Explanation {
            holders: vec![holder(2, LockState::Holding, Some(s(3)))],
            ahead: vec![ahead(9, Reason::Priority), ahead(4, Reason::Share)],
            leaves: 3 << 30,
            comes: 1 << 30,
            moving: Duration::from_millis(200),
            starts: Some(s(7)),
            ..waiting()
        };
        let expected = [
            "It has waited for GPU 0 for 4.2s, and 3 programs are ahead of it.",
            "program 2 holds GPU 0. Its turn ends in about 3.0s.",
            "program 9 runs first, for about 2.0s: its priority is higher (rule \"render\").",
            "program 4 runs first, for about 2.0s: its owner has used less of its share.",
            "3 GiB must be evicted from the GPU first and 1 GiB of its memory restored, which takes about 0.2s.",
            "It is expected to run in about 7.0s.",
        ];
        assert_eq!(of(&what), expected);
    }

    #[test]
    fn only_the_next_clients_of_a_long_queue_are_named() {
        let queue = (2..=14).map(|client| ahead(client, Reason::Earlier)).collect();
        let text = of(&Explanation { ahead: queue, starts: Some(s(26)), ..waiting() });
        assert_eq!(text.len(), 1 + NAMED + 2, "{text:?}");
        assert_eq!(text[NAMED + 1], "Then 8 more programs run, for about 16s in total.");
    }

    #[test]
    fn a_standstill_is_named_with_its_remedy() {
        let standstill = Standstill { holder: ClientId(2), gpu: GpuId(Uuid([2; 16])), other_holder: ClientId(3) };
        let text = of(&Explanation { standstill: Some(standstill), ..waiting() }).join(" ");
        assert!(text.contains("program 2 holds GPU 0 and program 3 holds GPU 0"), "{text}");
        assert!(text.contains("the same NVSHARE_GANG"), "{text}");
    }

    #[test]
    fn memory_that_a_network_card_may_access_is_named_with_its_remedy() {
        let pinned = |gpu: u8| {
            let what = Explanation { obstacle: Some(Obstacle::Pinned(GpuId(Uuid([gpu; 16])), 5 << 30)), ..waiting() };
            sentences(&Fake, ClientId(1), &what).join("\n")
        };
        let text = pinned(7);
        assert!(text.contains("The memory of program 9 stays there: another device"), "{text}");
        assert!(text.contains("NCCL_IB_DISABLE=1") && text.contains("NCCL_NET_GDR_LEVEL=LOC"), "{text}");
        assert!(!pinned(1).contains("NCCL"), "{}", pinned(1));
    }

    #[test]
    fn a_gang_without_a_time_limit_is_named_with_all_members() {
        let gang = Ahead { clients: vec![ClientId(2), ClientId(3)], reason: Reason::Priority, takes: None };
        let text = of(&Explanation { ahead: vec![gang], ..waiting() });
        let line = "the gang of program 2 and program 3 runs first, with no time limit: its priority is higher.";
        assert_eq!(text[1], line);
    }

    #[test]
    fn unknown_end_and_start_times_are_omitted() {
        let what = Explanation { holders: vec![holder(9, LockState::Holding, None)], ..waiting() };
        let text = of(&what);
        assert_eq!(text[1], "program 9 keeps GPU 0 until it has no more work (rule \"render\").");
        assert_eq!(text[2], "Its start cannot be estimated.");
        let what = Explanation { holders: vec![holder(2, LockState::Stuck, Some(s(0)))], ..waiting() };
        assert_eq!(of(&what)[1], "program 2 holds GPU 0 and was asked to release it, but its work does not end.");
    }

    #[test]
    fn a_client_that_does_not_wait_gets_the_reason() {
        let idle = Explanation { waits: None, state: LockState::Idle, ..waiting() };
        assert_eq!(of(&idle), ["It does not wait for GPU 0, because it has no work for that GPU."]);
        let paused = Explanation { obstacle: Some(Obstacle::Paused), ..idle.clone() };
        assert_eq!(of(&paused), ["It is paused. `nvsharectl resume` continues it."]);
        let own = vec![holder(1, LockState::Holding, Some(s(5)))];
        let holding = Explanation { state: LockState::Holding, holders: own, ..idle };
        assert_eq!(of(&holding), ["It holds GPU 0. Its turn ends in about 5.0s."]);
        let capped = Explanation { obstacle: Some(Obstacle::TimeMax(s(2))), ..waiting() };
        let expected = [
            "It has waited for GPU 0 for 4.2s.",
            "It has used up its time-max on GPU 0. It may run again in about 2.0s.",
            "Its start cannot be estimated.",
        ];
        assert_eq!(of(&capped), expected);
    }
}
