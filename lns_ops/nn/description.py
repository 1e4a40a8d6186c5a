"""Description of a converted module: :func:`summary`."""

from __future__ import annotations

from torch import nn

from lns_ops.nn import own_products
from lns_ops.nn.convert import Conversion
from lns_ops.nn.layer_kinds import has_own_forward, multiplies, own_format, owns, reason_to_stay
from lns_ops.tensor import LNSTensor, promotion


def _that_keep_floats(module: nn.Module) -> list[str]:
    """Return the notes of :func:`summary` on modules that keep float inputs."""
    names = [
        name or "(root)"
        for name, layer in module.named_modules()
        if hasattr(layer, "lns_conversion") and has_own_forward(layer)
    ]
    if not names:
        return []
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [
        f"float inputs stay float32 until they meet LNS in: {', '.join(names[:5])}{more}"
        " (modules with their own forward); torch's layers encode their inputs"
    ]


def summary(module: nn.Module) -> str:
    """Describe the conversion of a module, one line for each module with parameters of its own.

    A line has the module's name, type, scope, format and number of parameters. Modules that compute
    products themselves have a line, too. Notes follow: layers with products that scope ``matmul``
    does not convert, left-out modules with their own products (:mod:`lns_ops.nn.own_products`), and
    the number of float tensors that were encoded to combine them with LNS.

    >>> from lns_ops import convert_
    >>> print(summary(convert_(nn.Sequential(nn.Linear(4, 2)), "lns12")))
    layer  type             scope   format  parameters
    0      LNSMatmulLinear  matmul  lns12           10
    """
    rows = [("layer", "type", "scope", "format", "parameters")]
    notes = []
    for name, layer in module.named_modules():
        conversion = getattr(layer, "lns_conversion", None)
        if getattr(layer, "stays_float32", False) and not multiplies(layer):
            conversion = None  # its code computes products, but not with weights
        if not owns(layer) and (conversion is None or "stays_float32" not in vars(layer)):
            continue  # or no forward pass so far
        count = sum(p.numel() for p in layer.parameters(recurse=False))
        kept = next((p.fmt for p in layer.parameters(False) if isinstance(p, LNSTensor)), None)
        if conversion is None and kept is not None:  # the layer was parametrized later
            conversion = Conversion(scope="everywhere", fmt=kept)
        scope, fmt = (
            (conversion.scope, str(conversion.fmt))
            if conversion is not None
            else ("-", own_format(layer))
        )
        if hasattr(layer, "simulation"):
            scope, fmt = "simulated", str(layer.simulation.format)
        if conversion is not None and getattr(layer, "stays_float32", False):
            notes.append(
                f"{name or '(root)'} stays float32: its forward computes no product with a weight"
            )
        if conversion is None and (kind := reason_to_stay(layer)):
            notes.append(f"{name or '(root)'} stays {fmt}: {kind}")
        rows.append((name or "(root)", type(layer).__name__, scope, fmt, f"{count:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join([*(row[i].ljust(widths[i]) for i in range(4)), row[4].rjust(widths[4])])
        for row in rows
    ]
    scopes = {row[2] for row in rows}
    if "matmul" in scopes:
        notes += own_products.lines(module)
    if "everywhere" in scopes:
        notes += [*_that_keep_floats(module), *promotion.lines()]
    return "\n".join([*lines, *notes])
