#!/usr/bin/env bash
# A Slurm on the hosts of hosts.sh, whose controller is on the first: slurm.sh COMMAND...
# The command runs once all nodes are idle. Jobs of the partition `urgent` preempt the others, which
# have GRACE seconds to end and are queued again.
set -euo pipefail
mkdir -p "$folder/state" "$folder/munge"
chmod 755 "$folder/munge"
(umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
cat >"$folder/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=host-1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
JobRequeue=1
KillWait=30
ReturnToService=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=host-[1-$HOSTS] CPUs=${NODE_CPUS:-2} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=${GRACE:-0}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
CONF
export SLURM_CONF=$folder/slurm.conf
slurmctld
slurmd
for n in $(seq 2 "$HOSTS"); do on "$n" slurmd; done
for _ in $(seq 100); do
    if [ "$(sinfo --noheader --Node --partition=all --states=idle | wc -l)" = "$HOSTS" ]; then
        "$@"
        exit
    fi
    sleep 0.2
done
cat "$folder"/slurm*.log >&2
exit 1
