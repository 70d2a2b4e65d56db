//! CDI edits of a container: variables, device nodes, mounts, hooks. Unknown keys are passed on
//! unchanged.
//!
//! Each bind mount has a type, which CDI and the runtimes make optional: crun 1.21 crashes when it
//! restores a container with a mount without one. The files that `nvidia-ctk` writes name no types.

use serde_json::{Map, Value, json};

const BIND: &str = "bind";

fn is_bind(mount: &Value) -> bool {
    let options = mount.get("options").and_then(Value::as_array);
    options.is_some_and(|options| options.iter().any(|option| option == BIND || option == "rbind"))
}

fn name_type(mount: &mut Value) {
    if let Value::Object(mount) = mount {
        mount.entry("type").or_insert_with(|| json!(BIND));
    }
}

/// The value of `containerEdits`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Edits(Map<String, Value>);

impl Edits {
    /// Returns the edits of a file or of one of its devices, or no edits if the key is missing.
    pub fn of(parent: &Value) -> Self {
        let mut edits = parent.get("containerEdits").and_then(Value::as_object).cloned().unwrap_or_default();
        if let Some(Value::Array(mounts)) = edits.get_mut("mounts") {
            mounts.iter_mut().filter(|mount| is_bind(mount)).for_each(name_type);
        }
        Self(edits)
    }

    /// Adds the edits of `other` that are missing.
    pub fn merge(&mut self, other: &Self) {
        for (key, theirs) in &other.0 {
            match (self.0.get_mut(key), theirs) {
                (Some(Value::Array(mine)), Value::Array(theirs)) => {
                    let new: Vec<Value> = theirs.iter().filter(|item| !mine.contains(item)).cloned().collect();
                    mine.extend(new);
                }
                (Some(_), _) => {}
                (None, _) => drop(self.0.insert(key.clone(), theirs.clone())),
            }
        }
    }

    /// Mounts a path of the host read-only in the container.
    pub fn mount(&mut self, host: &str, container: &str) {
        // The bind mount is not recursive, so mounts below the socket's directory stay outside
        // containers.
        let options = ["ro", "nosuid", "nodev", "noexec", "bind"];
        // Only a library needs `exec`, because the loader maps it as executable.
        let options: &[&str] = if container.ends_with(".so") { &["ro", "nosuid", "nodev", "bind"] } else { &options };
        let mount = json!({ "hostPath": host, "containerPath": container, "type": BIND, "options": options });
        self.push("mounts", mount);
    }

    pub fn variable(&mut self, name: &str, value: &str) {
        self.push("env", json!(format!("{name}={value}")));
    }

    pub fn device_node(&mut self, path: &str) {
        self.push("deviceNodes", json!({ "path": path }));
    }

    /// Adds a `createContainer` hook. Before a runtime changes to the container's root, it calls
    /// this program of the host.
    pub fn create_hook(&mut self, program: &str, arguments: &[&str]) {
        self.push("hooks", json!({ "hookName": "createContainer", "path": program, "args": arguments }));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn json(&self) -> Value {
        Value::Object(self.0.clone())
    }

    fn push(&mut self, key: &str, item: Value) {
        if let Value::Array(all) = self.0.entry(key).or_insert_with(|| json!([])) {
            all.push(item);
        }
    }
}
