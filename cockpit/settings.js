/* Settings and rules. Users who may not change them see their values. */

import { h } from "./dom.js";
import { duration, size, userName } from "./format.js";
import { button, card, confirm, facts, notice, table } from "./parts.js";
import { sentence } from "./scheduler.js";

const SETTINGS = [
    { name: "TimeQuantum", title: "Time quantum", type: "u", help: "The longest turn while other programs wait, in seconds.", min: 1, max: 3600 },
    { name: "MaxWait", title: "Longest wait", type: "u", help: "The longest time until a program's turn, in seconds; 0 means no limit.", min: 0, max: 3600 },
    { name: "AntiThrash", title: "Anti-thrash", type: "s", help: "Whether programs exclude each other on a GPU.", values: ["auto", "on", "off"] },
    { name: "Policy", title: "Policy", type: "s", help: "The order in which programs run.", values: ["fcfs", "adaptive"] },
];
const SET_HERE = "set at run time";
/** Keys of rules whose value is a list, separated by commas. */
const LISTS = ["allowed-gpus"];

export async function loadSettings(app) {
    try {
        app.settings = { values: await app.scheduler.settings(), rules: await app.scheduler.rules() };
    } catch (error) {
        app.settings = { error: sentence(error) };
    }
}

function shownValue(setting, value) {
    return setting.type === "u" ? (value === 0 ? "no limit" : duration(value).replace(".0", "")) : value;
}

function settingForm(app, setting, value) {
    const id = `set-${setting.name}`;
    const edit = app.edits[setting.name] ?? String(value);
    const change = event => app.edit(setting.name, event.target.value);
    const input = setting.values
        ? h("select", { id, value: edit, onchange: change, "aria-describedby": `${id}-help` },
            setting.values.map(one => h("option", { key: one, value: one }, one)))
        : h("input", { id, type: "number", min: setting.min, max: setting.max, value: edit, oninput: change, "aria-describedby": `${id}-help` });
    const save = async () => {
        const wanted = setting.type === "u" ? Number(edit) : edit;
        if (await app.try(() => app.scheduler.set(setting.name, setting.type, wanted), `${setting.title} is now ${edit}.`))
            app.edit(setting.name, undefined);
        await app.reloadSettings();
    };
    return h("div", { key: setting.name, class: "setting" },
        h("label", { for: id }, setting.title), input,
        edit !== String(value) ? button("Save", save, { key: "save", class: "button primary", id: `${id}-save` }) : null,
        h("p", { key: "help", id: `${id}-help`, class: "detail" }, setting.help));
}

/** Keys of rules whose value is a number of bytes. */
const BYTES = ["memory-max", "memory-low", "swap-max"];

function value(key, what) {
    if (BYTES.includes(key) && typeof what === "number")
        return size(what);
    if (key === "user" && typeof what === "number")
        return userName(what);
    return Array.isArray(what) ? what.join(", ") : String(what);
}

/** The value of a rule's key as D-Bus takes it. */
function variant(key, text) {
    if (LISTS.includes(key))
        return cockpit.variant("as", text.split(",").map(one => one.trim()));
    if (/^-?\d+$/.test(text))
        return cockpit.variant("x", Number(text));
    if (text === "true" || text === "false")
        return cockpit.variant("b", text === "true");
    return cockpit.variant("s", text);
}

function parseKeys(text) {
    const keys = {};
    for (const line of text.split("\n").map(one => one.trim()).filter(one => one)) {
        const [, key, what] = /^([a-z-]+)\s*=\s*(.*)$/.exec(line) ?? [];
        if (!key)
            throw new Error(`“${line}” is not of the form key=value.`);
        if (key in keys)
            throw new Error(`${key} is given twice.`);
        keys[key] = variant(key, what.replace(/^"(.*)"$/, "$1"));
    }
    if (Object.keys(keys).length === 0)
        throw new Error("A rule needs at least one key.");
    return keys;
}

function ruleForm(app) {
    const { ruleName = "", ruleKeys = "" } = app.edits;
    const save = async () => {
        const set = async () => app.scheduler.setRule(ruleName.trim(), parseKeys(ruleKeys));
        if (await app.try(set, `The rule ${ruleName.trim()} is in effect.`)) {
            app.edit("ruleName", undefined);
            app.edit("ruleKeys", undefined);
        }
        await app.reloadSettings();
    };
    return card("Set a rule", { key: "set-rule", id: "set-rule" },
        h("div", { class: "setting" },
            h("label", { for: "rule-name" }, "Name"),
            h("input", { id: "rule-name", type: "text", maxlength: 64, value: ruleName, oninput: event => app.edit("ruleName", event.target.value) })),
        h("div", { class: "setting" },
            h("label", { for: "rule-keys" }, "Keys"),
            h("textarea", {
                id: "rule-keys", rows: 4, value: ruleKeys, placeholder: "user=alice\nweight=50\nmemory-max=20G",
                "aria-describedby": "rule-help", oninput: event => app.edit("ruleKeys", event.target.value),
            })),
        h("p", { id: "rule-help", class: "detail" }, "One key=value in each line; nvshare.toml(5) lists the keys. A rule of the same name is replaced."),
        button("Set the rule", save, { class: "button primary", id: "rule-save" }));
}

function rulesCard(app, rules, mayChange) {
    if (rules.length === 0)
        return card("Rules", { key: "rules" }, h("p", { class: "detail" }, "No rules: all users have equal shares, and no program has a limit."));
    const rows = rules.map((rule, place) => {
        const { name, origin, ...keys } = rule;
        const isHere = origin === SET_HERE;
        const remove = button("Remove", async () => {
            await app.try(() => app.scheduler.setRule(name, {}), `The rule ${name} is removed.`);
            await app.reloadSettings();
        }, { "aria-label": `Remove the rule ${name}` });
        return {
            key: `${place} ${name}`,
            cells: [
                name || "without a name", Object.entries(keys).map(([key, what]) => `${key} = ${value(key, what)}`).join(", "),
                origin, ...(mayChange ? [isHere ? remove : ""] : []),
            ],
        };
    });
    return card("Rules", { key: "rules", id: "rules" },
        h("p", { class: "detail" }, "The first rule that matches a program applies to it."),
        table("Rules", [{ name: "Name" }, { name: "Keys" }, { name: "Defined in" }, ...(mayChange ? [{ name: "Change" }] : [])], rows));
}

export function settingsView(app) {
    const { settings } = app;
    const mayChange = app.permissions["change-settings"];
    if (!settings)
        return [h("p", { class: "detail" }, "Reading the settings…")];
    if (settings.error)
        return [notice("warning", settings.error)];
    const { values, rules } = settings;
    const reset = async () => {
        if (await confirm("Discard all settings and rules that were set at run time?", "Discard"))
            await app.try(() => app.scheduler.call("Reset", ""), "The configuration files are in effect.");
        await app.reloadSettings();
    };
    return [
        mayChange ? null : h("p", { key: "why", class: "detail", id: "read-only" },
            "Only administrators may change settings and rules. In Cockpit, turn on administrative access."),
        card("Settings", { key: "settings", id: "settings" },
            mayChange ? SETTINGS.map(setting => settingForm(app, setting, values[setting.name]))
                : facts(SETTINGS.map(setting => [setting.title, shownValue(setting, values[setting.name])])),
            facts([["Version of the scheduler", values.Version]])),
        rulesCard(app, rules, mayChange),
        mayChange ? ruleForm(app) : null,
        mayChange ? h("div", { key: "reset", class: "controls" },
            button("Read the configuration files again", async () => {
                await app.try(() => app.scheduler.call("Reload", ""), "The configuration files have been read.");
                await app.reloadSettings();
            }),
            button("Discard changes", reset, { class: "button danger", id: "reset" })) : null,
    ];
}
