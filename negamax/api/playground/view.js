// Shows messages. Each view shows one message and follows the message while it grows.

import { completeCalls, isJson, prettyJson } from "./conversation.js";
import { bytes, sizeOf } from "./attachments.js";
import { button, copyButton, count, duration, h } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const FINISHED = { length: "token limit reached", abort: "aborted by the server" };

// Shows which version of a message is selected, with buttons for other versions.
class VersionSwitch {
  constructor(message, { versions, choose }) {
    this.place = h("span", { class: "place" });
    const step = (by, label, mark) =>
      button(mark, () => choose(versions(message)[versions(message).indexOf(message) + by]), {
        class: by < 0 ? "quiet back" : "quiet on",
        "aria-label": label,
      });
    this.back = step(-1, "Previous version", "‹");
    this.on = step(1, "Next version", "›");
    this.element = h("span", { class: "versions", hidden: true }, this.back, this.place, this.on);
    this.update = (isIdle) => {
      const all = versions(message);
      const index = all.indexOf(message);
      this.element.hidden = all.length < 2;
      this.place.textContent = `${index + 1}/${all.length}`;
      this.back.disabled = !isIdle || index === 0;
      this.on.disabled = !isIdle || index === all.length - 1;
    };
  }
}

// Shows a user's message, which the user can edit and send again. `actions` are {edit, remove,
// versions, choose}.
export class UserView {
  constructor(message, actions) {
    this.message = message;
    this.edited = actions.edit;
    const files = (message.attachments ?? []).map(fileElement);
    this.body = h("div", { class: "bubble" }, ...files, message.content);
    this.versions = new VersionSwitch(message, actions);
    this.edit = button("Edit", () => this.open(), {
      class: "quiet edit",
      "aria-label": "Edit this message and ask again",
    });
    this.remove = button("Delete", () => actions.remove(message), {
      class: "quiet delete",
      "aria-label": "Delete this message and what follows",
    });
    const copy = copyButton(() => message.content, { title: "Copy your message" });
    this.tools = h(
      "div",
      { class: "actions" },
      this.versions.element,
      this.edit,
      copy,
      this.remove,
    );
    this.element = h(
      "article",
      { class: "message user", "aria-label": "You" },
      this.body,
      this.tools,
    );
  }

  enable(isIdle) {
    this.edit.disabled = this.remove.disabled = !isIdle;
    this.versions.update(isIdle);
  }

  open() {
    const field = h("textarea", {
      "aria-label": "Your message, edited",
      rows: Math.min(12, this.message.content.split("\n").length + 1),
    });
    field.value = this.message.content;
    const close = () => {
      form.replaceWith(this.body);
      this.tools.hidden = false;
      this.edit.focus();
    };
    const send = () => {
      if (field.value.trim() || this.message.attachments?.length)
        this.edited(this.message, field.value.trim());
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const row = h(
      "div",
      { class: "row" },
      button("Send", send, { class: "primary" }),
      button("Cancel", close),
    );
    const form = h("div", { class: "editor" }, field, row);
    this.body.replaceWith(form);
    this.tools.hidden = true;
    field.focus();
  }
}

// Shows an image of a message, or a folded text file.
function fileElement(file) {
  const { name, text, image } = file;
  if (image) return h("img", { class: "image", src: image, alt: name, title: name });
  const size = h("span", { class: "state" }, ` ${bytes(sizeOf(file))}`);
  return h(
    "details",
    { class: "attached" },
    h("summary", {}, name, size),
    h("pre", { tabindex: "0" }, text),
  );
}

// Shows an answer of the model: thinking, text, calls, measurements and errors.
export class AnswerView {
  // `actions` are {regenerate, goOn, remove, versions, choose}. `command()` returns the request as
  // a command, if the request is known.
  constructor(answer, actions, command = null) {
    this.answer = answer;
    this.calls = [];
    this.thinking = thinkingElements();
    this.text = h("div", { class: "text" });
    this.markdown = new MarkdownView(this.text);
    this.callList = h("div", { class: "calls" });
    this.problem = h("div", { class: "problem", role: "alert", hidden: true });
    this.figures = h("dl", { class: "figures" });
    this.versions = new VersionSwitch(answer, actions);
    this.again = button("Regenerate", () => actions.regenerate(answer), { class: "quiet again" });
    this.more = button("Continue", () => actions.goOn(answer), {
      class: "quiet more",
      "aria-label": "Continue this answer",
      hidden: true,
    });
    this.remove = button("Delete", () => actions.remove(answer), {
      class: "quiet delete",
      "aria-label": "Delete this answer and what follows",
    });
    this.copy = copyButton(() => answer.content, { title: "Copy the answer" });
    const copyCommand =
      command && copyButton(command, { label: "Copy as curl", title: "Copy as curl command" });
    this.actions = h(
      "div",
      { class: "actions" },
      this.versions.element,
      this.copy,
      this.again,
      this.more,
      copyCommand,
      this.remove,
    );
    this.waiting = h("div", { class: "waiting", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
    this.foot = h("div", { class: "foot", hidden: true }, this.figures, this.actions);
    const parts = [
      this.thinking.box,
      this.text,
      this.callList,
      this.waiting,
      this.problem,
      this.foot,
    ];
    this.element = h(
      "article",
      { class: "message assistant", "aria-label": answer.model ?? "Answer", "aria-busy": "true" },
      ...parts,
    );
    this.update();
  }

  // Updates the elements to the current answer.
  update() {
    const { answer } = this;
    this.showThinking();
    this.markdown.show(answer.content, answer.isDone);
    answer.calls.forEach((call, index) => {
      this.calls[index] ??= new CallView(call, this.callList);
      this.calls[index].update(answer.isDone || index < answer.calls.length - 1);
    });
    this.waiting.hidden = !answer.isEmpty || answer.isDone;
    this.element.setAttribute("aria-busy", String(!answer.isDone));
    this.showProblem();
    this.foot.hidden = !answer.isDone && answer.firstAt === null;
    this.actions.hidden = !answer.isDone;
    this.copy.hidden = !answer.content;
    this.again.textContent = answer.error ? "Try again" : "Regenerate";
    this.showFigures();
  }

  // Only the last answer can be continued. All changes are disabled while an answer is generated.
  enable(isIdle, isLast) {
    this.more.hidden = !isLast || !this.answer.canGoOn;
    for (const control of [this.again, this.more, this.remove]) control.disabled = !isIdle;
    this.versions.update(isIdle);
  }

  // Opens fields for the results of the calls. The fields are read when the results are sent.
  askResults() {
    const complete = new Set(completeCalls(this.answer));
    for (const view of this.calls) {
      if (complete.has(view.call)) view.ask();
    }
  }

  get pending() {
    return this.calls.filter((view) => view.field);
  }

  callById(id) {
    return this.calls.find((view) => view.call.id === id && !view.result);
  }

  showThinking() {
    const { answer } = this;
    const { box, label, preview, body } = this.thinking;
    box.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    const isLive = !answer.isDone && answer.thoughtAt === null;
    box.classList.toggle("live", isLive);
    const spent = answer.thinkingSeconds;
    const seconds = spent < 0.01 ? "" : ` ${isLive ? "" : "for "}${duration(spent)}`;
    label.textContent = `${isLive ? "Thinking" : "Thought"}${seconds}`;
    preview.textContent = isLive ? answer.reasoning.slice(-200).replace(/\s+/g, " ") : "";
    grow(body, answer.reasoning);
  }

  showProblem() {
    const { error, isStopped, finishReason, calls } = this.answer;
    const notes = [];
    if (error) notes.push(h("p", {}, h("strong", {}, error.message)), errorDetails(error));
    else if (isStopped) notes.push(h("p", {}, "Stopped."));
    else if (FINISHED[finishReason]) notes.push(h("p", {}, `Cut off: ${FINISHED[finishReason]}.`));
    if (this.answer.isDone && calls.some((call) => !isJson(call.arguments))) {
      notes.push(h("p", {}, "A tool call is incomplete and is left out of the conversation."));
    }
    const text = notes.map((note) => note.textContent).join("\n");
    if (text === this.problem.textContent) return;
    this.problem.replaceChildren(...notes);
    this.problem.hidden = !notes.length;
    this.problem.classList.toggle("error", Boolean(error));
  }

  showFigures() {
    const { answer } = this;
    const { usage, firstAt, lastAt, started } = answer;
    if (firstAt === null) return;
    const rate = answer.tokensPerSecond;
    const figures = [
      [
        "First token",
        duration(firstAt - started),
        "Time from sending the request to its first text",
      ],
      [
        "Speed",
        rate === null ? null : `${rate.toFixed(1)} tok/s`,
        "Generated tokens per second after the first",
      ],
      ["Total", duration(lastAt - started), "Time from sending the request to its last text"],
      ["Prompt", usage && count(usage.prompt_tokens), "Tokens that the model read"],
      [
        "Cached",
        usage && count(usage.prompt_tokens_details?.cached_tokens ?? 0),
        "Prompt tokens that came from the prefix cache",
      ],
      [
        "Output",
        usage && count(usage.completion_tokens),
        "Tokens that the model wrote, thinking included",
      ],
      [
        "Thinking",
        usage && count(usage.completion_tokens_details?.reasoning_tokens ?? 0),
        "Tokens of thinking",
      ],
      ["Finish", answer.finishReason, "Why the answer ended"],
    ];
    const shown = figures.filter(([, value]) => value);
    this.figures.replaceChildren(
      ...shown.map(([name, value, title]) =>
        h("div", { title }, h("dt", {}, name), h("dd", {}, value)),
      ),
    );
  }
}

function thinkingElements() {
  const label = h("span", { class: "label" });
  const preview = h("bdi", { dir: "ltr" });
  const body = h("div", { class: "thoughts" });
  const box = h(
    "details",
    { class: "thinking", hidden: true },
    h("summary", {}, label, h("span", { class: "preview", "aria-hidden": "true" }, preview)),
    body,
  );
  return { box, label, preview, body };
}

// Appends the new end of a plain text.
function grow(element, text) {
  const old = element.firstChild?.data ?? "";
  if (text.length > old.length && text.startsWith(old)) {
    if (element.firstChild) element.firstChild.appendData(text.slice(old.length));
    else element.append(text);
  } else if (text !== old) {
    element.textContent = text;
  }
}

function errorDetails(error) {
  const details = [
    error.status && `HTTP ${error.status}`,
    error.code,
    error.retryAfter && `try again in ${error.retryAfter} s`,
    error.requestId && `request id ${error.requestId}`,
  ];
  return h("p", { class: "details" }, details.filter(Boolean).join(" · "));
}

// Shows one tool call: first the arguments while they are written, then all arguments, and then the
// result.
class CallView {
  constructor(call, parent) {
    this.call = call;
    this.field = null;
    this.result = null;
    this.isShownWhole = false;
    this.name = h("code", { class: "name" });
    this.state = h("span", { class: "state" });
    this.code = h("code");
    const copy = copyButton(() => this.code.textContent, { title: "Copy the arguments" });
    const head = h(
      "div",
      { class: "code-head" },
      h("span", {}, "Tool call ", this.name, " ", this.state),
      copy,
    );
    this.element = h(
      "section",
      { class: "call code", "aria-label": "Tool call" },
      head,
      h("pre", { tabindex: "0" }, this.code),
    );
    parent.append(this.element);
  }

  update(isWhole) {
    if (this.isShownWhole) return;
    this.name.textContent = this.call.name;
    this.isShownWhole = isWhole;
    const isFaulty = isWhole && !isJson(this.call.arguments);
    this.state.textContent = isWhole ? (isFaulty ? "incomplete" : "") : "writing …";
    this.element.classList.toggle("live", !isWhole);
    if (isWhole) this.code.textContent = prettyJson(this.call.arguments);
    else grow(this.code, this.call.arguments);
  }

  ask() {
    const label = `Result of ${this.call.name}`;
    this.field = h("textarea", {
      rows: 2,
      class: "mono",
      "aria-label": label,
      placeholder: `${label}, as the tool would give it`,
    });
    this.element.append(h("div", { class: "result" }, this.field));
  }

  // Shows the result that was sent.
  close(result) {
    this.field?.parentElement.remove();
    this.field = null;
    this.result = h(
      "div",
      { class: "result" },
      h("span", { class: "state" }, "Result"),
      h("pre", { tabindex: "0" }, result),
    );
    this.element.append(this.result);
  }
}
