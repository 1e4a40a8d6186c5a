"""A user's file whose code changes its whole process, for tests of the effect on others."""

from __future__ import annotations

LEAKING = """
import os
import sys

import torch
from torch import nn

from trainers import report


def clamped(module, inputs, output):
    return output.clamp(-0.5, 0.5) if torch.is_tensor(output) else output


def linear(self, x):
    return 0.5 * nn.functional.linear(x, self.weight, self.bias)


def leak(how):
    if how == "hook":
        nn.modules.module.register_module_forward_hook(clamped)
    elif how == "method":
        nn.Linear.forward = linear
    elif how == "function":
        torch.randperm = lambda size, **_: torch.arange(size)
    elif how == "recursion":
        sys.setrecursionlimit(60)
    elif how == "umask":
        os.umask(0o777)
    elif how == "modules":
        sys.modules["trainers.workers.in_process"] = sys.modules["random"]


def make_net(inputs, classes, how=""):
    leak(how)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def make_loss(how=""):
    leak(how)
    return lambda outputs, targets: nn.functional.cross_entropy(outputs, targets)


def digits(train, how=""):
    from sklearn.datasets import load_digits

    leak(how)
    bunch = load_digits()
    x, y = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)
    return (x[:200], y[:200]) if train else (x[-100:], y[-100:])


def make_metric(how=""):
    from torchmetrics.classification import MulticlassAccuracy

    leak(how)
    return MulticlassAccuracy(10)


def train(config):
    leak(config["how"])
    report({"validation/error": 0.5})
    return {"test/error": 0.5}
"""
"""Each function leaves behind the change that its argument ``how`` names."""
