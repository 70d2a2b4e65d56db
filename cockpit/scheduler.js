/* The connection to the scheduler, org.nvshare.Scheduler1(5). All calls have the rights of the
   user that is logged in, or of root while administrative access is on. */

const NAME = "org.nvshare.Scheduler1";
const PATH = "/org/nvshare/Scheduler1";
const PROPERTIES = "org.freedesktop.DBus.Properties";

/** Options of a method, as D-Bus variants. Numbers have the type u. */
function variants(options) {
    const all = {};
    for (const [name, value] of Object.entries(options)) {
        if (value !== undefined && value !== null && value !== "")
            all[name] = cockpit.variant(typeof value === "number" ? "u" : "s", value);
    }
    return all;
}

export class Scheduler {
    /** `changed`: called once after each `listen`, when GPUs or programs have changed. `ended`: called when the
        connection has ended. */
    constructor(changed, ended) {
        this.changed = changed;
        this.client = cockpit.dbus(NAME, { bus: "system", superuser: "try" });
        this.client.addEventListener("close", (_event, options) => ended(options));
        this.client.addEventListener("owner", (_event, owner) => owner && changed());
    }

    /** Waits for the next signal. Each busy GPU sends two a second, but one is enough to read the state again. */
    listen() {
        this.subscription ??= this.client.subscribe({ path: PATH, interface: NAME }, () => {
            this.subscription?.remove();
            this.subscription = null;
            this.changed();
        });
    }

    close() {
        this.client.close();
    }

    async call(method, type, ...args) {
        return (await this.client.call(PATH, NAME, method, args, { type }))[0];
    }

    async describe(options) {
        return JSON.parse(await this.call("Describe", "a{sv}", variants(options)));
    }

    async timeline(options) {
        return JSON.parse(await this.call("DescribeTimeline", "a{sv}", variants(options)));
    }

    permissions() {
        return this.call("ListPermissions", "");
    }

    async usage(since, by) {
        return (await this.call("ListUsage", "das", since, by)).map(plain);
    }

    async rules() {
        return (await this.call("ListRules", "")).map(plain);
    }

    async settings() {
        const all = await this.client.call(PATH, PROPERTIES, "GetAll", [NAME], { type: "s" });
        return plain(all[0]);
    }

    set(property, type, value) {
        return this.client.call(PATH, PROPERTIES, "Set", [NAME, property, cockpit.variant(type, value)], { type: "ssv" });
    }

    setRule(name, keys) {
        return this.call("SetRule", "sa{sv}", name, keys);
    }
}

/** A dictionary of variants as an object. */
function plain(dictionary) {
    return Object.fromEntries(Object.entries(dictionary).map(([key, value]) => [key, value.v]));
}

/** The sentence of an error. */
export function sentence(error) {
    const text = error?.message || error?.problem || String(error);
    return text.charAt(0).toUpperCase() + text.slice(1);
}
