"""Seven GANs on triangles: the training loop of ``are_gans_equal``, and the check of its claims.

**Data.** An image has 16 x 16 pixels and shows one white triangle: three vertices drawn uniformly
in the unit square, redrawn while the area is below 0.05. A pixel is the product over the edges of
``sigmoid(2 d)``, d its distance to the edge in pixels, positive inside. So an image is a smooth
function of six numbers, and the distance to the set of triangles is a minimum over them.

**Losses**, D without a sigmoid, s the logistic function, x data, g = G(z)::

    mm       D: -log s(D(x)) - log(1 - s(D(g)))         G: log(1 - s(D(g)))
    ns       D: as mm                                   G: -log s(D(g))
    ls       D: (D(x) - 1)^2 + D(g)^2                   G: (D(g) - 1)^2
    wgan     D: D(g) - D(x), weights within +- clip     G: -D(g)
    wgan_gp  D: D(g) - D(x) + penalty (|D'(u)| - 1)^2   G: -D(g)       u between x and g
    dragan   D: as mm + penalty (|D'(u)| - 1)^2         G: as ns       u = x + noise
    began    D: e(x) - k e(g), k += rate (gamma e(x) - e(g)), within [0, 1]
             G: e(g)                                    e(x) = |x - D(x)|, D an autoencoder

**Figures.** Precision is the share of generated images nearer than ``DELTA`` to the set of
triangles; recall the share of held out triangles that have a G(z) nearer than that, over z; F1
their harmonic mean. Both minima are found by Adam from the nearest of 2,000 random candidates, so
they are upper bounds of distances and the shares lower bounds. They measure the weights as float32
numbers, whatever the format they were trained in.

The set is the paper's idea and so are losses and figures; its images have 28 x 28 pixels, its
networks are convolutional, and no figure can be set beside its own.

Source: M. Lucic et al. 2018, "Are GANs Created Equal? A Large-Scale Study" (arXiv:1711.10337).

Shape suffixes: N images, P pixels, Z numbers that a generator begins with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

import lns_ops
from lns_ops import LNSTensor
from study import Study
from study.results.budgets import chances, values_by_row
from study.results.resampling import bootstrap_between
from trainers import LoopContext

SIDE = 16
LATENT = 8
SMALLEST = 0.05
"""Least area of a triangle, as a share of the image."""
DELTA = 1.5
"""Largest Euclidean distance of images that count as the same: a pixel of 256 may be off by 0.094.
Two random triangles are 5.0 apart, and the nearest of 2,000 to one 1.4 (medians)."""
TRAIN, HELD_OUT, GENERATED, CANDIDATES = 2_000, 200, 200, 2_000
SEARCH_STEPS = 80
BATCH = 64
EPOCHS = 1 << 20
"""Distance between the seeds of two trials' random numbers."""
LOSSES = ("mm", "ns", "ls", "wgan", "wgan_gp", "dragan", "began")
ENOUGH = 10
"""Fewest configurations of a loss for a comparison of budgets."""
USUAL = "ns"
"""The loss that the paper found no other to outperform consistently."""
SIMILAR = 0.05
"""F1 by which a loss may be better at every budget and still be as good."""
TRAINED = 0.1
"""F1 below which the best network of a loss shows that the loss was not tried well enough."""


def train(config: dict[str, Any], context: LoopContext) -> dict[str, float]:
    """Train one GAN and report precision, recall and F1 after each epoch.

    ``config``: ``loss``, ``format``, ``kahan``, ``width``, ``steps`` of the generator an epoch,
    ``critic_steps`` of D for one of G, ``lr``, ``beta1``, ``penalty``, ``clip``, ``gamma``.

    Raises:
        ValueError: there is no such loss.
    """
    if config["loss"] not in LOSSES:
        raise ValueError(f"loss={config['loss']!r}: must be one of {', '.join(LOSSES)}; use ns")
    gan = Gan(config)
    x_NP = triangles(TRAIN, seed=1)
    splits = {"validation": triangles(HELD_OUT, seed=2), "test": triangles(HELD_OUT, seed=3)}
    first, epochs = 0, context.trial.epochs
    if isinstance(state := context.resume, dict):
        first = state["epoch"]
        gan.load(state)
    for epoch in range(first, epochs):
        torch.manual_seed(EPOCHS * context.seed + epoch)
        for x in batches(x_NP, config["steps"] * config["critic_steps"], config["critic_steps"]):
            gan.step(x)
        found = figures(gan.generator, splits["validation"], epoch)
        metrics = {f"validation/{name}": value for name, value in found.items()}
        context.report(metrics, checkpoint={"epoch": epoch + 1, **gan.state()})
    found = figures(gan.generator, splits["test"], epochs)
    return {f"test/{name}": value for name, value in found.items()}


class Gan:
    """A generator, a discriminator and their optimizers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.loss = config, config["loss"]
        width, pixels = config["width"], SIDE * SIDE
        self.generator = perceptron(LATENT, width, pixels, nn.Sigmoid())
        outputs = pixels if self.loss == "began" else 1
        end = nn.Sigmoid() if self.loss == "began" else nn.Identity()
        self.discriminator = perceptron(pixels, width, outputs, end)
        if config["format"] != "float32":
            for net in (self.generator, self.discriminator):
                lns_ops.convert_(net, config["format"], scope="everywhere")
        self.optimizers = [
            lns_ops.optim.Adam(
                net.parameters(), lr=config["lr"], betas=(config["beta1"], 0.999),
                kahan_sum=config["kahan"],
            )
            for net in (self.generator, self.discriminator)
        ]  # fmt: skip
        self.balance = 0.0

    def step(self, batch: list[Tensor]) -> None:
        """Update the discriminator on each part of ``batch``, then the generator once."""
        for x in batch:
            with torch.no_grad():
                g = floats(self.generator(torch.randn(len(x), LATENT)))
            self._update(1, self._of_discriminator(x, g))
            if self.loss == "wgan":
                clip_(self.discriminator, self.config["clip"])
        g = floats(self.generator(torch.randn(len(batch[0]), LATENT)))
        self._update(0, self._of_generator(g))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "nets": [self.generator.state_dict(), self.discriminator.state_dict()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "balance": self.balance,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.generator.load_state_dict(state["nets"][0])
        self.discriminator.load_state_dict(state["nets"][1])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.balance = state["balance"]

    def _update(self, which: int, loss: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        self.optimizers[which].step()

    def _of_discriminator(self, x: Tensor, g: Tensor) -> Tensor:
        if self.loss == "began":
            real, fake = self._error(x), self._error(g)
            surplus = self.config["gamma"] * real.item() - fake.item()
            loss = real - self.balance * fake
            self.balance = min(max(self.balance + 1e-3 * surplus, 0.0), 1.0)
            return loss
        real, fake = self._judge(x), self._judge(g)
        if self.loss == "ls":
            return (real - 1).square().mean() + fake.square().mean()
        if self.loss in ("wgan", "wgan_gp"):
            loss = fake.mean() - real.mean()
        else:
            loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        if self.loss == "wgan_gp":
            share = torch.rand(len(x), 1)
            loss = loss + self.config["penalty"] * self._slope(share * x + (1 - share) * g)
        if self.loss == "dragan":
            noise = 0.5 * x.std() * torch.rand_like(x)
            loss = loss + self.config["penalty"] * self._slope(x + noise)
        return loss

    def _of_generator(self, g: Tensor) -> Tensor:
        if self.loss == "began":
            return self._error(g)
        fake = self._judge(g)
        if self.loss == "mm":
            return -F.softplus(fake).mean()
        if self.loss == "ls":
            return (fake - 1).square().mean()
        if self.loss in ("wgan", "wgan_gp"):
            return -fake.mean()
        return F.softplus(-fake).mean()

    def _judge(self, x: Tensor) -> Tensor:
        return floats(self.discriminator(x))

    def _error(self, x: Tensor) -> Tensor:
        return (x - self._judge(x)).abs().mean()

    def _slope(self, u: Tensor) -> Tensor:
        """Return the mean of ``(|D'(u)| - 1)^2``, whose gradient is that of a gradient."""
        u = u.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self._judge(u).sum(), u, create_graph=True)
        found: Tensor = (slope.norm(dim=1) - 1).square().mean()
        return found


def perceptron(inputs: int, width: int, outputs: int, end: nn.Module) -> nn.Sequential:
    """Return two hidden layers of leaky ReLU; its second derivatives are LNS too."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs), end,
    )  # fmt: skip


def floats(x: Tensor) -> Tensor:
    """Return ``x`` as float32."""
    return x.to_float() if isinstance(x, LNSTensor) else x


@torch.no_grad()
def clip_(net: nn.Module, most: float) -> None:
    """Clip the weights of ``net`` to ``+- most``, in their own format."""
    for parameter in net.parameters():
        parameter.copy_(parameter.clamp(-most, most))


def batches(x_NP: Tensor, count: int, together: int) -> Iterator[list[Tensor]]:
    """Yield lists of ``together`` random batches, ``count`` batches in all."""
    for _ in range(count // together):
        yield [x_NP[torch.randint(len(x_NP), (BATCH,))] for _ in range(together)]


def triangles(count: int, seed: int) -> Tensor:
    """Return images of random triangles, ``[N, P]`` in [0, 1]."""
    return render(vertices(count, torch.Generator().manual_seed(seed)))


def vertices(count: int, generator: torch.Generator) -> Tensor:
    """Return vertices of random triangles, ``[N, 3, 2]`` in the unit square."""
    found = torch.rand(4 * count, 3, 2, generator=generator)
    large = found[doubled_area(found).abs() / 2 > SMALLEST]
    assert len(large) >= count  # about 55 % are
    return large[:count]


def doubled_area(vertices_N: Tensor) -> Tensor:
    """Return twice the signed area of triangles, ``[N, 3, 2] -> [N]``."""
    a, b = vertices_N[:, 1] - vertices_N[:, 0], vertices_N[:, 2] - vertices_N[:, 0]
    return a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]


def render(vertices_N: Tensor) -> Tensor:
    """Return images of triangles, ``[N, 3, 2] -> [N, P]``, differentiable in the vertices."""
    middles = (torch.arange(SIDE) + 0.5) / SIDE
    place_P = torch.cartesian_prod(middles, middles)
    turn = torch.sign(doubled_area(vertices_N))[:, None, None]
    edge = vertices_N.roll(-1, 1) - vertices_N
    to_pixel = place_P[None, None] - vertices_N[:, :, None]
    cross = edge[:, :, None, 0] * to_pixel[..., 1] - edge[:, :, None, 1] * to_pixel[..., 0]
    distance = turn * cross / edge.norm(dim=-1)[:, :, None].clamp_min(1e-6)
    return torch.sigmoid(2 * SIDE * distance).prod(1)


def figures(generator: nn.Module, held_out_NP: Tensor, seed: int) -> dict[str, float]:
    """Return precision, recall and F1 of a generator; see the head of this file."""
    plain = lns_ops.revert_(copy.deepcopy(generator)).requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        generated = plain(torch.randn(GENERATED, LATENT, generator=draw))
    of_triangles = nearest(generated, render, vertices(CANDIDATES, draw), 0.02)
    of_generated = nearest(held_out_NP, plain, torch.randn(CANDIDATES, LATENT, generator=draw), 0.1)
    precision, recall = (
        float((distance < DELTA).float().mean()) for distance in (of_triangles, of_generated)
    )
    both = precision + recall
    f1 = 2 * precision * recall / both if both else 0.0
    return {"f1": f1, "precision": precision, "recall": recall}


def nearest(
    x_NP: Tensor, image: Callable[[Tensor], Tensor], candidates: Tensor, lr: float
) -> Tensor:
    """Return the distance of each image to the nearest that ``image`` makes, ``[N]``.

    Args:
        x_NP: images.
        image: makes images of candidates, and is differentiable.
        candidates: where the search begins, each image's at the nearest of them.
        lr: step size of Adam.
    """
    with torch.no_grad():
        start = torch.cdist(x_NP, image(candidates)).argmin(1)
    place = candidates[start].clone().requires_grad_()
    optimizer = torch.optim.Adam([place], lr=lr)
    best = torch.full((len(x_NP),), math.inf)
    for _ in range(SEARCH_STEPS):
        optimizer.zero_grad()
        distance = (image(place) - x_NP).norm(dim=1)
        best = torch.minimum(best, distance.detach())
        distance.sum().backward()
        optimizer.step()
    return best


# -------------------------------------------------------------------------------------------------


def no_loss_is_consistently_better(study: Study) -> dict[str, Any]:
    """Return by how much the most consistent rival of ``ns`` is better than it, in F1.

    A budget k is a number of configurations tried at random: 1, 2, 4 ... up to half of all, as the
    best of nearly all that ran says too little of another search. A rival's advantage is the least,
    over the budgets, of its mean best of k minus that of ``ns``: above zero it is better at every
    one. The interval is by the bootstrap over configurations, corrected for the number of rivals.

    The claim fails if a rival's interval lies above 0, and holds if all lie below ``SIMILAR``. A
    loss whose best F1 is below ``TRAINED`` has not been tried: it keeps the claim from holding, and
    if it is ``ns``, from failing too. Configurations that failed are left out.
    """
    found = values_by_row(study.state)
    return judge_losses({loss: found.get(loss, []) for loss in LOSSES})


def judge_losses(values: dict[str, list[float]]) -> dict[str, Any]:
    """Return figure, interval and verdict of the F1 of each loss's configurations."""
    least = min(map(len, values.values()))
    if least < ENOUGH:
        note = f"a loss has {least} configurations, needs {ENOUGH}"
        return {"figure": math.nan, "verdict": "undecided", "note": note}
    scores = {loss: np.array(each) for loss, each in values.items()}
    rivals = [loss for loss in LOSSES if loss != USUAL]
    figures = {loss: float(_advantage(scores, loss)()[0]) for loss in rivals}
    ends = [
        bootstrap_between(
            [len(scores[loss]), len(scores[USUAL])], _advantage(scores, loss), len(rivals)
        )
        for loss in rivals
    ]
    low, high = (max(each) for each in zip(*filter(None, ends), strict=True))
    nearest = max(figures, key=lambda loss: figures[loss])
    lost = [loss for loss in LOSSES if scores[loss].max() < TRAINED]
    verdict = "fails" if low > 0 else "holds" if high < SIMILAR else "undecided"
    if USUAL in lost or (lost and verdict == "holds"):
        verdict = "undecided"
    notes = [
        f"fails if a loss's interval lies above 0, holds if all lie below {SIMILAR} F1",
        f"nearest to better at every budget: {nearest}, {figures[nearest]:.2f}",
    ]
    notes += [f"did not train: {', '.join(lost)} (best F1 below {TRAINED})"] if lost else []
    return {
        "figure": figures[nearest], "low": low, "high": high, "unit": f"F1 above {USUAL}",
        "verdict": verdict, "note": "; ".join(notes),
    }  # fmt: skip


def _advantage(scores: dict[str, NDArray[np.float64]], loss: str) -> Callable[..., Any]:
    """Return a function of drawn configurations: the least advantage of a loss over the budgets."""
    ours, theirs = scores[loss], scores[USUAL]
    count = min(len(ours), len(theirs))
    budgets = [2**power for power in range((count // 2).bit_length())]

    def best_of(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
        ordered = -np.sort(-drawn, axis=-1)
        weights = np.stack([chances(ordered.shape[-1], k) for k in budgets], axis=1)
        found: NDArray[np.float64] = ordered @ weights
        return found

    def figure_of(first: Any = None, second: Any = None) -> NDArray[np.float64]:
        a = ours[None] if first is None else ours[first]
        b = theirs[None] if second is None else theirs[second]
        least: NDArray[np.float64] = (best_of(a) - best_of(b)).min(axis=-1)
        return least

    return figure_of
