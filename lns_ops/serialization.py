"""Save state dicts with LNSTensors as safetensors files, without pickle.

A safetensors file holds plain tensors. An LNSTensor is written as its int16 codes, and the format's
name goes into the file's metadata (key ``lns_formats``, JSON). Any safetensors reader sees the
codes; :func:`load_file` restores the LNSTensors. Codes are written contiguous, and tensors that
share memory are written once each, because safetensors does not accept shared memory.

``torch.save`` and ``torch.load(weights_only=True)`` support LNSTensors directly. Use this module
for files that other programs read.
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
    """Split a state dict into plain tensors (codes for LNSTensors) and metadata.

    >>> import torch
    >>> x = LNSTensor.from_float(torch.tensor([1.0, -2.0]), "lns12")
    >>> to_codes({"x": x})
    ({'x': tensor([1024, -960], dtype=torch.int16)}, {'lns_formats': '{"x": "lns12"}'})
    """
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
    """Rebuild a state dict from codes and metadata, the inverse of :func:`to_codes`.

    Without metadata all tensors are returned unchanged.

    Raises:
        ValueError: the metadata names an unknown format, or a tensor that is not int16.
    """
    formats: dict[str, str] = json.loads((metadata or {}).get(METADATA_KEY, "{}"))
    return {
        n: LNSTensor(t, LNSFormat.parse(formats[n])) if n in formats else t
        for n, t in tensors.items()
    }


def to_floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with LNSTensors decoded to float32, for programs that cannot read codes.

    Each value encodes back to its code, so a model that loads them has the same codes after
    :func:`lns_ops.convert_`. Tied LNSTensors stay tied.

    >>> import torch
    >>> to_floats({"x": LNSTensor.from_float(torch.tensor([1.0, -2.0]), "lns12")})
    {'x': tensor([ 1., -2.])}

    With Hugging Face transformers, call
    ``model.save_pretrained(path, state_dict=to_floats(model.state_dict()))``.
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
    """Write a state dict as a safetensors file; :func:`load_file` reads it back.

    >>> import tempfile
    >>> import torch
    >>> x = LNSTensor.from_float(torch.tensor([1.0, -2.0]), "lns12")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"x": x}, f"{folder}/model.safetensors")
    ...     load_file(f"{folder}/model.safetensors")
    {'x': LNSTensor([ 1., -2.], fmt=lns12)}
    """
    from safetensors.torch import save_file as write

    tensors, metadata = to_codes(state)
    write(tensors, str(path), metadata=metadata)


def load_file(path: str | Path) -> dict[str, Tensor]:
    """Read a file that :func:`save_file` wrote, for ``model.load_state_dict``."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return from_codes(tensors, file.metadata())
