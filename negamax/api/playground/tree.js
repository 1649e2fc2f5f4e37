// A conversation with branches. Every message stores the message before it, and one of several next
// messages is chosen.

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
    this.messages = []; // in the order of creation: {id, parent, role, …}
    this.chosen = new Map(); // id of a message, or null for the start -> id of the next message
    this.lastId = 0;
  }

  // Restores a conversation from the store's record.
  static restored(record) {
    const conversation = new Conversation(record);
    conversation.messages = record.messages.map((message) =>
      message.role === "assistant" ? Answer.restored(message) : message,
    );
    conversation.chosen = new Map(record.chosen);
    conversation.lastId = Math.max(0, ...record.messages.map((message) => message.id));
    return conversation;
  }

  // Returns the record for the store.
  record() {
    const { id, title, isNamed, created, updated } = this;
    const messages = this.messages.map((message) =>
      message instanceof Answer ? message.record() : message,
    );
    return { id, title, isNamed, created, updated, messages, chosen: [...this.chosen] };
  }

  // Returns the messages to show and send: those along the chosen branches, from the start.
  path() {
    const byId = new Map(this.messages.map((message) => [message.id, message]));
    const path = [];
    for (let id = this.chosen.get(null); id !== undefined; id = this.chosen.get(id))
      path.push(byId.get(id));
    return path;
  }

  // Adds a message after the last message of the path, or as another version of `sibling`.
  add(message, sibling = null) {
    message.id = this.lastId += 1;
    message.parent = sibling ? sibling.parent : (this.path().at(-1)?.id ?? null);
    this.messages.push(message);
    this.chosen.set(message.parent, message.id);
    this.updated = Date.now();
    if (!this.isNamed && !this.title && message.role === "user") this.title = titleOf(message);
  }

  // Returns all versions of a message, including the message itself.
  versions(message) {
    return this.messages.filter((other) => other.parent === message.parent);
  }

  choose(message) {
    this.chosen.set(message.parent, message.id);
  }

  // Removes a message with all later messages, and returns a function that restores them.
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

// A page from another machine over plain HTTP has no randomUUID.
function fallbackId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (number) =>
    number.toString(16).padStart(8, "0"),
  ).join("");
}
