// Helpers for elements. Text always becomes text nodes, never markup.

// Makes an element with attributes, listeners (`on`) and children. Children are nodes or text; null
// and false are omitted.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value))
        element.addEventListener(event, listener);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== false));
  return element;
}

// The element that is pressed now. A browser sends a click only if the same element is pressed and
// released, so no code may replace the element in between.
let press = null; // {target, promise, resolve}; the promise resolves at the release
const pressed = ({ target }) => (press ??= { target, ...Promise.withResolvers() });
const released = () => {
  const ended = press;
  press = null;
  setTimeout(() => ended?.resolve()); // the browser sends the click first
};
addEventListener("pointerdown", (event) => event.button === 0 && pressed(event));
addEventListener("keydown", (event) => event.key === " " && pressed(event));
for (const event of ["pointerup", "pointercancel", "keyup", "blur"])
  addEventListener(event, released);

// Returns a promise of the end of a press within `element`, or null without a press.
export function pressWithin(element) {
  return press && element.contains(press.target) ? press.promise : null;
}

// Makes a button that calls `action`.
export function button(label, action, attributes = {}) {
  return h("button", { type: "button", ...attributes, on: { click: action } }, label);
}

// Makes a button that copies the result of `text()` and then shows "Copied" for a moment.
export function copyButton(text, attributes = {}) {
  const label = attributes.label ?? "Copy";
  const element = button(label, async () => {
    element.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (element.textContent = label), 1500);
  });
  element.className = "quiet";
  if (attributes.title) element.setAttribute("aria-label", attributes.title);
  return element;
}

async function copied(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  // A page from another machine over plain HTTP has no clipboard object, but can copy a selection.
  const field = h("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

// Saves `text` as a file on the user's machine.
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// Formats `seconds` as 240 ms, 3.2 s, 1 min 5 s or 2 min.
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min` + (whole % 60 ? ` ${whole % 60} s` : "");
}

// Formats a count with separators for thousands: 4,096.
export function count(number) {
  return number.toLocaleString("en-US");
}
