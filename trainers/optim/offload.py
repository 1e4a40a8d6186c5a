"""Optimizer state in the host's memory (``memory.offload_optimizer=true``).

A GPU then holds only weights, gradients and activations. The optimizer's momenta, moments and Kahan
compensations are one to three times as large as the weights, and are read once a step. Here they
stay on the CPU, beside a copy of the weights, in page-locked memory: after backward the gradients
are copied there, the optimizer steps with the kernels of a CPU on the trial's ``threads``, and the
new weights are copied back. With w bytes of weights a step copies w bytes to the CPU and w bytes
back. LNS trials end with the same bits as without offloading, since the kernels of both devices
agree bit for bit; float32 trials agree within their rounding. The checkpoints are the same with and
without, and either can continue the other's.

Source: J. Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"
(arXiv:2101.06840).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lns_ops import LNSTensor
from lns_ops.tensor import storage_of
from trainers.optim.stepped import stepped_module


class Offload:
    """A copy of a model's parameters on the CPU, for an optimizer that steps there.

    Args:
        model: on any device; a parameter may be an LNSTensor. Only :meth:`push`, and
            :class:`trainers.optim.wrappers.OffloadedOptimizer` through it, may change its weights.

    Attributes:
        own: the copy, under the same names and with the model's own buffers; not to be called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.own = stepped_module(model, _on_cpu)
        self._pairs = list(zip(model.parameters(), self.own.parameters(), strict=True))
        self._gradients: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def push(self) -> None:
        """Copy the weights from the CPU to the model."""
        for parameter, own in self._pairs:
            storage_of(parameter.detach()).copy_(storage_of(own.detach()), non_blocking=True)
        self._wait()  # or the next step could overwrite weights that are still being copied

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Copy the model's gradients to the CPU; a parameter without gradient gets None."""
        for parameter, own in self._pairs:
            own.grad = None if parameter.grad is None else self._pulled(parameter.grad, own)
        self._wait()

    def forget_gradients(self, set_to_none: bool) -> None:
        """Reset the model's gradients; those on the CPU are overwritten by the next pull."""
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _pulled(self, gradient: Tensor, own: Tensor) -> Tensor:
        """Copy ``gradient`` into the page-locked buffer of parameter ``own``, and return it."""
        buffer = self._gradients.get(own)
        if buffer is None:
            buffer = self._gradients[own] = _locked(
                torch.empty_like(storage_of(gradient), device="cpu"), gradient.device
            )
        buffer.copy_(storage_of(gradient), non_blocking=True)
        return LNSTensor(buffer, gradient.fmt) if isinstance(gradient, LNSTensor) else buffer

    def _wait(self) -> None:
        """Wait for the copies of every GPU that holds parameters."""
        for device in {
            parameter.device for parameter, _ in self._pairs if parameter.device.type == "cuda"
        }:
            torch.cuda.current_stream(device).synchronize()


def _on_cpu(parameter: Tensor) -> Tensor:
    """Return a copy of ``parameter`` on the CPU, page-locked where it comes from a GPU."""
    values = storage_of(parameter)
    copy = _locked(values.to("cpu", copy=True), values.device)
    return LNSTensor(copy, parameter.fmt) if isinstance(parameter, LNSTensor) else copy


def _locked(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` in page-locked memory where ``device`` is a GPU.

    A GPU copies from and to page-locked memory at full speed, without the CPU.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor
