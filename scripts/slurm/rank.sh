#!/usr/bin/env bash
# One rank of a SLURM job: runs a command, with its rank in the environment variables of torchrun. srun starts this for ranks.sh.
#
# The rank's output goes to a file on its node, and from there to srun: a slow network or a full shared disk stops no training.
# This shell outlives the command to tell what became of it, in $STATE, a directory that all nodes share:
#   stopped   a rank was asked to end
#   failed    the rank that ended badly before all others: its exit status, then what a user has to know
set -u
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$RANKS_PER_NODE

shown_lines=20

child=
signalled=0
# SIGTERM comes from SLURM, to all processes of the job (preemption, scancel); SIGUSR1 through srun, from ranks.sh.
# shellcheck disable=SC2317  # called by a trap
ask_to_end() {
    ((!signalled)) || return 0 # a second SIGTERM would end a command that saves its checkpoint
    signalled=1
    : > "$STATE/stopped"
    [[ -z $child ]] || kill -TERM "$child" 2> /dev/null
}
trap ask_to_end TERM USR1

directory=$NODE_LOGS/$JOB_START-$SLURMD_NODENAME
log=$directory/rank_$RANK.log
if ! mkdir -p "$directory" || ! : > "$log"; then
    echo "rank $RANK on node $SLURMD_NODENAME cannot write its log to $log: set NODE_LOGS to a directory on every node" >&2
    exit 1
fi

(
    trap '' USR1 # srun sends it to all processes of a task: the command is to see SIGTERM alone
    exec "$@"
) >> "$log" 2>&1 &
child=$!
((!signalled)) || kill -TERM "$child"
(
    trap '' TERM USR1 # shows the last words, too
    exec tail --lines=+1 --follow --sleep-interval=0.2 --pid="$child" "$log"
) &
shown=$!

while kill -0 "$child" 2> /dev/null; do
    wait "$child" 2> /dev/null # until it ends, or a signal comes; of a killed command this shell would say so
done
wait "$child" 2> /dev/null
status=$?
((status >= 0)) || status=0 # bash loses that of a command that ends just as a signal comes, which has asked it to
trap '' TERM USR1
wait "$shown"

if ((status)); then
    how="exit status $status"
    ((status <= 128)) || how="signal $((status - 128)) ($(kill -l $((status - 128))))"
    ((status != 137)) || how+=", as when a node runs out of memory"
    {
        echo "$status"
        echo "rank $RANK on node $SLURMD_NODENAME ended first: $how. Its log, $LOGS/rank_$RANK.log, ends so:"
        tail --lines=$shown_lines "$log" | sed 's/^/    /'
    } > "$STATE/failed.$RANK"
    ln "$STATE/failed.$RANK" "$STATE/failed" 2> /dev/null # one rank succeeds
    rm "$STATE/failed.$RANK"
fi
exit "$status"
