"""Private names of other libraries are still as this package expects; each failure names the
library that changed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

from tests.trainers.processes import gloo_threads
from trainers import _compat
from trainers.comm import process_group
from trainers.parallel import fsdp


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    process_group.join("gloo", dist.HashStore(), 0, 1)
    yield
    process_group.leave()


def test_torch_chooses_cudnns_algorithms() -> None:
    for value in (True, False):
        _compat.choose_cudnn(deterministic=value, benchmark=value)
        cudnn = torch.backends.cudnn
        assert (cudnn.deterministic, cudnn.benchmark) == (value, value), (
            "torch: _set_cudnn_deterministic and _set_cudnn_benchmark do not set cuDNN's flags"
        )


@pytest.mark.usefixtures("alone")
def test_torch_groups_wait_as_long_as_they_are_told() -> None:
    _compat.set_timeout(timedelta(seconds=7))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=7), (
        "torch: _set_pg_timeout leaves the timeout of gloo's collectives"
    )


def test_torch_tensors_in_parts_keep_no_group() -> None:
    """Once the object that keeps meshes is cleared, the threads of their group end."""
    process_group.join("gloo", dist.HashStore(), 0, 1)
    use_tensors_in_parts()
    process_group.leave()
    assert gloo_threads() == [], "torch: DTensor keeps groups in a cache that is not cleared"


def use_tensors_in_parts() -> None:
    """Let DTensor derive shardings and redistribute."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = process_group.mesh("cpu", dp=1)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    (x @ x).redistribute(mesh, [Replicate()])


@pytest.mark.usefixtures("alone")
def test_torch_stages_of_one_process_need_no_first_messages() -> None:
    """Only the middle stage of three has neighbours here."""
    stage = PipelineStage(nn.Linear(2, 2), 1, 3, torch.device("cpu"))
    stage.stage_index_to_group_rank = dict.fromkeys(range(3), 0)
    assert stage._get_init_p2p_neighbors_ops(), "torch: a pipeline's stages have no first messages"
    _compat.leave_out_messages_to_itself(stage)
    assert stage._get_init_p2p_neighbors_ops() == []


@pytest.mark.usefixtures("alone")
def test_torch_shards_remember_when_they_ran() -> None:
    model = torch.distributed.fsdp.fully_shard(
        nn.Linear(4, 2), mesh=process_group.mesh("cpu", dp=1)
    )
    model(torch.ones(3, 4))
    order = model._get_fsdp_state()._comm_ctx.post_forward_order
    assert len(order) == 1, "torch: FSDP keeps the order of forward passes elsewhere"
    _compat.forget_forward_order(model)
    assert order == [], "torch: FSDP keeps the order of forward passes elsewhere"


@pytest.mark.parametrize(
    ("ours", "theirs"), [(fsdp._Gather, "AllGather"), (fsdp._SumScatter, "ReduceScatter")]
)
def test_torch_calls_custom_collectives_as_ours_are_made(ours: type, theirs: str) -> None:
    """``set_custom_all_gather`` and similar calls accept objects with these methods."""
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    wanted = getattr(_fsdp_api, theirs)
    assert wanted.__abstractmethods__ == {"allocate", "__call__"}, (
        f"torch: FSDP's {theirs} has other methods"
    )
    for method in wanted.__abstractmethods__:
        parameters = [
            list(inspect.signature(getattr(each, method)).parameters) for each in (ours, wanted)
        ]
        assert parameters[0] == parameters[1], f"torch: FSDP calls {theirs}.{method} otherwise"


def test_torch_counts_operations_of_tensors() -> None:
    kinds = []

    def count(x: Any, y: Any, *, out_val: Any) -> int:
        kinds.extend([type(x), type(y), type(out_val)])
        return 5

    mapping = {torch.ops.aten.mm: _compat.of_tensors(count)}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert (counter.get_total_flops(), kinds) == (5, [Tensor] * 3), (
        "torch: a formula marked _get_raw is given shapes"
    )


def test_ray_train_runs_can_be_aborted() -> None:
    from ray.train.v2._internal.execution.controller.controller import TrainController

    abort = getattr(TrainController, "abort", None)
    assert inspect.iscoroutinefunction(abort), "Ray: its controller has no method that aborts"
    assert list(inspect.signature(abort).parameters) == ["self"], "Ray: aborting takes arguments"


def test_ray_train_runs_say_where_they_continue(tmp_path: Path) -> None:
    from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
    from ray.train.v2._internal.execution.checkpoint import checkpoint_manager

    latest = checkpoint_manager._TrainingResultState(checkpoint_dir_name="checkpoint_7", metrics={})
    lists = {
        name: []
        for name, kind in checkpoint_manager._CheckpointManagerState.__annotations__.items()
        if str(kind).startswith("typing.List")
    }
    state = checkpoint_manager._CheckpointManagerState(
        latest_checkpoint_result=latest, current_report_index=7, **lists
    )
    (tmp_path / CHECKPOINT_MANAGER_SNAPSHOT_FILENAME).write_text(state.model_dump_json())
    assert _compat.latest_ray_train_checkpoint(tmp_path) == tmp_path / "checkpoint_7", (
        "Ray: a run's newest checkpoint is written elsewhere"
    )


def test_google_storage_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs", reason="pip install 'lns-study[gcs]'")
    requests = []

    class Away(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(503)

        def log_message(self, *arguments: Any) -> None:
            """Do nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Away)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    try:
        storage = _compat.google_storage_asked_once()(token="anon", skip_instance_cache=True)
        with pytest.raises(Exception, match="503"):
            storage.cat_file("bucket/name")
    finally:
        server.shutdown()
        server.server_close()
    assert len(requests) == 1, "gcsfs: requests are sent again elsewhere than around _request"


def test_torch_shows_every_operator_to_a_mode() -> None:
    class Seen(_compat.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    with Seen():
        (x * x).sum().backward()
    assert seen.count(torch.ops.aten.mul.Tensor) == 3, (
        "torch: TorchDispatchMode misses operators, or those of backward"
    )
