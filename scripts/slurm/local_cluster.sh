#!/usr/bin/env bash
# A real SLURM of two emulated nodes, d1 and d2, on this machine, for as long as a command runs; it leaves nothing behind.
#
#   scripts/slurm/local_cluster.sh            run the checks of the batch scripts (check_cluster.py)
#   scripts/slurm/local_cluster.sh COMMAND    run a command, such as bash, to try sbatch, squeue, scontrol ...
#
# munge, the controller and both node daemons have a directory and ports of their own, so that another SLURM on this machine is not
# disturbed. All of them run as root, because a node daemon starts jobs as their owners.
set -euo pipefail
[[ ${1:-} != --help ]] || exec sed -n '2,/^[^#]/s/^# \?//p' "$0"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
python=${PYTHON:-$root/.venv/bin/python}
packages=(munge slurmctld slurmd slurm-client)
seconds_to_start=30

fail() {
    echo "local_cluster.sh: $1" >&2
    exit 1
}

install_slurm() {
    local missing=()
    for command in munged slurmctld slurmd sbatch; do
        command -v "$command" > /dev/null || missing+=("$command")
    done
    ((${#missing[@]})) || return 0
    command -v apt-get > /dev/null || fail "${missing[*]} not found: install SLURM and munge (Debian: ${packages[*]})"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}"
}

# Free now; nothing else is expected to take them in the next second.
free_ports() {
    "$python" - "$1" << 'END'
import socket, sys
probes = [socket.socket() for _ in range(int(sys.argv[1]))]
for probe in probes:
    probe.bind(("", 0))
print(*(probe.getsockname()[1] for probe in probes))
END
}

# Without systemd, cgroups and accounting. Credentials live for as long as a requeued job waits (cred_expire): 2 minutes unless set.
write_configuration() {
    local controller=$1 first=$2 second=$3
    cat > "$SLURM_CONF" << END
ClusterName=emulated
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$controller
FirstJobId=$controller
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$place/munge/socket,cred_expire=5
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/%n
SlurmctldPidFile=$place/slurmctld.pid
SlurmdPidFile=$place/%n.pid
SlurmctldLogFile=$place/slurmctld.log
SlurmdLogFile=$place/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=10
NodeName=d1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$first CPUs=2
NodeName=d2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$second CPUs=2
PartitionName=all Nodes=d1,d2 Default=YES MaxTime=60 State=UP
END
}

start() {
    mkdir "$place/munge" "$place/state" "$place/d1" "$place/d2"
    head -c 1024 /dev/urandom > "$place/munge/key"
    chown -R munge "$place/munge"
    chmod 0711 "$place" "$place/munge"
    chmod 0400 "$place/munge/key"
    # In the foreground: these are this shell's own processes, to be ended by their numbers.
    setpriv --reuid munge --regid munge --clear-groups munged --foreground --socket "$place/munge/socket" \
        --key-file "$place/munge/key" --pid-file "$place/munge/pid" --seed-file "$place/munge/seed" --log-file "$place/munge/log" \
        > "$place/munged.out" 2>&1 &
    daemons+=($!)
    # shellcheck disable=SC2046  # three numbers
    write_configuration $(free_ports 3)
    wait_until "munged" test -S "$place/munge/socket"
    slurmctld -D > "$place/slurmctld.out" 2>&1 &
    daemons+=($!)
    for node in d1 d2; do
        slurmd -D -N "$node" > "$place/$node.out" 2>&1 &
        daemons+=($!)
    done
    wait_until "the two nodes" both_idle
}

both_idle() {
    [[ $(sinfo --noheader --Node --states idle --format %N 2> /dev/null) == $'d1\nd2' ]]
}

wait_until() {
    local what=$1
    for ((tries = 0; tries < 10 * seconds_to_start; tries++)); do
        "${@:2}" && return
        sleep 0.1
    done
    tail -n 20 "$place"/*.out "$place"/*.log >&2 || true
    fail "$what did not come up within $seconds_to_start s"
}

# Jobs first: a node daemon that ends leaves theirs alone.
stop() {
    local status=$?
    trap - EXIT
    if ((${#daemons[@]} > 1)); then
        scancel --user "$(id -un)" 2> /dev/null || true
        for ((tries = 0; tries < 200; tries++)); do
            [[ -n $(squeue --noheader 2> /dev/null) ]] || break
            sleep 0.1
        done
    fi
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do
        kill "${daemons[i]}" 2> /dev/null || true
        wait "${daemons[i]}" 2> /dev/null || true
    done
    rm -rf "$place"
    exit "$status"
}

[[ $(id -u) == 0 ]] || fail "needs root, to install (${packages[*]}) and to run SLURM's node daemons; try it in a container"
[[ -x $python ]] || fail "there is no $python: run make setup, or set PYTHON"
install_slurm
place=$(mktemp -d)
export SLURM_CONF=$place/slurm.conf
daemons=()
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start
if (($#)); then
    "$@"
else
    "$python" "$here/check_cluster.py"
fi
