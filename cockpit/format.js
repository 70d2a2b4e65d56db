/* Numbers, times and names as text. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Formats bytes: `1.5 GiB`. */
export function size(bytes) {
    let unit = 0;
    let value = Number(bytes) || 0;
    while (value >= 1024 && unit < UNITS.length - 1) {
        value /= 1024;
        unit += 1;
    }
    const text = unit === 0 || value >= 100 ? value.toFixed(0) : value.toFixed(1);
    return `${text} ${UNITS[unit]}`;
}

/** Formats seconds: `4.2 s`, `3 min 5 s`, `2 h 10 min`. */
export function duration(seconds) {
    const value = Math.max(0, Number(seconds) || 0);
    const two = (large, largeName, small, smallName) => {
        const rest = Math.floor(value % large / small);
        return `${Math.floor(value / large)} ${largeName}${rest > 0 ? ` ${rest} ${smallName}` : ""}`;
    };
    if (value < 9.95)
        return `${value.toFixed(1)} s`;
    if (value < 59.5)
        return `${value.toFixed(0)} s`;
    if (value < 3600)
        return two(60, "min", 1, "s");
    if (value < 48 * 3600)
        return two(3600, "h", 60, "min");
    return two(86400, "d", 3600, "h");
}

export function percent(value) {
    return `${Math.round(Number(value) || 0)} %`;
}

export function count(number, one, many) {
    return `${number} ${number === 1 ? one : many}`;
}

/** A GPU's short name: `GPU 0`, or its UUID if it has no index. */
export function gpuName(gpu) {
    if (gpu.index === null || gpu.index === undefined)
        return gpu.uuid;
    return gpu.kind === "mig" ? `GPU ${gpu.index}, slice ${gpu.uuid.slice(0, 12)}` : `GPU ${gpu.index}`;
}

const users = new Map();

/** Reads the names of this host's users. */
export async function readUsers() {
    const text = await cockpit.file("/etc/passwd").read().catch(() => "");
    for (const line of (text || "").split("\n")) {
        const [name, , uid] = line.split(":");
        if (uid)
            users.set(Number(uid), name);
    }
}

export function userName(uid) {
    return users.get(uid) ?? `user ${uid}`;
}

/** The tenant's name: a user's name, or `container …` and `pod …`. */
export function tenantName(tenant) {
    const uid = /^user (\d+)$/.exec(tenant ?? "")?.[1];
    return uid === undefined ? tenant || "unknown" : userName(Number(uid));
}

/** A text to search for. The scheduler knows users by number only. */
export function searchText(text) {
    const uid = [...users].find(([, name]) => name === text.trim())?.[0];
    return uid === undefined || uid === 0 ? text.trim() : `user ${uid}`;
}

const STATES = {
    attaching: "Waits for room for its context",
    idle: "Idle",
    waiting: "Waits",
    holding: "Runs",
    revoking: "Finishes its turn",
    stuck: "Finishes its turn",
    undrainable: "Cannot be interrupted",
    suspended: "Stopped in its turn",
};

const SLEEP = {
    preparing: "Falls asleep",
    checkpointing: "Falls asleep",
    sleeping: "Sleeps",
    waking: "Wakes up",
    restoring: "Wakes up",
    settling: "State is being determined",
    lost: "Lost: cannot be restored",
};

/** What a program does, in words. `kind` selects the colour of its label. */
export function programState(program, uuid) {
    if (program.moving)
        return { text: "Moves to another GPU", kind: "info" };
    if (program.sleep === "lost")
        return { text: SLEEP.lost, kind: "danger" };
    if (program.paused)
        return { text: program.sleep === "sleeping" ? "Paused" : "Paused, leaves the GPU", kind: "off" };
    if (program.sleep !== "awake")
        return { text: SLEEP[program.sleep] ?? program.sleep, kind: "off" };
    if (program.stopped)
        return { text: "Process is stopped", kind: "off" };
    const uses = program.gpus.filter(use => !uuid || use.uuid === uuid);
    const order = ["holding", "revoking", "stuck", "undrainable", "suspended", "attaching", "waiting", "idle"];
    const state = order.find(one => uses.some(use => use.state === one));
    if (!state)
        return { text: "Uses no GPU", kind: "off" };
    const kind = state === "holding" ? "success"
        : state === "undrainable" || state === "stuck" ? "warning"
            : state === "idle" ? "off" : "info";
    return { text: STATES[state] ?? state, kind };
}

/** The number of a kind of bytes over all of a program's GPUs. */
export function sum(program, key, uuid) {
    return program.gpus.filter(use => !uuid || use.uuid === uuid).reduce((total, use) => total + (use[key] ?? 0), 0);
}
