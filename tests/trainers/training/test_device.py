"""Finding a machine's GPUs without importing torch."""

from __future__ import annotations

import os

import pytest
import torch

from trainers.training import device

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def torch_models() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def test_gpu_models_are_those_that_torch_finds() -> None:
    assert device.gpu_models() == torch_models()


def test_where_nvml_does_not_know_a_gpu_torch_is_asked() -> None:
    with pytest.raises(device.NoNVMLError):
        device._models_by_nvml("GPU-0")


@pytest.mark.gpu
@needs_gpu
def test_hidden_gpus_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    for visible, count in (("0", 1), (first, 1), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert device.gpu_models() == torch_models()[:count]


@pytest.mark.gpu
@needs_gpu
def test_nvml_answers_where_there_is_a_gpu() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert device._models_by_nvml(visible) == torch_models()
