// Markdown of a model's answer as DOM nodes. Everything in it is untrusted: HTML stays text, links are http, https or mailto,
// images are links. Both passes are linear in the text, so that hostile or endless answers do not freeze the page.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 12; // of quotes, lists and emphasis in each other; what is deeper stays text
const MAX_LABEL = 1000; // characters of a link's text
const MAX_ADDRESS = 2000; // characters of a link's address
const MAX_BACKTICKS = 64; // around inline code
const MARKER = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;

// Shows a text that grows: blocks whose source did not change keep their elements, and with them selection and focus.
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.shown = []; // {source, node}
  }

  show(text) {
    const blocks = parseBlocks(text.split(/\r?\n/));
    blocks.forEach((block, index) => {
      const old = this.shown[index];
      if (old?.source === block.source) return;
      let node = old?.node;
      if (old && block.kind === "code" && old.language === block.language) {
        node.querySelector("code").textContent = block.code; // keeps the place it is scrolled to
      } else {
        node = renderBlock(block, 0);
        if (old) old.node.replaceWith(node);
        else this.parent.append(node);
      }
      this.shown[index] = { source: block.source, node, language: block.language };
    });
    for (const { node } of this.shown.splice(blocks.length)) node.remove();
  }
}

// `text` as a fragment.
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  new MarkdownView(fragment).show(text);
  return fragment;
}

// The address if a link may lead there, else null.
export function safeAddress(address) {
  if (address.length > MAX_ADDRESS || !URL.canParse(address)) return null; // what has no scheme cannot be parsed
  const url = new URL(address);
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

// ---- blocks

function parseBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = fenceAt(lines, at) ?? headingAt(lines, at) ?? ruleAt(lines, at) ?? quoteAt(lines, at) ?? listAt(lines, at) ??
      tableAt(lines, at) ?? paragraphAt(lines, at);
    block.source = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    at = block.end;
    blocks.push(block);
  }
  return blocks;
}

function fenceOf(line) {
  const match = FENCE.exec(line);
  if (!match || (match[2][0] === "`" && match[3].includes("`"))) return null;
  return { indent: match[1].length, mark: match[2], language: match[3].trim().split(/\s/, 1)[0] };
}

function fenceAt(lines, start) {
  const fence = fenceOf(lines[start]);
  if (!fence) return null;
  const code = [];
  let end = start + 1;
  let isClosed = false;
  while (end < lines.length && !isClosed) {
    const closer = fenceOf(lines[end]);
    isClosed = closer !== null && !closer.language && closer.mark.startsWith(fence.mark);
    if (!isClosed) code.push(unindented(lines[end], fence.indent));
    end += 1;
  }
  return { kind: "code", end, language: fence.language, code: code.join("\n") };
}

function headingAt(lines, start) {
  const match = HEADING.exec(lines[start]);
  if (!match) return null;
  return { kind: "heading", end: start + 1, level: match[1].length, text: withoutClosingMarks((match[2] ?? "").trim()) };
}

function withoutClosingMarks(text) {
  let end = text.length;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text;
}

function isRule(line) {
  const marks = line.replace(/[ \t]/g, "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function ruleAt(lines, start) {
  return isRule(lines[start]) ? { kind: "rule", end: start + 1 } : null;
}

function isQuote(line) {
  return /^ {0,3}>/.test(line);
}

function quoteAt(lines, start) {
  if (!isQuote(lines[start])) return null;
  let end = start;
  while (end < lines.length && isQuote(lines[end])) end += 1;
  return { kind: "quote", end, lines: lines.slice(start, end).map((line) => line.replace(/^ {0,3}> ?/, "")) };
}

function listAt(lines, start) {
  const first = MARKER.exec(lines[start]);
  if (!first || first[1].length > 3) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let threshold = 0; // spaces from which a line belongs to the item before it
  let width = 0; // spaces taken off its lines
  let end = start;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const indent = line.search(/[^ ]|$/);
    if (!line.trim()) {
      items.at(-1).push("");
    } else if (items.length && indent >= threshold) {
      items.at(-1).push(unindented(line, width));
    } else {
      const marker = isRule(line) ? null : MARKER.exec(line);
      if (marker && /\d/.test(marker[2]) === isOrdered) {
        width = Math.min(marker[0].length, marker[1].length + marker[2].length + 1);
        threshold = Math.min(width, indent + 2);
        items.push([line.slice(width)]);
      } else if (lines[end - 1].trim() && !startsBlock(line)) {
        items.at(-1).push(line.trimStart());
      } else {
        break;
      }
    }
  }
  while (!lines[end - 1].trim()) end -= 1;
  return { kind: "list", end, isOrdered, start: Number.parseInt(first[2], 10), items };
}

function startsBlock(line) {
  return fenceOf(line) !== null || HEADING.test(line) || isRule(line) || isQuote(line) || MARKER.test(line);
}

function isTable(lines, start) {
  const rule = lines[start + 1] ?? "";
  return lines[start].includes("|") && rule.includes("|") && rule.includes("-") && /^[\s|:-]+$/.test(rule);
}

function tableAt(lines, start) {
  if (!isTable(lines, start)) return null;
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const alignment = cellsOf(lines[start + 1]).map((cell) => {
    const text = cell.trim();
    return text.endsWith(":") ? (text.startsWith(":") ? "center" : "right") : "left";
  });
  return { kind: "table", end, head: cellsOf(lines[start]), alignment, rows: lines.slice(start + 2, end).map(cellsOf) };
}

function cellsOf(line) {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraphAt(lines, start) {
  let end = start + 1;
  const goesOn = () => lines[end].trim() && !isTable(lines, end) && (!startsBlock(lines[end]) || isLateNumber(lines[end]));
  while (end < lines.length && goesOn()) end += 1;
  return { kind: "paragraph", end, text: lines.slice(start, end).map((line) => line.trimStart()).join("\n").trimEnd() };
}

// A number in running text, as in "… in\n1999. Then": only a list that starts at 1 may interrupt a paragraph.
function isLateNumber(line) {
  const marker = MARKER.exec(line);
  return marker !== null && /\d/.test(marker[2]) && Number.parseInt(marker[2], 10) !== 1;
}

function unindented(line, width) {
  let spaces = 0;
  while (spaces < width && line[spaces] === " ") spaces += 1;
  return line.slice(spaces);
}

function renderBlock(block, depth) {
  switch (block.kind) {
    case "code":
      return codeBlock(block.code, block.language);
    case "heading":
      return withInline(h(`h${Math.min(6, block.level + 1)}`), block.text); // h1 is the page's own
    case "rule":
      return h("hr");
    case "quote":
      return withBlocks(h("blockquote"), block.lines, depth + 1);
    case "list":
      return listElement(block, depth);
    case "table":
      return tableElement(block);
    default:
      return withInline(h("p"), block.text);
  }
}

// Code with its language and a button that copies it.
export function codeBlock(code, language = "") {
  const body = h("code", {}, code);
  const copy = copyButton(() => body.textContent, { title: "Copy the code" });
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copy);
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, body));
}

function withBlocks(parent, lines, depth) {
  if (depth > MAX_DEPTH) {
    parent.append(lines.join("\n"));
    return parent;
  }
  for (const block of parseBlocks(lines)) parent.append(renderBlock(block, depth));
  return parent;
}

function listElement(block, depth) {
  const list = h(block.isOrdered ? "ol" : "ul", block.isOrdered && block.start !== 1 ? { start: block.start } : {});
  for (const lines of block.items) {
    const item = withBlocks(h("li"), lines, depth + 1);
    const first = item.firstElementChild;
    if (first?.tagName === "P" && first === item.firstChild) first.replaceWith(...first.childNodes); // a tight item
    list.append(item);
  }
  return list;
}

function tableElement(block) {
  const row = (cells, tag) =>
    h("tr", {}, ...block.head.map((_, at) => withInline(h(tag, { class: block.alignment[at] }), cells[at] ?? "")));
  const head = h("thead", {}, row(block.head, "th"));
  const body = h("tbody", {}, ...block.rows.map((cells) => row(cells, "td")));
  return h("div", { class: "table", tabindex: "0" }, h("table", {}, head, body));
}

// ---- inline

function withInline(parent, text, depth = 0) {
  new InlineText(text, depth).into(parent);
  return parent;
}

// Scans one text. Each kind of closer is looked for once beyond any point, which keeps unbalanced marks linear.
class InlineText {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.found = new Map(); // what is looked for -> {from, at}
  }

  into(parent) {
    let plain = "";
    const flush = () => {
      if (plain) parent.append(plain);
      plain = "";
    };
    let at = 0;
    while (at < this.text.length) {
      const piece = this.pieceAt(at);
      if (piece) {
        flush();
        parent.append(piece.node);
        at = piece.end;
      } else if (this.text[at] === "\\" && /[!-/:-@[-`{-~]/.test(this.text[at + 1] ?? "")) {
        plain += this.text[at + 1];
        at += 2;
      } else {
        const run = this.text[at] === "`" ? this.runAt(at) : 1;
        plain += this.text.slice(at, at + run);
        at += run;
      }
    }
    flush();
  }

  pieceAt(at) {
    switch (this.text[at]) {
      case "`":
        return this.codeAt(at);
      case "*":
      case "_":
      case "~":
        return this.depth < MAX_DEPTH ? this.emphasisAt(at) : null;
      case "[":
        return this.linkAt(at, at + 1);
      case "!":
        return this.text[at + 1] === "[" ? this.linkAt(at, at + 2) : null;
      case "<":
      case "h":
        return this.bareLinkAt(at);
      case "\n":
        return { node: h("br"), end: at + 1 };
      default:
        return null;
    }
  }

  // The first place from `from` on where `mark` is and `fits` says yes, or -1.
  find(mark, from, fits = () => true) {
    const known = this.found.get(mark);
    if (known && known.from <= from && (known.at === -1 || from <= known.at)) return known.at;
    let at = this.text.indexOf(mark, from);
    while (at !== -1 && !fits(at)) at = this.text.indexOf(mark, at + 1);
    this.found.set(mark, { from, at });
    return at;
  }

  runAt(at) {
    let end = at;
    while (this.text[end] === this.text[at]) end += 1;
    return end - at;
  }

  codeAt(at) {
    const run = this.runAt(at);
    if (run > MAX_BACKTICKS) return null;
    const start = at + run;
    const end = this.find("`".repeat(run), start, (place) => this.text[place - 1] !== "`" && this.runAt(place) === run);
    if (end === -1) return null;
    const code = this.text.slice(start, end);
    const isPadded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim();
    return { node: h("code", {}, isPadded ? code.slice(1, -1) : code), end: end + run };
  }

  emphasisAt(at) {
    const letter = this.text[at];
    const isDouble = this.text[at + 1] === letter;
    if (letter === "~" && !isDouble) return null;
    const mark = isDouble ? letter + letter : letter;
    const start = at + mark.length;
    if (/^\s?$/.test(this.text[start] ?? "") || (letter === "_" && isWordPart(this.text[at - 1]))) return null;
    let end = this.find(mark, start + 1, (place) => this.closes(place, mark));
    if (end === -1) return null;
    if (isDouble && this.text[end + 2] === letter) end += 1; // of ***both***
    const tag = letter === "~" ? "del" : isDouble ? "strong" : "em";
    return { node: withInline(h(tag), this.text.slice(start, end), this.depth + 1), end: end + mark.length };
  }

  closes(place, mark) {
    const before = this.text[place - 1];
    const after = this.text[place + mark.length];
    if (/\s/.test(before) || before === "\\") return false;
    if (mark[0] === "_" && isWordPart(after)) return false;
    return mark.length === 2 || (before !== mark && after !== mark);
  }

  linkAt(at, labelStart) {
    const labelEnd = this.find("](", labelStart);
    if (labelEnd === -1 || labelEnd - labelStart > MAX_LABEL) return null;
    const start = labelEnd + 2;
    let end = start;
    for (let open = 1; end < this.text.length && end - start <= MAX_ADDRESS; end += 1) {
      if (this.text[end] === "(") open += 1;
      if (this.text[end] === ")") open -= 1;
      if (!open) break;
      if (this.text[end] === "\n") return null;
    }
    if (this.text[end] !== ")") return null;
    const address = safeAddress(this.text.slice(start, end).trim().split(/\s/, 1)[0].replace(/^<|>$/g, ""));
    if (!address || this.depth >= MAX_DEPTH) return null;
    const link = linkTo(address);
    const label = this.text.slice(labelStart, labelEnd);
    if (label.includes("](") || /https?:/i.test(label)) link.append(label); // no link in a link
    else withInline(link, label || address, this.depth + 1);
    return { node: link, end: end + 1 };
  }

  bareLinkAt(at) {
    const isBracketed = this.text[at] === "<";
    if (!isBracketed && isWordPart(this.text[at - 1])) return null;
    const pattern = isBracketed ? /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y : /https?:\/\/[^\s<>"`]{1,2000}/y;
    pattern.lastIndex = at;
    const match = pattern.exec(this.text);
    if (!match) return null;
    const shown = isBracketed ? match[1] : match[0].replace(/[.,:;!?'*_~)\]]{1,20}$/, "");
    const address = safeAddress(shown);
    if (!address) return null;
    const link = linkTo(address);
    link.append(shown);
    return { node: link, end: isBracketed ? pattern.lastIndex : at + shown.length };
  }
}

function linkTo(address) {
  return h("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function isWordPart(letter) {
  return letter !== undefined && /[\p{L}\p{N}]/u.test(letter);
}
