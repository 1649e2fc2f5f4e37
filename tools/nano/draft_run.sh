#!/usr/bin/env bash
# Train a draft for TARGET, nano or nano-m3, for SECONDS of wall-clock time on one GPU and write it
# to OUT/TARGET-draft; fits ten minutes of one H200. From the repository root:
#
#   tools/nano/draft_run.sh OUT [SECONDS] [TARGET]
#
# OUT/log holds how it went. WORKERS processes make the data.
set -euo pipefail
out=$1 seconds=${2:-480} target=${3:-nano} workers=${WORKERS:-$(($(nproc) - 2))}
mkdir -p "$out"
data=$(mktemp -d)
python=${PYTHON:-python3}
maker=tools/nano/data.py
[ "$target" = nano-m3 ] && maker=tools/nano/m3_data.py
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2

set -m # the workers get a process group of their own
"$python" "$maker" --out "$data" --workers "$workers" --shard-tokens 400000 \
  --seed "${SEED:-31}" &
maker=$!
trap 'kill -- -"$maker" 2>/dev/null; rm -rf "$data"' EXIT

"$python" tools/nano/draft_train.py --target "$target" --data "$data" \
  --out "$out/$target-draft" --seconds "$seconds" ${TRAIN_OPTIONS:-} 2>&1 | tee -a "$out/log"
kill -- -"$maker" 2>/dev/null || true
