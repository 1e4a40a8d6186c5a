#!/usr/bin/env bash
# A study on Slurm. `lns-study launch CONFIG --to slurm` submits this file, or your copy of it:
#   sbatch slurm.sh PACKAGE [LAUNCHED]
# Ray starts on every node (`ray symmetric-run`), the study on the first. Two minutes before the
# time is over Slurm sends USR1 to this script: the study is interrupted, and the job is queued
# again, unless the study has come to an end of its own or its user has ended it.
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
package=$1
export PYTHONPATH=$package/site${PYTHONPATH:+:$PYTHONPATH}
# Of the two minutes after the notice trials have so many seconds for the epoch under way and a
# checkpoint.
export LNS_STUDY_GRACE_SECONDS=90
export LNS_STUDY_LAUNCHED=${2:-}
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
run=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
export RAY_AUTH_TOKEN_PATH=$package/token-$run

# Time, in seconds since the start, at which the job is queued again at the latest. A study that has
# not begun has nothing to write; one whose process is gone ends by itself.
latest= folder=
on_notice() {
    [ -z "$latest" ] || return 0
    latest=$SECONDS
    if [ -s "$folder/driver" ]; then
        latest=$((SECONDS + 105))
        kill -USR1 "$(<"$folder/driver")" 2>/dev/null || true
    fi
}
trap on_notice USR1

# A token that this user alone can read; Ray admits nobody without it. Those of the job's earlier
# runs, which were killed, go.
(
    umask 077
    rm -f "$package/token-$SLURM_JOB_ID"-*
    python -P -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH"
)
trap 'rm -f "$RAY_AUTH_TOKEN_PATH" "${ended:-}"' EXIT

# Ray lets everybody write into its folder: one around it, on every node, of a name that nobody
# knows before, keeps others out. Short, as sockets' paths are.
export folder
folder=/tmp/ray-$SLURM_JOB_ID-$(python -P -c 'import secrets; print(secrets.token_hex(4))')
srun mkdir -m 700 "$folder"

# A hundred ports that follow from the job's id, since others' services may have Ray's usual ones.
# Two jobs cannot share a node: `ray symmetric-run` refuses where it sees a Ray, and `ray stop` ends
# every Ray of this user, hence --exclusive.
base=$((20000 + SLURM_JOB_ID % 120 * 100))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-0}
# Without the address `ray symmetric-run` counts the nodes of a Ray that it starts for that, and
# gives up; programs come slowly from a busy file system.
export RAY_ADDRESS=$head:$base RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600

# Runs on every node. Ray gives up on a head that comes slowly, and stays for minutes where the head
# has ended: the other nodes wait for it here, join again if they are lost, and end with it. The
# study's exit code is in a file, as srun would kill the other nodes' processes at any but 0.
export ended=$package/ended-$run
run_ray() {
    local code=0 joined=
    if [ "$SLURM_PROCID" = 0 ]; then
        ray symmetric-run "$@" || code=$?
        touch "$ended"
        echo "$code" >"$folder/code" || return "$code"
        return 0
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
    -- bash -c 'echo $$ >"$folder/driver"; exec bash "$0"' "$package/start.sh" &
step=$!

while kill -0 "$step" 2>/dev/null && [ "$SECONDS" -lt "${latest:-$((SECONDS + 1))}" ]; do
    sleep 1 || true
done
code=137 # as if it were killed, which comes next
if [ -s "$folder/code" ]; then
    code=$(<"$folder/code")
elif ! kill -0 "$step" 2>/dev/null; then
    wait "$step" && code=0 || code=$?
fi

# A study ends with 0 (done, or stopped or cancelled by its user), 1 (trials have failed) or 2
# (refused) even if there was a notice; a job that was cancelled stays so.
again= job=
[ "$code" -eq 0 ] || job=$(scontrol show job "$SLURM_JOB_ID") || true
if [ "$code" -eq 0 ] || [[ $job == *JobState=CANCELLED* ]]; then
    :
elif [ -n "$latest" ]; then
    [ "$code" -le 2 ] || again=yes
# A preemption with a grace time (GraceTime) signals the step alone, which ends then.
elif [[ $job =~ PreemptTime=([0-9T:-]+) ]]; then
    preempted=${BASH_REMATCH[1]}
    [[ ! $job =~ StartTime=([0-9T:-]+) || $preempted < ${BASH_REMATCH[1]} ]] || again=yes
fi
# Ray's logs stay where they may be needed.
case $code in
    0 | 130) timeout 10 srun rm -rf "$folder" || true ;;
esac
if [ -n "$again" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
