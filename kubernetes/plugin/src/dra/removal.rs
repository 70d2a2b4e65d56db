//! Checks whether the driver can be removed. Only the driver can release a claim. Without the
//! driver, pods with a claim stay `Terminating`, and only kubelet's own log gives the reason.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, ObjectMeta, PostParams};
use kube::{Api, Client, Error};
use nvshare_kubernetes::api_server::{self, causes, message};
use tokio::time::timeout;

use super::DRIVER;

/// Timeout for the API server's answer.
const ANSWER: Duration = Duration::from_secs(30);

/// The maximum number of pods that an error names.
const NAMED: usize = 10;

/// The reason and the text of each pod's event.
const REASON: &str = "DriverInUse";
const EVENT: &str = "nvshare's DRA driver is being removed, but this pod still has a claim. Delete the pod first: \
    without the driver it would stay Terminating";

/// A pod with a claim of the driver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Pod {
    namespace: String,
    name: String,
    uid: String,
}

/// Checks that no pod of the cluster has a claim of the driver. Creates an event for each pod that
/// has a claim.
///
/// # Errors
/// Pods have claims, or the API server cannot be queried.
pub async fn check(kubeconfig: Option<&Path>) -> Result<(), String> {
    let client = api_server::client(kubeconfig).await?;
    let claims: Api<ResourceClaim> = Api::all(client.clone());
    let claims = ask("list ResourceClaims", claims.list(&ListParams::default())).await?.items;
    let pods: BTreeMap<Pod, String> = claims.iter().flat_map(users).collect();
    if pods.is_empty() {
        return Ok(());
    }
    for pod in pods.keys() {
        if let Err(why) = tell(&client, pod).await {
            eprintln!("nvshare-device-plugin: cannot create an event for pod {}/{}: {why}", pod.namespace, pod.name);
        }
    }
    let named = pods.iter().take(NAMED).map(|(pod, claim)| format!("{}/{} (claim {claim})", pod.namespace, pod.name));
    let named: Vec<String> = named.collect();
    let more = pods.len().saturating_sub(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Err(format!(
        "cannot remove the driver {DRIVER}, because these pods have claims and would stay Terminating without \
         it: {}{more}. Delete them first",
        named.join(", ")
    ))
}

/// Returns the pods that use the claim, each with the claim's name. Returns an empty list if the
/// claim has no device of the driver.
fn users(claim: &ResourceClaim) -> Vec<(Pod, String)> {
    let Some(status) = &claim.status else { return Vec::new() };
    let devices = status.allocation.as_ref().and_then(|allocation| allocation.devices.as_ref());
    let mut results = devices.iter().flat_map(|devices| devices.results.iter().flatten());
    if !results.any(|result| result.driver == DRIVER) {
        return Vec::new();
    }
    let namespace = claim.metadata.namespace.clone().unwrap_or_default();
    let name = claim.metadata.name.clone().unwrap_or_default();
    let users = status.reserved_for.iter().flatten().filter(|user| user.resource == "pods");
    let pod = |name: &str, uid: &str| Pod { namespace: namespace.clone(), name: name.into(), uid: uid.into() };
    users.map(|user| (pod(&user.name, &user.uid), name.clone())).collect()
}

async fn tell(client: &Client, pod: &Pod) -> Result<(), String> {
    let now = Some(Time(Timestamp::now()));
    let event = Event {
        metadata: ObjectMeta {
            generate_name: Some("nvshare-".into()),
            namespace: Some(pod.namespace.clone()),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        },
        type_: Some("Warning".into()),
        reason: Some(REASON.into()),
        message: Some(EVENT.into()),
        source: Some(EventSource { component: Some("nvshare-device-plugin".into()), host: None }),
        count: Some(1),
        first_timestamp: now.clone(),
        last_timestamp: now,
        ..Event::default()
    };
    let events: Api<Event> = Api::namespaced(client.clone(), &pod.namespace);
    ask("create events", events.create(&PostParams::default(), &event)).await.map(drop)
}

async fn ask<T>(what: &str, asking: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match timeout(ANSWER, asking).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(Error::Api(status))) => Err(format!(
            "the API server does not allow this program to {what}. Apply dra/access.yaml ({})",
            message(&status)
        )),
        Ok(Err(e)) => Err(format!("cannot reach the API server: {}", causes(&e))),
        Err(_) => Err(format!("the API server has not answered for {} s", ANSWER.as_secs())),
    }
}
