#!/usr/bin/env bash
# Train one of the built-in models on one GPU and write its checkpoint to OUT/MODEL:
#
#   nano/run.sh nano OUT [SECONDS]
#   nano/run.sh nano-m3 OUT [SECONDS [TOTAL_SECONDS]]
#   nano/run.sh nano-draft OUT [SECONDS]
#   nano/run.sh nano-m3-draft OUT [SECONDS]
#   nano/run.sh nano-m3-vision OUT [SECONDS]     trains the vision tower of the shipped nano-m3
#
# SECONDS is wall-clock time, including compilation. A run of nano or nano-m3 continues from
# OUT/state; for nano-m3, TOTAL_SECONDS is the length of the schedule over all runs. OUT/log holds
# the output. WORKERS processes make fresh data from SEED while the GPU trains. TRAIN_OPTIONS goes
# to the training script, for example "--max-steps 20 --log-every 1" for a trial of two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 out=$2 workers=${WORKERS:-$(($(nproc) - 2))} python=${PYTHON:-python3}
seed=${SEED:-$(date +%s)}
case $model in
nano) maker=nano.data default=1830 ;;
nano-m3) maker=nano.m3_data default=926 ;;
nano-draft) maker=nano.data default=470 ;;
nano-m3-draft) maker=nano.m3_data default=290 ;;
nano-m3-vision) maker=nano.m3_vision_data default=500 ;;
*)
  echo "unknown model $model; allowed: nano, nano-m3, nano-draft, nano-m3-draft, nano-m3-vision" >&2
  exit 2
  ;;
esac
seconds=${3:-$default} total=${4:-${3:-$default}}
mkdir -p "$out"
data=$(mktemp -d)
export PYTHONPATH=. PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
exec > >(tee -a "$out/log") 2>&1
echo "training $model for $seconds s, data of seed $seed"

set -m # The workers get their own process groups.
if [ "$model" = nano-m3-vision ]; then
  # The trainer's loader needs a core, too.
  nice -n 15 "$python" -m "$maker" --out "$data" --workers "$workers" --seed "$seed" &
else
  "$python" -m "$maker" --out "$data" --workers "$workers" --shard-tokens 400000 --seed "$seed" &
fi
makers="-$!"
trap 'kill -- "$makers" 2>/dev/null; rm -rf "$data"' EXIT

case $model in
nano)
  # shellcheck disable=SC2086
  "$python" -m nano.train --data "$data" --state "$out/state" --activation-fp8 \
    --seconds "$seconds" ${TRAIN_OPTIONS:-}
  mkdir -p "$out/nano" && cp negamax/assets/nano/*.json* negamax/assets/nano/*.jinja "$out/nano"
  "$python" -m nano.export --state "$out/state" --out "$out/nano"
  ;;
nano-m3)
  # shellcheck disable=SC2086
  "$python" -m nano.m3_train --data "$data" --state "$out/state" --activation-fp8 \
    --seconds "$seconds" --total-seconds "$total" ${TRAIN_OPTIONS:-}
  sleep 1 # tee needs time to write the log.
  if grep -q "100.0% of the schedule" "$out/log"; then
    "$python" -m nano.m3_export --state "$out/state" --out "$out/nano-m3"
  fi
  ;;
nano-m3-vision)
  # shellcheck disable=SC2086
  "$python" -m nano.m3_vision_train --data "$data" --out "$out/nano-m3" --activation-fp8 \
    --seconds "$seconds" ${TRAIN_OPTIONS:-}
  ;;
*-draft)
  # shellcheck disable=SC2086
  "$python" -m nano.draft_train --target "${model%-draft}" --data "$data" --out "$out/$model" \
    --seconds "$seconds" ${TRAIN_OPTIONS:-}
  ;;
esac
