"""Networks and data as users write them, for tests of factories."""

from __future__ import annotations

NETWORK = """
import torch
from torch import nn


def make_net(inputs, classes, width=4, dropout=0.0, norm=True):
    layers = [nn.Conv2d(inputs[0], width, 3, padding=1)]
    layers += [nn.BatchNorm2d(width)] if norm else []
    layers += [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width * 16, classes))


def digits(train, size=200):
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)
    return (x[:size], y[:size]) if train else (x[-100:], y[-100:])


def three(split):
    x, y = digits(split == "train")
    return (x[:50], y[:50]) if split == "validation" else (x, y)


class Examples(torch.utils.data.Dataset):
    def __init__(self, train):
        self.x, self.y = digits(train)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], int(self.y[index])


def raises(inputs):
    raise RuntimeError("no such weights")


def random_net(inputs, classes):
    import os

    torch.manual_seed(os.getpid())
    return make_net(inputs, classes)


def needs(inputs, depth):
    return nn.Flatten()


def nothing(inputs):
    return None


def wrong_shape(inputs):
    return nn.Flatten()


def flat(inputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
"""
"""A file of factories: ``make_net`` has batch norm and dropout, the others fail."""
