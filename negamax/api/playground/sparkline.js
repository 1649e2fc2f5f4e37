// Draws a small chart of the last minutes with one or two lines.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export class Sparkline {
  // `pointed(index)` is called with the index of the value under the pointer, and with null when
  // the pointer leaves.
  constructor(numLines, pointed) {
    this.length = 2; // number of values from the left to the right edge
    this.area = svg("path", { class: "area" });
    this.lines = Array.from({ length: numLines }, (_, index) =>
      svg("path", { class: `line line-${index + 1}` }),
    );
    this.mark = svg("line", { class: "mark", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const attributes = {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      class: "sparkline",
    };
    this.element = svg("svg", attributes, this.area, ...this.lines, this.mark);
    this.element.addEventListener("pointermove", (event) => {
      const box = this.element.getBoundingClientRect();
      pointed(Math.round(((event.clientX - box.left) / box.width) * (this.length - 1)));
    });
    this.element.addEventListener("pointerleave", () => pointed(null));
  }

  // Shows lists of numbers with the latest number at the right. Null leaves a gap. `length` is the
  // number of values from edge to edge, and `top` the value at the upper edge.
  show(series, length, top, label) {
    this.length = length;
    const x = (index, count) => ((length - count + index) / (length - 1)) * WIDTH;
    const y = (value) => HEIGHT - 1 - (Math.min(value, top) / (top || 1)) * (HEIGHT - 3);
    series.forEach((values, number) => {
      let path = "";
      let isOn = false;
      values.forEach((value, index) => {
        if (value !== null)
          path += `${isOn ? "L" : "M"}${x(index, values.length).toFixed(1)} ${y(value).toFixed(1)}`;
        isOn = value !== null;
      });
      this.lines[number].setAttribute("d", path);
    });
    const [first] = series;
    const start = x(
      first.findIndex((value) => value !== null),
      first.length,
    ).toFixed(1);
    const known = first.slice(first.findIndex((value) => value !== null));
    const isWhole = known.length > 1 && !known.includes(null); // filling would also fill a gap
    this.area.setAttribute(
      "d",
      isWhole ? `${this.lines[0].getAttribute("d")}L${WIDTH} ${HEIGHT}L${start} ${HEIGHT}Z` : "",
    );
    this.element.setAttribute("aria-label", label);
  }

  // Marks the value at `index`. Null removes the mark.
  point(index) {
    this.mark.setAttribute("visibility", index === null ? "hidden" : "visible");
    if (index === null) return;
    const place = (index / (this.length - 1)) * WIDTH;
    this.mark.setAttribute("x1", place);
    this.mark.setAttribute("x2", place);
  }
}
