"""Draw the pictures of docs/explanation/lns-and-kahan.md, computed by lns_ops itself.

    python scripts/docs_pictures.py [FOLDER]    by default into docs/explanation/pictures

The ground is transparent and every colour has a middle lightness, so that one file serves a light
page and a dark one. The same packages write the same bytes. Prints the figures that the page names.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

import lns_ops
from lns_ops.spec.format import LNSFormat, lns8, lns12
from lns_ops.spec.gaussian_log import gaussian_tables
from lns_ops.spec.reference import decode, encode

FOLDER = Path(__file__).parents[1] / "docs" / "explanation" / "pictures"
GREY, BLUE, ORANGE, GREEN = "#808080", "#3f8fd0", "#d9822b", "#3a9d5d"
NUMBER = -0.3
"""The number whose code word is drawn."""
STEPS, UPDATE = 1000, 2.0**-10
"""Updates of a weight that begins at 1; below half a step of lns12 there, and exact in it."""
WALKS = 4
"""Weights that round at random, each with random bits of its own."""


def style() -> None:
    """Set what all pictures share."""
    mpl.rcParams.update(
        {
            "svg.hashsalt": "lns-study",
            "svg.fonttype": "path",
            "font.size": 9,
            "savefig.transparent": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            **dict.fromkeys(
                ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"],
                GREY,
            ),
        }
    )


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a picture without the date that would change its bytes."""
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def code_word(fmt: LNSFormat, number: float) -> Figure:
    """Return the code word of a number, bit by bit."""
    code = encode(np.array(number), fmt)
    word = f"{int(code) & ((1 << fmt.bits) - 1):0{fmt.bits}b}"
    field = int(code) & fmt.field_mask
    log, value = field - fmt.bias, float(decode(code, fmt, np.float64))
    print(f"{number} in {fmt}: int16 {int(code)}, word {word}, field {field}, log {log}, {value}")
    figure, axes = plt.subplots(figsize=(7, 1.7))
    for place, bit in enumerate(word):
        colour = ORANGE if place == 0 else BLUE
        axes.add_patch(Rectangle((place, 0), 0.92, 0.9, fill=False, edgecolor=colour, linewidth=2))
        axes.text(place + 0.46, 0.43, bit, ha="center", va="center", size=14, color=colour)
        axes.text(place + 0.46, 1.05, fmt.bits - 1 - place, ha="center", size=8)
    axes.text(0.46, -0.35, "sign", ha="center", va="center", color=ORANGE)
    middle = (fmt.bits + 1) / 2
    meaning = f"{field} - {fmt.bias} = {log} ulps, so -2^({log} / {1 << fmt.fraction_bits})"
    axes.text(middle, -0.35, meaning, ha="center", va="center", color=BLUE)
    axes.text(middle, -0.85, f"= {value:.4f}, the nearest to {number}", ha="center", va="center")
    axes.set(xlim=(-0.1, fmt.bits + 0.1), ylim=(-1.1, 1.4))
    axes.axis("off")
    return figure


def draw_steps(axes: Axes, fmt: LNSFormat, sign: int, colour: str) -> None:
    """Draw a format's table of a Gaussian logarithm, both axes in octaves."""
    table = gaussian_tables(fmt.fraction_bits)[0 if sign > 0 else 1]
    scale = 1 << fmt.fraction_bits
    first = 0 if sign > 0 else 1  # G-(0) is exact zero, drawn nowhere
    distance = np.arange(first, len(table)) / scale
    axes.step(
        distance, table[first:] / scale, where="mid", color=colour, linewidth=1.3, label=fmt.name
    )


def gaussian_logarithms() -> Figure:
    """Return both corrections: exact, and as two formats hold them."""
    figure, both = plt.subplots(1, 2, figsize=(7.5, 2.9), layout="constrained")
    octaves = np.linspace(1 / 64, 6, 2000)
    for axes, sign, name in zip(both, (1, -1), ("G+", "G-"), strict=True):
        exact = np.log2(1 + sign * np.exp2(-octaves))
        axes.plot(octaves, exact, color=GREY, linewidth=4, alpha=0.35, label="exact")
        draw_steps(axes, lns8, sign, ORANGE)
        draw_steps(axes, lns12, sign, BLUE)
        axes.set(xlim=(0, 6), xlabel="distance d of the logarithms, octaves")
        axes.set_title(f"{name}(d) = log2(1 {'+' if sign > 0 else '-'} 2^-d)", size=9)
    both[0].set(ylim=(0, 1.05), ylabel="correction, octaves")
    both[1].set(ylim=(-6.2, 0.1))
    both[0].legend()
    return figure


def walk(fmt: LNSFormat | None, **options: bool) -> NDArray[np.float64]:
    """Return :data:`WALKS` weights after every update, (STEPS + 1) x WALKS; no format: float32."""

    def made(values: torch.Tensor) -> torch.Tensor:
        return values if fmt is None else lns_ops.LNSTensor.from_float(values, fmt)

    start = torch.ones(WALKS)
    weight = torch.nn.Parameter(made(start.clone()))
    weight.grad = made(-start)
    optimizer = lns_ops.optim.SGD([weight], lr=UPDATE, **options)
    seen = [start.double().numpy()]
    for _ in range(STEPS):
        optimizer.step()
        now = weight.detach()
        plain = now.to_float() if isinstance(now, lns_ops.LNSTensor) else now
        seen.append(plain.double().numpy())
    return np.stack(seen)


def small_updates() -> Figure:
    """Return a weight under small updates: float32, and lns12 rounded in three ways."""
    walks = {
        "float32": (walk(None), GREY),
        "lns12, nearest": (walk(lns12), ORANGE),
        "lns12, Kahan": (walk(lns12, kahan_sum=True), BLUE),
        "lns12, stochastic (4 weights)": (walk(lns12, stochastic_rounding=True), GREEN),
    }
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for name, (values, colour) in walks.items():
        print(f"{name}: {STEPS} updates of {UPDATE} end at {values[-1].tolist()}")
        exact, random = name == "float32", "stochastic" in name
        lines = axes.plot(
            values if random else values[:, 0],
            color=colour,
            linewidth=4 if exact else 0.9 if random else 1.4,
            alpha=0.5 if exact else 1.0,
        )
        lines[0].set_label(name)
    axes.set(xlabel="updates", ylabel="weight", xlim=(0, STEPS))
    axes.legend(loc="upper left")
    return figure


def main() -> None:
    """Write the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    style()
    save(code_word(lns12, NUMBER), folder, "code_word")
    save(gaussian_logarithms(), folder, "gaussian_logs")
    save(small_updates(), folder, "small_updates")


if __name__ == "__main__":
    main()
