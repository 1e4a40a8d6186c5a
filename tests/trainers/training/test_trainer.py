"""Training on real digits: learning, exact resume, checkpoints of other trials, divergence as a
result."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lns_ops
from lns_ops import LNSTensor
from trainers.checkpoint.manifest import STATE
from trainers.comm.mesh import Place
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.data import Dataset, prepare
from trainers.models import build
from trainers.models.init import initialize_
from trainers.training import check as checks
from trainers.training import strategies
from trainers.training.trainer import Training, check

PRECISIONS = {
    "float32": PrecisionConfig(),
    "matmul": PrecisionConfig(format="lns12", scope="matmul"),
    "everywhere": PrecisionConfig(format="lns12"),
    "kahan": PrecisionConfig(format="lns12", kahan_sum=True),
    "float kahan": PrecisionConfig(kahan_sum=True),
    "stochastic": PrecisionConfig(format="lns12", stochastic_rounding=True),
    "float32 updates": PrecisionConfig(format="lns12", kahan_sum=True, update_arithmetic="float32"),
    "float32 sums": PrecisionConfig(format="lns12", kahan_sum=True, accumulation="float32"),
}


def config(precision: str = "kahan", **changes: object) -> TrialConfig:
    base = TrialConfig(
        data=DataConfig(name="digits"), model=ModelConfig(hidden=[32]),
        precision=PRECISIONS[precision], batch_size=50, epochs=3,
        optimizer=OptimizerConfig(lr=0.5, momentum=0.5),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def without_speed(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k != "samples_per_second"}


def weights(training: Training) -> list[torch.Tensor]:
    return [
        p.codes if isinstance(p, LNSTensor) else p.detach() for p in training.model.parameters()
    ]


OPTIMIZERS = {"sgd": OptimizerConfig(lr=0.5, momentum=0.5)} | {
    name: OptimizerConfig(name=name, lr=0.01, weight_decay=decay)
    for name, decay in (("adam", 1e-4), ("adamw", 0.01))
}


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_precision_learns_and_resumes_bit_for_bit(
    precision: str, optimizer: str, tmp_path: Path
) -> None:
    trial = config(precision, optimizer=OPTIMIZERS[optimizer])
    undisturbed = Training(trial)
    first = undisturbed.train_epoch()
    undisturbed.save(tmp_path)
    rest = [undisturbed.train_epoch() for _ in range(2)]
    assert rest[-1]["epoch"] == 3
    assert rest[-1]["train/loss"] < first["train/loss"]
    assert undisturbed.test()["test/error"] < 0.25
    resumed = Training(trial)
    resumed.restore(tmp_path)
    assert resumed.epoch == 1
    assert [without_speed(resumed.train_epoch()) for _ in range(2)] == [
        without_speed(m) for m in rest
    ]
    assert all(
        torch.equal(a, b) for a, b in zip(weights(resumed), weights(undisturbed), strict=True)
    )


def test_each_trial_of_a_process_computes_with_its_own_accumulation() -> None:
    alone = {name: Training(config(name)) for name in ("kahan", "float32 sums")}
    expected = {name: without_speed(training.train_epoch()) for name, training in alone.items()}
    assert expected["kahan"] != expected["float32 sums"]
    lns_ops.set_matmul_accumulation("float32")
    try:
        in_turn = {name: Training(config(name)) for name in ("float32 sums", "kahan")}
        for name, training in in_turn.items():
            assert without_speed(training.train_epoch()) == expected[name]
        assert all(in_turn[name].test() == alone[name].test() for name in in_turn)
        assert lns_ops.get_matmul_accumulation() == "float32"
    finally:
        lns_ops.set_matmul_accumulation("contract")


def test_same_config_same_bits_and_another_seed_others() -> None:
    runs = [Training(config(seed=seed)) for seed in (0, 0, 1)]
    metrics = [without_speed(t.train_epoch()) for t in runs]
    assert metrics[0] == metrics[1] != metrics[2]


def test_initial_weights_depend_on_name_and_seed_alone() -> None:
    deep, shallow = (initialize_(build(ModelConfig(hidden=h), 64, 10), 5) for h in ([32, 16], [32]))
    assert torch.equal(deep.get_parameter("0.weight"), shallow.get_parameter("0.weight"))
    weight = deep.get_parameter("2.weight").detach()
    assert weight.abs().max() <= 32**-0.5
    assert weight.abs().mean() == pytest.approx(32**-0.5 / 2, rel=0.1)


@pytest.mark.parametrize("precision", ["float32", "matmul"])
def test_divergence_is_a_result(precision: str, tmp_path: Path) -> None:
    training = Training(config(precision, optimizer=OptimizerConfig(lr=1e38)))
    metrics = [training.train_epoch() for _ in range(2)][-1]
    assert training.diverged
    assert math.isnan(metrics["train/loss"])
    assert not math.isfinite(metrics["validation/loss"])
    assert metrics["validation/error"] > 0.8
    training.save(tmp_path)
    again = Training(training.config)
    again.restore(tmp_path)
    assert again.diverged


def test_a_value_that_was_only_counted_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernels encode a NaN as zero and count it."""
    training = Training(config("matmul"))
    monkeypatch.setattr(type(training._components.workers), "faultless", lambda _: False)
    metrics = training.train_epoch()
    assert math.isnan(metrics["train/loss"])
    assert training.diverged
    # of the weights before the skipped update, which are finite
    assert math.isnan(metrics["validation/loss"])
    assert math.isnan(training.test()["test/loss"])
    assert 0 < training.test()["test/error"] < 1


def test_what_can_only_fail_is_known_beforehand() -> None:
    info = prepare(DataConfig(name="digits"))
    check(config(), info)
    for changes, said in (
        ({"batch_size": 2000}, "batch_size=2000: there are 1200"),
        ({"optimizer": OptimizerConfig(lr=1e-5)}, "lr=2e-07: underflows"),
        ({"optimizer": OptimizerConfig(lr=0.5, momentum=1e-9)}, "momentum=1e-09: underflows"),
        (
            {"optimizer": OptimizerConfig(lr=0.5, momentum=0.999)},
            "momentum=0.999: rounds to 1 in lns12",
        ),
        (
            {"optimizer": OptimizerConfig(name="adam", betas=[0.999, 0.999])},
            "beta1=0.999: rounds to 1 in lns12",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            check(config(**changes), info)


def test_sizes_that_the_data_forbid_are_refused_after_others_were_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of our models is tried once; its other sizes are only created."""
    info = prepare(DataConfig(name="digits"))
    made, make = [], checks.make_whole_model

    def refuses_large(trial: TrialConfig, data: Dataset) -> nn.Module:
        made.append(trial.model.arguments.depth)
        if made[-1] > 14:
            raise ValueError("too deep")
        return make(trial, data)

    def resnet(depth: int) -> TrialConfig:
        return config(
            "float32", model=ModelConfig(name="resnet", args={"depth": depth, "width": 2})
        )

    monkeypatch.setattr(checks, "make_whole_model", refuses_large)
    check(resnet(8), info)
    check(resnet(14), info)
    with pytest.raises(ValueError, match="too deep"):
        check(resnet(20), info)
    assert made == [8, 14, 20]


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=2000: there are 1200 training examples"):
        Training(config(batch_size=2000))


def test_learning_rate_that_underflows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lr=2e-0[67]: underflows to zero in lns12"):
        Training(config(optimizer=OptimizerConfig(lr=1e-5)))


def test_checkpoint_of_another_trial_is_refused(tmp_path: Path) -> None:
    Training(config()).save(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint of precision=.*this trial has"):
        Training(config("float32")).restore(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint of optimizer.name=sgd, this trial has adam"):
        Training(config(optimizer=OPTIMIZERS["adam"])).restore(tmp_path)


def test_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It lacks config keys that were added later, which then have their defaults."""
    training = Training(config())
    training.train_epoch()
    training.save(tmp_path)
    state = json.loads((tmp_path / STATE).read_text())
    del (
        state["config"]["precision"]["stochastic_rounding"],
        state["config"]["optimizer"]["betas"],
        state["digest"],
    )
    (tmp_path / STATE).write_text(json.dumps(state))
    again = Training(config())
    again.restore(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(training), strict=True))


def test_a_checkpoint_whose_history_is_not_as_it_was_written_is_refused(tmp_path: Path) -> None:
    training = Training(config())
    training.train_epoch()
    training.save(tmp_path)
    state = json.loads((tmp_path / STATE).read_text())
    state["history"][0]["train/loss"] += 1.0
    (tmp_path / STATE).write_text(json.dumps(state))
    with pytest.raises(ValueError, match="does not match its digest"):
        Training(config()).restore(tmp_path)


@pytest.mark.parametrize(
    ("place", "seed"),
    [
        (Place(dp=2, dp_rank=1, tp_rank=0), "examples/0/1"),
        (Place(dp=2, dp_rank=1, tp_rank=1), "examples/0/1"),
        (Place(dp=2, dp_rank=1), "examples/0/1"),
        (Place(dp=2, pp=2, dp_rank=1, pp_rank=1), "examples/0/3"),
    ],
)
def test_workers_of_one_replica_draw_the_same(
    place: Place, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one layer must see one loss and one dropout; stages draw separately."""
    asked: list[str] = []
    monkeypatch.setattr(strategies, "seed_of", lambda text: asked.append(text) or 0)
    monkeypatch.setattr(strategies, "_stateful", lambda config: True)
    step = strategies.StatefulStep.__new__(strategies.StatefulStep)
    step._config, step._place = config(), place
    step._seeded("examples")
    assert asked == [seed]
