//! Files that CRIU 4.1.1 has written (`process.img`, `thread.img`: a Python program of user 1000 with
//! several threads, stopped, on x86-64), and files that claim more.

use super::*;
use proptest::prelude::*;

const PROCESS: &[u8] = include_bytes!("process.img");
const THREAD: &[u8] = include_bytes!("thread.img");
const CREDENTIALS: &[u32] = &[field::THREAD, field::THREAD_CREDENTIALS];

/// The rights of the program in the files.
fn recorded() -> Rights {
    let first = vec![u64::MAX; 6];
    let others = [96364, 20000, 8_388_608, u64::MAX, u64::MAX, 96364, 819_200, 0, 0, u64::MAX];
    let owner = Credentials { uid: 1000, gid: 1000, groups: vec![60, 100, 1000] };
    Rights { owner, limits: [first.as_slice(), &others].concat(), login: None }
}

fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// A field with its key.
fn encode(field: u32, value: Result<u64, &[u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    match value {
        Ok(number) => {
            put_number(&mut out, u64::from(field) << 3);
            put_number(&mut out, number);
        }
        Err(bytes) => {
            put_number(&mut out, u64::from(field) << 3 | 2);
            put_number(&mut out, bytes.len() as u64);
            out.extend(bytes);
        }
    }
    out
}

/// The fields of a message in their order, with their keys.
fn fields(mut message: &[u8]) -> Vec<(u32, &[u8])> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let start = message;
        let key = take_number(&mut message).expect("a key");
        let number = |message: &mut &[u8]| take_number(message).expect("a number");
        let length = match key & 7 {
            0 => {
                number(&mut message);
                0
            }
            1 => 8,
            2 => number(&mut message),
            _ => 4,
        };
        take(&mut message, length as usize).expect("bytes");
        found.push(((key >> 3) as u32, &start[..start.len() - message.len()]));
    }
    found
}

/// The contents of a field that is a message.
fn contents(mut field: &[u8]) -> &[u8] {
    for _ in 0..2 {
        take_number(&mut field).expect("a key and a length");
    }
    field
}

/// Returns the field at the end of the path, with its key.
fn find<'a>(message: &'a [u8], path: &[u32]) -> &'a [u8] {
    let found = fields(message).into_iter().find(|(number, _)| *number == path[0]).expect("a field").1;
    if path.len() == 1 { found } else { find(contents(found), &path[1..]) }
}

/// Removes the first or all fields with a number from the message at the path, and appends others.
fn change(message: &[u8], path: &[u32], removed: u32, only_first: bool, added: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut is_removed = false;
    for (number, raw) in fields(message) {
        if path.first() == Some(&number) {
            out.extend(encode(number, Err(&change(contents(raw), &path[1..], removed, only_first, added))));
        } else if path.is_empty() && number == removed && !(only_first && is_removed) {
            is_removed = true;
        } else {
            out.extend(raw);
        }
    }
    if path.is_empty() {
        out.extend(added);
    }
    out
}

fn file_of(message: &[u8]) -> Vec<u8> {
    let head = [MAGIC[0], MAGIC[1], message.len() as u32].map(u32::to_le_bytes).concat();
    [head, message.to_vec()].concat()
}

fn forge(file: &[u8], path: &[u32], removed: u32, added: &[u8]) -> Vec<u8> {
    file_of(&change(&file[12..], path, removed, false, added))
}

/// A file of a thread that claims the rights of its program.
pub fn file_for(rights: &Rights) -> Vec<u8> {
    let owner = &rights.owner;
    let ids = |fields: [u32; 4], id: u32| fields.map(|field| encode(field, Ok(id.into()))).concat();
    let groups: Vec<u8> =
        owner.groups.iter().flat_map(|group| encode(field::SUPPLEMENTARY_GROUPS, Ok((*group).into()))).collect();
    let none: Vec<u8> =
        field::CAPABILITIES.iter().flat_map(|set| encode(*set, Ok(0)).repeat(CAPABILITY_WORDS)).collect();
    let securebits = encode(field::SECUREBITS, Ok(0));
    let credentials = [ids(field::USERS, owner.uid), ids(field::GROUPS, owner.gid), none, groups, securebits].concat();
    file_of(&encode(field::THREAD, Err(&encode(field::THREAD_CREDENTIALS, Err(&credentials)))))
}

/// A file of a thread that claims capabilities.
pub fn file_with_capabilities(rights: &Rights) -> Vec<u8> {
    let claim = encode(field::CAPABILITIES[1], Ok(1 << 8));
    forge(&file_for(rights), CREDENTIALS, 0, &claim)
}

fn claim(file: &[u8]) -> String {
    check(file, &recorded()).expect_err("the file claims more")
}

#[test]
fn files_of_criu_are_accepted_with_the_recorded_rights() {
    check(PROCESS, &recorded()).expect("a process");
    check(THREAD, &recorded()).expect("a thread");
    // The same file, encoded by the test.
    check(&forge(PROCESS, CREDENTIALS, 0, &[]), &recorded()).expect("a process");
    assert_eq!(forge(PROCESS, CREDENTIALS, 0, &[]), PROCESS);
}

#[test]
fn a_claim_of_each_right_is_refused() {
    let number = |field: u32, value: u64| (field, encode(field, Ok(value)));
    let text = |field: u32| (field, encode(field, Err(b"unconfined")));
    let task = &[field::TASK][..];
    type Case = (&'static [u32], (u32, Vec<u8>), &'static str);
    let mut cases: Vec<Case> = vec![
        (CREDENTIALS, number(field::SECUREBITS, 1 << 4), "securebits"),
        (CREDENTIALS, number(field::SUPPLEMENTARY_GROUPS, 27), "other groups"),
        (CREDENTIALS, (field::SUPPLEMENTARY_GROUPS, Vec::new()), "other groups"),
        (CREDENTIALS, number(field::NO_NEW_PRIVILEGES, 2), "unknown flag"),
        (&[field::THREAD], number(field::THREAD_SECCOMP[0], 2), "filter of system calls"),
        (task, number(field::TASK_SECCOMP[0], 2), "filter of system calls"),
        (task, number(field::TASK_LOGIN, 1001), "another login"),
        // CRIU would create a process that never gives up its capabilities.
        (&[], (field::THREAD, Vec::new()), "lacks its thread"),
        (&[field::THREAD], (field::THREAD_CREDENTIALS, Vec::new()), "lacks its users"),
        (task, (field::TASK_LIMITS, Vec::new()), "lacks its limits"),
    ];
    for set in field::CAPABILITIES {
        cases.push((CREDENTIALS, (set, [encode(set, Ok(0)), encode(set, Ok(1 << 8))].concat()), "capabilities"));
        for words in [0, 1, 3] {
            cases.push((CREDENTIALS, (set, encode(set, Ok(0)).repeat(words)), "capabilities"));
        }
        cases.push((CREDENTIALS, (set, encode(set, Err(&[0, 1]))), "malformed"));
    }
    for id in field::USERS.into_iter().chain(field::GROUPS) {
        cases.push((CREDENTIALS, number(id, 0), "another user or group"));
        cases.push((CREDENTIALS, number(id, 1000 + (1 << 32)), "another user or group"));
        cases.push((CREDENTIALS, (id, Vec::new()), "another user or group"));
    }
    for label in field::LABELS {
        cases.push((CREDENTIALS, text(label), "label of a security module"));
    }
    // Runs, has ended, has ended and was not waited for, and unknown ones.
    for state in [1, 2, 6, 0, 0x80, u64::MAX] {
        cases.push((task, number(field::TASK_STATE, state), "not stopped"));
    }
    for (path, (removed, added), expected) in cases {
        let why = claim(&forge(PROCESS, path, removed, &added));
        assert!(why.contains(expected), "{path:?} {removed} {added:?}: {why}, not {expected}");
    }
    check(&forge(PROCESS, task, field::TASK_LOGIN, &encode(field::TASK_LOGIN, Ok(NO_LOGIN))), &recorded())
        .expect("no login");
}

#[test]
fn higher_limits_are_refused() {
    for at in 0..recorded().limits.len() {
        let mut rights = recorded();
        if rights.limits[at] == 0 {
            continue;
        }
        rights.limits[at] -= 1;
        assert_eq!(check(PROCESS, &rights).expect_err("a higher limit"), "claims higher limits", "limit {at}");
    }
    let limits = &[field::TASK, field::TASK_LIMITS];
    let limit = |soft: u64, hard: u64| {
        let inner = [encode(field::LIMIT_SOFT, Ok(soft)), encode(field::LIMIT_HARD, Ok(hard))].concat();
        encode(field::LIMIT, Err(&inner))
    };
    let first = |added: &[u8]| file_of(&change(&PROCESS[12..], limits, field::LIMIT, true, added));
    // The last limit is now the first one.
    check(&first(&limit(1, 1)), &recorded()).expect_err("limits in another order");
    assert_eq!(claim(&first(&[])), "claims other limits");
    assert_eq!(claim(&forge(PROCESS, limits, 0, &limit(0, 0))), "claims other limits");
    let lower = forge(PROCESS, limits, field::LIMIT, &limit(0, 0).repeat(16));
    check(&lower, &recorded()).expect("lower limits");
    let soft = forge(PROCESS, limits, field::LIMIT, &[limit(0, 0).repeat(15), limit(2, 1)].concat());
    assert_eq!(claim(&soft), "claims higher limits");
}

/// Readers differ in what they make of such files.
#[test]
fn ambiguous_files_are_refused() {
    let message = &PROCESS[12..];
    for field in [field::TASK, field::THREAD] {
        assert_eq!(claim(&forge(PROCESS, &[], 0, find(message, &[field]))), "has a field twice");
    }
    for path in [&[field::TASK, field::TASK_LIMITS], &[field::TASK, field::TASK_STATE], CREDENTIALS] {
        assert_eq!(claim(&forge(PROCESS, &path[..1], 0, find(message, path))), "has a field twice", "{path:?}");
    }
    for id in [field::USERS[1], field::GROUPS[3]] {
        assert_eq!(claim(&forge(PROCESS, CREDENTIALS, 0, &encode(id, Ok(1000)))), "has a field twice");
    }
    // The same number, in more bytes than necessary.
    for long in
        [&[0x80, 0][..], &[0xe8, 0x87, 0x00], &[0xff; 11], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]]
    {
        assert_eq!(take_number(&mut &*long), None, "{long:?}");
    }
    for number in [0, 1, 127, 128, 1000, u64::from(u32::MAX), u64::MAX] {
        let mut encoded = Vec::new();
        put_number(&mut encoded, number);
        assert_eq!(take_number(&mut &*encoded), Some(number));
    }
    // A group, a field with the number 0, and something after the message.
    for unknown in [&[0x1b, 0x1c][..], &[0x00, 0x00], &[0x0f]] {
        assert_eq!(claim(&file_of(&[&PROCESS[12..], unknown].concat())), "is malformed");
    }
    assert_eq!(claim(&[PROCESS, &[0]].concat()), "is malformed");
    // The head of the first format of images, without the first number.
    assert_eq!(claim(&PROCESS[4..]), "is malformed");
}

#[test]
fn a_file_that_ends_early_is_refused() {
    for file in [PROCESS, THREAD] {
        for length in 0..file.len() {
            check(&file[..length], &recorded()).expect_err("it ends early");
            if length > 12 {
                check(&file_of(&file[12..length]), &recorded()).expect_err("the message ends early");
            }
        }
    }
}

/// Only flags and the bounding set, which restrict, are no claims.
#[test]
fn each_flipped_bit_in_the_credentials_is_refused() {
    let inner = contents(find(&THREAD[12..], CREDENTIALS));
    let start = THREAD.windows(inner.len()).position(|window| window == inner).expect("in the file");
    for bit in 0..inner.len() * 8 {
        let mut changed = THREAD.to_vec();
        changed[start + bit / 8] ^= 1 << (bit % 8);
        if check(&changed, &recorded()).is_ok() {
            let claims = |message| {
                let is_claim = |field: &u32| {
                    let ids = field::USERS.iter().chain(&field::GROUPS).chain(&field::CAPABILITIES);
                    let others = [field::SECUREBITS, field::SUPPLEMENTARY_GROUPS];
                    ids.chain(&others).chain(&field::LABELS).any(|claim| claim == field)
                };
                fields(message).into_iter().filter(|(field, _)| is_claim(field)).collect::<Vec<_>>()
            };
            assert_eq!(claims(&changed[start..start + inner.len()]), claims(inner), "bit {bit}");
        }
    }
}

#[test]
fn names_tell_which_files_claim_rights() {
    assert_eq!(thread_of("core-7.img"), Ok(Some(7)));
    for other in ["pages-1.img", "mm-7.img", "seccomp.img", "inventory.img"] {
        assert_eq!(thread_of(other), Ok(None), "{other}");
    }
    for unknown in
        ["core-.img", "core-07.img", "core-+7.img", "core-0.img", "core--1.img", "core-7", "core-99999999999.img"]
    {
        assert!(thread_of(unknown).is_err_and(|why| why.contains("unknown")), "{unknown}");
    }
    for old in ["creds-7.img", "rlimit-7.img", "userns-10.img"] {
        assert!(thread_of(old).is_err_and(|why| why.contains("claims rights")), "{old}");
    }
}

proptest! {
    #[test]
    fn damaged_files_cause_no_panic(
        changes in prop::collection::vec((0..PROCESS.len(), any::<u8>()), 1..8),
        cut in 0..PROCESS.len(),
        inserted in prop::collection::vec(any::<u8>(), 0..16),
    ) {
        for file in [PROCESS, THREAD] {
            let mut changed = file.to_vec();
            for (at, byte) in &changes {
                changed[at % file.len()] = *byte;
            }
            let _ = check(&changed, &recorded());
            changed.splice(cut % file.len()..cut % file.len(), inserted.iter().copied());
            let _ = check(&changed, &recorded());
            let _ = check(&file_of(&changed[12..]), &recorded());
        }
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        prop_assert!(check(&bytes, &recorded()).is_err());
        prop_assert!(check(&file_of(&bytes), &recorded()).is_err());
    }
}
