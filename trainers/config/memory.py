"""The configuration of a trial's methods to save memory."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.config.validation import at_least, plain_values

AUTOCASTS = ("none", "bfloat16", "float16")


@plain_values
@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The methods to save memory, at the cost of more computation or more transfers.

    Attributes:
        activation_checkpoints: whether only the inputs of segments of layers are kept, and the
            other activations are recomputed in backward.
        segments: number of segments of the model, or of a pipeline's stage; None for the square
            root of the number of layers.
        offload_optimizer: whether the optimizer state of a GPU trial is kept on the CPU and the
            update is computed there (:mod:`trainers.optim.offload`).

    Example::

        >>> recompute = MemoryConfig(activation_checkpoints=True)
    """

    activation_checkpoints: bool = False
    segments: int | None = None
    offload_optimizer: bool = False

    def __post_init__(self) -> None:
        at_least(
            "memory.segments", self.segments, 2, "leave it out for the root of the number of layers"
        )
        if self.segments is not None and not self.activation_checkpoints:
            raise ValueError(
                f"memory.segments={self.segments} with memory.activation_checkpoints=false: nothing"
                " is checkpointed; use memory.activation_checkpoints=true"
            )
