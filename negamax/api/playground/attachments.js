// Reads and checks text files, and adds them to a message as fenced text.

import { button, h } from "./dom.js";

export const MAX_FILE_BYTES = 512 * 1024;
const MAX_FILES = 20;

// Returns the name and text of `file`, or throws an Error with the reason of a refusal.
export async function readTextFile(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(
      `${file.name} has ${bytes(file.size)}; allowed: ${bytes(MAX_FILE_BYTES)} of text.`,
    );
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name, text };
  } catch {
    // text that is not UTF-8 is refused below
  }
  throw new Error(`${file.name} is not text in UTF-8; only text can be attached.`);
}

// Returns the text of a message after the text of its files.
export function withFiles(content, attachments = []) {
  return [...attachments.map(fenced), content].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  const kind = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${kind}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// Formats a size, such as 12 KiB.
export function bytes(size) {
  return size < 1000
    ? `${size} B`
    : size < 1e6
      ? `${Math.round(size / 1024)} KiB`
      : `${(size / 2 ** 20).toFixed(1)} MiB`;
}

// Shows the files of the message that is being written as a row of labels.
export class Attachments {
  constructor(row, { refused }) {
    this.row = row;
    this.refused = refused;
    this.files = [];
    this.show();
  }

  async take(files) {
    for (const file of files) {
      try {
        if (this.files.length >= MAX_FILES) throw new Error(`A message takes ${MAX_FILES} files.`);
        this.files.push(await readTextFile(file));
      } catch (error) {
        this.refused(error.message);
      }
    }
    this.show();
  }

  // Returns the files and empties the row.
  handOver() {
    const files = this.files;
    this.set([]);
    return files;
  }

  set(files) {
    this.files = files;
    this.show();
  }

  show() {
    this.row.hidden = !this.files.length;
    this.row.replaceChildren(
      ...this.files.map((file) => {
        const remove = () => this.set(this.files.filter((other) => other !== file));
        const away = button("×", remove, { class: "quiet", "aria-label": `Remove ${file.name}` });
        return h(
          "span",
          { class: "file" },
          h("span", { class: "name" }, file.name),
          ` ${bytes(new Blob([file.text]).size)} `,
          away,
        );
      }),
    );
  }
}
