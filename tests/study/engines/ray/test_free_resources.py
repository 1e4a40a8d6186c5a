"""Where trials fit on a cluster, given the nodes' resources and those held by trials and others."""

from __future__ import annotations

import pytest

from study.engines.ray.free_resources import Room
from study.engines.ray.hosts import NodeRoom
from trainers.workers.resources import WorkerResources

pytestmark = pytest.mark.unit

NODES = [
    NodeRoom(node="a", host="one", cpus=4.0, gpus=1.0),
    NodeRoom(node="b", host="two", cpus=2.0, gpus=0.0),
]


def shape(workers: int = 1, threads: int = 1, gpus: float | None = None) -> WorkerResources:
    return WorkerResources(workers, threads, "cpu" if gpus is None else "cuda", gpus)


def test_trials_are_taken_until_every_cpu_is_held() -> None:
    room = Room(nodes=NODES)
    taken = [room.take(f"{number}", shape()) for number in range(7)]
    assert taken == [True] * 6 + [False]
    assert room.free == (0.0, 1.0)
    room.release("0")
    assert room.take("again", shape())


def test_the_ranks_of_a_gang_may_be_on_several_nodes_and_one_rank_on_one() -> None:
    room = Room(nodes=NODES)
    assert not room.could_fit(shape(threads=5))
    assert room.could_fit(shape(workers=3, threads=2))
    assert not room.could_fit(shape(workers=2, threads=3))
    assert room.take("gang", shape(workers=6))
    assert {node for node, _, _ in room.held["gang"]} == {"a", "b"}


def test_shares_of_a_gpu_fill_it() -> None:
    room = Room(nodes=NODES)
    assert [room.take(f"{n}", shape(gpus=0.4)) for n in range(3)] == [True, True, False]


def test_what_others_hold_and_wait_for_is_left_free() -> None:
    room = Room(nodes=NODES, others=(3.0, 0.0), kept=(1.0, 0.0))
    assert [room.take(f"{n}", shape()) for n in range(3)] == [True, True, False]
    room.kept = (0.0, 0.0)
    assert room.take("one more", shape())


def test_a_trial_is_held_where_ray_has_put_it() -> None:
    room = Room(nodes=NODES)
    assert room.take("small", shape())
    room.place("small", ["b"])
    assert not room.could_fit(shape(threads=5))
    assert room.take("large", shape(threads=4))
    assert not room.take("two threads", shape(threads=2))
    room.place("unknown", ["b"])
    assert room.held.keys() == {"small", "large"}


@pytest.mark.parametrize("gone", ["a", "b"])
def test_what_is_held_on_a_node_that_is_gone_is_not_missed_elsewhere(gone: str) -> None:
    room = Room(nodes=NODES)
    assert room.take("x", shape())
    room.place("x", [gone])
    room.nodes = [node for node in NODES if node.node != gone]
    assert room.free == room.total


def test_what_others_hold_counts_from_the_first_look_and_is_the_least_of_the_last() -> None:
    """Our own resources are left out; they may appear in one figure before the other."""
    room = Room(nodes=NODES[:1])
    room.note_others({"a": (1.0, 1.0), "elsewhere": (8.0, 0.0)}, (0.0, 0.0))
    assert room.others == (3.0, 0.0)
    room.nodes = NODES
    room.note_others({"a": (0.0, 1.0), "b": (0.0, 0.0)}, (1.0, 0.0))
    assert room.others == (5.0, 0.0)
    for held, ours in ((5.0, 1.0), (6.0, 1.0), (5.0, 2.0)):
        room.note_others({"a": (4.0 - held + 2.0, 0.5), "b": (0.0, 0.0)}, (ours, 0.0))
    assert room.others == (3.0, 0.5)


def test_a_node_of_which_ray_says_nothing_yet_is_free() -> None:
    room = Room(nodes=NODES)
    room.note_others({}, (0.0, 0.0))
    assert room.others == (0.0, 0.0)
