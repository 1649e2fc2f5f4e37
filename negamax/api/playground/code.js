// Code with its language, its colours, and a button that copies it.

import hljs from "./vendor/highlight.js";
import { copyButton, h } from "./dom.js";

const MAX_LIVE = 8_000; // characters that are coloured again whenever code grows
const MAX_COLOURED = 60_000; // beyond it colouring would hold up the page for seconds

// What highlight.js writes into: elements instead of HTML text.
class ElementEmitter {
  constructor() {
    this.root = document.createDocumentFragment();
    this.open = [this.root];
  }

  addText(text) {
    if (text) this.open.at(-1).append(text);
  }

  openNode(scope) {
    const [first, ...rest] = scope.split(".");
    const classes = [`hljs-${first}`, ...rest.map((name, depth) => name + "_".repeat(depth + 1))];
    const element = h("span", { class: classes.join(" ") });
    this.open.at(-1).append(element);
    this.open.push(element);
  }

  closeNode() {
    this.open.pop();
  }

  startScope(scope) {
    this.openNode(scope);
  }

  endScope() {
    this.closeNode();
  }

  __addSublanguage(emitter) {
    this.open.at(-1).append(emitter.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: ElementEmitter });

// `code` with colours where the language is known, as a fragment or text.
export function coloured(code, language) {
  if (code.length > MAX_COLOURED || !hljs.getLanguage(language)) return code;
  return hljs.highlight(code, { language, ignoreIllegals: true })._emitter.root;
}

// A block of code that may grow.
export class CodeView {
  constructor(language) {
    this.language = language;
    this.code = "";
    this.isColoured = true;
    this.body = h("code");
    const copy = copyButton(() => this.code, { title: "Copy the code" });
    const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copy);
    this.element = h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, this.body));
  }

  // Shows `code`; while it grows, only short code keeps its colours up to date.
  show(code, isWhole) {
    const isColoured = isWhole || code.length <= MAX_LIVE;
    if (code === this.code && (this.isColoured || !isWhole)) return;
    if (!isColoured && code.startsWith(this.code)) this.body.append(code.slice(this.code.length));
    else this.body.replaceChildren(coloured(code, this.language));
    this.isColoured = isColoured;
    this.code = code;
  }
}
