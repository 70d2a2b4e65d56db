/* Parts that several views use. */

import { h } from "./dom.js";
import { size } from "./format.js";

export function label(text, kind) {
    return h("span", { class: `label ${kind}` }, text);
}

export function card(title, props, ...children) {
    const id = `card-${title.replace(/\W+/g, "-").toLowerCase()}`;
    return h("section", { class: "card", "aria-labelledby": id, ...props },
        h("h2", { id }, title), children);
}

export function notice(kind, text, ...more) {
    return h("div", { class: `notice ${kind}`, role: kind === "danger" ? "alert" : null },
        h("p", {}, text), more);
}

/** A list of names and values. Values that are empty are left out. */
export function facts(all) {
    const shown = all.filter(([, value]) => value !== null && value !== undefined && value !== "");
    return h("dl", { class: "facts" }, shown.map(([name, value]) => h("div", { key: name },
        h("dt", {}, name), h("dd", {}, value))));
}

/** A button. While `run` is in progress, the button is disabled. */
export function button(text, run, props) {
    const click = async event => {
        const target = event.currentTarget;
        target.disabled = true;
        try {
            await run();
        } finally {
            target.disabled = false;
        }
    };
    return h("button", { type: "button", class: "button", ...props, onclick: click }, text);
}

/** Bytes by kind as one bar with a legend. The legend has all values as text. */
export function memoryBar(title, total, kinds) {
    const shown = kinds.filter(kind => kind.bytes > 0);
    const text = shown.map(kind => `${kind.name} ${size(kind.bytes)}`).join(", ");
    const part = kind => h("span", {
        key: kind.id,
        class: `part ${kind.id}`,
        style: { "flex-grow": String(kind.bytes) },
        title: `${kind.name}: ${size(kind.bytes)}`,
    });
    return h("figure", { class: "memory" },
        h("figcaption", {}, h("span", {}, title), h("span", { class: "amount" }, size(total))),
        h("div", { class: "meter", role: "img", "aria-label": `${title}, ${size(total)}: ${text || "empty"}` },
            shown.map(part)),
        h("ul", { class: "legend" }, shown.map(kind => h("li", { key: kind.id },
            h("span", { class: `swatch ${kind.id}`, "aria-hidden": "true" }),
            `${kind.name} ${size(kind.bytes)}`))));
}

/** A table in a region that scrolls sideways on narrow screens. */
export function table(caption, columns, rows) {
    return h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption },
        h("table", {},
            h("caption", { class: "hidden" }, caption),
            h("thead", {}, h("tr", {}, columns.map(column => h("th", {
                scope: "col",
                class: column.isNumber ? "number" : null,
            }, column.name)))),
            h("tbody", {}, rows.map(row => h("tr", { key: row.key }, row.cells.map((cell, place) =>
                place === 0
                    ? h("th", { scope: "row" }, cell)
                    : h("td", { class: columns[place].isNumber ? "number" : null, "data-name": columns[place].name },
                        cell)))))));
}

/** Asks a question in a dialog. Escape and Cancel mean no. */
export function confirm(question, yes) {
    return new Promise(resolve => {
        const dialog = document.createElement("dialog");
        const text = document.createElement("p");
        text.id = "question";
        text.textContent = question;
        dialog.setAttribute("aria-labelledby", text.id);
        const choice = (name, kind, value) => {
            const chosen = document.createElement("button");
            chosen.type = "button";
            chosen.className = `button ${kind}`;
            chosen.textContent = name;
            chosen.addEventListener("click", () => dialog.close(value));
            return chosen;
        };
        const controls = document.createElement("div");
        controls.className = "controls";
        controls.append(choice(yes, "danger", "yes"), choice("Cancel", "", ""));
        dialog.append(text, controls);
        dialog.addEventListener("close", () => {
            dialog.remove();
            resolve(dialog.returnValue === "yes");
        });
        document.getElementById("dialogs").append(dialog);
        dialog.showModal();
    });
}
