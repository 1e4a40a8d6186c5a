"""The processes of a node of a Ray cluster: shared by runs, called in any order, ended with a
reason."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from study.engines.ray.process_host import ProcessHost
from tests.study.sleeping import SLEEPS
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, TrialConfig
from trainers.workers.messages import BEGAN, DIED, ENDED, REPORT, TRAIN, Message
from trainers.workers.node import versions
from trainers.workers.resources import WorkerResources

CONFIG = TrialConfig(
    data=DataConfig(name="digits", validation_size=300),
    model=ModelConfig(hidden=[16]),
    optimizer=OptimizerConfig(lr=0.01),
    epochs=2,
)
SHAPE = WorkerResources.of(CONFIG)


def training(trial: str, folder: Path, seconds: float = 0.01) -> Message:
    """Return the spec of a sleeping trial for a process."""
    config = CONFIG.to_dict()
    config["optimizer"]["lr"] = seconds
    plan = {
        "config": config, "checkpoints": str(folder / trial), "profile": "", "resume_from": [],
        "checkpoint_every": 9, "waits": False, "executor": SLEEPS, "ray": "",
    }  # fmt: skip
    return Message(TRAIN, trial, plan)


async def whole(host: ProcessHost, run: str) -> list[Message]:
    """Return all messages of a run."""
    said: list[Message] = []
    while not said or said[-1].kind not in (ENDED, DIED):
        said += await host.receive(run)
    await host.close(run)
    return said


async def a_supervisor_waits_until_its_node_is_used(host: ProcessHost, folder: Path) -> None:
    """Messages of a process would be lost while the node is checked."""
    name = asyncio.create_task(host.name())
    await host.check([], [])
    await asyncio.sleep(0.1)
    assert not name.done()
    await host.admit(None)
    assert await name == os.uname().nodename


async def runs_take_turns_but_the_users_code_has_its_own(host: ProcessHost, folder: Path) -> None:
    pids = []
    for number, shape in enumerate([SHAPE, SHAPE, *[SHAPE._replace(own=True)] * 2]):
        run = f"run {number}"
        await host.open(run, "trial", shape, "", [training("trial", folder)])
        said = await whole(host, run)
        assert [message.kind for message in said] == [BEGAN, REPORT, REPORT, ENDED]
        pids.append(said[1].payload["pid"])
    assert pids[0] == pids[1]
    assert len(set(pids)) == 3


async def a_call_before_the_one_that_opens_its_run_waits(host: ProcessHost, folder: Path) -> None:
    """In the order in which Ray may deliver calls to an asynchronous actor."""
    heard = asyncio.create_task(whole(host, "early"))
    sent = asyncio.create_task(host.send("early", training("trial", folder)))
    await asyncio.sleep(0.1)
    assert not heard.done()
    await host.open("early", "trial", SHAPE, "", [])
    await sent
    assert (await heard)[-1].kind == ENDED


async def a_run_that_is_ended_says_why(host: ProcessHost, folder: Path) -> None:
    await host.open("long", "trial", SHAPE, "", [training("trial", folder, 60.0)])
    assert (await host.receive("long"))[0].kind == BEGAN
    await host.end(["long", "unknown"], "it was silent")
    assert await host.receive("long") == [Message(DIED, "trial", "it was silent")]


@pytest.mark.timeout(180)
def test_runs_share_processes_in_turns_in_any_order_of_calls_and_end_with_a_reason(
    tmp_path: Path,
) -> None:
    async def all_of_it() -> None:
        host = ProcessHost([])
        try:
            await a_supervisor_waits_until_its_node_is_used(host, tmp_path)
            await runs_take_turns_but_the_users_code_has_its_own(host, tmp_path)
            await a_call_before_the_one_that_opens_its_run_waits(host, tmp_path)
            await a_run_that_is_ended_says_why(host, tmp_path)
        finally:
            if host._listener is not None:
                host._listener.cancel()
            host._node.close()

    asyncio.run(all_of_it())


def test_nodes_compare_the_code_of_supervisors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers.workers import node

    assert "study/engines/ray" in node.RUN_BY_NODES
    before = versions()["lns-study"]
    monkeypatch.setattr(node, "RUN_BY_NODES", ("lns_ops", "trainers"))
    assert versions()["lns-study"] != before
