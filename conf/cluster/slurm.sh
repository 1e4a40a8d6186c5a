#!/usr/bin/env bash
# A study on Slurm. `lns-study launch CONFIG --to slurm` submits this file, or your copy of it:
#   sbatch slurm.sh PACKAGE NAME STORAGE [LAUNCHED]
# Ray starts on every node (`ray symmetric-run`), the study on the first. Two minutes before the
# time is over Slurm sends USR1 to this script: the study ends in order, and the job is queued
# again.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
package=$1 name=$2 storage=$3
export PYTHONPATH=$package/site${PYTHONPATH:+:$PYTHONPATH}
# Of the two minutes after the notice trials have so many seconds for the epoch under way and a
# checkpoint.
export LNS_STUDY_GRACE_SECONDS=90
export LNS_STUDY_LAUNCHED=${4:-}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=$package/token-$SLURM_JOB_ID

# A token that this user alone can read; Ray admits nobody without it.
(
    umask 077
    python -P -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH"
)
trap 'rm -f "$RAY_AUTH_TOKEN_PATH" "${ended:-}"' EXIT

# Ray lets everybody write into its folder: one around it, on every node, of a name that nobody
# knows before, keeps others out. Short, as sockets' paths are.
folder=/tmp/ray-$SLURM_JOB_ID-$(python -P -c 'import secrets; print(secrets.token_hex(4))')
srun mkdir -m 700 "$folder"

# A hundred ports of this job's own: several jobs may share a node.
base=$((20000 + SLURM_JOB_ID % 120 * 100))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-0}
# Without the address `ray symmetric-run` counts the nodes of a Ray that it starts for that, and
# gives up; programs come slowly from a busy file system.
export RAY_ADDRESS=$head:$base RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600

# Runs on every node. Ray gives up on a head that comes slowly, and stays for minutes where the head
# has ended: the other nodes wait for it here, join again if they are lost, and end with it.
export ended=$package/ended-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
run_ray() {
    local code=0 joined=
    if [ "$SLURM_PROCID" = 0 ]; then
        ray symmetric-run "$@" || code=$?
        touch "$ended"
        return "$code"
    fi
    until [ -e "$ended" ]; do
        if ! kill -0 $joined && (: >"/dev/tcp/${RAY_ADDRESS/://}"); then
            setsid ray symmetric-run "$@" 2>&3 &
            joined=$!
        fi
        sleep 1
    done 3>&2 2>/dev/null
    ray stop --force >/dev/null 2>&1
    kill -KILL -- "-$joined" 2>/dev/null
    return 0
}
export -f run_ray

again=
on_notice() {
    again=yes
    python -P -m study cancel "$name" --storage "$storage" || true
}
trap on_notice USR1

# The Ray of a job that ended the hard way may have outlived it.
srun ray stop --force >/dev/null 2>&1 || true
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c 'run_ray "$@"' run_ray --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="$gpus" \
    --temp-dir="$folder/r" --disable-usage-stats \
    --node-manager-port=$((base + 1)) --object-manager-port=$((base + 2)) \
    --dashboard-host=127.0.0.1 --dashboard-port=$((base + 3)) \
    --dashboard-agent-listen-port=$((base + 4)) --dashboard-agent-grpc-port=$((base + 5)) \
    --runtime-env-agent-port=$((base + 6)) --metrics-export-port=$((base + 7)) \
    --ray-client-server-port=$((base + 8)) \
    --min-worker-port=$((base + 10)) --max-worker-port=$((base + 99)) \
    -- bash "$package/start.sh" &
step=$!

# A signal ends `wait`, not the step.
code=0
while wait "$step" && code=0 || code=$?; kill -0 "$step" 2>/dev/null; do :; done
# A preemption with a grace time (GraceTime) signals the step alone, which ends then.
if [ "$code" -ne 0 ] && [ -z "$again" ]; then
    job=$(scontrol show job "$SLURM_JOB_ID") || job=
    if [[ $job =~ PreemptTime=([0-9T:-]+) ]]; then
        preempted=${BASH_REMATCH[1]}
        [[ ! $job =~ StartTime=([0-9T:-]+) || $preempted < ${BASH_REMATCH[1]} ]] || again=yes
    fi
fi
if [ -n "$again" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
# Ray's logs stay where they may be needed.
[ "$code" -ne 0 ] || srun rm -rf "$folder"
exit "$code"
