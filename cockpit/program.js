/* A program's page: why it waits, where its memory is, and what its user may do with it. */

import { h } from "./dom.js";
import { duration, gpuName, programState, size, sum, tenantName, userName } from "./format.js";
import { button, card, facts, label, memoryBar, notice, table } from "./parts.js";

/** Where a program's memory is. The rest of its demand was never written. */
function memoryKinds(program) {
    const inFile = sum(program, "in-file");
    const swapped = sum(program, "swapped");
    const resident = sum(program, "resident");
    const pinned = Math.min(sum(program, "pinned"), resident);
    return [
        { id: "programs", name: "On the GPU", bytes: resident - pinned },
        { id: "pinned", name: "On the GPU, cannot be evicted", bytes: pinned },
        { id: "ram", name: "In RAM", bytes: swapped - inFile },
        { id: "disk", name: "On disk", bytes: inFile },
        { id: "free", name: "Nowhere: never written", bytes: Math.max(0, sum(program, "demand") - resident - swapped) },
    ];
}

/** GPUs that the program can move to: same kind, not in use by it, and usable. */
function destinations(app, program) {
    const used = new Set(program.gpus.map(use => use.uuid));
    const kinds = new Set(app.described.gpus.filter(gpu => used.has(gpu.uuid)).map(gpu => `${gpu.kind} ${gpu.name}`));
    return used.size !== 1 ? []
        : app.described.gpus.filter(gpu => !used.has(gpu.uuid) && !gpu.gone && !gpu.drained && kinds.has(`${gpu.kind} ${gpu.name}`));
}

function controls(app, program) {
    if (program.library === "D-Bus") {
        return app.permissions["change-settings"]
            ? [button("End this lock", () => app.act("TerminateLock", "t", program.id), { key: "end", class: "button danger" })] : [];
    }
    if (!program.own && !app.permissions["change-settings"])
        return [];
    const all = [program.paused
        ? button("Resume", () => app.act("Resume", "u", program.pid), { key: "resume", id: "resume" })
        : button("Pause", () => app.act("Pause", "u", program.pid), {
            key: "pause", id: "pause", title: "Take the program off its GPUs until it is resumed",
        })];
    const targets = program.moving ? [] : destinations(app, program);
    if (targets.length > 0) {
        const chosen = targets.find(gpu => gpu.uuid === app.destination) ?? targets[0];
        all.push(h("label", { key: "to" }, "Move to", h("select", {
            id: "destination", value: chosen.uuid, onchange: event => app.setDestination(event.target.value),
        }, targets.map(gpu => h("option", { key: gpu.uuid, value: gpu.uuid }, gpuName(gpu))))),
        button("Move", () => app.act("Migrate", "us", program.pid, chosen.uuid), { key: "move", id: "move" }));
    }
    return all;
}

function useRow(app, program, use) {
    const gpu = app.described.gpus.find(one => one.uuid === use.uuid);
    const state = programState({ ...program, gpus: [use] });
    const inFile = use["in-file"] ?? 0;
    return {
        key: use.uuid,
        cells: [
            gpu ? gpuName(gpu) : use.uuid, label(state.text, state.kind), duration(use.since), size(use.demand),
            size(use.resident), size(use.swapped - inFile), inFile ? size(inFile) : "–", duration(use["lock-time"]),
            duration(use["wait-time"]), String(use.grants),
        ],
    };
}

const COLUMNS = [
    { name: "GPU" }, { name: "State" }, { name: "Since", isNumber: true }, { name: "Needs", isNumber: true },
    { name: "On GPU", isNumber: true }, { name: "In RAM", isNumber: true }, { name: "On disk", isNumber: true },
    { name: "Time with lock", isNumber: true }, { name: "Time waited", isNumber: true }, { name: "Turns", isNumber: true },
];

function details(program) {
    const pod = program["pod-name"] ? `${program["pod-namespace"]}/${program["pod-name"]}` : program.pod;
    const blocked = program.gpus.map(use => use["eviction-blocked"]).find(text => text);
    return facts([
        ["User", userName(program.uid)],
        ["Tenant", tenantName(program.tenant)],
        ["Command", program.command === null ? null : h("code", {}, program.command)],
        ["Unit", program.unit],
        ["Container", program.container],
        ["Pod", pod],
        ["Reason", program.why],
        ["Connected", new Date(program["connected-since"] * 1000).toLocaleString()],
        ["Rule", program.rule || program["rule-origin"] ? `${program.rule || "without a name"} (${program["rule-origin"]})` : null],
        ["Share", program.share],
        ["Limits from its environment", program.environment],
        ["Ignored from its environment", program["environment-ignored"].join(" ")],
        ["Runs together with", program.gang.length > 0 ? `${program.gang.length} other programs of its gang` : null],
        ["Library", program.library],
        ["Memory is evicted by", [...new Set(program.gpus.map(use => use["engine-reason"]
            ? `${use.engine} (${use["engine-reason"]})` : use.engine))].join(", ")],
        ["Memory cannot be evicted", blocked],
        ["Could not sleep", program["sleep-obstacle"]],
        ["Last wake took", program["wake-time"] === null ? null : duration(program["wake-time"])],
    ]);
}

function one(app, program) {
    const state = programState(program);
    return h("div", { key: program.id },
        h("div", { class: "head" },
            h("h2", { id: "program" }, program.name, h("span", { class: "model" }, ` process ${program.pid}, ${tenantName(program.tenant)}`)),
            label(state.text, state.kind)),
        h("div", { class: "controls", id: "controls" }, controls(app, program)),
        h("div", { class: "card" }, memoryBar("Memory", sum(program, "demand"), memoryKinds(program))),
        program.gpus.length > 0 ? card("GPUs", { key: "uses" },
            table("The program's GPUs", COLUMNS, program.gpus.map(use => useRow(app, program, use)))) : null,
        card("Details", { key: "details" }, details(program)));
}

export function programView(app) {
    const { programs, why } = app.described;
    const back = h("p", { key: "back" }, h("a", { href: "#/" }, "All programs"));
    if (!programs || !why)
        return [back, notice("info", app.gone ?? "This program has ended.")];
    return [
        back,
        card("What it is doing", { key: "why", id: "why" }, h("ul", {}, why.map((sentence, place) => h("li", { key: place }, sentence)))),
        programs.map(program => one(app, program)),
    ];
}
