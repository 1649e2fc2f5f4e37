#!/usr/bin/env bash
# newcomer.sh [REPOSITORY]: follow the first steps of a new user, from a clone in an empty folder.
# The steps are demo, server and chat page, doctor and chat, the snippets of README and SDK guides,
# launch lines of other servers, wrong flags, and the wheel. The script needs some minutes and 4 GB,
# and stops at the first step that fails.
set -euo pipefail

repository=${1:-$(cd "$(dirname "$0")/.." && pwd)}
folder=$(mktemp -d)
server=
leave() {
    [ -z "$server" ] || kill -TERM -- "-$server" 2>/dev/null || true
    rm -rf "$folder"
}
trap leave EXIT
unset VIRTUAL_ENV PYTHONPATH

step() { printf '\n== %s\n' "$*"; }
fail() { printf 'newcomer: %s\n' "$*" >&2; exit 1; }

step "git clone, make demo"
git clone --quiet "$repository" "$folder/negamax"
cd "$folder/negamax"
make demo

step "make serve, a request, the chat page and its files"
set -m # The server gets its own process group, so that all its processes stop together.
make serve ARGS="--port 0" >"$folder/serve.out" 2>"$folder/serve.log" &
server=$!
set +m
url=
for _ in $(seq 120); do
    url=$(sed -nE 's|.*ready: (https?://[^ ]+)/v1.*|\1|p' "$folder/serve.out")
    [ -z "$url" ] || break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.5
done
[ -n "$url" ] || fail "no server: $(cat "$folder/serve.log")"
question='{"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}'
curl -fsS "$url/v1/chat/completions" -H 'content-type: application/json' -d "$question" |
    grep 85 >/dev/null || fail "47 + 38 is not 85"
curl -fsS "$url/" >"$folder/page.html"
grep -oE '(src|href)="[^"#]+"' "$folder/page.html" | cut -d'"' -f2 | while read -r file; do
    curl -fsS -o /dev/null "$url/${file#/}" || fail "the chat page lacks $file"
done
echo "$url answers, and its page is complete"

step "doctor, and a chat with the server"
.venv/bin/negamax doctor
curl -fsS "$url/v1" | grep -q '"POST /v1/chat/completions"' || fail "/v1 says nothing"
echo "What is 47 + 38?" | .venv/bin/negamax chat --url "$url" --temperature 0 2>/dev/null |
    grep 85 || fail "the chat says something else than 85"

step "the snippets of the README and of both SDK guides"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt anthropic
cat >"$folder/snippets.py" <<'PYTHON'
import pathlib, re, subprocess, sys

url, *files = sys.argv[1:]
for file in files:
    text = pathlib.Path(file).read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for number, code in enumerate(snippets, 1):
        command = [sys.executable, "-c", code.replace("http://127.0.0.1:8000", url)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode or not done.stdout.strip():
            sys.exit(f"snippet {number} of {file} fails:\n{code}\n{done.stdout}\n{done.stderr}")
        print(f"{file}, snippet {number}: {done.stdout.split(chr(10))[0][:60]}")
PYTHON
.venv/bin/python "$folder/snippets.py" "$url" \
    README.md docs/guides/openai-sdk.md docs/guides/anthropic-sdk.md
kill -TERM -- "-$server"
wait "$server" 2>/dev/null || true
server=
! grep Traceback "$folder/serve.log" || fail "the server failed inside: $(cat "$folder/serve.log")"

step "launch lines of other servers: checked, not run"
taken() { .venv/bin/negamax serve "$@" --explain >/dev/null || fail "not taken: $*"; }
refused() { # WORDS ARGUMENT...: require exit code 2 and one line with WORDS
    local words=$1 code=0
    shift
    .venv/bin/negamax "$@" >"$folder/out" 2>"$folder/error" || code=$?
    [ "$code" = 2 ] && [ "$(wc -l <"$folder/error")" = 1 ] &&
        grep -qF -- "$words" "$folder/error" ||
        fail "'$*' ended with $code: $(cat "$folder/error")"
    cat "$folder/error"
}
vllm="--enable-auto-tool-choice --tool-call-parser minimax_m2"
vllm="$vllm --reasoning-parser minimax_m2_append_think --trust-remote-code"
sglang="--tool-call-parser minimax-m2 --reasoning-parser minimax-append-think"
taken MiniMaxAI/MiniMax-M2 --tensor-parallel-size 4 $vllm
taken --model-path MiniMaxAI/MiniMax-M2 --tp-size 4 $sglang --mem-fraction-static 0.85
refused "--tensor-parallel-size 4" serve MiniMaxAI/MiniMax-M2 \
    --enable_expert_parallel --tensor-parallel-size 8 $vllm
refused "--tensor-parallel-size 4" serve \
    --model-path MiniMaxAI/MiniMax-M2 --tp-size 8 --ep-size 8 $sglang

step "wrong flags: one line, what is allowed, exit code 2"
refused "did you mean --tensor-parallel-size?" serve nano --tensor-paralel-size 2
refused "0 to 65535" serve nano --port 99999
refused "no/such" serve no/such/folder
refused "temperature" generate nano --prompt Hello --temperature=-1

step "the wheel alone in an empty environment"
make test-install

step "all as promised"
