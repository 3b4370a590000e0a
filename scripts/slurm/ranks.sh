#!/usr/bin/env bash
# Runs a command on every GPU of a SLURM job: ranks.sh COMMAND ARGUMENT ... , from the job's batch script.
#
# The command finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun. SIGUSR1 and
# SIGTERM ask all ranks to end, by SIGTERM. Exit status: 0 when all ranks have ended well, 75 when they ended because they were
# asked to (also by SLURM itself), else that of the rank that failed first; a message then names it and its node.
#
#   LOGS             directory that all nodes share: the logs of all ranks, when they have ended
#   GPUS_PER_NODE    ranks on each node; SLURM's --gpus-per-node unless given
#   RANKS_PER_NODE   the same, for nodes without GPUs
#   MASTER_PORT      on the first node; from the job's number unless given
#   NODE_LOGS        directory on every node for the logs while ranks run; /tmp unless given
#   SRUN_FLAGS       more flags of srun, separated by spaces, such as --container-image=...
set -euo pipefail

srun=
asked=
# srun drops a signal that comes before its ranks have begun: it is sent until srun ends. rank.sh acts on the first one.
ask_to_end() {
    asked=1
    [[ -n $srun ]] || return 0
    (while kill -USR1 "$srun" 2> /dev/null; do sleep 1; done) &
}
trap ask_to_end USR1 TERM

try_again=75 # EX_TEMPFAIL of sysexits.h
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

fail() {
    echo "ranks.sh: $1" >&2
    exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "runs within a job: start it from a script that is given to sbatch"
(($#)) || fail "expects the command that each rank is to run"
[[ -n ${LOGS:-} ]] || fail "expects LOGS, a directory that all nodes share"

ranks=${RANKS_PER_NODE:-${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "how many ranks on each node? SLURM has given this job no GPUs, and RANKS_PER_NODE is \
'${RANKS_PER_NODE:-}': submit with sbatch --gpus-per-node N, set GPUS_PER_NODE where SLURM does not count GPUs, or \
RANKS_PER_NODE for ranks on CPUs"

mkdir -p "$LOGS"
LOGS=$(cd "$LOGS" && pwd)
STATE=$LOGS
rm -f "$STATE/failed" "$STATE/stopped"
JOB_START=mpipe-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
NODE_LOGS=${NODE_LOGS:-/tmp}
RANKS_PER_NODE=$ranks
export STATE LOGS NODE_LOGS JOB_START RANKS_PER_NODE

# A job's batch script runs on its first node, which has rank 0. Ports: two jobs on a node have different numbers, and below 32768
# the system gives none to connections that leave the node.
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)}
export MASTER_PORT=${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as torchrun: the ranks of a node share its cores
export PYTHONUNBUFFERED=1                    # nothing that was printed is lost when a rank is killed
export PYTHONFAULTHANDLER=1                  # a crash in native code tells where in Python it was
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}        # NCCL's own words when it fails; silent otherwise

echo "$ranks rank(s) on each of $SLURM_JOB_NUM_NODES node(s), $SLURM_JOB_NODELIST; rendezvous at $MASTER_ADDR:$MASTER_PORT; \
logs: $NODE_LOGS/$JOB_START-NODE/rank_RANK.log on each NODE, in $LOGS when the ranks have ended"
if ((${SLURM_CPUS_ON_NODE:-ranks} < ranks)); then
    echo "WARNING: $ranks ranks share $SLURM_CPUS_ON_NODE CPU(s) of a node: ask for more with sbatch --exclusive or --cpus-per-task"
fi

read -ra more <<< "${SRUN_FLAGS:-}"
all_nodes=(--nodes="$SLURM_JOB_NUM_NODES" --overcommit --export=ALL "${more[@]}")

# The ranks of a node are consecutive. Each may use all CPUs of the job: readers of data and NCCL's threads need some, and
# pretrain_gpt.py itself binds ranks to the CPUs of their GPU where that matters. All GPUs of a node are visible to all its ranks, as
# NCCL wants it; LOCAL_RANK says which one is a rank's own.
[[ -z $asked ]] || exit $try_again
srun "${all_nodes[@]}" --ntasks-per-node="$ranks" --ntasks=$((ranks * SLURM_JOB_NUM_NODES)) --distribution=block \
    --cpu-bind=none --kill-on-bad-exit=1 bash "$here/rank.sh" "$@" &
srun=$!
[[ -z $asked ]] || ask_to_end # the signal came before there was an srun
set +e
while kill -0 "$srun" 2> /dev/null; do
    wait "$srun"
done
wait "$srun"
status=$?

# shellcheck disable=SC2016  # to be expanded on the nodes
timeout 60 srun "${all_nodes[@]}" --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" \
    bash -c 'from=$NODE_LOGS/$JOB_START-$SLURMD_NODENAME; cp "$from"/rank_*.log "$LOGS" && rm -r "$from"' ||
    echo "the logs could not be fetched from all nodes: those missing in $LOGS lie in $NODE_LOGS/$JOB_START-NODE of their NODE" >&2

ls "$STATE" > /dev/null # a network file system may believe for a while that what it was asked for before is still missing
if [[ -e $STATE/failed ]]; then
    { read -r status && message=$(cat); } < "$STATE/failed"
    # A rank that SIGTERM ended at once, as at its start, has nothing to save.
    if [[ ! -e $STATE/stopped ]] || ((status != 128 + 15)); then
        echo "$message" >&2
        exit "$status"
    fi
elif [[ -n $asked ]] && ((status == 128 + 10)); then
    exit $try_again # the signal came before srun or a rank's shell could hear it, and SIGUSR1 has ended them
elif ((status)) && [[ ! -e $STATE/stopped ]]; then
    echo "srun ended with status $status and no rank could tell why: a node may be lost. The nodes now:" >&2
    sinfo --Node --nodes="$SLURM_JOB_NODELIST" --format="%N %T %E" >&2
    exit "$status"
fi
[[ ! -e $STATE/stopped ]] || exit $try_again
