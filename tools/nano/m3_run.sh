#!/usr/bin/env bash
# Train nano-m3 for SECONDS of wall-clock time, and when its schedule of TOTAL seconds is over,
# measure it and pack the checkpoint. From the repository root:
#
#   tools/nano/m3_run.sh OUT [SECONDS] [TOTAL]
#
# OUT/state holds what a later run continues (copy it back to OUT/state first), OUT/log how it went,
# OUT/nano-m3.tar the checkpoint. No file is larger than 16 MiB. WORKERS processes make the data.
set -euo pipefail
out=$1 seconds=${2:-540} total=${3:-780} workers=${WORKERS:-$(($(nproc) - 2))}
mkdir -p "$out"
data=$(mktemp -d)
python=${PYTHON:-python3}
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
seed=$(date +%s) # every run makes fresh data
echo "data of seed $seed" | tee -a "$out/log"

set -m # the workers get a process group of their own
"$python" tools/nano/m3_data.py --out "$data" --workers "$workers" --shard-tokens 400000 \
  --seed "$seed" &
maker=$!
trap 'kill -- -"$maker" 2>/dev/null; rm -rf "$data"' EXIT

"$python" tools/nano/m3_train.py --data "$data" --state "$out/state" --activation-fp8 \
  --seconds "$seconds" --total-seconds "$total" ${TRAIN_OPTIONS:-} 2>&1 | tee -a "$out/log"
kill -- -"$maker" 2>/dev/null || true

if grep -q "100.0% of the schedule" "$out/log"; then
  "$python" tools/nano/m3_export.py --state "$out/state" --out "$data/nano-m3" | tee -a "$out/log"
  tar -C "$data" -cf "$out/nano-m3.tar" nano-m3
  "$python" tools/nano/m3_evaluate.py --state "$out/state" --activation-fp8 ${EVAL_OPTIONS:-} 2>&1 |
    tee -a "$out/log"
fi
