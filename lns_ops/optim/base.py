"""The base class of all optimizers: rounding options, parameter loop, state, Kahan summation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, TypedDict, overload

import torch
from torch import Tensor

from lns_ops import functional as lns
from lns_ops._compat import DisableTorchFunction, without_compiler
from lns_ops.cuda import raise_seen
from lns_ops.functional.updates import updates_together
from lns_ops.spec.format import LNSFormat
from lns_ops.spec.reference_updates import ARITHMETICS
from lns_ops.tensor import LNSTensor, storage_of


class Rounding(TypedDict, total=False):
    """Options for how an update is rounded when it is added to a weight, and for its sign.

    Attributes:
        kahan_sum: keep a Kahan compensation for each parameter.
        stochastic_rounding: round ``w + update`` at random so that its expected value is exact; LNS
            parameters only.
        seed: seed of the random rounding, 0 to 2^31 - 1.
        arithmetic: how an LNS parameter is updated: ``lns`` (every operation an LNS operation) or
            ``float32`` (codes are decoded when read and rounded when stored).
        maximize: maximize the objective instead of minimizing it.
    """

    kahan_sum: bool
    stochastic_rounding: bool
    seed: int
    arithmetic: str
    maximize: bool


def state_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of state that is not in the parameter's format (counters, and bits below the
    ulp), or None for other state.
    """
    if name == "step":
        return torch.int64
    return (
        torch.int16
        if name.endswith("_residue")
        else torch.float64
        if name in ("mu_product", "max_weight")
        else None
    )


def check_range(name: str, value: float, low: float, high: float, example: str) -> None:
    """Check that a value is within ``[low, high)``.

    Raises:
        ValueError: with the value, the range and an example.
    """
    if not low <= value < high:
        raise ValueError(
            f"{name}={value}: must be at least {low:g} and below {high:g}, for example {example}"
        )


def scalar_code(name: str, value: float, fmt: LNSFormat) -> int:
    """Return the code of a hyperparameter, which must not underflow in the format."""
    code = lns.number_code(value, fmt)
    if code == 0 and value != 0:
        raise ValueError(
            f"{name}={abs(value):g}: underflows to zero in {fmt}, whose smallest magnitude is"
            f" {fmt.smallest:.3g}; raise {name} (sum the loss over fewer examples, or average it)"
            " or use a format with more integer bits"
        )
    return code


def rate_code(rate: float, fmt: LNSFormat) -> int:
    """Return the code of a step's learning rate.

    If a schedule has lowered the rate below the format's smallest magnitude, warn and return 0.
    """
    code = lns.number_code(rate, fmt)
    if code == 0 and rate != 0:
        warnings.warn(
            f"a learning rate below {fmt.smallest:.3g}, the smallest magnitude of {fmt},"
            " underflows, so these steps do not change weights; end the schedule above it, or use"
            " a format with more integer bits or arithmetic='float32'",
            stacklevel=2,
        )
    return code


def negated_rate(lr: float | Tensor, fmt: LNSFormat) -> int | Tensor:
    """Return the code of ``-lr``: a number, or a 0-dim tensor if ``lr`` is on a GPU."""
    if isinstance(lr, Tensor) and lr.is_cuda:
        return lns.encode(-lr.double(), fmt)
    return rate_code(-float(lr), fmt)


def gradient(parameter: LNSTensor) -> Tensor:
    """Return the codes of a parameter's gradient; a float32 or float64 gradient is encoded."""
    fmt = parameter.fmt
    with DisableTorchFunction():
        grad = parameter.grad
    if isinstance(grad, LNSTensor) and grad.fmt == fmt:
        return grad.codes
    if type(grad) is Tensor and grad.dtype in (torch.float32, torch.float64) and not grad.is_sparse:
        return lns.encode(grad, fmt)
    dtype = getattr(grad, "dtype", None)
    kind = str(grad.fmt) if isinstance(grad, LNSTensor) else f"{type(grad).__name__} {dtype}"
    raise ValueError(
        f"gradient of type {kind} for an {fmt} parameter: must be an LNSTensor of the same format,"
        " or a dense float32 one; compute the loss outside of torch.autocast (mixed precision), and"
        " without sparse gradients (sparse=False), and let hooks return gradients of its format"
    )


def state_codes(state: dict[str, Tensor], name: str) -> Tensor | None:
    value = state.get(name)
    return value.codes if isinstance(value, LNSTensor) else value


def _refuse_strided(parameter: Tensor) -> None:
    """Reject an LNS parameter whose codes are not contiguous.

    Raises:
        ValueError: the codes have other strides.
    """
    if isinstance(parameter, LNSTensor) and not parameter.codes.is_contiguous():
        raise ValueError(
            f"parameter of shape {tuple(parameter.shape)} with strides"
            f" {parameter.codes.stride()}: updates need contiguous codes; call"
            " module.to(memory_format=torch.channels_last) before lns_ops.convert_, and make"
            " parameters of views with .contiguous()"
        )


def _refuse_other_formats(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    """Reject a saved state in another number format than its parameter.

    Raises:
        ValueError: the formats differ.
    """
    fmt = parameter.fmt if isinstance(parameter, LNSTensor) else None
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or state_dtype(name):
            continue
        theirs = value.fmt if isinstance(value, LNSTensor) else None
        plain = theirs is None and value.is_floating_point()
        expected = plain and (fmt is None or group["arithmetic"] == "float32")
        if theirs != fmt and not expected and (theirs is not None or plain):
            raise ValueError(
                f"state {name!r} of {theirs or value.dtype} for a parameter of"
                f" {fmt or parameter.dtype}: an optimizer's state is of its parameters' format;"
                " load it before the network is converted to another one, or begin with a new"
                " optimizer"
            )


def _count_changes(tensors: list[Tensor]) -> None:
    """Increment the versions of tensors, so that autograd rejects a backward pass that needs their
    old values.

    Kernels write codes without autograd's knowledge. An eager forward pass saves LNSTensors, a
    compiled one their codes. For the writes of a compiled step torch counts the codes alone.
    """
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(tensors)


class LNSOptimizer(torch.optim.Optimizer):
    """The base class of all optimizers: rounding options, parameter loop, integer state.

    As in torch.optim, ``lr`` may be a 0-dim tensor. If it is on the parameters' GPU, the step reads
    it there, so a step in a CUDA graph uses its value at replay. Schedulers fill it in place.
    """

    takes_rate_tensor: ClassVar[bool] = True
    """Whether ``lr`` may be a tensor."""

    _decoupled = False
    """Whether weight decay is decoupled: ``lr weight_decay`` of the weight a step."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if defaults["arithmetic"] not in ARITHMETICS:
            raise ValueError(
                f"arithmetic={defaults['arithmetic']!r}: must be one of {', '.join(ARITHMETICS)},"
                " for example 'lns'"
            )
        if defaults["kahan_sum"] and defaults["stochastic_rounding"]:
            raise ValueError(
                "kahan_sum=True, stochastic_rounding=True: both save the part of an update that"
                " rounding would lose, so one is enough; choose one"
            )
        if not 0 <= defaults["lr"] < float("inf"):
            raise ValueError(
                f"lr={defaults['lr']}: must be finite and at least 0, for example 0.01"
            )
        if not isinstance(defaults["seed"], int) or not 0 <= defaults["seed"] < 1 << 31:
            raise ValueError(
                f"seed={defaults['seed']!r}: must be a whole number from 0 to 2^31 - 1, for"
                " example 0"
            )
        super().__init__(params, defaults)
        self._rates: dict[tuple[int, LNSFormat], int | Tensor] = {}

    def _check_group(self, group: dict[str, Any]) -> None:
        lr = group["lr"]
        if isinstance(lr, Tensor) and (lr.dim() or not self.takes_rate_tensor):
            allowed = ", or a tensor without dimensions" if self.takes_rate_tensor else ""
            raise ValueError(
                f"lr={lr} for {type(self).__name__}: must be a number{allowed}; use lr=lr.item()"
            )
        for parameter in group["params"]:
            if isinstance(parameter, LNSTensor):
                self._check(group, parameter.fmt)
            elif group["stochastic_rounding"]:
                raise ValueError(
                    f"stochastic_rounding=True for a {parameter.dtype} parameter: LNS parameters"
                    " only; use kahan_sum=True, or convert the module with scope='everywhere'"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does, without importing torch's compiler.

        Raises:
            ValueError: invalid hyperparameters, as in the constructor.
        """
        without_compiler(super().add_param_group)(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise
        for fmt in {p.fmt for p in group["params"] if isinstance(p, LNSTensor)}:
            self._warn_of_decay(group, fmt)

    def _shrinks_by(self, group: dict[str, Any]) -> float:
        """Return the fraction by which a step shrinks a weight if its gradient is zero."""
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        return float(group["lr"]) * group["weight_decay"] if decoupled else 0.0

    def _warn_of_decay(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        """Warn if rounding loses the weight decay of weights whose gradient is zero."""
        share = 0.0 if group["stochastic_rounding"] else self._shrinks_by(group)
        half = math.sqrt(1 + fmt.epsilon) - 1
        limit = half**2 if group["kahan_sum"] else half
        if 0 < share < limit:
            kept = "Kahan summation" if group["kahan_sum"] else "rounding to nearest"
            kahan = "kahan_sum=True or " if not group["kahan_sum"] and share > half**2 else ""
            warnings.warn(
                f"{type(self).__name__} with lr={float(group['lr']):.3g},"
                f" weight_decay={group['weight_decay']:.3g} in {fmt}: a decay by {share:.2g} of a"
                f" weight is below {limit:.2g}, the smallest update that {kept} keeps there, so"
                " weights without a gradient do not change; use"
                f" {kahan}stochastic_rounding=True, or a larger weight_decay",
                stacklevel=2,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, without importing torch's compiler."""
        with DisableTorchFunction():  # a gradient is a plain attribute for all tensor types
            without_compiler(super().zero_grad)(set_to_none)

    def _check(self, group: dict[str, Any], fmt: LNSFormat) -> None:
        """Check that the hyperparameters are usable in ``fmt``."""
        raise NotImplementedError

    def _update(
        self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], key: int | None
    ) -> None:
        raise NotImplementedError

    def _may_wait(self, group: dict[str, Any]) -> bool:
        """Return whether ``_update`` ends with the weight update of an LNS parameter.

        Then a GPU updates all parameters of a group in few launches.
        """
        return False

    def _negated_rate(self, group: dict[str, Any], fmt: LNSFormat) -> int | Tensor:
        """Return :func:`negated_rate` of a group, computed once a step if it is on a GPU."""
        lr = group["lr"]
        if not isinstance(lr, Tensor):
            return negated_rate(lr, fmt)
        if (id(lr), fmt) not in self._rates:
            self._rates[id(lr), fmt] = negated_rate(lr, fmt)
        return self._rates[id(lr), fmt]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        stepped: list[Tensor] = []
        self._rates.clear()
        for group in self.param_groups:
            if group["params"] and not torch.compiler.is_compiling():
                raise_seen(storage_of(group["params"][0]).get_device())
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index = 0
        for group in self.param_groups:
            waits = self._may_wait(group) and not torch.compiler.is_compiling()
            with updates_together() if waits else nullcontext():
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        _refuse_strided(parameter)
                        key = group["seed"] << 32 | index if group["stochastic_rounding"] else None
                        self._update(parameter, self.state[parameter], group, key)
                        if isinstance(parameter, LNSTensor):
                            stepped += parameter, parameter.codes
                    index += 1
        _count_changes(stepped)
        self._rates.clear()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore state as torch does, also for copies and pickles, which lack some attributes.

        Missing options get their defaults.
        """
        super().__setstate__(state)
        self._rates = {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state as torch does, but keep integer state integer.

        torch would convert it to the parameter's dtype.

        Raises:
            ValueError: the state was saved for parameters in other number formats.
        """
        for theirs, ours in zip(state_dict["param_groups"], self.param_groups, strict=False):
            for key, parameter in zip(theirs["params"], ours["params"], strict=False):
                _refuse_other_formats(state_dict["state"].get(key, {}), parameter, ours)
        super().load_state_dict(state_dict)
        saved, groups = (
            state_dict["state"],
            zip(state_dict["param_groups"], self.param_groups, strict=True),
        )
        for theirs, ours in groups:
            for key, parameter in zip(theirs["params"], ours["params"], strict=True):
                for name in saved.get(key, {}):
                    if (dtype := state_dtype(name)) is not None:
                        self.state[parameter][name] = torch.as_tensor(saved[key][name]).to(
                            parameter.device, dtype, copy=True
                        )

    @torch.no_grad()
    def init_compensation(self, exact: Iterable[Tensor] | Mapping[str, Tensor]) -> None:
        """Round float weights to the parameters, and keep the rounding errors as compensations.

        Every weight becomes the nearest number in its format.

        >>> import torch, lns_ops
        >>> model = torch.nn.Linear(4, 2)
        >>> exact = [p.detach().clone() for p in model.parameters()]  # or a float32 state dict
        >>> model = lns_ops.convert_(model, "lns12", scope="everywhere")
        >>> optimizer = lns_ops.optim.SGD(model.parameters(), lr=0.1, kahan_sum=True)
        >>> optimizer.init_compensation(exact)

        Args:
            exact: a float tensor for every parameter, in the optimizer's order; or by name, if the
                optimizer was created with ``model.named_parameters()``.

        Raises:
            ValueError: without ``kahan_sum``, or the number or the shapes of the tensors differ
                from the parameters'.
        """
        if not all(group["kahan_sum"] for group in self.param_groups):
            raise ValueError(
                "init_compensation of an optimizer with kahan_sum=False: it keeps none; make it"
                " with kahan_sum=True"
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        values = self._by_name(exact) if isinstance(exact, Mapping) else list(exact)
        shapes, wanted = (
            [tuple(value.shape) for value in values],
            [tuple(p.shape) for p in parameters],
        )
        if shapes != wanted:
            raise ValueError(
                f"exact values of shapes {shapes}: must match the parameters' shapes, {wanted}"
            )
        for parameter, value in zip(parameters, values, strict=True):
            self._split(parameter, value.detach().to(parameter.device, torch.float64))
        _count_changes(parameters)

    def _by_name(self, exact: Mapping[str, Tensor]) -> list[Tensor]:
        names = [name for group in self.param_groups for name in group.get("param_names", [])]
        if missing := [name for name in names if name not in exact] or not names:
            raise ValueError(
                "exact values by name, but without"
                f" {missing if names else 'parameter names in the optimizer'}: create the optimizer"
                " with model.named_parameters() and pass a value for each, or pass the values in"
                " order"
            )
        return [exact[name] for name in names]

    def _split(self, parameter: Tensor, value: Tensor) -> None:
        """Set weight and compensation from a float64 value."""
        state = self.state[parameter]
        zeros(state, parameter, "compensation")
        if isinstance(parameter, LNSTensor):
            fmt, weight = parameter.fmt, lns.encode(value, parameter.fmt)
            parameter.codes.copy_(weight)
            state["compensation"].codes.copy_(
                lns.encode(value - lns.decode(weight, fmt, torch.float64), fmt)
            )
        else:
            parameter.copy_(value)
            state["compensation"].copy_(value - parameter.double())


def zeros(state: dict[str, Any], parameter: Tensor, *names: str) -> None:
    """Create missing state of these names, filled with zeros."""
    for name in names:
        if name in state:
            continue
        if (dtype := state_dtype(name)) is not None:
            shape = parameter.shape if dtype == torch.int16 else ()
            state[name] = torch.zeros(shape, dtype=dtype, device=parameter.device)
        else:
            state[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)


def add_float(
    parameter: Tensor, direction: Tensor, alpha: float | Tensor, compensation: Tensor | None
) -> None:
    """Compute ``parameter += alpha direction``, with optional Kahan compensation."""
    _add_product(parameter if compensation is None else compensation, direction, alpha)
    if compensation is None:
        return
    new = parameter + compensation
    compensation.sub_(new - parameter)
    parameter.copy_(new)


def _add_product(x: Tensor, direction: Tensor, alpha: float | Tensor) -> None:
    """Compute ``x += alpha direction``, rounded once to ``x``'s dtype."""
    if not isinstance(alpha, Tensor) or not alpha.is_cuda or alpha.device != x.device:
        x.add_(direction, alpha=float(alpha))
        return
    wide = torch.promote_types(x.dtype, torch.float32)  # as torch.add does
    x.copy_(torch.addcmul(x.to(wide), direction.to(wide), alpha.to(wide)))


def parameters_by_format(params: Iterable[Tensor]) -> dict[str, int]:
    """Return the number of values in each format, for example ``{"lns12": 407050}``.

    Float dtypes have their torch names.

    >>> import torch, lns_ops
    >>> model = lns_ops.convert_(torch.nn.Linear(4, 2), "lns12", scope="everywhere")
    >>> parameters_by_format(model.parameters())
    {'lns12': 10}
    """
    counts: dict[str, int] = {}
    for parameter in params:
        name = (
            str(parameter.fmt)
            if isinstance(parameter, LNSTensor)
            else str(parameter.dtype).removeprefix("torch.")
        )
        counts[name] = counts.get(name, 0) + parameter.numel()
    return counts
