// Converts the Markdown of a model's answer into DOM nodes. The answer is untrusted: HTML stays
// text, links are http, https or mailto, and images become links. A text that grows is parsed again
// from its last block on, because earlier blocks cannot change.

import {
  fromMarkdown,
  gfmAutolinkLiteral,
  gfmAutolinkLiteralFromMarkdown,
  gfmStrikethrough,
  gfmStrikethroughFromMarkdown,
  gfmTable,
  gfmTableFromMarkdown,
  gfmTaskListItem,
  gfmTaskListItemFromMarkdown,
} from "./vendor/markdown.js";
import { CodeView } from "./code.js";
import { h, pressWithin } from "./dom.js";
import { formula, formulaSource } from "./formula.js";
import { mathFromMarkdown, mathSyntax } from "./math_syntax.js";

const MAX_DEPTH = 40; // nesting of elements; deeper elements become text
const MAX_ADDRESS = 2000; // characters of a link's address
// Matches a line that opens many nested quotes and lists.
const DEEP_LINE = /^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t]))){13}/m;
const DEFINITION = /^ {0,3}\[[^\]\n]+\]:/m;
// Matches fenced code. A fence takes all marks of its run, so that shorter fences are not tried.
const FENCED = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))[^\n]*\n[^]*?^ {0,3}\1/gm;
const HTML = ["htmlFlow", "htmlText"];
const MAX_MARKS = 2000; // emphasis marks in a paragraph; matching takes quadratic time

// Shows a text that grows. Blocks with unchanged source keep their elements, their selection and
// their focus.
export class MarkdownView {
  constructor(parent) {
    this.parent = parent;
    this.text = "";
    this.settled = 0; // number of characters before the last block
    this.numSettled = 0; // number of blocks before the last block
    this.blocks = []; // {key, node, view?, items?}
    this.latest = null; // arguments of the latest call of `show`
    this.held = null; // a promise to show the latest text after a press ends
  }

  // `isWhole`: the text is complete, and links may use definitions further down in the text.
  show(text, isWhole = false) {
    this.latest = [text, isWhole];
    const press = pressWithin(this.parent);
    if (!press) return this.draw(text, isWhole);
    this.held ??= press.then(() => {
      this.held = null;
      this.show(...this.latest);
    });
    return undefined;
  }

  draw(text, isWhole) {
    if (!text.startsWith(this.text.slice(0, this.settled)) || (isWhole && DEFINITION.test(text)))
      this.clear();
    this.text = text;
    const source = text.slice(this.settled);
    const tree = parse(source);
    const context = { source, definitions: definitionsOf(tree), isWhole };
    patch(this.parent, this.blocks, this.numSettled, tree.children, context);
    const last = tree.children.at(-1);
    if (last) {
      this.settled += source.lastIndexOf("\n", last.position.start.offset - 1) + 1;
      this.numSettled += tree.children.length - 1;
    }
  }

  clear() {
    for (const { node } of this.blocks.splice(0)) node.remove();
    this.settled = this.numSettled = 0;
  }
}

// Converts `text` into a fragment.
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  new MarkdownView(fragment).show(text, true);
  return fragment;
}

// Returns the address if links may use it, or null.
export function safeAddress(address) {
  if (address.length > MAX_ADDRESS || !URL.canParse(address)) return null; // not absolute
  const url = new URL(address);
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

function parse(source) {
  if (DEEP_LINE.test(source)) return plainTree(source);
  try {
    return fromMarkdown(source, {
      extensions: [
        gfmAutolinkLiteral(),
        gfmStrikethrough({ singleTilde: false }),
        gfmTable(),
        gfmTaskListItem(),
        mathSyntax(),
        { disable: { null: hasManyMarks(source) ? [...HTML, "attention"] : HTML } },
      ],
      mdastExtensions: [
        { ...gfmAutolinkLiteralFromMarkdown(), transforms: [] },
        gfmStrikethroughFromMarkdown(),
        gfmTableFromMarkdown(),
        gfmTaskListItemFromMarkdown(),
        mathFromMarkdown(),
      ],
    });
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return plainTree(source); // the nesting is deeper than the stack allows
  }
}

function hasManyMarks(source) {
  const counted = (text) => text.match(/[*_~]/g)?.length ?? 0;
  if (counted(source) <= MAX_MARKS) return false;
  const withoutCode = source.replace(FENCED, "");
  return withoutCode.split(/\n[ \t]*\n/).some((paragraph) => counted(paragraph) > MAX_MARKS);
}

function plainTree(source) {
  const position = { start: { offset: 0 }, end: { offset: source.length } };
  return {
    children: [
      { type: "paragraph", position, children: [{ type: "text", value: source, position }] },
    ],
  };
}

function definitionsOf(tree) {
  const definitions = tree.children.filter((node) => node.type === "definition");
  return new Map(definitions.reverse().map((node) => [node.identifier, node.url]));
}

// ---- blocks

// Changes `shown`, the blocks of `parent` from `start` on, to `blocks`.
function patch(parent, shown, start, blocks, context) {
  blocks.forEach((block, offset) => {
    const index = start + offset;
    const isOpen = !context.isWhole && offset === blocks.length - 1;
    const old = shown[index];
    const made = updated(old, block, isOpen, context);
    if (made === old) return;
    if (old) replace(old.node, made.node);
    else parent.append(made.node);
    shown[index] = made;
  });
  for (const { node } of shown.splice(start + blocks.length)) node.remove();
}

// Replaces `old` by `made`. The keyboard focus stays at the same element number.
function replace(old, made) {
  const reachable = (node) => [node, ...(node.querySelectorAll?.("a, button, [tabindex]") ?? [])];
  const { activeElement } = document;
  const place = old.contains(activeElement) ? reachable(old).indexOf(activeElement) : -1;
  old.replaceWith(made);
  reachable(made)[place]?.focus?.({ preventScroll: true });
}

// Returns `old` if it shows `block` or can be updated to show it, or a new entry.
function updated(old, block, isOpen, context) {
  const key = `${block.type} ${isOpen} ${isLoose(block)} ${sourceOf(block, context)}`;
  if (old?.key === key) return old;
  const isSame = old?.type === block.type;
  if (block.type === "code") {
    const language = block.lang ?? "";
    const made =
      isSame && old.view.language === language
        ? old
        : { type: "code", view: new CodeView(language) };
    made.view.show(block.value, !isOpen);
    return Object.assign(made, { key, node: made.view.element });
  }
  if (block.type === "list") {
    const isReusable =
      isSame &&
      old.isLoose === isLoose(block) &&
      old.start === block.start &&
      old.isOrdered === block.ordered;
    const made = isReusable ? old : { type: "list", node: listElement(block), items: [] };
    Object.assign(made, {
      key,
      isLoose: isLoose(block),
      start: block.start,
      isOrdered: block.ordered,
    });
    const items = block.children.map((item) => ({ ...item, isLoose: made.isLoose }));
    patch(made.node, made.items, 0, items, { ...context, isWhole: !isOpen });
    return made;
  }
  return { key, type: block.type, node: blockElement(block, 0, { ...context, isOpen }) };
}

function sourceOf(node, context) {
  return context.source.slice(node.position.start.offset, node.position.end.offset);
}

function isLoose(block) {
  if (block.type === "listItem") return block.isLoose ?? block.spread;
  return block.type === "list" && (block.spread || block.children.some((item) => item.spread));
}

function blockElement(block, depth, context) {
  if (depth > MAX_DEPTH) return h("p", {}, sourceOf(block, context));
  switch (block.type) {
    case "heading":
      // the page itself uses h1
      return withInline(h(`h${Math.min(6, block.depth + 1)}`), block.children, context);
    case "thematicBreak":
      return h("hr");
    case "blockquote":
      return withBlocks(h("blockquote"), block.children, depth, context);
    case "list": {
      const items = block.children.map((item) =>
        itemElement({ ...item, isLoose: isLoose(block) }, depth + 1, context),
      );
      const list = listElement(block);
      list.append(...items);
      return list;
    }
    case "listItem":
      return itemElement(block, depth, context);
    case "table":
      return tableElement(block, context);
    case "code": {
      const view = new CodeView(block.lang ?? "");
      view.show(block.value, true);
      return view.element;
    }
    case "math":
      return mathElement(block, context);
    case "definition":
      return document.createComment("");
    default:
      return withInline(h("p"), block.children, context);
  }
}

function withBlocks(parent, blocks, depth, context) {
  parent.append(...blocks.map((block) => blockElement(block, depth + 1, context)));
  return parent;
}

function listElement(block) {
  return h(
    block.ordered ? "ol" : "ul",
    block.ordered && block.start !== 1 ? { start: block.start } : {},
  );
}

function itemElement(item, depth, context) {
  const element = h("li");
  if (typeof item.checked === "boolean") {
    element.className = "task";
    element.append(
      h("input", {
        type: "checkbox",
        disabled: true,
        checked: item.checked,
        "aria-label": item.checked ? "done" : "to do",
      }),
      " ",
    );
  }
  item.children.forEach((block, index) => {
    const isBare = block.type === "paragraph" && !isLoose(item);
    if (isBare && index && item.children[index - 1].type === "paragraph") element.append(h("br"));
    if (isBare) withInline(element, block.children, context);
    else element.append(blockElement(block, depth + 1, context));
  });
  return element;
}

function tableElement(block, context) {
  const [head, ...rows] = block.children;
  const row = ({ children }, tag) =>
    h(
      "tr",
      {},
      ...head.children.map((_, at) =>
        withInline(
          h(tag, { class: block.align[at] ?? "left" }),
          children[at]?.children ?? [],
          context,
        ),
      ),
    );
  const body = rows.length ? h("tbody", {}, ...rows.map((cells) => row(cells, "td"))) : null;
  return h(
    "div",
    { class: "table", tabindex: "0" },
    h("table", {}, h("thead", {}, row(head, "th")), body),
  );
}

// A formula without an end is shown as source while the model writes it, and later as plain text.
function mathElement(block, context) {
  if (!block.isOpen) return formula(block.value, true);
  return h(
    "p",
    {},
    context.isOpen ? formulaSource(sourceOf(block, context)) : sourceOf(block, context).trim(),
  );
}

// ---- inline

function withInline(parent, nodes, context, depth = 0) {
  for (const node of nodes) parent.append(...inlineNodes(node, context, depth));
  return parent;
}

function inlineNodes(node, context, depth) {
  if (depth > MAX_DEPTH) return [sourceOf(node, context)];
  switch (node.type) {
    case "text":
      return withBreaks(node.value);
    case "break":
      return [h("br")];
    case "inlineCode":
      return [h("code", {}, node.value)];
    case "inlineMath":
      return [formula(node.value, node.isDisplay, "span")];
    case "emphasis":
      return [withInline(h("em"), node.children, context, depth + 1)];
    case "strong":
      return [withInline(h("strong"), node.children, context, depth + 1)];
    case "delete":
      return [withInline(h("del"), node.children, context, depth + 1)];
    case "link":
    case "linkReference":
    case "image":
    case "imageReference":
      return [linkElement(node, context, depth)];
    default:
      return [sourceOf(node, context)];
  }
}

// Keeps the line breaks of the text, also HTML line breaks that models write in table cells.
function withBreaks(text) {
  const lines = text.split(/\n|<br\s{0,9}\/?>/i);
  return lines
    .flatMap((line, index) => (index ? [h("br"), line] : [line]))
    .filter((part) => part !== "");
}

function linkElement(node, context, depth) {
  const given = node.url ?? context.definitions.get(node.identifier) ?? "";
  const address = safeAddress(given);
  if (!address) return document.createTextNode(sourceOf(node, context));
  const link = h("a", {
    href: address,
    title: address,
    target: "_blank",
    rel: "noopener noreferrer nofollow",
  });
  if (node.children?.length) return withInline(link, node.children, context, depth + 1);
  link.append(node.alt || given);
  return link;
}
