/* A small renderer: views return trees of plain objects, and `render` changes only the parts of the
   document that differ from the previous tree. Focus, selections and scroll positions survive. */

const SVG = "http://www.w3.org/2000/svg";

/** Describes an element. `props`: attributes, `onX` listeners, and properties such as `value`. */
export function h(tag, props, ...children) {
    return { tag, props: props || {}, key: props?.key, children: flatten(children) };
}

function flatten(children) {
    return children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false)
        .map(child => typeof child === "object" ? child : String(child));
}

/** Properties that the user changes too. Written only if the wanted value has changed. */
const OWN = new Set(["value", "checked"]);

function setProps(node, before, now) {
    for (const name in before) {
        if (!(name in now))
            setProp(node, name, before[name], null);
    }
    for (const name in now) {
        if (before[name] !== now[name])
            setProp(node, name, before[name], now[name]);
    }
}

function setProp(node, name, before, now) {
    if (name === "key")
        return;
    if (name.startsWith("on")) {
        const event = name.slice(2).toLowerCase();
        if (before)
            node.removeEventListener(event, before);
        if (now)
            node.addEventListener(event, now);
    } else if (name === "style") {
        // The page's content security policy forbids the attribute, but not the property.
        for (const part in { ...before, ...now })
            node.style.setProperty(part, now?.[part] ?? "");
    } else if (OWN.has(name)) {
        node[name] = now ?? "";
    } else if (now === null || now === undefined || now === false) {
        node.removeAttribute(name);
    } else {
        node.setAttribute(name, now === true ? "" : now);
    }
}

function create(item, inSvg) {
    if (typeof item === "string")
        return document.createTextNode(item);
    const isSvg = inSvg || item.tag === "svg";
    const node = isSvg ? document.createElementNS(SVG, item.tag) : document.createElement(item.tag);
    item.children.forEach(child => node.append(create(child, isSvg)));
    setProps(node, {}, item.props);
    return node;
}

function isSame(before, now) {
    if (typeof before === "string" || typeof now === "string")
        return typeof before === typeof now;
    return before.tag === now.tag && before.key === now.key;
}

function patch(node, before, now) {
    if (typeof now === "string") {
        if (before !== now)
            node.data = now;
        return;
    }
    patchChildren(node, before.children, now.children);
    setProps(node, before.props, now.props);
}

function patchChildren(parent, before, now) {
    const nodes = [...parent.childNodes];
    const keyed = new Map();
    before.forEach((item, place) => {
        if (item.key !== undefined)
            keyed.set(item.key, place);
    });
    const used = new Set();
    const kept = now.map((item, place) => {
        const from = item.key === undefined ? place : keyed.get(item.key);
        if (from === undefined || from >= before.length || used.has(from) || !isSame(before[from], item))
            return undefined;
        used.add(from);
        return from;
    });
    // Removed first, so that the remaining nodes need not move: a node that moves loses the focus.
    nodes.forEach((node, place) => {
        if (!used.has(place))
            node.remove();
    });
    let at = parent.firstChild;
    now.forEach((item, place) => {
        const from = kept[place];
        if (from !== undefined)
            patch(nodes[from], before[from], item);
        const node = from === undefined ? create(item, parent.namespaceURI === SVG) : nodes[from];
        if (node === at)
            at = at.nextSibling;
        else
            parent.insertBefore(node, at);
    });
}

const rendered = new WeakMap();

/** Makes the contents of `container` equal `items`. */
export function render(container, items) {
    const now = flatten([items]);
    patchChildren(container, rendered.get(container) ?? [], now);
    rendered.set(container, now);
}
