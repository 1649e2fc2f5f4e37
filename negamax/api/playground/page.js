// Helpers for all parts of the page: elements by id, the notice above the message field, and texts
// for screen readers.

export const element = (id) => document.getElementById(id);

// Shows `text` with at most one button. An empty text hides the notice.
export function notice(text, action = null, { isCalm = false } = {}) {
  element("notice").hidden = !text;
  element("notice").classList.toggle("calm", isCalm);
  element("notice").replaceChildren(text, ...(action ? [action] : []));
}

export function announce(text) {
  element("announcer").textContent = text;
}
