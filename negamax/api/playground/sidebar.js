// The list of conversations: opened, searched, renamed and deleted here.

import { button, h } from "./dom.js";

const DAY = 24 * 60 * 60 * 1000;
const SEARCH_PAUSE = 150; // ms after the last letter

export class Sidebar {
  // `actions`: {open(id), rename(id, title), remove(id), isRunning(id), current()}.
  constructor({ list, search, store, actions }) {
    Object.assign(this, { list, search, store, actions });
    this.renaming = null;
    let timer = null;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.refresh(), SEARCH_PAUSE);
    });
  }

  // Shows what the store holds, as far as it fits the search.
  async refresh() {
    if (this.renaming) return; // the field would lose what is typed
    const words = this.search.value.trim().toLowerCase();
    const [heads, found] = await Promise.all([
      this.store.heads(),
      words ? this.store.search(words) : null,
    ]);
    if (this.renaming) return;
    const shown = found ? heads.filter((head) => found.has(head.id)) : heads;
    const groups = Map.groupBy(shown, ageOf);
    const focused = document.activeElement?.closest?.("[data-id]")?.dataset.id;
    const parts = [...groups].flatMap(([age, group]) => [
      h("h3", {}, age),
      h("ul", {}, ...group.map((head) => this.item(head))),
    ]);
    const nothing = words ? "Nothing found" : "No conversations yet";
    this.list.replaceChildren(...(parts.length ? parts : [h("p", { class: "state" }, nothing)]));
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
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
      this.list.querySelector(`[data-id="${CSS.escape(id)}"] button`)?.focus();
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
