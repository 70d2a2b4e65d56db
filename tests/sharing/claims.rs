//! Kubernetes ResourceClaims: a program gets the memory limit of its claim. The scheduler
//! identifies the claim by the socket through which the program connects.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;

use nvshare::bus::{Claim, SchedulerProxy};
use test_support::machine::*;
use zbus::connection::Builder;
use zbus::{OwnedVariant, Variant};

/// Allocates in steps of the GPU's granularity until memory is refused, and reports the allocated
/// bytes.
const ASK: &str = "oversub --mem 100M --chunk 2M --rounds 0";

const HALF: &str = "01234567-89ab-cdef-0123-456789abcdef";
const WHOLE: &str = "11234567-89ab-cdef-0123-456789abcdef";

/// Sets the node's claims as the device plugin does: each claim has a UID and a memory limit.
fn set(machine: &Machine, claims: &[(&str, &str)]) {
    let claim = |(uid, most): &(&str, &str)| Claim {
        uid: (*uid).into(),
        namespace: "team-a".into(),
        name: format!("claim-{most}").to_lowercase(),
        rule: HashMap::from([(
            "memory-max".to_owned(),
            OwnedVariant::try_from(Variant::from(*most)).expect("a value"),
        )]),
    };
    let claims: Vec<Claim> = claims.iter().map(claim).collect();
    let stream = UnixStream::connect(machine.path("control/control.sock")).expect("it listens");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let refused = runtime.block_on(async {
        let connection = Builder::unix_stream(stream).p2p().build().await?;
        SchedulerProxy::new(&connection).await?.set_claims(claims).await
    });
    assert_eq!(refused.expect("it answers"), HashMap::new());
}

fn program<'a>(machine: &'a Machine, uid: &str, words: &str) -> Launch<'a> {
    let socket = machine.path("claims").join(uid).join("scheduler.sock");
    machine.program(words).env("NVSHARE_SOCKET", socket.to_str().expect("a path"))
}

fn start(machine: &mut Machine) {
    let directory = machine.path("claims");
    machine.start_scheduler_with(|command| {
        command.arg("--claims").arg(directory);
    });
}

/// The program's context takes 4 MiB, which count towards the limit.
#[test]
fn programs_of_a_claim_see_and_share_its_allocation() {
    let mut machine = Machine::new(Setup::default());
    start(&mut machine);
    set(&machine, &[(HALF, "44M"), (WHOLE, "infinity")]);
    let reach = |launch: Launch<'_>| launch.start().finish().number("allocated") / MIB;
    assert_eq!(reach(program(&machine, HALF, ASK)), 40);
    let report = program(&machine, HALF, "account --mem 16M").start().finish();
    assert_eq!(report.number("total") / MIB, 44);
    let mut holding = program(&machine, HALF, "stranger --mem 16M --seconds 600").start();
    holding.wait_to_say("holding");
    let mut other = program(&machine, HALF, "stranger --mem 2M --seconds 600").start();
    other.wait_to_say("holding");
    let status = machine.ctl(&["status"]);
    let together =
        format!("{} and {} together may use 44 MiB by rule \"team-a/claim-44m\"", holding.pid(), other.pid());
    assert!(status.contains(&together), "{status}");
    other.kill();
    wait_for("what another one leaves", || (reach(program(&machine, HALF, ASK)) == 20).then_some(()));
    assert!(reach(program(&machine, WHOLE, ASK)) > 40);
    let client = &machine.status()["clients"][0];
    assert_eq!((&client["rule"], &client["rule-origin"]), (&"team-a/claim-44m".into(), &"the ResourceClaim".into()));
    // A restarted scheduler serves the socket before it receives the claim.
    machine.kill_scheduler();
    start(&mut machine);
    wait_for("it to be back", || (machine.status()["clients"].as_array()?.len() == 1).then_some(()));
    set(&machine, &[(HALF, "44M")]);
    wait_for("its rule", || (machine.status()["clients"][0]["rule"] == "team-a/claim-44m").then_some(()));
    assert!(!machine.path("claims").join(WHOLE).exists());
    holding.kill();
}
