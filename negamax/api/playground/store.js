// Stores conversations in the browser's database for this address, or in memory if the browser has
// no storage.

const DATABASE = "negamax";
const VERSION = 1;
const changes = typeof BroadcastChannel === "function" ? new BroadcastChannel(DATABASE) : null;

// Calls `listener` with the id of a conversation that another tab has changed.
export function onChange(listener) {
  changes?.addEventListener("message", (event) => listener(event.data));
}

// The store can be used at once. Calls wait until the database is open.
export class Store {
  constructor() {
    this.inner = opened().then(
      (database) => new DatabaseStore(database),
      () => new MemoryStore(),
    );
  }

  // Returns whether conversations outlive the tab.
  async isLasting() {
    return (await this.inner) instanceof DatabaseStore;
  }

  // Returns {id, title, created, updated} of all conversations, the latest first.
  async heads() {
    const heads = await (await this.inner).heads();
    return heads.sort((a, b) => b.updated - a.updated);
  }

  // Returns a conversation's record, or undefined.
  async load(id) {
    return (await this.inner).load(id);
  }

  async save(record) {
    return (await this.inner).save(record);
  }

  async remove(id) {
    return (await this.inner).remove(id);
  }

  // Returns the ids of conversations that contain `words`, which are in lower case.
  async search(words) {
    return (await this.inner).search(words);
  }
}

async function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" }); // for the list
      request.result.createObjectStore("conversations", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
}

function result(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function headOf({ id, title, created, updated }) {
  return { id, title, created, updated };
}

// Returns whether the title or the messages of a conversation contain `words`.
function hasWords({ title, messages }, words) {
  return [title, ...messages.map((message) => message.content)].some((text) =>
    text.toLowerCase().includes(words),
  );
}

class DatabaseStore {
  constructor(database) {
    this.database = database;
    database.onversionchange = () => database.close(); // another tab has a newer page
  }

  heads() {
    return result(this.database.transaction("heads").objectStore("heads").getAll());
  }

  load(id) {
    return result(this.database.transaction("conversations").objectStore("conversations").get(id));
  }

  save(record) {
    return this.change(record.id, (heads, conversations) => {
      heads.put(headOf(record));
      conversations.put(record);
    });
  }

  remove(id) {
    return this.change(id, (heads, conversations) => {
      heads.delete(id);
      conversations.delete(id);
    });
  }

  async search(words) {
    const found = new Set();
    const request = this.database
      .transaction("conversations")
      .objectStore("conversations")
      .openCursor();
    for (let cursor = await result(request); cursor; cursor = await result(request)) {
      if (hasWords(cursor.value, words)) found.add(cursor.value.id);
      cursor.continue();
    }
    return found;
  }

  change(id, write) {
    const transaction = this.database.transaction(["heads", "conversations"], "readwrite");
    write(transaction.objectStore("heads"), transaction.objectStore("conversations"));
    return new Promise((resolve, reject) => {
      transaction.onabort = () => reject(transaction.error); // the usual cause is a full disk
      transaction.oncomplete = () => {
        changes?.postMessage(id);
        resolve();
      };
    });
  }
}

class MemoryStore {
  records = new Map();

  async heads() {
    return [...this.records.values()].map(headOf);
  }

  async load(id) {
    return this.records.get(id);
  }

  async save(record) {
    this.records.set(record.id, structuredClone(record));
  }

  async remove(id) {
    this.records.delete(id);
  }

  async search(words) {
    return new Set(
      [...this.records.values()]
        .filter((record) => hasWords(record, words))
        .map((record) => record.id),
    );
  }
}
