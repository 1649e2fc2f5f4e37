// The chat page: it handles the controls and the parts around the conversation.

import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { exported, imported } from "./conversation.js";
import { button, count, download, h } from "./dom.js";
import { keep, kept } from "./kept.js";
import { element, notice } from "./page.js";
import { getJson, key, ServerError, setKey } from "./server.js";
import {
  EXAMPLE_TOOLS,
  parsedTools,
  readSettings,
  requestFields,
  showDefaults,
  writeSettings,
} from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { onChange, Store } from "./store.js";
import { Answer } from "./stream.js";
import { bindStrip } from "./strip.js";
import { bindTheme } from "./theme_button.js";
import { Conversation } from "./tree.js";

const EXAMPLES = [
  { text: "Tom has 47 apples and buys 38 more. How many apples does he have now?" },
  { text: "What is the weather in Paris?", tools: EXAMPLE_TOOLS, note: "with a tool" },
  { text: "Who are you?" },
];
const isNarrow = matchMedia("(max-width: 60rem)");

const PANELS = ["list", "settings"];

const composer = element("composer");
const field = element("prompt");
const form = element("settings-form");
const scroller = element("scroller");
const models = new Map(); // name -> context length in tokens
let isFollowing = true; // whether the page scrolls to the newest text
let isStripBound = false;
let keyAction = null; // called once the user has entered a key

const store = new Store();
const attachments = new Attachments(element("files"), { refused: notice });
const chat = new Chat({
  store,
  settings: () => readSettings(form),
  model: () => element("model").value,
  isReady,
  changed,
  refused: askKey,
});
chat.followed = follow;
const sidebar = new Sidebar({
  list: element("conversations"),
  search: element("search"),
  store,
  actions: {
    open: (id) => {
      location.hash = id;
      if (isNarrow.matches) showPanel("list", false);
    },
    rename,
    remove,
    isRunning: (id) => chat.runs.has(id),
    current: () => chat.conversation.id,
  },
});

// ---- the conversation

function send() {
  const text = field.value.trim();
  if (chat.running || !(text || attachments.files.length || chat.pendingCalls.length) || !isReady())
    return;
  field.value = "";
  fit(field);
  isFollowing = true;
  chat.send(text, attachments.handOver());
}

// Returns whether the settings make a request; otherwise shows the reason.
function isReady() {
  notice("");
  if (!models.size) {
    notice("There is no connection to the server.", button("Try again", connect));
    return false;
  }
  try {
    requestFields(readSettings(form));
  } catch (error) {
    notice(error.message);
    return false;
  }
  if (form.checkValidity()) return true;
  showPanel("settings", true);
  form.reportValidity();
  return false;
}

// The address names the shown conversation once it is saved, or the conversation that is being
// opened. Only the user may change the address.
const addressed = () => location.hash.slice(1);

// Shows the conversation that the address names, or a new one.
async function openAddressed() {
  const id = addressed();
  if (id === chat.conversation.id) return;
  // A conversation that is being answered is not loaded: the answer may end before the load ends.
  const running = chat.runs.get(id)?.conversation;
  const record = id && !running ? await store.load(id) : null;
  if (addressed() !== id) return; // another conversation was opened meanwhile
  if (id && !running && !record) history.replaceState(null, "", location.pathname);
  show(running ?? (record ? Conversation.restored(record) : new Conversation()));
}

function show(conversation) {
  isFollowing = true;
  chat.open(conversation);
  follow();
  sidebar.refresh();
}

// Shows a conversation that is not saved yet.
function showNew(conversation) {
  if (addressed()) history.pushState(null, "", location.pathname);
  show(conversation);
}

function begin() {
  showNew(new Conversation());
  notice("");
  if (isNarrow.matches) showPanel("list", false);
  field.focus();
}

async function rename(id, title) {
  const record = await store.load(id);
  // Read after the load, because the user may have opened the conversation meanwhile.
  const open = id === chat.conversation.id ? chat.conversation : chat.runs.get(id)?.conversation;
  if (!open && !record) return; // another tab has deleted the conversation
  const conversation = open ?? Conversation.restored(record);
  conversation.rename(title);
  await store.save(conversation.record());
}

async function remove(id) {
  chat.forget(id);
  if (id === (addressed() || chat.conversation.id)) begin();
  const record = await store.load(id);
  await store.remove(id);
  sidebar.refresh();
  if (!record) return; // the conversation was deleted before
  const restore = async () => {
    await store.save(record);
    notice("");
    sidebar.refresh();
  };
  const title = record.title || "Untitled";
  notice(`“${title}” was deleted.`, button("Undo", restore), { isCalm: true });
}

function load(text) {
  const { messages, settings } = imported(text);
  const conversation = new Conversation();
  for (const message of messages) {
    conversation.add(
      message.role === "assistant"
        ? Object.assign(new Answer(), message, { isDone: true, finishReason: "stop" })
        : message,
    );
  }
  writeSettings(form, settings);
  settingsChanged();
  showNew(conversation);
  chat.save(conversation);
}

// ---- parts that follow the conversation

// `isShown`: the shown messages changed, or the last message is complete. `isSaved`: some
// conversation was saved.
function changed({ isShown = false, isSaved = false } = {}) {
  const isIdle = !chat.running;
  const calls = chat.pendingCalls;
  const { conversation } = chat;
  const path = conversation.path();
  element("welcome").hidden = path.length > 0;
  element("send").textContent = isIdle ? (calls.length ? "Send results" : "Send") : "Stop";
  element("send").classList.toggle("stop", !isIdle);
  field.placeholder = calls.length
    ? "Give the results above; add a message if you like"
    : "Write a message";
  const last = chat.lastView;
  for (const view of chat.views.values()) view?.enable(isIdle, view === last);
  if (isShown && calls.length && !field.value && document.activeElement === field)
    calls[0].field.focus();
  if (isIdle) showWindow(path.findLast((message) => message.usage)?.usage.total_tokens ?? 0);
  if (isSaved) sidebar.refresh();
  if (isSaved && path.length && !addressed())
    history.pushState(null, "", `#${conversation.id}`);
  follow();
}

function modelChanged() {
  const name = element("model").value;
  document.title = `${name} · Negamax`;
  element("welcome-model").textContent = name;
  showWindow(
    chat.conversation.path().findLast((message) => message.usage)?.usage.total_tokens ?? 0,
  );
}

function showWindow(tokens) {
  const window = models.get(element("model").value);
  element("window").hidden = !window;
  if (!window) return;
  element("window-text").textContent = tokens
    ? `${count(tokens)} of ${count(window)} tokens`
    : `${count(window)} tokens`;
  element("window-bar").value = tokens / window;
  element("window-bar").hidden = !tokens;
}

function follow() {
  if (isFollowing) scroller.scrollTop = scroller.scrollHeight;
  element("latest").hidden = isFollowing;
}

function fit(area) {
  area.rows = Math.min(10, area.value.split("\n").length);
  while (area.rows < 10 && area.scrollHeight > area.clientHeight + 2) area.rows += 1;
}

// ---- the server

function askKey(error, action) {
  keyAction = action;
  element("key-reason").textContent = error
    ? error.message
    : "Sent with every request to this server.";
  element("key-forget").hidden = !key();
  element("key").value = "";
  element("key-dialog").showModal();
}

async function useKey(event) {
  event.preventDefault();
  setKey(element("key").value.trim());
  element("key-dialog").close();
  const action = keyAction;
  keyAction = null;
  if (await connect()) action?.();
}

// Loads the models, and returns whether the server sent them.
async function connect() {
  const select = element("model");
  try {
    const { data } = await getJson("v1/models");
    const chosen = select.value;
    models.clear();
    for (const card of data) models.set(card.id, card.max_model_len ?? null);
    select.replaceChildren(...data.map((card) => h("option", {}, card.id)));
    if (models.has(chosen)) select.value = chosen;
    notice("");
    modelChanged();
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    select.replaceChildren(h("option", { value: "" }, "not connected"));
    if (error.status === 401) askKey(error, null);
    else notice(error.message, button("Try again", connect));
    return false;
  }
  const info = await getJson("server_info").catch(() => null);
  if (info) showDefaults(form, info.sampling_defaults);
  if (!isStripBound) bindStrip(element("server"));
  isStripBound = true;
  return true;
}

// ---- panels and settings

// `name` is "list" (of conversations) or "settings".
function showPanel(name, isShown) {
  document.body.classList.toggle(`with-${name}`, isShown);
  element(`${name}-toggle`).setAttribute("aria-expanded", String(isShown));
}

// Shows or hides a panel, and remembers the choice for the next load of the page.
function choosePanel(name, isShown) {
  showPanel(name, isShown);
  if (!isNarrow.matches) keep(`panel.${name}`, isShown);
}

function isPanelShown(name) {
  return document.body.classList.contains(`with-${name}`);
}

function bindPanel(name, first) {
  element(`${name}-toggle`).addEventListener("click", () => {
    choosePanel(name, !isPanelShown(name));
    if (isPanelShown(name)) first().focus();
  });
  element(`${name}-close`).addEventListener("click", () => {
    choosePanel(name, false);
    element(`${name}-toggle`).focus();
  });
}

function settingsChanged() {
  keep("settings", readSettings(form));
  const state = element("tools-state");
  let isBad = false;
  try {
    const names = parsedTools(form.elements.tools.value).map((tool) => tool.function.name);
    state.textContent = names.length
      ? `${names.length} ${names.length === 1 ? "tool" : "tools"}: ${names.join(", ")}`
      : "No tools";
  } catch (error) {
    state.textContent = error.message;
    isBad = true;
  }
  state.classList.toggle("bad", isBad);
}

function setTools(tools) {
  form.elements.tools.value = tools.length ? JSON.stringify(tools, null, 2) : "";
  settingsChanged();
}

function showExamples() {
  for (const { text, tools, note } of EXAMPLES) {
    const start = () => {
      if (tools) setTools(tools);
      field.value = text;
      send();
    };
    element("examples").append(button(note ? `${text} (${note})` : text, start));
  }
}

// ---- events

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) chat.stop();
  else send();
});
field.addEventListener("input", () => fit(field));
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
field.addEventListener("paste", (event) => {
  if (!event.clipboardData?.files.length) return;
  event.preventDefault();
  attachments.take(event.clipboardData.files);
});
element("attach").addEventListener("click", () => element("attach-file").click());
element("attach-file").addEventListener("change", (event) => {
  attachments.take([...event.target.files]).then(() => (event.target.value = ""));
  field.focus();
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  attachments.take(event.dataTransfer?.files ?? []);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || element("key-dialog").open) return;
  if (chat.running) return chat.stop();
  for (const name of isNarrow.matches ? PANELS : []) {
    if (!isPanelShown(name)) continue;
    showPanel(name, false);
    element(`${name}-toggle`).focus();
  }
});
scroller.addEventListener("scroll", () => {
  isFollowing = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  element("latest").hidden = isFollowing;
});
scroller.addEventListener("pointerdown", () => {
  if (isNarrow.matches) for (const name of PANELS) showPanel(name, false);
});
new ResizeObserver(follow).observe(scroller);
element("latest").addEventListener("click", () => {
  isFollowing = true;
  follow();
});
isNarrow.addEventListener("change", () => {
  if (isNarrow.matches) for (const name of PANELS) showPanel(name, false);
});
element("new").addEventListener("click", begin);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the link would put a name that is no conversation into the address
  field.focus();
});
element("model").addEventListener("change", modelChanged);
bindTheme(element("theme"));
bindPanel("settings", () => form.elements.system);
bindPanel("list", () => element("search"));
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", settingsChanged);
form.addEventListener("change", settingsChanged);
element("settings-reset").addEventListener("click", () => {
  form.reset();
  settingsChanged();
});
element("tools-example").addEventListener("click", () => setTools(EXAMPLE_TOOLS));
element("tools-clear").addEventListener("click", () => setTools([]));
element("export").addEventListener("click", () => {
  download(
    "conversation.json",
    exported(chat.conversation.path(), readSettings(form)),
    "application/json",
  );
});
element("import").addEventListener("click", () => element("import-file").click());
element("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    load(await file.text());
    notice("");
  } catch (error) {
    notice(error.message);
  }
});
element("key-change").addEventListener("click", () => askKey(null, null));
element("key-form").addEventListener("submit", useKey);
element("key-cancel").addEventListener("click", () => element("key-dialog").close());
element("key-forget").addEventListener("click", () => {
  setKey(null);
  element("key-dialog").close();
});
addEventListener("hashchange", openAddressed);
onChange(async (id) => {
  sidebar.refresh();
  const { conversation } = chat;
  if (id !== conversation.id || chat.running) return;
  const record = await store.load(id);
  if (record && chat.conversation === conversation && !chat.running)
    chat.open(Conversation.restored(record));
});

writeSettings(form, kept("settings", {}));
settingsChanged();
showPanel("settings", !isNarrow.matches && kept("panel.settings", false));
showPanel(
  "list",
  !isNarrow.matches && kept("panel.list", matchMedia("(min-width: 75rem)").matches),
);
store.isLasting().then((isLasting) => (element("fleeting").hidden = isLasting));
showExamples();
changed();
await openAddressed();
sidebar.refresh();
connect();
