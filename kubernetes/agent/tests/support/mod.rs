//! A node in a separate directory: the real scheduler, the agent, and a stand-in for the API
//! server.

pub mod api;
pub mod containers;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nvshare::bus::{Client, SchedulerProxy};
use tempfile::TempDir;
use zbus::OwnedVariant;
use zbus::connection::Builder;

use api::Api;
use kubernetes_test_support::{NODE, Process};

const AGENT: &str = env!("CARGO_BIN_EXE_nvshare-agent");

/// The node. Dropping this value ends all processes of the node.
#[derive(Debug)]
pub struct Node {
    directory: TempDir,
    pub api: Api,
}

/// A rule in the scheduler's list.
pub type Rule = HashMap<String, OwnedVariant>;

impl Node {
    pub fn new() -> Self {
        let node = Self { directory: TempDir::new().expect("a directory"), api: Api::start() };
        std::fs::write(node.path("kubeconfig"), node.api.kubeconfig()).expect("a file");
        node
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn control(&self) -> PathBuf {
        self.path("control/control.sock")
    }

    pub fn clients(&self) -> PathBuf {
        self.path("run/scheduler.sock")
    }

    /// Writes the agent's configuration.
    pub fn configure(&self, text: &str) {
        std::fs::write(self.path("agent.toml"), text).expect("a file");
    }

    /// Writes the scheduler's configuration.
    pub fn rule(&self, text: &str) {
        std::fs::write(self.path("nvshare.toml"), format!("[[rule]]\n{text}\n")).expect("a file");
    }

    pub fn scheduler(&self) -> Process {
        let program = Path::new(AGENT).parent().expect("a directory").join("nvshare-scheduler");
        assert!(program.exists(), "{} is missing: cargo build --workspace makes it", program.display());
        let mut command = Command::new(program);
        command.arg("--socket").arg(self.clients()).arg("--control-socket").arg(self.control()).arg("--no-bus");
        if self.path("nvshare.toml").exists() {
            command.arg("--config").arg(self.path("nvshare.toml"));
        }
        command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM").env_remove("STATE_DIRECTORY");
        let process = Process::start("scheduler", command);
        process.log.wait("serves");
        process
    }

    fn agent_command(&self) -> Command {
        let mut command = Command::new(AGENT);
        command.arg("--kubeconfig").arg(self.path("kubeconfig")).arg("--control").arg(self.control());
        command.arg("--socket").arg(self.path("agent/agent.sock")).env("NODE_NAME", NODE).stdin(Stdio::null());
        if self.path("agent.toml").exists() {
            command.arg("--config").arg(self.path("agent.toml"));
        }
        command
    }

    pub fn agent(&self) -> Process {
        let mut command = self.agent_command();
        command.args(["--log-level", "debug"]);
        Process::start("agent", command)
    }

    /// Runs the agent with a flag that makes it print an answer and exit.
    pub fn ask_agent(&self, flag: &str) -> Output {
        self.agent_command().arg(flag).output().expect("the agent starts")
    }

    /// Returns the probe's complaint, which is empty if both connections are up.
    pub fn probe(&self) -> String {
        let output = self.ask_agent("--probe");
        let said = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.success(), said.is_empty(), "{said}");
        said
    }

    /// Queries the scheduler. Returns `None` if the scheduler does not answer yet.
    fn ask<T>(&self, question: impl AsyncFn(&SchedulerProxy<'_>) -> zbus::Result<T>) -> Option<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let stream = UnixStream::connect(self.control()).ok()?;
        runtime.block_on(async {
            let connection = Builder::unix_stream(stream).p2p().build().await.ok()?;
            let proxy = SchedulerProxy::new(&connection).await.ok()?;
            question(&proxy).await.ok()
        })
    }

    /// The rules of pods, by name.
    pub fn rules(&self) -> HashMap<String, Rule> {
        let rules = self.ask(async |scheduler| scheduler.list_rules().await).expect("the scheduler answers");
        let named = |rule: Rule| Some((text(rule.get("name")?)?, rule));
        rules.into_iter().filter_map(named).collect()
    }

    pub fn clients_listed(&self) -> Vec<Client> {
        self.ask(async |scheduler| scheduler.list_clients().await).expect("the scheduler answers")
    }

    /// Waits until the query has a result, and returns it.
    #[track_caller]
    pub fn until<T>(&self, what: &str, question: impl Fn(&Self) -> Option<T>) -> T {
        kubernetes_test_support::until(what, || question(self))
    }

    /// Waits until the pod's rule has this value for the key.
    #[track_caller]
    pub fn until_rule(&self, pod: &str, key: &str, value: &str) {
        self.until(&format!("{pod} with {key} = {value}"), |node| {
            let said = said(node.rules().get(pod)?, key)?;
            (said == value).then_some(())
        });
    }

    #[track_caller]
    pub fn until_no_rule(&self, pod: &str) {
        self.until(&format!("no rule of {pod}"), |node| (!node.rules().contains_key(pod)).then_some(()));
    }
}

/// A value of a rule as a text.
pub fn said(rule: &Rule, key: &str) -> Option<String> {
    let value = rule.get(key)?;
    Some(text(value).unwrap_or_else(|| match &**value {
        zbus::Variant::I64(number) => number.to_string(),
        zbus::Variant::Bool(value) => value.to_string(),
        other => format!("{other:?}"),
    }))
}

fn text(value: &OwnedVariant) -> Option<String> {
    match &**value {
        zbus::Variant::Str(text) => Some(text.to_string()),
        _ => None,
    }
}
