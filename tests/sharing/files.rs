//! Programs whose memory fits neither on the GPU nor into their share of RAM. The rest of their
//! memory is stored in files. The stored memory is restored unchanged, or the program gets an
//! error.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use test_support::artifact;
use test_support::cgroup::Limited;
use test_support::disk::Disk;
use test_support::in_flight::InFlight;
use test_support::machine::*;

const SHARE: u64 = 64 * MIB;

/// The GPU has room for one of three programs of [`SHARE`] each. The RAM for swapped memory has
/// room for none.
fn tight() -> Setup {
    Setup { memory: 128 * MIB, anti_thrash: "on", swap_max: "16M", file_max: Some("1G"), ..Setup::default() }
}

fn mix(rounds: u32) -> String {
    format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds {rounds}")
}

/// Paths of the files that the library's thread with this name has open in a program.
fn descriptors_of(program: &Program, thread: &str) -> Vec<PathBuf> {
    let tasks = fs::read_dir(format!("/proc/{}/task", program.pid())).into_iter().flatten().flatten();
    let is_it = |task: &PathBuf| fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == thread);
    let mut its = tasks.map(|task| task.path()).filter(is_it);
    let all = its.next().and_then(|task| fs::read_dir(task.join("fd")).ok()).into_iter().flatten().flatten();
    all.map(|entry| entry.path()).collect()
}

/// Bytes that a program has in its file, or `None` without a file.
fn in_file(machine: &Machine, program: &Program) -> Option<u64> {
    let status = machine.status();
    let client = status["clients"].as_array()?.iter().find(|client| client["pid"] == program.pid())?;
    client["gpus"][0]["in-file"].as_u64()
}

/// The path of the descriptor through which a program has its file open.
fn path_of_file(program: &Program) -> Option<PathBuf> {
    let is_file = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.is_file());
    descriptors_of(program, "nvshare-file").into_iter().find(is_file)
}

/// The file's inode.
fn number_of(path: PathBuf) -> u64 {
    fs::metadata(path).expect("its figures").ino()
}

/// Waits until memory has been written to a program's file, and opens the file a second time.
#[track_caller]
fn file_of(machine: &Machine, program: &Program) -> File {
    wait_for("it to have memory in its file", || in_file(machine, program));
    let path = path_of_file(program).expect("its file");
    OpenOptions::new().read(true).write(true).open(path).expect("the file")
}

/// Starts a program that idles from its second round on, until it is told to end.
fn idle(machine: &Machine) -> Program {
    let idle = machine.program(&format!("{} --cpu-ms 600000", mix(2))).start();
    idle.wait_to_say("round 0 is over");
    idle
}

/// Starts an idle program, whose memory goes to its file, and another program, which needs the GPU.
/// Both run until they are told to end.
fn one_in_its_file(machine: &Machine) -> (Program, Program) {
    let idle = idle(machine);
    let other = machine.program(&format!("{} --cpu-ms 500", mix(100_000))).start();
    (idle, other)
}

#[test]
fn memory_in_swap_files_is_restored_unchanged() {
    let machine = Machine::with_scheduler(tight());
    let (mut idle, mut other) = one_in_its_file(&machine);
    drop(file_of(&machine, &idle));
    let mut third = machine.program(&mix(4)).start();
    third.finish();
    for program in [&mut idle, &mut other] {
        program.end();
    }
    assert!(idle.stderr().contains(" 0 bytes of memory are in the swap file"), "it has come back");
    assert_one_holder(&machine.moves());
    let directory = artifact("nvshare-scheduler").with_file_name("swap-files");
    assert_eq!(fs::read_dir(directory).expect("the directory").count(), 0);
    machine.wait_until_empty();
}

#[test]
fn a_file_that_cannot_be_sent_now_is_sent_later() {
    let machine = Machine::with_scheduler(tight());
    let in_flight = InFlight::more_than_limit_of(machine.scheduler_pid());
    let (mut idle, mut other) = one_in_its_file(&machine);
    let swapped = || machine.status()["clients"][0]["gpus"][0]["swapped"].as_u64();
    wait_for("memory in RAM", || swapped().filter(|bytes| *bytes > 0));
    assert_eq!(in_file(&machine, &idle), None);
    drop(in_flight);
    drop(file_of(&machine, &idle));
    idle.end();
    other.end();
    machine.wait_until_empty();
}

/// Copies from unregistered host memory would be so slow that the test would fail.
#[test]
fn memory_in_ram_moves_to_a_file_that_is_configured_later() {
    let machine = Machine::with_scheduler(Setup { file_max: None, swap_max: "160M", ..tight() });
    let (mut idle, mut other) = one_in_its_file(&machine);
    let swapped = || machine.status()["clients"][0]["gpus"][0]["swapped"].as_u64();
    wait_for("memory in RAM", || swapped().filter(|bytes| *bytes > 0));
    let config = machine.path("nvshare.toml");
    let text = fs::read_to_string(&config).expect("the configuration");
    let directory = artifact("nvshare-scheduler").with_file_name("swap-files");
    let files = format!("max = \"16M\"\nfile = {directory:?}\nfile-max = \"1G\"");
    fs::write(&config, text.replace("max = \"160M\"", &files)).expect("the configuration");
    kill(machine.scheduler_pid(), libc::SIGHUP);
    drop(file_of(&machine, &idle));
    idle.end();
    other.end();
    machine.wait_until_empty();
}

#[test]
fn memory_in_swap_files_is_restored_at_link_speed() {
    let simulator = vec![("CUDA_SIM_PAGEABLE_BANDWIDTH", "64K".into())];
    let machine = Machine::with_scheduler(Setup { simulator, ..tight() });
    let (mut idle, mut other) = one_in_its_file(&machine);
    drop(file_of(&machine, &idle));
    for program in [&mut idle, &mut other] {
        program.end();
    }
    machine.wait_until_empty();
}

#[test]
fn random_allocations_writes_and_frees_keep_their_contents() {
    let machine = Machine::with_scheduler(tight());
    let churn = |seed| machine.program(&format!("churn --mem {SHARE} --seconds 600 --seed {seed}")).start();
    let mut programs: Vec<Program> = (1..=3).map(churn).collect();
    let has_used_it = |program: &Program| program.stderr().contains("bytes of memory are in the swap file");
    wait_for("all programs to use their files", || programs.iter().all(has_used_it).then_some(()));
    programs.iter_mut().for_each(|program| drop(program.end()));
    machine.wait_until_empty();
}

#[test]
fn an_allocation_beyond_the_file_space_is_refused() {
    let machine = Machine::with_scheduler(Setup { file_max: Some("8M"), ..tight() });
    let mut first = machine.program(&format!("stranger --mem {SHARE} --seconds 600")).start();
    first.wait_to_say("holding");
    let mut second = machine.program(&mix(2)).start();
    assert!(!second.wait().success(), "there is no room for it");
    assert!(
        second.stdout().contains("OUT_OF_MEMORY") || second.stdout().contains("out of memory"),
        "{}",
        second.stdout()
    );
    machine.wait_for_log("file-max in [swap] allows");
    first.kill();
    machine.wait_until_empty();
}

#[test]
fn an_unusable_swap_directory_is_reported_and_only_ram_is_used() {
    let rules = "file = \"/etc/passwd/swap\"\n".to_owned();
    let machine = Machine::with_scheduler(Setup { file_max: None, rules, ..tight() });
    let mut programs: Vec<Program> =
        (0..2).map(|_| machine.program("mix --mem 50M --chunks 4 --reps 1 --rounds 3").start()).collect();
    for program in &mut programs {
        program.finish();
    }
    machine.wait_for_log("cannot reserve space for programs' memory in /etc/passwd/swap");
    machine.wait_until_empty();
}

#[test]
fn a_killed_program_leaves_no_swap_file() {
    let machine = Machine::with_scheduler(tight());
    let (mut idle, mut other) = one_in_its_file(&machine);
    let file = file_of(&machine, &idle);
    let (device, inode) = file.metadata().map(|found| (found.dev(), found.ino())).expect("its figures");
    drop(file);
    idle.kill();
    let has_it = |path: PathBuf| fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (device, inode));
    wait_for("the scheduler to close the file", || {
        let open = fs::read_dir(format!("/proc/{}/fd", machine.scheduler_pid())).expect("its descriptors");
        (!open.flatten().any(|entry| has_it(entry.path()))).then_some(())
    });
    other.end();
    machine.wait_until_empty();
}

/// A program may pass its file on to another process, and then disconnect. So the file's space
/// stays reserved until every process has closed the file.
#[test]
fn space_of_a_file_is_reserved_until_every_process_has_closed_it() {
    // Each program reserves 256 MiB, so three programs can have a file.
    let machine = Machine::with_scheduler(Setup { file_max: Some("768M"), ..tight() });
    let (mut idle, mut other) = one_in_its_file(&machine);
    let file = file_of(&machine, &idle);
    idle.kill();
    let mut third = self::idle(&machine);
    let mut refused = machine.program(&mix(2)).start();
    assert!(!refused.wait().success(), "there is no space for its file");
    assert!(refused.stdout().to_lowercase().replace('_', " ").contains("out of memory"), "{}", refused.stdout());
    drop(file);
    wait_for("the space to be free", || machine.program(&mix(2)).start().wait().success().then_some(()));
    other.end();
    third.end();
    machine.wait_until_empty();
}

/// Tells the program to end, and checks that the driver reports its memory as lost.
#[track_caller]
fn loses(program: &mut Program) {
    program.signal(libc::SIGUSR1);
    let is_right = program.wait().success();
    let said = program.stdout();
    assert!(!is_right && (said.contains("214") || said.contains("ECC")), "it has lost memory: {said}");
    program.wait_to_say("lost memory that was in the swap file");
}

/// Spoils a program's file. The program must get an error, never results computed from the wrong
/// contents.
fn loses_its_memory(spoil: impl FnOnce(&File)) {
    let machine = Machine::with_scheduler(tight());
    let (mut idle, mut other) = one_in_its_file(&machine);
    spoil(&file_of(&machine, &idle));
    loses(&mut idle);
    other.end();
    machine.wait_until_empty();
}

#[test]
fn a_truncated_swap_file_is_reported_to_the_program() {
    loses_its_memory(|file| file.set_len(0).expect("it is truncated"));
}

#[test]
fn a_modified_swap_file_is_reported_to_the_program() {
    loses_its_memory(|file| {
        let mut block = vec![0; 4096];
        for at in (0..SHARE).step_by(1 << 20) {
            let len = file.read_at(&mut block, at).expect("it is read");
            if len > 0 {
                block[0] ^= 1;
                file.write_all_at(&block[..len], at).expect("it is written");
            }
        }
    });
}

/// Without stored connections, the new scheduler knows no file.
#[test]
fn memory_in_a_swap_file_survives_a_scheduler_restart() {
    let mut machine = Machine::with_scheduler(tight());
    let (mut idle, mut other) = one_in_its_file(&machine);
    drop(file_of(&machine, &idle));
    machine.kill_scheduler();
    machine.start_scheduler();
    idle.end();
    other.end();
    machine.wait_until_empty();
}

/// The number of swap files that the manager keeps for the next scheduler.
fn kept_files(machine: &Machine) -> usize {
    let kept = machine.manager.as_ref().expect("a manager").kept();
    kept.iter().filter(|name| name.starts_with("f")).count()
}

#[test]
fn programs_keep_their_swap_files_across_a_scheduler_restart() {
    let mut machine = Machine::with_manager(tight());
    let (mut idle, mut other) = one_in_its_file(&machine);
    drop(file_of(&machine, &idle));
    wait_for("both files to be stored", || (kept_files(&machine) == 2).then_some(()));
    let numbers = || [&idle, &other].map(|program| number_of(path_of_file(program).expect("its file")));
    let before = numbers();
    machine.kill_scheduler();
    machine.start_scheduler();
    // The other program, which is on the GPU, moves to its file under a scheduler that did not create it.
    let mut next = machine.program(&format!("{} --cpu-ms 600000", mix(2))).start();
    wait_for("the other to be in its file", || in_file(&machine, &other).filter(|bytes| *bytes > 0));
    next.wait_to_say("round 0 is over");
    assert_eq!(numbers(), before);
    [&mut idle, &mut other, &mut next].into_iter().for_each(|program| drop(program.end()));
    machine.wait_until_empty();
    wait_for("nothing to be stored", || machine.manager.as_ref()?.kept().is_empty().then_some(()));
}

/// Otherwise each restart would give the tenant the space once more.
#[test]
fn space_of_a_file_stays_reserved_across_a_scheduler_restart() {
    let mut machine = Machine::with_manager(Setup { file_max: Some("768M"), ..tight() });
    let (mut idle, mut other) = one_in_its_file(&machine);
    let file = file_of(&machine, &idle);
    // On a busy machine, the scheduler may have to send the descriptors to systemd again.
    wait_for("both files to be stored", || (kept_files(&machine) == 2).then_some(()));
    idle.kill();
    for _ in 0..2 {
        machine.kill_scheduler();
        machine.start_scheduler();
    }
    let mut third = self::idle(&machine);
    let mut refused = machine.program(&mix(2)).start();
    assert!(!refused.wait().success(), "there is no space for its file");
    drop(file);
    wait_for("the space to be free", || machine.program(&mix(2)).start().wait().success().then_some(()));
    other.end();
    third.end();
    machine.wait_until_empty();
    wait_for("nothing to be stored", || machine.manager.as_ref()?.kept().is_empty().then_some(()));
}

/// [`tight`] with the swap files on a separate disk.
fn tight_on(disk: &Disk) -> Setup {
    let rules = format!("file = {:?}\nfile-max = \"1G\"\n", disk.path("swap"));
    Setup { file_max: None, rules, ..tight() }
}

#[test]
fn a_failing_disk_is_reported_to_the_program() {
    let Some(disk) = Disk::new("failing-disk", 512 * MIB) else { return };
    let machine = Machine::with_scheduler(tight_on(&disk));
    let (mut idle, mut other) = one_in_its_file(&machine);
    drop(file_of(&machine, &idle));
    disk.lose().expect("a smaller image");
    loses(&mut idle);
    // The other program's memory on the disk may be lost too. The program must never read wrong
    // contents.
    if other.poll().is_none() {
        other.signal(libc::SIGUSR1);
    }
    let is_right = other.wait().success();
    let said = other.stdout();
    assert!(is_right || said.contains("214") || said.contains("ECC"), "{said}");
    machine.wait_until_empty();
}

#[test]
fn an_allocation_beyond_a_full_disk_is_refused() {
    let Some(disk) = Disk::new("full-disk", 1024 * MIB) else { return };
    let machine = Machine::with_scheduler(tight_on(&disk));
    let mut first = machine.program(&format!("stranger --mem {SHARE} --seconds 600")).start();
    first.wait_to_say("holding");
    disk.fill();
    let mut second = machine.program(&mix(2)).start();
    assert!(!second.wait().success(), "there is no room for it");
    let said = second.stdout();
    assert!(said.contains("OUT_OF_MEMORY") || said.contains("out of memory"), "{said}");
    machine.wait_for_log("the disk is full");
    assert!(first.poll().is_none(), "it has what it was promised");
    first.kill();
    machine.wait_until_empty();
}

/// Copies are written to files before other allocations in their control group fail for lack of
/// memory, although the host has plenty.
#[test]
fn copies_are_written_to_files_when_their_cgroup_needs_memory() {
    const EACH: u64 = 160 * MIB;
    const LIMIT: u64 = 800 * MIB;
    const STEP: u64 = 16 * MIB;
    let Some(group) = Limited::new(&format!("nvshare-hog-{}", std::process::id()), LIMIT) else { return };
    // A turn lasts longer than moving the memory of one program.
    let time_quantum = Duration::from_secs(1);
    let setup = Setup { swap_max: "2G", file_max: Some("2G"), time_quantum, ..Setup::default() };
    let machine = Machine::with_scheduler(setup);
    let mix = |rounds: u32, pause: u32| {
        let words = format!("mix --mem {EACH} --chunks 4 --reps 3 --rounds {rounds} --cpu-ms {pause}");
        machine.program_in(&group.procs(), &words).start()
    };
    let mut idle = [(); 2].map(|()| {
        let program = mix(2, 600_000);
        program.wait_to_say("round 0 is over");
        program
    });
    let mut runs = mix(100_000, 20);
    let swapped = || machine.status()["gpus"][0]["swapped"].as_u64().unwrap_or(0);
    wait_for("most of two programs to be off the GPU", || (swapped() >= EACH + EACH / 2).then_some(()));
    assert_eq!(idle.iter().filter_map(|program| in_file(&machine, program)).sum::<u64>(), 0, "there is room for them");
    // The hog, a process without nvshare in the same group, allocates more than the group's limit
    // leaves beside the copies. After the copies have moved to files, the hog's memory fits, even
    // beside a full simulated GPU, whose memory is charged to the group too.
    let steps = (LIMIT - group.used() + EACH / 2) / STEP;
    let orders = machine.path("orders");
    assert!(Command::new("mkfifo").arg(&orders).status().is_ok_and(|status| status.success()));
    let script = format!(
        "echo $$ > {}; (while read step; do head -c {STEP} /dev/zero; echo \"did $step.\" >&2; done < {}) | tail -c {} >/dev/null",
        group.procs().display(),
        orders.display(),
        steps * STEP
    );
    let mut hog = machine.command(Path::new("/bin/sh"), &["-c", &script]).without_nvshare().start();
    let mut orders = OpenOptions::new().write(true).open(orders).expect("the pipe");
    let has_room = || (group.used() + 2 * STEP <= LIMIT).then_some(());
    for step in 0..steps {
        wait_for("room for more", has_room);
        writeln!(orders, "{step}").expect("the pipe");
        hog.wait_to_say(&format!("did {step}."));
        assert_eq!(group.kills(), 0, "copies could have left: {:?}", group.used());
    }
    assert!(idle.iter().any(|program| in_file(&machine, program).is_some()), "some are in files");
    // The hog must end first: the simulated GPU's memory is charged to the programs, and doesn't
    // fit beside the hog's memory.
    drop(orders);
    assert!(hog.wait().success());
    runs.end();
    idle.iter_mut().for_each(|program| drop(program.end()));
}

/// Limits the size of files that a program writes, which simulates a disk error without a disk.
fn limit_files(program: &Program, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid during the call, and the null pointer asks for no old limit.
    let done =
        unsafe { libc::prlimit(program.pid() as i32, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn memory_that_cannot_be_written_to_a_file_stays_in_ram() {
    let machine = Machine::with_scheduler(tight());
    let mut idle = idle(&machine);
    limit_files(&idle, SHARE / 2);
    machine.program(&mix(4)).start().finish();
    idle.end();
    machine.wait_until_empty();
}

#[test]
fn unchanged_memory_is_not_written_to_its_file_again() {
    let machine = Machine::with_scheduler(tight());
    let mut reads =
        machine.program(&format!("weights --mem {SHARE} --reserve 4M --state 4M --rounds 4 --pause-ms 500")).start();
    let mut other = machine.program(&format!("{} --cpu-ms 150", mix(100_000))).start();
    reads.finish();
    other.end();
    machine.wait_until_empty();
    let said = reads.stderr();
    let (before, said) = said.split_once("the weights stay").expect("rounds");
    let (meanwhile, _) = said.split_once("the weights change").expect("a change");
    // The weights are evicted repeatedly, but written to the file only once.
    let written = bytes_written(meanwhile).saturating_sub(bytes_written(before));
    assert!(written <= SHARE, "{written} bytes were written");
    assert!(meanwhile.matches(" bytes left in ").count() > 1, "its memory left once at most");
}

/// The latest count of written bytes in a program's output.
fn bytes_written(said: &str) -> u64 {
    let mut numbers = said
        .lines()
        .filter_map(|line| line.split_once(" bytes were written to the file")?.0.rsplit(' ').next()?.parse().ok());
    numbers.next_back().unwrap_or(0)
}
