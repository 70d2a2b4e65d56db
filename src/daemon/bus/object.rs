//! The methods and properties of the object.

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_hibernate::{Image, Place, Request as ImageRequest};
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{BoxDBusError, Connection, OwnedVariant, fdo};

use super::callers::{Caller, Callers};
use super::options::{self, BundleOptions, HibernationOptions, NoOptions};
use super::{Shared, seconds};
use crate::bus::{self, Error, rules};
use crate::config::rules::Addition;
use crate::config::{names, settings};
use crate::daemon::connections::lock::{self, LockRequest};
use crate::daemon::connections::room;
use crate::daemon::control::Control;
use crate::daemon::control::changes::Changed;
use crate::daemon::core::bundle::Snapshot;
use crate::daemon::core::claims::Claims;
use crate::daemon::core::describe::Reader;
use crate::daemon::core::pods::Pods;
use crate::daemon::core::timeline::Viewer;
use crate::daemon::core::{ClientView, Holders, RoomRequest, View, check_room};
use crate::daemon::hibernate;
use crate::daemon::tenants::{Budget, Share};
use crate::daemon::usage::{Amounts, Column, Key, Query};
use crate::scheduler::ClientId;

/// Minimum pause between two answers to queries for usage.
const USAGE_PERIOD: Duration = Duration::from_millis(50);

/// Minimum pause after a timeline. The pause also lasts at least `TIMELINE_REST` times as long as
/// creating the timeline.
const TIMELINE_PERIOD: Duration = Duration::from_millis(500);
const TIMELINE_REST: u32 = 4;

/// Time after the last live timeline for which the reader of the recording is kept.
const FOLLOWER_REST: Duration = Duration::from_secs(30);

/// The object whose methods zbus's macro calls. A call can wait while a user types a password, so every
/// method takes `&self`. [`super::served`] explains the consequences.
#[derive(Debug)]
pub struct Object {
    pub shared: Shared,
    pub callers: Callers,
}

#[zbus::interface(name = "org.nvshare.Scheduler1", introspection_docs = false)]
impl Object {
    #[zbus(out_args("gpus"))]
    async fn list_gpus(&self, #[zbus(header)] header: Header<'_>) -> Result<Vec<bus::Gpu>, BoxDBusError> {
        self.admit_reader(&header).await?;
        Ok(self.read(|view| view.list_gpus()).await.map(Arc::unwrap_or_clone)?)
    }

    #[zbus(out_args("clients"))]
    async fn list_clients(&self, #[zbus(header)] header: Header<'_>) -> Result<Vec<bus::Client>, BoxDBusError> {
        let caller = self.admit_reader(&header).await?;
        let clients = self.read(|view| view.list_clients()).await?;
        let uid = caller.as_ref().map(Caller::uid);
        let is_hidden = |client: &ClientView| Some(client.identity.uid) != uid && !client.identity.command.is_empty();
        let sees_all = match caller {
            Some(caller) if clients.iter().any(is_hidden) => caller.sees_all().await,
            _ => false,
        };
        let may_see = |client: &ClientView| sees_all || Some(client.identity.uid) == uid;
        Ok(clients.iter().map(|client| client.present(may_see(client))).collect())
    }

    #[zbus(out_args("groups"))]
    async fn list_pressure(&self, #[zbus(header)] header: Header<'_>) -> Result<Vec<bus::Pressure>, BoxDBusError> {
        self.admit_reader(&header).await?;
        Ok(self.read(|view| view.list_pressure()).await?)
    }

    #[zbus(out_args("description"))]
    async fn describe(
        &self,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, BoxDBusError> {
        let selection = options::selection(&options)?;
        let caller = self.admit_reader(&header).await?;
        // Only the description of one process shows a command line.
        let sees_all = match &caller {
            Some(caller) if selection.pid.is_some() => caller.sees_all().await,
            _ => false,
        };
        let reader = Reader { uid: caller.map(|caller| caller.uid()), sees_all };
        Ok(self.read(move |view| view.describe(&selection, reader)).await??)
    }

    #[zbus(out_args("timeline"))]
    async fn describe_timeline(
        &self,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<String, BoxDBusError> {
        let (gpu, last) = options::live_timeline(&options)?;
        let (viewer, _place) = self.admit_viewer(&header).await?;
        let mut following = self.shared.following.clone().lock_owned().await;
        let snapshot = self.snapshot().await?;
        let drawn = tokio::task::spawn_blocking(move || {
            let drawn = snapshot.live_timeline(&mut following.follower, &viewer, last, gpu.as_deref());
            following.drawn += 1;
            (drawn, following.drawn)
        });
        let (drawn, number) = drawn.await.map_err(|e| Error::Stopping(format!("the scheduler is stopping: {e}")))?;
        let following = self.shared.following.clone();
        tokio::spawn(async move {
            tokio::time::sleep(FOLLOWER_REST).await;
            let mut following = following.lock().await;
            if following.drawn == number {
                following.follower = None;
            }
        });
        Ok(drawn.map_err(|e| fdo::Error::Failed(format!("cannot make a timeline: {e}")))?)
    }

    #[zbus(out_args("permissions"))]
    async fn list_permissions(
        &self,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<HashMap<String, bool>, BoxDBusError> {
        Ok(self.callers.identify(Some(&header)).await?.permissions().await)
    }

    #[zbus(out_args("sentences"))]
    async fn explain(&self, pid: u32, #[zbus(header)] header: Header<'_>) -> Result<Vec<String>, BoxDBusError> {
        self.admit_reader(&header).await?;
        Ok(self.read(move |view| view.explain(pid)).await??)
    }

    #[zbus(out_args("usage"))]
    async fn list_usage(
        &self,
        since: f64,
        by: Vec<String>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<bus::Usage>, BoxDBusError> {
        let by = by.iter().map(|name| Column::parse(name)).collect::<Result<BTreeSet<_>, _>>();
        let by = by.map_err(fdo::Error::InvalidArgs)?;
        let caller = self.callers.identify(Some(&header)).await?;
        let identity = caller.identity("read usage records")?;
        let tenant = (!caller.sees_all().await).then(|| identity.tenant.to_string());
        let _place = caller.admit_query()?;
        let turn = self.shared.reading_usage.clone().lock_owned().await;
        let query = Query { since, by: by.clone(), tenant };
        let rows = self.ask(|control, reply| control.read_usage(query, reply)).await?;
        // For each answer, the scheduling loop reads all clients. The pause leaves the loop time for other
        // work before the next query.
        tokio::spawn(async move {
            tokio::time::sleep(USAGE_PERIOD).await;
            drop(turn);
        });
        let rows = rows.map_err(|why| fdo::Error::Failed(format!("cannot read usage records: {why}")))?;
        Ok(rows.into_iter().map(|(key, amounts)| present_usage(key, &amounts, &by)).collect())
    }

    #[zbus(out_args("lock"))]
    async fn acquire_lock(
        &self,
        gpu: String,
        who: String,
        why: String,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<bus::LockFd, BoxDBusError> {
        let NoOptions {} = options::parse(&options)?;
        let caller = self.callers.identify(Some(&header)).await?;
        let request = LockRequest { gpu, who, why, caller: caller.identity("acquire a lock")? };
        // The request is checked before authorization, so that no user types a password for an
        // invalid request.
        let checked = request.clone();
        let lockable = self.on_loop(move |control| lock::check(&control.core.borrow(), &checked)).await??;
        caller.may_lock(&lockable).await?;
        let acquire = |control: &Rc<Control>| lock::acquire(&control.core, &control.connections, request);
        Ok(self.on_loop(acquire).await??.into())
    }

    #[zbus(out_args("room"))]
    async fn make_room(
        &self,
        gpu: String,
        bytes: u64,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<bus::RoomFd, BoxDBusError> {
        let lasts = options::room(&options)?;
        let caller = self.callers.identify(Some(&header)).await?;
        let request = RoomRequest { gpu, bytes, lasts, caller: caller.identity("reserve memory of a GPU")? };
        // The request is checked before authorization, so that no user types a password for an
        // invalid request.
        let checked = request.clone();
        let gpu = self.on_loop(move |control| check_room(&control.core.borrow().model, &checked)).await??;
        caller.may_make_room(&gpu).await?;
        Ok(self.ask(|control, reply| room::make(&control.core, request, reply)).await??.into())
    }

    async fn terminate_lock(&self, client: u64, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        let what = format!("end the lock of client {client}");
        self.callers.identify(Some(&header)).await?.may_change(&what, "").await?;
        Ok(self.on_loop(move |control| control.core.borrow().model.end_lock(ClientId(client))).await??)
    }

    async fn pause(&self, pid: u32, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        self.set_paused(pid, true, &header).await
    }

    async fn resume(&self, pid: u32, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        self.set_paused(pid, false, &header).await
    }

    async fn migrate(&self, pid: u32, gpu: String, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        let what = format!("move process {pid} to another GPU");
        let users = self.authorize_for(pid, &what, &header).await?;
        Ok(self.ask(move |control, reply| control.migrate(pid, &gpu, &users, reply)).await??)
    }

    #[zbus(out_args("image"))]
    async fn hibernate(
        &self,
        pid: u32,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<String, BoxDBusError> {
        let HibernationOptions { close_connections } = options::parse(&options)?;
        let what = format!("hibernate process {pid}");
        let caller = self.callers.identify(Some(&header)).await?;
        caller.may_see_others()?;
        let tree = self.run(move |control| async move { hibernate::find_tree(&control.core, pid).await }).await??;
        caller.may_pause(&tree.users, &what).await?;
        let budget = caller.budget().clone();
        // If the caller leaves, the dropped request cancels the hibernation.
        tokio::select! {
            image = self.ask(move |control, reply| hibernate::save(&control.core, budget, tree, close_connections, reply)) => {
                Ok(image??.name)
            }
            () = caller.leaves(connection) => Err(fdo::Error::Failed(format!("cannot {what}: the caller has left")).into()),
        }
    }

    #[zbus(out_args("pid"))]
    async fn restore(&self, image: String, #[zbus(header)] header: Header<'_>) -> Result<u32, BoxDBusError> {
        let (uid, budget) = self.authorize_for_image(&image, "restore", &header).await?;
        Ok(self.run(move |control| hibernate::restore(control.core.clone(), budget, uid, image)).await??)
    }

    #[zbus(out_args("images"))]
    async fn list_hibernated(&self, #[zbus(header)] header: Header<'_>) -> Result<Vec<bus::Image>, BoxDBusError> {
        let caller = self.callers.identify(Some(&header)).await?;
        caller.may_see_others()?;
        let uid = if caller.sees_all().await { None } else { Some(caller.own_user()) };
        let budget = caller.budget().clone();
        let images = self.run(move |_| hibernate::list(budget, uid)).await??;
        Ok(images.iter().map(present_image).collect())
    }

    #[zbus(out_args("lacks"))]
    async fn check_hibernated(
        &self,
        image: String,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<String>, BoxDBusError> {
        let (uid, budget) = self.authorize_for_image(&image, "check", &header).await?;
        Ok(self.run(move |control| hibernate::compare(control.core.clone(), budget, uid, image)).await??)
    }

    async fn send_hibernated(
        &self,
        image: String,
        host: String,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), BoxDBusError> {
        self.change_image(image, "send", &header, |uid, image| ImageRequest::Send { uid, image, host }).await
    }

    async fn claim_hibernated(&self, image: String, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        self.change_image(image, "claim", &header, |uid, image| ImageRequest::Claim { uid, image }).await
    }

    async fn delete_hibernated(&self, image: String, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        self.change_image(image, "delete", &header, |uid, image| ImageRequest::Delete { uid, image }).await
    }

    async fn drain(&self, gpu: String, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        self.set_drained(gpu, true, &header).await
    }

    async fn undrain(&self, gpu: String, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        self.set_drained(gpu, false, &header).await
    }

    #[zbus(out_args("rules"))]
    async fn list_rules(
        &self,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<Vec<HashMap<String, OwnedVariant>>, BoxDBusError> {
        self.admit_reader(&header).await?;
        let rules = self.read(|view| view.rules()).await?;
        Ok(rules.into_iter().map(|(keys, origin)| rules::present(keys, origin)).collect())
    }

    async fn set_rule(
        &self,
        name: String,
        rule: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), BoxDBusError> {
        let keys = rules::table(&rule).map_err(fdo::Error::InvalidArgs)?;
        // The caller is authorized before the rule is parsed, because parsing may query a directory
        // service for users.
        let caller = self.callers.identify(Some(&header)).await?;
        caller.may_change(&format!("change the rule {name:?}"), &name).await?;
        let addition = Addition::read(&name, &keys).map_err(fdo::Error::InvalidArgs)?;
        let by = caller.label();
        Ok(self.run(|control| async move { control.set_rule(addition, &by).await }).await??)
    }

    #[zbus(out_args("refused"))]
    async fn set_pods(
        &self,
        pods: Vec<bus::Pod>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<HashMap<String, String>, BoxDBusError> {
        self.callers.identify(Some(&header)).await?.may_change("set the pods of this node", "").await?;
        let (pods, mut refused) = Pods::read(pods).map_err(fdo::Error::InvalidArgs)?;
        refused.extend(self.on_loop(|control| control.set_pods(pods)).await?);
        Ok(refused)
    }

    #[zbus(out_args("refused"))]
    async fn set_claims(
        &self,
        claims: Vec<bus::Claim>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<HashMap<String, String>, BoxDBusError> {
        self.callers.identify(Some(&header)).await?.may_change("set the claims of this node", "").await?;
        let (claims, mut refused) = Claims::read(claims).map_err(fdo::Error::InvalidArgs)?;
        refused.extend(self.on_loop(|control| control.set_claims(claims)).await??);
        Ok(refused)
    }

    #[zbus(out_args("bundle"))]
    async fn create_debug_bundle(
        &self,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<bus::BundleFd, BoxDBusError> {
        let BundleOptions { command_lines } = options::parse(&options)?;
        self.callers.identify(Some(&header)).await?.may_debug().await?;
        let _one_at_a_time = self.shared.bundling.lock().await;
        let snapshot = self.snapshot().await?;
        let written = tokio::task::spawn_blocking(move || snapshot.write(command_lines)).await;
        let failed = |e: String| fdo::Error::Failed(format!("cannot make a debug bundle: {e}"));
        Ok(written.map_err(|e| failed(e.to_string()))?.map_err(failed)?.into())
    }

    #[zbus(out_args("timeline"))]
    async fn create_timeline(&self, #[zbus(header)] header: Header<'_>) -> Result<bus::BundleFd, BoxDBusError> {
        let (viewer, _place) = self.admit_viewer(&header).await?;
        let turn = self.shared.drawing.clone().lock_owned().await;
        let begin = Instant::now();
        let snapshot = self.snapshot().await?;
        let written = tokio::task::spawn_blocking(move || snapshot.timeline(&viewer)).await;
        // Replaying a recording keeps a processor busy for a while. However often timelines are requested, the
        // pause limits them to a small part of one processor.
        let rest = TIMELINE_PERIOD.max(begin.elapsed() * TIMELINE_REST);
        tokio::spawn(async move {
            tokio::time::sleep(rest).await;
            drop(turn);
        });
        let failed = |e: String| fdo::Error::Failed(format!("cannot make a timeline: {e}"));
        Ok(written.map_err(|e| failed(e.to_string()))?.map_err(failed)?.into())
    }

    async fn reload(&self, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        let caller = self.callers.identify(Some(&header)).await?;
        caller.may_change("reload the configuration", "").await?;
        let by = caller.label();
        let reloaded = self.run(|control| async move { control.reload(&by).await }).await?;
        Ok(reloaded.map_err(Error::InvalidConfiguration)?)
    }

    async fn reset(&self, #[zbus(header)] header: Header<'_>) -> Result<(), BoxDBusError> {
        let caller = self.callers.identify(Some(&header)).await?;
        caller.may_change("reset the settings", "").await?;
        let by = caller.label();
        self.run(|control| async move { control.reset(&by).await }).await?
    }

    #[zbus(out_args("clients"))]
    async fn release_driver(&self, seconds: u32, #[zbus(header)] header: Header<'_>) -> Result<Vec<u64>, BoxDBusError> {
        let lasts = settings::release(Duration::from_secs(seconds.into())).map_err(fdo::Error::InvalidArgs)?;
        self.callers.identify(Some(&header)).await?.may_change("make the scheduler release the driver", "").await?;
        Ok(self.run(move |control| async move { control.release_driver(lasts).await }).await?)
    }

    #[zbus(signal)]
    pub async fn gpu_added(emitter: &SignalEmitter<'_>, gpu: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    pub async fn gpu_removed(emitter: &SignalEmitter<'_>, gpu: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    pub async fn gpu_changed(emitter: &SignalEmitter<'_>, gpu: &str) -> zbus::Result<()>;

    #[zbus(signal)]
    pub async fn client_added(emitter: &SignalEmitter<'_>, id: u64, pid: u32) -> zbus::Result<()>;

    #[zbus(signal)]
    pub async fn client_removed(emitter: &SignalEmitter<'_>, id: u64, pid: u32) -> zbus::Result<()>;

    // The scheduling loop reports changes, and `announce` announces them. The macro would announce every
    // call, even without a change.
    #[zbus(property(emits_changed_signal = "false"))]
    fn time_quantum(&self) -> u32 {
        seconds(self.shared.published.borrow().settings.time_quantum)
    }

    #[zbus(property)]
    async fn set_time_quantum(
        &self,
        value: u32,
        #[zbus(header)] header: Option<Header<'_>>,
    ) -> Result<(), BoxDBusError> {
        let quantum = settings::time_quantum(Duration::from_secs(value.into())).map_err(fdo::Error::InvalidArgs)?;
        self.change(move |changed| changed.time_quantum = Some(quantum), "change the time quantum", header.as_ref())
            .await
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn max_wait(&self) -> u32 {
        seconds(self.shared.published.borrow().settings.max_wait)
    }

    #[zbus(property)]
    async fn set_max_wait(&self, value: u32, #[zbus(header)] header: Option<Header<'_>>) -> Result<(), BoxDBusError> {
        let most = settings::max_wait(Duration::from_secs(value.into())).map_err(fdo::Error::InvalidArgs)?;
        self.change(move |changed| changed.max_wait = Some(most), "change the longest wait", header.as_ref()).await
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn anti_thrash(&self) -> String {
        names::anti_thrash_name(self.shared.published.borrow().settings.anti_thrash).into()
    }

    #[zbus(property)]
    async fn set_anti_thrash(
        &self,
        value: String,
        #[zbus(header)] header: Option<Header<'_>>,
    ) -> Result<(), BoxDBusError> {
        let mode = names::parse_anti_thrash(&value).map_err(fdo::Error::InvalidArgs)?;
        self.change(move |changed| changed.anti_thrash = Some(mode), "change anti-thrash", header.as_ref()).await
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn policy(&self) -> String {
        names::policy_name(self.shared.published.borrow().settings.policy).into()
    }

    #[zbus(property)]
    async fn set_policy(&self, value: String, #[zbus(header)] header: Option<Header<'_>>) -> Result<(), BoxDBusError> {
        let policy = names::parse_policy(&value).map_err(fdo::Error::InvalidArgs)?;
        self.change(move |changed| changed.policy = Some(policy), "change the policy", header.as_ref()).await
    }

    #[zbus(property(emits_changed_signal = "invalidates"))]
    fn holders(&self) -> Holders {
        if self.shared.is_visitor { Holders::new() } else { self.shared.published.borrow().holders.clone() }
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn problems(&self) -> Vec<String> {
        self.shared.published.borrow().problems.clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }
}

impl Object {
    /// Checks that the caller may see other users' clients. `None` if the bus cannot identify the caller: it may see
    /// only the fields that every user may see.
    async fn admit_reader(&self, header: &Header<'_>) -> Result<Option<Caller<'_>>, BoxDBusError> {
        let caller = self.callers.identify(Some(header)).await.ok();
        caller.as_ref().map_or(Ok(()), Caller::may_see_others)?;
        Ok(caller)
    }

    /// Admits a caller that requests a timeline.
    async fn admit_viewer(&self, header: &Header<'_>) -> Result<(Viewer, Share), BoxDBusError> {
        let caller = self.callers.identify(Some(header)).await?;
        caller.may_see_others()?;
        let tenant = caller.identity("see a timeline")?.tenant;
        let viewer = Viewer { uid: caller.uid(), tenant, sees_all: caller.sees_all().await };
        Ok((viewer, caller.admit_query()?))
    }

    /// Changes a setting to a valid value, if the caller is authorized.
    async fn change(
        &self,
        change: impl FnOnce(&mut Changed) + Send + 'static,
        what: &str,
        header: Option<&Header<'_>>,
    ) -> Result<(), BoxDBusError> {
        let caller = self.callers.identify(header).await?;
        caller.may_change(what, "").await?;
        let by = caller.label();
        Ok(self.run(move |control| async move { control.set(change, &by).await }).await??)
    }

    async fn set_paused(&self, pid: u32, is_paused: bool, header: &Header<'_>) -> Result<(), BoxDBusError> {
        let what = format!("{} process {pid}", if is_paused { "pause" } else { "resume" });
        let users = self.authorize_for(pid, &what, header).await?;
        Ok(self.run(move |control| async move { control.pause(pid, is_paused, &users).await }).await??)
    }

    async fn set_drained(&self, gpu: String, drained: bool, header: &Header<'_>) -> Result<(), BoxDBusError> {
        let what = format!("{} GPU {gpu:?}", if drained { "drain" } else { "undrain" });
        self.callers.identify(Some(header)).await?.may_change(&what, "").await?;
        Ok(self.run(move |control| async move { control.drain(&gpu, drained).await }).await??)
    }

    /// Returns the users of a program. A caller may always act on its own programs.
    ///
    /// # Errors
    /// The caller may not perform this action on the program.
    async fn authorize_for(&self, pid: u32, what: &str, header: &Header<'_>) -> Result<BTreeSet<u32>, BoxDBusError> {
        let caller = self.callers.identify(Some(header)).await?;
        caller.may_see_others()?;
        let users = self.on_loop(move |control| control.core.borrow().model.users_of(pid)).await??;
        caller.may_pause(&users, what).await?;
        Ok(users)
    }

    /// Changes an image or its record, if the caller is authorized. `verb`: describes the change.
    async fn change_image(
        &self,
        image: String,
        verb: &str,
        header: &Header<'_>,
        change: impl FnOnce(u32, String) -> ImageRequest,
    ) -> Result<(), BoxDBusError> {
        let (uid, budget) = self.authorize_for_image(&image, verb, header).await?;
        let what = format!("{verb} image {image:?}");
        let change = change(uid, image);
        Ok(self.run(|_| hibernate::change(budget, what, change)).await??)
    }

    /// Returns the owner of an image, and the caller's budget. A caller may always act on its own images.
    /// Damaged images may belong to root.
    ///
    /// # Errors
    /// The image does not exist, or the caller may not perform this action on it.
    async fn authorize_for_image(
        &self,
        image: &str,
        verb: &str,
        header: &Header<'_>,
    ) -> Result<(u32, Arc<Budget>), BoxDBusError> {
        let caller = self.callers.identify(Some(header)).await?;
        let what = format!("{verb} image {image:?}");
        caller.identity(&what)?;
        let own = caller.own_user();
        let (budget, wanted) = (caller.budget().clone(), image.to_owned());
        let found = self.run(move |_| hibernate::find(budget, wanted)).await??;
        // Users do not learn which images others have.
        let owner = match found.first().map(|found| found.uid) {
            Some(owner) if owner == own || caller.sees_all().await => owner,
            _ => {
                let text = format!("there is no image {image:?}. List images with: nvsharectl hibernated");
                return Err(fdo::Error::InvalidArgs(text).into());
            }
        };
        caller.may_pause(&[owner].into(), &what).await?;
        Ok((owner, caller.budget().clone()))
    }

    /// Reads the state on a separate thread. With many clients, reading can take a while.
    async fn read<T: Send + 'static>(&self, read: impl FnOnce(&View) -> T + Send + 'static) -> Result<T, Error> {
        let view = self.shared.views.next().await.ok_or_else(stopping)?;
        let read = tokio::task::spawn_blocking(move || read(&view)).await;
        read.map_err(|e| Error::Stopping(format!("the scheduler is stopping: {e}")))
    }

    /// The contents of a debug bundle, with the next view.
    async fn snapshot(&self) -> Result<Box<Snapshot>, Error> {
        let view = self.shared.views.next().await.ok_or_else(stopping)?;
        self.on_loop(|control| Box::new(Snapshot::new(&control.core.borrow(), view))).await
    }

    /// Calls `act` on the scheduling loop.
    async fn on_loop<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Rc<Control>) -> T + Send + 'static,
    ) -> Result<T, Error> {
        // If the caller has stopped waiting, sending its reply fails. That is not an error.
        self.ask(|control, reply| drop(reply.send(act(control)))).await
    }

    /// Runs `act` in a task of the scheduling loop.
    async fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        act: impl FnOnce(Rc<Control>) -> F + Send + 'static,
    ) -> Result<T, Error> {
        let start = |control: &Rc<Control>, reply: oneshot::Sender<T>| {
            let running = act(control.clone());
            spawn_local(async move { reply.send(running.await) });
        };
        self.ask(start).await
    }

    /// Calls `act` on the scheduling loop, and waits for the reply.
    async fn ask<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Rc<Control>, oneshot::Sender<T>) + Send + 'static,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.shared.requests.send(Box::new(|control: &Rc<Control>| act(control, reply))).map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }
}

fn stopping() -> Error {
    Error::Stopping("the scheduler is stopping".into())
}

fn present_image(image: &Image) -> bus::Image {
    let Image { name, uid, program, saved, bytes, place, damage } = image.clone();
    let pid = |pid: i32| u32::try_from(pid).unwrap_or(0);
    let (state, runs_as, expected_bytes, sent_to) = match place {
        Place::Saving { process, expected } => ("saving", pid(process), Some(expected), None),
        Place::Image => ("saved", 0, None, None),
        Place::Process(process) => ("running", pid(process), None, None),
        Place::Ended => ("ended", 0, None, None),
        Place::Sent(host) => ("sent", 0, None, Some(host)),
        Place::Unfinished => ("unfinished", 0, None, None),
    };
    let (state, damage) = (Some(state.to_owned()), damage.unwrap_or_default());
    bus::Image { name, uid, program, saved, bytes, expected_bytes, runs_as, damage, state, sent_to }
}

/// Converts usage for D-Bus. Includes only the columns that the query groups by.
fn present_usage(key: Key, amounts: &Amounts, by: &BTreeSet<Column>) -> bus::Usage {
    let ((begins, lasts), account) = (key.time, key.account);
    let has_time = by.contains(&Column::Time) || by.contains(&Column::Day);
    let time = |seconds: i64| has_time.then(|| u64::try_from(seconds).unwrap_or(0));
    let name = |column, name| by.contains(&column).then_some(name);
    bus::Usage {
        begins: time(begins),
        lasts: time(lasts),
        gpu: name(Column::Gpu, account.gpu),
        tenant: name(Column::Tenant, key.tenant),
        unit: name(Column::Unit, account.unit),
        container: name(Column::Container, account.container),
        lock_seconds: amounts.lock_seconds,
        grants: amounts.grants as u64,
        wait_seconds: amounts.wait_seconds,
        resident_byte_seconds: amounts.resident_byte_seconds,
        swapped_byte_seconds: amounts.swapped_byte_seconds,
        swapped_in_bytes: amounts.swapped_in_bytes as u64,
        swapped_out_bytes: amounts.swapped_out_bytes as u64,
    }
}
