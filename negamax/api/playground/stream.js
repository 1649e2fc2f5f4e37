// One answer of the server: the request, its events, and what was measured on the way.

import { addressOf, authorization, errorOf, reached, ServerError } from "./server.js";

const CHAT = "v1/chat/completions";
const KEPT = [
  "id",
  "parent",
  "model",
  "content",
  "reasoning",
  "calls",
  "started",
  "firstAt",
  "lastAt",
  "thinkingAt",
  "thoughtAt",
  "firstTokens",
  "usage",
  "finishReason",
  "requestId",
  "isStopped",
]; // of an answer, by the store

// The `data:` of each server-sent event in a body, up to `[DONE]`.
export async function* serverEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let pieces = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) {
          pieces.push(line.slice(5).replace(/^ /, ""));
        } else if (!line && pieces.length) {
          const data = pieces.join("\n");
          pieces = [];
          if (data === "[DONE]") return;
          yield data;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// An assistant's message while it comes in, and the figures about it. Times are in seconds of the
// page's own clock.
export class Answer {
  constructor() {
    this.role = "assistant";
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.started = now();
    this.firstAt = null; // the first text, reasoning or call
    this.lastAt = null;
    this.thinkingAt = null; // its first reasoning
    this.thoughtAt = null; // its first content or call after that
    this.firstTokens = 0; // tokens that came with the first text
    this.usage = null;
    this.earlier = null; // the usage before the latest request, of an answer that goes on
    this.model = null;
    this.finishReason = null;
    this.requestId = null;
    this.error = null;
    this.isStopped = false;
    this.isDone = false;
  }

  // An answer from its record. One that was cut off by the end of the page counts as stopped.
  static restored(record) {
    const answer = Object.assign(new Answer(), record, { isDone: true });
    answer.isStopped ||= !record.finishReason && !record.error;
    if (answer.thinkingAt !== null) answer.thoughtAt ??= answer.lastAt;
    return answer;
  }

  // The answer as plain data.
  record() {
    const error = this.error && { message: this.error.message, ...this.error };
    return structuredClone({
      role: this.role,
      error,
      ...Object.fromEntries(KEPT.map((name) => [name, this[name]])),
    });
  }

  // Whether more of it can be asked for: it is cut off somewhere in its text or its thinking.
  get canGoOn() {
    return (
      this.isDone &&
      this.finishReason !== "stop" &&
      !this.calls.length &&
      Boolean(this.content || this.reasoning)
    );
  }

  // Makes ready for more of the same answer. The time in between does not count.
  goOn() {
    const pause = now() - (this.lastAt ?? now());
    for (const name of ["started", "firstAt", "lastAt", "thinkingAt", "thoughtAt"])
      if (this[name] !== null) this[name] += pause;
    if (!this.content) this.thoughtAt = null;
    this.earlier = this.usage;
    Object.assign(this, { error: null, isStopped: false, isDone: false, finishReason: null });
  }

  // Asks the server and takes in what it says; `changed` is called after every event. Never throws:
  // see `error`.
  async fetch(request, { signal, changed }) {
    if (this.firstAt === null) this.started = now();
    try {
      const response = await reached(
        fetch(addressOf(CHAT), {
          method: "POST",
          headers: { "content-type": "application/json", ...authorization() },
          body: JSON.stringify(request),
          signal,
        }),
      );
      this.requestId = response.headers.get("x-request-id");
      if (!response.ok) throw await errorOf(response);
      for await (const data of serverEvents(response.body)) {
        this.take(JSON.parse(data));
        changed();
      }
      if (!this.finishReason)
        throw new ServerError("The answer ended before it was complete.", { code: "cut_off" });
    } catch (error) {
      if (signal.aborted) this.isStopped = true;
      else this.error = this.readable(error);
    }
    this.thoughtAt ??= this.thinkingAt === null ? null : now();
    this.isDone = true;
    changed();
  }

  readable(error) {
    const known =
      error instanceof ServerError
        ? error
        : new ServerError(`The connection broke: ${error.message}`, { code: "connection" });
    known.requestId ??= this.requestId;
    return known;
  }

  take(chunk) {
    if (chunk.error)
      throw new ServerError(chunk.error.message, { code: chunk.error.code ?? chunk.error.type });
    if (chunk.usage) this.usage = this.earlier ? added(this.earlier, chunk.usage) : chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    if (!reasoning && !content && !delta.tool_calls?.length) return;
    this.timed(Boolean(reasoning));
    this.reasoning += reasoning;
    this.content += content;
    for (const piece of delta.tool_calls ?? []) this.takeCall(piece);
  }

  timed(isReasoning) {
    this.lastAt = now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.firstTokens = this.usage?.completion_tokens ?? 1;
    }
    if (isReasoning) this.thinkingAt ??= this.lastAt;
    else if (this.thinkingAt !== null) this.thoughtAt ??= this.lastAt;
  }

  takeCall(piece) {
    const call = (this.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name = piece.function.name;
    call.arguments += piece.function?.arguments ?? "";
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  get thinkingSeconds() {
    return this.thinkingAt === null ? 0 : (this.thoughtAt ?? now()) - this.thinkingAt;
  }

  // Tokens per second after the first ones, or null where there is nothing to divide by.
  get tokensPerSecond() {
    const tokens = (this.usage?.completion_tokens ?? 0) - this.firstTokens;
    const seconds = (this.lastAt ?? 0) - (this.firstAt ?? 0);
    return tokens > 0 && seconds > 0 ? tokens / seconds : null;
  }
}

// The counts of an answer that was written by two requests: the second one read what the first one
// wrote.
function added(earlier, usage) {
  const tokens = earlier.completion_tokens + usage.completion_tokens;
  const thought =
    (earlier.completion_tokens_details?.reasoning_tokens ?? 0) +
    (usage.completion_tokens_details?.reasoning_tokens ?? 0);
  return {
    ...usage,
    prompt_tokens: earlier.prompt_tokens,
    completion_tokens: tokens,
    completion_tokens_details: { reasoning_tokens: thought },
  };
}

function now() {
  return performance.now() / 1000;
}

// The command that repeats a request in a terminal; the key stays in a variable.
export function curlCommand(request, hasKey) {
  const body = JSON.stringify(request, null, 2).replaceAll("'", `'\\''`);
  const key = hasKey ? ` \\\n  -H "authorization: Bearer $NEGAMAX_API_KEY"` : "";
  const type = "-H 'content-type: application/json'";
  return `curl -N ${addressOf(CHAT)} \\\n  ${type}${key} \\\n  -d '${body}'`;
}
