"""Train networks from other projects in LNS, and write docs/models.md.

Each network of ``scripts/zoo`` is built small and without pretrained weights, and trained for two
steps in float32; networks that fail there are not judged. Then it is trained in lns16, in each
scope of ``lns_ops.convert_``, for :data:`STEPS` steps of ``lns_ops.optim.Adam``. It *trains* if
every loss is finite and the loss fell, or every trainable parameter that float32 changes has
changed. A network that trains is then saved, loaded, copied and evaluated under
``torch.inference_mode``, which must give the same bits.

The outputs of the first training step are compared with float32 from the same seeds, and so are the
outputs in bfloat16, which has as many bits. If the difference is far larger than in bfloat16
(:func:`is_wrong`), there is an error that the losses do not show.

    python scripts/model_zoo.py                    # all networks, and docs/models.md
    python scripts/model_zoo.py hf-Bert siren      # names with these prefixes, printed only
    python scripts/model_zoo.py hf-Bert --results rows.json    # also replaces their rows there

The page includes the rows in that file. With names, it is only written if every network has a row.

Networks of missing libraries are left out with a note: ``pip install transformers timm
torchvision``.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib
import io
import json
import math
import multiprocessing as mp
import os
import platform
import re
import statistics
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map
from zoo import classics, functions, huggingface, parts, rarities, vision  # noqa: F401
from zoo.network import Network, floats, loss_of

import lns_ops

STEPS, SCOPES = 11, ("everywhere", "matmul")
LIBRARIES = ("transformers", "timm", "torchvision")
FAR, TIMES = 0.1, 5
"""Results count as wrong above this distance from float32, and above this multiple of bfloat16's.
"""
WORDS = (
    "- *Trains*: every loss is finite, and the loss fell or the parameters moved.",
    "- *In part*: the network trains, but in scope `matmul` some products with weights stay"
    " float32 (`lns_ops.float32_products`). Such networks are not counted.",
    "- *Save, copy, inference*: after saving and loading, and after a deep copy, the network"
    " gives the same bits under `torch.inference_mode`.",
    "- *Off*: the distance between the outputs of the first step and float32's with the same"
    " seeds, `|y - y32| / |y32|`. bfloat16, which has as many bits, is beside it to compare."
    " A distance above ten per cent and above five times bfloat16's counts as wrong.",
)
"""The page's definitions."""
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
NETWORKS = [*parts.NETWORKS, *huggingface.NETWORKS, *vision.NETWORKS]
"""All networks. Importing the modules added the handwritten networks to the first list."""


def train(model: nn.Module, optimizer: Any, args: Any, kwargs: Any, steps: int) -> list[float]:
    """Return the losses of some steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _values(module: nn.Module) -> list[torch.Tensor]:
    return [lns_ops.tensor.in_float32(p.detach()).clone() for p in module.parameters()]


def results(model: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return what the network says in evaluation, under inference mode."""
    model.eval()
    torch.manual_seed(2)
    with torch.inference_mode():
        output = model(*args, **kwargs)
    return [lns_ops.tensor.in_float32(x) for x in floats(output)]


def check_copies(model: nn.Module, fresh: nn.Module, args: Any, kwargs: Any) -> None:
    """Save, load and copy a network, and compare what each says.

    Raises:
        AssertionError: results differ.
    """
    expected = results(model, args, kwargs)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for name, other in (("loaded", fresh), ("copied", copy.deepcopy(model))):
        found = results(other, args, kwargs)
        if not all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)):
            raise AssertionError(f"{name} network gives other results")


def first_results(network: Network, change: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    """Return the results of a changed network's first step, in training, with the same seeds.

    Dropout layers do nothing: masks are drawn in the order of memory, and where torch's
    convolutions give results with channels last, ours do not.
    """
    torch.manual_seed(0)
    model, args, kwargs = network.make()
    for layer in model.train().modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
    change(model)
    kind = next((p.dtype for p in model.parameters()), torch.float32)
    if kind == torch.bfloat16:
        args, kwargs = tree_map(_in_bfloat16, (args, kwargs))
    torch.manual_seed(1)
    output = model(*args, **kwargs)
    return [lns_ops.tensor.in_float32(x.detach()).float() for x in floats(output)]


def _in_bfloat16(x: Any) -> Any:
    return x.bfloat16() if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x


def difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Return the relative distance of results, ``|found - expected| / |expected|``."""
    if [x.shape for x in expected] != [x.shape for x in found]:
        return math.inf
    ours, theirs = (torch.cat([x.flatten() for x in each]) for each in (found, expected))
    finite = theirs.isfinite()  # masks hold infinities
    return float((ours - theirs)[finite].norm() / theirs[finite].norm().clamp_min(1e-30))


def is_wrong(off: float, peer: float | None) -> bool:
    """Tell whether results are farther from float32's than numbers of as many bits explain.

    Args:
        off: distance of ours.
        peer: distance of bfloat16's; None if torch cannot compute the network in it.
    """
    return not off <= max(FAR, TIMES * (peer or 0.0))


def attempt(network: Network, scope: str, copied: bool) -> dict[str, str]:
    """Return what became of a network in a scope: ``trains``, ``copies`` and ``note``."""
    torch.manual_seed(0)
    model, args, kwargs = network.make()
    model.train()
    lns_ops.convert_(model, "lns16", scope=scope)
    fresh = lns_ops.convert_(network.make()[0], "lns16", scope=scope)
    before = _values(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = lns_ops.optim.Adam(trainable, lr=1e-3, kahan_sum=True)
    torch.manual_seed(1)
    losses = train(model, optimizer, args, kwargs, STEPS)
    if not all(math.isfinite(loss) for loss in losses):
        return {"trains": "no", "copies": "-", "note": f"loss {losses[-1]}"}
    moved = sum(not torch.equal(a, b) for a, b in zip(before, _values(model), strict=True))
    fell = losses[-1] < losses[0]
    if not fell and moved < len(trainable) / 2:
        return {"trains": "no", "copies": "-", "note": f"{moved} of {len(trainable)} moved"}
    if not copied:
        return {"trains": "yes", "copies": "-", "note": "float32 cannot be copied or evaluated so"}
    try:
        check_copies(model, fresh, args, kwargs)
    except Exception as error:
        if os.environ.get("ZOO_TRACE"):
            traceback.print_exc()
        return {"trains": "yes", "copies": "no", "note": _short(error)}
    left = _left_out(model, args, kwargs) if scope == "matmul" else ""
    return {"trains": "in part" if left else "yes", "copies": "yes", "note": left}


def _can_be_copied(model: nn.Module, fresh: nn.Module, args: Any, kwargs: Any) -> bool:
    try:
        check_copies(model, fresh, args, kwargs)
    except Exception:
        return False
    return True


def _left_out(model: nn.Module, args: Any, kwargs: Any) -> str:
    """Return which weights of a network in scope ``matmul`` are multiplied in float32."""
    with lns_ops.float32_products(model) as found:
        model.train()(*args, **kwargs)
    return f"float32 products of {min(found)}, {len(found)} in all" if found else ""


def _short(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:150].replace("|", "/")


def judge(network: Network, pipe: Any) -> None:
    """Send what became of a network, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trace = bool(os.environ.get("ZOO_TRACE"))
    try:
        torch.manual_seed(0)
        model, args, kwargs = network.make()
        model.train()
        train(model, torch.optim.Adam(model.parameters(), lr=1e-3), args, kwargs, 2)
        copied = _can_be_copied(model, network.make()[0], args, kwargs)
        expected = first_results(network, lambda model: model)
    except Exception as error:
        if trace:
            traceback.print_exc()
        pipe.send({"float32": _short(error)})
        return
    peer = None
    with suppress(Exception):  # torch has not all in bfloat16
        peer = difference(expected, first_results(network, nn.Module.bfloat16))
    for scope in SCOPES:
        start = time.monotonic()
        convert = partial(lns_ops.convert_, fmt="lns16", scope=scope)
        try:
            found = attempt(network, scope, copied)
            off = difference(expected, first_results(network, convert))
            found |= {"off": off, "bfloat16": peer}
            if is_wrong(off, peer):
                found["note"] = f"first results {100 * off:.0f} % off"
        except Exception as error:
            if trace:
                traceback.print_exc()
            found = {"trains": "no", "copies": "-", "note": _short(error)}
        pipe.send({scope: found | {"seconds": time.monotonic() - start}})


def run(network: Network, limit: float) -> dict[str, Any]:
    """Judge a network within a time limit, in seconds."""
    receiver, sender = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=judge, args=(network, sender))
    process.start()
    sender.close()
    found: dict[str, Any] = {}
    end = time.monotonic() + limit
    with suppress(EOFError):
        while not _complete(found) and receiver.poll(max(0.0, end - time.monotonic())):
            found |= receiver.recv()
    if process.is_alive() and not _complete(found):
        process.kill()
        missing = {"trains": "no", "copies": "-", "note": f"not done in {limit:.0f} s"}
        found = {"float32": "not done"} if not found else {s: found.get(s, missing) for s in SCOPES}
    process.join()
    if not found:
        found = {"float32": f"process ended with {process.exitcode}"}
    return found


def _complete(found: dict[str, Any]) -> bool:
    return "float32" in found or len(found) == len(SCOPES)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def _median(judged: dict[str, dict[str, Any]], kind: str) -> str:
    """Return the median distance of first results from float32's, in a scope or in bfloat16."""
    off = [
        r[kind].get("off") if kind in SCOPES else r[SCOPES[0]].get(kind) for r in judged.values()
    ]
    return f"{100 * statistics.median(x for x in off if x is not None):.2g} %"


def page(rows: dict[str, dict[str, Any]], libraries: dict[str, str]) -> str:
    """Return docs/models.md."""
    judged = {n: r for n, r in rows.items() if "float32" not in r}
    share = {s: sum(r[s]["trains"] == "yes" for r in judged.values()) for s in SCOPES}
    partly = sum(r["matmul"]["trains"] == "in part" for r in judged.values())
    copies = [r[s]["copies"] for r in judged.values() for s in SCOPES if r[s]["copies"] != "-"]
    wrong = sorted(
        f"{name} ({scope})"
        for name, row in judged.items()
        for scope in SCOPES
        if "off" in row[scope] and is_wrong(row[scope]["off"], row[scope]["bfloat16"])
    )
    versions = ", ".join(map(_version, ("torch", *LIBRARIES)))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    paragraphs = (
        "This page lists networks from other projects that were converted to lns16 and trained for"
        f" {STEPS} steps of `lns_ops.optim.Adam`. They are small and without pretrained weights."
        f" {today}, `python scripts/model_zoo.py`; {versions}; Python {platform.python_version()}.",
        *WORDS,
        f"The script has {len(NETWORKS)} networks; {len(rows)} were run. {len(judged)} of them"
        f" train in float32. Of these, {share['everywhere']} train in scope `everywhere`,"
        f" {share['matmul']} in `matmul`, and {partly} more in part. {len(copies)} trained networks"
        " can be copied and evaluated in float32;"
        f" {copies.count('yes')} of these can in LNS.",
        f"Wrong results: {', '.join(wrong) or 'none'}. The median distance is"
        f" {_median(judged, 'everywhere')} in `everywhere`, {_median(judged, 'matmul')} in `matmul`"
        f" and {_median(judged, 'bfloat16')} in bfloat16, for networks that torch computes in it.",
    )
    lines = ["# Networks that convert"]
    for paragraph in paragraphs:
        indent = "  " if paragraph.startswith("- ") else ""
        lines += [*textwrap.wrap(paragraph, 99, subsequent_indent=indent), ""]
    lines += [
        "| network | library | everywhere | matmul | save, copy, inference"
        " | off, %: everywhere / matmul / bfloat16 | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in judged.items():
        note = "; ".join(f"{s}: {row[s]['note']}" for s in SCOPES if row[s]["note"])
        cells = [row[s]["trains"] for s in SCOPES]
        both = " / ".join(row[s]["copies"] for s in SCOPES)
        off = [row[s].get("off") for s in SCOPES] + [row[SCOPES[0]].get("bfloat16")]
        shown = " / ".join("-" if x is None else f"{100 * x:.2g}" for x in off)
        lines.append(
            f"| {name} | {libraries[name]} | {' | '.join(cells)} | {both} | {shown} | {note} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; all networks without any")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a network")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, help="JSON rows to begin with and to write")
    parser.add_argument("--failures", action="store_true", help="print failures only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    missing = [library for library in LIBRARIES if not _imported(library)]
    chosen = [
        n for n in NETWORKS
        if n.library not in missing
        and (not options.names or any(n.name.startswith(p) for p in options.names))
    ]  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    if options.results and options.results.exists():
        rows = json.loads(options.results.read_text())
    with ThreadPoolExecutor(options.processes) as pool:
        for network, found in zip(
            chosen, pool.map(lambda n: run(n, options.limit), chosen), strict=True
        ):
            rows[network.name] = found
            if options.results:
                options.results.write_text(json.dumps(rows, indent=1))
            _print(network.name, found, options.failures)
    _count(rows)
    if options.results or not options.names:
        _write(rows, whole=bool(options.names))


def _write(rows: dict[str, dict[str, Any]], whole: bool) -> None:
    """Write docs/models.md; if it must be ``whole``, only where no network lacks a row."""
    without = [n.name for n in NETWORKS if n.name not in rows]
    if whole and without:
        print(
            f"{PAGE.name} is left as it is: {len(without)} networks have no row ({without[0]},"
            " ...); run all, with --results FILE, and then single ones with the same file"
        )
        return
    ordered = {n.name: rows[n.name] for n in NETWORKS if n.name in rows}
    PAGE.write_text(page(ordered, {n.name: n.library for n in NETWORKS}))


def _imported(library: str) -> bool:
    """Import a library, before processes are forked that would do so each."""
    try:
        importlib.import_module(library)
    except Exception as error:
        print(f"{library} is left out: {_short(error)}")
        return False
    return True


def _print(name: str, found: dict[str, Any], failures: bool) -> None:
    if "float32" in found:
        print(f"{name:45s} float32 fails: {found['float32']}", flush=True)
        return
    for scope in SCOPES:
        row = found[scope]
        if failures and row["trains"] != "no" and row["copies"] != "no":
            continue
        line = f"{name:45s} {scope:10s} {row['trains']:3s} {row['copies']:3s}"
        print(f"{line} {row.get('seconds', 0):5.1f} s {row['note']}", flush=True)


def _count(rows: dict[str, dict[str, Any]]) -> None:
    judged = [r for r in rows.values() if "float32" not in r]
    for scope in SCOPES:
        trains = sum(r[scope]["trains"] == "yes" for r in judged)
        copies = sum(r[scope]["copies"] == "yes" for r in judged)
        able = sum(r[scope]["copies"] != "-" for r in judged)
        print(f"{scope}: {trains} of {len(judged)} train, {copies} of {able} copied")
        notes = Counter(
            re.sub(r"\d+", "N", r[scope]["note"])[:90]
            for r in judged
            if r[scope]["trains"] == "no" or r[scope]["copies"] == "no"
        )
        for note, count in notes.most_common(60):
            print(f"  {count:3d}  {note}")


if __name__ == "__main__":
    sys.exit(main())
