//! Where a process belongs, by the path of its control group: systemd's units and slices, and containers.
//!
//! Anybody may make control groups below what was given to them, by any name: `systemd-run --user --unit=jupyter.service`
//! does. Names count for as much as who owns them, so what the system's manager made is told from the rest: its slices,
//! and the first unit below them. It puts nothing into its units; what is there was made by whom the unit was given to.

/// A control group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// From the root of the hierarchy, beginning with `/`; empty where it is not known.
    pub path: String,
}

/// What one manager owns of a path. All of it by its own path, from the root.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owned<'a> {
    /// From the outermost in.
    pub slices: Vec<&'a str>,
    pub unit: Option<&'a str>,
    /// The outermost container, and its whole id.
    pub container: Option<(&'a str, &'a str)>,
}

impl Cgroup {
    /// Reads `/proc/PID/cgroup`: version 2 has one line `0::/path`, version 1 has systemd's own hierarchy by name.
    pub fn read(text: &str) -> Self {
        let hierarchies = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        // On a host with both, units are in systemd's.
        let named = hierarchies().find(|(controllers, _)| *controllers == "name=systemd");
        let path = named.or_else(|| hierarchies().find(|(controllers, _)| controllers.is_empty()));
        let path = path.map_or("", |(_, path)| path);
        Self { path: path.chars().map(|c| if c.is_control() { '?' } else { c }).collect() }
    }

    /// The innermost unit, whoever owns it: what people know the process by.
    pub fn unit(&self) -> &str {
        self.names().rfind(|name| is_unit(name)).unwrap_or("")
    }

    pub fn slice(&self) -> &str {
        self.names().rfind(|name| is_slice(name)).unwrap_or("")
    }

    /// The id of the innermost container, shortened as container tools show it.
    pub fn container(&self) -> &str {
        self.names().rev().find_map(container).map_or("", |id| id.get(..12).unwrap_or(id))
    }

    /// What the system's manager made.
    pub fn of_system(&self) -> Owned<'_> {
        self.owned(0)
    }

    /// What a user's manager made, and who that user is.
    pub fn of_user(&self) -> Option<(u32, Owned<'_>)> {
        let unit = self.of_system().unit?;
        Some((manager(name(unit))?, self.owned(unit.len())))
    }

    /// This control group and those that it is in, from the outermost, each by its path.
    pub fn within(&self) -> impl DoubleEndedIterator<Item = &str> {
        let ends = self.path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0).chain([self.path.len()]);
        ends.filter_map(|end| self.path.get(..end)).filter(|path| path.len() > 1).collect::<Vec<_>>().into_iter()
    }

    fn names(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.path.split('/').filter(|name| !name.is_empty())
    }

    /// What the manager owns whose root is so long.
    fn owned(&self, root: usize) -> Owned<'_> {
        let mut owned = Owned::default();
        let mut above = true;
        for path in self.within().filter(|path| path.len() > root) {
            let name = name(path);
            if above && is_slice(name) {
                owned.slices.push(path);
            } else {
                if above && is_unit(name) {
                    owned.unit = Some(path);
                }
                above = false;
            }
            if manager(name).is_some() {
                break; // what is in there is that user's
            }
            owned.container = owned.container.or_else(|| container(name).map(|id| (path, id)));
        }
        owned
    }
}

/// The last part of a path.
pub fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

pub fn is_unit(name: &str) -> bool {
    name.ends_with(".service") || name.ends_with(".scope")
}

pub fn is_slice(name: &str) -> bool {
    name.ends_with(".slice")
}

/// Whose manager runs in that unit.
fn manager(unit: &str) -> Option<u32> {
    unit.strip_prefix("user@")?.strip_suffix(".service")?.parse().ok()
}

/// The container id in a name: `docker-<id>.scope`, `libpod-<id>.scope`, `cri-containerd-<id>.scope` or `<id>`.
fn container(name: &str) -> Option<&str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = name.rsplit(['-', ':']).next().unwrap_or(name);
    (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then_some(id)
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

        let path = format!("/docker/{ID}/system.slice/jupyter.service");
        let own_init = Cgroup { path };
        let owned = own_init.of_system();
        assert_eq!((owned.slices, owned.unit), (vec![], None), "the container's own manager is not the system's");
        assert_eq!(owned.container.map(|(path, _)| path.len()), Some("/docker/".len() + 64));
    }
}
