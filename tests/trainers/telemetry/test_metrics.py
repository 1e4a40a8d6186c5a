"""Telemetry: the time of a step by part, counted work, missing metrics; measuring changes no
bit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lns_ops import cuda
from lns_ops.tensor import storage_of
from tests.trainers.processes import spawned
from trainers.config import DataConfig, ModelConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.sync import SyncConfig
from trainers.telemetry.energy import mac_picojoules
from trainers.telemetry.metrics import NAMES, PREFIX, Telemetry, repeatable
from trainers.telemetry.nvml import GPM, EnergyMeter, GPUCounters
from trainers.telemetry.roofline import kernel_ceiling
from trainers.telemetry.spans import Spans
from trainers.training.trainer import Training

KAHAN = PrecisionConfig(format="lns12", kahan_sum=True)
BASE = TrialConfig(
    data=DataConfig(name="digits", train_size=640),
    model=ModelConfig(hidden=[16]),
    epochs=2,
    batch_size=64,
)
PARTS = ("step_seconds", "compute_seconds", "communication_seconds", "idle_seconds")
ON_GPUS = ("joules", *GPM)
needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)


def told(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name.removeprefix(PREFIX): value
        for name, value in metrics.items()
        if name.startswith(PREFIX)
    }


@pytest.mark.parametrize(
    "precision", [PrecisionConfig(), KAHAN, PrecisionConfig(format="lns12", scope="matmul")]
)
def test_an_epoch_tells_what_it_cost_and_learns_the_same(precision: PrecisionConfig) -> None:
    silent, telling = (
        Training(replace(BASE, precision=precision)),
        Training(replace(BASE, precision=precision, telemetry=True)),
    )
    for _ in range(2):
        metrics = telling.train_epoch()
        assert repeatable(metrics) == repeatable(silent.train_epoch())
        found = told(metrics)
        assert set(found) == set(NAMES) - set(ON_GPUS)
        assert found["compute_seconds"] == found["step_seconds"] > 0
        assert found["communication_seconds"] == found["idle_seconds"] == 0
        # Only forward and the weight's gradient of both layers, and the input's gradient of the
        # second.
        assert found["macs_per_step"] == 64 * (2 * 64 * 16 + 3 * 16 * 10)
        assert 0 < found["ceiling_fraction"] < 10
        assert 2**20 < found["peak_memory_bytes"] < 2**36
    for a, b in zip(silent.model.parameters(), telling.model.parameters(), strict=True):
        assert torch.equal(storage_of(a), storage_of(b))


@pytest.mark.parametrize("model", ["lstm", "gpt"])
def test_products_that_nobody_counts_are_absent_and_not_zero(model: str) -> None:
    """Torch's fused LSTM and its attention on a CPU are float32; in LNS they are products."""
    config = replace(
        BASE,
        data=DataConfig(name="copy", args={"length": 3, "examples": 100, "test": 20}),
        model=ModelConfig(name=model, args={"width": 16}),
        epochs=1,
        batch_size=20,
        telemetry=True,
    )
    counts = {"macs_per_step", "ceiling_fraction", "modelled_joules"}
    assert not counts & told(Training(config).train_epoch()).keys()
    lns = replace(config, precision=PrecisionConfig(format="lns16"))
    assert counts <= told(Training(lns).train_epoch()).keys()


@pytest.mark.parametrize(
    ("step", "counted"),
    [
        (lambda: torch.nn.Bilinear(3, 4, 5)(torch.ones(2, 3), torch.ones(2, 4)), False),
        (lambda: torch.ones(3, 4) @ torch.ones(4), False),
        (lambda: torch.cdist(torch.ones(3, 4), torch.ones(3, 4)), False),
        (lambda: torch.nn.LSTMCell(3, 4)(torch.ones(2, 3)), True),
    ],
)
def test_steps_with_other_products_are_left_out_whole(
    step: Callable[[], Any], counted: bool
) -> None:
    telemetry = Telemetry(Spans(), torch.device("cpu"), 1, lambda: 1e9, aligned=True)
    telemetry.begin()
    with telemetry.counting():
        step()
    telemetry._spans.step()
    assert ("macs_per_step" in told(telemetry.metrics(1.0))) is counted


def test_a_trial_without_telemetry_says_nothing_of_it() -> None:
    assert told(Training(BASE).train_epoch()) == {}


def scripted(times: list[float]) -> Callable[[], float]:
    """A clock that shows these times one after the other."""
    remaining = iter(times)
    return lambda: next(remaining)


def test_spans_of_a_step_are_added_up_and_a_rest_belongs_to_the_last() -> None:
    spans = Spans(
        clock=scripted([0.0, 1.0, 3.0, 10.0, 11.0, 12.0, 13.0, 14.5, 20.0, 21.0, 22.0, 23.0])
    )
    spans.timing = True
    spans.begin()
    with spans("communication"):
        pass
    spans.step()
    with spans("communication"), spans("forward"):
        pass
    with spans("schedule"):
        pass
    spans.step()
    with spans("communication"):  # after the epoch's last step
        pass
    spans.end()
    assert spans.steps == 2
    assert spans.seconds().tolist() == [[10.0, 2.0, 0.0, 0.0], [13.0, 2.0, 1.5, 0.0]]


COLLECTIVES = [[3.0, 1.0], [1.0, 2.0]]
"""The seconds of two steps of two workers: in the first step the first worker waits two seconds, in
the second step the second worker waits one."""


def waits(rank: int) -> dict[str, float]:
    first, second = COLLECTIVES[rank]
    spans = Spans(clock=scripted([0.0, 5.0, 5.0 + first, 10.0, 12.0, 12.0 + second, 20.0, 20.0]))
    telemetry = Telemetry(spans, torch.device("cpu"), 2, lambda: 1.0, aligned=True)
    telemetry.begin()
    for _ in range(2):
        with spans("communication"):
            pass
        spans.step()
    return telemetry.metrics(1.0)


def in_worker(rank: int, folder: str) -> dict[str, Any]:
    result: dict[str, Any] = {"waits": waits(rank)}
    trials = {
        "dp": replace(BASE, workers=2, precision=KAHAN),
        "pp": replace(BASE, workers=2, layout=Layout(pp=2, micro_batches=4)),
        "local": replace(BASE, workers=2, sync=SyncConfig(name="local_sgd", period=3)),
    }
    for name, config in trials.items():
        silent = Training(config, rank=rank, world_size=2)
        telling = Training(replace(config, telemetry=True), rank=rank, world_size=2)
        metrics = [telling.train_epoch() for _ in range(2)]
        result[name] = metrics
        result[f"{name} same"] = [repeatable(m) for m in metrics] == [
            repeatable(silent.train_epoch()) for _ in range(2)
        ]
    return result


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(in_worker, tmp_path_factory.mktemp("telemetry"))


def test_waiting_for_a_slower_worker_is_idle_and_the_transfer_is_communication(
    workers: list[dict[str, Any]],
) -> None:
    """Means over two workers and two steps of 10 seconds: transfers of 1 and 1 each, waits of 2 and
    1 in total."""
    for result in workers:
        found = told(result["waits"])
        assert [found[name] for name in PARTS] == [10.0, 10.0 - 1.0 - 0.75, 1.0, 0.75]


@pytest.mark.parametrize("name", ["dp", "pp", "local"])
def test_workers_tell_the_same_and_learn_the_same(workers: list[dict[str, Any]], name: str) -> None:
    assert [result[f"{name} same"] for result in workers] == [True, True]
    for metrics, others in zip(workers[0][name], workers[1][name], strict=True):
        found = told(metrics)
        assert found == told(others)
        total, *parts = (found[part] for part in PARTS)
        assert math.isclose(sum(parts), total, rel_tol=1e-9)
        assert all(
            part > 0 for part in (total, found["compute_seconds"], found["communication_seconds"])
        )
        macs = 64 * (2 * 64 * 16 + 3 * 16 * 10)
        assert found["macs_per_step"] == macs
        picojoules = mac_picojoules("lns12" if name == "dp" else "float32")
        assert math.isclose(found["modelled_joules"], 1e-12 * 10 * macs * picojoules)
        if name == "pp":
            assert found["idle_seconds"] > 0


def test_a_step_whose_waiting_is_not_told_is_not_divided() -> None:
    spans = Spans(clock=scripted([0.0, 1.0, 3.0, 10.0, 10.0]))
    telemetry = Telemetry(spans, torch.device("cpu"), 1, lambda: 1.0, aligned=True, waits=False)
    telemetry.begin()
    with spans("communication"):
        pass
    spans.step()
    found = told(telemetry.metrics(1.0))
    assert found["step_seconds"] == 10.0
    assert set(found) & set(PARTS) == {"step_seconds"}


def test_without_a_driver_nothing_is_made_up() -> None:
    counters = GPUCounters(None if torch.cuda.is_available() else 0)
    counters.begin()
    assert counters.end() == {}


class Device:
    """A device with a power in watts; its counter moves every tenth of a second."""

    def __init__(self, power: Callable[[float], float], phase: float) -> None:
        self.now, self._power, self._phase, self._joules, self._step = 0.0, power, phase, 0.0, 0.0

    def run(self, seconds: float, meter: EnergyMeter) -> float:
        """Let time pass, one millisecond at a time; return the joules that were really used."""
        taken = 0.0
        for _ in range(round(seconds * 1000)):
            taken += self._power(self.now) / 1000
            self._joules += self._power(self.now) / 1000
            self.now += 0.001
            if (round(1000 * (self.now + self._phase))) % 100 == 0:
                self._step = self._joules
            if round(1000 * self.now) % 20 == 0:
                meter.look()
        return taken


@given(
    st.integers(0, 99), st.lists(st.integers(5, 400), min_size=1, max_size=8), st.integers(0, 60)
)
def test_an_epoch_has_its_energy_however_the_counter_moves(
    phase: int, epochs: list[int], between: int
) -> None:
    device = Device(lambda now: 120.0, phase / 1000)
    meter = EnergyMeter(lambda: device._step, lambda: device.now)
    device.run(0.35, meter)
    for milliseconds in epochs:
        meter.begin()
        taken = device.run(milliseconds / 1000, meter)
        found = meter.end()
        assert found is not None
        assert abs(found - taken) <= 0.24 * taken + 120 * 0.024
        device.run(between / 1000, meter)


def test_a_long_epoch_has_the_energy_of_what_changed_within() -> None:
    device = Device(lambda now: 100.0 if now < 1 else 500.0, 0.03)
    meter = EnergyMeter(lambda: device._step, lambda: device.now)
    device.run(0.5, meter)
    meter.begin()
    taken = device.run(60.0, meter)
    assert meter.end() == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize("phase", [0.0, 0.03, 0.07])
def test_short_epochs_have_together_what_the_counter_counts(phase: float) -> None:
    """At 600 W after 80 W; the first reading still has the power from before."""
    power = [80.0]
    device = Device(lambda now: power[0], phase)
    meter = EnergyMeter(lambda: device._step, lambda: device.now)
    device.run(0.5, meter)
    power[0] = 600.0
    taken = told = 0.0
    for _ in range(20):
        meter.begin()
        taken += device.run(0.05, meter)
        found = meter.end()
        assert found is not None
        told += found
        device.run(0.01, meter)
    assert told == pytest.approx(taken, rel=0.1)


def test_a_counter_that_stands_still_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.telemetry.nvml.STEPS_SECONDS", 0.05)
    waits: list[float] = []
    monkeypatch.setattr("trainers.telemetry.nvml.time.sleep", waits.append)
    meter = EnergyMeter(lambda: 1.0)
    for _ in range(3):
        meter.begin()
        first = waits.copy()
        assert meter.end() is None
    meter.begin()
    assert first
    assert waits == first


def test_a_counter_that_fails_tells_no_energy() -> None:
    device, fails = Device(lambda now: 100.0, 0.0), [False]
    meter = EnergyMeter(lambda: None if fails[0] else device._step, lambda: device.now)
    device.run(0.5, meter)
    meter.begin()
    device.run(0.2, meter)
    fails[0] = True
    meter.look()
    fails[0] = False
    device.run(0.5, meter)
    assert meter.end() is None
    meter.begin()
    device.run(1.0, meter)
    assert meter.end() == pytest.approx(100.0, rel=0.02)


def test_the_thread_that_looks_ends_with_its_meter() -> None:
    looks: list[float] = []

    def read() -> float:
        looks.append(time.monotonic())
        return float(len(looks))

    meter = EnergyMeter(read)
    meter.watch()
    meter.begin()
    assert meter.end()
    watcher = next(t for t in threading.enumerate() if t.name.endswith("(_look)"))
    del meter
    watcher.join(timeout=10)
    assert not watcher.is_alive()


def test_the_ceiling_is_measured_once_for_each_kernel() -> None:
    one = kernel_ceiling(KAHAN.lns_format, "contract", torch.float32, "cpu", 1)
    assert one == kernel_ceiling(KAHAN.lns_format, "contract", torch.float32, "cpu", 1)
    assert one != kernel_ceiling(None, "contract", torch.float32, "cpu", 1)
    assert 1e7 < one < 1e13


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_tells_energy_and_activity() -> None:
    training = Training(replace(BASE, device="cuda", precision=KAHAN, telemetry=True))
    epochs = [told(training.train_epoch()) for _ in range(2)]
    found = epochs[1]
    assert set(found) >= set(PARTS) | {"peak_memory_bytes", "macs_per_step", "ceiling_fraction"}
    assert found["macs_per_step"] == 64 * (2 * 64 * 16 + 3 * 16 * 10)
    # Energy predicted too high is taken from a later epoch, which may be left with none.
    assert sum(epoch.get("joules", 1.0) for epoch in epochs) > 0
    assert all(0 <= found.get(name, 0.0) <= 1 for name in GPM)


def test_what_comes_before_the_steps_is_no_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds for capturing a graph, then one step of two; 128 products in the last of six."""
    clock = SimpleNamespace(perf_counter=scripted([10.0, 15.0]))
    monkeypatch.setattr("trainers.telemetry.metrics.time", clock)
    spans = Spans(clock=scripted([0.0, 5.0, 7.0, 7.0]))
    telemetry = Telemetry(spans, torch.device("cpu"), 1, lambda: 256.0, aligned=True)
    telemetry.begin()
    with telemetry.counting():
        torch.ones(4, 4) @ torch.ones(4, 8)
    telemetry.begin_steps()
    spans.step()
    found = told(telemetry.metrics(6.0))
    assert found["step_seconds"] == 2.0
    assert found["ceiling_fraction"] == 0.5
