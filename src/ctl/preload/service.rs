//! `--unit` preloads the library in one service, and `--user` in all services of a user's manager,
//! instead of in every program of the machine. Both options write a drop-in that sets `LD_PRELOAD`
//! for a service. For a user, the service is `user@UID.service`.
//!
//! systemd has no equivalent for slices: `Slice=` is a property of a service, and drop-ins apply by
//! a unit's name.

use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::{Value, json};

use super::drop_in::Manager;
use super::{OFF, Output, drop_in, file, library, only_root, program, verify};
use crate::ctl::progress::Progress;
use crate::ctl::systemd::{Service, Systemd};
use crate::ctl::{CtlError, block_on};

/// The programs that a command of `preload` concerns.
#[derive(Debug, Clone, Default, Args)]
#[group(multiple = false)]
pub struct Of {
    /// Apply only to this service
    #[arg(long, value_name = "UNIT", value_hint = clap::ValueHint::Other)]
    unit: Option<String>,
    /// Apply to the services of this user: name or number
    #[arg(long, value_name = "USER", value_hint = clap::ValueHint::Username)]
    user: Option<String>,
    /// Always refused with an explanation, because slices cannot preload
    #[arg(long, value_name = "SLICE", hide = true)]
    slice: Option<String>,
}

/// The service that receives the drop-in.
#[derive(Debug)]
pub struct Selected {
    unit: String,
    /// The options on the command line, for messages.
    options: String,
}

impl Of {
    /// Returns the selected service. `None` means every program of the machine.
    pub fn selected(&self) -> Result<Option<Selected>, CtlError> {
        let (unit, options) = match (&self.unit, &self.user, &self.slice) {
            (None, None, None) => return Ok(None),
            (Some(unit), ..) | (.., Some(unit)) => (unit.clone(), format!("--unit {unit}")),
            (_, Some(user), _) => (format!("user@{}.service", uid(user)?), format!("--user {user}")),
        };
        let slice = self.slice.is_some() && !unit.contains('.');
        let unit = drop_in::unit_name(&if slice { format!("{unit}.slice") } else { unit }).map_err(CtlError::Failed)?;
        Ok(Some(Selected { unit, options }))
    }
}

/// Returns the uid of a user. `getent` looks up the user, because only a dynamically linked program
/// can query user databases other than /etc/passwd.
fn uid(user: &str) -> Result<u32, CtlError> {
    if let Ok(uid) = user.parse() {
        return Ok(uid);
    }
    let unknown = || CtlError::Failed(format!("there is no user {user:?}"));
    let output = Command::new("getent").args(["passwd", "--", user]).output();
    let output = output.map_err(|e| {
        CtlError::Failed(format!("cannot look up the user {user:?}: getent: {e}. Use the numeric user ID"))
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.split(':').nth(2).and_then(|uid| uid.parse().ok()).ok_or_else(unknown)
}

pub fn enable(selected: &Selected, asked: Option<&Path>) -> Result<Output, CtlError> {
    let Selected { unit, options } = selected;
    only_root(unit, &format!("preload enable {options}"))?;
    let library = verified(asked)?;
    block_on(async {
        let ready = Ready::of(Manager::System, unit, &library).await?;
        ready.put(&format!("preload disable {options}")).await?;
        let text = format!("On: {} preloads {library} when it next starts.\n", ready.unit);
        Ok(Output::done(text + &ready.notes()))
    })
}

/// Verifies the library, and returns its path.
pub(in crate::ctl) fn verified(asked: Option<&Path>) -> Result<String, CtlError> {
    let library = library::find(asked)?;
    let report = verify::verify(&library, None);
    if !report.is_good() {
        return Err(CtlError::Failed(format!(
            "the library cannot be preloaded\n{}Nothing has changed.",
            report.text()
        )));
    }
    // The path contains no blanks, because the verification has passed.
    let text = library.to_str().map(str::to_owned);
    text.ok_or_else(|| CtlError::Failed(format!("{} is not valid UTF-8", library.display())))
}

/// A service that can preload the library. While this value exists, no other nvsharectl changes
/// preloading in the system's services.
#[derive(Debug)]
pub(in crate::ctl) struct Ready {
    pub systemd: Systemd,
    pub manager: Manager,
    /// The service's name, which may differ from the requested alias.
    pub unit: String,
    pub is_running: bool,
    library: String,
    list: String,
    /// The path of the `libnvshare.so` that the service already preloads.
    pub before: Option<String>,
    notes: Vec<String>,
    _lock: Option<File>,
}

impl Ready {
    /// Checks the service.
    ///
    /// # Errors
    /// The service does not exist, or preloading would have no effect.
    pub async fn of(manager: Manager, unit: &str, library: &str) -> Result<Self, CtlError> {
        // Only the system's services need the lock, which only root can take.
        let lock = (manager == Manager::System).then(file::lock).transpose()?;
        let systemd = Systemd::connect(manager).await?;
        is_service(&systemd, unit).await?;
        let service = systemd.service(unit).await?;
        service.accepts(Path::new(library))?;
        let before = drop_in::assigned(&service.environment);
        Ok(Self {
            manager,
            is_running: service.main_pid != 0,
            library: library.to_owned(),
            list: drop_in::preload_list(before, library),
            before: drop_in::ours(before).map(str::to_owned),
            notes: service.notes(),
            unit: service.id,
            systemd,
            _lock: lock,
        })
    }

    /// Writes the drop-in. Removes the drop-in again if the service's environment in systemd does
    /// not contain the library afterwards. `undo` is the command that removes the drop-in. Returns
    /// the text of the earlier drop-in.
    pub async fn put(&self, undo: &str) -> Result<Option<String>, CtlError> {
        let Self { manager, unit, library, .. } = self;
        let cannot = |e| CtlError::Failed(format!("cannot write {}: {e}", manager.path(unit).display()));
        let before = drop_in::write(*manager, unit, &drop_in::text(undo, &self.list)).map_err(cannot)?;
        let tried = async {
            let mut progress = Progress::new();
            progress.during("reloading systemd", self.systemd.reload()).await?;
            let now = self.systemd.service(unit).await?;
            match drop_in::ours(drop_in::assigned(&now.environment)) == Some(library) {
                true => Ok(()),
                false => Err(CtlError::Failed(format!(
                    "{} is overridden by another file, so {unit} would not preload the library. Find that file with \
                     `{} cat {unit}`, and add {library} to its LD_PRELOAD. Nothing has changed.",
                    manager.path(unit).display(),
                    manager.systemctl()
                ))),
            }
        };
        match tried.await {
            Ok(()) => Ok(before),
            Err(e) => {
                self.put_back(before).await;
                Err(e)
            }
        }
    }

    /// Undoes [`Self::put`].
    pub async fn put_back(&self, before: Option<String>) {
        match before {
            Some(text) => drop(drop_in::write(self.manager, &self.unit, &text)),
            None => drop(drop_in::remove(self.manager, &self.unit)),
        }
        let _ = self.systemd.reload().await;
    }

    /// Remarks for the user, one line each.
    pub fn notes(&self) -> String {
        let mut text = String::new();
        if self.is_running {
            let _ = writeln!(
                text,
                "  note: {} is running, and loads the library only after a restart: {}",
                self.unit,
                restart(self.manager, &self.unit)
            );
        }
        for note in &self.notes {
            let _ = writeln!(text, "  note: {note}");
        }
        text
    }
}

pub fn disable(selected: &Selected) -> Result<Output, CtlError> {
    let Selected { unit, options } = selected;
    only_root(unit, &format!("preload disable {options}"))?;
    let _lock = file::lock()?;
    block_on(async {
        // The drop-in may exist even if the service has been removed or systemd is not running.
        let systemd = Systemd::connect(Manager::System).await;
        let id = match &systemd {
            Ok(systemd) => systemd.service(unit).await.map_or_else(|_| unit.clone(), |service| service.id),
            Err(_) => unit.clone(),
        };
        let mut removed = false;
        for name in [unit, &id] {
            let cannot = |e| CtlError::Failed(format!("cannot remove {}: {e}", Manager::System.path(name).display()));
            removed |= drop_in::remove(Manager::System, name).map_err(cannot)?;
        }
        if !removed {
            return Ok(Output::done(format!("Already off: {} does not exist.\n", Manager::System.path(&id).display())));
        }
        let mut text = format!("Off: the next time {id} starts, it does not preload the library.\n");
        let told = match systemd {
            Ok(systemd) => systemd.reload().await,
            Err(e) => Err(e),
        };
        if let Err(e) = told {
            let _ = writeln!(text, "  note: {e}");
        }
        Ok(Output::done(text))
    })
}

fn restart(manager: Manager, unit: &str) -> String {
    match unit.strip_prefix("user@") {
        _ if manager == Manager::User => format!("systemctl --user restart {unit}"),
        Some(_) => format!("`systemctl restart {unit}` ends all programs of that user's services"),
        None => format!("sudo systemctl restart {unit}"),
    }
}

/// Checks that the unit is a service.
///
/// # Errors
/// The unit is of a kind that starts no programs.
async fn is_service(systemd: &Systemd, unit: &str) -> Result<(), CtlError> {
    let refused = match unit.rsplit('.').next().unwrap_or_default() {
        "service" => return Ok(()),
        "slice" => {
            let members = systemd.services_in(unit).await?;
            let commands = members.iter().map(|member| format!("\n  sudo nvsharectl preload enable --unit {member}"));
            let members = match commands.collect::<String>() {
                none if none.is_empty() => "It has no services now.".to_owned(),
                commands => format!("Its services now:{commands}"),
            };
            format!(
                "{unit} is a slice, which cannot pass an environment to its services. Enable preloading for each \
                 service, and start other programs with `nvsharectl run`. {members}"
            )
        }
        "scope" => {
            format!(
                "{unit} is a scope, and systemd does not start the programs of a scope. Start them with `nvsharectl \
                 run`"
            )
        }
        _ => format!("{unit} is not a service and starts no programs. Name the service instead"),
    };
    Err(CtlError::Failed(refused))
}

impl Service {
    /// Checks that preloading the library has an effect in the service.
    ///
    /// # Errors
    /// The service would not load the library, or the library would have no effect in the service.
    fn accepts(&self, library: &Path) -> Result<(), CtlError> {
        let Self { id, root_directory, root_image, .. } = self;
        let refused = |why: String| Err(CtlError::Failed(why));
        if !root_image.is_empty() {
            return refused(format!(
                "{id} runs in an image (RootImage={root_image}), which cannot access this machine's libnvshare.so. \
                 Install nvshare's library in the image, and set LD_PRELOAD in the unit"
            ));
        }
        if !matches!(&**root_directory, "" | "/") {
            let inside = Path::new(root_directory).join(library.strip_prefix("/").unwrap_or(library));
            if !inside.exists() {
                return refused(format!(
                    "{id} runs in {root_directory} (RootDirectory=), and {} does not exist. Install nvshare's library \
                     in that directory, and mount /run/nvshare there with BindReadOnlyPaths=",
                    inside.display()
                ));
            }
        }
        if !self.unix_sockets {
            return refused(format!(
                "{id} may not use Unix sockets, which programs need to reach the scheduler. Add AF_UNIX to its \
                 RestrictAddressFamilies="
            ));
        }
        if self.unset_environment.iter().any(|name| name.split('=').next() == Some(drop_in::VARIABLE)) {
            return refused(format!(
                "{id} has UnsetEnvironment=LD_PRELOAD, which would remove the variable again. Remove that setting"
            ));
        }
        if let Some(file) = self.file_that_sets_it() {
            return refused(format!(
                "{id} reads LD_PRELOAD from {}, which overrides the unit's Environment=. Add {} to LD_PRELOAD in that \
                 file",
                file.display(),
                library.display()
            ));
        }
        Ok(())
    }

    /// Returns the file of `EnvironmentFile=` that sets `LD_PRELOAD`.
    fn file_that_sets_it(&self) -> Option<PathBuf> {
        let files = self.environment_files.iter().filter_map(|pattern| glob::glob(pattern).ok()).flatten().flatten();
        let sets =
            |line: &str| line.trim_start().strip_prefix(drop_in::VARIABLE).is_some_and(|rest| rest.starts_with('='));
        files.into_iter().find(|file| std::fs::read_to_string(file).is_ok_and(|text| text.lines().any(sets)))
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.apparmor_profile.is_empty() {
            notes.push(format!(
                "AppArmor confines the service with the profile {}. The profile must `include <abstractions/nvshare>`",
                self.apparmor_profile
            ));
        }
        for path in &self.programs {
            if let Some(why) = program::obstacle(Path::new(path)) {
                notes.push(format!("{path} {why}. Programs that it starts may load the library"));
            }
        }
        notes
    }
}

/// A service with nvshare's drop-in, and problems of the service.
#[derive(Debug)]
pub struct UnitState {
    unit: String,
    library: Option<String>,
    version: Option<String>,
    problems: Vec<String>,
}

/// Returns all services with the drop-in, or only the selected service.
pub fn states(selected: Option<&Selected>) -> Vec<UnitState> {
    let mut units = drop_in::units();
    block_on(async {
        let systemd = if units.is_empty() { None } else { Systemd::connect(Manager::System).await.ok() };
        if let Some(Selected { unit, .. }) = selected {
            let id = match &systemd {
                Some(systemd) => systemd.service(unit).await.map_or_else(|_| unit.clone(), |service| service.id),
                None => unit.clone(),
            };
            units.retain(|name| name == unit || *name == id);
        }
        let mut states = Vec::new();
        for unit in units {
            states.push(UnitState::of(unit, systemd.as_ref()).await);
        }
        Ok(states)
    })
    .unwrap_or_default()
}

impl UnitState {
    async fn of(unit: String, systemd: Option<&Systemd>) -> Self {
        let text = std::fs::read_to_string(Manager::System.path(&unit)).unwrap_or_default();
        let written = text.lines().find_map(|line| line.strip_prefix(&format!("Environment=\"{}=", drop_in::VARIABLE)));
        let library =
            written.and_then(|list| drop_in::ours(list.trim_end_matches('"'))).map(|name| name.replace("%%", "%"));
        let mut problems = Vec::new();
        let version = match library.as_ref().map(|library| library::version(Path::new(library))) {
            Some(Ok(version)) => Some(version),
            Some(Err(why)) => {
                problems.push(format!("{}: {why}", library.as_deref().unwrap_or_default()));
                None
            }
            None => {
                problems.push(format!("{} names no libnvshare.so", Manager::System.path(&unit).display()));
                None
            }
        };
        if let Some(systemd) = systemd {
            match systemd.service(&unit).await {
                Ok(service) => problems.extend(service.problem()),
                Err(e) => problems.push(e.to_string()),
            }
        }
        Self { unit, library, version, problems }
    }

    pub fn text(&self) -> String {
        let version = self.version.as_ref().map_or(String::new(), |version| format!(", version {version}"));
        let mut text = format!("  on for {}: {}{version}\n", self.unit, self.library.as_deref().unwrap_or("?"));
        for problem in &self.problems {
            let _ = writeln!(text, "    problem: {problem}");
        }
        text
    }

    pub fn json(&self) -> Value {
        json!({ "unit": self.unit, "library": self.library, "library-version": self.version, "problems": self.problems })
    }
}

impl Service {
    /// Returns the reason why the running service has not loaded the library.
    fn problem(&self) -> Option<String> {
        let Self { id, main_pid, .. } = self;
        if drop_in::ours(drop_in::assigned(&self.environment)).is_none() {
            return Some(format!("another file overrides the drop-in. Find it with `systemctl cat {id}`"));
        }
        let read = |name: &str| std::fs::read(format!("/proc/{main_pid}/{name}")).ok();
        if *main_pid == 0 {
            return None;
        }
        // Only root can read the memory maps and the environment of other users' processes.
        let (maps, environment) = (read("maps")?, read("environ")?);
        if String::from_utf8_lossy(&maps).contains("/libnvshare.so") {
            return None;
        }
        let environment: Vec<String> =
            environment.split(|byte| *byte == 0).map(|pair| String::from_utf8_lossy(pair).into_owned()).collect();
        Some(match drop_in::ours(drop_in::assigned(&environment)) {
            None => {
                format!(
                    "process {main_pid} started before preloading was enabled, and loads the library only after a \
                     restart: {}",
                    restart(Manager::System, id)
                )
            }
            Some(_) => format!(
                "process {main_pid} has not loaded it. Possible reasons: the program is statically linked, does not \
                 use glibc, has extra privileges, or is confined by AppArmor or SELinux. Its child processes may still \
                 load it"
            ),
        })
    }
}

/// Prints `preload status --unit` and `--user`.
pub fn status(selected: &Selected, json: bool) -> Output {
    let states = states(Some(selected));
    let exit_code = if states.is_empty() { OFF } else { 0 };
    let text = match (json, &*states) {
        (true, _) => format!("{:#}\n", json!(states.iter().map(UnitState::json).collect::<Vec<_>>())),
        (false, []) => format!("off for {}\n", selected.unit),
        (false, states) => states.iter().map(|state| state.text().trim_start().to_owned()).collect(),
    };
    Output { text, exit_code }
}
