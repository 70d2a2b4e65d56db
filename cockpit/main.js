/* The page: its state, when the state is read again, and which view shows it. */

import { h, render } from "./dom.js";
import { readUsers } from "./format.js";
import { PAGE, overview } from "./overview.js";
import { card, notice } from "./parts.js";
import { programView } from "./program.js";
import { Scheduler, sentence } from "./scheduler.js";
import { loadSettings, settingsView } from "./settings.js";
import { followTheme } from "./theme.js";
import { drawTimelines } from "./timeline.js";
import { loadUsage, usageView } from "./usage.js";

/** Shortest time between two readings while something changes, and the time between them otherwise, in milliseconds. */
const OFTEN = 1000;
const SELDOM = 5000;
/** The pause after a reading is this many times as long as it took to show it, so that a long list costs
    no more of the processor than a short one. Receiving and painting it take twice as long again. */
const REST = 300;
/** Permissions change with polkit's rules and with groups, so they are read again after this time. */
const PERMISSIONS_LAST = 60000;
const MESSAGE_LASTS = 10000;

const TABS = [["", "Overview"], ["usage", "Usage"], ["settings", "Settings and rules"]];

class App {
    constructor() {
        this.described = null;
        this.failure = null;
        this.permissions = {};
        this.permissionsRead = 0;
        this.selection = { order: "memory", find: "", first: 0, count: PAGE };
        this.findText = "";
        this.timeline = null;
        this.period = 60;
        this.usage = null;
        this.usageChoice = { by: "tenant", days: 7 };
        this.settings = null;
        this.edits = {};
        this.message = null;
        this.socketNotice = null;
        this.isReading = false;
        this.isStale = true;
        this.readAt = 0;
        /** The time that the page needs to show a reading, in milliseconds. */
        this.cost = 0;
    }

    get path() {
        return cockpit.location.path;
    }

    connect() {
        this.scheduler?.close();
        this.permissionsRead = 0;
        const scheduler = new Scheduler(() => this.changed(), options => {
            if (scheduler === this.scheduler) {
                this.scheduler = null;
                this.failure = options?.problem ?? "disconnected";
                this.show();
            }
        });
        this.scheduler = scheduler;
        this.isStale = true;
        this.schedule();
    }

    /** GPUs or programs have changed. */
    changed() {
        this.isStale = true;
        this.schedule();
    }

    /** Reads the state when it is due: soon after a change, and now and then for the times. */
    schedule() {
        clearTimeout(this.timer);
        if (cockpit.hidden || this.isReading)
            return;
        const often = Math.min(SELDOM, Math.max(OFTEN, REST * this.cost));
        const due = this.readAt + (this.isStale ? often : SELDOM);
        this.timer = setTimeout(() => this.read(), Math.max(0, due - Date.now()));
    }

    async read() {
        if (!this.scheduler)
            return this.connect();
        this.isReading = true;
        this.scheduler.listen(); // before the calls, so that no change is missed
        this.isStale = false;
        this.readAt = Date.now();
        try {
            await this.readPermissions();
            const [tab, pid] = this.path;
            if (tab === "program")
                await this.readProgram(Number(pid));
            else if (tab === undefined)
                await this.readOverview();
            else
                this.described ??= await this.scheduler.describe({ count: 0 });
            this.failure = null;
        } catch (error) {
            this.failure ??= error.problem ?? sentence(error);
        }
        this.isReading = false;
        const begin = performance.now();
        this.show();
        this.cost = performance.now() - begin;
        this.schedule();
    }

    async readPermissions() {
        if (Date.now() - this.permissionsRead > PERMISSIONS_LAST) {
            this.permissions = await this.scheduler.permissions();
            this.permissionsRead = Date.now();
            await this.readSocket();
        }
    }

    async readOverview() {
        this.described = await this.scheduler.describe(this.selection);
        if (this.described.total > 0 || this.timeline) {
            try {
                this.timeline = await this.scheduler.timeline({ last: this.period });
                this.timelineError = null;
            } catch (error) {
                this.timelineError = sentence(error);
            }
        }
    }

    async readProgram(pid) {
        try {
            this.described = await this.scheduler.describe({ pid });
            this.gone = null;
        } catch (error) {
            // The program has ended. Everything else is an error of the page.
            if (error.name !== "org.freedesktop.DBus.Error.InvalidArgs")
                throw error;
            this.described = await this.scheduler.describe({ count: 0 });
            this.gone = sentence(error);
        }
    }

    /** Programs find the scheduler by its socket, which an administrator enables. A call over D-Bus
        starts the scheduler and its socket too, but only until the next boot. */
    async readSocket() {
        const systemd = cockpit.dbus("org.freedesktop.systemd1", { bus: "system" });
        try {
            const [state] = await systemd.call("/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager",
                                               "GetUnitFileState", ["nvshare.socket"], { type: "s" });
            this.socketNotice = state === "disabled"
                ? startNotice("The scheduler runs only until the next boot, because its socket is not enabled.") : null;
        } catch {
            this.socketNotice = null; // the scheduler was not installed with its units
        } finally {
            systemd.close();
        }
    }

    /** Changes which programs are shown. */
    select(change) {
        Object.assign(this.selection, change);
        this.soon();
    }

    /** Calls `run` after the user has stopped typing. */
    later(run) {
        clearTimeout(this.typing);
        this.typing = setTimeout(run, 250);
        this.show();
    }

    setPeriod(seconds) {
        this.period = seconds;
        this.soon();
    }

    setDestination(gpu) {
        this.destination = gpu;
        this.show();
    }

    chooseUsage(choice) {
        this.usageChoice = choice;
        loadUsage(this).then(() => this.show());
    }

    edit(name, value) {
        this.edits[name] = value;
        this.show();
    }

    async reloadSettings() {
        await loadSettings(this);
        this.show();
    }

    /** Reads the state now. */
    soon() {
        this.readAt = 0;
        this.changed();
    }

    /** Runs a change, and says how it went. Returns whether it succeeded. */
    async try(run, done) {
        try {
            await run();
            this.say("success", done);
            return true;
        } catch (error) {
            this.permissionsRead = 0; // the user may no longer be allowed to do this
            this.say("danger", sentence(error));
            return false;
        } finally {
            this.soon();
        }
    }

    act(method, type, ...args) {
        return this.try(() => this.scheduler.call(method, type, ...args), `${DONE[method]}.`);
    }

    say(kind, text) {
        this.message = { kind, text };
        document.getElementById("status").textContent = text;
        clearTimeout(this.saying);
        this.saying = setTimeout(() => {
            this.message = null;
            this.show();
        }, MESSAGE_LASTS);
        this.show();
    }

    moved() {
        window.scrollTo(0, 0);
        this.message = null;
        const [tab] = this.path;
        if (tab === "usage" && this.scheduler)
            loadUsage(this).then(() => this.show());
        else if (tab === "settings" && this.scheduler)
            this.reloadSettings();
        this.described = null;
        this.soon();
        this.show();
    }

    show() {
        render(document.getElementById("tabs"), tabs(this.path[0]));
        render(document.getElementById("main"), [
            this.message ? h("div", { key: "message" }, notice(this.message.kind, this.message.text)) : null,
            this.view(),
        ]);
        drawTimelines(this); // also makes the browser compute the layout
    }

    view() {
        if (this.failure)
            return h("div", { key: "failure" }, failureView(this.failure));
        if (!this.described)
            return h("p", { key: "wait", class: "detail", role: "status" }, "Asking the scheduler…");
        const [tab] = this.path;
        const views = { program: programView, usage: usageView, settings: settingsView };
        return h("div", { key: tab ?? "overview", id: `view-${tab ?? "overview"}` }, (views[tab] ?? overview)(this));
    }
}

const DONE = {
    Pause: "The program is paused",
    Resume: "The program continues",
    Migrate: "The program has moved",
    TerminateLock: "The lock has ended",
    Drain: "The GPU is drained",
    Undrain: "The GPU takes programs again",
};

function tabs(path) {
    const present = path === "program" ? "" : path ?? "";
    return TABS.map(([tab, name]) => h("a", { key: tab, href: `#/${tab}`, "aria-current": tab === present ? "page" : null }, name));
}

function startNotice(text) {
    return h("section", { key: "socket", class: "card", id: "start" },
        h("h2", {}, text),
        h("p", {}, "An administrator starts it, now and at each boot:"),
        h("pre", {}, h("code", {}, "systemctl enable --now nvshare.socket")));
}

function failureView(failure) {
    if (failure === "not-found") {
        return [
            startNotice("The scheduler is not running."),
            card("It does not start?", { key: "help" },
                h("p", {}, "The scheduler is in the package nvshare. Its log says why it has ended:"),
                h("pre", {}, h("code", {}, "journalctl -u nvshare.service"))),
        ];
    }
    const text = failure === "access-denied" ? "You may not speak to the scheduler." : `The scheduler does not answer: ${failure}.`;
    return notice("danger", text.replace("..", "."), h("p", {}, "The page tries again by itself."));
}

cockpit.transport.wait(async () => {
    followTheme();
    await readUsers();
    const app = new App();
    app.show();
    app.connect();
    app.moved();
    cockpit.addEventListener("locationchanged", () => app.moved());
    cockpit.addEventListener("visibilitychange", () => app.schedule());
    window.addEventListener("resize", () => drawTimelines(app));
    window.addEventListener("nvshare-theme", () => drawTimelines(app));
    // With administrative access, the calls are root's.
    const admin = cockpit.permission({ admin: true });
    let before = admin.allowed;
    admin.addEventListener("changed", () => {
        if (before !== null && admin.allowed !== before)
            app.connect();
        before = admin.allowed;
    });
});
