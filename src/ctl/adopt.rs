//! `nvsharectl adopt` and `release`: make a server share GPUs from its next start on. `adopt` sets
//! a rule for a server, and writes the drop-in that `preload enable --unit` writes to preload the
//! library. If one of the two steps fails, `adopt` undoes the other. `release` removes only a
//! drop-in and a rule that `adopt` has made. It recognizes the drop-in by its first line, and the
//! rule by its name.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use clap::Args;
use toml::Value;
use zbus::OwnedVariant;

use super::preload::drop_in::{self, Manager};
use super::preload::only_root;
use super::preload::service::{self, Ready};
use super::systemd::Systemd;
use super::{CtlError, Target, block_on, rules};
use crate::bus::SchedulerProxy;

/// Maximum length of a rule's name.
const LONGEST_NAME: usize = 64;

/// The service or container to adopt or release.
#[derive(Debug, Clone, Default, Args)]
pub struct Server {
    /// Name of the service, like ollama.service
    #[arg(value_name = "UNIT", value_hint = clap::ValueHint::Other)]
    unit: String,
    /// Look UNIT up in your user's service manager (systemctl --user)
    #[arg(long)]
    user: bool,
    /// Restart the service immediately
    #[arg(long)]
    restart: bool,
}

impl Server {
    fn manager(&self) -> Manager {
        if self.user { Manager::User } else { Manager::System }
    }

    /// The service's name as a unit of systemd.
    fn unit(&self) -> Result<String, CtlError> {
        drop_in::unit_name(&self.unit).map_err(CtlError::Failed)
    }

    /// Returns the command that undoes `adopt`.
    fn undo(&self, unit: &str) -> String {
        if self.user { format!("release --user {unit}") } else { format!("release {unit}") }
    }

    fn check_user(&self, unit: &str, verb: &str) -> Result<(), CtlError> {
        if self.user { Ok(()) } else { only_root(unit, &format!("{verb} {unit}")) }
    }
}

/// The name of the rule of a unit.
fn rule_name(manager: Manager, unit: &str) -> Result<String, CtlError> {
    let name = match manager {
        Manager::System => format!("adopted {unit}"),
        Manager::User => format!("adopted {unit} of {}", nix::unistd::geteuid()),
    };
    let is_short = name.len() <= LONGEST_NAME;
    is_short.then_some(name).ok_or_else(|| {
        CtlError::Failed(format!(
            "cannot name a rule after {unit}: the name would be longer than {LONGEST_NAME} bytes. Use `nvsharectl \
             preload enable --unit` and `nvsharectl set-rule` instead"
        ))
    })
}

/// The rule for a server. The server skips the queue while it is within its share. If other
/// programs need its memory, the scheduler checkpoints the server after an idle time. `memory-low`
/// keeps its default, so the server's idle memory can be evicted.
fn rule(manager: Manager, unit: &str) -> Vec<(String, Value)> {
    let of_user =
        (manager == Manager::User).then(|| ("user".to_owned(), Value::Integer(nix::unistd::geteuid().as_raw().into())));
    let pattern = unit.replace("@.", "@*."); // all instances of a template
    let keys = [("interactive", Value::Boolean(true)), ("sleep-after", Value::String("5min".into()))];
    let keys = keys.into_iter().map(|(key, value)| (key.to_owned(), value));
    [("unit".to_owned(), Value::String(pattern))].into_iter().chain(of_user).chain(keys).collect()
}

/// Makes a service share GPUs from its next start on. With `--restart`, also restarts the service.
///
/// # Errors
/// The service does not exist, cannot preload the library or does not start, or the scheduler
/// refuses the rule. In each of these cases, `adopt` has changed nothing.
pub fn adopt(target: &Target, server: &Server, asked: Option<&Path>) -> Result<String, CtlError> {
    let unit = server.unit()?;
    server.check_user(&unit, "adopt")?;
    let library = service::verified(asked)?;
    block_on(async {
        let ready = Ready::of(server.manager(), &unit, &library).await?;
        let name = rule_name(server.manager(), &ready.unit)?;
        let scheduler = target.connect().await?;
        let mut undo = Undo { ready: &ready, scheduler: &scheduler, rule: None, drop_in: None };
        // `adopt` sets the rule first, because polkit may refuse the rule.
        if find_rule(&scheduler, &name).await?.is_none() {
            rules::call(&scheduler, &name, &rule(server.manager(), &ready.unit)).await?;
            undo.rule = Some(&name);
        }
        // A drop-in of `preload enable` or an administrator stays unchanged. A drop-in of `adopt`
        // is rewritten, because the library may have moved.
        let command = server.undo(&ready.unit);
        let own = drop_in::read(ready.manager, &ready.unit).ok().flatten();
        let is_own = own.is_some_and(|text| drop_in::is_removed_by(&text, &command));
        let is_on = match &ready.before {
            Some(before) => !is_own || *before == library,
            None => false,
        };
        if !is_on {
            match ready.put(&command).await {
                Ok(before) => undo.drop_in = Some(before),
                Err(e) => return Err(undo.carry_out(e).await),
            }
        }
        let mut text = match (&undo.rule, &undo.drop_in) {
            (None, None) => format!("{} is adopted already.\n", ready.unit),
            _ => format!("{} is adopted. To undo this: `nvsharectl {command}`\n", ready.unit),
        };
        if server.restart {
            if let Err(e) = ready.systemd.restart(&ready.unit).await {
                let e = undo.carry_out(e).await;
                // The service is restarted with its old drop-in. The service's state shows the
                // result, so errors are ignored.
                let _ = ready.systemd.restart(&ready.unit).await;
                return Err(e);
            }
            text += &format!("Restarted {}.\n", ready.unit);
        } else {
            text += &ready.notes();
        }
        let path = ready.manager.path(&ready.unit);
        if let Ok(content) = std::fs::read_to_string(&path) {
            let _ = write!(text, "\n# {}\n{content}", path.display());
        }
        let present = find_rule(&scheduler, &name).await.ok().flatten();
        text += &rules::text(present.into_iter().collect());
        Ok(text)
    })
}

/// The completed steps of `adopt`.
struct Undo<'a> {
    ready: &'a Ready,
    scheduler: &'a SchedulerProxy<'static>,
    rule: Option<&'a str>,
    /// `Some` after the new drop-in was written, with the text of the earlier drop-in, if any.
    drop_in: Option<Option<String>>,
}

impl Undo<'_> {
    /// Undoes the completed steps after the error `why`. Returns `why`, and adds any step that
    /// could not be undone.
    async fn carry_out(self, why: CtlError) -> CtlError {
        if let Some(before) = self.drop_in {
            self.ready.put_back(before).await;
        }
        if let Some(name) = self.rule
            && let Err(e) = rules::call(self.scheduler, name, &[]).await
        {
            return CtlError::Failed(format!("{why}\nThe rule {name:?} could not be removed: {e}"));
        }
        why
    }
}

async fn find_rule(
    scheduler: &SchedulerProxy<'_>,
    name: &str,
) -> Result<Option<HashMap<String, OwnedVariant>>, CtlError> {
    let is_text = |rule: &HashMap<String, OwnedVariant>, key: &str, text: &str| {
        rule.get(key).and_then(|value| <&str>::try_from(value).ok()) == Some(text)
    };
    let rules = scheduler.list_rules().await?;
    // Only a rule that was set at run time is returned, because rules of the configuration are
    // never changed.
    Ok(rules.into_iter().find(|rule| is_text(rule, "name", name) && is_text(rule, "origin", "set at run time")))
}

/// Undoes `adopt`.
///
/// # Errors
/// The rule or the drop-in cannot be removed. `release` still removes the other one.
pub fn release(target: &Target, server: &Server) -> Result<String, CtlError> {
    let asked = server.unit()?;
    let manager = server.manager();
    server.check_user(&asked, "release")?;
    block_on(async {
        // The adopted service may have been uninstalled.
        let systemd = Systemd::connect(manager).await;
        let known = match &systemd {
            Ok(systemd) => systemd.service(&asked).await.ok(),
            Err(_) => None,
        };
        let unit = known.map_or(asked, |service| service.id);
        let path = manager.path(&unit);
        let mut removed = Vec::new();
        let mut problems = Vec::new();
        let cannot = |e: std::io::Error| CtlError::Failed(format!("cannot remove {}: {e}", path.display()));
        let is_own = |text: String| drop_in::is_removed_by(&text, &server.undo(&unit));
        match drop_in::read(manager, &unit).map(|text| text.is_some_and(is_own)) {
            Ok(false) => {}
            Ok(true) => match drop_in::remove(manager, &unit) {
                Ok(_) => removed.push(format!("The next time {unit} starts, it does not preload the library.\n")),
                Err(e) => problems.push(cannot(e).to_string()),
            },
            Err(e) => problems.push(cannot(e).to_string()),
        }
        if !removed.is_empty() {
            let told = match &systemd {
                Ok(systemd) => systemd.reload().await.err().map(|e| e.to_string()),
                Err(e) => Some(e.to_string()),
            };
            removed.extend(told.map(|e| format!("  note: {e}\n")));
        }
        let name = rule_name(manager, &unit)?;
        let unset = async {
            let scheduler = target.connect().await?;
            let is_there = find_rule(&scheduler, &name).await?.is_some();
            if is_there {
                rules::call(&scheduler, &name, &[]).await?;
            }
            Ok::<_, CtlError>(is_there)
        };
        match unset.await {
            Ok(true) => removed.push(format!("Removed the rule {name:?}.\n")),
            Ok(false) => {}
            Err(e) => problems.push(format!("cannot remove the rule {name:?}: {e}")),
        }
        if server.restart && !removed.is_empty() {
            match systemd {
                Ok(systemd) => match systemd.restart(&unit).await {
                    Ok(()) => removed.push(format!("Restarted {unit}.\n")),
                    Err(e) => problems.push(e.to_string()),
                },
                Err(e) => problems.push(e.to_string()),
            }
        }
        match (problems.is_empty(), removed.is_empty()) {
            (true, true) => Ok(format!("{unit} is not adopted.\n")),
            (true, false) => Ok(removed.concat()),
            (false, _) => Err(CtlError::Failed(format!("{}{}", removed.concat(), problems.join("\n")))),
        }
    })
}

/// Returns instructions for starting a container. Containers are recreated rather than restarted,
/// so `adopt` on the host cannot change them.
pub fn container(server: &Server) -> String {
    let name = &server.unit;
    let keys = rule(Manager::System, "").into_iter().skip(1).map(|(key, value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("{key}={text}")
    });
    let keys = keys.collect::<Vec<_>>().join(" ");
    format!(
        "Start the container with nvshare's CDI device instead of --gpus or nvidia.com/gpu (see \
         nvshare-containers(7)):\n\n  docker run --device nvshare.com/gpu=0 --name {name} ...\n  podman run --device \
         nvshare.com/gpu=0 --name {name} ...\n\nThe CDI file is written by nvshare-cdi.service or `nvsharectl cdi \
         generate`. While the container runs, set a rule for a server:\n\n  sudo nvsharectl set-rule {name:?} \
         container=ID {keys}\n\nID is the first 12 digits of the container's ID, as `docker ps` and `podman ps` show \
         it.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::rules::Addition;

    #[test]
    fn the_servers_rule_is_valid() {
        for (manager, unit) in [(Manager::System, "ollama.service"), (Manager::User, "comfyui@.service")] {
            let name = rule_name(manager, unit).expect("short enough");
            let table = rule(manager, unit).into_iter().collect();
            let read = Addition::read(&name, &table).expect("a rule");
            assert!(read.rule().is_some_and(|rule| rule.limits.share.is_some_and(|share| share.interactive)));
        }
        assert!(rule_name(Manager::System, &format!("{}.service", "x".repeat(60))).is_err());
    }

    #[test]
    fn a_container_gets_its_start_options() {
        let text = container(&Server { unit: "vllm".into(), ..Server::default() });
        for part in ["--device nvshare.com/gpu=0 --name vllm", "container=ID interactive=true sleep-after=5min"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
