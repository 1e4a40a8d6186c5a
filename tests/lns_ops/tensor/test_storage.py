"""An LNSTensor's memory is the memory of its codes: shared, replaced, copied and saved as such, or
refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from lns_ops import LNSTensor, convert_, lns12, lns16, revert_
from lns_ops.serialization import load_file, save_file
from lns_ops.tensor import in_float32
from tests.lns_ops.copies import through_pickle, through_torch
from tests.lns_ops.nets import GPT

VALUES = torch.tensor([[1.0, -2.0], [4.0, 0.5], [0.0, 8.0]])


def lns(values: Tensor = VALUES) -> LNSTensor:
    return LNSTensor.from_float(values, lns16)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(2, 2)
    convert_(linear, "lns16", scope="everywhere")
    return linear


def equal(x: Tensor, values: Tensor) -> bool:
    assert isinstance(x, LNSTensor)
    return (
        torch.equal(x.codes, lns(values).codes)
        and x.shape == values.shape
        and x.stride() == x.codes.stride()
    )


# --------------------------------------------------------------------------------------------------


def double(weight: LNSTensor) -> None:
    weight.mul_(2)


def test_a_shared_model_is_trained_by_another_process() -> None:
    model = layer().share_memory()
    assert model.weight.is_shared()
    assert model.weight.codes.is_shared()
    before = model.weight.to_float()
    process = mp.get_context("spawn").Process(target=double, args=(model.weight.detach(),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(model.weight.to_float(), 2 * before)


@pytest.mark.parametrize("move", ["cpu", "float", "share_memory"])
def test_a_module_that_a_graph_holds_is_moved_when_the_graph_is_gone(move: str) -> None:
    model = layer()
    out = model(torch.ones(3, 2))
    with pytest.raises(RuntimeError) as caught:
        getattr(model, move)()
    assert "delete outputs and losses first" in str(caught.value.__cause__ or caught.value)
    out.sum().backward()
    del out
    gradient = model.weight.grad.codes.clone()
    assert getattr(model, move)().weight.requires_grad
    assert torch.equal(model.weight.grad.codes, gradient)


@pytest.mark.parametrize("times", [1, 2])
def test_the_gradient_hooks_of_a_moved_module_are_called(times: int) -> None:
    model, calls = layer(), []
    model.weight.register_hook(lambda grad: calls.append("gone")).remove()
    handle = model.weight.register_hook(lambda grad: calls.append("gradient"))
    model.weight.register_hook(lambda grad: grad * 2)
    model.weight.register_post_accumulate_grad_hook(lambda x: calls.append("accumulated"))
    for _ in range(times):
        model.share_memory()._apply(lambda values: values.clone())  # as cuda() does
        model(torch.ones(1, 2)).sum().backward()
    assert calls == ["gradient", "accumulated"] * times
    assert equal(model.weight.grad, torch.full((2, 2), 2.0 * times))
    assert equal(model.bias.grad, torch.full((2,), 1.0 * times)), "hooks went to another parameter"
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls[2 * times :] == ["accumulated"]


def test_a_hook_that_comes_after_others_were_removed_and_moved_is_called() -> None:
    model, calls = layer(), []
    model.weight.register_hook(lambda grad: grad).remove()
    model.share_memory()
    model.weight.register_hook(lambda grad: calls.append("gradient"))
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["gradient"]


def test_hooks_of_a_swapped_parameter_do_not_go_to_another_module() -> None:
    hooked, plain, other, calls = layer(), layer(), layer(), []
    hooked.weight.register_hook(lambda grad: calls.append("another's"))
    torch.utils.swap_tensors(plain.weight, hooked.weight)
    for _ in range(2):
        other.share_memory()
    other(torch.ones(1, 2)).sum().backward()
    assert not calls


class Examples(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": lns(VALUES * index), "y": (LNSTensor.from_float(VALUES[0], lns12), index)}


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_workers_hand_on_codes(workers: int) -> None:
    batches = list(DataLoader(Examples(), batch_size=2, num_workers=workers))
    for start, batch in zip((0, 2), batches, strict=True):
        factors = torch.tensor([start, start + 1])
        assert equal(batch["x"], VALUES * factors[:, None, None])
        assert batch["x"].codes.is_shared() == bool(workers)
        y, index = batch["y"]
        assert (y.fmt, index.tolist()) == (lns12, factors.tolist())


def test_pinned_memory_is_that_of_the_codes() -> None:
    assert not lns().is_pinned()
    if torch.cuda.is_available():
        x = lns().pin_memory()
        assert x.is_pinned()
        assert x.codes.is_pinned()
        assert equal(x, VALUES)


def test_other_libraries_get_values() -> None:
    x = lns(VALUES[0])
    for other in (x.numpy(), np.asarray(x), np.from_dlpack(x), torch.from_dlpack(x), x.half()):
        assert not isinstance(other, LNSTensor)
        assert other.tolist() == x.tolist() == [1, -2]
    assert torch.equal(torch.from_dlpack(x.codes), x.codes)
    assert f"{x[1]:.3f} {x[1]:+.1e}" == "-2.000 -2.0e+00"


# -------------------------------------------------------------------------------------------------


def test_assigning_data_replaces_the_codes_and_shares_them() -> None:
    parameter, before, other = nn.Parameter(lns()), lns(), lns(VALUES[:2] * 2)
    view = parameter.detach()
    parameter.data = other
    assert equal(parameter, VALUES[:2] * 2)
    assert parameter.requires_grad
    assert equal(parameter * 1, VALUES[:2] * 2)
    other.zero_()
    assert not parameter.any()
    assert torch.equal(view.codes, before.codes), "views of the earlier values keep them"
    other.t_()
    assert parameter.stride() == parameter.codes.stride() == (2, 1)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.ones(3, 2), "float32 tensor"),
        (LNSTensor.from_float(torch.ones(3, 2), lns12), "in lns12"),
    ],
)
def test_data_of_another_kind_is_refused(other: Tensor, said: str) -> None:
    parameter = nn.Parameter(lns())
    with pytest.raises(ValueError, match=f"data.*{said}.*from_float"):
        parameter.data = other
    assert equal(parameter, VALUES)


def test_vector_to_parameters_writes_them() -> None:
    model = layer()
    wanted = parameters_to_vector(model.parameters()).detach() * 2
    vector_to_parameters(wanted, model.parameters())
    assert torch.equal(parameters_to_vector(model.parameters()).codes, wanted.codes)
    y = model(torch.ones(1, 2))
    assert torch.equal(y.codes, (lns(torch.ones(1, 2)) @ model.weight.t() + model.bias).codes)
    with pytest.raises(ValueError, match="from_float"):
        vector_to_parameters(torch.ones(6), model.parameters())


def test_set_takes_another_tensors_memory() -> None:
    x, source = lns(), lns(VALUES * 2)
    earlier = x.detach()
    x.set_(source[1:])
    assert equal(x, VALUES[1:] * 2)
    source.zero_()
    assert not x.any()
    assert equal(earlier, VALUES)
    with pytest.raises(ValueError, match=r"set_.*float32 tensor"):
        x.set_(torch.ones(2))
    with pytest.raises(ValueError, match=r"set_.*LNSTensor"):
        torch.ones(2).set_(x)
    for refused in (lambda: x.resize_(9), lambda: x.set_(x.codes.untyped_storage(), 0, (2,), (1,))):
        with pytest.raises(ValueError, match=r"x\.codes"):
            refused()


# --------------------------------------------------------------------------------------------------


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "row": lambda x: x[1],
    "rows": lambda x: x[1:],
    "turned": lambda x: x.t()[1],
    "one value": lambda x: x[2, 1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("copied", COPIES)
def test_views_are_copied(copied: str, view: str) -> None:
    x = VIEWS[view](lns())
    y = COPIES[copied](x)
    assert equal(y, VIEWS[view](VALUES))
    assert (y.stride(), y.storage_offset(), y.fmt) == (x.stride(), x.storage_offset(), lns16)
    y.zero_()
    assert equal(x, VIEWS[view](VALUES))


# pickle writes every storage separately, torch's own too
@pytest.mark.parametrize("copied", ["deepcopy", "torch.save"])
def test_tensors_that_share_memory_share_it_in_the_copy(copied: str) -> None:
    whole = lns()
    both = COPIES[copied]({"whole": whole, "row": whole[1], "again": whole})
    both["whole"].zero_()
    assert not both["row"].any()
    assert not both["again"].any()


@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_parameters_are_parameters(copied: str) -> None:
    parameter = COPIES[copied](nn.Parameter(lns()[1:], requires_grad=False))
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad
    assert COPIES[copied](nn.Parameter(lns())).requires_grad


def test_a_model_is_copied_after_a_backward_pass_through_cat() -> None:
    model = layer()
    (torch.cat([model.weight.flatten(), model.bias]) * lns(torch.arange(1.0, 7.0))).sum().backward()
    copied = copy.deepcopy(model)
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert mine is not theirs
        assert torch.equal(mine.codes, theirs.codes)
        assert isinstance(mine.grad, LNSTensor)
        assert torch.equal(mine.grad.codes, theirs.grad.codes)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(model.weight * 2)


def test_files_of_earlier_versions_load(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, x = io.BytesIO(), nn.Parameter(lns())
    with monkeypatch.context() as earlier:
        earlier.delattr(LNSTensor, "__reduce_ex__")
        torch.save({"x": x}, buffer)
    buffer.seek(0)
    y = torch.load(buffer, weights_only=True)["x"]
    assert equal(y, VALUES)
    assert isinstance(y, nn.Parameter)


def test_pointers_are_refused_with_the_remedy(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, path = layer(), tmp_path / "model.safetensors"
    for write in (
        lambda: safetensors.save_model(model, str(path)),
        lambda: safetensors.save_file(model.state_dict(), str(path)),
        lambda: safetensors.save(model.state_dict()),
        model.weight.storage,
    ):
        with pytest.raises(ValueError, match=r"lns_ops\.serialization\.save_file.*torch\.save"):
            write()
    assert not path.exists()
    save_file(model.state_dict(), path)
    read: Any = load_file(path)["weight"]
    assert torch.equal(read.codes, model.weight.codes)


# --------------------------------------------------------------------------------------------------

INFERENCE_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "x[0]": lambda x: x[0],
    "x[1:]": lambda x: x[1:],
    "t": lambda x: x.t(),
    "mT": lambda x: x.mT,
    "expand": lambda x: x[:, :1].expand(3, 2),
    "view": lambda x: x.view(-1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: x.split([1, 2]),
    "unbind": lambda x: x.unbind(1),
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2,), (3,), 1),
    "movedim": lambda x: x.movedim(0, 1),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("name", INFERENCE_VIEWS)
def test_views_in_inference_mode(name: str) -> None:
    view, outside = INFERENCE_VIEWS[name], lns()
    with torch.inference_mode():
        inside = lns()
        for x in (outside, inside, outside * 1):
            results, expected = view(x), view(VALUES)
            for got, want in zip(
                [results] if isinstance(results, Tensor) else results,
                [expected] if isinstance(expected, Tensor) else expected,
                strict=True,
            ):
                assert equal(got, want)
                assert equal(got + got, 2 * want)
        view_of_outside = view(outside)
    first = view_of_outside if isinstance(view_of_outside, Tensor) else view_of_outside[0]
    first.zero_()
    assert (outside.codes == 0).sum() > (VALUES == 0).sum(), "a view shares memory"


def test_moving_averages_are_kept_in_float32() -> None:
    """In LNS a decay of 0.999 never moves the value; the warning names the remedy."""
    model, decay = layer(), get_ema_multi_avg_fn(0.999)
    stuck = AveragedModel(model, multi_avg_fn=decay)
    average = AveragedModel(revert_(copy.deepcopy(model)), multi_avg_fn=decay)
    for each in (stuck, average):
        each.update_parameters(model)
    before, start = model.weight.to_float(), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.warns(UserWarning, match=r"weight of 0\.001 in lns16.*never changes.*revert_"):
        stuck.update_parameters(model)
    for _ in range(1_000):
        average.update_parameters(model)
    assert torch.equal(stuck.module.weight.codes, start.codes)
    expected = before * (2 - 0.999**1_000)
    assert torch.allclose(average.module.weight, expected, rtol=1e-4)  # 1,000 roundings of float32


def test_a_decay_that_counts_as_one_is_said() -> None:
    model = layer()
    average, others = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999)), copy.deepcopy(model)
    average.update_parameters(model)
    for decay in (
        lambda: average.update_parameters(model),
        lambda: others.weight.detach().mul_(0.999).add_(model.weight, alpha=0.001),
    ):
        with pytest.warns(UserWarning, match=r"by 0\.999 in lns16: .*never changes.*revert_"):
            decay()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (0.98, 1.0, 1.001, -0.999, 1):
            model.weight.detach().mul_(factor)


@pytest.mark.parametrize("module", ["half", "double", "bfloat16"])
def test_a_module_of_another_width_is_turned_back_first(module: str) -> None:
    model = layer()
    with pytest.raises(ValueError, match=r"lns_ops\.revert_"):
        getattr(model, module)()
    getattr(revert_(model), module)()


@pytest.mark.parametrize("left_out", [None, "0", "2"])
@pytest.mark.parametrize("foreach", [True, False])
def test_lists_of_gradients_are_clipped_lns_and_float32_ones(
    foreach: bool, left_out: str | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    convert_(model, "lns16", "everywhere", lambda module, name: name != left_out)

    def gradients() -> Tensor:
        grads: Any = [p.grad for p in model.parameters()]
        return torch.cat([in_float32(grad).flatten() for grad in grads])

    in_float32(model(torch.ones(4, 2))).square().sum().backward()
    before, half_a_step = gradients(), lns16.epsilon / 2
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    assert float(norm) == pytest.approx(before.norm().item(), rel=4 * half_a_step)
    assert gradients().norm().item() == pytest.approx(1, rel=4 * half_a_step)
    nn.utils.clip_grad_value_(model.parameters(), 0.125, foreach=foreach)
    assert gradients().abs().max() == 0.125
    kinds = [isinstance(p.grad, LNSTensor) for p in model.parameters()]
    assert kinds == [left_out != "0"] * 2 + [left_out != "2"] * 2


@pytest.mark.parametrize("fused", [True, False])
def test_a_converted_net_infers_in_inference_mode(fused: bool) -> None:
    torch.manual_seed(0)
    model, tokens = (
        convert_(GPT(layers=1, fused=fused).eval(), "lns16", scope="everywhere"),
        torch.randint(0, 20, (2, 8)),
    )
    with torch.inference_mode():
        inferred = model(tokens)
    assert torch.equal(inferred.codes, model(tokens).codes)
