"""The checks of ``one_hash``: the SHA-256 of the weights of trials, and of a trial that is killed
and trained again on every kernel of this processor."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lns_ops.cpu.kernel_choice import missing_features
from study import Study
from study.ledger.state import FINISHED, TrialState
from trainers.checkpoint.files import load_checkpoint
from trainers.checkpoint.manifest import STATE, read_state
from trainers.config import TrialConfig
from trainers.training.trainer import Training

SHOWN = 12
"""Number of hex digits of a hash that a note shows."""
KERNELS = {"gather": (), "avx2": ("avx2",), "simd": ("avx512bw", "avx512vbmi")}
"""Values of LNS_OPS_CPU_KERNEL, each with what it needs of a processor; simd is AVX-512."""


def hash_of(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's tensors, optimizer state included, in the order of their
    names; what single ranks keep is left out."""
    found = hashlib.sha256()
    tensors, _ = load_checkpoint(folder)
    for name, tensor in sorted(tensors.items()):
        if not name.startswith("rank"):
            found.update(name.encode())
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def layouts(study: Study) -> dict[str, Any]:
    """Return how many different hashes the trials of a seed have, at most."""
    finished = [trial for trial in study.state.trials if trial.status == FINISHED]
    by_seed: dict[int, dict[str, str]] = {}
    for trial in finished:
        by_seed.setdefault(trial.seed, {})[trial.row] = hash_of(_last(trial))
    return _found(by_seed, len({trial.row for trial in study.state.trials}))


def kernels(study: Study) -> dict[str, Any]:
    """Return how many different hashes the first row has on the kernels of this processor, each
    time killed after the first epoch that is saved, and resumed."""
    trials = [trial for trial in study.state.trials if trial.status == FINISHED]
    trial = trials[0]
    found = {trial.row: hash_of(_last(trial))}
    for kernel in KERNELS:
        if missing_features(*KERNELS[kernel]):
            continue
        folder = study.folder / "kernels" / kernel
        _train(trial, kernel, folder, kill=True)
        _train(trial, kernel, folder, kill=False)
        found[kernel] = hash_of(folder)
    return _found({trial.seed: found}, len(found))


def _found(by_seed: dict[int, dict[str, str]], rows: int) -> dict[str, Any]:
    counts = [len(set(hashes.values())) for hashes in by_seed.values()]
    whole = all(len(hashes) == rows for hashes in by_seed.values())
    note = "; ".join(
        f"seed {seed}: " + ", ".join(f"{name} {value[:SHOWN]}" for name, value in hashes.items())
        for seed, hashes in by_seed.items()
    )
    verdict = "undecided" if not whole else "holds" if set(counts) == {1} else "fails"
    return {"figure": max(counts), "verdict": verdict, "unit": "hashes", "note": note}


def _last(trial: TrialState) -> Path:
    return Path(trial.checkpoints_left()[0])


def _train(trial: TrialState, kernel: str, folder: Path, *, kill: bool) -> None:
    """Train a trial in a process of its own, which goes on from ``folder``; with ``kill`` it dies
    by SIGKILL once it has saved anything."""
    there = (folder / STATE).exists()
    if there and (kill or read_state(folder)["epoch"] == trial.config["epochs"]):
        return
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"LNS_OPS_CPU_KERNEL": kernel},
        stdin=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(trial.config))
    process.stdin.close()
    while process.poll() is None:
        time.sleep(0.05)
        if kill and (folder / STATE).exists():
            process.kill()
    if process.returncode != (-signal.SIGKILL if kill else 0):
        raise RuntimeError(f"{kernel}: training ended with exit code {process.returncode}")
    if kill and read_state(folder)["epoch"] == trial.config["epochs"]:
        raise RuntimeError(f"{kernel}: training was killed after its last epoch; take more epochs")


def main(folder: Path) -> None:
    """Train the trial whose config is on stdin, saving each epoch in ``folder``."""
    training = Training(TrialConfig.from_dict(json.load(sys.stdin)))
    if (folder / STATE).exists():
        training.restore(folder)
    while training.epoch < training.config.epochs:
        training.train_epoch()
        training.save(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
