//! Formats a snapshot as OpenMetrics 1.0.
//!
//! The registry's own metric types keep values between scrapes, so values of thousands of ended clients
//! would accumulate. A collector is used instead, and encodes only current values.

use std::fmt::Error;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabel, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::families::{COMMON, Family, OF_GPUS, OF_GROUPS, OF_PROGRAMS, OF_WORKLOADS, Value};
use super::snapshot::{OfClient, OfGpu, OfWorkload, Snapshot};
use crate::daemon::core::{GroupStall, Workload, container_name};
use crate::identity::Identity;

pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Average size of a client's metrics in bytes. The buffer for the text is allocated with this
/// estimate, so that it rarely grows.
const BYTES_A_CLIENT: usize = 4096;

/// Formats all metrics.
pub fn written(snapshot: Snapshot) -> Result<String, Error> {
    let parts = 1 + snapshot.workloads.len() + snapshot.clients.len();
    let mut text = String::with_capacity(parts * BYTES_A_CLIENT);
    let mut registry = Registry::default();
    registry.register("nvshare_build", "The scheduler", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
    registry.register_collector(Box::new(Exposition(snapshot)));
    encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Exposition(Snapshot);

impl Collector for Exposition {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), Error> {
        let Snapshot { gpus, workloads, clients, groups } = &self.0;
        let out = &mut encoder;
        OF_GPUS.iter().try_for_each(|family| write(out, "nvshare_gpu", family, gpus, |gpu| gpu))?;
        OF_GROUPS.iter().try_for_each(|family| write(out, "nvshare_pressure", family, groups, |group| group))?;
        OF_WORKLOADS.iter().try_for_each(|family| write(out, "nvshare_workload", family, workloads, |it| it))?;
        COMMON.iter().try_for_each(|family| write(out, "nvshare_gpu", family, gpus, |gpu| &gpu.used))?;
        COMMON.iter().chain(&OF_PROGRAMS).try_for_each(|family| {
            write(out, "nvshare_workload", family, workloads, |workload| &workload.used)?;
            write(out, "nvshare_client", family, clients, |client| &client.used)
        })
    }
}

/// Writes a family if it has any values. `of`: the part of a thing that has the family's value.
fn write<T: EncodeLabelSet, P>(
    encoder: &mut DescriptorEncoder,
    prefix: &str,
    family: &Family<P>,
    all: &[T],
    of: fn(&T) -> &P,
) -> Result<(), Error> {
    let mut some = all.iter().filter(|one| family.value.is_there(of(one))).peekable();
    if some.peek().is_none() {
        return Ok(());
    }
    let name = format!("{prefix}_{}", family.name);
    let mut metrics = encoder.encode_descriptor(&name, family.help, family.unit.as_ref(), family.value.kind())?;
    some.try_for_each(|one| value(metrics.encode_family(one)?, &family.value, of(one)))
}

fn value<T>(mut metric: MetricEncoder, value: &Value<T>, one: &T) -> Result<(), Error> {
    match value {
        Value::Counter(of) => metric.encode_counter::<NoLabelSet, u64, u64>(&of(one), None),
        Value::Time(of) => metric.encode_counter::<NoLabelSet, f64, u64>(&of(one).as_secs_f64(), None),
        Value::Gauge(of) => of(one).map_or(Ok(()), |number| metric.encode_gauge(&number)),
        Value::Age(of) => of(one).map_or(Ok(()), |time| metric.encode_gauge(&time.as_secs_f64())),
        Value::Waits(of) => {
            let waits = of(one);
            let buckets: Vec<(f64, u64)> = waits.buckets().collect();
            metric.encode_histogram::<NoLabelSet>(waits.sum().as_secs_f64(), waits.count(), &buckets, None)
        }
    }
}

impl EncodeLabelSet for OfGpu {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> Result<(), Error> {
        let index = self.index.map(|index| index.to_string()).unwrap_or_default();
        labels(encoder, &[("gpu", &self.uuid), ("index", &index), ("name", &self.name)])
    }
}

impl EncodeLabelSet for GroupStall {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> Result<(), Error> {
        labels(encoder, &[("kind", self.kind), ("name", &self.name)])
    }
}

impl EncodeLabelSet for OfWorkload {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> Result<(), Error> {
        let Workload { tenant, unit, container, pod, namespace } = &self.workload;
        let all = [
            ("gpu", &*self.gpu),
            ("tenant", tenant),
            ("unit", unit),
            ("container", container),
            ("pod", pod),
            ("namespace", namespace),
        ];
        labels(encoder, &all)
    }
}

impl EncodeLabelSet for OfClient {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> Result<(), Error> {
        let Identity { pid, uid, name, unit, pod, .. } = &*self.identity;
        let container = container_name(&self.identity);
        let (client, pid, uid) = (self.client.to_string(), pid.to_string(), uid.to_string());
        let all = [
            ("gpu", &*self.gpu),
            ("client", &client),
            ("pid", &pid),
            ("uid", &uid),
            ("name", name),
            ("unit", unit),
            ("container", container),
            ("pod", &pod.name),
            ("namespace", &pod.namespace),
        ];
        labels(encoder, &all)
    }
}

fn labels(encoder: &mut LabelSetEncoder, all: &[(&str, &str)]) -> Result<(), Error> {
    all.iter().try_for_each(|label| label.encode(encoder.encode_label()))
}
