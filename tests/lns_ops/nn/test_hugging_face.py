"""Converted networks in transformers' Trainer and generation, and in Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import lns_ops
from lns_ops.serialization import to_floats
from lns_ops.tensor import storage_of
from tests.lns_ops.nets import digest
from tests.trainers.processes import spawned

WORDS, PADDING = 40, 38


def gpt2() -> nn.Module:
    """A GPT-2 whose head is its embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
            eos_token_id=39,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    """A Llama with grouped heads."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            bos_token_id=0, eos_token_id=39, pad_token_id=PADDING,
        )
    )  # fmt: skip


NETWORKS = {"gpt2": gpt2, "llama": llama}
SCOPES = ("everywhere", "matmul")


def converted(network: str = "gpt2", scope: str = "everywhere") -> Any:
    return lns_ops.convert_(NETWORKS[network](), "lns16", scope=scope)


class Counting(Dataset[dict[str, Tensor]]):
    """Sentences of ascending words."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (torch.arange(12) + index) % PADDING
        return {"input_ids": words, "labels": words}


# --------------------------------------------------------------------------------------------------

PROMPTS = torch.tensor([[PADDING, PADDING, 1, 2, 3], [5, 6, 7, 8, 9]])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("network", NETWORKS)
def test_generation(network: str, scope: str) -> None:
    """The cache of keys and values changes no word, and padding does not change other sentences."""
    model = converted(network, scope).eval()

    def words(prompts: Tensor = PROMPTS, **options: Any) -> list[list[int]]:
        torch.manual_seed(0)
        mask = (prompts != PADDING).long()
        made = model.generate(
            prompts, attention_mask=mask, max_new_tokens=6, pad_token_id=PADDING, **options
        )
        return made[:, prompts.shape[1] :].tolist()  # type: ignore[no-any-return]

    greedy = words(do_sample=False)
    assert greedy == words(do_sample=False, use_cache=False)
    assert greedy[:1] == words(PROMPTS[:1, 2:], do_sample=False)
    assert greedy == words(do_sample=False, cache_implementation="static")
    sampled = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.5}
    assert words(**sampled) == words(**sampled, use_cache=False) != greedy
    assert len(words(do_sample=False, num_beams=3, repetition_penalty=1.2)) == 2


@pytest.mark.parametrize("network", NETWORKS)
def test_pretrained_files_hold_values_that_encode_to_the_same_codes(
    network: str, tmp_path: Path
) -> None:
    model = converted(network)
    with pytest.raises(ValueError, match=r"save_pretrained\(path, state_dict=lns_ops"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, state_dict=to_floats(model.state_dict()))
    back = type(model).from_pretrained(tmp_path)
    tied = back.get_output_embeddings().weight is back.get_input_embeddings().weight
    assert tied == (network == "gpt2")
    assert digest(lns_ops.convert_(back, "lns16", scope="everywhere")) == digest(model)


def test_tied_layers_are_one_tensor_in_files_of_values() -> None:
    state = to_floats(converted("gpt2").state_dict())
    assert state["lm_head.weight"] is state["transformer.wte.weight"]


# --------------------------------------------------------------------------------------------------


class SavesValues(Trainer):
    """The recipe that the docs give for scope ``everywhere``."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, to_floats(self.model.state_dict()))


def trainer(model: Any, folder: Path, kind: type[Trainer] = SavesValues, **options: Any) -> Trainer:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **options}
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    optimizer = lns_ops.optim.AdamW(model.parameters(), lr=1e-2, kahan_sum=True)
    return kind(
        model=model, args=arguments, train_dataset=Counting(), eval_dataset=Counting(),
        optimizers=(optimizer, None),
    )  # fmt: skip


@pytest.mark.parametrize("scope", SCOPES)
def test_trainer_resumes_with_the_same_bits(scope: str, tmp_path: Path) -> None:
    model, again = converted(scope=scope), converted(scope=scope)
    whole = trainer(model, tmp_path, SavesValues if scope == "everywhere" else Trainer)
    before = whole.evaluate()["eval_loss"]
    whole.train()
    assert whole.evaluate()["eval_loss"] < before - 0.5
    trainer(again, tmp_path / "again").train(resume_from_checkpoint=tmp_path / "checkpoint-3")
    assert digest(again) == digest(model)
    assert whole.predict(Counting()).predictions.shape == (32, 12, WORDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2, "max_grad_norm": 0.1},
        {"gradient_checkpointing": True},
        {"label_smoothing_factor": 0.1},
    ],
    ids=lambda options: "+".join(options),
)
def test_options_of_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for step in (1, 6):
        whole = trainer(converted(), tmp_path, max_steps=step, save_strategy="no", **options)
        whole.train()
        losses.append(whole.evaluate()["eval_loss"])
    assert losses[1] < losses[0] - 0.2


def test_what_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    rounds_to_bfloat16 = trainer(converted(), tmp_path, bf16=True)
    with pytest.raises(ValueError, match=r"autocast.*lns16.*bf16=False"):
        rounds_to_bfloat16.train()
    takes_torchs_optimizer = trainer(converted(), tmp_path)
    takes_torchs_optimizer.optimizer = None
    with pytest.raises(ValueError, match=r"use lns_ops\.optim\.AdamW"):
        takes_torchs_optimizer.train()
    writes_memory = trainer(converted(), tmp_path, Trainer)
    with pytest.raises(ValueError, match=r"save_pretrained\(path, state_dict=lns_ops"):
        writes_memory.train()


# --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("scope", SCOPES)
def test_accelerate_saves_and_goes_on_with_the_same_bits(scope: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = converted(scope=scope)
    optimizer = lns_ops.optim.AdamW(model.parameters(), lr=1e-2, kahan_sum=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(Counting(), batch_size=8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    trained(accelerator, model, optimizer, loader)
    if scope == "everywhere":
        with pytest.raises(ValueError, match="safe_serialization=False"):
            accelerator.save_state(str(tmp_path / "refused"))
    accelerator.save_state(str(tmp_path), safe_serialization=scope == "matmul")
    trained(accelerator, model, optimizer, loader)
    ends = [storage_of(p.detach()).clone() for p in model.parameters()]
    accelerator.load_state(str(tmp_path))
    trained(accelerator, model, optimizer, loader)
    for parameter, end in zip(model.parameters(), ends, strict=True):
        assert torch.equal(storage_of(parameter.detach()), end)


def in_processes(rank: int, folder: str) -> dict[str, Any]:
    # Accelerate asks for an address, although the group exists already
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    accelerator = Accelerator(cpu=True)
    model = converted()
    optimizer = lns_ops.optim.AdamW(model.parameters(), lr=1e-2, kahan_sum=True)
    loader = DataLoader(Counting(), batch_size=8)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    try:
        accelerator.prepare(converted())
        said = ""
    except NotImplementedError as error:
        said = str(error)
    inner = accelerator.prepare_model(model, evaluation_mode=True)
    trained(accelerator, lns_ops.distributed_data_parallel(inner), optimizer, loader)
    return {"said": said, "processes": accelerator.num_processes, "digest": digest(model)}


@pytest.mark.slow
def test_accelerate_over_two_processes(tmp_path: Path) -> None:
    one, other = spawned(in_processes, tmp_path)
    assert one["processes"] == 2
    assert one["digest"] == other["digest"] != digest(converted())
    assert "lns_ops.distributed_data_parallel instead of" in one["said"]
