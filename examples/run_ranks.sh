#!/bin/sh
# Starts a program on N ranks of this machine: examples/run_ranks.sh 4 build/release/bin/example_first_steps
# A minimal `tessera run -n 4 -- PROGRAM`, for builds without the program `tessera`. Fails if any rank fails.
set -u
n=$1
shift
export WORLD_SIZE="$n" MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-$((20000 + $$ % 20000))}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
pids=''
rank=0
while [ "$rank" -lt "$n" ]; do
  RANK=$rank LOCAL_RANK=$rank "$@" &
  pids="$pids $!"
  rank=$((rank + 1))
done
status=0
for pid in $pids; do wait "$pid" || status=$?; done
exit $status
