//! Clients that the scheduler moves between GPUs by itself (`Settings::migrate`): which one next, and where.
//!
//! One rule: **a move has to be worth its pause [`TIMES`] times over**, in time that it can be seen to spare. What that is depends on
//! what is wrong with the GPU that the client is on:
//!
//! - It reports errors, or has too little room for a request that so never runs: all of [`WINDOW`].
//! - Several clients work there and another GPU is idle (`spread`): what this one waited in the last [`WINDOW`].
//! - All of its clients are idle, and have room beside those of busier or fuller GPUs (`pack`): the time for which this one has been idle, in
//!   which nobody notices the pause.
//!
//! Nothing is extrapolated: what has been waited, or not been used, is what counts. The pause is the longest of the last moves. Only
//! one client is on its way at a time, so that each decision sees what the one before has led to, and none goes twice in [`WINDOW`].

use crate::api::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// How long a client stays where it is at least, and for how long it is remembered what it waited.
pub(crate) const WINDOW: Duration = Duration::from_secs(600);
/// How often it is looked whether one should be moved.
pub(crate) const LOOK: Duration = Duration::from_secs(30);
/// For how long nobody has worked on a GPU that counts as idle.
const IDLE: Duration = Duration::from_secs(60);
/// A move has to spare so many times its pause.
const TIMES: u32 = 20;
/// The pause of a move before there was one: of 10 GiB, as slow as was measured [H200, 580.159].
const PAUSE: Duration = Duration::from_secs(6);
/// So many of the last moves count.
const PAUSES: usize = 8;

/// A GPU at the moment of a decision.
#[derive(Debug, Clone, Default)]
pub(crate) struct Site {
    pub is_failing: bool,
    /// Bytes by which a request that waits there is too large for what can ever be free.
    pub lacks: u64,
    /// Clients that have it attached.
    pub clients: usize,
    /// Those of them that have worked or waited for it in the last [`IDLE`].
    pub busy: usize,
}

/// A client that can be moved.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub client: ClientId,
    pub from: GpuId,
    /// The GPUs that have room for it, and whether everybody there would still have all memory at once.
    pub to: BTreeMap<GpuId, bool>,
    /// What it leaves on its GPU that cannot leave otherwise: its context.
    pub context: u64,
    /// How long it has waited for its GPU in the last [`WINDOW`].
    pub waited: Duration,
    /// How long it has had no work; 0: it has some.
    pub idle: Duration,
}

/// What a decision depends on.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub placement: Placement,
    pub pause: Duration,
    pub sites: BTreeMap<GpuId, Site>,
    pub candidates: Vec<Candidate>,
}

impl View {
    /// The move that is worth most, if any is worth its pause.
    pub fn decide(&self) -> Option<(ClientId, Move)> {
        let all = self.candidates.iter().flat_map(|candidate| candidate.to.keys().map(move |to| (candidate, *to)));
        let worth = all.filter_map(|(candidate, to)| Some((self.worth(candidate, to)?, candidate, to)));
        let pays = worth.filter(|(worth, ..)| self.pause * TIMES <= *worth);
        let (_, Candidate { client, from, .. }, to) =
            pays.max_by_key(|(worth, candidate, to)| (*worth, self.suits(candidate, *to), Reverse(candidate.client)))?;
        Some((*client, Move { from: *from, to }))
    }

    /// GPUs where it matters whether a client that keeps the lock has work.
    pub fn asks(&self) -> GpuSet {
        let is_shared = self.sites.values().any(|site| site.busy > 1);
        let occupied = self.sites.values().filter(|site| site.clients > 0).count();
        let matters = |site: &Site| match self.placement {
            Placement::None => false,
            Placement::Spread => is_shared && site.busy == 1,
            Placement::Pack => occupied > 1 && site.clients > 0,
        };
        self.sites.iter().filter(|(_, site)| matters(site)).map(|(id, _)| *id).collect()
    }

    /// The time that a move spares. `None`: there is no reason for it.
    fn worth(&self, candidate: &Candidate, to: GpuId) -> Option<Duration> {
        let (here, there) = (self.sites.get(&candidate.from)?, self.sites.get(&to)?);
        if there.is_failing || there.lacks > 0 {
            return None;
        }
        if here.is_failing || self.makes_room(candidate.from, here) {
            return Some(WINDOW);
        }
        match self.placement {
            Placement::None => None,
            Placement::Spread => {
                let helps = candidate.idle.is_zero() && here.busy > 1 && there.busy == 0;
                helps.then_some(candidate.waited)
            }
            Placement::Pack => {
                let fits = candidate.to.get(&to).copied().unwrap_or(false);
                let order = |site: &Site, id| (site.busy > 0, site.clients, Reverse(id));
                let is_fuller = there.clients > 0 && order(here, candidate.from) < order(there, to);
                (fits && is_fuller && self.can_be_emptied(candidate.from, here)).then_some(candidate.idle.min(WINDOW))
            }
        }
    }

    fn on(&self, id: GpuId) -> impl Iterator<Item = &Candidate> {
        self.candidates.iter().filter(move |candidate| candidate.from == id)
    }

    /// Whether a request that never runs there would, if clients left.
    fn makes_room(&self, id: GpuId, site: &Site) -> bool {
        let most = self.on(id).fold(0u64, |sum, candidate| sum.saturating_add(candidate.context));
        site.lacks > 0 && site.lacks <= most
    }

    /// Whether all clients of a GPU are idle and have room elsewhere.
    fn can_be_emptied(&self, id: GpuId, site: &Site) -> bool {
        let can = |candidate: &&Candidate| !candidate.idle.is_zero() && candidate.to.values().any(|fits| *fits);
        self.on(id).filter(can).count() == site.clients
    }

    /// Of moves that are worth as much: the larger, the better.
    fn suits(&self, candidate: &Candidate, to: GpuId) -> (bool, Reverse<usize>, u64, Reverse<GpuId>) {
        let clients = self.sites.get(&to).map_or(0, |site| site.clients);
        let clients = if self.placement == Placement::Pack { usize::MAX - clients } else { clients };
        let fits = candidate.to.get(&to).copied().unwrap_or(false);
        (fits, Reverse(clients), candidate.context, Reverse(to))
    }
}

/// What earlier moves took, and what clients have waited.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Migration {
    /// For each client, how long it had waited in all at earlier looks, the newest last.
    waited: BTreeMap<ClientId, VecDeque<(Time, Duration)>>,
    /// When clients were last to be moved.
    moved: BTreeMap<ClientId, Time>,
    /// Since when a client that is being moved has been held off.
    began: BTreeMap<ClientId, Time>,
    pauses: VecDeque<Duration>,
    /// GPUs whose holders are asked to let go of the lock when they have no work.
    pub asks: GpuSet,
}

impl Migration {
    pub fn forget(&mut self, client: ClientId) {
        self.waited.remove(&client);
        self.moved.remove(&client);
        self.began.remove(&client);
    }

    /// A client has waited so long in all. Returns how long it has in the last [`WINDOW`].
    pub fn waited(&mut self, now: Time, client: ClientId, all: Duration) -> Duration {
        let looks = self.waited.entry(client).or_default();
        looks.retain(|(at, before)| *before <= all && now.saturating_sub(*at) <= WINDOW);
        let before = looks.front().map_or(all, |(_, before)| *before);
        looks.push_back((now, all));
        all - before
    }

    /// A client is to be moved.
    pub fn begins(&mut self, now: Time, client: ClientId) {
        self.moved.insert(client, now);
    }

    pub fn has_just_moved(&self, now: Time, client: ClientId) -> bool {
        self.moved.get(&client).is_some_and(|at| now.saturating_sub(*at) < WINDOW)
    }

    /// A client that is to be moved is told to prepare: its pause begins.
    pub fn prepares(&mut self, now: Time, client: ClientId) {
        self.began.insert(client, now);
    }

    /// A move has ended. `awake`: the client goes on, on the other GPU.
    pub fn ended(&mut self, now: Time, client: ClientId, awake: bool) {
        let Some(since) = self.began.remove(&client).filter(|_| awake) else { return };
        self.pauses.push_back(now.saturating_sub(since));
        self.pauses.drain(..self.pauses.len().saturating_sub(PAUSES));
        self.moved.insert(client, now);
    }

    /// How long the pause of the next move is expected to be.
    pub fn pause(&self) -> Duration {
        self.pauses.iter().max().copied().unwrap_or(PAUSE)
    }

    /// Forgets what was seen, where nothing is to be moved any more.
    pub fn stop(&mut self) -> GpuSet {
        self.waited.clear();
        std::mem::take(&mut self.asks)
    }

    /// Whether somebody has not worked for so long that its GPU may count as idle.
    pub fn is_long(idle: Duration) -> bool {
        idle >= IDLE
    }

    pub fn keep(&mut self, clients: &BTreeSet<ClientId>) {
        self.waited.retain(|client, _| clients.contains(client));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> GpuId {
        GpuId(Uuid([n; 16]))
    }

    fn site(clients: usize, busy: usize) -> Site {
        Site { clients, busy, ..Site::default() }
    }

    fn candidate(n: u64, from: u8, to: &[(u8, bool)]) -> Candidate {
        Candidate {
            client: ClientId(n),
            from: gpu(from),
            to: to.iter().map(|(to, fits)| (gpu(*to), *fits)).collect(),
            context: 500 << 20,
            waited: Duration::ZERO,
            idle: Duration::ZERO,
        }
    }

    fn waits(seconds: u64, candidate: Candidate) -> Candidate {
        Candidate { waited: Duration::from_secs(seconds), ..candidate }
    }

    fn idle(seconds: u64, candidate: Candidate) -> Candidate {
        Candidate { idle: Duration::from_secs(seconds), ..candidate }
    }

    fn view(placement: Placement, sites: &[Site], candidates: Vec<Candidate>) -> View {
        let sites = (0..).map(gpu).zip(sites.iter().cloned()).collect();
        View { placement, pause: Duration::from_secs(2), sites, candidates }
    }

    fn moves(client: u64, from: u8, to: u8) -> Option<(ClientId, Move)> {
        Some((ClientId(client), Move { from: gpu(from), to: gpu(to) }))
    }

    #[test]
    fn one_of_two_that_wait_for_each_other_goes_to_a_gpu_that_is_idle() {
        let two = |waited| vec![waits(waited, candidate(1, 0, &[(1, true)])), waits(9, candidate(2, 0, &[(1, true)]))];
        let sites = [site(2, 2), site(1, 0)];
        assert_eq!(view(Placement::Spread, &sites, two(40)).decide(), moves(1, 0, 1));
        assert_eq!(view(Placement::Spread, &sites, two(39)).decide(), None, "less than 20 times its pause");
        assert_eq!(view(Placement::Pack, &sites, two(40)).decide(), None);
        assert_eq!(view(Placement::None, &sites, two(40)).decide(), None);
        assert_eq!(view(Placement::Spread, &[site(2, 2), site(1, 1)], two(40)).decide(), None, "it is not idle");
        assert_eq!(view(Placement::Spread, &[site(2, 1), site(1, 0)], two(40)).decide(), None, "the other has no work");
    }

    #[test]
    fn an_idle_one_is_not_moved_to_level_load() {
        let one = idle(300, waits(500, candidate(1, 0, &[(1, true)])));
        assert_eq!(view(Placement::Spread, &[site(3, 2), site(0, 0)], vec![one]).decide(), None);
    }

    #[test]
    fn a_gpu_whose_clients_are_idle_is_emptied_where_all_of_them_fit() {
        let one = |seconds| idle(seconds, candidate(1, 0, &[(1, true)]));
        let sites = [site(1, 0), site(2, 1)];
        assert_eq!(view(Placement::Pack, &sites, vec![one(40)]).decide(), moves(1, 0, 1));
        assert_eq!(view(Placement::Pack, &sites, vec![one(39)]).decide(), None, "it may want to go on soon");
        assert_eq!(view(Placement::Pack, &sites, vec![one(0)]).decide(), None, "it works");
        assert_eq!(view(Placement::Spread, &sites, vec![one(40)]).decide(), None);
        assert_eq!(view(Placement::Pack, &[site(2, 1), site(3, 1)], vec![one(40)]).decide(), None, "another stays");
        let crowded = idle(40, candidate(1, 0, &[(1, false)]));
        assert_eq!(view(Placement::Pack, &sites, vec![crowded]).decide(), None, "memory would have to move");
        assert_eq!(view(Placement::Pack, &[site(1, 0), site(0, 0)], vec![one(40)]).decide(), None, "that one is empty");
    }

    #[test]
    fn of_two_gpus_that_are_alike_one_is_emptied_and_not_the_other() {
        let both = vec![idle(40, candidate(1, 0, &[(1, true)])), idle(40, candidate(2, 1, &[(0, true)]))];
        let sites = [site(1, 0), site(1, 0)];
        let decided = view(Placement::Pack, &sites, both.clone()).decide();
        assert_eq!(decided, moves(2, 1, 0));
        let after = vec![idle(40, candidate(1, 0, &[(1, true)])), idle(40, candidate(2, 0, &[(1, true)]))];
        assert_eq!(view(Placement::Pack, &[site(2, 0), site(0, 0)], after).decide(), None);
    }

    #[test]
    fn clients_leave_where_a_request_could_never_run_and_only_if_that_helps() {
        let lacks = |bytes| [Site { lacks: bytes, ..site(3, 1) }, site(4, 4)];
        let candidates = || vec![candidate(1, 0, &[(1, true)]), candidate(2, 0, &[(1, true)])];
        for placement in [Placement::Pack, Placement::Spread] {
            assert_eq!(view(placement, &lacks(700 << 20), candidates()).decide(), moves(1, 0, 1));
            assert_eq!(view(placement, &lacks(1700 << 20), candidates()).decide(), None, "there is too little to gain");
        }
    }

    #[test]
    fn everybody_leaves_a_gpu_that_reports_errors_and_nobody_goes_there() {
        let failing = Site { is_failing: true, ..site(1, 1) };
        let one = vec![candidate(1, 0, &[(1, false), (2, true)])];
        let sites = [failing.clone(), site(1, 1), site(5, 5)];
        assert_eq!(view(Placement::Spread, &sites, one.clone()).decide(), moves(1, 0, 2), "where it fits");
        let sites = [failing.clone(), site(1, 1), failing];
        assert_eq!(view(Placement::Spread, &sites, one).decide(), moves(1, 0, 1));
    }

    #[test]
    fn a_pause_too_long_for_the_window_is_never_worth_it() {
        let slow = |view: View| View { pause: WINDOW / TIMES + Duration::from_secs(1), ..view };
        let failing = Site { is_failing: true, ..site(1, 1) };
        let one = vec![candidate(1, 0, &[(1, true)])];
        assert_eq!(slow(view(Placement::Spread, &[failing, site(0, 0)], one)).decide(), None);
    }

    #[test]
    fn what_was_waited_is_that_of_the_last_ten_minutes() {
        let (mut all, client) = (Migration::default(), ClientId(1));
        let at = Duration::from_secs;
        assert_eq!(all.waited(at(0), client, at(100)), at(0), "what was before is not known");
        assert_eq!(all.waited(at(30), client, at(115)), at(15));
        assert_eq!(all.waited(at(600), client, at(200)), at(100));
        assert_eq!(all.waited(at(630), client, at(200)), at(85));
        assert_eq!(all.waited(at(660), client, at(7)), at(0), "it counts anew");
    }

    #[test]
    fn the_pause_is_the_longest_of_the_last_moves() {
        let (mut all, client) = (Migration::default(), ClientId(1));
        let at = Duration::from_secs;
        assert_eq!(all.pause(), PAUSE);
        for took in (1..=4).chain([1; PAUSES - 1]) {
            all.prepares(at(100), client);
            all.ended(at(100 + took), client, true);
        }
        assert_eq!(all.pause(), at(4));
        all.prepares(at(100), client);
        all.ended(at(200), client, false);
        assert_eq!(all.pause(), at(4), "one that did not succeed is none");
        all.prepares(at(100), client);
        all.ended(at(101), client, true);
        assert_eq!(all.pause(), at(1));
        assert!(all.has_just_moved(at(700), client) && !all.has_just_moved(at(701), client));
    }
}
