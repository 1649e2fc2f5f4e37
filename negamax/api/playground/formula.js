// Converts formulas from TeX to MathML, which browsers lay out by themselves.

import temml from "./vendor/temml.js";
import { h } from "./dom.js";

const MAX_SOURCE = 10_000; // characters; a longer formula is shown as source text
const OPTIONS = {
  throwOnError: true,
  trust: false,
  strict: false,
  annotate: true,
  maxExpand: 1000,
  maxSize: [50, 200],
};

// Lays out the formula `source` in an element `tag`. A formula with an error is shown as its source
// with the error.
export function formula(source, isDisplay, tag = "div") {
  const element = h(
    tag,
    isDisplay ? { class: "formula display", tabindex: "0" } : { class: "formula" },
  );
  if (source.length > MAX_SOURCE) return formulaSource(source);
  try {
    temml.render(source, element, { ...OPTIONS, displayMode: isDisplay });
  } catch (error) {
    return formulaSource(source, error.message);
  }
  return element;
}

// Shows the source of a formula that has an error or is not complete yet.
export function formulaSource(source, problem = null) {
  return h("code", { class: "formula source", title: problem }, source);
}
