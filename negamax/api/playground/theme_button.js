// The button that switches between the light and the dark theme.

import { keep } from "./kept.js";

export function bindTheme(button) {
  button.addEventListener("click", () => {
    const root = document.documentElement;
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme ?? system) === "dark" ? "light" : "dark";
    keep("theme", root.dataset.theme);
  });
}
