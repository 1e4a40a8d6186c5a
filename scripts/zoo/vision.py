"""timm's and torchvision's networks, at small sizes and without weights."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from zoo.network import Made, Network

_PLAIN = """
test_convnext test_convnext2 test_convnext3 test_resnet test_efficientnet test_efficientnet_evos
test_efficientnet_gn test_efficientnet_ln test_mambaout test_nfnet test_byobnet resnet10t
seresnet18 resnetv2_18 mobilenetv3_small_050 tf_mobilenetv3_small_minimal_100 ghostnet_050
lcnet_035 tinynet_e mobilevit_xxs edgenext_xx_small efficientvit_b0 pvt_v2_b0 poolformerv2_s12
regnetx_002 rexnetr_100 repvgg_a0 skresnet18 fastvit_t8 starnet_s1 mobileone_s0 dla46_c
inception_next_atto
"""
_SIZED = "test_vit test_vit2 test_vit3 test_vit4 mixer_s32_224 xcit_nano_12_p16_224 cait_xxs24_224"
TIMM: dict[str, dict[str, Any]] = {name: {} for name in _PLAIN.split()} | {
    name: {"img_size": 32} for name in _SIZED.split()
}
_TORCHVISION = {
    "alexnet": 64, "squeezenet1_1": 32, "googlenet": 32, "mnasnet0_5": 32, "mobilenet_v2": 32,
    "mobilenet_v3_small": 32, "regnet_y_400mf": 32, "resnet18": 32, "shufflenet_v2_x0_5": 32,
    "efficientnet_b0": 32, "vgg11_bn": 32, "swin_t": 32,
}  # fmt: skip
"""Names, and the height and width of images."""


def _timm(name: str, options: dict[str, Any]) -> Made:
    model = importlib.import_module("timm").create_model(name, num_classes=5, **options)
    return model, (torch.randn(2, 3, 32, 32),), {}


def _torchvision(name: str, size: int) -> Made:
    models = importlib.import_module("torchvision.models")
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    return getattr(models, name)(num_classes=5, **options), (torch.randn(2, 3, size, size),), {}


NETWORKS = [
    Network(name=f"timm-{name}", library="timm", make=partial(_timm, name, options))
    for name, options in TIMM.items()
] + [
    Network(name=f"torchvision-{n}", library="torchvision", make=partial(_torchvision, n, size))
    for n, size in _TORCHVISION.items()
]
