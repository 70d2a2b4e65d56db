//! What follows from a change of a client's sleep, for the client and for other components.
//!
//! A client that is held off its GPUs gets no lock and no memory. Its request is blocked, like the
//! request of a stopped process. The locks of a paused client are first revoked, like any holder's.
//! The memory of the client's context is lent to other clients on the GPU. Limits do not promise
//! this memory to the other clients, so a wake can evict it.
//!
//! A client is restored when all of its GPUs have room for its contexts. Other clients make this
//! room by evicting memory. The room is set aside (`gpu::returning`), then measured, and only then
//! does the restore begin, because a restore that runs out of memory cannot be repeated. Clients
//! are restored to a GPU one at a time, in the order in which they wake. If a restore takes too
//! long, the next client no longer waits for it, but the memory for that restore's context stays
//! set aside. No client sleeps on a GPU whose memory is not measured.
//!
//! A client that has been idle for `sleep_after` is put to sleep if other clients lack room. Other
//! clients lack room in two cases: a context does not fit beside the present contexts, or the
//! demands do not fit together even without the client's own demand. The client that has been idle
//! longest sleeps first. The memory that it frees is measured before the next client sleeps. A new
//! client is *deferred* if it has to wait until an attached client needs less. A deferred client
//! gets the room that a client frees by falling asleep. Until a client can sleep, holders are asked
//! to release the lock when they are idle.
//!
//! Where programs without nvshare use the GPU, their memory could take the room that a wake needs.
//! No client is put to sleep there, except at a user's request.
//!
//! [`Presence`] may change only `sleep`, and reads everything else. It returns [`Task`]s, which the
//! machine does in order. What follows from a task is done before the tasks behind it.

use crate::{
    api::*,
    client::Clients,
    effects::Effects,
    fairness::Fairness,
    gpu::{Gpu, Gpus},
    model::Model,
    placement::Placements,
    queue::Queues,
    quota::{Quota, RoomToMove},
    rules::Rules,
    sleep::{Foreign, Sleep, Step},
    timers::Wake,
};

/// Something to do for a client.
#[derive(Debug, Clone)]
pub(crate) enum Task {
    // For the client's sleep.
    Step(Step),
    /// The part of a step that comes after the client's limits.
    Act(Step),
    /// Block the request and revoke the locks of a client that is held off.
    HoldOff,
    /// Ask the client to prepare, if it should sleep.
    Prepare,
    /// Ask the client to prepare, if nothing prevents its sleep.
    Ask,
    /// Notify a client that runs again.
    Awake,
    /// Set the time of the client's next check.
    Schedule,
    /// The client may have begun or stopped to wait for room.
    Return,
    /// Set room aside for all clients that wait for room.
    ReturnNext,
    /// Make the client's pending move.
    Move,
    CannotMove(MoveObstacle),
    /// Report the outcome of a move, if it is known.
    AnswerMove,
    /// Plan the client's move off a drained GPU.
    LeaveDrained,
    /// Take the client off its GPUs if one of them is drained. Restore the client if none is.
    Drain,
    Send(Command),

    // For other components.
    /// Block the client's request.
    WaitUntilItRuns,
    /// Allow the client to take locks again, unless it is held off.
    MayRun,
    /// Revoke the client's locks.
    Revoke,
    /// Evict all evictable memory of the client.
    TakeAll,
    /// The client has left its GPUs.
    Leave,
    /// The client is on its GPUs again.
    ComeBack,
    /// The client will never need a context.
    ForgetContexts,
    /// Update the client's limits for its sleep and for its move.
    Limit,
    /// Set room aside for the waking client.
    ExpectReturn,
    /// Let other clients use the room of the waking client.
    GiveUpRoom,
    /// Release the room of the client, which stays asleep.
    CancelReturn,
    /// Another program has locked the client's process, or the process runs again.
    Halt,
    /// Reserve the room that the client's restore needs.
    Reserve,
    /// Lend the room that the client's restore needs to other clients.
    Lend,
    /// Begin the client's restore.
    Restore,
    /// Move the client's attachment to another GPU.
    MoveTo(Move),
}

pub(crate) type Tasks = Vec<(ClientId, Task)>;

/// Sleep to change, and the state that decisions about it depend on.
pub(crate) struct Presence<'a> {
    pub sleep: &'a mut Sleep,
    pub effects: &'a mut Effects,
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub clients: &'a Clients,
    pub gpus: &'a Gpus,
    pub queues: &'a Queues,
    pub quota: &'a Quota,
    pub fairness: &'a Fairness,
    pub places: &'a Placements,
}

impl Presence<'_> {
    fn model(&self) -> Model<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, .. } = self;
        Model { now: *now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places }
    }

    // Events. Each returns tasks for the client.

    pub fn want(&mut self, client: ClientId, paused: bool) -> Vec<Task> {
        self.sleep.want(client, paused);
        vec![Task::AnswerMove, Task::HoldOff, Task::Prepare, Task::Return]
    }

    /// Handles the connection of a client that an earlier scheduler told to sleep.
    pub fn found(&mut self, client: ClientId) -> Vec<Task> {
        vec![Task::Step(self.sleep.found(client))]
    }

    pub fn ready(&mut self, client: ClientId) -> Vec<Task> {
        let obstacle = self.model().obstacle_when_ready(client);
        vec![Task::Step(self.sleep.ready(self.now, client, obstacle))]
    }

    pub fn refused(&mut self, client: ClientId, why: SleepObstacle) -> Vec<Task> {
        vec![Task::Step(self.sleep.refused(self.now, client, why))]
    }

    pub fn wake(&mut self, client: ClientId, resumed: bool) -> Vec<Task> {
        vec![Task::Step(self.sleep.wake(self.now, client, resumed, self.effects.number()))]
    }

    pub fn checkpointed(&mut self, client: ClientId, outcome: SleepOutcome) -> Vec<Task> {
        let has_failed_to_move = self.sleep.has_failed_to_move(client, outcome);
        let step = self.sleep.answered(self.now, client, outcome, self.effects.number());
        let mut tasks = Vec::new();
        // A client that could not be restored on its new GPUs is moved back to the old ones.
        if has_failed_to_move {
            for back in self.sleep.ways_back(client) {
                self.sleep.misses(client, back.from);
                tasks.push(Task::MoveTo(back));
            }
            tasks.push(Task::CannotMove(MoveObstacle::Failed));
        }
        // Other clients no longer wait for this client to leave.
        self.effects.touch_all(self.gpus.of_client(client));
        tasks.push(Task::Step(step));
        tasks
    }

    /// Handles the present state of a process that another program may have checkpointed.
    pub fn foreign(&mut self, client: ClientId, state: ForeignState) -> Vec<Task> {
        // Other clients no longer wait for this client to leave.
        self.effects.touch_all(self.gpus.of_client(client));
        vec![Task::Step(self.sleep.foreign(client, state))]
    }

    pub fn restore_requested(&mut self, client: ClientId) -> Vec<Task> {
        vec![Task::Step(self.sleep.restore_requested(client, self.effects.number()))]
    }

    /// Handles a client whose check is due.
    pub fn look(&mut self, client: ClientId) -> Vec<Task> {
        let step = self.sleep.look(self.now, client, self.effects.number());
        vec![Task::Move, Task::Step(step)]
    }

    pub fn migrate(&mut self, client: ClientId, to: Move) -> Vec<Task> {
        let obstacle = self.model().obstacle_to_move(client, to);
        if let Some(why) = obstacle.or_else(|| self.sleep.want_move(client, to)) {
            let Move { from, to } = to;
            self.effects.command(Command::Migrated { client, from, to, why: Some(why) });
            return Vec::new();
        }
        vec![Task::Limit, Task::Move, Task::HoldOff, Task::Step(Step::Nothing)]
    }

    // Tasks.

    /// Does a task for the client's sleep. Returns the tasks that follow from it.
    ///
    /// Tasks end: a step of a client follows from another task only if the client leaves a stage
    /// (awake, or waiting for room), and no task leads back to it. A move that fails goes to a GPU
    /// that is not tried again.
    pub fn follow(&mut self, client: ClientId, task: Task) -> Tasks {
        let tasks = match task {
            // The limits come first, so that a client acknowledges lower limits before it prepares.
            Task::Step(step) => {
                use Task::{Act, AnswerMove, Limit, Prepare, Return, Schedule};
                vec![Limit, Act(step), AnswerMove, Return, Prepare, Schedule]
            }
            Task::Act(step) => self.act(client, step),
            Task::HoldOff => match self.sleep.is_held_off(client) {
                true if self.sleep.is_ordered(client) => vec![Task::WaitUntilItRuns, Task::Revoke],
                true => vec![Task::WaitUntilItRuns],
                false => Vec::new(),
            },
            Task::Prepare => self.prepare(client),
            Task::Ask => match self.model().obstacle(client) {
                Some(why) => self.stays_awake(client, why),
                None => {
                    let step = self.sleep.prepare(self.now, client);
                    vec![Task::HoldOff, Task::TakeAll, Task::Step(step)]
                }
            },
            Task::Awake => {
                let moved = self.sleep.take_moves(client);
                // The client does not return to its old GPUs any more.
                vec![Task::Limit, Task::Send(Command::Awake { client, moved }), Task::MayRun]
            }
            Task::Schedule => {
                self.effects.wake(Wake::Sleep(client), self.sleep.due(client));
                Vec::new()
            }
            Task::Return => {
                let stays = self.sleep.is_away(client) && !self.sleep.waking().contains(&client);
                if stays { vec![Task::CancelReturn, Task::ReturnNext] } else { vec![Task::ReturnNext] }
            }
            Task::ReturnNext => return self.return_next(),
            Task::Move => self.make_move(client),
            Task::CannotMove(why) => {
                self.sleep.cannot_move(client, why);
                vec![Task::AnswerMove, Task::LeaveDrained]
            }
            Task::LeaveDrained => self.leave_drained(client).into_iter().collect(),
            Task::AnswerMove => match self.sleep.take_answer(client) {
                Some((Move { from, to }, why)) => {
                    let mut tasks = vec![Task::Limit, Task::Send(Command::Migrated { client, from, to, why })];
                    tasks.extend((why.is_some() && !self.model().is_absent(client)).then_some(Task::MayRun));
                    tasks
                }
                None => Vec::new(),
            },
            Task::Drain => {
                let (is_drained, number) = (self.model().has_drained(client), self.effects.number());
                let step = self.sleep.set_drained(client, is_drained, number);
                let mut tasks: Vec<Task> = self.leave_drained(client).into_iter().collect();
                tasks.extend([Task::Move, Task::Step(step)]);
                tasks
            }
            Task::Send(command) => {
                self.effects.command(command);
                Vec::new()
            }
            Task::WaitUntilItRuns
            | Task::MayRun
            | Task::Revoke
            | Task::TakeAll
            | Task::Leave
            | Task::ComeBack
            | Task::ForgetContexts
            | Task::Limit
            | Task::ExpectReturn
            | Task::GiveUpRoom
            | Task::CancelReturn
            | Task::Halt
            | Task::Reserve
            | Task::Lend
            | Task::Restore
            | Task::MoveTo(_) => Vec::new(), // done by the machine
        };
        tasks.into_iter().map(|task| (client, task)).collect()
    }

    fn act(&mut self, client: ClientId, step: Step) -> Vec<Task> {
        match step {
            Step::Nothing => Vec::new(),
            Step::Prepare => {
                let paused = self.sleep.is_ordered(client);
                vec![Task::Send(Command::PrepareSleep { client, paused })]
            }
            Step::Call(operation) => {
                let is_wake = operation == SleepOperation::Wake;
                let moves = if is_wake { self.sleep.moves(client) } else { Vec::new() };
                vec![Task::Send(Command::Checkpoint { client, operation, moves })]
            }
            Step::Sleeps | Step::Wakes => vec![Task::Leave, Task::Move],
            Step::Runs => vec![Task::Halt, Task::ComeBack, Task::Awake],
            Step::IsKept(stage) => {
                let mut tasks = vec![Task::WaitUntilItRuns, Task::Revoke, Task::Halt];
                match stage {
                    Foreign::Locked => tasks.push(Task::ComeBack),
                    Foreign::Reserved => tasks.extend([Task::Leave, Task::Reserve]),
                    Foreign::Lent => tasks.extend([Task::Leave, Task::Lend]),
                    Foreign::Waking(_) | Foreign::Restoring => {}
                }
                tasks
            }
            Step::AllowRestore => vec![Task::Send(Command::RestoreAllowed { client })],
            Step::Stays => vec![Task::MayRun],
            // The client's calls return the driver's error and need no turn.
            Step::IsLost => {
                let awake = Command::Awake { client, moved: Vec::new() };
                vec![Task::Halt, Task::Leave, Task::ForgetContexts, Task::Send(awake)]
            }
        }
    }

    /// Asks a client that should sleep to prepare, if it can sleep.
    fn prepare(&mut self, client: ClientId) -> Vec<Task> {
        if !self.sleep.is_to_prepare(client) {
            return Vec::new();
        }
        // The client's turn is not ended for a sleep that is impossible.
        if let Some(why) = self.model().lasting_obstacle(client).filter(|_| self.sleep.is_drained(client)) {
            return self.stays_awake(client, why);
        }
        let mut tasks: Vec<Task> = self.leave_drained(client).into_iter().collect();
        match self.sleep.is_ordered(client) {
            // Tried again when the client has released its locks.
            true if self.gpus.holds_any(client) => tasks.push(Task::HoldOff),
            true => tasks.extend([Task::HoldOff, Task::TakeAll, Task::Ask]),
            false => tasks.push(Task::Ask),
        }
        tasks
    }

    /// Keeps awake a client that cannot sleep now. The client may run unless it is paused.
    fn stays_awake(&mut self, client: ClientId, why: SleepObstacle) -> Vec<Task> {
        self.sleep.cannot_prepare(self.now, client, why);
        match self.model().is_absent(client) {
            true => vec![Task::AnswerMove, Task::Schedule],
            false => vec![Task::AnswerMove, Task::MayRun, Task::Schedule],
        }
    }

    /// Sets room aside for waking clients, in the order in which they wake. If two clients wait for
    /// the same GPU, the later one waits for the earlier one, unless the earlier one does not fit now.
    /// Room is set aside on all GPUs of a client or on none. A client without GPUs needs no room.
    fn return_next(&mut self) -> Tasks {
        let (mut taken, mut rooms, mut steps) = (GpuSet::new(), Tasks::new(), Tasks::new());
        for client in self.sleep.waking() {
            let ids = self.gpus.of_client(client);
            if ids.is_empty() {
                steps.push((client, Task::Step(self.sleep.has_room(client))));
                continue;
            }
            let gpus = || ids.iter().filter_map(|id| self.gpus.get(*id));
            if !gpus().all(|gpu| gpu.is_set_aside(client)) {
                let is_free = |gpu: &Gpu| !taken.contains(&gpu.id) && !gpu.returns_other(client);
                let fits = self.model().fits_to_return(client);
                let task = if fits && gpus().all(is_free) { Task::ExpectReturn } else { Task::GiveUpRoom };
                rooms.push((client, task));
                if !fits {
                    continue;
                }
            }
            taken.extend(ids);
        }
        rooms.extend(steps);
        rooms
    }

    /// Begins the restore of a client if all of its GPUs have room.
    pub fn restore(&mut self, client: ClientId) -> Vec<Task> {
        if !self.model().has_room_to_return(client) {
            return Vec::new();
        }
        vec![Task::Restore, Task::Step(self.sleep.has_room(client))]
    }

    /// Makes the pending move of a sleeping client.
    fn make_move(&mut self, client: ClientId) -> Vec<Task> {
        let Some(to) = self.sleep.due_move(client) else { return Vec::new() };
        let why = match self.model().move_obstacle(client, to) {
            Some(why) => why,
            None if self.model().room_for(client, to) == RoomToMove::Now => return vec![Task::MoveTo(to)],
            // Other clients have to acknowledge lower limits first.
            None if self.sleep.waits_for_room(self.now, client) => return Vec::new(),
            None => MoveObstacle::Unacknowledged,
        };
        vec![Task::CannotMove(why), Task::Move]
    }

    /// Plans the move of a client off a drained GPU, if another GPU has room for the client.
    fn leave_drained(&mut self, client: ClientId) -> Option<Task> {
        let both = if self.sleep.is_drained(client) { self.model().way_out(client)? } else { return None };
        self.sleep.want_move(client, both);
        Some(Task::Limit)
    }
}
