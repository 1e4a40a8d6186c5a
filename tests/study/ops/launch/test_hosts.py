"""A study on a Ray cluster of three separate hosts: one has a slow link, another is disconnected
for a shorter or longer time than Ray waits for a node."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from study.ledger.log import read_ledger
from study.ledger.state import FINISHED, fold
from tests.study.conftest import TINY, raw_lines
from tests.study.ops.launch.machines.hosts import (
    ROOT,
    TWO_NODES,
    assert_same_results,
    hosts,
    run_on_hosts,
    undisturbed,
    weights,
)

__all__ = ["hosts"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EPOCHS = "trial.epochs=200"
"""Long enough that a trial still runs at the disconnection, which follows its first report."""
STEPS = f"""\
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token RAY_USAGE_STATS_ENABLED=0
(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' >$RAY_AUTH_TOKEN_PATH)
trap 'cat output >&2' ERR
head=192.0.2.1:6379
ray start --head --port=6379 --num-cpus=0 --node-ip-address=192.0.2.1 --include-dashboard=false
keep() {{ while sleep 1; do ray start --block --num-cpus=1 "$@"; done; }}
export -f keep
for n in 2 3; do on $n bash -c "keep --address=$head --node-ip-address=192.0.2.$n" & done >rays 2>&1
tc qdisc add dev link-2 root tbf rate 20mbit burst 32kbit latency 400ms
python -m study run study.yaml --plain {EPOCHS} tracking_uri=none address=$head \\
    storage=$PWD/studies >output 2>&1 & study=$!
has() {{ grep -qs "$1" studies/tiny/ledger.jsonl; }}
until has '"report".*"host": *"host-3"'; do sleep 0.1; kill -0 $study; done
date +%s.%N >cut
ip link set link-3 down
sleep $CUT_SECONDS
ip link set link-3 up
date +%s.%N >>cut
wait $study
"""


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "work", TWO_NODES, EPOCHS)


@pytest.mark.parametrize("seconds", [8, 75])
def test_a_host_that_is_cut_off_for_a_while_changes_nothing(
    hosts: Path, wanted: Path, seconds: int
) -> None:
    work = hosts / "work"
    (work / "study.yaml").write_text(TWO_NODES)
    run_on_hosts(
        hosts, "bash", "-eEc", STEPS, count=3, timeout=900, CUT_SECONDS=str(seconds)
    )  # fmt: skip
    events = read_ledger(work / "studies" / "tiny")
    assert_same_results(raw_lines(work / "studies" / "tiny"), wanted)
    assert weights(work / "studies" / "tiny") == weights(wanted)
    assert [event["outcome"] for event in events if event["event"] == "ended"] == ["finished"]
    used = {host for event in events if event["event"] == "started" for host in event["hosts"]}
    assert used == {"host-2", "host-3"}
    begun, over = map(float, (work / "cut").read_text().split())
    there = {
        event["trial"]
        for event in events
        if event["event"] == "started" and event["time"] < begun and "host-3" in event["hosts"]
    }
    last = {event["trial"]: event["time"] for event in events if event["event"] == "report"}
    assert any(last[trial] > begun for trial in there)  # during the disconnection
    if seconds > 60:  # Ray had given the host up, and it came back
        assert any(begun < event["time"] for event in events if event["event"] == "restarted")
        assert events[-1]["time"] > over


POD_ENDS = """\
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token RAY_USAGE_STATS_ENABLED=0
(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' >$RAY_AUTH_TOKEN_PATH)
trap 'cat output >&2' ERR
export RAY_ADDRESS=192.0.2.1:6379
start() {
    on $1 ray start --block --num-cpus=1 --address=$RAY_ADDRESS --node-ip-address=192.0.2.$1
}
ray start --head --port=6379 --num-cpus=0 --node-ip-address=192.0.2.1 --include-dashboard=false
start 2 >rays 2>&1 &
start 3 >>rays 2>&1 &
python -m study run study.yaml --plain trial.epochs=200 checkpoint_every=200 \\
    seeds=[0,1] tracking_uri=none address=$RAY_ADDRESS storage=$PWD/studies >output 2>&1 & study=$!
has() { grep -qs "$1" studies/tiny/ledger.jsonl; }
until has '"report".*"host": *"host-3"'; do sleep 0.1; kill -0 $study; done
SECONDS=0
on 3 pkill --full 'ray start --block'
while on 3 pgrep --full 'ray start --block'; do sleep 0.2; done
echo $SECONDS >seconds
start 3 >>rays 2>&1 &
wait $study
"""


def test_a_pod_that_ends_lets_its_trials_leave_first(hosts: Path) -> None:
    """A host whose ``ray start`` is terminated, with the variables of the template."""
    template = yaml.safe_load((ROOT / "conf" / "cluster" / "rayjob.yaml").read_text())
    (group,) = template["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    drain = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    (seconds,) = (each["value"] for each in container["env"] if each["name"] == drain)
    work = hosts / "work"
    (work / "study.yaml").write_text(TINY)
    run_on_hosts(hosts, "bash", "-eEc", POD_ENDS, count=3, timeout=900, **{drain: seconds})
    events = read_ledger(work / "studies" / "tiny")
    errors = {event["error"] for event in events if event["event"] == "restarted"}
    assert errors == {"its node is drained"}
    assert not any("repeated" in event for event in events)  # no epoch was repeated
    assert {trial.status for trial in fold(events).trials} == {FINISHED}
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert int((work / "seconds").read_text()) < int(seconds) < grace


OTHER_DATA = """\
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token RAY_USAGE_STATS_ENABLED=0
(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' >$RAY_AUTH_TOKEN_PATH)
trap 'cat output >&2' ERR
python images.py 1
on 2 python images.py 2
ray start --head --port=6379 --num-cpus=0 --node-ip-address=192.0.2.1 --include-dashboard=false
on 2 ray start --num-cpus=1 --address=192.0.2.1:6379 --node-ip-address=192.0.2.2
python -m study run study.yaml --plain tracking_uri=none address=192.0.2.1:6379 \\
    storage=$PWD/studies >output 2>&1 & study=$!
until grep -q "Not used: on the node host-2 the data are not this study's" output; do
    sleep 0.2; kill -0 $study
done
! grep -q '"started"' studies/clothes/ledger.jsonl
on 2 python images.py 1
wait $study
"""
IMAGES = """
import random, struct, sys
from pathlib import Path

folder, draw = Path("/tmp/clothes"), random.Random(int(sys.argv[1]))
folder.mkdir(exist_ok=True)
for name, n in (("train", 60000), ("t10k", 10000)):
    images = struct.pack(">IIII", 2051, n, 28, 28) + draw.randbytes(n * 784)
    (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
    labels = struct.pack(">II", 2049, n) + bytes(i % 10 for i in range(n))
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
"""
CLOTHES = """
name: clothes
trial:
  data: {name: fashion_mnist, root: /tmp/clothes, train_size: 1000}
  model: {hidden: [8]}
  epochs: 1
rows: [{label: a}]
baseline: null
seeds: [0]
"""


def test_a_host_with_other_data_trains_once_it_has_those_of_the_study(hosts: Path) -> None:
    (hosts / "work" / "study.yaml").write_text(CLOTHES)
    (hosts / "work" / "images.py").write_text(IMAGES)
    run_on_hosts(hosts, "bash", "-eEc", OTHER_DATA, count=2, timeout=600)
    state = fold(read_ledger(hosts / "work" / "studies" / "clothes"))
    assert [trial.status for trial in state.trials] == [FINISHED]
    assert "and it is tried again" in (hosts / "work" / "output").read_text()
