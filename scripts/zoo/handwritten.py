"""Networks written out by hand, as papers and tutorials have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn

from zoo.network import Made, Network

NETWORKS: list[Network] = []
IMAGES, FEATURES, TOKENS = (4, 3, 16, 16), (6, 10), (3, 9)


def _network(make: Callable[[], Made]) -> Callable[[], Made]:
    name = make.__name__.strip("_").replace("_", "-")
    NETWORKS.append(Network(name=name, library="by hand", make=make))
    return make


def _tokens(rows: int = TOKENS[0], length: int = TOKENS[1]) -> Tensor:
    return torch.randint(0, 30, (rows, length))


class Calls(nn.Module):
    """A module whose forward pass is a function of itself and the inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@_network
def _mlp_dropout() -> Made:
    layers = [nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 3)]
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@_network
def _u_net() -> Made:
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(True))

    def forward(m: Any, x: Tensor) -> Tensor:
        a = m.down1(x)
        b = m.down2(F.max_pool2d(a, 2))
        c = m.bottom(F.max_pool2d(b, 2))
        b = m.up2(torch.cat([m.lift2(c), b], 1))
        lifted = F.interpolate(b, scale_factor=2, mode="bilinear", align_corners=False)
        return m.out(m.up1(torch.cat([lifted, a], 1)))

    model = Calls(
        forward, down1=block(3, 8), down2=block(8, 16), bottom=block(16, 32),
        lift2=nn.ConvTranspose2d(32, 16, 2, 2), up2=block(32, 16), up1=block(24, 8),
        out=nn.Conv2d(8, 2, 1),
    )  # fmt: skip
    return model, (torch.randn(2, 3, 16, 16),), {}


@_network
def _dcgan_generator() -> Made:
    layers = [
        nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(4, 8, 1, 1),), {}


@_network
def _dcgan_discriminator() -> Made:
    layers = [
        nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 16, 4, 2, 1),
        nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1),
        nn.Sigmoid(),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.rand(IMAGES),), {}


@_network
def _vae() -> Made:
    def forward(m: Any, x: Tensor) -> Any:
        mean, log_variance = m.encoder(x).chunk(2, -1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        back = torch.sigmoid(m.decoder(sample))
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        return Loss(F.binary_cross_entropy(back, x) + 0.01 * divergence)

    encoder = nn.Sequential(nn.Linear(10, 16), nn.ELU(), nn.Linear(16, 8))
    decoder = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 10))
    return Calls(forward, encoder=encoder, decoder=decoder), (torch.rand(FEATURES),), {}


class Loss(tuple[Tensor]):
    """A result that is a loss already."""

    def __new__(cls, loss: Tensor) -> Loss:
        return super().__new__(cls, (loss,))

    @property
    def loss(self) -> Tensor:
        return self[0]


def _language_model(kind: type[nn.RNNBase], **options: Any) -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        states, _ = m.rnn(m.embedding(x))
        logits = m.head(states)
        return Loss(F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))

    cell = kind(12, 16, batch_first=True, **options)
    width = 16 * (2 if options.get("bidirectional") else 1)
    model = Calls(forward, embedding=nn.Embedding(30, 12), rnn=cell, head=nn.Linear(width, 30))
    return model, (_tokens(),), {}


@_network
def _lstm_language_model() -> Made:
    return _language_model(nn.LSTM, num_layers=2, dropout=0.1)


@_network
def _gru_language_model() -> Made:
    return _language_model(nn.GRU)


@_network
def _rnn_bidirectional() -> Made:
    return _language_model(nn.RNN, bidirectional=True, nonlinearity="relu")


@_network
def _packed_gru() -> Made:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(
            m.embedding(x), lengths, batch_first=True, enforce_sorted=False
        )
        out, _ = rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)
        return m.head(out.sum(1) / lengths[:, None])

    model = Calls(
        forward, embedding=nn.Embedding(30, 8, padding_idx=0),
        rnn=nn.GRU(8, 12, batch_first=True), head=nn.Linear(12, 2),
    )  # fmt: skip
    return model, (_tokens(), torch.tensor([5, 9, 7])), {}


@_network
def _lstm_cell_loop() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12)
        c = torch.zeros(x.shape[0], 12)
        for step in range(4):
            h, c = m.cell(x[:, step : step + 5], (h, c))
        return m.head(h)

    return Calls(forward, cell=nn.LSTMCell(5, 12), head=nn.Linear(12, 2)), (torch.randn(6, 10),), {}


@_network
def _seq2seq_attention() -> Made:
    def forward(m: Any, source: Tensor, target: Tensor) -> Loss:
        memory, h = m.encoder(m.embedding(source))
        state, logits = h[0], []
        for step in range(target.shape[1]):
            scores = torch.bmm(memory, state.unsqueeze(-1)).squeeze(-1)
            scores = scores.masked_fill(source == 0, float("-inf"))
            context = torch.bmm(F.softmax(scores, -1).unsqueeze(1), memory).squeeze(1)
            state = m.decoder(torch.cat([m.embedding(target[:, step]), context], -1), state)
            logits.append(m.head(state))
        return Loss(F.cross_entropy(torch.stack(logits, 1).transpose(1, 2), target))

    model = Calls(
        forward, embedding=nn.Embedding(30, 8), encoder=nn.GRU(8, 12, batch_first=True),
        decoder=nn.GRUCell(20, 12), head=nn.Linear(12, 30),
    )  # fmt: skip
    return model, (_tokens(), _tokens(3, 4)), {}


@_network
def _wavenet() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        x, skips = m.first(x), 0
        for gate, skip, dilation in zip(m.gates, m.skips, (1, 2, 4), strict=True):
            a, b = gate(F.pad(x, (dilation, 0))).chunk(2, 1)
            h = torch.tanh(a) * torch.sigmoid(b)
            skips = skips + skip(h)
            x = x + h
        return m.last(F.relu(skips))

    gates = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=d) for d in (1, 2, 4))
    skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
    parts = {"first": nn.Conv1d(1, 8, 1), "gates": gates, "skips": skips}
    return Calls(forward, **parts, last=nn.Conv1d(8, 4, 1)), (torch.randn(2, 1, 32),), {}


@_network
def _tcn_weight_norm() -> Made:
    layers = []
    for i, d in ((2, 1), (8, 2), (8, 4)):
        conv = parametrizations.weight_norm(nn.Conv1d(i, 8, 3, dilation=d, padding=d))
        layers += [conv, nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers), (torch.randn(3, 2, 16),), {}


@_network
def _weight_norm_old() -> Made:
    layers = [torch.nn.utils.weight_norm(nn.Linear(10, 12)), nn.Tanh(), nn.Linear(12, 2)]
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@_network
def _spectral_norm() -> Made:
    layers = [
        parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.1), nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(8 * 14 * 14, 2)),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(IMAGES),), {}


@_network
def _spectral_norm_old() -> Made:
    layers = [torch.nn.utils.spectral_norm(nn.Linear(10, 12)), nn.ReLU(), nn.Linear(12, 2)]
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@_network
def _symmetric_parametrization() -> Made:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    layer = nn.Linear(10, 10)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.GELU(), nn.Linear(10, 2)), (torch.randn(FEATURES),), {}


@_network
def _transformer_encoder_decoder() -> Made:
    def forward(m: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        a, b = (m.embedding(t) * 4 + m.positions[: t.shape[1]] for t in (source, target))
        return m.head(m.net(a, b, tgt_mask=mask, src_key_padding_mask=source == 0))

    net = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)
    model = Calls(
        forward, embedding=nn.Embedding(30, 16), net=net, head=nn.Linear(16, 30),
        positions=_sinusoids(12, 16),
    )  # fmt: skip
    return model, (_tokens(), _tokens()), {}


def _sinusoids(length: int, width: int) -> Tensor:
    at = torch.arange(length)[:, None] * torch.exp(
        torch.arange(0, width, 2) * (-math.log(1e4) / width)
    )
    return torch.stack([at.sin(), at.cos()], -1).flatten(1)


@_network
def _nano_gpt() -> Made:
    def block(width: int, heads: int) -> nn.Module:
        def forward(m: Any, x: Tensor) -> Tensor:
            n, t, c = x.shape
            q, k, v = (
                y.view(n, t, heads, -1).transpose(1, 2) for y in m.qkv(m.norm1(x)).split(c, 2)
            )
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(m.mask[:t, :t] == 0, float("-inf"))
            y = (F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(n, t, c)
            x = x + m.out(y)
            return x + m.mlp(m.norm2(x))

        mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(approximate="tanh"), nn.Linear(32, width))
        return Calls(
            forward, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width), mlp=mlp,
            norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width),
            mask=torch.tril(torch.ones(16, 16)),
        )  # fmt: skip

    def forward(m: Any, x: Tensor) -> Loss:
        h = m.tokens(x) + m.positions(torch.arange(x.shape[1]))
        for layer in m.blocks:
            h = layer(h)
        return Loss(F.cross_entropy(m.head(h)[:, :-1].flatten(0, 1), x[:, 1:].flatten()))

    blocks = nn.ModuleList(block(16, 2) for _ in range(2))
    model = Calls(
        forward, tokens=nn.Embedding(30, 16), positions=nn.Embedding(16, 16), blocks=blocks,
        head=nn.Linear(16, 30, bias=False),
    )  # fmt: skip
    model.head.weight = model.tokens.weight
    return model, (_tokens(),), {}


@_network
def _rotary_llama() -> Made:
    def rotary(m: Any, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(length).float(), m.inverse)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.embedding(x)
        cos, sin = m.rotary(x.shape[1])
        q, k = (y * cos + torch.cat([-y[..., 8:], y[..., :8]], -1) * sin for y in (m.q(h), m.k(h)))
        mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(torch.float32).min).triu(1)
        scores = F.softmax(q @ k.transpose(-1, -2) / 4.0 + mask, -1, dtype=torch.float32)
        h = h + scores.type_as(h) @ m.v(h)
        h = m.norm(h)
        return m.head(F.silu(m.gate(h)) * m.up(h))

    inverse = 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16))
    names = ("q", "k", "v", "gate", "up", "head")
    layers = {name: nn.Linear(16, 16, bias=False) for name in names}
    model = Calls(
        forward, embedding=nn.Embedding(30, 16), norm=nn.RMSNorm(16),
        rotary=Calls(rotary, inverse=inverse), **layers,
    )  # fmt: skip
    return model, (_tokens(),), {}


@_network
def _complex_rotary() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.q(m.embedding(x))
        turned = torch.view_as_complex(h.float().reshape(*h.shape[:-1], -1, 2)) * m.turns
        h = torch.view_as_real(turned).flatten(-2).type_as(h)
        return m.head(h)

    angles = torch.outer(torch.arange(9.0), 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16)))
    parts = {"q": nn.Linear(16, 16), "head": nn.Linear(16, 4)}
    turns = torch.polar(torch.ones_like(angles), angles)
    return Calls(forward, embedding=nn.Embedding(30, 16), turns=turns, **parts), (_tokens(),), {}


@_network
def _mlp_mixer() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.patches(x).flatten(2).transpose(1, 2)
        h = h + m.tokens(m.norm1(h).transpose(1, 2)).transpose(1, 2)
        return m.head((h + m.channels(m.norm2(h))).mean(1))

    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    model = Calls(
        forward, patches=nn.Conv2d(3, 12, 4, 4), tokens=mlp(16), channels=mlp(12),
        norm1=nn.LayerNorm(12), norm2=nn.LayerNorm(12), head=nn.Linear(12, 3),
    )  # fmt: skip
    return model, (torch.randn(IMAGES),), {}


@_network
def _vit_class_token() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([m.token.expand(x.shape[0], -1, -1), h], 1) + m.positions
        return m.head(m.layers(h)[:, 0])

    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True)
    model = Calls(
        forward, patches=nn.Conv2d(3, 16, 4, 4), token=nn.Parameter(torch.zeros(1, 1, 16)),
        positions=nn.Parameter(torch.randn(1, 17, 16) * 0.02),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head=nn.Linear(16, 3),
    )  # fmt: skip
    return model, (torch.randn(IMAGES),), {}


@_network
def _capsules() -> Made:
    def squash(x: Tensor) -> Tensor:
        squared = x.pow(2).sum(-1, keepdim=True)
        return squared / (1 + squared) * x / torch.sqrt(squared + 1e-8)

    def forward(m: Any, x: Tensor) -> Tensor:
        u = squash(m.conv(x).reshape(x.shape[0], -1, 4))
        votes = torch.einsum("bid,iodk->biok", u, m.weight)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            weights = F.softmax(logits, 2)
            v = squash((weights.unsqueeze(-1) * votes).sum(1))
            logits = logits + (votes * v.unsqueeze(1)).sum(-1)
        return v.norm(dim=-1)

    weight = nn.Parameter(torch.randn(32, 3, 4, 6) * 0.3)
    model = Calls(forward, conv=nn.Conv2d(3, 8, 8, 4), weight=weight)
    return model, (torch.randn(2, 3, 20, 20),), {}


@_network
def _siamese_contrastive() -> Made:
    def forward(m: Any, a: Tensor, b: Tensor, same: Tensor) -> Loss:
        distance = F.pairwise_distance(m.net(a), m.net(b))
        return Loss((same * distance.pow(2) + (1 - same) * F.relu(1 - distance).pow(2)).mean())

    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = (torch.randn(FEATURES), torch.randn(FEATURES), torch.tensor([0.0, 1, 1, 0, 1, 0]))
    return Calls(forward, net=net), inputs, {}


@_network
def _clip_like() -> Made:
    def forward(m: Any, a: Tensor, b: Tensor) -> Loss:
        x, y = (F.normalize(net(v), dim=-1) for net, v in ((m.left, a), (m.right, b)))
        logits = m.scale.exp() * x @ y.t()
        at = torch.arange(len(x))
        return Loss((F.cross_entropy(logits, at) + F.cross_entropy(logits.t(), at)) / 2)

    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    model = Calls(forward, left=nn.Linear(10, 8), right=nn.Linear(10, 8), scale=scale)
    return model, (torch.randn(FEATURES), torch.randn(FEATURES)), {}


@_network
def _attention_pooling() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.hidden(x))
        weights = torch.softmax(m.score(h) + torch.zeros(5, 1), 1)
        return m.head((weights * h).sum(1))

    parts = {"hidden": nn.Linear(6, 8), "score": nn.Linear(8, 1), "head": nn.Linear(8, 2)}
    return Calls(forward, **parts), (torch.randn(3, 5, 6),), {}


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])


@_network
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


@_network
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


@_network
def _graph_adjacency() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.second(m.adjacency @ F.relu(m.first(m.adjacency @ x)))

    adjacency = torch.eye(8) + torch.rand(8, 8).round()
    adjacency = adjacency / adjacency.sum(1, keepdim=True)
    parts = {"first": nn.Linear(5, 8), "second": nn.Linear(8, 3), "adjacency": adjacency}
    return Calls(forward, **parts), (torch.randn(8, 5),), {}


@_network
def _embedding_bag() -> Made:
    def forward(m: Any, x: Tensor, offsets: Tensor) -> Tensor:
        return m.head(m.bag(x, offsets))

    inputs = (torch.randint(0, 30, (12,)), torch.tensor([0, 4, 7]))
    return Calls(forward, bag=nn.EmbeddingBag(30, 8), head=nn.Linear(8, 3)), inputs, {}


@_network
def _norms() -> Made:
    layers = [
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True), nn.Mish(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.LayerNorm(32), nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Hardswish(), nn.Linear(16, 2),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(IMAGES),), {}


@_network
def _highway() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for gate, change in zip(m.gates, m.changes, strict=True):
            t = torch.sigmoid(gate(x))
            x = t * F.relu(change(x)) + (1 - t) * x
        return m.head(x)

    gates, changes = (nn.ModuleList(nn.Linear(10, 10) for _ in range(3)) for _ in range(2))
    model = Calls(forward, gates=gates, changes=changes, head=nn.Linear(10, 2))
    return model, (torch.randn(FEATURES),), {}


@_network
def _siren() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = torch.sin(30 * layer(x))
        return m.head(x)

    layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)])
    nn.init.uniform_(layers[1].weight, -math.sqrt(6 / 16) / 30, math.sqrt(6 / 16) / 30)
    return Calls(forward, layers=layers, head=nn.Linear(16, 1)), (torch.rand(20, 2),), {}


@_network
def _fourier_features() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ m.frequencies
        return m.net(torch.cat([angles.sin(), angles.cos()], -1))

    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return Calls(forward, frequencies=torch.randn(2, 8), net=net), (torch.rand(20, 2),), {}


@_network
def _learned_fourier_features() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        angles = m.frequencies(x)
        return m.head(torch.cat([angles.sin(), angles.cos()], -1))

    return (
        Calls(forward, frequencies=nn.Linear(2, 8), head=nn.Linear(16, 1)),
        (torch.rand(20, 2),),
        {},
    )


@_network
def _mixture_of_experts_dense() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        weights = F.softmax(m.gate(x), -1)
        return torch.einsum("be,beo->bo", weights, torch.stack([e(x) for e in m.experts], 1))

    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in "abc"
    )
    return Calls(forward, gate=nn.Linear(10, 3), experts=experts), (torch.randn(FEATURES),), {}


@_network
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


@_network
def _neural_ode_euler() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        for step in range(5):
            t = torch.full((x.shape[0], 1), step / 5)
            x = x + 0.2 * m.slope(torch.cat([x, t], 1))
        return m.head(x)

    slope = nn.Sequential(nn.Linear(11, 16), nn.Tanh(), nn.Linear(16, 10))
    return Calls(forward, slope=slope, head=nn.Linear(10, 2)), (torch.randn(FEATURES),), {}


@_network
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


@_network
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


@_network
def _deep_sets() -> Made:
    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        h = m.each(x) * mask.unsqueeze(-1)
        return m.whole(torch.cat([h.sum(1) / mask.sum(1, keepdim=True), h.amax(1)], -1))

    each = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    inputs = (torch.randn(3, 5, 6), torch.tensor([[1.0, 1, 1, 0, 0]]).expand(3, -1))
    return Calls(forward, each=each, whole=nn.Linear(16, 2)), inputs, {}


@_network
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


@_network
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


@_network
def _gumbel_softmax() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.decoder(F.gumbel_softmax(m.encoder(x), tau=1.0, hard=True))

    return (
        Calls(forward, encoder=nn.Linear(10, 6), decoder=nn.Linear(6, 10)),
        (torch.randn(FEATURES),),
        {},
    )


@_network
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


@_network
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


@_network
def _mixture_density() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        weight, mean, scale = m.net(x).chunk(3, -1)
        y = x[:, :1]
        log = -0.5 * ((y - mean) / F.softplus(scale)) ** 2 - F.softplus(scale).log()
        return Loss(-torch.logsumexp(F.log_softmax(weight, -1) + log, -1).mean())

    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 9))
    return Calls(forward, net=net), (torch.randn(FEATURES),), {}


@_network
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


@_network
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


@_network
def _squeeze_excitation() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.relu6(m.norm(m.wide(x)))
        h = h * m.gate(h.mean((2, 3), keepdim=True))
        return m.head((m.narrow(m.depth(h)) + x).mean((2, 3)))

    gate = nn.Sequential(nn.Conv2d(12, 3, 1), nn.ReLU(), nn.Conv2d(3, 12, 1), nn.Hardsigmoid())
    model = Calls(
        forward, wide=nn.Conv2d(3, 12, 1), norm=nn.BatchNorm2d(12), gate=gate,
        depth=nn.Conv2d(12, 12, 3, padding=1, groups=12), narrow=nn.Conv2d(12, 3, 1),
        head=nn.Linear(3, 2),
    )  # fmt: skip
    return model, (torch.randn(IMAGES),), {}


@_network
def _spatial_transformer() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        theta = m.locate(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return m.head(m.conv(F.grid_sample(x, grid, align_corners=False)).mean((2, 3)))

    locate = nn.Linear(3 * 16 * 16, 6)
    nn.init.zeros_(locate.weight)
    locate.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
    model = Calls(forward, locate=locate, conv=nn.Conv2d(3, 6, 3), head=nn.Linear(6, 2))
    return model, (torch.randn(IMAGES),), {}


@_network
def _seg_net_unpooling() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h, places = F.max_pool2d(F.relu(m.down(x)), 2, return_indices=True)
        return m.up(F.max_unpool2d(m.middle(h), places, 2))

    parts = {"down": nn.Conv2d(3, 8, 3, padding=1), "middle": nn.Conv2d(8, 8, 3, padding=1)}
    return Calls(forward, **parts, up=nn.Conv2d(8, 2, 3, padding=1)), (torch.randn(IMAGES),), {}


@_network
def _super_resolution() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        up = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return up.clamp(-2, 2) + m.net(x)

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.PReLU(),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )
    return Calls(forward, net=net), (torch.randn(2, 3, 8, 8),), {}


@_network
def _fnet() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.embedding(x)
        h = m.norm(h + torch.fft.fft2(h, dim=(-2, -1)).real)
        return m.head(h)

    parts = {"norm": nn.LayerNorm(16), "head": nn.Linear(16, 4)}
    return Calls(forward, embedding=nn.Embedding(30, 16), **parts), (_tokens(),), {}


@_network
def _fourier_operator() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(m.lift(x))[..., :6]
        weight = torch.complex(m.real, m.imaginary)
        mixed = torch.einsum("bim,iom->bom", spectrum, weight)
        return m.out(F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + m.skip(m.lift(x))))

    real, imaginary = (nn.Parameter(torch.randn(8, 8, 6) * 0.1) for _ in range(2))
    parts = {"lift": nn.Conv1d(1, 8, 1), "skip": nn.Conv1d(8, 8, 1), "out": nn.Conv1d(8, 1, 1)}
    return Calls(forward, real=real, imaginary=imaginary, **parts), (torch.randn(3, 1, 16),), {}


@_network
def _state_space() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        step = F.softplus(m.step(x))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(m.log_a))
        inputs = (step * x).unsqueeze(-1) * m.b(x).unsqueeze(2)
        state, outputs = torch.zeros(x.shape[0], 6, 4), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + inputs[:, t]
            outputs.append((state * m.c(x[:, t]).unsqueeze(1)).sum(-1))
        return torch.stack(outputs, 1) + x * m.d

    log_a = nn.Parameter(torch.log(torch.arange(1.0, 5)).repeat(6, 1))
    parts = {"step": nn.Linear(6, 6), "b": nn.Linear(6, 4), "c": nn.Linear(6, 4)}
    model = Calls(forward, log_a=log_a, d=nn.Parameter(torch.ones(6)), **parts)
    return model, (torch.randn(2, 7, 6),), {}


@_network
def _hyper_network() -> Made:
    def forward(m: Any, x: Tensor, task: Tensor) -> Tensor:
        weight = m.hyper(task).view(4, 10)
        return F.linear(F.relu(F.linear(x, weight)), m.last)

    model = Calls(forward, hyper=nn.Linear(3, 40), last=nn.Parameter(torch.randn(2, 4)))
    return model, (torch.randn(FEATURES), torch.randn(3)), {}


@_network
def _two_towers() -> Made:
    def forward(m: Any, user: Tensor, item: Tensor, rating: Tensor) -> Loss:
        score = (m.users(user) * m.items(item)).sum(-1) + m.bias.squeeze()
        return Loss(((score - rating) ** 2).mean())

    parts = {"users": nn.Embedding(10, 6), "items": nn.Embedding(20, 6)}
    inputs = (torch.arange(8), torch.arange(8) * 2, torch.rand(8) * 5)
    return Calls(forward, bias=nn.Parameter(torch.zeros(1)), **parts), inputs, {}


@_network
def _factorization_machine() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        v = m.embedding(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(-1, keepdim=True)
        return torch.sigmoid(pairs + m.linear(x).sum(1) + m.bias)

    parts = {"embedding": nn.Embedding(30, 6), "linear": nn.Embedding(30, 1)}
    return Calls(forward, bias=nn.Parameter(torch.zeros(1)), **parts), (_tokens(),), {}


@_network
def _bilinear_trace() -> Made:
    def forward(m: Any, a: Tensor, b: Tensor) -> Tensor:
        y = m.bilinear(a, b)
        return y * torch.trace(m.bilinear.weight[0]) + torch.logaddexp(y, y.detach())

    return Calls(forward, bilinear=nn.Bilinear(5, 5, 3)), (torch.randn(4, 5), torch.randn(4, 5)), {}


@_network
def _rrelu_alpha_dropout() -> Made:
    layers = [
        nn.Linear(10, 16), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(16, 16), nn.SELU(),
        nn.FeatureAlphaDropout(0.1), nn.Linear(16, 8), nn.Softshrink(), nn.Linear(8, 2),
        nn.Softmax(-1),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@_network
def _channel_dropout_3d() -> Made:
    layers = [
        nn.Conv3d(1, 4, 3), nn.ReLU6(), nn.Dropout3d(0.1), nn.MaxPool3d(2), nn.Flatten(),
        nn.Linear(4 * 27, 3), nn.LogSoftmax(-1),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(2, 1, 8, 8, 8),), {}


@_network
def _quantile_erf() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        h = h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0)))
        centre = h.median(-1, keepdim=True).values
        return m.last(h - centre) * torch.cumprod(torch.sigmoid(h[:, :2]), -1)

    return (
        Calls(forward, first=nn.Linear(10, 8), last=nn.Linear(8, 2)),
        (torch.randn(FEATURES),),
        {},
    )


@_network
def _straight_through_binary() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.layer.weight
        binary = w + (torch.sign(w) * w.abs().mean() - w).detach()
        h = F.linear(x, binary, m.layer.bias)
        steps = (h * 4).clamp(-8, 7)
        return m.head(h + ((torch.round(steps) / 4) - h).detach())

    return (
        Calls(forward, layer=nn.Linear(10, 8), head=nn.Linear(8, 2)),
        (torch.randn(FEATURES),),
        {},
    )


@_network
def _low_rank_adapter() -> Made:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(10, 8)
            self.a, self.b = nn.Parameter(torch.randn(2, 10)), nn.Parameter(torch.zeros(8, 2))
            self.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x @ self.a.t() @ self.b.t() * 0.5

    return nn.Sequential(Adapted(), nn.ReLU(), nn.Linear(8, 2)), (torch.randn(FEATURES),), {}


@_network
def _standardized_convolution() -> Made:
    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            w = self.weight
            variance, mean = torch.var_mean(w, dim=(1, 2, 3), keepdim=True)
            w = (w - mean) / (variance + 1e-5).sqrt()
            return F.conv2d(x, w, self.bias, self.stride, self.padding)

    layers = [Standardized(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.AdaptiveMaxPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)), (torch.randn(IMAGES),), {}


@_network
def _linear_attention() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(m.embedding(x)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bnd,bne->bnde", k, v).cumsum(1)
        normal = torch.einsum("bnd,bnd->bn", q, k.cumsum(1)).clamp_min(1e-6)
        return m.head(torch.einsum("bnd,bnde->bne", q, state) / normal.unsqueeze(-1))

    parts = {"qkv": nn.Linear(12, 36), "head": nn.Linear(12, 4)}
    return Calls(forward, embedding=nn.Embedding(30, 12), **parts), (_tokens(),), {}


@_network
def _multi_head_attention_pooling() -> Made:
    def forward(m: Any, x: Tensor, valid: Tensor) -> Tensor:
        query = m.query.expand(x.shape[0], -1, -1)
        pooled, _ = m.attention(query, x, x, key_padding_mask=~valid)
        return m.head(pooled.squeeze(1))

    attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=6)
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[:, 3:] = False
    model = Calls(
        forward, query=nn.Parameter(torch.randn(1, 1, 8)), attention=attention, head=nn.Linear(8, 2)
    )
    return model, (torch.randn(3, 5, 6), valid), {}


@_network
def _orthogonal_recurrence() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            h = torch.relu(m.inputs(x[:, t]) + m.state(h))
        return m.head(h)

    state = parametrizations.orthogonal(nn.Linear(8, 8, bias=False))
    parts = {"inputs": nn.Linear(4, 8), "state": state, "head": nn.Linear(8, 2)}
    return Calls(forward, **parts), (torch.randn(3, 6, 4),), {}


@_network
def _physics_informed() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        x = x.clone().requires_grad_()
        u = m.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return Loss(((du - x) ** 2).mean() + (u[0] ** 2).mean())

    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    return Calls(forward, net=net), (torch.rand(16, 1),), {}


@_network
def _energy_forces() -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        x = x.clone().requires_grad_()
        distances = (x[:, None] - x[None]).pow(2).sum(-1).add(1e-3).sqrt()
        energy = m.net(torch.exp(-distances.unsqueeze(-1) * m.decay)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return Loss(force.pow(2).mean() + energy.pow(2))

    net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
    return Calls(forward, net=net, decay=torch.rand(4)), (torch.rand(5, 3),), {}
