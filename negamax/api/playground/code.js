// Shows code with its language, its colours, and a button that copies the code.

import hljs from "./vendor/highlight.js";
import { copyButton, h } from "./dom.js";

const MAX_LIVE = 8_000; // growing code up to this many characters is coloured
const MAX_COLOURED = 60_000; // colouring more characters would block the page for seconds

// Collects highlight.js's output as elements instead of HTML text.
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

// Returns `code` as a fragment with colours, or as text for an unknown language.
export function coloured(code, language) {
  if (code.length > MAX_COLOURED || !hljs.getLanguage(language)) return code;
  return hljs.highlight(code, { language, ignoreIllegals: true })._emitter.root;
}

// A code block that may grow.
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

  // Shows `code`. While the code grows, only short code is coloured.
  show(code, isWhole) {
    const isColoured = isWhole || code.length <= MAX_LIVE;
    if (code === this.code && (this.isColoured || !isWhole)) return;
    if (!isColoured && code.startsWith(this.code)) this.body.append(code.slice(this.code.length));
    else this.body.replaceChildren(coloured(code, this.language));
    this.isColoured = isColoured;
    this.code = code;
  }
}
