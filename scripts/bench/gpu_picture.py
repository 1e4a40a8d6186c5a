"""The pictures of ``bench_gpu.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lns_ops import lns12, lns16

INSTRUCTIONS = 7
ADDITIONS = {
    "add": (1, 6),
    "SGD": (1, 6),
    "Kahan SGD": (4, 10),
    "stochastic SGD": (1, 6),
    "Kahan momentum": (5, 14),
    "AdamW": (5, 18),
    "Kahan AdamW": (8, 22),
    "stochastic AdamW": (5, 14),
}
"""The LNS additions and the bytes of an element."""


def _label(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Label the points: products beside them, what memory bounds in a column of its own.

    The points of the latter lie close together.
    """
    offsets = {"128x784x512": (7, 4), "512x128x784": (-7, -4), "128x512x784": (-7, -14)}
    style: dict[str, Any] = {"fontsize": 7, "textcoords": "offset points", "va": "center"}
    for label, (x, y) in points.items():
        if label not in ADDITIONS:
            dx, dy = offsets.get(label, (7, -6))
            axes.annotate(label, (x, y / 1e12), (dx, dy), ha="right" if dx < 0 else "left", **style)
    bound = sorted((y / 1e12, x, label) for label, (x, y) in points.items() if label in ADDITIONS)
    for row, (y, x, label) in enumerate(bound):
        place = {
            "fontsize": 7,
            "va": "center",
            "arrowprops": {
                "arrowstyle": "-",
                "color": "0.6",
                "lw": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        }
        axes.annotate(label, (x, y), (0.8, 0.22 * 1.28**row), **place)


def _points(results: dict[str, Any], fmt: str) -> dict[str, tuple[float, float]]:
    """Return additions a byte and a second of each kernel in a format, by name or shape."""
    points: dict[str, tuple[float, float]] = {}
    for name, value in results.items():
        words = name.split()
        if words[0] == "gemm" and words[1] == fmt:
            M, K, N = map(int, words[-1].split("x"))
            points[words[-1]] = M * K * N / (2 * (M * K + K * N + M * N)), value["rate"]
        elif words[-1] == fmt and (label := name.removesuffix(f" {fmt}")) in ADDITIONS:
            additions, bytes_ = ADDITIONS[label]
            points[label] = additions / bytes_, value["rate"] * additions / bytes_
    return points


def draw(figures: Path, picture: Path) -> None:
    """Draw the roofline: LNS additions a second over additions a byte.

    A multiply-add counts as one addition. Above lie the two ceilings of the same run.
    """
    from matplotlib.figure import Figure

    data = json.loads(figures.read_text())
    copy, bound = data["copy"], data["issue"] / INSTRUCTIONS
    figure = Figure(figsize=(8, 5), dpi=160, layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    ridge = bound / copy
    axes.plot(
        [0.08, ridge, 3000], [0.08 * copy / 1e12, bound / 1e12, bound / 1e12], color="0.3", lw=1.5
    )
    axes.annotate(
        f"copy bandwidth {copy / 1e12:.2f} TB/s",
        (0.09, 0.09 * copy / 1e12 * 1.5),
        rotation=43,
        fontsize=9,
        color="0.3",
    )
    axes.annotate(
        f"issue rate / {INSTRUCTIONS}: {bound / 1e12:.2f} T/s",
        (60, bound / 1e12 * 1.06),
        fontsize=9,
        color="0.3",
    )
    for fmt, colour, marker in ((lns16, "#0072B2", "o"), (lns12, "#D55E00", "s")):
        points = _points(data["results"], str(fmt))
        axes.plot(
            *zip(*((x, y / 1e12) for x, y in points.values()), strict=True),
            marker,
            ms=5,
            color=colour,
            label=str(fmt),
            alpha=0.8,
        )
        if fmt == lns12:
            _label(axes, points)
    axes.set_xlabel("LNS additions a byte")
    axes.set_ylabel("10^12 LNS additions a second")
    axes.set_title("LNS kernels on one H200 under what bounds them", loc="left", fontsize=11)
    axes.grid(which="major", color="0.88")
    axes.set_xlim(0.05, 4000)
    axes.set_ylim(0.02, 8)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture)
