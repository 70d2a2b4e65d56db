/* Follows Cockpit's choice of light and dark, which the shell keeps in `shell:style`. */

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function apply(style) {
    const chosen = style || localStorage.getItem("shell:style") || "auto";
    const isDark = chosen === "dark" || (chosen === "auto" && dark.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    window.dispatchEvent(new Event("nvshare-theme"));
}

export function followTheme() {
    window.addEventListener("storage", event => event.key === "shell:style" && apply());
    window.addEventListener("cockpit-style", event => apply(event.detail?.style));
    dark.addEventListener("change", () => apply());
    apply();
}
