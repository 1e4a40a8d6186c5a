"""Ten tiny networks in plain torch for ``bench_tiny.py``, whose steps spend most time in Python.

Each function returns a module and a function that computes its loss. Sizes are typical of tests and
tutorials: a few thousand weights, about ten examples.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]


def _classes(*shape: int, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.randint(classes, (shape[0],))


def mlp() -> tuple[nn.Module, Loss]:
    """Return three linear layers with ReLU."""
    net = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    x, y = _classes(16, 16)
    return net, lambda net: F.cross_entropy(net(x), y)


def cnn() -> tuple[nn.Module, Loss]:
    """Return two convolutions with batch norm, ReLU and pooling."""
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    x, y = _classes(8, 1, 12, 12)
    return net, lambda net: F.cross_entropy(net(x), y)


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class _Llama(nn.Module):
    """A block of a language model: rotary embeddings, causal attention, SwiGLU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 32, heads: int = 4, steps: int = 8, words: int = 20) -> None:
        super().__init__()
        self.heads = heads
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.norm1, self.norm2 = _RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(steps), 100.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, words: Tensor) -> Tensor:
        h = self.embedding(words)
        x = self.norm1(h)
        q, k, v = (self._heads(f(x)) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        h = h + self.o(y.transpose(1, 2).reshape(h.shape))
        x = self.norm2(h)
        return self.head(h + self.down(F.silu(self.gate(x)) * self.up(x)))


def llama() -> tuple[nn.Module, Loss]:
    """Return a block of a language model."""
    words, following = torch.randint(20, (4, 8)), torch.randint(20, (32,))
    return _Llama(), lambda net: F.cross_entropy(net(words).flatten(0, 1), following)


class _Gru(nn.Module):
    """A GRU cell in a loop of Python."""

    def __init__(self, inputs: int = 8, width: int = 16) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(inputs, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        return self.head(h)


def gru() -> tuple[nn.Module, Loss]:
    """Return a recurrent cell over eight steps."""
    x, y = _classes(8, 8, 8)
    return _Gru(), lambda net: F.cross_entropy(net(x), y)


def _block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU()
    )


class _UNet(nn.Module):
    """Down, a middle with the time's embedding, up, with a concatenated skip."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.middle = _block(1, width), _block(width, 2 * width)
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 2 * width))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join, self.out = _block(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        skip = self.down(x)
        h = self.middle(F.avg_pool2d(skip, 2)) + self.time(time)[:, :, None, None]
        return self.out(self.join(torch.cat([self.up(h), skip], 1)))


def unet() -> tuple[nn.Module, Loss]:
    """Return a denoising network of one scale."""
    x, noise, time = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.randn(4, 8)
    return _UNet(), lambda net: F.mse_loss(net(x + noise, time), noise)


class _Mixer(nn.Module):
    """Mixing of tokens, then of channels, each around a residual sum."""

    def __init__(self, tokens: int = 9, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mixer() -> tuple[nn.Module, Loss]:
    """Return two residual blocks of an MLP mixer."""
    net = nn.Sequential(nn.Linear(16, 16), _Mixer(), _Mixer(), _Mean(), nn.Linear(16, 4))
    x, y = _classes(8, 9, 16)
    return net, lambda net: F.cross_entropy(net(x), y)


class _Ssm(nn.Module):
    """A selective state space in a loop of Python, as Mamba's reference code has it."""

    def __init__(self, width: int = 16, states: int = 4) -> None:
        super().__init__()
        self.states = states
        self.inward, self.outward = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.select, self.delta = nn.Linear(width, 2 * states + 1), nn.Linear(1, width)
        self.a_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.skip, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inward(x).chunk(2, -1)
        u = F.silu(u)
        b, c, step = self.select(u).split([self.states, self.states, 1], -1)
        delta = F.softplus(self.delta(step))
        decay = torch.exp(delta[..., None] * -self.a_log.exp())
        inputs = delta[..., None] * b[:, :, None] * u[..., None]
        h, ys = inputs[:, 0], []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + inputs[:, t]
            ys.append((h * c[:, t, None]).sum(-1))
        y = (torch.stack(ys, 1) + u * self.skip) * F.silu(gate)
        return self.head(self.outward(y).mean(1))


def ssm() -> tuple[nn.Module, Loss]:
    """Return a selective state space model over eight steps."""
    x, y = _classes(4, 8, 16)
    return _Ssm(), lambda net: F.cross_entropy(net(x), y)


class _Experts(nn.Module):
    """Two of four experts for every token, whose results are put back by index_add."""

    def __init__(self, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(width, experts), nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return self.head(x + out)


def moe() -> tuple[nn.Module, Loss]:
    """Return a mixture of four experts."""
    x, y = _classes(16, 16)
    return _Experts(), lambda net: F.cross_entropy(net(x), y)


class _Messages(nn.Module):
    """Message passing: along edges, summed at nodes, divided by degrees."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        total = torch.zeros_like(x).index_add(0, target, messages)
        degrees = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        return F.relu(self.update(torch.cat([x, total / degrees], -1))) + x


class _Graph(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = _Messages(width), _Messages(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.second(self.first(x, source, target), source, target))


def gnn() -> tuple[nn.Module, Loss]:
    """Return two rounds of message passing on a graph of 20 nodes and 60 edges."""
    x, y = _classes(20, 16)
    source, target = torch.randint(20, (2, 60))
    return _Graph(), lambda net: F.cross_entropy(net(x, source, target), y)


class _Adapted(nn.Module):
    """A linear layer that is frozen, and a correction of rank four that is trained."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.t() @ self.b.t()) * 2.0


def lora() -> tuple[nn.Module, Loss]:
    """Return three layers with corrections of low rank."""
    net = nn.Sequential(
        _Adapted(16, 32), nn.GELU(), nn.LayerNorm(32), _Adapted(32, 32), nn.GELU(), _Adapted(32, 4)
    )
    x, y = _classes(16, 16)
    return net, lambda net: F.cross_entropy(net(x), y)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    f.__name__: f for f in (mlp, cnn, llama, gru, unet, mixer, ssm, moe, gnn, lora)
}
