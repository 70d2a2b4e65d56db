use super::*;
use nvshare_wire::MAX_DESCRIPTORS;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use test_support::{Directory, artifact};
use tokio::task::LocalSet;

const SHORT: Patience = Patience {
    place: Duration::from_millis(300),
    answer: Duration::from_millis(300),
    settled: Duration::from_millis(300),
    end: Duration::from_millis(300),
};
const LONG: Patience = PATIENCE;
const OWN: Tenant = Tenant::User(1000);
/// A tenant's limit on helpers.
const MAX_OF_TENANT: u32 = 4;

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, test)
}

fn own_process() -> OwnedFd {
    pidfd_open(Pid::from_raw(std::process::id() as i32).expect("a process"), PidfdFlags::empty()).expect("a pidfd")
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

async fn ask(helpers: &Helpers, operation: Operation) -> HelperAnswer {
    helpers.ask(None, operation, own_process(), own_user(), &OWN, Vec::new()).await.0
}

/// The number of helpers that the tenant may still start. `None` if the tenant has no helper.
fn budgets() -> Arc<Budgets> {
    Arc::new(Budgets::new(1))
}

fn places(helpers: &Helpers) -> u32 {
    helpers.budgets.of(&OWN).left(What::Helpers)
}

/// Creates a listener that stands in for systemd.
fn listen(directory: &Directory, patience: Patience) -> (OwnedFd, Helpers) {
    let path = directory.0.join("checkpoint.sock");
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(&path).expect("an address")).expect("bound");
    rustix::net::listen(&listener, 16).expect("it listens");
    (listener, Helpers::new(Start::Connect(path), patience, budgets()))
}

async fn accept(listener: &AsyncFd<OwnedFd>) -> AsyncFd<OwnedFd> {
    let accepted = listener.async_io(Interest::READABLE, |fd| socket::accept(fd.as_fd())).await;
    descriptors::watch(accepted.expect("a connection")).expect("watched")
}

/// Receives a request. Returns the request, and the PID of the process whose pidfd was sent with
/// it.
async fn request(socket: &AsyncFd<OwnedFd>) -> (Request, u32) {
    let (mut packet, mut fds) = ([0; nvshare_checkpoint::MAX_REQUEST], Vec::with_capacity(MAX_DESCRIPTORS));
    let received =
        socket.async_io(Interest::READABLE, |fd| socket::receive(fd.as_fd(), &mut packet, 0, &mut fds)).await;
    let request = Request::decode(&packet[..received.expect("a packet")]).expect("a request");
    let [pidfd] = &fds[..] else { panic!("one descriptor: {fds:?}") };
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).expect("a descriptor");
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")).expect("a pidfd").trim().parse();
    (request, pid.expect("a number"))
}

fn say(socket: &AsyncFd<OwnedFd>, outcome: Outcome, failed: Step, error: u32) {
    let packet = nvshare_checkpoint::Reply { outcome, failed, error }.encode();
    socket::send(socket.get_ref().as_fd(), &packet).expect("sent");
}

async fn wait_for_end(socket: &AsyncFd<OwnedFd>) {
    let end = socket.async_io(Interest::READABLE, |fd| socket::receive(fd.as_fd(), &mut [0], 0, &mut Vec::new())).await;
    assert_eq!(end.expect("the end"), 0);
}

#[test]
fn requests_and_answers_are_delivered_intact() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, LONG);
        let listener = descriptors::watch(listener).expect("watched");
        let pairs = vec![([1; 16], [2; 16])];
        let served = async {
            let socket = accept(&listener).await;
            let (request, pid) = request(&socket).await;
            assert_eq!((request.operation, request.uid, pid), (Operation::Wake, 1234, std::process::id()));
            assert_eq!((&request.pairs, request.lock_timeout_ms), (&pairs, 2000));
            say(&socket, Outcome::Lost, Step::Restore, 2);
            wait_for_end(&socket).await;
        };
        let asked = helpers.ask(None, Operation::Wake, own_process(), 1234, &OWN, pairs.clone());
        let ((answer, _), ()) = tokio::join!(asked, served);
        assert_eq!(answer.outcome, Outcome::Lost);
        let why = answer.failure.expect("a reason").to_string();
        assert_eq!(why, "cuCheckpointProcessRestore failed with error 2");
    });
}

#[test]
fn an_exit_or_invalid_answer_of_a_helper_leaves_the_state_unknown() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, LONG);
        let listener = descriptors::watch(listener).expect("watched");
        for operation in [Operation::Sleep, Operation::Wake, Operation::Settle] {
            for nonsense in [None, Some(&b"what?"[..])] {
                let served = async {
                    let socket = accept(&listener).await;
                    request(&socket).await;
                    if let Some(nonsense) = nonsense {
                        socket::send(socket.get_ref().as_fd(), nonsense).expect("sent");
                    }
                };
                let (answer, ()) = tokio::join!(ask(&helpers, operation), served);
                assert_eq!(answer.outcome, Outcome::Unknown);
                assert!(matches!(answer.failure, Some(HelperFailure::Died)), "{answer:?}");
            }
        }
    });
}

/// The helper counts against its tenant's limit until the helper has exited.
#[test]
fn a_hung_helper_is_disconnected_and_still_counts() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, SHORT);
        let listener = descriptors::watch(listener).expect("watched");
        let silent = async {
            let mut sockets = Vec::new();
            for _ in 0..MAX_OF_TENANT {
                sockets.push(accept(&listener).await);
            }
            sockets
        };
        let asked = async {
            let answers = [(); MAX_OF_TENANT as usize].map(|()| ask(&helpers, Operation::Sleep));
            for answer in answers.map(Box::pin) {
                let answer = answer.await;
                assert_eq!(answer.outcome, Outcome::Unknown);
                assert!(matches!(answer.failure, Some(HelperFailure::TimedOut)), "{answer:?}");
            }
        };
        let (mut sockets, ()) = tokio::join!(silent, asked);
        for socket in &sockets {
            request(socket).await;
            wait_for_end(socket).await;
        }
        tokio::time::sleep(2 * SHORT.end).await;
        let answer = ask(&helpers, Operation::Sleep).await;
        assert!(matches!(answer.failure, Some(HelperFailure::Busy)), "{answer:?}");
        assert_eq!(answer.outcome, Outcome::Runs, "nothing has touched it");
        assert_eq!(ask(&helpers, Operation::Wake).await.outcome, Outcome::Unknown);

        let served = async {
            let socket = accept(&listener).await;
            request(&socket).await;
            say(&socket, Outcome::Asleep, Step::None, 0);
        };
        let others = Tenant::Container("of the same user".into());
        let others = helpers.ask(None, Operation::Sleep, own_process(), own_user(), &others, Vec::new());
        assert_eq!(tokio::join!(others, served).0.0.outcome, Outcome::Asleep, "another tenant's has a place");
        assert_eq!(helpers.all.available_permits(), MAX_HELPERS, "however many tenants have late ones");
        drop(sockets.pop());
        let served = async {
            let socket = accept(&listener).await;
            request(&socket).await;
            say(&socket, Outcome::Runs, Step::None, 0);
        };
        let (answer, ()) = tokio::join!(ask(&helpers, Operation::Settle), served);
        assert!(answer.outcome == Outcome::Runs && answer.failure.is_none(), "{answer:?}");
    });
}

const PER_SECOND: usize = 8;

/// Programs that claim to be asleep, or refuse to prepare, start few helpers, and none that other tenants
/// miss.
#[test]
fn a_tenant_can_start_few_helpers_per_second() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, Patience { place: Duration::ZERO, ..SHORT });
        let listener = descriptors::watch(listener).expect("watched");
        let begin = Instant::now();
        let most = || PER_SECOND * (2 + begin.elapsed().as_secs() as usize);
        let mut started = Vec::new();
        for _ in 0..3 * PER_SECOND {
            if let Some(helper) = helpers.prepare(&OWN) {
                started.push((helper, accept(&listener).await));
            }
        }
        assert!((PER_SECOND..most()).contains(&started.len()), "{} started", started.len());
        // A started helper needs no permission.
        let (helper, socket) = started.remove(0);
        let served = async {
            request(&socket).await;
            say(&socket, Outcome::Runs, Step::None, 0);
        };
        let asked = helpers.ask(Some(helper), Operation::Settle, own_process(), own_user(), &OWN, Vec::new());
        assert!(tokio::join!(asked, served).0.0.failure.is_none());
        let mut asked = PER_SECOND;
        for operation in [Operation::Sleep, Operation::Wake, Operation::Settle].into_iter().cycle().take(3 * PER_SECOND)
        {
            asked += usize::from(!matches!(ask(&helpers, operation).await.failure, Some(HelperFailure::Busy)));
        }
        assert!(asked < most(), "{asked} started");
        assert!(helpers.prepare(&Tenant::User(1)).is_some());
    });
}

/// A program may wait with its answer until its helper has exited.
#[test]
fn the_replacement_of_a_prepared_helper_counts_as_another_start() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, SHORT);
        let listener = descriptors::watch(listener).expect("watched");
        let begin = Instant::now();
        let mut prepared = Vec::new();
        while let Some(helper) = helpers.prepare(&OWN).filter(|_| prepared.len() < 2 * PER_SECOND) {
            drop(accept(&listener).await);
            prepared.push(helper);
        }
        drop(listener); // further starts fail immediately
        let mut starts = prepared.len();
        for helper in prepared {
            let asked = helpers.ask(Some(helper), Operation::Settle, own_process(), own_user(), &OWN, Vec::new());
            starts += usize::from(!matches!(asked.await.0.failure, Some(HelperFailure::Died)));
        }
        let most = PER_SECOND * (2 + begin.elapsed().as_secs() as usize);
        assert!(starts < most, "{starts} starts");
    });
}

#[test]
fn a_prepared_helper_serves_the_sleep_and_the_wake() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, LONG);
        let listener = descriptors::watch(listener).expect("watched");
        let served = async {
            let socket = accept(&listener).await;
            for (operation, outcome) in [(Operation::Sleep, Outcome::Asleep), (Operation::Wake, Outcome::Runs)] {
                assert_eq!(request(&socket).await.0.operation, operation);
                say(&socket, outcome, Step::None, 0);
            }
            wait_for_end(&socket).await;
        };
        let asked = async {
            let mut helper = helpers.prepare(&OWN);
            assert!(helper.is_some());
            for operation in [Operation::Sleep, Operation::Wake] {
                let (answer, kept) = helpers.ask(helper, operation, own_process(), own_user(), &OWN, Vec::new()).await;
                assert!(answer.failure.is_none(), "{answer:?}");
                assert_eq!(kept.is_some(), operation == Operation::Sleep);
                helper = kept;
            }
        };
        tokio::join!(asked, served);
    });
}

#[test]
fn a_client_gets_a_second_prepared_helper_only_after_the_first_ends() {
    let directory = Directory::new();
    run(async {
        let (_listener, helpers) = listen(&directory, LONG);
        let begun = Instant::now();
        let (mut prepared, mut started) = (Prepared::default(), 0);
        let mut prepare = |prepared: &mut Prepared, after, client| {
            prepared.keep(begun + after, ClientId(client), || {
                started += 1;
                helpers.start().ok()
            });
            started
        };
        let (soon, late) = (IDLE / 2, 2 * IDLE);
        assert_eq!([1, 1, 2].map(|client| prepare(&mut prepared, soon, client)), [1, 1, 2]);
        assert!(prepared.take(ClientId(1)).is_some());
        assert!(prepared.take(ClientId(1)).is_none());
        assert_eq!(prepare(&mut prepared, soon, 1), 3);
        let others = MAX_PREPARED as u64 + 1;
        let last = (3..=others).map(|client| prepare(&mut prepared, soon, client)).last();
        assert_eq!(last, Some(MAX_PREPARED + 1));
        assert_eq!(prepare(&mut prepared, late, 1), MAX_PREPARED + 2);
    });
}

#[test]
fn an_ended_prepared_helper_is_replaced() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, LONG);
        let listener = descriptors::watch(listener).expect("watched");
        let helper = helpers.prepare(&OWN);
        drop(accept(&listener).await);
        let served = async {
            let socket = accept(&listener).await;
            request(&socket).await;
            say(&socket, Outcome::Runs, Step::None, 0);
        };
        let asked = helpers.ask(helper, Operation::Sleep, own_process(), own_user(), &OWN, Vec::new());
        let ((answer, _), ()) = tokio::join!(asked, served);
        assert!(answer.outcome == Outcome::Runs && answer.failure.is_none(), "{answer:?}");
    });
}

#[test]
fn dropping_a_request_cancels_it() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, LONG);
        let listener = descriptors::watch(listener).expect("watched");
        let socket = tokio::select! {
            answer = ask(&helpers, Operation::Sleep) => panic!("{answer:?}"),
            socket = accept(&listener) => socket,
        };
        request(&socket).await;
        wait_for_end(&socket).await;
        assert_eq!(places(&helpers), MAX_OF_TENANT - 1, "it has not ended");
        drop(socket);
        while places(&helpers) < MAX_OF_TENANT {
            tokio::task::yield_now().await;
        }
        assert_eq!(helpers.all.available_permits(), MAX_HELPERS);
    });
}

#[test]
fn a_driver_without_checkpoints_leaves_the_state_unchanged() {
    let directory = Directory::new();
    run(async {
        let (listener, helpers) = listen(&directory, LONG);
        let listener = descriptors::watch(listener).expect("watched");
        for (operation, outcome) in [(Operation::Sleep, Outcome::Runs), (Operation::Settle, Outcome::Unknown)] {
            let served = async {
                let socket = accept(&listener).await;
                request(&socket).await;
                say(&socket, Outcome::Unknown, Step::Driver, 0);
            };
            let (answer, ()) = tokio::join!(ask(&helpers, operation), served);
            assert_eq!(answer.outcome, outcome);
            assert!(matches!(answer.failure, Some(HelperFailure::NoCalls)), "{answer:?}");
        }
    });
}

#[test]
fn a_helper_that_cannot_start_leaves_the_process_running() {
    let directory = Directory::new();
    let nothing = directory.0.join("nothing");
    run(async {
        for start in [Start::Connect(nothing.clone()), Start::Child(nothing.clone())] {
            let helpers = Helpers::new(start, LONG, budgets());
            let answer = ask(&helpers, Operation::Sleep).await;
            assert_eq!(answer.outcome, Outcome::Runs);
            assert!(matches!(answer.failure, Some(HelperFailure::NotStarted(_))), "{answer:?}");
            assert_eq!(ask(&helpers, Operation::Wake).await.outcome, Outcome::Unknown);
            assert_eq!(helpers.all.available_permits(), MAX_HELPERS);
        }
    });
}

fn program(directory: &Directory, text: &str) -> PathBuf {
    let path = directory.0.join("helper");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a file");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
    path
}

#[test]
fn a_child_that_does_not_end_is_killed() {
    let directory = Directory::new();
    let pid = directory.0.join("pid");
    let program = program(&directory, &format!("echo $$ >{}\nexec sleep 1000", pid.display()));
    run(async {
        let helpers =
            Helpers::new(Start::Child(program), Patience { answer: Duration::from_secs(1), ..SHORT }, budgets());
        let answer = ask(&helpers, Operation::Sleep).await;
        assert_eq!(answer.outcome, Outcome::Unknown);
        assert!(matches!(answer.failure, Some(HelperFailure::TimedOut)), "{answer:?}");
        while places(&helpers) < MAX_OF_TENANT {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let pid = fs::read_to_string(&pid).expect("it ran");
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "it was waited for");
    });
}

#[test]
fn a_child_that_dies_leaves_the_state_unknown() {
    let directory = Directory::new();
    // When `head` returns, the helper has received its request.
    let program = program(&directory, "head -c 1 >/dev/null; [ \"$NVSHARE_DISABLE\" = 1 ] && kill -9 $$; sleep 1000");
    run(async {
        let answer = ask(&Helpers::new(Start::Child(program), LONG, budgets()), Operation::Wake).await;
        assert_eq!(answer.outcome, Outcome::Unknown);
        assert!(matches!(answer.failure, Some(HelperFailure::Died)), "{answer:?}");
    });
}

/// Starts the real program. The test host has no driver, and the process in the request has exited.
#[test]
fn the_helper_answers_as_a_child_process() {
    run(async {
        let helpers = Helpers::new(Start::Child(artifact(PROGRAM)), LONG, budgets());
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let pid = Pid::from_raw(child.id() as i32).expect("a process");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd");
        child.wait().expect("it ends");
        for operation in [Operation::Sleep, Operation::Wake, Operation::Settle] {
            let process = pidfd.try_clone().expect("a copy");
            let (answer, _) = helpers.ask(None, operation, process, own_user(), &OWN, Vec::new()).await;
            assert!(answer.outcome == Outcome::Gone && answer.failure.is_none(), "{answer:?}");
        }
        let _all = helpers.all.acquire_many(MAX_HELPERS as u32).await.expect("they have ended");
    });
}
