"""Networks written out by hand that every course has: from the U-Net to the transformer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, rnn

from zoo.network import Made
from zoo.parts import FEATURES, IMAGES, Calls, Loss, by_hand, sinusoids, tokens


@by_hand
def _mlp_dropout() -> Made:
    layers = [nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 3)]
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@by_hand
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


@by_hand
def _dcgan_generator() -> Made:
    layers = [
        nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(4, 8, 1, 1),), {}


@by_hand
def _dcgan_discriminator() -> Made:
    layers = [
        nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 16, 4, 2, 1),
        nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1),
        nn.Sigmoid(),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.rand(IMAGES),), {}


@by_hand
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


def _language_model(kind: type[nn.RNNBase], **options: Any) -> Made:
    def forward(m: Any, x: Tensor) -> Loss:
        states, _ = m.rnn(m.embedding(x))
        logits = m.head(states)
        return Loss(F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))

    cell = kind(12, 16, batch_first=True, **options)
    width = 16 * (2 if options.get("bidirectional") else 1)
    model = Calls(forward, embedding=nn.Embedding(30, 12), rnn=cell, head=nn.Linear(width, 30))
    return model, (tokens(),), {}


@by_hand
def _lstm_language_model() -> Made:
    return _language_model(nn.LSTM, num_layers=2, dropout=0.1)


@by_hand
def _gru_language_model() -> Made:
    return _language_model(nn.GRU)


@by_hand
def _rnn_bidirectional() -> Made:
    return _language_model(nn.RNN, bidirectional=True, nonlinearity="relu")


@by_hand
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
    return model, (tokens(), torch.tensor([5, 9, 7])), {}


@by_hand
def _lstm_cell_loop() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 12)
        c = torch.zeros(x.shape[0], 12)
        for step in range(4):
            h, c = m.cell(x[:, step : step + 5], (h, c))
        return m.head(h)

    return Calls(forward, cell=nn.LSTMCell(5, 12), head=nn.Linear(12, 2)), (torch.randn(6, 10),), {}


@by_hand
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
    return model, (tokens(), tokens(3, 4)), {}


@by_hand
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


@by_hand
def _tcn_weight_norm() -> Made:
    layers = []
    for i, d in ((2, 1), (8, 2), (8, 4)):
        conv = parametrizations.weight_norm(nn.Conv1d(i, 8, 3, dilation=d, padding=d))
        layers += [conv, nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers), (torch.randn(3, 2, 16),), {}


@by_hand
def _weight_norm_old() -> Made:
    layers = [torch.nn.utils.weight_norm(nn.Linear(10, 12)), nn.Tanh(), nn.Linear(12, 2)]
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@by_hand
def _spectral_norm() -> Made:
    layers = [
        parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.1), nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(8 * 14 * 14, 2)),
    ]  # fmt: skip
    return nn.Sequential(*layers), (torch.randn(IMAGES),), {}


@by_hand
def _spectral_norm_old() -> Made:
    layers = [torch.nn.utils.spectral_norm(nn.Linear(10, 12)), nn.ReLU(), nn.Linear(12, 2)]
    return nn.Sequential(*layers), (torch.randn(FEATURES),), {}


@by_hand
def _symmetric_parametrization() -> Made:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    layer = nn.Linear(10, 10)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.GELU(), nn.Linear(10, 2)), (torch.randn(FEATURES),), {}


@by_hand
def _transformer_encoder_decoder() -> Made:
    def forward(m: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        a, b = (m.embedding(t) * 4 + m.positions[: t.shape[1]] for t in (source, target))
        return m.head(m.net(a, b, tgt_mask=mask, src_key_padding_mask=source == 0))

    net = nn.Transformer(16, 4, 1, 1, 24, batch_first=True)
    model = Calls(
        forward, embedding=nn.Embedding(30, 16), net=net, head=nn.Linear(16, 30),
        positions=sinusoids(12, 16),
    )  # fmt: skip
    return model, (tokens(), tokens()), {}


@by_hand
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
    return model, (tokens(),), {}


@by_hand
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
    return model, (tokens(),), {}


@by_hand
def _complex_rotary() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.q(m.embedding(x))
        turned = torch.view_as_complex(h.float().reshape(*h.shape[:-1], -1, 2)) * m.turns
        h = torch.view_as_real(turned).flatten(-2).type_as(h)
        return m.head(h)

    angles = torch.outer(torch.arange(9.0), 1.0 / (1e4 ** (torch.arange(0, 16, 2).float() / 16)))
    parts = {"q": nn.Linear(16, 16), "head": nn.Linear(16, 4)}
    turns = torch.polar(torch.ones_like(angles), angles)
    return Calls(forward, embedding=nn.Embedding(30, 16), turns=turns, **parts), (tokens(),), {}


@by_hand
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


@by_hand
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


@by_hand
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


@by_hand
def _siamese_contrastive() -> Made:
    def forward(m: Any, a: Tensor, b: Tensor, same: Tensor) -> Loss:
        distance = F.pairwise_distance(m.net(a), m.net(b))
        return Loss((same * distance.pow(2) + (1 - same) * F.relu(1 - distance).pow(2)).mean())

    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = (torch.randn(FEATURES), torch.randn(FEATURES), torch.tensor([0.0, 1, 1, 0, 1, 0]))
    return Calls(forward, net=net), inputs, {}


@by_hand
def _clip_like() -> Made:
    def forward(m: Any, a: Tensor, b: Tensor) -> Loss:
        x, y = (F.normalize(net(v), dim=-1) for net, v in ((m.left, a), (m.right, b)))
        logits = m.scale.exp() * x @ y.t()
        at = torch.arange(len(x))
        return Loss((F.cross_entropy(logits, at) + F.cross_entropy(logits.t(), at)) / 2)

    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    model = Calls(forward, left=nn.Linear(10, 8), right=nn.Linear(10, 8), scale=scale)
    return model, (torch.randn(FEATURES), torch.randn(FEATURES)), {}


@by_hand
def _attention_pooling() -> Made:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.hidden(x))
        weights = torch.softmax(m.score(h) + torch.zeros(5, 1), 1)
        return m.head((weights * h).sum(1))

    parts = {"hidden": nn.Linear(6, 8), "score": nn.Linear(8, 1), "head": nn.Linear(8, 2)}
    return Calls(forward, **parts), (torch.randn(3, 5, 6),), {}
