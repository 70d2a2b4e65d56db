//! Tenants: the unit of trust and of accounting. Programs of one tenant trust each other.
//!
//! The tenant of a process is its outermost container or pod, otherwise its user. Budgets, turns,
//! trust in programs' reports, shared memory and log limits all depend on the tenant alone. Two
//! users of one container are one tenant, because the container's root can become either user. One
//! user in two containers is two tenants.
//!
//! The name of a control group determines a tenant only if root created the control group. Below a
//! user's slice, and in every control group delegated to a user, that user may choose any name. All
//! processes in such control groups are therefore charged to the user. Processes with a user's
//! [subordinate ids](super::subordinate) are charged to that user everywhere, because the user
//! chooses the id. A process in another user namespace is charged to the user whose slice contains
//! the process, otherwise to the owner of a control group above the process, otherwise to the user
//! that logged in. The root of a container may likewise choose any name inside the container, so
//! only the outermost container counts. The scheduler's own container does not distinguish tenants
//! and does not count.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::Cgroup;

/// A unit of trust and of accounting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tenant {
    /// The host's root, outside all containers and in the scheduler's PID namespace.
    Root,
    /// A user, by uid. Uid 0 is the root of another namespace, or of a container: not necessarily
    /// the host's root.
    User(u32),
    /// A container, by its whole id.
    Container(String),
    /// A pod, by its UID.
    Pod(String),
}

/// Where a process runs, according to the kernel.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub cgroup: &'a Cgroup,
    /// Whether the process is in the scheduler's PID namespace.
    pub on_host: bool,
    /// Whether the process is in the scheduler's user namespace.
    pub own_ids: bool,
    /// The user that logged in (`loginuid`). Only privileged processes can change this user. `None`
    /// for processes of services.
    pub login: Option<u32>,
}

/// Lookups of owners on the host.
#[derive(Clone, Copy)]
pub struct Owners<'a> {
    /// Returns the owner of a control group that the scheduler can see.
    pub cgroup: &'a dyn Fn(&str) -> Option<u32>,
    /// Returns the [accountable user](super::accountable) of a user id.
    pub uid: &'a dyn Fn(u32) -> u32,
}

impl fmt::Debug for Owners<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owners")
    }
}

impl Tenant {
    /// Returns the tenant of a process, and the user that is accountable for the process. `own` is the
    /// scheduler's control group.
    pub fn of(uid: u32, place: Place<'_>, own: &Cgroup, owners: Owners<'_>) -> (Self, u32) {
        let Place { cgroup, on_host, own_ids, login } = place;
        // The owner of a control group may create control groups below it. A non-root owner of an
        // ancestor therefore counts as the creator of `path`.
        let maker = |path: &str| {
            let above = cgroup.within().filter(|other| other.len() < path.len());
            above.filter_map(owners.cgroup).find(|owner| *owner != 0).map(owners.uid)
        };
        // Inside another user namespace, the owner of the namespace chooses the ids of its processes.
        let chosen = || cgroup.user_slice().or_else(|| maker(&cgroup.path)).or(login);
        let by_id = (owners.uid)(uid);
        let user = if own_ids || by_id != uid { by_id } else { chosen().unwrap_or(uid) };
        let system = cgroup.of_system_below(own);
        let pod = system.pod.map(|(path, uid)| (path, Self::Pod(uid)));
        let container = || system.container.map(|(path, id)| (path, Self::Container(id.to_owned())));
        if let Some((path, tenant)) = pod.or_else(container) {
            return maker(path).map_or((tenant, user), |maker| (Self::User(maker), maker));
        }
        let is_root = user == 0 && uid == 0 && on_host;
        (if is_root { Self::Root } else { Self::User(user) }, user)
    }

    /// Returns the tenant's number in the state machine. The number stays the same after a
    /// reconnect, so a tenant cannot clear its record by disconnecting.
    pub fn number(&self) -> u64 {
        const NAMED: u64 = 1 << 63;
        match self {
            Self::Root => 1 << 32,
            Self::User(uid) => u64::from(*uid),
            Self::Container(_) | Self::Pod(_) => {
                let mut hasher = DefaultHasher::new();
                self.hash(&mut hasher);
                hasher.finish() | NAMED
            }
        }
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self::User(0)
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("root"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Container(id) => write!(f, "container {}", id.get(..12).unwrap_or(id)),
            Self::Pod(uid) => write!(f, "pod {uid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const OTHER: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";
    const POD: &str = "01234567-89ab-cdef-0123-456789abcdef";

    /// Ids from 100,000 belong to user 1000, as in /etc/subuid.
    fn accountable(uid: u32) -> u32 {
        if (100_000..165_536).contains(&uid) { 1000 } else { uid }
    }

    fn of(uid: u32, path: &str, on_host: bool, own_ids: bool) -> Tenant {
        let cgroup = Cgroup { path: path.into() };
        let place = Place { cgroup: &cgroup, on_host, own_ids, login: None };
        Tenant::of(uid, place, &Cgroup::default(), Owners { cgroup: &|_| None, uid: &|uid| uid }).0
    }

    fn host(uid: u32, path: &str) -> Tenant {
        of(uid, path, true, true)
    }

    #[test]
    fn a_tenant_is_the_outermost_root_owned_container_or_else_the_user() {
        let container = Tenant::Container(ID.into());
        let pod = Tenant::Pod(POD.into());
        for (path, expected) in [
            ("/".to_owned(), Tenant::User(7)),
            ("/system.slice/jupyter.service".to_owned(), Tenant::User(7)),
            ("/user.slice/user-1000.slice/session-2.scope".to_owned(), Tenant::User(7)),
            (format!("/system.slice/docker-{ID}.scope"), container.clone()),
            (format!("/docker/{ID}/docker/{OTHER}"), container.clone()),
            (format!("/docker/{ID}/kubepods/pod{POD}/{OTHER}"), container.clone()),
            (format!("/kubepods/besteffort/pod{POD}/{ID}"), pod.clone()),
            (format!("/kubepods.slice/kubepods-pod{}.slice/crio-{ID}.scope/a", POD.replace('-', "_")), pod),
        ] {
            assert_eq!(host(7, &path), expected, "{path}");
        }
        assert_eq!(of(0, &format!("/docker/{ID}"), false, true), container, "whoever is in there");
    }

    #[test]
    fn a_users_rootless_containers_belong_to_the_user() {
        let slice = "/user.slice/user-1000.slice";
        for below in ["user@1000.service/user.slice/", "session-2.scope/", ""] {
            let path = format!("{slice}/{below}libpod-{ID}.scope/container");
            assert_eq!(of(1000, &path, false, false), Tenant::User(1000), "{path}");
            assert_eq!(of(100_999, &path, false, false), Tenant::User(1000), "a subordinate id: {path}");
        }
        // The same session contains another user through `su`, and root through `sudo`.
        let session = format!("{slice}/session-2.scope");
        assert_eq!(host(1001, &session), Tenant::User(1001));
        assert_eq!(host(0, &session), Tenant::Root);

        let delegated = format!("/system.slice/lab.service/docker-{ID}.scope");
        let cgroup = Cgroup { path: delegated.clone() };
        let of = |uid, own_ids, owner: u32| {
            let place = Place { cgroup: &cgroup, on_host: true, own_ids, login: None };
            let owner = |path: &str| Some(if path.ends_with(".service") { owner } else { 0 });
            Tenant::of(uid, place, &Cgroup::default(), Owners { cgroup: &owner, uid: &accountable }).0
        };
        assert_eq!(of(1000, true, 1000), Tenant::User(1000), "lab.service is delegated to them");
        assert_eq!(of(100_999, false, 1000), Tenant::User(1000));
        assert_eq!(of(1000, true, 0), Tenant::Container(ID.into()), "only root can have made it");
    }

    #[test]
    fn subordinate_ids_are_charged_to_their_owner() {
        let of = |uid, path: &str, own_ids, login| {
            let cgroup = Cgroup { path: path.into() };
            let place = Place { cgroup: &cgroup, on_host: true, own_ids, login };
            Tenant::of(uid, place, &Cgroup::default(), Owners { cgroup: &|_| None, uid: &accountable })
        };
        let service = "/system.slice/cron.service";
        let user = |uid| (Tenant::User(uid), uid);
        // A set-user-ID copy of a program runs outside of the namespace.
        assert_eq!(of(100_007, service, true, None), user(1000));
        assert_eq!(of(100_007, service, false, None), user(1000));
        assert_eq!(of(100_007, "/user.slice/user-1001.slice/session-2.scope", false, None), user(1000));
        // The host's /etc/subuid does not list this id, so the user that logged in is accountable.
        // Without a login, the id counts as a user.
        assert_eq!(of(200_007, service, false, Some(1001)), user(1001));
        assert_eq!(of(200_007, service, false, None), user(200_007));
        // `sudo -u` needs the administrator's permission, so the new user is accountable.
        assert_eq!(of(1002, service, true, Some(1001)), user(1002));
        assert_eq!(of(0, service, true, Some(1001)), (Tenant::Root, 0));
        // In a container that root started, the container is the tenant for any id.
        let container = format!("/system.slice/docker-{ID}.scope");
        assert_eq!(of(100_007, &container, false, None), (Tenant::Container(ID.into()), 1000));
    }

    #[test]
    fn only_a_verified_host_root_is_the_root_tenant() {
        assert_eq!(host(0, "/system.slice/a.service"), Tenant::Root);
        assert_eq!(of(0, "/system.slice/a.service", false, true), Tenant::User(0));
    }

    #[test]
    fn the_schedulers_own_container_is_no_tenant() {
        let own = Cgroup { path: format!("/docker/{ID}/init.scope") };
        let of = |path: &str| {
            let cgroup = Cgroup { path: path.into() };
            let place = Place { cgroup: &cgroup, on_host: true, own_ids: true, login: None };
            Tenant::of(7, place, &own, Owners { cgroup: &|_| None, uid: &|uid| uid }).0
        };
        assert_eq!(of(&format!("/docker/{ID}")), Tenant::User(7));
        assert_eq!(of(&format!("/docker/{ID}/system.slice/docker-{OTHER}.scope")), Tenant::Container(OTHER.into()));
        assert_eq!(of(&format!("/docker/{OTHER}")), Tenant::Container(OTHER.into()));
    }

    #[test]
    fn tenant_numbers_are_unique() {
        let tenants = [
            Tenant::Root,
            Tenant::User(0),
            Tenant::User(1),
            Tenant::User(u32::MAX),
            Tenant::Container(ID.into()),
            Tenant::Container(OTHER.into()),
            Tenant::Pod(ID.into()),
        ];
        let numbers: BTreeSet<u64> = tenants.iter().map(Tenant::number).collect();
        assert_eq!(numbers.len(), tenants.len());
        assert_eq!(Tenant::Container(ID.into()).number(), Tenant::Container(ID.into()).number());
    }
}
