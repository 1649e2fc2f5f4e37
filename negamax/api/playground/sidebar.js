// Lists conversations, which the user can open, search, rename and delete.

import { button, h, pressWithin } from "./dom.js";

const DAY = 24 * 60 * 60 * 1000;
const SEARCH_PAUSE = 150; // milliseconds after the last letter

export class Sidebar {
  // `actions`: {open(id), rename(id, title), remove(id), isRunning(id), current()}.
  constructor({ list, search, store, actions }) {
    Object.assign(this, { list, search, store, actions });
    this.renaming = null;
    this.refreshing = null; // promise of the current refresh
    this.isStale = false; // whether another refresh was requested meanwhile
    let timer = null;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.refresh(), SEARCH_PAUSE);
    });
  }

  // Shows the stored conversations that match the search. The promise ends with the latest list.
  refresh() {
    this.isStale = true;
    return (this.refreshing ??= this.follow());
  }

  async follow() {
    try {
      while (this.isStale) {
        this.isStale = false;
        const words = this.search.value.trim().toLowerCase();
        const [heads, found] = await Promise.all([
          this.store.heads(),
          words ? this.store.search(words) : null,
        ]);
        for (let press; (press = pressWithin(this.list)); ) await press;
        if (this.renaming) continue; // a new list would drop the text in the field
        this.show(found ? heads.filter((head) => found.has(head.id)) : heads, words);
      }
    } finally {
      this.refreshing = null;
    }
  }

  show(heads, words) {
    const groups = Map.groupBy(heads, ageOf);
    const { activeElement } = document;
    const focused = activeElement?.closest?.("[data-id]");
    const place = focused && [...focused.querySelectorAll("button")].indexOf(activeElement);
    const parts = [...groups].flatMap(([age, group]) => [
      h("h3", {}, age),
      h("ul", {}, ...group.map((head) => this.item(head))),
    ]);
    const nothing = words ? "Nothing found" : "No conversations yet";
    this.list.replaceChildren(...(parts.length ? parts : [h("p", { class: "state" }, nothing)]));
    if (focused) this.focus(focused.dataset.id, place);
  }

  // Focuses a button in the row of a conversation.
  focus(id, place = 0) {
    const buttons = this.list.querySelectorAll(`[data-id="${CSS.escape(id)}"] button`);
    buttons[0]?.focus(); // this focus makes the other buttons visible
    buttons[place]?.focus();
  }

  item({ id, title }) {
    const shown = title || "Untitled";
    const isCurrent = id === this.actions.current();
    const running =
      this.actions.isRunning(id) && h("span", { class: "dot", title: "An answer is coming in" });
    const open = h(
      "button",
      { type: "button", class: "open", title: shown, "aria-current": isCurrent ? "true" : null },
      h("span", {}, shown),
      running,
    );
    open.addEventListener("click", () => this.actions.open(id));
    const rename = button("Rename", () => this.startRenaming(item, id, shown), {
      class: "quiet",
      "aria-label": `Rename “${shown}”`,
    });
    const remove = button("Delete", () => this.actions.remove(id), {
      class: "quiet",
      "aria-label": `Delete “${shown}”`,
    });
    const item = h(
      "li",
      { "data-id": id, class: isCurrent ? "current" : null },
      open,
      h("span", { class: "tools" }, rename, remove),
    );
    return item;
  }

  startRenaming(item, id, title) {
    const field = h("input", { type: "text", "aria-label": "Title", maxlength: 200 });
    field.value = title;
    this.renaming = id;
    const finish = async (isKept) => {
      if (this.renaming !== id) return;
      this.renaming = null;
      if (isKept && field.value.trim()) await this.actions.rename(id, field.value.trim());
      await this.refresh();
      if (document.activeElement === document.body) this.focus(id); // no element has the focus
    };
    field.addEventListener("blur", () => finish(true));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Escape" || event.key === "Enter") finish(event.key === "Enter");
    });
    item.replaceChildren(field);
    field.focus();
    field.select();
  }
}

function ageOf({ updated }) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - updated) / DAY) + 1;
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  return days <= 30 ? "Last 30 days" : "Older";
}
