// The page: the conversation in memory, what the controls do to it, and one running answer at most.

import { apiMessages, exported, imported } from "./conversation.js";
import { button, count, download, h } from "./dom.js";
import { EXAMPLE_TOOLS, parsedTools, readSettings, requestFields, writeSettings } from "./settings.js";
import { Answer, curlCommand, getJson, ServerError } from "./stream.js";
import { AnswerView, UserView } from "./view.js";

const KEY = "negamax.api_key"; // its name in sessionStorage
const RENDER_SHARE = 4; // at most one part in four of the time goes into drawing
const EXAMPLES = [
  { text: "Tom has 47 apples and buys 38 more. How many apples does he have now?" },
  { text: "What is the weather in Paris?", tools: EXAMPLE_TOOLS, note: "with a tool" },
  { text: "Who are you?" },
];

const element = (id) => document.getElementById(id);
const composer = element("composer");
const field = element("prompt");
const form = element("settings-form");
const scroller = element("scroller");

const state = {
  messages: [], // {role: "user" | "tool", …} and Answer
  views: new Map(), // message -> its view
  models: new Map(), // name -> tokens of the window
  running: null, // AbortController
  isFollowing: true, // the newest text stays in view
  keyAction: null, // what to do once there is a key
};

// ---- the conversation

function add(message, view) {
  state.messages.push(message);
  if (view) {
    state.views.set(message, view);
    element("messages").append(view.element);
  }
  element("welcome").hidden = true;
}

// Takes back everything from `index` on.
function cut(index) {
  for (const message of state.messages.splice(index)) {
    state.views.get(message)?.element.remove();
    state.views.delete(message);
  }
  element("welcome").hidden = state.messages.length > 0;
}

function addUser(content) {
  const message = { role: "user", content };
  add(message, new UserView(message, { edited }));
}

function addResult(callId, content) {
  add({ role: "tool", callId, content });
  for (const view of [...state.views.values()].reverse()) {
    const call = view instanceof AnswerView && view.callById(callId);
    if (call) return call.close(content);
  }
}

function edited(message, content) {
  if (state.running || !isReady()) return;
  cut(state.messages.indexOf(message));
  addUser(content);
  answer();
}

function regenerate() {
  if (state.running || !isReady()) return;
  cut(state.messages.length - 1);
  answer();
}

function lastView() {
  return state.views.get(state.messages.at(-1));
}

function pendingCalls() {
  const view = lastView();
  return view instanceof AnswerView ? view.pending : [];
}

function send() {
  const text = field.value.trim();
  const calls = pendingCalls();
  if (state.running || (!text && !calls.length) || !isReady()) return;
  for (const call of calls) addResult(call.call.id, call.field.value);
  if (text) addUser(text);
  field.value = "";
  fit(field);
  answer();
}

// Whether a request can be made of the settings; says why not.
function isReady() {
  notice("");
  try {
    requestFields(readSettings(form));
  } catch (error) {
    notice(error.message);
    return false;
  }
  if (form.checkValidity()) return true;
  showSettings(true);
  form.reportValidity();
  return false;
}

async function answer() {
  const settings = readSettings(form);
  const request = {
    model: element("model").value,
    messages: apiMessages(state.messages, settings.system),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...requestFields(settings),
  };
  const message = new Answer();
  const command = () => curlCommand(request, Boolean(key()));
  const view = new AnswerView(message, { model: request.model, regenerate, command });
  add(message, view);
  state.running = new AbortController();
  state.isFollowing = true;
  controls();
  announce("The model is answering");
  const drawing = new Drawing(() => view.update());
  await message.fetch(request, { key: key(), signal: state.running.signal, changed: () => drawing.request() });
  drawing.finish();
  state.running = null;
  finished(message, view);
}

function finished(message, view) {
  if (!message.error && !message.isStopped) view.askResults();
  controls();
  showWindow(message.usage?.total_tokens ?? null);
  follow();
  const tokens = message.usage ? `, ${message.usage.completion_tokens} tokens` : "";
  announce(message.error ? "" : message.isStopped ? "Stopped" : `The answer is complete${tokens}`);
  if (message.error?.status === 401) askKey(message.error, regenerate);
  else if (view.pending.length && !field.value) view.pending[0].field.focus();
}

// Draws at most once per frame, and less often where drawing is slow.
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.earliest = 0;
    this.timer = setInterval(() => this.request(), 100); // seconds of thinking go on between events
    this.isAsked = false;
  }

  request() {
    if (this.isAsked) return;
    this.isAsked = true;
    const wait = this.earliest - performance.now();
    if (document.hidden) setTimeout(() => this.now(), 250); // no frames there
    else setTimeout(() => requestAnimationFrame(() => this.now()), Math.max(0, wait));
  }

  now() {
    this.isAsked = false;
    if (this.timer === null) return;
    const start = performance.now();
    this.draw();
    follow();
    const end = performance.now();
    this.earliest = end + (RENDER_SHARE - 1) * (end - start);
  }

  finish() {
    clearInterval(this.timer);
    this.timer = null;
    this.draw();
  }
}

// ---- the key

function key() {
  return sessionStorage.getItem(KEY);
}

function askKey(error, action) {
  state.keyAction = action;
  element("key-reason").textContent = error ? error.message : "Sent with every request to this server.";
  element("key-forget").hidden = !key();
  element("key").value = "";
  element("key-dialog").showModal();
}

function useKey(event) {
  event.preventDefault();
  sessionStorage.setItem(KEY, element("key").value.trim());
  element("key-dialog").close();
  const action = state.keyAction;
  state.keyAction = null;
  connect().then((isConnected) => isConnected && action?.());
}

// Asks for the models; whether the server gave them.
async function connect() {
  const select = element("model");
  try {
    const { data } = await getJson("v1/models", key());
    const chosen = select.value;
    state.models = new Map(data.map((card) => [card.id, card.max_model_len ?? null]));
    select.replaceChildren(...data.map((card) => h("option", {}, card.id)));
    if (state.models.has(chosen)) select.value = chosen;
    notice("");
    modelChanged();
    return true;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    select.replaceChildren(h("option", { value: "" }, "not connected"));
    if (error.status === 401) askKey(error, null);
    else notice(error.message, button("Try again", connect));
    return false;
  }
}

// ---- what is around the conversation

function modelChanged() {
  const name = element("model").value;
  document.title = `${name} · Negamax`;
  element("welcome-model").textContent = name;
  showWindow(state.messages.findLast((message) => message.usage)?.usage.total_tokens ?? 0);
}

function showWindow(tokens) {
  const window = state.models.get(element("model").value);
  element("window").hidden = !window;
  if (!window || tokens === null) return;
  element("window-text").textContent = tokens ? `${count(tokens)} of ${count(window)} tokens` : `${count(window)} tokens`;
  element("window-bar").value = tokens / window;
  element("window-bar").hidden = !tokens;
}

function controls() {
  const isIdle = !state.running;
  const calls = isIdle ? pendingCalls() : [];
  element("send").textContent = isIdle ? (calls.length ? "Send results" : "Send") : "Stop";
  element("send").classList.toggle("stop", !isIdle);
  field.placeholder = calls.length ? "Give the results above; add a message if you like" : "Write a message";
  const last = lastView();
  for (const view of state.views.values()) view.enable(isIdle, view === last);
}

function notice(text, action = null) {
  element("notice").hidden = !text;
  element("notice").replaceChildren(text, ...(action ? [action] : []));
}

function announce(text) {
  element("announcer").textContent = text;
}

function follow() {
  if (state.isFollowing) scroller.scrollTop = scroller.scrollHeight;
  element("latest").hidden = state.isFollowing;
}

function fit(area) {
  area.rows = Math.min(10, area.value.split("\n").length);
  while (area.rows < 10 && area.scrollHeight > area.clientHeight + 2) area.rows += 1;
}

function showSettings(isShown) {
  document.body.classList.toggle("with-settings", isShown);
  element("settings-toggle").setAttribute("aria-expanded", String(isShown));
}

function settingsShown() {
  return document.body.classList.contains("with-settings");
}

function showTools() {
  const label = element("tools-state");
  try {
    const names = parsedTools(form.elements.tools.value).map((tool) => tool.function.name);
    label.textContent = names.length ? names.join(", ") : "No tools";
    label.classList.remove("bad");
  } catch (error) {
    label.textContent = error.message;
    label.classList.add("bad");
  }
}

function setTools(tools) {
  form.elements.tools.value = tools.length ? JSON.stringify(tools, null, 2) : "";
  showTools();
}

function load(text) {
  const { messages, settings } = imported(text);
  cut(0);
  writeSettings(form, settings);
  showTools();
  for (const message of messages) {
    if (message.role === "user") addUser(message.content);
    else if (message.role === "tool") addResult(message.callId, message.content);
    else addImported(message);
  }
  const last = lastView();
  if (last instanceof AnswerView) last.askResults();
  controls();
  follow();
}

function addImported(message) {
  const answered = Object.assign(new Answer(), message, { isDone: true, started: null });
  add(answered, new AnswerView(answered, { model: element("model").value, regenerate, command: null }));
}

function chooseTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
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
  if (state.running) state.running.abort();
  else send();
});
field.addEventListener("input", () => fit(field));
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || element("key-dialog").open) return;
  if (state.running) state.running.abort();
  else if (settingsShown() && matchMedia("(max-width: 60rem)").matches) {
    showSettings(false);
    element("settings-toggle").focus();
  }
});
scroller.addEventListener("scroll", () => {
  state.isFollowing = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  element("latest").hidden = state.isFollowing;
});
new ResizeObserver(follow).observe(scroller);
element("latest").addEventListener("click", () => {
  state.isFollowing = true;
  follow();
});
element("new").addEventListener("click", () => {
  state.running?.abort();
  cut(0);
  controls();
  showWindow(0);
  field.focus();
});
element("theme").addEventListener("click", chooseTheme);
element("model").addEventListener("change", modelChanged);
element("settings-toggle").addEventListener("click", () => {
  showSettings(!settingsShown());
  if (settingsShown()) form.elements.system.focus();
});
element("settings-close").addEventListener("click", () => {
  showSettings(false);
  element("settings-toggle").focus();
});
form.addEventListener("submit", (event) => event.preventDefault());
form.elements.tools.addEventListener("input", showTools);
element("tools-example").addEventListener("click", () => setTools(EXAMPLE_TOOLS));
element("tools-clear").addEventListener("click", () => setTools([]));
element("export").addEventListener("click", () => {
  download("conversation.json", exported(state.messages, readSettings(form)), "application/json");
});
element("import").addEventListener("click", () => element("import-file").click());
element("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file || state.running) return;
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
  sessionStorage.removeItem(KEY);
  element("key-dialog").close();
});

showSettings(matchMedia("(min-width: 75rem)").matches);
showExamples();
controls();
connect();
