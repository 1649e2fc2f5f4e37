// Small helpers for elements. Text becomes text nodes here and nowhere markup.

// An element with attributes, listeners (`on`) and children (nodes or text; null and false are left
// out).
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

// What is pressed now. A browser makes a click of what the same element was pressed and released
// on, so nothing may replace it meanwhile.
let press = null; // {target, promise, resolve}; the promise: of its end
const pressed = ({ target }) => (press ??= { target, ...Promise.withResolvers() });
const released = () => {
  const ended = press;
  press = null;
  setTimeout(() => ended?.resolve()); // the click comes first
};
addEventListener("pointerdown", (event) => event.button === 0 && pressed(event));
addEventListener("keydown", (event) => event.key === " " && pressed(event));
for (const event of ["pointerup", "pointercancel", "keyup", "blur"])
  addEventListener(event, released);

// The end of a press on something within `element`, as a promise; null: there is none.
export function pressWithin(element) {
  return press && element.contains(press.target) ? press.promise : null;
}

// A button that does `action`.
export function button(label, action, attributes = {}) {
  return h("button", { type: "button", ...attributes, on: { click: action } }, label);
}

// A button that copies what `text()` gives, and says for a moment that it did.
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
  // Over plain HTTP to another machine a page has no clipboard object; copying a selection still
  // works there.
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

// `text` saved as a file of the person at the browser.
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

// `seconds` for people: 240 ms, 3.2 s, 1 min 5 s, 2 min.
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min` + (whole % 60 ? ` ${whole % 60} s` : "");
}

// A count with separators for thousands: 4,096.
export function count(number) {
  return number.toLocaleString("en-US");
}
