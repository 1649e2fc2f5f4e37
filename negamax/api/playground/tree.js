// A conversation with its branches: every message knows the one before it, and of several that
// follow one, one is chosen.

import { Answer } from "./stream.js";

const MAX_TITLE = 60; // characters

export class Conversation {
  constructor({
    id = crypto.randomUUID?.() ?? fallbackId(),
    title = "",
    isNamed = false,
    created = Date.now(),
    updated = created,
  } = {}) {
    Object.assign(this, { id, title, isNamed, created, updated });
    this.messages = []; // in the order in which they were made: {id, parent, role, …}
    this.chosen = new Map(); // id of a message, or null for the start -> id of the next one
    this.lastId = 0;
  }

  // A conversation as the store keeps it.
  static restored(record) {
    const conversation = new Conversation(record);
    conversation.messages = record.messages.map((message) =>
      message.role === "assistant" ? Answer.restored(message) : message,
    );
    conversation.chosen = new Map(record.chosen);
    conversation.lastId = Math.max(0, ...record.messages.map((message) => message.id));
    return conversation;
  }

  // What the store keeps.
  record() {
    const { id, title, isNamed, created, updated } = this;
    const messages = this.messages.map((message) =>
      message instanceof Answer ? message.record() : message,
    );
    return { id, title, isNamed, created, updated, messages, chosen: [...this.chosen] };
  }

  // The messages that are shown and sent: from the beginning along the chosen branches.
  path() {
    const byId = new Map(this.messages.map((message) => [message.id, message]));
    const path = [];
    for (let id = this.chosen.get(null); id !== undefined; id = this.chosen.get(id))
      path.push(byId.get(id));
    return path;
  }

  // Adds a message after the last one of the path, or in place of `sibling` as another version of
  // it.
  add(message, sibling = null) {
    message.id = this.lastId += 1;
    message.parent = sibling ? sibling.parent : (this.path().at(-1)?.id ?? null);
    this.messages.push(message);
    this.chosen.set(message.parent, message.id);
    this.updated = Date.now();
    if (!this.isNamed && !this.title && message.role === "user") this.title = titleOf(message);
  }

  // All versions of a message, itself included.
  versions(message) {
    return this.messages.filter((other) => other.parent === message.parent);
  }

  choose(message) {
    this.chosen.set(message.parent, message.id);
  }

  // Removes a message with all that follows it; the function that is given back undoes it.
  remove(message) {
    const before = { messages: [...this.messages], chosen: new Map(this.chosen) };
    const versions = this.versions(message);
    const gone = new Set([message.id]);
    for (const other of this.messages) if (gone.has(other.parent)) gone.add(other.id);
    this.messages = this.messages.filter((other) => !gone.has(other.id));
    for (const id of gone) this.chosen.delete(id);
    const neighbour =
      versions[versions.indexOf(message) + 1] ?? versions[versions.indexOf(message) - 1];
    if (neighbour) this.chosen.set(message.parent, neighbour.id);
    else this.chosen.delete(message.parent);
    return () => Object.assign(this, before);
  }

  rename(title) {
    Object.assign(this, { title, isNamed: true });
  }
}

function titleOf(message) {
  const text = (message.content || message.attachments?.[0]?.name || "").trim().split("\n", 1)[0];
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1).trimEnd()}…` : text;
}

// Over plain HTTP to another machine a page has no randomUUID.
function fallbackId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (number) =>
    number.toString(16).padStart(8, "0"),
  ).join("");
}
