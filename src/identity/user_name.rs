//! Names of users.

/// Returns a user's name on this host. Reads only /etc/passwd, because other name services may be
/// slow, and a static program cannot use them.
pub fn user_name(uid: u32) -> Option<String> {
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

/// Describes a user in messages: `user bob`, or the number if the name is unknown.
pub fn user_in_words(uid: u32) -> String {
    format!("user {}", user_name(uid).unwrap_or_else(|| uid.to_string()))
}
