// Writes the name, version and licence of every package that went into a bundle. Arguments:
// esbuild's metafiles.

import { readdirSync, readFileSync } from "node:fs";

const folders = new Set();
for (const metafile of process.argv.slice(2)) {
  for (const input of Object.keys(JSON.parse(readFileSync(metafile, "utf8")).inputs)) {
    const [folder] = /^node_modules\/(?:@[^/]+\/)?[^/]+/.exec(input) ?? [];
    if (folder) folders.add(folder);
  }
}
const texts = new Map(); // licence -> packages under it
for (const folder of [...folders].sort()) {
  const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  if (!file) throw new Error(`${name} has no licence file`);
  const text = readFileSync(`${folder}/${file}`, "utf8").trim();
  texts.set(text, [...(texts.get(text) ?? []), `${name} ${version} (${license})`]);
}
const parts = [...texts].map(([text, packages]) => `${packages.join("\n")}\n\n${text}\n`);
const listed = parts.join(`\n${"-".repeat(80)}\n\n`);
process.stdout.write(
  `The files beside this one are built from these packages.\n\n${listed}`,
);
