//! The unit, slice, container or pod of a process, by the path of its control group.
//!
//! A user can create control groups below those delegated to them, with any name: `systemd-run --user
//! --unit=jupyter.service` does. A name is as trustworthy as the owner of the control group, so the part of the path
//! that the system manager created is distinguished from the rest: its slices, and the first unit below them. The
//! system manager creates nothing inside its units; control groups there belong to the unit's owner.

use super::printable;

/// A control group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// The path from the root of the hierarchy, beginning with `/`; empty if unknown. If the daemon is in a control group
    /// namespace, the path starts at the innermost control group that contains both.
    pub path: String,
}

/// The part of a path that one manager owns. Paths are from the root of the hierarchy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned<'a> {
    /// The slices, outermost first.
    pub slices: Vec<&'a str>,
    pub unit: Option<&'a str>,
    /// The outermost container: its path and its whole id.
    pub container: Option<(&'a str, &'a str)>,
    /// The outermost pod: its path and its UID in Kubernetes' form. A control group inside a container does not count as a
    /// pod.
    pub pod: Option<(&'a str, String)>,
}

impl Cgroup {
    /// Parses `/proc/PID/cgroup`: version 2 has one line `0::/path`, version 1 has a line for systemd's own hierarchy.
    pub fn read(text: &str) -> Self {
        let hierarchies = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        // On a host with both versions, units are in systemd's hierarchy, if that is in use.
        let of = |wanted: &str| hierarchies().find(|(controllers, _)| *controllers == wanted);
        let (named, unified) = (of("name=systemd"), of(""));
        let path = named.filter(|(_, path)| *path != "/" || unified.is_none()).or(unified);
        let path = path.map_or("", |(_, path)| outside(path));
        Self { path: printable(path) }
    }

    /// The innermost unit, by which people know the process. Any user may own it.
    pub fn unit(&self) -> &str {
        self.names().rfind(|name| is_unit(name)).unwrap_or("")
    }

    pub fn slice(&self) -> &str {
        self.names().rfind(|name| is_slice(name)).unwrap_or("")
    }

    /// The id of the outermost container, shortened like in container tools. The outermost counts because a container's
    /// root can give any name to control groups inside it. A user's container counts only outside of the host's containers.
    pub fn container(&self) -> &str {
        let of_user = || self.names().find_map(container);
        let id = self.of_system().container.map(|(_, id)| id).or_else(of_user);
        id.map_or("", |id| id.get(..12).unwrap_or(id))
    }

    /// The part that the system manager and runtimes owned by root created.
    pub fn of_system(&self) -> Owned<'_> {
        self.owned(0)
    }

    /// The same part, below the container that `own` is also in.
    pub fn of_system_below(&self, own: &Self) -> Owned<'_> {
        let shared = own.of_system().container.map_or("", |(path, _)| path);
        let is_within = self.path.strip_prefix(shared).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        self.owned(if is_within { shared.len() } else { 0 })
    }

    /// The user whose slice contains the control group.
    pub fn user_slice(&self) -> Option<u32> {
        self.of_system().slices.into_iter().find_map(|path| slice_owner(name(path)))
    }

    /// The part that a user's manager created, and that user's id.
    pub fn of_user(&self) -> Option<(u32, Owned<'_>)> {
        let unit = self.of_system().unit?;
        Some((manager(name(unit))?, self.owned(unit.len())))
    }

    /// The paths of this control group and its ancestors, outermost first.
    pub fn within(&self) -> impl DoubleEndedIterator<Item = &str> {
        let ends = self.path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0).chain([self.path.len()]);
        ends.filter_map(|end| self.path.get(..end)).filter(|path| path.len() > 1).collect::<Vec<_>>().into_iter()
    }

    fn names(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.path.split('/').filter(|name| !name.is_empty())
    }

    /// The part below a manager's root, whose path has `root` bytes.
    fn owned(&self, root: usize) -> Owned<'_> {
        let mut owned = Owned::default();
        let mut above = true;
        // Containers below a user's slice belong to the user.
        let mut of_a_user = false;
        for path in self.within().filter(|path| path.len() > root) {
            let name = name(path);
            if above && is_slice(name) {
                owned.slices.push(path);
                of_a_user |= slice_owner(name).is_some();
            } else {
                if above && is_unit(name) {
                    owned.unit = Some(path);
                }
                above = false;
            }
            if manager(name).is_some() {
                break; // what is in there is that user's
            }
            if of_a_user {
                continue;
            }
            if owned.container.is_none() {
                owned.pod = owned.pod.or_else(|| Some((path, pod(name)?)));
            }
            owned.container = owned.container.or_else(|| container(name).map(|id| (path, id)));
        }
        owned
    }
}

/// A path without leading `/..`, which a control group namespace puts before paths outside of it.
fn outside(mut path: &str) -> &str {
    while let Some(rest) = path.strip_prefix("/..").filter(|rest| rest.is_empty() || rest.starts_with('/')) {
        path = rest;
    }
    if path.is_empty() { "/" } else { path }
}

/// The last component of a path.
pub fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

pub fn is_unit(name: &str) -> bool {
    name.ends_with(".service") || name.ends_with(".scope")
}

pub fn is_slice(name: &str) -> bool {
    name.ends_with(".slice")
}

/// The user that a slice belongs to.
fn slice_owner(slice: &str) -> Option<u32> {
    slice.strip_prefix("user-")?.strip_suffix(".slice")?.parse().ok()
}

/// The user whose manager runs in a unit.
fn manager(unit: &str) -> Option<u32> {
    unit.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok()
}

/// The container id in a name: `docker-<id>.scope`, `libpod-<id>.scope`, `cri-containerd-<id>.scope` or `<id>`.
fn container(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit(['-', ':']).next().unwrap_or(name);
    (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then_some(id)
}

/// The pod's UID in a name: `pod<uid>`, or `kubepods-burstable-pod<uid>.slice`, where underscores replace dashes because
/// systemd uses dashes itself. Static pods have a UID without dashes.
fn pod(name: &str) -> Option<String> {
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1.replace('_', "-"),
        None => name.strip_prefix("pod")?.to_owned(),
    };
    let plain: String = uid.split('-').collect();
    let groups: Vec<usize> = uid.split('-').map(str::len).collect();
    let is_uid = plain.len() == 32 && plain.bytes().all(|b| b.is_ascii_hexdigit());
    (is_uid && (groups == [32] || groups == [8, 4, 4, 4, 12])).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn the_unit_is_the_innermost_and_containers_are_known() {
        let cases = [
            ("0::/user.slice/user-1000.slice/session-2.scope\n".to_owned(), ("session-2.scope", "user-1000.slice", "")),
            ("0::/system.slice/jupyter.service\n".to_owned(), ("jupyter.service", "system.slice", "")),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-3.scope\n".to_owned(),
                ("run-3.scope", "app.slice", ""),
            ),
            (
                format!("0::/system.slice/docker-{ID}.scope\n"),
                (&*format!("docker-{ID}.scope"), "system.slice", "0123456789ab"),
            ),
            (
                format!("12:devices:/x\n1:name=systemd:/kubepods.slice/cri-containerd-{ID}.scope\n"),
                (&*format!("cri-containerd-{ID}.scope"), "kubepods.slice", "0123456789ab"),
            ),
            (
                "12:devices:/x\n1:name=systemd:/system.slice/a.service\n0::/\n".to_owned(),
                ("a.service", "system.slice", ""),
            ),
            (format!("0::/docker/{ID}\n"), ("", "", "0123456789ab")),
            ("1:name=systemd:/\n0::/system.slice/a.service\n".to_owned(), ("a.service", "system.slice", "")),
            ("0::/\n".to_owned(), ("", "", "")),
            (String::new(), ("", "", "")),
        ]
        .map(|(text, (unit, slice, container))| (text, [unit, slice, container].map(str::to_owned)));
        for (text, expected) in cases {
            let cgroup = Cgroup::read(&text);
            assert_eq!(
                [cgroup.unit(), cgroup.slice(), cgroup.container()],
                expected.each_ref().map(|e| &**e),
                "{text}"
            );
        }
    }

    #[test]
    fn what_a_manager_owns_ends_at_its_units() {
        let inside = Cgroup { path: "/system.slice/a.service/b.slice/c.service".into() };
        let owned = inside.of_system();
        assert_eq!((owned.slices, owned.unit), (vec!["/system.slice"], Some("/system.slice/a.service")));
        assert_eq!(inside.of_user(), None);

        let path = format!("/user.slice/user-7.slice/user@7.service/app.slice/podman.service/libpod-{ID}.scope");
        let rootless = Cgroup { path };
        let owned = rootless.of_system();
        assert_eq!(owned.unit, Some("/user.slice/user-7.slice/user@7.service"));
        assert_eq!(owned.slices, ["/user.slice", "/user.slice/user-7.slice"]);
        assert_eq!(owned.container, None, "it is the user's, who may call anything so");
        let (uid, owned) = rootless.of_user().expect("a user's manager");
        assert_eq!((uid, owned.slices.len(), owned.unit.map(name)), (7, 1, Some("podman.service")));
        assert_eq!(owned.container.map(|(_, id)| id), Some(ID));

        let uid = "01234567-89ab-cdef-0123-456789abcdef";
        let systemd = uid.replace('-', "_");
        let pods = [
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/kubepods/besteffort/pod{uid}/{ID}"),
            // The path as a scheduler in another pod reads it.
            format!("/../../kubepods-pod{systemd}.slice/crio-{ID}.scope/inner.slice"),
            format!("/../pod{uid}/{ID}/kubepods/podffffffffffffffffffffffffffffffff"),
        ];
        for path in pods {
            let cgroup = Cgroup::read(&format!("0::{path}\n"));
            let owned = cgroup.of_system();
            assert_eq!(owned.pod.map(|(_, uid)| uid).as_deref(), Some(uid), "{path}");
            assert_eq!(owned.container.map(|(_, id)| id), Some(ID), "{path}");
        }
        let borrowed = format!("/system.slice/docker-{ID}.scope/kubepods-pod{systemd}.slice");
        assert_eq!(Cgroup { path: borrowed }.of_system().pod, None, "a container may call anything so");
        for name in
            ["pod", "pod1234", "kubepods-pod1234.slice", "podium.slice", "pod01234567-89ab-cdef-0123-456789abcdeX"]
        {
            assert_eq!(pod(name), None, "{name}");
        }
        assert_eq!(Cgroup::read("0::/../..\n").path, "/");
        assert_eq!(Cgroup::read("0::/..a/b\n").path, "/..a/b");

        let path = format!("/docker/{ID}/system.slice/jupyter.service");
        let own_init = Cgroup { path };
        let owned = own_init.of_system();
        assert_eq!((owned.slices, owned.unit), (vec![], None), "the container's own manager is not the system's");
        assert_eq!(owned.container.map(|(path, _)| path.len()), Some("/docker/".len() + 64));
    }
}
