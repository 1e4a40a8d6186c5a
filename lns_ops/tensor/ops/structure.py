"""Operations that move values without changing them: torch's own operations, applied to the codes.

Zero has the code 0, so padding with zeros is such an operation, too.

Operations on a tensor's memory also use the codes, because the float32 memory that torch expects
does not exist. Sharing memory between processes and replacing it (``x.data = y``, ``x.set_(y)``,
``vector_to_parameters``) act on the codes. Access to the storage, which safetensors' ``save_model``
and Accelerate's ``save_state`` need, raises, because they would read 4 bytes a value instead of 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import (
    USE_COUNT,
    DisableTorchFunction,
    collate_functions,
    has_tensor_hooks,
    no_dispatch,
    sample_dirichlet,
    share_tensor_hooks,
    use_count,
)
from lns_ops.cuda import raise_seen
from lns_ops.tensor import draws
from lns_ops.tensor.integers import taken_out
from lns_ops.tensor.lns_tensor import LNSTensor, in_float32, operands
from lns_ops.tensor.ops.ordering import finite
from lns_ops.tensor.promotion import takes_floats
from lns_ops.tensor.registry import VIEWS, aten, handles, replaces, replaces_untraced

takes_floats(
    torch.Tensor.data.__set__, torch.Tensor.grad.__set__,  # type: ignore[attr-defined, union-attr]
    torch.Tensor.to, torch.Tensor.type_as, aten.copy_.default, aten.set_.source_Tensor,
    aten.equal.default,
    torch.Tensor.view_as, torch.Tensor.expand_as, torch.Tensor.reshape_as, aten.view_as.default,
    aten.expand_as.default, aten.reshape_as.default,
)  # fmt: skip


@handles(
    aten._unsafe_view.default, aten.alias.default, aten.clone.default, aten.squeeze.default,
    aten.squeeze.dims, aten.slice.Tensor, aten.index.Tensor,
    aten.index_select.default, aten.as_strided.default, aten.lift_fresh.default,
    aten.unfold.default, aten.diagonal.default, aten.flip.default, aten.roll.default,
    aten.repeat.default, aten.tril.default, aten.triu.default, aten.gather.default,
    aten.take.default, aten.masked_select.default, aten.select_backward.default,
    aten.slice_backward.default, aten.diagonal_backward.default, aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default, aten._reshape_alias.default, aten.view_copy.default,
    aten.permute_copy.default, aten.expand_copy.default, aten.diag_embed.default,
    aten._unsafe_index.Tensor, aten.rot90.default, aten.channel_shuffle.default,
    aten.diagonal_copy.default, aten.select_copy.int, aten.slice_copy.Tensor,
    aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
    aten.unsqueeze_copy.default, aten.transpose_copy.int, aten.t_copy.default,
    aten.alias_copy.default, aten.unfold_copy.default, aten.as_strided_copy.default,
    aten.detach_copy.default,
)  # fmt: skip
def _structural(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> LNSTensor:
    return LNSTensor(func(x.codes, *args, **kwargs), x.fmt)


_METHODS: dict[Any, Callable[..., Tensor]] = {
    aten.detach.default: Tensor.detach, aten.t.default: Tensor.t, aten.view.default: Tensor.view,
    aten.transpose.int: Tensor.transpose, aten.permute.default: Tensor.permute,
    aten.expand.default: Tensor.expand, aten.unsqueeze.default: Tensor.unsqueeze,
    aten.squeeze.dim: Tensor.squeeze, aten.select.int: Tensor.select,
}  # fmt: skip
"""The most frequent views as methods, which take a third of the time of operators."""


@handles(*_METHODS)
def _view(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> LNSTensor:
    return LNSTensor(_METHODS[func](x.codes, *args, **kwargs), x.fmt)


VIEWS.update(_METHODS, (aten.slice.Tensor, aten.split.Tensor, aten.unbind.int))


@handles(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def _parts(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> list[LNSTensor]:
    return [LNSTensor(part, x.fmt) for part in func(x.codes, *args, **kwargs)]


@handles(aten.cat.default, aten.stack.default, aten.block_diag.default)
def _joined(func: Any, tensors: list[Tensor], *dim: int) -> Tensor:
    formats = {t.fmt for t in tensors if isinstance(t, LNSTensor)}
    if len(formats) > 1 and not any(t.dim() for t in tensors):
        # clip_grad_norm_ stacks norms of gradients in several formats
        return func([in_float32(t) for t in tensors], *dim)  # type: ignore[no-any-return]
    fmt = next(t.fmt for t in tensors if isinstance(t, LNSTensor))
    empty = LNSTensor(torch.zeros((), dtype=torch.int16), fmt)
    codes = []
    for tensor in tensors:
        if isinstance(tensor, LNSTensor):
            codes.append(operands(func, tensor, empty)[0])
        elif tensor.numel():
            codes.append(operands(func, empty, tensor)[1])
        else:
            codes.append(tensor.to(torch.int16))
    return LNSTensor(func(codes, *dim), fmt)


@handles(aten.constant_pad_nd.default)
def _padded(func: Any, x: LNSTensor, padding: list[int], value: Any = 0) -> LNSTensor:
    codes, filling, fmt = (
        operands("pad", x, finite(value, x.fmt)) if value else (x.codes, None, x.fmt)
    )
    return LNSTensor(func(codes, padding, 0 if filling is None else int(filling)), fmt)


@handles(aten._to_copy.default)
def _to_copy(func: Any, x: LNSTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Return a copy; for a dtype other than float32, a copy of the decoded values."""
    if dtype not in (None, torch.float32):
        return func(_values_for(x, dtype), dtype=dtype, **kwargs)  # type: ignore[no-any-return]
    codes = func(x.codes, **kwargs)
    if not codes.is_cuda:  # the host has waited for the copy, unless it is non-blocking
        raise_seen(x.codes.get_device())
    return LNSTensor(codes, x.fmt)


def _values_for(x: LNSTensor, dtype: torch.dtype) -> Tensor:
    """Return the values for another dtype; for an integer dtype, with integers restored."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return in_float32(x)
    return taken_out(x.codes, x.fmt)


_DTYPES = {
    torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64, torch.Tensor.int: torch.int32,
    torch.Tensor.long: torch.int64, torch.Tensor.short: torch.int16, torch.Tensor.char: torch.int8,
    torch.Tensor.byte: torch.uint8, torch.Tensor.bool: torch.bool,
}  # fmt: skip


@replaces_untraced(torch.Tensor.type)
def type_of(self: LNSTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Return torch's name of the type, or the values in another type, as ``Tensor.type`` does."""
    like = torch.empty(0, device=self.device)
    if dtype is None:
        return like.type()
    return to(self, like.type(dtype).dtype, non_blocking=non_blocking)


@replaces(torch.Tensor.to, torch.Tensor.type_as)
def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Convert as ``Tensor.to`` does; any dtype other than float32 decodes the values."""
    wanted = [
        a.dtype if isinstance(a, Tensor) else a
        for a in (*args, *kwargs.values())
        if isinstance(a, (Tensor, torch.dtype))
    ]
    if wanted and wanted[0] != torch.float32 and isinstance(self, LNSTensor):
        return _values_for(self, wanted[0]).to(*args, **kwargs)
    with DisableTorchFunction():
        return torch.Tensor.to(self, *args, **kwargs)


def _takes_out(dtype: torch.dtype) -> Any:
    def convert(self: LNSTensor, *args: Any, **kwargs: Any) -> Tensor:
        return _values_for(self, dtype).to(dtype, *args, **kwargs)

    return convert


for _method, _dtype in _DTYPES.items():
    replaces(_method)(_takes_out(_dtype))


@replaces_untraced(torch.Tensor.__int__)
def integer(self: LNSTensor) -> int:
    """Return ``int(x)``."""
    return int(self.long().item())


@handles(
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def _zeros(func: Any, x: LNSTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Return zeros for an operator that allocates memory.

    Memory is never left uninitialized, because not every int16 word is a code.
    """
    if dtype not in (None, torch.float32):
        return func(x.codes, *args, dtype=dtype, **kwargs)
    zeros = aten.zeros_like.default if func is aten.empty_like.default else func
    return LNSTensor(zeros(x.codes, *args, dtype=torch.int16, **kwargs).zero_(), x.fmt)


@handles(
    aten.ones_like.default, aten.new_ones.default, aten.full_like.default, aten.new_full.default
)
def _full(func: Any, x: LNSTensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    ones = func in (aten.ones_like.default, aten.new_ones.default)
    *shape, value = (*args, 1.0) if ones else args
    if dtype not in (None, torch.float32):
        return func(x.codes, *args, dtype=dtype, **kwargs)
    code = int(operands(func, x, draws.own_limit(finite(value, x.fmt), x.fmt))[1])
    like = (
        aten.full_like.default
        if func in (aten.ones_like.default, aten.full_like.default)
        else aten.new_full.default
    )
    return LNSTensor(like(x.codes, *shape, code, dtype=torch.int16, **kwargs), x.fmt)


@handles(aten.copy_.default)
def _copy(func: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, LNSTensor):
        x.copy_(_values_for(source, x.dtype))
        return x
    if isinstance(source, (int, float)):
        return x.fill_(source)
    same = isinstance(source, LNSTensor) and source.fmt == x.fmt
    value = (
        lns.decode(source.codes, source.fmt)
        if isinstance(source, LNSTensor) and not same
        else source
    )
    x.codes.copy_(value.codes if isinstance(value, LNSTensor) else lns.encode(value, x.fmt))
    return x


@handles(aten.zero_.default)
def _zero(func: Any, x: LNSTensor) -> LNSTensor:
    x.codes.zero_()
    return x


@handles(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill(func: Any, x: LNSTensor, value: Any) -> LNSTensor:
    x.codes.copy_(operands("fill_", x, finite(value, x.fmt))[1])
    return x


@handles(aten.uniform_.default)
def _uniform(func: Any, x: LNSTensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Any:
    """Draw in float32 and encode within the bounds."""
    values = func(_float32_like(x), low, high, **kwargs)
    x.codes.copy_(draws.within(values, low, high, x.fmt))
    return x


@handles(aten.normal_.default, aten.bernoulli_.float)
def _random(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> LNSTensor:
    """Draw random numbers in float32 and encode them: initialization and dropout masks."""
    x.codes.copy_(lns.encode(func(_float32_like(x), *args, **kwargs), x.fmt))
    return x


@handles(aten.bernoulli.p)
def _bernoulli(func: Any, x: LNSTensor, p: float, *, generator: Any = None) -> LNSTensor:
    return LNSTensor(lns.encode(func(_float32_like(x), p, generator=generator), x.fmt), x.fmt)


@replaces_untraced(sample_dirichlet)
def dirichlet(concentration: LNSTensor, generator: Any = None) -> Tensor:
    """Draw shares whose LNS sum is exactly one, which torch.distributions checks.

    Dividing by the sum shifts all codes by the same amount, so the sum of the quotients is exact.
    Shares are positive: the smallest one is an octave above the smallest magnitude, so that no
    quotient underflows.
    """
    values = sample_dirichlet(concentration.to_float(), generator)
    fixed = values.detach()
    values = values + (fixed.clamp_min(2 * concentration.fmt.smallest) - fixed)
    drawn = LNSTensor.from_float(values, concentration.fmt)
    return drawn / drawn.sum(-1, keepdim=True)


def _float32_like(x: LNSTensor) -> Tensor:
    """Return an empty tensor with the strides of ``x``, because torch draws in memory order."""
    return torch.empty_like(x.codes, dtype=torch.float32)


@handles(aten.native_dropout.default)
def _dropout(func: Any, x: LNSTensor, p: float, train: bool | None) -> tuple[LNSTensor, Tensor]:
    """Return the kept values times the code of ``1 / (1 - p)``, and the mask."""
    if train is False or p == 0:
        return LNSTensor(x.codes.clone(), x.fmt), torch.ones_like(x.codes, dtype=torch.bool)
    mask = torch.native_dropout(torch.ones_like(x.codes, dtype=torch.float32), p, True)[1]
    return _dropout_backward(func, x, mask, 1 / (1 - p) if p < 1 else 0.0), mask


@handles(aten.native_dropout_backward.default)
def _dropout_backward(func: Any, grad: LNSTensor, mask: Tensor, scale: float) -> LNSTensor:
    codes, factor, fmt = operands("dropout", grad, scale)
    return LNSTensor(lns.select(mask, lns.mul(codes, factor, fmt), 0), fmt)


@handles(aten._local_scalar_dense.default)
def _item(func: Any, x: LNSTensor) -> float:
    value = lns.decode(x.codes, x.fmt).item()
    raise_seen(x.codes.get_device())
    return value


@handles(aten.is_pinned.default)
def _is_pinned(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> bool:
    return x.codes.is_pinned()


@handles(aten._pin_memory.default)
def _pin_memory(func: Any, x: LNSTensor, *args: Any, **kwargs: Any) -> LNSTensor:
    return LNSTensor(x.codes.pin_memory(), x.fmt)


def _batch(examples: Any, *, collate_fn_map: Any = None) -> Tensor:
    """Stack examples for DataLoader, whose workers would otherwise use float32 shared memory."""
    return torch.stack(examples)


collate_functions[LNSTensor] = _batch


@handles(aten._nested_tensor_from_mask_left_aligned.default)
def _left_aligned(func: Any, x: Tensor, mask: Tensor) -> bool:
    """Return False: nested LNSTensors do not exist, so torch uses padded ones."""
    return False


@handles(aten.is_same_size.default)
def _is_same_size(func: Any, x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape


@handles(
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
)
def _scattered(func: Any, x: LNSTensor, source: Any, *args: Any, **kwargs: Any) -> LNSTensor:
    x_codes, source_codes, fmt = operands(func, x, source)
    return LNSTensor(func(x_codes, source_codes, *args, **kwargs), fmt)


@replaces_untraced(torch.Tensor.apply_)
def apply_(self: LNSTensor, function: Any) -> LNSTensor:
    """Set each value to ``function(value)``, computed in float32 and encoded once."""
    self.copy_(self.to_float().cpu().apply_(function))
    return self


@replaces_untraced(torch.Tensor.share_memory_)
def share_memory_(self: LNSTensor) -> LNSTensor:
    """Move the codes to shared memory, as ``Tensor.share_memory_`` does."""
    self.codes.share_memory_()
    return self


@replaces_untraced(torch.Tensor.is_shared)
def is_shared(self: LNSTensor) -> bool:
    """Return whether the codes are in shared memory, as ``Tensor.is_shared`` does."""
    shared: bool = self.codes.is_shared()
    return shared


def _source(name: str, x: Any, source: Any) -> LNSTensor:
    """Return ``source`` if ``x`` can take over its memory.

    Raises:
        ValueError: ``source`` is not an LNSTensor in the format of ``x``.
    """
    if isinstance(x, LNSTensor) and isinstance(source, LNSTensor) and source.fmt == x.fmt:
        return source
    target, kind = (
        f"an LNSTensor in {t.fmt}" if isinstance(t, LNSTensor) else f"a {t.dtype} tensor"
        for t in (x, source)
    )
    dtype = None if isinstance(source, LNSTensor) else source.dtype
    if isinstance(x, LNSTensor) and dtype in (torch.float16, torch.bfloat16, torch.float64):
        raise ValueError(
            f"{name} of {target} to {kind}: LNS has formats instead of dtypes, so double(),"
            " half(), bfloat16() and to(dtype) of a converted module are refused; remove the call,"
            " or turn the module back by lns_ops.revert_ first"
        )
    raise ValueError(
        f"{name} of {target} to {kind}: only tensors of the same format can share memory; convert"
        " first (LNSTensor.from_float(value, x.fmt), x.to_float()), or write values with"
        " x.copy_(value)"
    )


@replaces_untraced(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(self: LNSTensor, value: Tensor) -> None:
    """Assign ``x.data = value``: ``x`` takes over shape, strides and memory of ``value``."""
    source = _source("data", self, value)
    with DisableTorchFunction():
        torch.Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
    self.codes = source.codes.detach()


@handles(aten.set_.source_Tensor)
def _set(func: Any, x: Any, value: Any) -> Any:
    source = _source("set_", x, value)
    func(x.codes, source.codes)
    with no_dispatch():
        func(x, source)  # updates shape and strides of the wrapper
    return x


@handles(
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor_storage_offset,
    aten.resize_.default,
    aten.resize_as_.default,
)
def _refused(func: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"{func} of an LNSTensor: not every word of memory is a code; create the codes (x.codes,"
        " int16) and LNSTensor(codes, x.fmt)"
    )


@replaces_untraced(torch.Tensor.storage)
def storage(self: LNSTensor) -> NoReturn:
    """Reject ``Tensor.storage``, to which all functions that read the memory's address fall back.

    ``untyped_storage`` works, because the compiler uses it to identify tensors.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"storage of an LNSTensor in {self.fmt}: it has no float32 memory, only the memory of"
        " x.codes. To save a model's codes: lns_ops.serialization.save_file(model.state_dict(),"
        " path) instead of safetensors' functions, or torch.save (for Accelerate"
        " safe_serialization=False); to save its values: model.save_pretrained(path,"
        " state_dict=lns_ops.serialization.to_floats(model.state_dict())), from which convert_"
        " makes the same codes"
    )


def _uses(self: LNSTensor) -> int:
    """Return the reference count of a parameter, which ``nn.Module.to`` reads when it moves it.

    torch reads it for the parameter, then for the parameter with the moved values, and swaps the
    two. The second one gets the gradient hooks of the first, which would be lost otherwise.

    Raises:
        ValueError: an autograd graph holds the parameter, and would train the old one.
    """
    count = use_count(self)
    if count > 2:  # itself, and its AccumulateGrad node
        raise ValueError(
            f"LNS parameter of shape {tuple(self.shape)}: is held by the graph of an earlier"
            " forward pass, so the module cannot be moved (to, cpu, float, share_memory): delete"
            " outputs and losses first (del out, loss; keep loss.item(), out.detach()), compute"
            " them under torch.no_grad(), or move the module before"
        )
    asks = sys._getframe(2).f_locals  # the locals of torch.utils.swap_tensors(t1, t2)
    first = asks.get("t1")
    if isinstance(first, LNSTensor) and asks.get("t2") is self and not has_tensor_hooks(self):
        share_tensor_hooks(first, self)
    return count


setattr(LNSTensor, USE_COUNT, _uses)
