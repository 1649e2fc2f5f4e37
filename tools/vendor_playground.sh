#!/bin/sh
# Build the libraries of the chat page into negamax/api/playground/vendor/, and the accessibility
# checker of its tests into tests/e2e/vendor/. tools/vendor_playground/package.json and its lock
# file fix the versions. The script needs node, npm and patch.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
pages=$root/negamax/api/playground/vendor
tests=$root/tests/e2e/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$root"/tools/vendor_playground/* "$work"
cd "$work"
npm ci --ignore-scripts --no-audit --no-fund
patch --strip 1 --directory node_modules < micromark.patch
mkdir -p "$pages" "$tests"
for name in markdown temml highlight; do
  # "neutral" selects modules without innerHTML, which the page's policy forbids
  npx esbuild "$name.js" --bundle --minify --format=esm --platform=neutral \
    --main-fields=module,main --target=es2022 --charset=utf8 --legal-comments=none \
    --metafile="$name.json" --log-level=warning --outfile="$pages/$name.js" \
    --banner:js="/* Built by tools/vendor_playground.sh; licences: LICENSES.txt */"
done
node licences.js markdown.json temml.json highlight.json > "$pages/LICENSES.txt"
cp node_modules/axe-core/axe.min.js "$tests/axe.min.js"
cp node_modules/axe-core/LICENSE "$tests/axe.LICENSE.txt"
