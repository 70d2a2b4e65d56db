//! The rights that an image claims for its tasks, in CRIU's files `core-ID.img`, one for each thread.
//!
//! CRIU gives a restored task whatever the task's file claims, and has capabilities itself. So CRIU reads no
//! image in which a task claims more than was recorded. The reader is strict where CRIU is not: a field that
//! exists twice, or a number that is encoded differently than CRIU encodes it, is refused, so that no two
//! readers can understand a file differently. A decoder that merges such fields was rejected for that reason.
//!
//! File format: two numbers of 32 bits that identify the file, the length of the message, and the message,
//! in the encoding of Protocol Buffers.

use crate::rights::{Credentials, Rights};
use std::collections::BTreeMap;

/// Maximum length of a file in bytes. CRIU 4.1.1 writes about 2 KiB.
pub const MAX_CORE: u64 = 1 << 20;
/// The numbers that begin a file of this kind.
const MAGIC: [u32; 2] = [0x5456_4319, 0x5505_3847];
/// CRIU's number for a process that is stopped. CRIU creates no process in another state that does not
/// run, or end, before it is checked.
const STOPPED: u64 = 3;
/// Each set of capabilities is in two numbers of 32 bits.
const CAPABILITY_WORDS: usize = 2;
const NO_LOGIN: u64 = u32::MAX as u64;

/// Numbers of fields. `NAME_TASK`: in the part for a process. `NAME_THREAD`: in the part for a thread.
mod field {
    pub const TASK: u32 = 3;
    pub const THREAD: u32 = 5;

    pub const TASK_STATE: u32 = 1;
    pub const TASK_LIMITS: u32 = 8;
    pub const TASK_SECCOMP: [u32; 2] = [11, 12];
    pub const TASK_LOGIN: u32 = 13;

    pub const LIMIT: u32 = 1;
    pub const LIMIT_SOFT: u32 = 1;
    pub const LIMIT_HARD: u32 = 2;

    pub const THREAD_CREDENTIALS: u32 = 10;
    pub const THREAD_SECCOMP: [u32; 2] = [11, 12];

    /// The real, effective, saved and file system user.
    pub const USERS: [u32; 4] = [1, 3, 5, 7];
    pub const GROUPS: [u32; 4] = [2, 4, 6, 8];
    /// Inheritable, permitted, effective and ambient. The bounding set only restricts.
    pub const CAPABILITIES: [u32; 4] = [9, 10, 11, 19];
    pub const SECUREBITS: u32 = 13;
    pub const SUPPLEMENTARY_GROUPS: u32 = 14;
    /// Labels of security modules.
    pub const LABELS: [u32; 3] = [15, 16, 17];
    pub const NO_NEW_PRIVILEGES: u32 = 18;
}

/// Returns the ID of the thread that a file of an image describes. `None`: the file describes none.
///
/// # Errors
/// CRIU may take rights from the file that are not checked.
pub fn thread_of(name: &str) -> Result<Option<i32>, String> {
    // Older formats have rights in separate files, which CRIU reads if the usual ones lack them.
    if ["creds-", "rlimit-", "userns-"].iter().any(|start| name.starts_with(start)) {
        return Err(format!("{name} claims rights"));
    }
    let Some(id) = name.strip_prefix("core-") else { return Ok(None) };
    let id = id.strip_suffix(".img").and_then(|id| id.parse::<i32>().ok()).filter(|id| *id > 0);
    match id.filter(|id| name == format!("core-{id}.img")) {
        Some(id) => Ok(Some(id)),
        None => Err(format!("{name} is unknown")),
    }
}

/// Checks that a file claims no right that is not recorded.
///
/// # Errors
/// The claim; or the file cannot be read without doubt.
pub fn check(file: &[u8], rights: &Rights) -> Result<(), String> {
    let core = message_of(file).ok_or("is malformed")?;
    let thread = core.one_message(field::THREAD)?.ok_or("lacks its thread")?;
    // Threads other than the first one of a process have no such part. CRIU refuses a process without it.
    if let Some(task) = core.one_message(field::TASK)? {
        check_task(&task, rights)?;
    }
    if has_any(&thread, &field::THREAD_SECCOMP)? {
        return Err("claims a filter of system calls".into());
    }
    let credentials = thread.one_message(field::THREAD_CREDENTIALS)?.ok_or("lacks its users")?;
    check_credentials(&credentials, &rights.owner)
}

fn check_task(task: &Message<'_>, rights: &Rights) -> Result<(), String> {
    if task.one_number(field::TASK_STATE)? != Some(STOPPED) {
        return Err("claims a process that is not stopped".into());
    }
    if has_any(task, &field::TASK_SECCOMP)? {
        return Err("claims a filter of system calls".into());
    }
    let login = task.one_number(field::TASK_LOGIN)?.filter(|login| *login != NO_LOGIN);
    if login.is_some() && login != rights.login.map(u64::from) {
        return Err("claims another login".into());
    }
    let limits = task.one_message(field::TASK_LIMITS)?.ok_or("lacks its limits")?.messages(field::LIMIT)?;
    if limits.len() != rights.limits.len() {
        return Err("claims other limits".into());
    }
    for (limit, recorded) in limits.iter().zip(&rights.limits) {
        let soft = limit.one_number(field::LIMIT_SOFT)?.ok_or("lacks a limit")?;
        let hard = limit.one_number(field::LIMIT_HARD)?.ok_or("lacks a limit")?;
        if hard > *recorded || soft > hard {
            return Err("claims higher limits".into());
        }
    }
    Ok(())
}

fn check_credentials(credentials: &Message<'_>, owner: &Credentials) -> Result<(), String> {
    for set in field::CAPABILITIES {
        let words = credentials.numbers(set)?;
        if words.len() != CAPABILITY_WORDS || words.iter().any(|word| *word != 0) {
            return Err("claims capabilities".into());
        }
    }
    for (fields, id) in [(field::USERS, owner.uid), (field::GROUPS, owner.gid)] {
        for field in fields {
            if credentials.one_number(field)? != Some(id.into()) {
                return Err("claims another user or group".into());
            }
        }
    }
    let groups = credentials.numbers(field::SUPPLEMENTARY_GROUPS)?;
    if !groups.iter().copied().eq(owner.groups.iter().map(|group| u64::from(*group))) {
        return Err("claims other groups".into());
    }
    if credentials.one_number(field::SECUREBITS)? != Some(0) {
        return Err("claims securebits".into());
    }
    // CRIU has this flag, which no task can clear.
    if credentials.one_number(field::NO_NEW_PRIVILEGES)?.is_some_and(|flag| flag > 1) {
        return Err("claims an unknown flag".into());
    }
    if field::LABELS.iter().any(|label| credentials.has(*label)) {
        return Err("claims a label of a security module".into());
    }
    Ok(())
}

/// Returns true if one of these fields has a value other than zero.
fn has_any(message: &Message<'_>, fields: &[u32]) -> Result<bool, String> {
    for field in fields {
        if message.one_number(*field)?.is_some_and(|value| value != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the message of a file.
fn message_of(file: &[u8]) -> Option<Message<'_>> {
    let (head, message) = file.split_at_checked(12)?;
    let mut numbers = head.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
    let is_core = numbers.next() == Some(MAGIC[0]) && numbers.next() == Some(MAGIC[1]);
    // CRIU reads one message, and nothing after it.
    (is_core && numbers.next() == u32::try_from(message.len()).ok()).then(|| Message::parse(message)).flatten()
}

#[derive(Debug, Clone, Copy)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A number of fixed length.
    Fixed,
}

/// The fields of a message, by their numbers.
#[derive(Debug)]
struct Message<'a>(BTreeMap<u32, Vec<Value<'a>>>);

impl<'a> Message<'a> {
    fn parse(mut left: &'a [u8]) -> Option<Self> {
        let mut fields: BTreeMap<u32, Vec<Value<'a>>> = BTreeMap::new();
        while !left.is_empty() {
            let key = u32::try_from(take_number(&mut left)?).ok()?;
            let value = match key & 7 {
                0 => Value::Number(take_number(&mut left)?),
                1 => take(&mut left, 8).map(|_| Value::Fixed)?,
                2 => {
                    let length = usize::try_from(take_number(&mut left)?).ok()?;
                    Value::Bytes(take(&mut left, length)?)
                }
                5 => take(&mut left, 4).map(|_| Value::Fixed)?,
                _ => return None,
            };
            let number = (key >> 3 != 0).then_some(key >> 3)?;
            fields.entry(number).or_default().push(value);
        }
        Some(Self(fields))
    }

    fn has(&self, field: u32) -> bool {
        self.0.contains_key(&field)
    }

    fn values(&self, field: u32) -> &[Value<'a>] {
        self.0.get(&field).map_or(&[], Vec::as_slice)
    }

    fn one(&self, field: u32) -> Result<Option<Value<'a>>, String> {
        match self.values(field) {
            [] => Ok(None),
            [value] => Ok(Some(*value)),
            _ => Err("has a field twice".into()),
        }
    }

    /// Returns the number in a field that exists once. `None`: the field does not exist.
    fn one_number(&self, field: u32) -> Result<Option<u64>, String> {
        match self.one(field)? {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(Some(number)),
            Some(_) => Err("is malformed".into()),
        }
    }

    fn one_message(&self, field: u32) -> Result<Option<Self>, String> {
        let message = self.one(field)?.map(|value| message(&value).ok_or("is malformed"));
        Ok(message.transpose()?)
    }

    fn messages(&self, field: u32) -> Result<Vec<Self>, String> {
        let messages: Option<Vec<Self>> = self.values(field).iter().map(message).collect();
        Ok(messages.ok_or("is malformed")?)
    }

    /// Returns the numbers of a repeated field. CRIU writes each of them separately.
    fn numbers(&self, field: u32) -> Result<Vec<u64>, String> {
        let number = |value: &Value<'_>| match value {
            Value::Number(number) => Some(*number),
            _ => None,
        };
        let numbers: Option<Vec<u64>> = self.values(field).iter().map(number).collect();
        Ok(numbers.ok_or("is malformed")?)
    }
}

fn message<'a>(value: &Value<'a>) -> Option<Message<'a>> {
    match value {
        Value::Bytes(bytes) => Message::parse(bytes),
        _ => None,
    }
}

fn take<'a>(left: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = left.split_at_checked(length)?;
    *left = rest;
    Some(taken)
}

/// Takes a number, which must be encoded in the shortest way.
fn take_number(left: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..70).step_by(7) {
        let byte = *take(left, 1)?.first()?;
        let bits = u64::from(byte & 0x7f);
        // The tenth byte has room for one bit.
        number |= bits << shift;
        if number >> shift != bits || (byte == 0 && shift > 0) {
            return None;
        }
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
pub mod tests;
