/* The last minutes: turns, waits and moves of each program, drawn on one canvas for each GPU. */

import { h } from "./dom.js";
import { duration } from "./format.js";
import { card } from "./parts.js";

const LANE = 18;
const AXIS = 20;
const PERIODS = [[60, "1 minute"], [300, "5 minutes"], [600, "10 minutes"]];
const KINDS = [
    ["holds", "Has the lock"], ["waits", "Waits"], ["returns", "Memory returns to the GPU"], ["leaves", "Memory leaves the GPU"],
];

function colours(canvas) {
    const style = getComputedStyle(canvas);
    const colour = name => style.getPropertyValue(`--${name}`).trim();
    return Object.fromEntries(["holds", "waits", "returns", "leaves", "text", "line"].map(name => [name, colour(name)]));
}

/** Steps of the axis in seconds. */
function step(period) {
    return [5, 10, 15, 30, 60, 120].find(seconds => period / seconds <= 6) ?? 300;
}

function draw(canvas, timeline, gpu, period) {
    const width = canvas.clientWidth;
    const height = gpu.lanes.length * LANE + AXIS;
    const scale = window.devicePixelRatio || 1;
    if (width === 0)
        return;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
        canvas.width = Math.round(width * scale);
        canvas.height = Math.round(height * scale);
        canvas.style.height = `${height}px`;
    }
    const colour = colours(canvas);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    const names = Math.min(180, width * 0.35);
    const area = width - names;
    const x = time => names + Math.max(0, 1 - (timeline.ends - time) / period) * area;
    context.textBaseline = "middle";
    gpu.lanes.forEach((lane, row) => {
        const top = row * LANE;
        context.fillStyle = colour.text;
        context.fillText(clip(context, lane.name, names - 8), 0, top + LANE / 2);
        // Waits are thin lines, and moves cover the lower half of a turn.
        for (const [kind, inset, tall] of [["waits", 8, 2], ["holds", 3, 12], ["leaves", 9, 6], ["returns", 9, 6]]) {
            context.fillStyle = colour[kind];
            for (const [what, from, to] of lane.spans) {
                if (what === kind)
                    context.fillRect(x(from), top + inset, Math.max(1, x(to) - x(from)), tall);
            }
        }
    });
    const bottom = gpu.lanes.length * LANE;
    context.strokeStyle = colour.line;
    context.fillStyle = colour.text;
    for (let ago = 0; ago <= period; ago += step(period)) {
        const at = x(timeline.ends - ago);
        context.beginPath();
        context.moveTo(at, 0);
        context.lineTo(at, bottom + 4);
        context.stroke();
        context.textAlign = ago === 0 ? "right" : ago >= period ? "left" : "center";
        context.fillText(ago === 0 ? "now" : `−${duration(ago).replace(".0", "")}`, at, bottom + 12);
    }
    context.textAlign = "left";
}

function clip(context, text, width) {
    if (context.measureText(text).width <= width)
        return text;
    let shown = text;
    while (shown.length > 1 && context.measureText(`${shown}…`).width > width)
        shown = shown.slice(0, -1);
    return `${shown}…`;
}

/** The time of each kind in a lane, in seconds. */
function totals(lane) {
    const all = {};
    for (const [kind, from, to] of lane.spans)
        all[kind] = (all[kind] ?? 0) + to - from;
    return all;
}

function describe(gpu) {
    const lanes = gpu.lanes.map(lane => {
        const all = totals(lane);
        const parts = KINDS.filter(([kind]) => all[kind]).map(([kind, name]) => `${name.toLowerCase()} ${duration(all[kind])}`);
        return `${lane.name}: ${parts.join(", ") || "nothing"}`;
    });
    return `${gpu.name || gpu.uuid}. ${lanes.join(". ")}`;
}

/** Draws all canvases. Called after the document has been updated. */
export function drawTimelines(app) {
    if (!app.timeline)
        return;
    for (const canvas of document.querySelectorAll("canvas[data-timeline]")) {
        const gpu = app.timeline.gpus.find(one => one.uuid === canvas.dataset.timeline);
        if (gpu)
            draw(canvas, app.timeline, gpu, app.period);
    }
}

export function timelineView(app) {
    const shown = (app.timeline?.gpus ?? []).filter(gpu => gpu.lanes.length > 0);
    return card("Turns and moves", { key: "timeline", id: "timeline" },
        h("form", { class: "filters", onsubmit: event => event.preventDefault() },
            h("label", {}, "Show the last", h("select", {
                id: "period",
                value: String(app.period),
                onchange: event => app.setPeriod(Number(event.target.value)),
            }, PERIODS.map(([seconds, text]) => h("option", { key: seconds, value: String(seconds) }, text)))),
            h("ul", { class: "legend" }, KINDS.map(([kind, name]) => h("li", { key: kind },
                h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), name)))),
        app.timelineError ? h("p", { key: "error", class: "detail" }, app.timelineError) : null,
        shown.length === 0 && !app.timelineError
            ? h("p", { key: "none", class: "detail" }, "No program has used a GPU in this time.") : null,
        shown.map(gpu => h("figure", { key: gpu.uuid, class: "lanes" },
            h("figcaption", {}, gpu.name || gpu.uuid),
            h("canvas", { "data-timeline": gpu.uuid, role: "img", "aria-label": describe(gpu) }))));
}
