//! What a scheduler's trace says.

/// One line of a scheduler's trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Move {
    pub run: u32,
    pub ms: f64,
    pub client: u64,
    pub pid: u32,
    pub what: String,
    pub bytes: u64,
}

/// How often that process was given the lock.
pub fn grants(trace: &[Move], pid: u32) -> usize {
    trace.iter().filter(|m| m.what == "grant" && m.pid == pid).count()
}

/// The processes that were given the lock, in order.
pub fn turns(trace: &[Move]) -> Vec<u32> {
    trace.iter().filter(|m| m.what == "grant").map(|m| m.pid).collect()
}

/// Bytes that clients were asked to bring off the GPU.
pub fn evicted(trace: &[Move]) -> u64 {
    trace.iter().filter(|m| m.what == "evict").map(|m| m.bytes).sum()
}

/// For each moment at which holders changed: how many there are from then on.
pub fn holders(trace: &[Move]) -> Vec<(Move, Vec<u64>)> {
    let mut holders: Vec<u64> = Vec::new();
    let mut run = 0;
    let mut list = Vec::new();
    for m in trace {
        if m.run != run {
            (run, holders) = (m.run, Vec::new());
        }
        match m.what.as_str() {
            "grant" | "held" => holders.push(m.client),
            // Who cannot drain does not count as a holder.
            "release" | "detach" | "disconnect" | "undrainable" => holders.retain(|c| *c != m.client),
            _ => continue,
        }
        list.push((m.clone(), holders.clone()));
    }
    list
}

/// No moment at which two clients had the lock.
#[track_caller]
pub fn assert_one_holder(trace: &[Move]) {
    for (m, now) in holders(trace) {
        assert!(now.len() <= 1, "clients {now:?} hold the lock at once after {m:?}");
    }
}
