"""Evolution strategies as a training loop, and the checks of the ``evolution`` studies' claims.

The loop knows losses, no gradients. With weights w, standard deviation s and n random directions
e_i, each tried forwards and backwards on the same batch::

    u_i = rank of loss(w + s e_i) and loss(w - s e_i) among all 2 n, spread over [-1/2, 1/2]
    g   = 1 / (2 n s) sum_i (u_i+ - u_i-) e_i,       w <- Adam(w, g + decay w)

so a low loss has a low rank and g points uphill. Directions come from (seed, epoch, step, i): every
worker draws all of them, tries its share, and only losses travel. The weights are kept in float32;
``format`` is that of the networks that are tried, which need no backward pass.

**Budget.** Forward and backward take about three times a forward pass, so an epoch of a gradient,
one pass over N examples, is an epoch of ``3 N / (2 n batch)`` steps here.

Source: T. Salimans et al. 2017, "Evolution Strategies as a Scalable Alternative to Reinforcement
Learning" (arXiv:1703.03864), algorithm 2 with antithetic samples and rank shaping.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import lns_ops
import study as lns_study
from lns_ops import LNSTensor
from study import Study
from study.claims.verdict import of_mean
from study.errors import UserError
from study.ledger.state import ENDED
from study.results.summary import figures_by_seed, summarise
from trainers import LoopContext
from trainers.config import DataConfig
from trainers.data import Split, load

SMALL = "-small"
EPOCHS, STEPS = 1 << 20, 1 << 20
"""Distances between the seeds of trials, and of epochs."""
FORWARD_SHARE = 3
"""Forward passes that take as long as a forward and a backward pass."""


def train(config: dict[str, Any], context: LoopContext) -> dict[str, float]:
    """Train the MLP of ``evolution`` on digits by evolution strategies.

    ``config``: ``hidden`` (units), ``format``, ``pairs`` (n), ``batch``, ``sigma`` (s), ``lr`` and
    ``decay``.
    """
    train, validation, test = load(DataConfig(name="digits"))
    assert isinstance(train, Split)
    assert isinstance(validation, Split)
    assert isinstance(test, Split)
    net = nn.Sequential(nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 10))
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=config["lr"], weight_decay=config["decay"])
    if config["format"] != "float32":
        lns_ops.convert_(net, config["format"], scope="everywhere")
    first = 0
    if isinstance(state := context.resume, dict):
        first = state["epoch"]
        with torch.no_grad():
            weights.copy_(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
    x, y = train
    steps = max(1, FORWARD_SHARE * len(y) // (2 * config["pairs"] * config["batch"]))
    for epoch in range(first, context.trial.epochs):
        for step in range(steps):
            draw = torch.Generator().manual_seed((context.seed * EPOCHS + epoch) * STEPS + step)
            chosen = torch.randint(len(y), (config["batch"],), generator=draw)
            directions = torch.randn(config["pairs"], len(weights), generator=draw)
            losses = try_all(net, weights, directions, x[chosen], y[chosen], config, context)
            weights.grad = gradient(losses, directions, config["sigma"])
            optimizer.step()
        set_weights(net, weights)
        context.report(
            {"validation/error": error(net, *validation)},
            checkpoint={
                "epoch": epoch + 1,
                "weights": weights.detach(),
                "optimizer": optimizer.state_dict(),
            },
        )
    return {"test/error": error(net, *test)}


@torch.no_grad()
def try_all(
    net: nn.Module, weights: Tensor, directions: Tensor, x: Tensor, y: Tensor,
    config: dict[str, Any], context: LoopContext,
) -> Tensor:  # fmt: skip
    """Return the losses forwards and backwards, ``[2, n]``; each worker tries its share."""
    losses = torch.zeros(2, len(directions))
    for i in range(context.rank, len(directions), context.world_size):
        for turn, sign in enumerate((1, -1)):
            set_weights(net, weights + sign * config["sigma"] * directions[i])
            losses[turn, i] = F.cross_entropy(floats(net(x)), y)
    if context.world_size > 1:
        dist.all_reduce(losses)
    return losses


@torch.no_grad()
def gradient(losses: Tensor, directions: Tensor, sigma: float) -> Tensor:
    """Return the estimate g; see the head of this file.

    Args:
        losses: ``[2, n]``, forwards and backwards.
        directions: ``[n, weights]``.
        sigma: standard deviation.
    """
    count = losses.numel()
    ranks = losses.flatten().argsort().argsort().reshape(losses.shape)
    shaped = ranks / (count - 1) - 0.5
    return (shaped[0] - shaped[1]) @ directions / (count * sigma)


@torch.no_grad()
def set_weights(net: nn.Module, weights: Tensor) -> None:
    """Write a vector into the network's parameters, rounded to their format."""
    start = 0
    for parameter in net.parameters():
        values = weights[start : start + parameter.numel()].reshape(parameter.shape)
        start += parameter.numel()
        fmt = getattr(parameter, "fmt", None)  # of an LNSTensor
        parameter.copy_(values if fmt is None else LNSTensor.from_float(values, fmt))


@torch.no_grad()
def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of wrong answers."""
    return float((floats(net(x)).argmax(1) != y).float().mean())


def floats(x: Tensor) -> Tensor:
    """Return ``x`` as float32."""
    return x.to_float() if isinstance(x, LNSTensor) else x


# -------------------------------------------------------------------------------------------------


def gain_in_float32(study: Study) -> dict[str, Any]:
    """Return by how many points the best of random search is worse than that of this study."""
    return gain(study, "float32")


def gain_in_lns12(study: Study) -> dict[str, Any]:
    """Return the same in lns12."""
    return gain(study, "lns12")


def gain(study: Study, row: str) -> dict[str, Any]:
    """Return the gain over ``evolution``, random search with gradients.

    Every seed of both is a search of its own (``search.per_seed``), which chooses on the validation
    set; the gain is the mean difference of their test errors over seeds. Searches of one seed and
    one space begin with the same configurations and weights.
    """
    name = "evolution" + (SMALL if study.config.name.endswith(SMALL) else "")
    try:
        other = lns_study.load(name, storage=str(study.folder.parent))
    except UserError as missing:
        note = f"{missing}; run it first: lns-study run {name.replace(SMALL, ' --small')}"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    left = sum(trial.status not in ENDED for trial in other.state.trials)
    if left:
        note = f"{left} of {len(other.state.trials)} trials of {name} are left"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    alone, here = (_by_seed(each, row) for each in (other, study))
    shared = sorted(alone.keys() & here.keys())
    if not shared:
        note = "no search of a seed has ended in both"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    designs = {_design(each) for each in (other, study)}
    if len(designs) > 1 or not study.config.search.per_seed:
        note = f"{name} is not a search of each seed, of as many configurations and epochs"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    found = of_mean([alone[seed] - here[seed] for seed in shared], "points", "searches")
    means = (statistics.fmean(each[seed] for seed in shared) for each in (alone, here))
    note = "random search {:.2f} %, here {:.2f} %".format(*means)
    note += f"; {found['note']}" if "note" in found else f"; over {len(shared)} searches of each"
    return found | {"runs": 2 * len(shared), "note": note}


def _design(study: Study) -> tuple[bool, int, int]:
    search = study.config.search
    return bool(search.per_seed), search.num_samples, study.config.trial.epochs


def _by_seed(study: Study, row: str) -> dict[int, float]:
    """Return the test error, in per cent, of the best configuration of every seed's search."""
    table = summarise(study.state)
    trials = next(each.trials for each in table.rows if each.label == row)
    return figures_by_seed(trials, table.metric)
