"""Files of codes without pickle: state dicts with LNSTensors as safetensors.

A safetensors file holds plain tensors, so an LNSTensor is written as its int16 codes and its
format's name goes into the file's metadata (key ``lns_formats``, JSON). Any reader of safetensors
sees the codes; :func:`load_file` makes LNSTensors of them again. Codes are written contiguous, and
tensors that share memory once each, as safetensors asks for.

``torch.save`` and ``torch.load(weights_only=True)`` work on LNSTensors as they are; this is for
files that other programs read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from lns_ops import functional as lns
from lns_ops.spec.format import LNSFormat
from lns_ops.tensor import LNSTensor

METADATA_KEY = "lns_formats"


def to_codes(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return plain tensors (codes for LNSTensors) and the metadata for :func:`from_codes`."""
    formats = {
        name: value.fmt.name for name, value in state.items() if isinstance(value, LNSTensor)
    }
    plain = {
        name: (cast(LNSTensor, value.detach()).codes if isinstance(value, LNSTensor) else value)
        for name, value in state.items()
    }
    plain = {name: value.contiguous().clone() for name, value in plain.items()}
    return plain, {METADATA_KEY: json.dumps(formats)}


def from_codes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> dict[str, Tensor]:
    """Return the tensors of codes and metadata, the inverse of :func:`to_codes`.

    Without metadata nothing is an LNSTensor.

    Raises:
        ValueError: the metadata names a format that does not exist, or a tensor of another dtype
            than int16.
    """
    formats: dict[str, str] = json.loads((metadata or {}).get(METADATA_KEY, "{}"))
    return {
        n: LNSTensor(t, LNSFormat.parse(formats[n])) if n in formats else t
        for n, t in tensors.items()
    }


def to_floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with the values of LNSTensors, float32, for programs that know no codes.

    Each value encodes to the code that it comes from, so a model that loads them has the same codes
    after :func:`lns_ops.convert_`. LNSTensors that are one tensor (tied layers) are one here too.

    >>> model.save_pretrained(path, state_dict=to_floats(model.state_dict()))
    """
    decoded: dict[tuple[object, ...], Tensor] = {}
    floats = dict(state)
    for name, value in state.items():
        if isinstance(value, LNSTensor):
            codes = value.codes
            key = (codes.data_ptr(), codes.shape, codes.stride(), value.fmt)
            if key not in decoded:
                decoded[key] = lns.decode(codes, value.fmt)
            floats[name] = decoded[key]
    return floats


def save_file(state: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a state dict as a safetensors file.

    >>> lns_ops.serialization.save_file(model.state_dict(), "model.safetensors")
    """
    from safetensors.torch import save_file as write

    tensors, metadata = to_codes(state)
    write(tensors, str(path), metadata=metadata)


def load_file(path: str | Path) -> dict[str, Tensor]:
    """Read what :func:`save_file` wrote, for ``model.load_state_dict``."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return from_codes(tensors, file.metadata())
