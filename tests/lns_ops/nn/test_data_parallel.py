"""Replicas in real processes: how torch.distributed works with converted modules, or refuses
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lns_ops
from lns_ops._compat import DisableTorchFunction
from tests.lns_ops.nets import digest
from tests.trainers.processes import spawned

WORLD, EXAMPLES, STEPS = 2, 64, 3
"""If each process has 64 examples, one process adds its blocks in the order of the ranks."""
FORMATS = {"0": "lns12", "2": "lns16"}
"""The last layer stays float32."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(WORLD * EXAMPLES, 6), torch.arange(WORLD * EXAMPLES) % 4


def everywhere(fmt: Any = "lns16") -> nn.Sequential:
    model = net()
    del model[3:]
    return lns_ops.convert_(model, fmt, scope="everywhere")  # type: ignore[return-value]


def steps(model: nn.Module, examples: slice, processes: int = 1) -> str:
    """The digest after some steps of Adam with the loss summed over the examples of all
    processes."""
    device = next(model.parameters()).device
    x, y = (values.to(device) for values in batch())
    optimizer = lns_ops.optim.Adam(model.parameters(), lr=1e-2, kahan_sum=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[examples]), y[examples], reduction="sum")
        (processes * loss).backward()
        optimizer.step()
    return digest(model)


def own(rank: int) -> slice:
    return slice(rank * EXAMPLES, (rank + 1) * EXAMPLES)


def replicas(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    for name in ("lns16", "lns12"):
        model = everywhere(name)
        if rank:
            model[0].weight.detach().mul_(3)  # the first process's values count
        found[name] = steps(lns_ops.distributed_data_parallel(model), own(rank), WORLD)
    mixed = lns_ops.convert_(net(), FORMATS, scope="everywhere")
    found["mixed"] = steps(lns_ops.distributed_data_parallel(mixed), own(rank), WORLD)
    idle = nn.ModuleDict({"used": everywhere(), "unused": everywhere()})
    wrapped = lns_ops.distributed_data_parallel(_Partly(idle), find_unused_parameters=True)
    found["partly used"] = steps(wrapped, own(rank), WORLD) and digest(idle["used"])
    return found


class _Partly(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["used"](x)  # type: ignore[no-any-return]


def test_replicas_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    one, other = spawned(replicas, tmp_path)
    whole = slice(0, WORLD * EXAMPLES)
    for name in ("lns16", "lns12"):
        assert one[name] == other[name] == steps(everywhere(name), whole), name
    assert one["partly used"] == other["partly used"] == one["lns16"]
    assert one["mixed"] == other["mixed"]


def on_gpus(rank: int, folder: str) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    wrapped = lns_ops.distributed_data_parallel(everywhere().to(device), device_ids=[rank])
    return {
        "replicas": steps(wrapped, own(rank), WORLD),
        "alone": steps(everywhere().to(device), slice(0, WORLD * EXAMPLES)),
    }


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPUs, needs two"
)
def test_replicas_on_gpus_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    for result in spawned(on_gpus, tmp_path, backend="nccl"):
        assert result["replicas"] == result["alone"]


# --------------------------------------------------------------------------------------------------

Made = Callable[[nn.Module], torch.optim.Optimizer]


def quantized(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lns_ops.quantize_updates_(optimizer, model, kahan_sum=True)
    return optimizer


FLOAT_CASES: dict[str, tuple[tuple[str, str], Made]] = {
    "matmul": (("lns16", "matmul"), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    "matmul, LAMB": (("lns16", "matmul"), lambda m: lns_ops.optim.LAMB(m.parameters(), lr=0.1)),
    "matmul, Kahan": (
        ("lns12", "matmul"),
        lambda m: lns_ops.optim.Adam(m.parameters(), lr=0.1, kahan_sum=True),
    ),
    "bfloat16": (("bfloat16", "everywhere"), quantized),
    "int8": (("int8", "everywhere"), quantized),
}
"""For float32 parameters torch's own wrappers work."""


def plain(case: str) -> nn.Module:
    model = net()
    del model[3:]
    fmt, scope = FLOAT_CASES[case][0]
    return lns_ops.convert_(model, fmt, scope=scope)


def sharded(rank: int, folder: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    for case, (_, optimizer) in FLOAT_CASES.items():
        shards, copies = plain(case), plain(case)
        parts: Any = [part for part in shards if [*part.parameters()]]
        for layer in (*parts, shards):
            fully_shard(layer)
        ours = lns_ops.distributed_data_parallel(plain(case))
        for model in (shards, ours, torchs := DistributedDataParallel(copies)):
            trained(model, optimizer, [own(rank)])
        cut_up: Any = shards.parameters()
        whole = nn.ParameterList([p.full_tensor() for p in cut_up])
        found[case] = [digest(whole), digest(torchs), digest(ours)]
    return found


def trained(model: nn.Module, optimizer: Made, parts: list[slice]) -> None:
    """Run some steps with the mean gradient over parts of the batch."""
    (x, y), made = batch(), optimizer(model)
    for _ in range(STEPS):
        grads = []
        for part in parts:
            made.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        if len(parts) > 1:
            for parameter, terms in zip(model.parameters(), zip(*grads, strict=True), strict=True):
                parameter.grad = sum(terms) / len(terms)  # type: ignore[arg-type, operator]
        made.step()


def test_float32_parameters_are_sharded_and_copied_by_torch(tmp_path: Path) -> None:
    """Two terms have only one sum in float32: the sum of one process that has both halves of the
    batch."""
    results = spawned(sharded, tmp_path)
    for case, (_, optimizer) in FLOAT_CASES.items():
        model = plain(case)
        before = digest(model)
        trained(model, optimizer, [own(rank) for rank in range(WORLD)])
        assert digest(model) != before
        assert {got for result in results for got in result[case]} == {digest(model)}, case


# --------------------------------------------------------------------------------------------------


def into_buckets(model: nn.Module) -> None:
    wrapped = DistributedDataParallel(model, init_sync=False)
    wrapped(batch()[0]).to_float().sum().backward()


def converted_later(model: nn.Module) -> None:
    wrapped = DistributedDataParallel(net())
    x, _ = batch()
    wrapped(x).sum().backward()
    lns_ops.convert_(wrapped.module, "lns16", scope="everywhere")
    wrapped.module(x)  # not refused, because it is harmless
    lns_ops.distributed_data_parallel(wrapped.module)(x).to_float().sum().backward()
    wrapped(x)


def converted_again(model: nn.Module) -> None:
    wrapped, (x, _) = lns_ops.distributed_data_parallel(model), batch()
    wrapped(x).to_float().sum().backward()
    lns_ops.convert_(lns_ops.revert_(model), "lns12", scope="everywhere")
    wrapped(x)


def with_buffer(model: nn.Module) -> None:
    layer = lns_ops.convert_(nn.Linear(2, 2), "lns16", scope="everywhere")
    layer.register_buffer("scale", lns_ops.LNSTensor.from_float(torch.ones(2), "lns16"))
    lns_ops.distributed_data_parallel(layer)


def shard(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def cut(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    return parallel.parallelize_module(
        model,
        init_device_mesh("cpu", (WORLD,)),
        {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()},
        **options,
    )


def step_of_parts(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(cut(model, src_data_rank=None).parameters(), lr=0.1)
    model[0](batch()[0]).to_float().sum().backward()  # type: ignore[operator]
    optimizer.step()


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "DDP": (DistributedDataParallel, r"lns_ops\.distributed_data_parallel instead"),
    "DDP's mean": (into_buckets, r"mean of an LNSTensor.*lns_ops\.distributed_data_parallel"),
    "views of buckets": (
        lambda m: lns_ops.distributed_data_parallel(m, gradient_as_bucket_view=True),
        "leave it False",
    ),
    "LNS buffers": (with_buffer, r"\(scale\).*broadcast_buffers=False"),
    "converted when wrapped": (
        lambda m: lns_ops.convert_(
            nn.Sequential(DistributedDataParallel(net())), "lns16", scope="everywhere"
        ),
        "call convert_ first",
    ),
    "converted within a wrapper": (converted_later, "drift apart; call convert_ first"),
    "converted again within one": (converted_again, "drift apart; call convert_ first"),
    "FSDP": (shard, "scope='matmul'"),
    "TP": (cut, "tensor parallelism have no LNS form"),
    "TP without a source": (
        lambda m: cut(m, src_data_rank=None)(batch()[0]),
        "tensor parallelism have no LNS form",
    ),
    "a step of TP": (step_of_parts, r"shape \(16, 6\).*tensor parallelism would round"),
    "TP of products": (
        lambda m: cut(plain("matmul"))(batch()[0]),
        r"shape \(128, 6\).*use whole layers on every process",
    ),
    "TP of a simulated format": (
        lambda m: cut(plain("int8"))(batch()[0]),
        "use whole layers on every process",
    ),
    "all-reduce": (
        lambda m: dist.all_reduce(m.get_parameter("0.weight").detach()),
        r"x\.codes\.view",
    ),
}


def refusals(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    for name, (work, _) in REFUSED.items():
        dist.barrier()
        try:
            work(everywhere())
        except (ValueError, NotImplementedError) as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(refusals, tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_give_other_bits_is_refused(refused: list[dict[str, Any]], name: str) -> None:
    for errors in refused:
        assert name in errors, "nothing was raised"
        with pytest.raises(ValueError, match=REFUSED[name][1]):
            raise ValueError(errors[name])


def test_a_bucket_may_hold_anything_before() -> None:
    grad, bucket = lns_ops.LNSTensor.from_float(torch.ones(3), "lns16"), torch.full((3,), torch.nan)
    refused = pytest.raises(NotImplementedError, match="DistributedDataParallel's mean")
    with refused, DisableTorchFunction():  # as in C++
        torch.ops.aten.mul.out(grad, torch.tensor(0.5), out=bucket)
