"""Networks of Hugging Face's transformers, from small configurations, without downloads."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from zoo.network import Made, Network

SMALL: dict[str, Any] = {
    key: value
    for value, keys in {
        32: "hidden_size d_model n_embd dim embed_dim d_embed emb_dim backbone_hidden_size",
        2: (
            "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
            " num_decoder_layers num_encoder_layers num_experts_per_tok eos_token_id"
        ),
        4: (
            "num_attention_heads n_head n_heads num_heads num_key_value_heads rotary_dim"
            " encoder_attention_heads decoder_attention_heads num_query_groups num_experts"
            " num_local_experts"
        ),
        48: (
            "intermediate_size ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim hidden_dim"
            " n_inner ffn_hidden_size"
        ),
        64: "max_position_embeddings n_positions",
        8: "d_kv d_head head_dim patch_size state_size",
        16: "embedding_size num_mel_bins max_source_positions moe_intermediate_size",
        0: "pad_token_id",
        1: "bos_token_id decoder_start_token_id",
        3: "num_labels",
        99: "vocab_size",
    }.items()
    for key in keys.split()
} | {"image_size": 32, "max_target_positions": 32, "use_cache": False}
"""Small values of the keys that configurations share."""
_RECURRENT = ("Mamba", "Rwkv", "OpenAIGPT", "CTRL", "RecurrentGemma")


def _configuration(model: Any, options: dict[str, Any]) -> Any:
    known = model.config_class()
    small = {
        key: value
        for key, value in SMALL.items()
        if hasattr(known, key) and not isinstance(getattr(known, key), list)
    }
    chosen = {k: v for k, v in {**small, **options}.items() if v is not None}
    return model.config_class(**chosen)


def _make(name: str, kind: str, options: dict[str, Any]) -> Made:
    model_class = getattr(importlib.import_module("transformers"), name)
    config = _configuration(model_class, options)
    return model_class(config), (), _BATCHES[kind](name, config)


def _ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 90, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return ids, mask


def _text(name: str, config: Any) -> dict[str, Any]:
    ids, mask = _ids()
    masked = {} if name.startswith(_RECURRENT) else {"attention_mask": mask}
    return {"input_ids": ids, "labels": ids, **masked}


def _masked(name: str, config: Any) -> dict[str, Any]:
    ids, mask = _ids()
    labels = {} if name == "CanineModel" else {"labels": ids}
    return {"input_ids": ids, "attention_mask": mask, **labels}


def _seq2seq(name: str, config: Any) -> dict[str, Any]:
    ids, mask = _ids()
    length = 12 if name.startswith("FSMT") else 6
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :length].clone()}


def _images(config: Any) -> torch.Tensor:
    size = getattr(config, "image_size", 32)
    return torch.randn(
        2, getattr(config, "num_channels", 3), *([size] * 2 if isinstance(size, int) else size)
    )


def _image(name: str, config: Any) -> dict[str, Any]:
    labels = torch.tensor([0, 1])
    if name.startswith("ImageGPT"):
        return {"input_ids": _ids()[0], "labels": labels}
    key = "inputs" if name.startswith("Perceiver") else "pixel_values"
    return {key: _images(config), "labels": labels}


def _pixels(name: str, config: Any) -> dict[str, Any]:
    return {"pixel_values": _images(config)}


def _audio(name: str, config: Any) -> dict[str, Any]:
    ids, _ = _ids()
    if name.startswith(("Whisper", "Speech2Text")):
        shape = (2, 16, 32) if name.startswith("Whisper") else (2, 32, 16)
        return {"input_features": torch.randn(shape), "labels": ids[:, :6].clone()}
    if name.startswith("AST"):
        values = torch.randn(2, 32, config.num_mel_bins)
        return {"input_values": values, "labels": torch.tensor([0, 1])}
    labels = torch.tensor([0, 1]) if "Sequence" in name else ids[:, :4].clone()
    return {"input_values": torch.randn(2, 400), "labels": labels}


_BATCHES = {
    "text": _text, "masked": _masked, "seq2seq": _seq2seq, "image": _image, "pixels": _pixels,
    "audio": _audio,
}  # fmt: skip


def _clip() -> Made:
    transformers = importlib.import_module("transformers")
    both = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    text = {k: SMALL[k] for k in (*both, "vocab_size", "max_position_embeddings", "eos_token_id")}
    vision = {k: SMALL[k] for k in (*both, "image_size", "patch_size")}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": _ids()[0], "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}
    return transformers.CLIPModel(config), (), batch


def _detr() -> Made:
    transformers = importlib.import_module("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_queries=5,
    )  # fmt: skip
    model = transformers.DetrForObjectDetection(config)
    return model, (), {"pixel_values": torch.randn(2, 3, 32, 32)}


_ENTRIES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
NETWORKS = [
    Network(name=f"hf-{name}", library="transformers", make=partial(_make, name, kind, options))
    for kind, entries in _ENTRIES.items()
    for name, options in entries.items()
] + [
    Network(name="hf-CLIPModel", library="transformers", make=_clip),
    Network(name="hf-DetrForObjectDetection", library="transformers", make=_detr),
]
