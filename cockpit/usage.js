/* Usage by user, unit and day. */

import { h } from "./dom.js";
import { duration, size, tenantName } from "./format.js";
import { card, notice, table } from "./parts.js";
import { sentence } from "./scheduler.js";

const DAY = 86400;
const PERIODS = [[7, "7 days"], [14, "14 days"], [30, "30 days"], [90, "90 days"]];
/** The programs with the most use have a colour of their own. */
const COLOURED = 5;

const BY = {
    tenant: { name: "User", columns: ["tenant"], label: row => tenantName(row.tenant) },
    unit: { name: "Unit", columns: ["tenant", "unit"], label: row => `${row.unit || "no unit"} of ${tenantName(row.tenant)}` },
};

/** Reads the use of the chosen period. Days are few rows, whatever the number of programs. */
export async function loadUsage(app) {
    const { days, by } = app.usageChoice;
    const today = Math.floor(Date.now() / 1000 / DAY) * DAY;
    const since = today - (days - 1) * DAY;
    try {
        // One after another: few queries of one user may wait for records.
        const rows = await app.scheduler.usage(since, BY[by].columns);
        const daily = await app.scheduler.usage(since, ["day", ...(by === "tenant" ? ["tenant"] : [])]);
        rows.sort((a, b) => b["lock-seconds"] - a["lock-seconds"]);
        app.usage = { rows, daily, since, days, by };
    } catch (error) {
        app.usage = { error: sentence(error) };
    }
}

/** Hours of each name on each day: the most used names, and the sum of all others. */
function series(usage) {
    const names = usage.by === "tenant" ? usage.rows.slice(0, COLOURED).map(row => row.tenant) : [];
    const days = Array.from({ length: usage.days }, (_, place) => ({ begins: usage.since + place * DAY, hours: {}, total: 0 }));
    for (const row of usage.daily) {
        const day = days[Math.floor((row.begins - usage.since) / DAY)];
        if (!day)
            continue;
        const name = names.includes(row.tenant) ? row.tenant : "";
        const hours = row["lock-seconds"] / 3600;
        day.hours[name] = (day.hours[name] ?? 0) + hours;
        day.total += hours;
    }
    const hasOthers = days.some(day => day.hours[""] > 0);
    return { names: hasOthers || names.length === 0 ? [...names, ""] : names, days };
}

function dayName(begins) {
    return new Date(begins * 1000).toLocaleDateString(undefined, { month: "short", day: "numeric", timeZone: "UTC" });
}

function plot(usage) {
    const { names, days } = series(usage);
    const most = Math.max(...days.map(day => day.total), 0.01);
    const [width, height, left, bottom] = [640, 200, 56, 24];
    const slot = (width - left) / days.length;
    const y = hours => (height - bottom) * (1 - hours / most);
    const text = hours => hours === 0 ? "0" : hours >= 1 ? `${hours.toFixed(1)} h`
        : hours >= 1 / 60 ? `${(hours * 60).toFixed(1)} min` : duration(hours * 3600);
    const every = Math.ceil(days.length / 8);
    const shown = name => name === "" ? (names.length > 1 ? "Others" : "All programs") : tenantName(name);
    const bars = days.map((day, place) => {
        let base = 0;
        return names.map((name, colour) => {
            const hours = day.hours[name] ?? 0;
            const bar = h("rect", {
                key: `${day.begins}-${name}`,
                class: `series-${name === "" ? "others" : colour}`,
                x: (left + place * slot + slot * 0.12).toFixed(1), width: (slot * 0.76).toFixed(1),
                y: y(base + hours).toFixed(1), height: Math.max(0, y(base) - y(base + hours)).toFixed(1),
            }, h("title", {}, `${dayName(day.begins)}, ${shown(name)}: ${text(hours)}`));
            base += hours;
            return hours > 0 ? bar : null;
        });
    });
    const used = days.filter(day => day.total > 0).map(day => `${dayName(day.begins)} ${text(day.total)}`);
    return h("figure", { class: "plot" },
        h("figcaption", {}, "Time with the lock of a GPU, each day (UTC)"),
        h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Time with the lock: ${used.join(", ") || "none"}` },
            [0, 0.5, 1].map(part => [
                h("line", { x1: left, x2: width, y1: y(most * part), y2: y(most * part), class: "axis" }),
                h("text", { x: left - 6, y: y(most * part) + (part === 1 ? 10 : 4), class: "tick right" }, text(most * part)),
            ]),
            bars,
            days.map((day, place) => place % every === 0
                ? h("text", { x: left + (place + 0.5) * slot, y: height - 8, class: "tick middle" }, dayName(day.begins)) : null)),
        h("ul", { class: "legend" }, names.map((name, colour) => h("li", { key: name },
            h("span", { class: `swatch series-${name === "" ? "others" : colour}`, "aria-hidden": "true" }), shown(name)))));
}

const gibHours = byteSeconds => `${(byteSeconds / 2 ** 30 / 3600).toFixed(1)} GiB·h`;

const COLUMNS = [
    { name: "Time with lock", isNumber: true }, { name: "Time waited", isNumber: true }, { name: "Turns", isNumber: true },
    { name: "Memory on GPU", isNumber: true }, { name: "Memory in host", isNumber: true },
    { name: "Moved to GPU", isNumber: true }, { name: "Moved to host", isNumber: true },
];

function row(entry, by) {
    return {
        key: `${entry.tenant} ${entry.unit}`,
        cells: [
            BY[by].label(entry), duration(entry["lock-seconds"]), duration(entry["wait-seconds"]), String(entry.grants),
            gibHours(entry["resident-byte-seconds"]), gibHours(entry["swapped-byte-seconds"]),
            size(entry["swapped-in-bytes"]), size(entry["swapped-out-bytes"]),
        ],
    };
}

export function usageView(app) {
    const { usage, usageChoice } = app;
    const choose = (name, value) => app.chooseUsage({ ...usageChoice, [name]: value });
    const filters = h("form", { key: "filters", class: "filters", onsubmit: event => event.preventDefault() },
        h("label", {}, "Group by", h("select", { id: "by", value: usageChoice.by, onchange: event => choose("by", event.target.value) },
            Object.entries(BY).map(([value, { name }]) => h("option", { key: value, value }, name)))),
        h("label", {}, "Show the last", h("select", {
            id: "days", value: String(usageChoice.days), onchange: event => choose("days", Number(event.target.value)),
        }, PERIODS.map(([days, text]) => h("option", { key: days, value: String(days) }, text)))));
    if (!usage)
        return [filters, h("p", { key: "wait", class: "detail" }, "Reading the records…")];
    if (usage.error)
        return [filters, notice("warning", usage.error)];
    return [
        filters,
        app.permissions["see-commands"] ? null
            : h("p", { key: "own", class: "detail", id: "only-own" }, "This is your own use. Administrators see the use of all users."),
        usage.rows.length === 0 ? card("No use", { key: "none" }, h("p", {}, "No program has used a GPU in this time.")) : [
            card("By day", { key: "days" }, plot(usage)),
            card(`By ${BY[usage.by].name.toLowerCase()}`, { key: "rows" },
                table("Use", [{ name: BY[usage.by].name }, ...COLUMNS], usage.rows.slice(0, 200).map(entry => row(entry, usage.by)))),
        ],
    ];
}
