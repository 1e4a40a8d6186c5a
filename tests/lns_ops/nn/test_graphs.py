"""cuda_graph: a replayed step equals the eager one bit for bit, and steps that a replay would get
wrong are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lns_ops
from lns_ops import cuda
from lns_ops.tensor import storage_of

needs_gpu = pytest.mark.skipif(
    cuda.unavailable() is not None, reason=f"no CUDA backend: {cuda.unavailable()}"
)
STEPS = 6


class Trained:
    """A net, its optimizer and its step."""

    def __init__(self, fmt: str | None, optimizer: str = "momentum", update: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.25), nn.Linear(32, 4)
        ).cuda()
        if fmt:
            lns_ops.convert_(self.model, fmt, scope="everywhere")
        self.optimizer = self._optimizer(optimizer, fmt is not None)
        self.update = update

    def _optimizer(self, name: str, kahan: bool) -> torch.optim.Optimizer:
        if name == "adamw":
            return lns_ops.optim.AdamW(self.model.parameters(), lr=0.01, kahan_sum=kahan)
        return lns_ops.optim.SGD(self.model.parameters(), lr=0.002, momentum=0.9, kahan_sum=kahan)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y, reduction="sum")
        loss.backward()
        if self.update:
            self.optimizer.step()
        return loss.detach()

    def train(self, step: Callable[..., Tensor]) -> list[float]:
        """Train on new batches from the same random numbers; return the losses."""
        generator, losses = torch.Generator().manual_seed(1), []
        torch.manual_seed(2)  # dropout
        for _ in range(STEPS):
            x = torch.randn(8, 16, generator=generator)
            y = torch.randint(4, (8,), generator=generator)
            losses.append(float(step(x.cuda(), y.cuda())))
            if not self.update:
                self.optimizer.param_groups[0]["lr"] *= 0.5
                self.optimizer.step()
        return losses


def assert_equal_bits(left: nn.Module, right: nn.Module) -> None:
    for mine, theirs in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(storage_of(mine.detach()), storage_of(theirs.detach()))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fmt", [None, "lns12", "lns16"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("update", [True, False])  # the optimizer's step in the graph, and after it
def test_replays_have_the_bits_of_eager_steps(
    update: bool, optimizer: str, fmt: str | None
) -> None:
    graphed, eager = (Trained(fmt, optimizer, update) for _ in range(2))
    of_graph = graphed.train(lns_ops.cuda_graph(graphed.step, warmup=2))
    assert of_graph == eager.train(eager.step)
    assert len(set(of_graph)) == STEPS
    assert_equal_bits(graphed.model, eager.model)


@pytest.mark.gpu
@needs_gpu
def test_a_rate_on_the_gpu_varies_between_replays() -> None:
    graphed, eager = Trained("lns12"), Trained("lns12")
    rate = torch.tensor(0.002, dtype=torch.float64, device="cuda")
    graphed.optimizer.param_groups[0]["lr"] = rate
    graphed.model.eval()
    eager.model.eval()
    step = lns_ops.cuda_graph(graphed.step, warmup=1)
    batch = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
    for _ in range(STEPS):
        assert float(step(*batch)) == float(eager.step(*batch))
        rate.mul_(0.75)
        eager.optimizer.param_groups[0]["lr"] *= 0.75
    assert_equal_bits(graphed.model, eager.model)


def captured() -> tuple[Trained, Callable[..., Tensor], tuple[Tensor, Tensor]]:
    trained = Trained("lns12")
    step = lns_ops.cuda_graph(trained.step, warmup=1)
    batch = torch.randn(8, 16).cuda(), torch.randint(4, (8,)).cuda()
    for _ in range(3):
        step(*batch)
    return trained, step, batch


@pytest.mark.gpu
@needs_gpu
def test_what_a_replay_would_overlook_is_refused() -> None:
    trained, step, (x, y) = captured()
    with pytest.raises(ValueError, match=r"argument 0 is Tensor \[4, 16\].*drop_last=True"):
        step(x[:4], y[:4])
    with pytest.raises(ValueError, match=r"argument 1 is .*float32, captured as .*int64"):
        step(x, y.float())
    with pytest.raises(ValueError, match="captured with argument 0, argument 1"):
        step(x)
    trained.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"SGD has changed since the capture: lr=0.5 \(captured"):
        step(x, y)
    trained.optimizer.param_groups[0]["lr"] = 0.002
    step(x, y)


@pytest.mark.gpu
@needs_gpu
def test_values_that_are_no_tensors_stay_those_of_the_capture() -> None:
    step = lns_ops.cuda_graph(lambda x, factor: x * factor, warmup=1)
    x = torch.ones(3, device="cuda")
    for _ in range(3):
        assert step(x, factor=2).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="factor is 3, captured as 2"):
        step(x, factor=3)


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_reads_a_value_is_no_graph_and_says_so() -> None:
    step = lns_ops.cuda_graph(lambda x: x.sum().item(), warmup=1)
    x = torch.ones(3, device="cuda")
    assert step(x) == 3
    with pytest.raises(RuntimeError, match=r"cannot be captured.*\.item\(\)"):
        step(x)
    assert torch.rand(3, device="cuda").sum() > 0


@pytest.mark.gpu
@needs_gpu
def test_faults_of_replays_are_counted() -> None:
    step = lns_ops.cuda_graph(lambda x: lns_ops.encode(x, lns_ops.lns12), warmup=1)
    x = torch.ones(3, device="cuda")
    step(x)
    step(x)
    lns_ops.check_faults()
    step(x / 0)
    with pytest.raises(lns_ops.NonFiniteError):
        lns_ops.check_faults()


def test_tensors_of_a_cpu_are_refused() -> None:
    step = lns_ops.cuda_graph(lambda x: x + 1)
    with pytest.raises(ValueError, match=r"argument 0 is on cpu: .*\.to\('cuda'\)"):
        step(torch.ones(2))


@pytest.mark.parametrize("value", [[torch.ones(2)], {"x": (torch.ones(2), 3)}])
def test_tensors_in_containers_are_refused(value: object) -> None:
    step = lns_ops.cuda_graph(lambda x: x)
    with pytest.raises(ValueError, match=r"batch is a (list|dict) with tensors.*\*\*tensors"):
        step(batch=value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_graph_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="torch finds no GPU"):
        lns_ops.cuda_graph(lambda: None)()


def test_a_graph_needs_a_call_before_it() -> None:
    with pytest.raises(ValueError, match="warmup=0: must be at least 1"):
        lns_ops.cuda_graph(lambda x: x, warmup=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scope", ["everywhere", "matmul"])
def test_compiled_nets_train_from_graphs(scope: str) -> None:
    """``torch.compile(mode="reduce-overhead")`` replays steps; the losses equal the eager ones."""

    def trained(compiles: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        ).cuda()
        lns_ops.convert_(net, "lns16", scope=scope)
        optimizer = lns_ops.optim.SGD(net.parameters(), lr=0.002, kahan_sum=scope == "everywhere")
        call = torch.compile(net, mode="reduce-overhead") if compiles else net
        losses = []
        for _ in range(STEPS):
            x, y = torch.randn(8, 3, 8, 8).cuda(), torch.randint(4, (8,)).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    torch.compiler.reset()
    assert trained(compiles=True) == pytest.approx(trained(compiles=False), rel=1e-3)
