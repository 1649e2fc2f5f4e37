// Requests one answer of the server, reads its events, and measures times.

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
]; // fields of an answer that the store keeps

// Yields the `data:` of each server-sent event in a body, up to `[DONE]`.
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

// An assistant's message that is being received, with its measurements. Times are in seconds of the
// page's own clock.
export class Answer {
  constructor() {
    this.role = "assistant";
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.started = now();
    this.firstAt = null; // time of the first text, reasoning or call
    this.lastAt = null;
    this.thinkingAt = null; // time of the first reasoning
    this.thoughtAt = null; // time of the first content or call after reasoning
    this.firstTokens = 0; // number of tokens that arrived with the first text
    this.usage = null;
    this.earlier = null; // usage before the latest request of a continued answer
    this.model = null;
    this.finishReason = null;
    this.requestId = null;
    this.error = null;
    this.isStopped = false;
    this.isDone = false;
  }

  // Restores an answer from its record. An answer that ended with the page counts as stopped.
  static restored(record) {
    const answer = Object.assign(new Answer(), record, { isDone: true });
    answer.isStopped ||= !record.finishReason && !record.error;
    if (answer.thinkingAt !== null) answer.thoughtAt ??= answer.lastAt;
    return answer;
  }

  // Returns the answer as plain data.
  record() {
    const error = this.error && { message: this.error.message, ...this.error };
    return structuredClone({
      role: this.role,
      error,
      ...Object.fromEntries(KEPT.map((name) => [name, this[name]])),
    });
  }

  // Whether the answer can be continued because its text or thinking was cut off.
  get canGoOn() {
    return (
      this.isDone &&
      this.finishReason !== "stop" &&
      !this.calls.length &&
      Boolean(this.content || this.reasoning)
    );
  }

  // Prepares a continuation of the answer. The pause before the continuation does not count.
  goOn() {
    const pause = now() - (this.lastAt ?? now());
    for (const name of ["started", "firstAt", "lastAt", "thinkingAt", "thoughtAt"])
      if (this[name] !== null) this[name] += pause;
    if (!this.content) this.thoughtAt = null;
    this.earlier = this.usage;
    Object.assign(this, { error: null, isStopped: false, isDone: false, finishReason: null });
  }

  // Sends the request and receives the answer. `changed` is called after every event. Errors are
  // stored in `error` and never thrown.
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

  // Tokens per second after the first text, or null if no time has passed.
  get tokensPerSecond() {
    const tokens = (this.usage?.completion_tokens ?? 0) - this.firstTokens;
    const seconds = (this.lastAt ?? 0) - (this.firstAt ?? 0);
    return tokens > 0 && seconds > 0 ? tokens / seconds : null;
  }
}

// Adds the token counts of an answer from two requests. The second request read the output of the
// first request as a part of its prompt.
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

// Returns a command that repeats a request in a terminal. The key stays in a variable.
export function curlCommand(request, hasKey) {
  const body = JSON.stringify(request, null, 2).replaceAll("'", `'\\''`);
  const key = hasKey ? ` \\\n  -H "authorization: Bearer $NEGAMAX_API_KEY"` : "";
  const type = "-H 'content-type: application/json'";
  return `curl -N ${addressOf(CHAT)} \\\n  ${type}${key} \\\n  -d '${body}'`;
}
