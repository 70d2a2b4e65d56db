//! Many programs share the simulated GPU at the same time.

use test_support::machine::*;

const CLIENTS: usize = 64;

#[test]
fn many_concurrent_programs_all_finish() {
    let setup = Setup { memory: 160 * MIB, context: MIB, anti_thrash: "on", ..Setup::default() };
    // The programs together need almost three times the memory that their contexts leave.
    let each = 4 * MIB;
    assert!(CLIENTS as u64 * each > 2 * setup.capacity(CLIENTS as u64));
    let machine = Machine::with_scheduler(setup);
    let words = format!("mix --mem {each} --chunks 2 --reps 1 --rounds 3");
    let mut programs: Vec<Program> = (0..CLIENTS).map(|_| machine.program(&words).start()).collect();
    for program in &mut programs {
        program.finish();
    }
    let moves = machine.moves();
    for program in &programs {
        assert!(grants(&moves, program.pid()) > 0, "{} was never given the lock", program.pid());
    }
    assert_one_holder(&moves);
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}
