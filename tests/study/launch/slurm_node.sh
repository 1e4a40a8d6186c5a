#!/usr/bin/env bash
# A Slurm of one node in namespaces of its own, so that `ray stop` and every signal stay in them:
#   [NODE_CPUS=2] unshare --pid --mount --net --uts --fork --kill-child --mount-proc slurm_node.sh FOLDER COMMAND...
# The command runs once the node is idle; everything ends with it.
set -euo pipefail
folder=$1; shift
ip link set lo up
# slurmctld finds no address family on a host with loopback alone
ip link add node type veth peer name other
ip addr add 192.0.2.1/24 dev node
ip link set node up
ip link set other up
hostname lns-node
printf '127.0.0.1 localhost\n192.0.2.1 lns-node\n' >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray  # `ray stop` clears what it finds there
mkdir -p "$folder/state" "$folder/spool" "$folder/munge"
chmod 755 "$folder/munge"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=lns-node
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
JobRequeue=1
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=lns-node CPUs=${NODE_CPUS:-2} State=UNKNOWN
PartitionName=all Nodes=lns-node Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
slurmctld
slurmd
for _ in $(seq 100); do
    if sinfo --noheader --format=%t 2>/dev/null | grep -q idle; then
        cd "$folder/work"
        "$@"
        exit
    fi
    sleep 0.2
done
cat "$folder/slurmctld.log" "$folder/slurmd.log" >&2
exit 1
