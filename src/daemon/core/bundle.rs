//! Debug bundles. The scheduling loop copies a snapshot, and another thread writes the snapshot to a
//! memfd.

use std::ffi::CStr;
use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde_json::{Value, json};

use super::recording::{header, process};
use super::routing::Core;
use super::view::{ClientView, View};
use crate::bus::{self, status::Status};
use crate::config::metrics::Listen;
use crate::config::{Config, names};
use crate::daemon::gpu::nvml::{DriverVersions, Sample};
use crate::identity::Identity;
use crate::recorder::Recording;
use crate::recorder::bundle::{self, Circumstances, Process, nanos};
use crate::scheduler::{ClientId, Time};
use crate::sys::clock;

/// The contents of a bundle.
#[derive(Debug)]
pub struct Snapshot {
    pub now: Time,
    pub config: Config,
    pub view: Arc<View>,
    /// Clients that have ended, newest last.
    pub ended: Vec<(ClientId, Arc<Identity>)>,
    /// The newest measurement of each GPU, by the GPU's label.
    pub samples: Vec<(String, Sample)>,
    pub driver: DriverVersions,
    pub recording: Recording,
}

impl Snapshot {
    /// Collects the contents of a debug bundle, including this view. The contents are formatted and written
    /// outside the scheduling loop.
    pub fn new(core: &Core, view: Arc<View>) -> Self {
        let Core { model, observe, .. } = core;
        let samples = model.gpus.iter().filter_map(|(id, gpu)| Some((gpu.label(*id), gpu.sample.clone()?)));
        Self {
            now: clock::now(),
            config: model.config.clone(),
            view,
            ended: observe.ended.iter().cloned().collect(),
            samples: samples.collect(),
            driver: model.driver.clone(),
            recording: observe.recorder.recording(),
        }
    }

    /// Writes the bundle to a sealed memfd. If `command_lines` is false, command lines and program names
    /// are left out, and limits from the environment are reduced to numbers.
    pub fn write(self, command_lines: bool) -> Result<OwnedFd, String> {
        let recording = self.recording.clone();
        let circumstances = self.circumstances(command_lines);
        let written = sealed(c"nvshare-debug", |file| bundle::write(file, &circumstances, &recording));
        written.map_err(|e| e.to_string())
    }

    fn circumstances(self, command_lines: bool) -> Circumstances {
        let Self { now, config, view, ended, samples, driver, recording: _ } = self;
        let (problems, gpus) = (view.problems().to_vec(), Arc::unwrap_or_clone(view.list_gpus()));
        let clients = view.list_clients();
        let settings = &config.settings;
        let living = clients.iter().map(|client| (client.id, &client.identity));
        let processes = ended.iter().map(|(client, identity)| (*client, identity)).chain(living);
        let processes = processes.map(|(client, identity)| match process(client, identity, false) {
            named if command_lines => named,
            named => Process { name: String::new(), ..named },
        });
        let processes = processes.collect();
        let status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            time_quantum: settings.time_quantum.as_secs() as u32,
            max_wait: settings.max_wait.as_secs() as u32,
            anti_thrash: names::anti_thrash_name(settings.anti_thrash).into(),
            policy: names::policy_name(settings.policy).into(),
            problems,
            gpus,
            clients: clients.iter().map(|client| visible(client, command_lines)).collect(),
        };
        let nvml = samples.iter().map(|(uuid, sample)| {
            let Sample { gpu: _, begun, steady, used, reserved, graphics, processes } = sample;
            json!({
                "uuid": uuid, "begun-ns": nanos(*begun), "steady": steady, "used": used, "reserved": reserved,
                "graphics": graphics, "processes": processes
            })
        });
        let nvml = json!({ "gpus": nvml.collect::<Vec<_>>() });
        let (header, configuration) = (header(now, driver, command_lines), configuration(&config));
        Circumstances { header, clients: processes, configuration, status: status.json(), nvml }
    }
}

/// Creates a sealed memfd with the data that `write` writes. The memfd's file offset is 0.
pub(super) fn sealed(
    name: &CStr,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> std::io::Result<OwnedFd> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    let mut buffer = BufWriter::with_capacity(64 << 10, file);
    write(&mut buffer)?;
    buffer.flush()?;
    let mut file = buffer.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    file.rewind()?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    Ok(file.into())
}

fn visible(client: &ClientView, command_lines: bool) -> bus::Client {
    let client = client.present(command_lines);
    match command_lines {
        true => client,
        // `environment_ignored` is cleared too: its remarks quote environment variables.
        false => bus::Client { name: String::new(), why: String::new(), environment_ignored: Vec::new(), ..client },
    }
}

/// The keys of the configuration file, with the values in effect.
fn configuration(config: &Config) -> Value {
    let Config {
        settings,
        sets_sleep_after: _,
        max_clients_per_tenant,
        log_level,
        swap_max,
        swap_ahead,
        swap_file,
        swap_file_max,
        metrics,
        metrics_of_programs,
        keep_usage,
        rules,
    } = config;
    let rules = rules.all().map(|rule| {
        let mut keys = rule.to_table();
        keys.insert("origin".into(), rule.origin.to_string().into());
        keys
    });
    let metrics = if *metrics == Listen::Nowhere { String::new() } else { metrics.to_string() };
    json!({
        "time-quantum": format!("{}s", settings.time_quantum.as_secs()),
        "max-wait": format!("{}s", settings.max_wait.as_secs()),
        "time-period": format!("{}s", settings.time_period.as_secs()),
        "anti-thrash": names::anti_thrash_name(settings.anti_thrash),
        "policy": names::policy_name(settings.policy),
        "placement": settings.placement,
        "sleep-after": settings.sleep_after.map_or("never".into(), |after| format!("{}s", after.as_secs())),
        "max-clients-per-tenant": max_clients_per_tenant,
        "log-level": log_level,
        "memory": { "reserve": settings.reserve, "context": settings.context },
        "swap": { "max": swap_max.to_string(), "ahead": swap_ahead.to_string(), "file": swap_file, "file-max": swap_file_max.to_string() },
        "metrics": { "listen": metrics, "programs": metrics_of_programs },
        "accounting": { "keep": format!("{}s", keep_usage.as_secs()) },
        "rule": rules.collect::<Vec<_>>(),
    })
}
