// Converts a conversation into API messages and files, reads such files, and formats tool calls as
// text.

import { imagesOf, withFiles } from "./attachments.js";

const ROLES = ["user", "assistant", "tool"];

// Returns the messages for the API, without failed answers that have no text and without calls that
// have no result.
export function apiMessages(messages, system) {
  const answered = new Set(
    messages.filter((message) => message.role === "tool").map((message) => message.callId),
  );
  const sent = plainMessages(messages, (call) => answered.has(call.id));
  return system ? [{ role: "system", content: system }, ...sent] : sent;
}

function plainMessages(messages, isKept) {
  return messages
    .map((message) => plainMessage(message, isKept))
    .filter((message) => message !== null);
}

function plainMessage(message, isKept) {
  if (message.role === "tool")
    return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.role === "user")
    return { role: "user", content: withFiles(message.content, message.attachments) };
  const calls = completeCalls(message)
    .filter(isKept)
    .map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  if (!message.content && !message.reasoning && !calls.length) return null;
  return {
    role: "assistant",
    content: message.content,
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
}

// Returns the calls of an answer whose arguments are complete.
export function completeCalls(message) {
  return message.calls.filter((call) => call.id && call.name && isJson(call.arguments));
}

export function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// Formats JSON text on several lines without a change of digits or key order. Text that is not JSON
// is returned unchanged.
export function prettyJson(text) {
  if (!isJson(text)) return text;
  let shown = "";
  let depth = 0;
  let isFirst = false; // the position is right after an opening bracket
  const line = () => `\n${"  ".repeat(Math.min(depth, 40))}`;
  for (const [token] of text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*"|[[\]{},:]|[^\s"[\]{},:]+/gs)) {
    const closes = token === "]" || token === "}";
    if (closes) depth -= 1;
    if (isFirst ? !closes : closes) shown += line(); // empty lists and objects stay on one line
    shown += token === ":" ? ": " : token;
    isFirst = token === "[" || token === "{";
    if (isFirst) depth += 1;
    if (token === ",") shown += line();
  }
  return shown;
}

// Returns a conversation for a file: messages in the format of the API, and their settings.
export function exported(messages, settings) {
  const plain = plainMessages(messages, () => true);
  return JSON.stringify(
    { format: "negamax-conversation", version: 1, settings, messages: plain },
    null,
    2,
  );
}

// Returns the messages and settings of an exported file or of a list of API messages, or throws an
// Error with the reason.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  const list = Array.isArray(file) ? file : file?.messages;
  if (!Array.isArray(list)) throw new Error("The file has no list of messages.");
  const system = list
    .filter((message) => ["system", "developer"].includes(message?.role))
    .map((message) => textOf(message, 0));
  const messages = list.map(importedMessage).filter((message) => message !== null);
  const settings = { ...(Array.isArray(file) ? {} : file.settings) };
  if (system.length) settings.system = system.join("\n\n");
  return { messages, settings };
}

function importedMessage(message, index) {
  if (["system", "developer"].includes(message?.role)) return null;
  if (!ROLES.includes(message?.role))
    throw new Error(`Message ${index + 1} has the role ${JSON.stringify(message?.role)}.`);
  const content = textOf(message, index);
  if (message.role === "tool")
    return { role: "tool", callId: String(message.tool_call_id ?? ""), content };
  if (message.role === "user") {
    const attachments = imagesOf(message.content);
    return { role: "user", content, ...(attachments.length ? { attachments } : {}) };
  }
  const calls = (Array.isArray(message.tool_calls) ? message.tool_calls : []).map((call) => {
    const given = call?.function?.arguments ?? "{}";
    const text = typeof given === "string" ? given : JSON.stringify(given);
    return {
      id: String(call?.id ?? ""),
      name: String(call?.function?.name ?? ""),
      arguments: text,
    };
  });
  return {
    role: "assistant",
    content,
    reasoning: String(message.reasoning_content ?? message.reasoning ?? ""),
    calls,
  };
}

function textOf(message, index) {
  const content = message.content ?? "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) throw new Error(`The content of message ${index + 1} is not text.`);
  const texts = content.filter((part) => part?.text !== undefined);
  return texts.map((part) => String(part.text)).join("\n");
}
