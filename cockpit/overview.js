/* The overview: GPUs with their memory, lock, queue and pressure, the last minutes, and programs. */

import { h } from "./dom.js";
import { count, duration, gpuName, percent, programState, searchText, size, sum, tenantName } from "./format.js";
import { button, card, label, memoryBar, notice } from "./parts.js";
import { timelineView } from "./timeline.js";

/** Programs on one page of the list. */
export const PAGE = 25;

/** The kinds of memory of a GPU. Their sum is the GPU's total. */
export function memoryKinds(gpu) {
    const overhead = gpu.overhead ?? 0;
    const contexts = Math.min(gpu.contexts ?? 0, overhead);
    const pinned = Math.min(gpu.pinned, gpu.resident);
    // Memory that has just been allocated may be in two measurements.
    const free = Math.max(0, gpu.total - gpu.resident - overhead - (gpu.kept ?? 0));
    return [
        { id: "programs", name: "Programs", bytes: gpu.resident - pinned },
        { id: "pinned", name: "Cannot be evicted", bytes: pinned },
        { id: "contexts", name: "CUDA contexts", bytes: contexts },
        { id: "others", name: gpu.contexts === null ? "Contexts and other programs" : "Without nvshare",
          bytes: overhead - contexts },
        { id: "kept", name: "Kept free", bytes: gpu.kept ?? 0 },
        { id: "free", name: "Free", bytes: free },
    ];
}

export function programLink(program) {
    const text = `${program.name} (${program.pid})`;
    return program.pid > 0 ? h("a", { href: `#/program/${program.pid}` }, text) : text;
}

function holder(gpu, program) {
    const use = program.gpus.find(one => one.uuid === gpu.uuid);
    const ends = gpu["turn-ends"]?.[program.id];
    const state = programState(program, gpu.uuid);
    return h("li", { key: program.id },
        programLink(program), h("span", { class: "whose" }, ` ${tenantName(program.tenant)} `),
        label(state.text, state.kind),
        h("p", { class: "detail" }, `for ${duration(use?.since)}`,
            ends !== undefined ? `, turn ends in ${duration(ends)}` : ", no set end"));
}

function waiting(gpu, program) {
    const use = program.gpus.find(one => one.uuid === gpu.uuid);
    const starts = gpu["expected-starts"]?.[program.id];
    return h("li", { key: program.id },
        programLink(program), h("span", { class: "whose" }, ` ${tenantName(program.tenant)}`),
        h("p", { class: "detail" }, `for ${duration(use?.since)}`,
            starts !== undefined ? `, expected to run in ${duration(starts)}. ` : ". ", program.why ?? ""));
}

function more(shown, all) {
    return all > shown ? h("li", { key: "more", class: "detail" }, `and ${all - shown} more`) : null;
}

function pressure(gpu) {
    const stalled = gpu.pressure;
    if (!stalled)
        return null;
    const kinds = [["some-avg10", "10 s"], ["some-avg60", "1 min"], ["some-avg300", "5 min"]];
    return h("p", { class: "pressure" }, "Programs waited: ",
        kinds.map(([key, period]) => h("span", { key }, `${percent(stalled[key])} of ${period}`)));
}

function gpuCard(app, gpu) {
    const swapped = gpu.swapped - gpu["in-file"];
    const isAdmin = app.permissions["change-settings"];
    const marks = [
        gpu.gone ? label("Lost: no longer works", "danger") : null,
        gpu.drained ? label("Drained: takes no programs", "warning") : null,
    ];
    const drain = gpu.drained
        ? button("Allow programs again", () => app.act("Undrain", "s", gpu.uuid), { key: "undrain" })
        : button("Drain", () => app.act("Drain", "s", gpu.uuid), {
            key: "drain", title: "Move all programs to other GPUs, or let them sleep", "aria-label": `Drain ${gpuName(gpu)}`,
        });
    return h("section", { key: gpu.uuid, class: "card gpu", "aria-label": gpuName(gpu), "data-gpu": gpu.uuid },
        h("div", { class: "head" },
            h("h2", {}, gpuName(gpu), h("span", { class: "model" }, ` ${gpu.name}`)),
            marks, isAdmin && !gpu.gone ? drain : null),
        memoryBar("Memory", gpu.total, memoryKinds(gpu)),
        h("p", { class: "away" }, gpu.swapped > 0
            ? `Evicted: ${size(swapped)} in RAM${gpu["in-file"] > 0 ? `, ${size(gpu["in-file"])} on disk` : ""}`
            : "No memory is evicted"),
        pressure(gpu),
        h("div", { class: "pair" },
            h("div", {}, h("h3", {}, gpu["holders-length"] === 1 ? "Has the lock" : "Have the lock"),
                gpu.holders.length === 0 ? h("p", { class: "detail" }, "No program")
                    : h("ul", { class: "plain holders" }, gpu.holders.map(one => holder(gpu, one)),
                        more(gpu.holders.length, gpu["holders-length"]))),
            h("div", {}, h("h3", {}, `Queue (${gpu["queue-length"]})`),
                gpu.queue.length === 0 ? h("p", { class: "detail" }, "No program waits")
                    : h("ol", { class: "plain queue" }, gpu.queue.map(one => waiting(gpu, one)),
                        more(gpu.queue.length, gpu["queue-length"])))),
        (gpu.rooms ?? []).map(room => h("p", { key: `room-${room.pid}-${room.bytes}`, class: "detail" },
            `${size(room.bytes)} are kept free for ${room.who} (${room.pid}), for ${duration(room["ends-in"])}`,
            room.ready ? "." : "; memory is still being evicted.")),
        (gpu.unproven ?? []).map(one => h("p", { key: `unproven-${one.pid}`, class: "detail" },
            `${one.name} (${one.pid}) has not shown that it may use the GPU, and runs without nvshare.`)));
}

const COLUMNS = [
    { name: "Program" },
    { name: "User" },
    { name: "Unit, pod or container" },
    { name: "State" },
    { name: "On GPU", isNumber: true, order: "memory" },
    { name: "In RAM", isNumber: true },
    { name: "On disk", isNumber: true },
    { name: "Time with lock", isNumber: true, order: "time" },
];

function place(program) {
    return program["pod-name"] || program.container || program.unit || "";
}

function programRow(program) {
    const state = programState(program);
    const inFile = sum(program, "in-file");
    return h("tr", { key: program.id },
        h("th", { scope: "row" }, programLink(program)),
        h("td", { "data-name": "User" }, tenantName(program.tenant)),
        h("td", { "data-name": "Unit" }, place(program)),
        h("td", { "data-name": "State" }, label(state.text, state.kind)),
        h("td", { class: "number", "data-name": "On GPU" }, size(sum(program, "resident"))),
        h("td", { class: "number", "data-name": "In RAM" }, size(sum(program, "swapped") - inFile)),
        h("td", { class: "number", "data-name": "On disk" }, inFile > 0 ? size(inFile) : "–"),
        h("td", { class: "number", "data-name": "Time with lock" }, duration(sum(program, "lock-time"))));
}

const ORDERS = [["memory", "Memory"], ["wait", "Present wait"], ["time", "Time with the lock"], ["name", "Name"]];

function programs(app) {
    const { found, total, programs: shown, gpus } = app.described;
    const { first, find, gpu, order } = app.selection;
    const select = change => app.select({ first: 0, ...change });
    const last = first + shown.length;
    const pages = found > shown.length || first > 0;
    return card("Programs", { key: "programs" },
        h("form", { class: "filters", role: "search", onsubmit: event => event.preventDefault() },
            h("label", {}, "Find", h("input", {
                id: "find", type: "search", value: app.findText, placeholder: "name, process, user, unit",
                oninput: event => {
                    app.findText = event.target.value;
                    app.later(() => select({ find: searchText(app.findText) }));
                },
            })),
            gpus.length > 1 ? h("label", { key: "gpu" }, "GPU",
                h("select", { value: gpu ?? "", onchange: event => select({ gpu: event.target.value || undefined }) },
                    h("option", { value: "" }, "All"),
                    gpus.map(one => h("option", { key: one.uuid, value: one.uuid }, gpuName(one))))) : null,
            h("label", { key: "order" }, "Order by",
                h("select", { value: order, onchange: event => select({ order: event.target.value }) },
                    ORDERS.map(([value, text]) => h("option", { key: value, value }, text))))),
        found === 0 ? h("p", { key: "none", class: "detail" }, find ? `No program matches “${find}”.` : "No program uses this GPU.")
            : h("div", { key: "table", class: "scrolls", tabindex: "0", role: "region", "aria-label": "Programs" },
                h("table", { id: "programs" },
                    h("caption", { class: "hidden" }, "Programs that use a GPU"),
                    h("thead", {}, h("tr", {}, COLUMNS.map(column => h("th", {
                        scope: "col",
                        class: column.isNumber ? "number" : null,
                        "aria-sort": column.order === order ? "descending" : null,
                    }, column.name)))),
                    h("tbody", {}, shown.map(programRow)))),
        h("div", { key: "pages", class: "pages" },
            h("span", {}, found === 0 ? "" : `${first + 1} to ${last} of ${count(found, "program", "programs")}`,
                found < total ? ` (${total} in all)` : ""),
            pages ? button("Previous", () => app.select({ first: Math.max(0, first - PAGE) }), { key: "back", "aria-disabled": first === 0 ? "true" : null }) : null,
            pages ? button("Next", () => last < found && app.select({ first: first + PAGE }), { key: "on", "aria-disabled": last >= found ? "true" : null }) : null));
}

function emptyState() {
    return card("No program uses a GPU under nvshare", { key: "empty", id: "empty" },
        h("p", {}, "Start a program with nvshare, and it appears here:"),
        h("pre", {}, h("code", {}, "nvsharectl run -- python train.py")),
        h("p", {}, "Services and containers need a line in their configuration: ",
            h("code", {}, "man nvsharectl"), " and ", h("code", {}, "man libnvshare"), " say which."));
}

export function overview(app) {
    const { gpus, total, problems } = app.described;
    return [
        problems.map(problem => notice("warning", `${problem.charAt(0).toUpperCase()}${problem.slice(1)}.`)),
        app.socketNotice,
        gpus.length === 0 ? card("No GPU", { key: "no-gpu" },
            h("p", {}, "The NVIDIA driver lists no GPU, and no program has used one.")) : null,
        h("div", { key: "gpus", class: "gpus" }, gpus.map(gpu => gpuCard(app, gpu))),
        total === 0 ? emptyState() : [timelineView(app), programs(app)],
    ];
}
