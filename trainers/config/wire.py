"""The configuration of the wire: the format in which gradients travel between workers."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.config.validation import at_least, finite, one_of, plain_values, require

FORMATS = ("native", "float32", "bfloat16", "float16", "lns16", "lns8", "int8", "topk", "powersgd")
SUMS = ("auto", "float32", "lns")
COMPRESSING = ("lns8", "int8", "topk", "powersgd")
"""The formats that need error feedback."""
JOINT = ("lns8", "int8", "topk")
"""The formats in which a value's code depends on other tensors that travel with it."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """The format in which gradients, or differences of weights, travel between replicas.

    Attributes:
        name: ``native`` (float32 gradients as float32, LNS gradients as their own codes of 2 bytes,
            or 1 byte for formats of at most 8 bits), or a format of :mod:`trainers.comm.codecs`, or
            ``powersgd`` (:mod:`trainers.sync.powersgd`).
        sum: arithmetic in which the values of the replicas are added up: ``float32``, ``lns``
            (codes of ``native`` LNS and ``lns16`` only), or ``auto``: LNS for ``native`` LNS
            gradients, else float32.
        topk: share of values that ``topk`` sends.
        rank: rank of ``powersgd``'s two factors.
        error_feedback: whether lns8, int8, topk and powersgd add a step's compression error to the
            next step's values. The other formats have too small errors to need this.
        bucket_cap_mb: size of the buckets, in megabytes of float32 values, in which synchronous
            replicas send gradients while backward still runs (:mod:`trainers.sync.buckets`); None
            sends all gradients at once after backward.
        overlap: whether buckets are sent while backward runs; False sends them after backward, for
            comparison.

    Example::

        >>> compressed = WireConfig(name="powersgd", rank=4)
    """

    name: str = "native"
    sum: str = "auto"
    topk: float = 0.01
    rank: int = 2
    error_feedback: bool = True
    bucket_cap_mb: float | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        one_of("wire.name", self.name, FORMATS)
        one_of("wire.sum", self.sum, SUMS)
        finite("wire.topk", self.topk, 0.0, "use for example wire.topk=0.01")
        require(
            f"wire.topk={self.topk}",
            0 < self.topk <= 1,
            "must be a share above 0 and at most 1",
            "use for example wire.topk=0.01",
        )
        at_least("wire.rank", self.rank, 1, "use for example wire.rank=2")
        if self.sum == "lns" and self.name not in ("native", "lns16"):
            raise ValueError(
                f"wire.sum=lns with wire.name={self.name}: only LNS codes can be added in LNS; use"
                " wire.name=lns16"
            )
        finite(
            "wire.bucket_cap_mb",
            self.bucket_cap_mb,
            1e-6,
            "25 is torch's default; leave it out to send all at once",
        )
        if self.bucket_cap_mb is not None and self.name == "powersgd":
            raise ValueError(
                f"wire.bucket_cap_mb={self.bucket_cap_mb} with wire.name=powersgd: its factors"
                " travel a parameter at a time; leave it out"
            )
        if not self.overlap and self.bucket_cap_mb is None:
            raise ValueError(
                "wire.overlap=false without wire.bucket_cap_mb: without buckets nothing overlaps;"
                " leave it out"
            )
        self._check_unused()

    def _check_unused(self) -> None:
        """Refuse a key that was set but that this format does not use."""
        for key, users in (
            ("topk", ("topk",)),
            ("rank", ("powersgd",)),
            ("error_feedback", COMPRESSING),
        ):
            value = getattr(self, key)
            if self.name not in users and value != getattr(WireConfig, key):
                raise ValueError(
                    f"wire.{key}={value} with wire.name={self.name}: means nothing to it; leave it"
                    f" out, or use one of {', '.join(users)}"
                )

    @property
    def feedback(self) -> bool:
        """Whether the compression errors are kept for error feedback."""
        return self.error_feedback and self.name in COMPRESSING
