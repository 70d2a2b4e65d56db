//! The unit, slice, container or pod of a process, by the path of its control group.
//!
//! A user can create control groups with any name below the control groups that are delegated to
//! the user, for example with `systemd-run --user --unit=jupyter.service`. A name is therefore only
//! as trustworthy as the owner of the control group. The system manager creates only the first part
//! of the path: the slices and the first unit in them. The unit's owner creates the control groups
//! inside the unit. This module separates the two parts.

use super::printable;

/// A control group.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cgroup {
    /// The path from the root of the hierarchy, beginning with `/`. Empty if unknown. If the daemon
    /// runs in a control group namespace, the path starts at the innermost control group that
    /// contains both the daemon and the process.
    pub path: String,
}

/// The part of a path that belongs to one manager. Paths are from the root of the hierarchy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned<'a> {
    /// The slices, outermost first.
    pub slices: Vec<&'a str>,
    pub unit: Option<&'a str>,
    /// The path and the whole id of the outermost container.
    pub container: Option<(&'a str, &'a str)>,
    /// The path and the UID (in Kubernetes' form) of the outermost pod. A control group inside a
    /// container does not count as a pod.
    pub pod: Option<(&'a str, String)>,
}

impl Cgroup {
    /// Parses `/proc/PID/cgroup`. Version 2 has one line `0::/path`. Version 1 has a line for
    /// systemd's own hierarchy.
    pub fn read(text: &str) -> Self {
        let hierarchies = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        // On a host with both versions, systemd's own hierarchy contains the units if it is in use.
        let of = |wanted: &str| hierarchies().find(|(controllers, _)| *controllers == wanted);
        let (named, unified) = (of("name=systemd"), of(""));
        let path = named.filter(|(_, path)| *path != "/" || unified.is_none()).or(unified);
        let path = path.map_or("", |(_, path)| outside(path));
        Self { path: printable(path) }
    }

    /// Returns the name of the innermost unit. Users know the process by this name. Any user may
    /// own this unit.
    pub fn unit(&self) -> &str {
        self.names().rfind(|name| is_unit(name)).unwrap_or("")
    }

    pub fn slice(&self) -> &str {
        self.names().rfind(|name| is_slice(name)).unwrap_or("")
    }

    /// Returns the id of the outermost container, shortened as container tools do. A container's
    /// root can give any name to control groups inside the container, so inner containers do not
    /// count. A container that a user created counts only outside the containers of the host.
    pub fn container(&self) -> &str {
        let of_user = || self.names().find_map(container);
        let id = self.of_system().container.map(|(_, id)| id).or_else(of_user);
        id.map_or("", |id| id.get(..12).unwrap_or(id))
    }

    /// Returns the part that the system manager and root's container runtimes created.
    pub fn of_system(&self) -> Owned<'_> {
        self.owned(0)
    }

    /// Returns the same part as [`Self::of_system`], but below the container that also contains
    /// `own`.
    pub fn of_system_below(&self, own: &Self) -> Owned<'_> {
        let shared = own.of_system().container.map_or("", |(path, _)| path);
        let is_within = self.path.strip_prefix(shared).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        self.owned(if is_within { shared.len() } else { 0 })
    }

    /// Returns the user whose slice contains the control group.
    pub fn user_slice(&self) -> Option<u32> {
        self.of_system().slices.into_iter().find_map(|path| slice_owner(name(path)))
    }

    /// Returns the part that a user's manager created, and the user's id.
    pub fn of_user(&self) -> Option<(u32, Owned<'_>)> {
        let unit = self.of_system().unit?;
        Some((manager(name(unit))?, self.owned(unit.len())))
    }

    /// Returns the paths of this control group and its ancestors, outermost first.
    pub fn within(&self) -> impl DoubleEndedIterator<Item = &str> {
        let ends = self.path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0).chain([self.path.len()]);
        ends.filter_map(|end| self.path.get(..end)).filter(|path| path.len() > 1).collect::<Vec<_>>().into_iter()
    }

    fn names(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.path.split('/').filter(|name| !name.is_empty())
    }

    /// Returns the part below a manager's root. The path of the root has `root` bytes.
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
                break; // the user created all inner control groups
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

/// Strips leading `/..` components. A control group namespace puts them before paths outside the
/// namespace.
fn outside(mut path: &str) -> &str {
    while let Some(rest) = path.strip_prefix("/..").filter(|rest| rest.is_empty() || rest.starts_with('/')) {
        path = rest;
    }
    if path.is_empty() { "/" } else { path }
}

/// Returns the last component of a path.
pub fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

pub fn is_unit(name: &str) -> bool {
    name.ends_with(".service") || name.ends_with(".scope")
}

pub fn is_slice(name: &str) -> bool {
    name.ends_with(".slice")
}

/// Returns the user of a user slice.
fn slice_owner(slice: &str) -> Option<u32> {
    slice.strip_prefix("user-")?.strip_suffix(".slice")?.parse().ok()
}

/// Returns the user whose manager runs in a unit.
fn manager(unit: &str) -> Option<u32> {
    unit.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok()
}

/// Returns the container id in a name: `docker-<id>.scope`, `libpod-<id>.scope`,
/// `cri-containerd-<id>.scope` or `<id>`.
fn container(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit(['-', ':']).next().unwrap_or(name);
    (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then_some(id)
}

/// Returns the pod's UID in a name: `pod<uid>` or `kubepods-burstable-pod<uid>.slice`. In the
/// slice's name, underscores replace the UID's dashes, because systemd reserves dashes for nesting.
/// Static pods have a UID without dashes.
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
    fn the_innermost_unit_and_container_are_identified() {
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
    fn delegated_cgroups_belong_to_the_managers_unit() {
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
            // A scheduler in another pod reads the path in this form.
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
