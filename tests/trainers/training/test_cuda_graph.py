"""Devices: refused if missing; on a GPU the graphed epoch equals the eager one bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lns_ops import cuda
from trainers.checkpoint.state import model_tensors
from trainers.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrialConfig
from trainers.config.layout import Layout
from trainers.config.lr_schedule import LRSchedule
from trainers.config.sync import SyncConfig
from trainers.data import Split, epoch_order
from trainers.models.loss import CROSS_ENTROPY
from trainers.telemetry.tally import Tally
from trainers.training.cuda_graph import GraphedEpochs
from trainers.training.device import check_device, resolve_device
from trainers.training.step import train_step
from trainers.training.strategies import GraphStep, StatefulStep, Step
from trainers.training.trainer import Training

DIGITS = DataConfig(name="digits", validation_size=300)
BASE = TrialConfig(
    data=DIGITS, model=ModelConfig(hidden=[32]), epochs=3, batch_size=32, device="cuda"
)
PRECISIONS = {
    "float32": PrecisionConfig(),
    "matmul": PrecisionConfig(format="lns12", scope="matmul"),
    "everywhere": PrecisionConfig(format="lns12"),
    "kahan": PrecisionConfig(format="lns12", kahan_sum=True),
    "stochastic": PrecisionConfig(format="lns12", stochastic_rounding=True),
    "float32 updates": PrecisionConfig(format="lns12", kahan_sum=True, update_arithmetic="float32"),
    "bfloat16": PrecisionConfig(format="bfloat16", kahan_sum=True),
    "float16": PrecisionConfig(format="float16"),
    "float8": PrecisionConfig(format="float8_e4m3fn", master_format="bfloat16"),
    "scaled lns": PrecisionConfig(format="lns8/channel", stochastic_rounding=True),
}
OPTIMIZERS = {
    "sgd": OptimizerConfig(lr=0.05),
    "momentum": OptimizerConfig(lr=0.5, momentum=0.5),
    "adam": OptimizerConfig(name="adam", lr=0.01),
    "adamw": OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.01),
}

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)
needs_no_gpu = pytest.mark.skipif(cuda.unavailable() is None, reason="there is a GPU")


@needs_no_gpu
def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match=r"device=cuda: .*; use device=cpu"):
        check_device("cuda")
    with pytest.raises(ValueError, match="device=cuda"):
        Training(BASE)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"device": "gpu"}, "device='gpu': must be one of cpu, cuda, auto"),
        (
            {"device": "cuda", "workers": 2, "sync": SyncConfig(name="asynchronous")},
            "device=cuda with sync.name=asynch.*use device=cpu",
        ),
        ({"gpus": 0}, "gpus=0: must lie above 0"),
        ({"gpus": 2}, "gpus=2: .*use gpus=1"),
    ],
)
def test_device_settings_that_cannot_be(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrialConfig(**values)


def tensors(training: Training) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for name, tensor in model_tensors(training.model, training.optimizer).items()
    }


def assert_equal_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graphed_epoch_is_the_eager_one(precision: str, optimizer: str) -> None:
    config = replace(BASE, precision=PRECISIONS[precision], optimizer=OPTIMIZERS[optimizer])
    graphed, eager = Training(config), Training(config)
    order = epoch_order(len(graphed.data.train.y), config.seed, 0)
    tally = GraphedEpochs(
        graphed.model, graphed.optimizer, graphed.data.train, config.batch_size, CROSS_ENTROPY
    ).train(order)
    found = Tally()
    for chosen in order[: tally.examples].view(-1, config.batch_size):
        batch = Split(eager.data.train.x[chosen.cuda()], eager.data.train.y[chosen.cuda()])
        found.add(train_step(eager.model, eager.optimizer, batch, None))
    assert tally.examples == len(order) // config.batch_size * config.batch_size
    assert tally == found
    assert_equal_bits(tensors(graphed), tensors(eager))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_gpu_trial_learns_and_resumes_bit_for_bit(
    precision: str, optimizer: str, tmp_path: Path
) -> None:
    config = replace(BASE, precision=PRECISIONS[precision], optimizer=OPTIMIZERS[optimizer])
    whole, first = Training(config), Training(config)
    for epoch in range(3):
        metrics = whole.train_epoch()
        if epoch == 0:
            first.train_epoch()
            first.save(tmp_path)
    resumed = Training(config)
    resumed.train_epoch()  # leaves a graph that the restored state must not use
    resumed.restore(tmp_path)
    while resumed.epoch < 3:
        again = resumed.train_epoch()
    assert_equal_bits(tensors(resumed), tensors(whole))
    assert {k: v for k, v in again.items() if k != "samples_per_second"} == {
        k: v for k, v in metrics.items() if k != "samples_per_second"
    }
    assert whole.test()["test/error"] < 0.25
    assert metrics["train/loss"] < 1.0


SEQUENCES = DataConfig(name="copy", args={"length": 4, "examples": 400, "test": 40})
NETWORKS = {
    "mlp": (ModelConfig(hidden=[32]), DIGITS),
    "resnet": (ModelConfig(name="resnet", args={"depth": 8, "width": 4}), DIGITS),
    "lstm": (ModelConfig(name="lstm", args={"layers": 2, "width": 16, "dropout": 0.2}), SEQUENCES),
    "gpt": (
        ModelConfig(name="gpt", args={"layers": 2, "heads": 2, "width": 16, "dropout": 0.2}),
        SEQUENCES,
    ),
}

OF_NETWORKS = {
    "everywhere": PrecisionConfig(format="lns16"),
    "kahan": PrecisionConfig(format="lns16", kahan_sum=True),
    "bfloat16": PRECISIONS["bfloat16"],
    "scaled lns": PRECISIONS["scaled lns"],
    "float8": PRECISIONS["float8"],
    "posit": PrecisionConfig(format="posit(16)", kahan_sum=True),
    "nvfp4": PrecisionConfig(format="nvfp4", kahan_sum=True),
    "rounded sums": PrecisionConfig(format="bfloat16", sum_format="float(8,13)", sum_block=128),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("precision", "network"),
    [pair for pair in product(OF_NETWORKS, NETWORKS) if pair != ("rounded sums", "lstm")],
)
@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_graphs_of_networks_that_draw_random_numbers_and_vary_their_rate(
    precision: str, decay: str, network: str
) -> None:
    model, data = NETWORKS[network]
    config = replace(
        BASE,
        model=model,
        data=data,
        precision=OF_NETWORKS[precision],
        optimizer=OPTIMIZERS["adamw"],
        lr_schedule=LRSchedule(decay=decay),
        layout=Layout(micro_batches=2),
    )
    graphed, eager = Training(config), Training(config)
    assert isinstance(graphed._step, GraphStep)
    eager._step = StatefulStep(eager._components)
    for _ in range(2):
        of_graph, of_eager = graphed.train_epoch(), eager.train_epoch()
        assert of_graph["train/loss"] == pytest.approx(of_eager["train/loss"], rel=1e-6)
        assert of_graph["validation/loss"] == of_eager["validation/loss"]
    assert_equal_bits(tensors(graphed), tensors(eager))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *product(["momentum", "adamw", "lamb"], PRECISIONS),
        ("madam", "everywhere"),
        ("madam", "stochastic"),
    ],
)
def test_a_rate_that_varies_is_in_the_graph(name: str, precision: str) -> None:
    """All except madam, whose rate is on the host; with the bits of steps that take a number."""
    own = OPTIMIZERS.get(name) or OptimizerConfig(name=name, lr=0.01)
    schedule = LRSchedule(decay="cosine", warmup_epochs=1)
    config = replace(BASE, precision=PRECISIONS[precision], optimizer=own, lr_schedule=schedule)
    graphed, eager = Training(config), Training(config)
    assert isinstance(graphed._step, GraphStep)
    eager._step = StatefulStep(eager._components)
    for _ in range(2):
        graphed.train_epoch()
        eager.train_epoch()
    on_device = isinstance(graphed.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert on_device == (name != "madam")
    assert_equal_bits(tensors(graphed), tensors(eager))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "matmul"])
@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_divergence_on_a_gpu_is_a_result(decay: str, precision: str) -> None:
    schedule = LRSchedule(decay=decay)
    training = Training(
        replace(
            BASE,
            precision=PRECISIONS[precision],
            optimizer=OptimizerConfig(lr=1e38),
            lr_schedule=schedule,
        )
    )
    metrics = training.train_epoch()
    assert metrics["train/loss"] != metrics["train/loss"]
    assert training.diverged
    assert training.train_epoch()["epoch"] == 2.0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_an_epoch_on_a_gpu_may_have_one_step(decay: str) -> None:
    config = replace(BASE, lr_schedule=LRSchedule(decay=decay))
    examples = Training(config).data.train.size
    whole = Training(replace(config, batch_size=examples))
    first, second = (whole.train_epoch()["train/loss"] for _ in range(2))
    assert second < first


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("eager", [False, True])
def test_a_value_that_is_not_finite_ends_training_on_a_gpu(eager: bool) -> None:
    training = Training(
        replace(BASE, precision=PRECISIONS["matmul"], lr_schedule=LRSchedule(decay="cosine"))
    )
    if eager:
        training._step = Step(training._components)
    training.data.train.x[0, 0] = torch.nan  # encoded as zero, and counted
    loss = training.train_epoch()["train/loss"]
    assert loss != loss
    assert training.diverged


@pytest.mark.gpu
@needs_gpu
def test_a_checkpoint_moves_between_devices(tmp_path: Path) -> None:
    config = replace(BASE, precision=PRECISIONS["kahan"])
    on_gpu = Training(config)
    on_gpu.train_epoch()
    on_gpu.save(tmp_path)
    on_cpu = Training(replace(config, device="cpu"))
    on_cpu.restore(tmp_path)
    assert_equal_bits({name: t.cpu() for name, t in tensors(on_gpu).items()}, tensors(on_cpu))
    assert abs(on_cpu.test()["test/error"] - on_gpu.test()["test/error"]) < 0.01
