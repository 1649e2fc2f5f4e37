// Stores settings, the theme and the open panels in the browser for this address. The API key is
// never stored here.

const PREFIX = "negamax.";

// Returns the value stored under `name`, or `otherwise`.
export function kept(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise; // storage is blocked, or its text is not JSON
  }
}

// Stores `value` under `name`; null deletes the value.
export function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is blocked or full, and the page works without storage
  }
}
