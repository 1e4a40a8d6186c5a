"""Networks written out by hand with functions of their own: graphs, experts, flows, policies."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from zoo.network import Made
from zoo.parts import FEATURES, IMAGES, Calls, Loss, by_hand

EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])


@by_hand
def _graph_convolution() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        source, target = EDGES
        degree = torch.zeros(8).index_add_(0, target, torch.ones(10)).clamp_min(1)
        for layer in (m.first, m.second):
            h = layer(x)
            x = torch.zeros(8, h.shape[1]).index_add_(0, target, h[source]) / degree[:, None]
            x = F.relu(x + h)
        return m.head(x)

    parts = {"first": nn.Linear(5, 8), "second": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    return Calls(forward, **parts), (torch.randn(8, 5),), {}


@by_hand
def _graph_attention() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        source, target = EDGES
        h = m.linear(x)
        e = F.leaky_relu(m.score(torch.cat([h[source], h[target]], -1))).squeeze(-1)
        largest = torch.full((8,), -1e9).scatter_reduce(0, target, e, "amax")
        w = (e - largest[target]).exp()
        total = torch.zeros(8).scatter_add(0, target, w)
        w = w / (total[target] + 1e-16)
        return m.head(F.elu(torch.zeros_like(h).index_add(0, target, w[:, None] * h[source])))

    parts = {"linear": nn.Linear(5, 8), "score": nn.Linear(16, 1), "head": nn.Linear(8, 3)}
    return Calls(forward, **parts), (torch.randn(8, 5),), {}


@by_hand
def _graph_adjacency() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.second(m.adjacency @ F.relu(m.first(m.adjacency @ x)))

    adjacency = torch.eye(8) + torch.rand(8, 8).round()
    adjacency = adjacency / adjacency.sum(1, keepdim=True)
    parts = {"first": nn.Linear(5, 8), "second": nn.Linear(8, 3), "adjacency": adjacency}
    return Calls(forward, **parts), (torch.randn(8, 5),), {}


@by_hand
def _graph_sparse_adjacency() -> Made:
    def forward(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        h = F.relu(torch.spmm(m.adjacency, m.first(x)))
        weights = torch.full((edges.shape[1],), 0.5)
        adjacency = torch.sparse_coo_tensor(edges, weights, (8, 8))
        return m.second(torch.sparse.mm(adjacency, h))

    adjacency = (torch.eye(8) + torch.ones(8, 8).tril(-6)).to_sparse()
    parts = {"first": nn.Linear(5, 8), "second": nn.Linear(8, 3), "adjacency": adjacency}
    inputs = (torch.randn(8, 5), torch.randint(0, 8, (2, 12)))
    return Calls(forward, **parts), inputs, {}


@by_hand
def _embedding_bag() -> Made:
    def forward(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
        return m.head(m.bag(x, offsets))

    inputs = (torch.randint(0, 30, (12,)), torch.tensor([0, 4, 7]))
    return Calls(forward, bag=nn.EmbeddingBag(30, 8), head=nn.Linear(8, 3)), inputs, {}


@by_hand
def _norms() -> Made:
    layers = [
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True), nn.Mish(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.LayerNorm(32), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Hardswish(), nn.Linear(16, 2),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(IMAGES),), {}


@by_hand
def _highway() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for gate, change in zip(m.gates, m.changes, strict=True):
            t = torch.sigmoid(gate(x))
            x = t * F.relu(change(x)) + (1 - t) * x
        return m.head(x)

    gates, changes = (nn.ModuleList(nn.Linear(10, 10) for _ in range(3)) for _ in range(2))
    model = Calls(forward, gates=gates, changes=changes, head=nn.Linear(10, 2))
    return model, (torch.randn(FEATURES),), {}


@by_hand
def _siren() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = torch.sin(30 * layer(x))
        return m.head(x)

    layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)])
    nn.init.uniform_(layers[1].weight, -math.sqrt(6 / 16) / 30, math.sqrt(6 / 16) / 30)
    return Calls(forward, layers=layers, head=nn.Linear(16, 1)), (torch.rand(20, 2),), {}


@by_hand
def _fourier_features() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ m.frequencies
        return m.net(torch.cat([angles.sin(), angles.cos()], -1))

    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return Calls(forward, frequencies=torch.randn(2, 8), net=net), (torch.rand(20, 2),), {}


@by_hand
def _learned_fourier_features() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        angles = m.frequencies(x)
        return m.head(torch.cat([angles.sin(), angles.cos()], -1))

    return (
        Calls(forward, frequencies=nn.Linear(2, 8), head=nn.Linear(16, 1)),
        (torch.rand(20, 2),),
        {},
    )


@by_hand
def _mixture_of_experts_dense() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        weights = F.softmax(m.gate(x), -1)
        return torch.einsum("be,beo->bo", weights, torch.stack([e(x) for e in m.experts], 1))

    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in "abc"
    )
    return Calls(forward, gate=nn.Linear(10, 3), experts=experts), (torch.randn(FEATURES),), {}


@by_hand
def _mixture_of_experts_top_k() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(m.gate(x), -1, dtype=torch.float), 2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros(x.shape[0], 3, dtype=x.dtype)
        for i, expert in enumerate(m.experts):
            rows, place = torch.where(chosen == i)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out

    experts = nn.ModuleList(nn.Linear(10, 3) for _ in range(4))
    return Calls(forward, gate=nn.Linear(10, 4), experts=experts), (torch.randn(FEATURES),), {}


@by_hand
def _neural_ode_euler() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for step in range(5):
            t = torch.full((x.shape[0], 1), step / 5)
            x = x + 0.2 * m.slope(torch.cat([x, t], 1))
        return m.head(x)

    slope = nn.Sequential(nn.Linear(11, 16), nn.Tanh(), nn.Linear(16, 10))
    return Calls(forward, slope=slope, head=nn.Linear(10, 2)), (torch.randn(FEATURES),), {}


@by_hand
def _kan_radial() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for base, spline in ((m.base1, m.spline1), (m.base2, m.spline2)):
            basis = torch.exp(-(((x.unsqueeze(-1) - m.grid) / 0.5) ** 2))
            x = base(F.silu(x)) + spline(basis.flatten(1))
        return x

    model = Calls(
        forward, base1=nn.Linear(10, 6), spline1=nn.Linear(50, 6), base2=nn.Linear(6, 2),
        spline2=nn.Linear(30, 2), grid=torch.linspace(-2, 2, 5),
    )  # fmt: skip
    return model, (torch.randn(FEATURES),), {}


@by_hand
def _kan_splines() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        x, grid = x.unsqueeze(-1), m.grid
        bases = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
        for k in (1, 2):
            left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * bases[..., :-1]
            right = (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * bases[..., 1:]
            bases = left + right
        return F.linear(F.silu(x.squeeze(-1)), m.base) + F.linear(bases.flatten(1), m.weight)

    grid = torch.linspace(-2, 2, 9)
    base, weight = (nn.Parameter(torch.randn(2, n) * 0.1) for n in (10, 60))
    return Calls(forward, grid=grid, base=base, weight=weight), (torch.rand(FEATURES),), {}


@by_hand
def _deep_sets() -> Made:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        h = m.each(x) * mask.unsqueeze(-1)
        return m.whole(torch.cat([h.sum(1) / mask.sum(1, keepdim=True), h.amax(1)], -1))

    each = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    inputs = (torch.randn(3, 5, 6), torch.tensor([[1.0, 1, 1, 0, 0]]).expand(3, -1))
    return Calls(forward, each=each, whole=nn.Linear(16, 2)), inputs, {}


@by_hand
def _pointer_network() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        memory, (h, _) = m.encoder(x)
        state, cell = h[0], torch.zeros_like(h[0])
        taken, losses = torch.zeros(x.shape[:2], dtype=torch.bool), []
        for step in range(x.shape[1]):
            state, cell = m.decoder(x[:, step], (state, cell))
            scores = m.v(torch.tanh(m.w1(memory) + m.w2(state).unsqueeze(1))).squeeze(-1)
            scores = torch.where(taken, torch.full_like(scores, -1e9), scores)
            target = torch.full((x.shape[0],), step)
            losses.append(F.nll_loss(F.log_softmax(scores, -1), target))
            taken = taken | F.one_hot(target, x.shape[1]).bool()
        return Loss(sum(losses) / len(losses))

    model = Calls(
        forward, encoder=nn.LSTM(2, 8, batch_first=True), decoder=nn.LSTMCell(2, 8),
        w1=nn.Linear(8, 8), w2=nn.Linear(8, 8), v=nn.Linear(8, 1),
    )  # fmt: skip
    return model, (torch.rand(4, 5, 2),), {}


@by_hand
def _vq_vae() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        z = m.encoder(x)
        nearest = torch.cdist(z, m.codebook.weight).argmin(-1)
        chosen = m.codebook(nearest)
        commitment = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())
        return Loss(F.mse_loss(m.decoder(z + (chosen - z).detach()), x) + commitment)

    parts = {
        "encoder": nn.Linear(10, 4),
        "decoder": nn.Linear(4, 10),
        "codebook": nn.Embedding(8, 4),
    }
    return Calls(forward, **parts), (torch.randn(FEATURES),), {}


@by_hand
def _gumbel_softmax() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.decoder(F.gumbel_softmax(m.encoder(x), tau=1.0, hard=True))

    return (
        Calls(forward, encoder=nn.Linear(10, 6), decoder=nn.Linear(6, 10)),
        (torch.randn(FEATURES),),
        {},
    )


@by_hand
def _diffusion() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        t = torch.rand(x.shape[0], 1)
        noise = torch.randn_like(x)
        noisy = (1 - t).sqrt() * x + t.sqrt() * noise
        angles = t * m.frequencies
        emb = m.time(torch.cat([angles.sin(), angles.cos()], -1))
        return Loss(F.mse_loss(m.out(F.silu(m.inner(noisy) + emb)), noise))

    parts = {"inner": nn.Linear(10, 16), "time": nn.Linear(8, 16), "out": nn.Linear(16, 10)}
    return Calls(forward, frequencies=torch.rand(4) * 100, **parts), (torch.randn(FEATURES),), {}


@by_hand
def _real_nvp() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        total = torch.zeros(x.shape[0])
        for i, net in enumerate(m.nets):
            mask = (torch.arange(10) % 2 == i % 2).float()
            s, t = net(x * mask).chunk(2, 1)
            s = torch.tanh(s) * (1 - mask)
            x = x * mask + (1 - mask) * (x * s.exp() + t)
            total = total + s.sum(1)
        prior = torch.distributions.Normal(torch.zeros(10), torch.ones(10))
        return Loss(-(prior.log_prob(x).sum(1) + total).mean())

    nets = nn.ModuleList(
        nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 20)) for _ in "ab"
    )
    return Calls(forward, nets=nets), (torch.randn(FEATURES),), {}


@by_hand
def _mixture_density() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        weight, mean, scale = m.net(x).chunk(3, -1)
        y = x[:, :1]
        log = -0.5 * ((y - mean) / F.softplus(scale)) ** 2 - F.softplus(scale).log()
        return Loss(-torch.logsumexp(F.log_softmax(weight, -1) + log, -1).mean())

    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 9))
    return Calls(forward, net=net), (torch.randn(FEATURES),), {}


@by_hand
def _policy_gradient() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        distribution = torch.distributions.Categorical(logits=m.policy(x))
        action = distribution.sample()
        advantage = x[:, 0] - m.value(x).squeeze(-1)
        actor = -(distribution.log_prob(action) * advantage.detach()).mean()
        return Loss(actor + advantage.pow(2).mean() - 0.01 * distribution.entropy().mean())

    return (
        Calls(forward, policy=nn.Linear(10, 3), value=nn.Linear(10, 1)),
        (torch.randn(FEATURES),),
        {},
    )


@by_hand
def _gaussian_policy() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        mean = m.mean(x)
        scale = m.log_scale.clamp(-5, 2).exp()
        normal = torch.distributions.Normal(mean, scale)
        raw = normal.rsample()
        action = torch.tanh(raw)
        log = normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return Loss((log.sum(-1) - m.q(torch.cat([x, action], -1)).squeeze(-1)).mean())

    model = Calls(
        forward, mean=nn.Linear(10, 2), q=nn.Linear(12, 1), log_scale=nn.Parameter(torch.zeros(2))
    )
    return model, (torch.randn(FEATURES),), {}
