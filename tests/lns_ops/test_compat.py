"""Private names of other libraries are still as this package expects; each failure names the
library that changed."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from numba.core.registry import cpu_target
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.data import default_collate

from lns_ops import LNSTensor, _compat, convert_, cuda, lns12
from lns_ops.cpu.compiler import object_cache
from lns_ops.cpu.compiler.intrinsics import helper, processor, scratch
from lns_ops.tensor import gradient_sums

aten = torch.ops.aten


class _Seen(Tensor):
    """A subclass that records torch's calls."""

    functions: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        with _compat.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def test_torch_makes_tensors_without_memory() -> None:
    made = _compat.make_wrapper_subclass(LNSTensor, (2, 3), dtype=torch.float32)
    assert (type(made), made.shape, made.dtype) == (LNSTensor, (2, 3), torch.float32), (
        "torch: Tensor._make_wrapper_subclass makes something else"
    )


def test_torch_functions_can_be_torchs_own() -> None:
    x = torch.ones(2).as_subclass(_Seen)
    _Seen.functions.clear()
    with _compat.DisableTorchFunction():
        y = torch.add(x, 1.0)
    assert _Seen.functions == [], "torch: DisableTorchFunctionSubclass still asks the subclass"
    assert y.tolist() == [2.0, 2.0]


def test_torch_tells_who_adds_up_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def add(x: Any, y: Any) -> None:
        caller = sys._getframe(3)
        while caller.f_code.co_name in _compat.dispatching and caller.f_back is not None:
            caller = caller.f_back
        if _compat.graph_task() != -1:
            nodes = [_compat.next_nodes(torch.Size((n,))) for n in (2, 3)]
            seen.append((caller.f_code is _compat.engine_code, nodes))

    monkeypatch.setattr(gradient_sums, "summed", add)
    x = LNSTensor.from_float(torch.ones(2)).requires_grad_()
    assert _compat.graph_task() == -1, "torch: _current_graph_task_id is no -1 outside of a pass"
    (x * 2.0 + x * 3.0).sum().backward()
    assert seen == [(True, [[-id(x)], []])], "torch: the engine adds gradients up from elsewhere"


def test_torch_says_when_it_exports_and_not_when_it_compiles() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if _compat.is_exporting() else x - 1

    net, x = Asks(), torch.ones(1)
    assert torch.export.export(net, (x,)).module()(x).item() == 2, "torch: no flag for exports"
    assert torch.compile(net, backend="eager")(x).item() == 0, "torch: compiling sets the flag"
    assert net(x).item() == 0


def test_torch_operators_can_act_on_the_wrapper_alone() -> None:
    x = LNSTensor.from_float(torch.ones(2, 3))
    with _compat.no_dispatch():
        aten.t_.default(x)
    assert (x.shape, x.codes.shape) == ((3, 2), (2, 3)), (
        "torch: no_dispatch goes to the subclass, or leaves the wrapper's shape"
    )


def test_torch_counts_who_holds_a_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    alone = _compat.use_count(x)
    y = x * 2
    held = _compat.use_count(x)
    assert (alone, held) == (1, 2), "torch: _use_count does not count the graph that holds a leaf"
    del y


def test_torch_adds_to_a_list_of_tensors() -> None:
    counts = [torch.tensor(n) for n in (1, 5)]
    _compat.foreach_add_(counts, 1)
    assert [int(count) for count in counts] == [2, 6], "torch: _foreach_add_ adds otherwise"


def test_torch_asks_a_parameter_that_moves_who_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    layer = convert_(nn.Linear(2, 2), lns12, scope="everywhere")
    count = getattr(LNSTensor, _compat.USE_COUNT)
    monkeypatch.setattr(LNSTensor, _compat.USE_COUNT, lambda x: asked.append(1) or count(x))
    layer.share_memory()
    assert len(asked) >= 2, "torch: Module.to does not ask _use_count of a parameter"


def test_torch_says_whether_a_transform_goes_on() -> None:
    said = []

    def asks(x: Tensor) -> Tensor:
        said.append(_compat.is_transforming())
        return x.sum()

    asks(torch.ones(2))
    torch.func.grad(asks)(torch.ones(2))
    torch.func.vmap(asks)(torch.ones(2, 2))
    assert said == [False, True, True], "torch: transforms are detected differently"


def test_torch_tells_of_forward_mode() -> None:
    said = [_compat.is_forward_mode()]
    with torch.autograd.forward_ad.dual_level():
        said.append(_compat.is_forward_mode())
    torch.func.jvp(
        lambda x: (said.append(_compat.is_forward_mode()), x)[1], (torch.ones(1),), (torch.ones(1),)
    )
    assert said == [False, True, True], "torch: forward mode is detected differently"


def test_torch_leaves_keep_their_hooks_where_they_are_moved() -> None:
    old, new = (torch.ones(1, requires_grad=True) for _ in range(2))
    calls: list[str] = []
    handle = old.register_hook(lambda grad: calls.append("gone"))
    old.register_hook(lambda grad: calls.append("gradient"))
    old.register_post_accumulate_grad_hook(lambda x: calls.append("accumulated"))
    assert len(_compat.tensor_hooks(old)) == 2, "torch: gradient hooks are kept elsewhere"
    _compat.move_tensor_hooks(old, new)
    handle.remove()
    new.sum().backward()
    assert calls == ["gradient", "accumulated"], "torch: gradient hooks cannot be moved"


def test_torch_leaves_keep_their_hooks_where_they_are_swapped() -> None:
    kept, moved = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    calls: list[str] = []
    kept.register_hook(lambda grad: calls.append("gradient"))
    kept.register_post_accumulate_grad_hook(lambda x: calls.append("accumulated"))
    assert not _compat.has_tensor_hooks(moved)
    _compat.share_tensor_hooks(kept, moved)
    torch.utils.swap_tensors(kept, moved)
    kept.sum().backward()
    assert calls == ["gradient", "accumulated"], "torch: swapped leaves call other hooks"


def test_openmp_has_a_team_call_a_function() -> None:
    if "gomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("torch has no OpenMP of GNU's here")
    team, calls = _compat.openmp_team(), []
    assert team is not None, "torch: its OpenMP is not found by name"
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(calls.append)
    team(ctypes.cast(function, ctypes.c_void_p).value or 0, 5, 2, 0)
    assert calls == [5, 5], "OpenMP: GOMP_parallel takes other arguments"


def test_torch_names_its_operators_between_processes() -> None:
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("torch.distributed.tensor")
    found = {name.partition("::")[0] for name in _compat.operator_names()}
    assert found >= _compat.COLLECTIVES, (
        f"torch: there are no operators of {_compat.COLLECTIVES - found}, so others come between"
        " processes unrefused"
    )


def test_torch_walks_nested_arguments() -> None:
    nested = ([1, (2,)], {"a": 3})
    assert _compat.tree_map(lambda n: 2 * n, nested) == ([2, (4,)], {"a": 6}), (
        "torch: tree_map visits other leaves"
    )
    assert _compat.tree_leaves(nested) == [1, 2, 3], "torch: tree_leaves visits other leaves"


def test_torch_writes_values_without_a_name() -> None:
    assert _compat.tensor_text(torch.tensor([1.0, 2.5]), 10) == "[1.0000, 2.5000]", (
        "torch: _tensor_str writes tensors otherwise"
    )


def test_torch_packs_sequences_by_the_functions_that_are_replaced() -> None:
    long, short = torch.ones(3).as_subclass(_Seen), torch.ones(2).as_subclass(_Seen)
    _Seen.functions.clear()
    padded = rnn.pad_sequence([long, short]).as_subclass(_Seen)
    packed = rnn.pack_padded_sequence(padded, torch.tensor([3, 2]))
    rnn.pad_packed_sequence(packed._replace(data=packed.data.as_subclass(_Seen)))
    wanted = {_compat.pack_padded_sequence, _compat.pad_packed_sequence, _compat.pad_sequence}
    assert wanted <= set(_Seen.functions), (
        f"torch: torch.nn.utils.rnn does not call {wanted - set(_Seen.functions)}"
    )


def test_torch_normalizes_weights_and_multiplies_groups_by_the_functions_that_are_replaced() -> (
    None
):
    _Seen.functions.clear()
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    norms = layer.parametrizations.weight
    norms[0](norms.original0.as_subclass(_Seen), norms.original1.as_subclass(_Seen))
    groups = torch.ones(1, 16, 16).as_subclass(_Seen), torch.tensor([16], dtype=torch.int32)
    F.grouped_mm(torch.ones(16, 16).as_subclass(_Seen), groups[0], offs=groups[1])
    wanted = {_compat.weight_norm}
    assert wanted <= set(_Seen.functions), "torch: weight_norm calls another function"
    assert {_compat.grouped_mm, F.grouped_mm} & set(_Seen.functions), (
        "torch: grouped_mm calls another function"
    )


def test_torch_draws_shares_by_the_function_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(torch, "_sample_dirichlet", lambda x: seen.append(x) or x)
    torch.distributions.Dirichlet(torch.ones(2)).sample()
    assert seen, "torch: Dirichlet draws by another function"


def test_torch_operators_say_what_they_write_to() -> None:
    operators = (aten.add.Tensor, aten.add_.Tensor, aten.add.out)
    written = [[a.name for a in _compat.written_arguments(each)] for each in operators]
    assert written == [[], ["self"], ["out"]], "torch: schemas show writes differently"


def test_torch_multiplies_float8() -> None:
    x, y = torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(16, 32).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    out = _compat.scaled_mm(x, y.t(), scale, scale, out_dtype=torch.float32, use_fast_accum=False)
    assert out.unique().tolist() == [8.0], "torch: _scaled_mm scales otherwise"


def test_torch_loaders_look_up_types_of_examples() -> None:
    x = LNSTensor.from_float(torch.ones(2), lns12)
    assert type(default_collate([x, x])) is LNSTensor, "torch: batches are made otherwise"
    assert LNSTensor in _compat.collate_functions


@pytest.mark.parametrize("padding", ["same", (1, 2)])
def test_torch_convolutions_know_their_padding(padding: Any) -> None:
    layer = nn.Conv2d(1, 1, (2, 4), padding=padding, padding_mode="circular", bias=False)
    x = torch.randn(1, 1, 5, 6)
    padded = F.pad(x, _compat.reversed_padding(layer), mode="circular")
    assert torch.equal(F.conv2d(padded, layer.weight), layer(x)), (
        "torch: convolutions keep their padding otherwise"
    )


def test_torch_modules_hold_their_hooks() -> None:
    class Hook:
        calls = 0

        def __call__(self, *arguments: Any) -> None:
            self.calls += 1

    gone, stays, module = Hook(), [], nn.Identity()
    module.register_forward_pre_hook(gone, with_kwargs=True)
    module.register_forward_hook(gone)
    module.register_forward_pre_hook(lambda module, arguments: stays.append(arguments))
    _compat.remove_forward_hooks(module, (Hook,))
    module(1)
    assert (gone.calls, stays) == (0, [(1,)]), "torch: modules hold their forward hooks otherwise"


def test_torch_tells_within_which_replica_a_layer_runs(tmp_path: Path) -> None:
    seen = []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda *_: seen.append(_compat.active_replicas()))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(module)
        known = list(module.parameters())
        module.weight = nn.Parameter(torch.ones(2, 2))
        wrapped(torch.ones(1, 2))
        module(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    assert [each is wrapped for each in seen] == [True, False], (
        "torch: DistributedDataParallel._active_ddp_module is not the one whose forward runs"
    )
    assert seen[1] is None
    found = _compat.replicated_parameters(wrapped)
    assert all(a is b for a, b in zip(found, known, strict=True)), (
        "torch: DistributedDataParallel._module_parameters are not those that it wrapped"
    )


COMPILER = f"""
import sys, torch, lns_ops
from lns_ops.tensor import dynamo
parameters = [torch.nn.Parameter(torch.ones(2))]
lns_ops.optim.SGD(parameters, lr=0.1).zero_grad()
print({_compat.COMPILER!r} in sys.modules)
torch.optim.SGD(parameters, lr=0.1)
print({_compat.COMPILER!r} in sys.modules, len(dynamo._waiting))
"""


def test_torch_optimizers_load_the_compiler() -> None:
    """It is the compiler that both :mod:`lns_ops.optim` and :mod:`lns_ops.tensor.dynamo`
    exclude."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILER], capture_output=True, text=True, check=True
    )
    ours, theirs = done.stdout.splitlines()
    assert ours == "False", "torch: Optimizer wraps its methods otherwise, ours load the compiler"
    assert theirs == "True 0", (
        "torch: its optimizers load no compiler any more (without_compiler can go), or the compiler"
        " does not know the functions that wait for it"
    )


def test_torch_names_the_current_device_and_stream() -> None:
    """The file of types lists them in builds without CUDA, too."""
    stub = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    for line in (
        "def _cuda_getDevice() -> _int",
        "def _cuda_getCurrentRawStream(device: _int) -> _int",
    ):
        assert line in stub, f"torch: there is no `{line}`, launches take the slower public way"


@pytest.mark.skipif(bool(cuda.unavailable()), reason="no CUDA backend")
def test_cuda_launches_where_torch_computes() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert _compat.current_device() == torch.cuda.current_device(), "torch: another device"
        assert _compat.current_stream(_compat.current_device()) == stream.cuda_stream, (
            "torch: _cuda_getCurrentRawStream is not CUDA's handle"
        )
    assert callable(_compat.cupy_driver().launchKernel), "CuPy: cupy_backends launches otherwise"


def _same(x: Any) -> Any:
    return x


@pytest.mark.parametrize("options", [{}, _compat.NO_REFERENCE_COUNTS])
def test_numba_leaves_reference_counts_out(options: dict[str, Any]) -> None:
    compiled = numba.njit("int16[::1](int16[::1])", **options)(_same)
    (code,) = compiled.inspect_llvm().values()
    assert ("NRT_incref" in code) == (not options), "numba: the option _nrt does something else"


def test_numba_structures_have_a_value() -> None:
    @helper
    def squares(n: int) -> int:
        values = scratch(n, np.int64)
        for i in range(n):
            values[i] = i * i
        return values.sum()

    assert squares(5) == 30, "numba: arrays are made otherwise of their parts"


def test_numba_compiles_for_the_processor_that_machine_code_is_kept_for() -> None:
    assert processor()[1] == cpu_target.target_context.codegen()._tm_features, (
        "numba: it compiles for other features"
    )


def test_numpy_arrays_lie_in_memory_as_kernels_read_them() -> None:
    """It raises an error if the layout differs."""
    object_cache._check_array_layout.__wrapped__()


def test_torch_modules_keep_what_they_register_in_three_tables() -> None:
    module = nn.Module()
    module.register_parameter("a", nn.Parameter(torch.ones(1)))
    module.register_buffer("b", torch.ones(1))
    module.register_module("c", nn.Identity())
    found = tuple(table for table in vars(module) if vars(module)[table] and table[:1] == "_")
    held = {name for table in _compat.MODULE_TABLES for name in vars(module)[table]}
    assert held == {"a", "b", "c"}, f"torch: a module keeps these in {found}"


def test_torch_tells_its_operators_and_their_kernels() -> None:
    names = _compat.operator_names()
    assert "aten::relu" in names, "torch: operators are named otherwise"
    assert _compat.has_kernel("aten::relu", "CPU"), "torch: kernels are found by other keys"
    module = torch.nn.functional.gelu.__module__
    assert module.startswith(_compat.WRITTEN_IN_CPP), f"torch: gelu's module is {module}"
