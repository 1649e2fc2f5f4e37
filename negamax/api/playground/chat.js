// Handles the shown conversation: the user's actions, and the answers that arrive, also for
// conversations in the background.

import { apiMessages } from "./conversation.js";
import { button } from "./dom.js";
import { Drawing } from "./drawing.js";
import { announce, element, notice } from "./page.js";
import { authorization } from "./server.js";
import { requestFields } from "./settings.js";
import { Answer, curlCommand } from "./stream.js";
import { Conversation } from "./tree.js";
import { AnswerView, UserView } from "./view.js";

const SAVE_SECONDS = 3; // time between two saves of an answer that grows

export class Chat {
  // Each request reads `settings()` and `model()`. `changed()` is called after every change of the
  // conversation, and `refused(error, again)` if the server requires a key.
  constructor({ store, settings, model, isReady, changed, refused }) {
    Object.assign(this, { store, settings, model, isReady, changed, refused });
    this.conversation = new Conversation();
    this.views = new Map(); // message of the path -> its view; tool results have no view
    this.forgotten = new WeakSet(); // conversations that were deleted during an answer
    this.requests = new WeakMap(); // answer -> its latest request
    this.runs = new Map(); // id of a conversation -> {controller, conversation, answer}
    this.actions = {
      edit: (message, content) => this.edit(message, content),
      regenerate: (answer) => this.regenerate(answer),
      goOn: (answer) => this.goOn(answer),
      remove: (message) => this.remove(message),
      choose: (message) => this.choose(message),
      versions: (message) => this.conversation.versions(message),
    };
  }

  get running() {
    return this.runs.get(this.conversation.id) ?? null;
  }

  get lastView() {
    return this.views.get(this.conversation.path().at(-1)) ?? null;
  }

  // Returns the calls of the last answer that wait for results.
  get pendingCalls() {
    const view = this.lastView;
    return view instanceof AnswerView && !this.running ? view.pending : [];
  }

  // Shows `conversation`.
  open(conversation) {
    this.conversation = this.runs.get(conversation.id)?.conversation ?? conversation;
    for (const view of this.views.values()) view?.element.remove();
    this.views.clear();
    this.show();
  }

  // Updates the views to the current path.
  show() {
    const path = this.conversation.path();
    for (const [message, view] of this.views) {
      if (path.includes(message)) continue;
      view?.element.remove();
      this.views.delete(message);
    }
    for (const message of path) if (!this.views.has(message)) this.addView(message);
    const last = this.lastView;
    if (
      last instanceof AnswerView &&
      last.answer.isDone &&
      !last.answer.error &&
      !last.answer.isStopped
    )
      last.askResults();
    this.changed({ isShown: true });
  }

  addView(message) {
    if (message.role === "tool") {
      const calls = [...this.views.values()]
        .reverse()
        .map((view) => view instanceof AnswerView && view.callById(message.callId));
      calls.find(Boolean)?.close(message.content);
      this.views.set(message, null);
      return;
    }
    const view =
      message.role === "user"
        ? new UserView(message, this.actions)
        : new AnswerView(message, this.actions, this.commandOf(message));
    this.views.set(message, view);
    element("messages").append(view.element);
  }

  // Returns the request of an answer as a command. An answer from the store gets the request that
  // would be sent now.
  commandOf(answer) {
    return () => {
      const path = this.conversation.path();
      const before = path.slice(0, path.indexOf(answer));
      const request = this.requests.get(answer) ?? this.request(before, answer.model);
      return curlCommand(request, "authorization" in authorization());
    };
  }

  request(messages, model, settings = this.settings()) {
    return {
      model: model ?? this.model(),
      messages: apiMessages(messages, settings.system),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...requestFields(settings),
    };
  }

  // ---- actions of the user

  send(content, attachments) {
    for (const { call, field } of this.pendingCalls) {
      this.conversation.add({ role: "tool", callId: call.id, content: field.value });
    }
    if (content || attachments.length) {
      this.conversation.add({
        role: "user",
        content,
        ...(attachments.length ? { attachments } : {}),
      });
    }
    this.answer();
  }

  edit(message, content) {
    if (this.running || !this.isReady()) return;
    const { attachments } = message;
    this.conversation.add(
      { role: "user", content, ...(attachments ? { attachments } : {}) },
      message,
    );
    this.answer();
  }

  regenerate(answer) {
    if (this.running || !this.isReady()) return;
    const isEmpty = answer.error && answer.isEmpty; // a failed answer without text is replaced
    if (isEmpty) this.conversation.remove(answer);
    this.answer(isEmpty && this.conversation.path().at(-1)?.id === answer.parent ? null : answer);
  }

  remove(message) {
    if (this.running) return;
    const { conversation } = this;
    const before = this.conversation.messages.length;
    const undo = conversation.remove(message);
    const restore = () => {
      undo();
      notice("");
      this.save(conversation);
      if (conversation === this.conversation) this.show();
    };
    const count = before - conversation.messages.length;
    notice(
      count === 1 ? "The message was deleted." : `${count} messages were deleted.`,
      button("Undo", restore),
      { isCalm: true },
    );
    this.save(conversation);
    this.show();
  }

  choose(message) {
    if (this.running) return;
    this.conversation.choose(message);
    this.save(this.conversation);
    this.show();
  }

  // Aborts the request of a deleted conversation, which is then not saved again.
  forget(id) {
    const run = this.runs.get(id);
    if (!run) return;
    this.forgotten.add(run.conversation);
    run.controller.abort();
  }

  stop() {
    this.running?.controller.abort();
  }

  // ---- answers

  // Requests an answer to the path, or another version of `sibling`.
  answer(sibling = null) {
    const { conversation } = this;
    const path = conversation.path();
    const answer = Object.assign(new Answer(), { model: this.model() });
    const request = this.request(
      sibling ? path.slice(0, path.indexOf(sibling)) : path,
      answer.model,
    );
    conversation.add(answer, sibling);
    this.run(answer, request);
  }

  goOn(answer) {
    if (this.running || !this.isReady()) return;
    const request = this.request(this.conversation.path(), answer.model);
    answer.goOn();
    this.run(answer, { ...request, add_generation_prompt: false, continue_final_message: true });
  }

  async run(answer, request) {
    const { conversation } = this;
    const controller = new AbortController();
    this.requests.set(answer, request);
    this.runs.set(conversation.id, { controller, conversation, answer });
    this.show();
    announce("The model is answering");
    this.save(conversation);
    const drawing = new Drawing(() => {
      this.views.get(answer)?.update();
      this.followed?.();
    });
    const saving = setInterval(() => this.save(conversation), SAVE_SECONDS * 1000);
    await answer.fetch(request, { signal: controller.signal, changed: () => drawing.request() });
    clearInterval(saving);
    this.runs.delete(conversation.id);
    conversation.updated = Date.now();
    drawing.finish();
    this.save(conversation);
    this.finished(conversation, answer);
  }

  finished(conversation, answer) {
    if (conversation !== this.conversation) return this.changed();
    this.show();
    const tokens = answer.usage ? `, ${answer.usage.completion_tokens} tokens` : "";
    announce(answer.error ? "" : answer.isStopped ? "Stopped" : `The answer is complete${tokens}`);
    if (answer.error?.status === 401) this.refused(answer.error, () => this.regenerate(answer));
    return undefined;
  }

  async save(conversation) {
    if (this.forgotten.has(conversation)) return undefined;
    try {
      if (conversation.messages.length) await this.store.save(conversation.record());
      else await this.store.remove(conversation.id);
    } catch (error) {
      notice(`The conversation could not be kept: ${error?.message ?? "the browser has no room"}`);
    }
    return this.changed({ isSaved: true });
  }
}
