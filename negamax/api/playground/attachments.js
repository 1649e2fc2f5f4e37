// Reads and checks text files and images, and adds them to a message as fenced text and as image
// parts of the API.

import { button, h } from "./dom.js";

export const MAX_FILE_BYTES = 512 * 1024;
const MAX_IMAGE_BYTES = 30e6; // as the server
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const MAX_FILES = 20;

// Returns the name and the text of `file`, or its name, data URL (`image`) and bytes (`size`).
// Throws an Error with the reason of a refusal.
async function readFile(file) {
  if (!IMAGE_TYPES.includes(file.type)) return readTextFile(file);
  if (file.size > MAX_IMAGE_BYTES) {
    throw new Error(
      `${file.name} has ${bytes(file.size)}; allowed: images of ${bytes(MAX_IMAGE_BYTES)}.`,
    );
  }
  const image = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  const shown = new Image();
  shown.src = image;
  await shown.decode().catch(() => {
    throw new Error(`${file.name} is not an image that the browser can read.`);
  });
  return { name: file.name, image, size: file.size };
}

async function readTextFile(file) {
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
  throw new Error(
    `${file.name} is not text in UTF-8; allowed: text, and images in PNG, JPEG, GIF or WebP.`,
  );
}

// Returns the content of a message: the text after the text of its files. If the message has
// images, the content is a list of parts with the images first.
export function withFiles(content, attachments = []) {
  const texts = attachments.filter((file) => !file.image);
  const text = [...texts.map(fenced), content].filter(Boolean).join("\n\n");
  const images = attachments
    .filter((file) => file.image)
    .map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  if (!images.length) return text;
  return text ? [...images, { type: "text", text }] : images;
}

// Returns the images in the data URLs of a message's content.
export function imagesOf(content) {
  const urls = (Array.isArray(content) ? content : [])
    .map((part) => (part?.type === "image_url" ? String(part.image_url?.url ?? "") : ""))
    .filter((url) => IMAGE_TYPES.some((type) => url.startsWith(`data:${type};base64,`)));
  return urls.map((image, index) => ({
    name: `image ${index + 1}`,
    image,
    size: Math.floor(((image.length - image.indexOf(",") - 1) * 3) / 4),
  }));
}

// Returns the size of an attachment in bytes.
export function sizeOf({ text, size }) {
  return size ?? new Blob([text]).size;
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
        this.files.push(await readFile(file));
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
          file.image ? h("img", { src: file.image, alt: "" }) : null,
          h("span", { class: "name" }, file.name),
          ` ${bytes(sizeOf(file))} `,
          away,
        );
      }),
    );
  }
}
