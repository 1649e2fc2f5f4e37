// Small things that the browser keeps for this address: settings, the theme, which panels are open.
// Never the API key.

const PREFIX = "negamax.";

// The value kept under `name`, or `otherwise`.
export function kept(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise; // storage is blocked, or holds what is not JSON
  }
}

// Keeps `value` under `name`; null forgets it.
export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is blocked or full: the page works without
  }
}
