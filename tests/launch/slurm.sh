#!/bin/sh
# Runs a command with a Slurm of one node:  slurm.sh COMMAND ARGS...
# Key, sockets, state and logs are in one temporary folder. Exits with the exit code of the command, or with 77 and a
# reason if Slurm cannot run on this machine.
set -u
skip() { echo "cannot run Slurm: $*"; exit 77; }
PATH=$PATH:/usr/sbin:/sbin
for tool in srun sinfo slurmctld slurmd munged; do command -v $tool >/dev/null || skip "$tool is not installed (slurm-wlm)"; done
[ "$(id -u)" = 0 ] || skip "only root can start slurmd"

# The daemons run in their own process namespace, so all their processes end with it.
if [ -z "${TESSERA_SLURM_AT:-}" ]; then
  unshare --pid --fork --mount-proc true 2>/dev/null || skip "unshare --pid is not allowed here"
  at=$(mktemp -d /tmp/tessera-slurm-XXXXXX)
  trap 'rm -rf "$at"' EXIT
  trap 'exit 143' INT TERM
  TESSERA_SLURM_AT=$at unshare --pid --fork --kill-child --mount-proc "$0" "$@"
  exit
fi
at=$TESSERA_SLURM_AT
unset TESSERA_SLURM_AT
host=$(hostname -s)

# Two free ports, searched upwards from a start that depends on our pid.
port=$((20000 + $$ % 10000))
taken() { grep -q -i ":$(printf %04X "$1") 0*:0000 0A" /proc/net/tcp /proc/net/tcp6 2>/dev/null; }
free_port() { while taken $port; do port=$((port + 1)); done; echo $port; port=$((port + 1)); }
ctld_port=$(free_port); port=$((ctld_port + 1)); slurmd_port=$(free_port)

mkdir "$at/state" "$at/spool"
dd if=/dev/urandom of="$at/key" bs=1024 count=1 2>/dev/null && chmod 400 "$at/key"
cat >"$at/slurm.conf" <<EOF
ClusterName=tessera
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
AuthType=auth/munge
AuthInfo=socket=$at/munge.socket
StateSaveLocation=$at/state
SlurmdSpoolDir=$at/spool
SlurmctldPidFile=$at/slurmctld.pid
SlurmdPidFile=$at/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES State=UP OverSubscribe=FORCE
EOF
export SLURM_CONF="$at/slurm.conf"

munged --foreground --force --key-file="$at/key" --socket="$at/munge.socket" --pid-file="$at/munge.pid" \
  --log-file="$at/munge.log" --seed-file="$at/munge.seed" >"$at/munged.out" 2>&1 &
until [ -S "$at/munge.socket" ]; do
  kill -0 $! 2>/dev/null || skip "munged failed: $(tail -n 1 "$at/munged.out")"
  sleep 0.05
done
slurmctld -D -f "$SLURM_CONF" >"$at/slurmctld.out" 2>&1 &
ctld=$!
slurmd -D -f "$SLURM_CONF" -N "$host" >"$at/slurmd.out" 2>&1 &
slurmd=$!
tries=0
until sinfo -h -o %T 2>/dev/null | grep -q -E '^(idle|mixed)$'; do
  kill -0 $ctld 2>/dev/null || skip "slurmctld failed: $(tail -n 1 "$at/slurmctld.out")"
  kill -0 $slurmd 2>/dev/null || skip "slurmd failed: $(tail -n 1 "$at/slurmd.out")"
  tries=$((tries + 1))
  [ $tries -lt 200 ] || skip "the node is not ready after 20 s: $(sinfo -h -o '%T %E' 2>&1 | head -n 1)"
  sleep 0.1
done
"$@"
