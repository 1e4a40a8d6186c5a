"""The configuration of a trial's arithmetic: number format, rounding and summation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lns_ops.format import LNSFormat
from lns_ops.formats import ORDERS, Accumulation, Logarithmic, NumberFormat, parse
from lns_ops.spec.reference import ACCUMULATIONS
from lns_ops.spec.reference_updates import ARITHMETICS
from trainers.config.validation import at_least, one_of, plain_values, require

SCOPES = ("matmul", "everywhere")
FLOAT_FORMATS = ("float32",)
SUM_BLOCK_FORMATS = ("float32", "format")
MOST_OCTAVES = 24
"""The largest loss scale, as a power of two: the loss and its gradient are float32."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The arithmetic in which a trial trains.

    Attributes:
        format: ``float32``; an LNS format, computed in its own arithmetic: ``lns16``, ``lns12``,
            ``lns8``, ``lns(bits,fraction_bits)``; or any other format of :mod:`lns_ops.formats`,
            simulated (:mod:`lns_ops.nn.simulate`): values are rounded to its grid, sums are
            float32.
        scope: for LNS formats, ``matmul`` (products and their sums only) or ``everywhere``
            (parameters, activations, gradients and updates too). Ignored for float32; simulated
            formats are always used everywhere.
        kahan_sum: whether a Kahan compensation is kept for each parameter. With scope ``matmul``
            the parameters are float32, and so are the compensations.
        stochastic_rounding: whether updates round weights at random so that the expected value is
            the exact one; not for float32 parameters. The random bits depend on the trial's seed.
        update_arithmetic: arithmetic in which LNS parameters are updated: ``lns``, or ``float32``,
            with codes converted before and after.
        accumulation: for LNS formats, how sums of matrix products are taken: ``contract`` (in LNS)
            or ``float32``; see :mod:`lns_ops.functional.accumulation`. Ignored for other formats,
            which sum in float32 or in ``sum_format``.
        gradient_format: format of the gradients of a simulated format; None for ``format``.
        master_format: format of the finer copies of the weights to which a simulated format adds
            updates; None for no copies.
        sum_format: binary float to which the running sums of linear layers and convolutions are
            rounded after every addition, in simulated formats
            (:class:`lns_ops.formats.Accumulation`); None for sums in float32.
        sum_block: number of terms that are summed in ``sum_format`` before a new sum starts; None
            for a single sum.
        sum_order: order in which the terms of a block are added in ``sum_format``:
            ``sequential``, or ``tree``, in pairs.
        sum_of_blocks: format in which the sums of blocks are added: ``float32``, or ``format`` for
            ``sum_format``.
        loss_scale: power of two by which gradients are multiplied in backward, so that fewer
            underflow in a narrow format; the parameters' gradients are divided by it again
            (:class:`lns_ops.LossScale`). Ignored for float32; None for 1.

    Example::

        >>> everywhere = PrecisionConfig(format="lns12", scope="everywhere", kahan_sum=True)
        >>> small_float = PrecisionConfig(format="float(4,3)")
    """

    format: str = "float32"
    scope: str = "everywhere"
    kahan_sum: bool = False
    stochastic_rounding: bool = False
    update_arithmetic: str = "lns"
    accumulation: str = "contract"
    gradient_format: str | None = None
    master_format: str | None = None
    sum_format: str | None = None
    sum_block: int | None = None
    sum_order: str = ORDERS[0]
    sum_of_blocks: str = "float32"
    loss_scale: float | None = None

    def __post_init__(self) -> None:
        one_of("precision.scope", self.scope, SCOPES)
        one_of("precision.update_arithmetic", self.update_arithmetic, ARITHMETICS)
        one_of("precision.accumulation", self.accumulation, ACCUMULATIONS)
        one_of("precision.sum_order", self.sum_order, ORDERS)
        one_of("precision.sum_of_blocks", self.sum_of_blocks, SUM_BLOCK_FORMATS)
        at_least(
            "precision.sum_block", self.sum_block, 1, "use for example precision.sum_block=128"
        )
        if self.stochastic_rounding and self.kahan_sum:
            raise ValueError(
                "precision.kahan_sum=true, precision.stochastic_rounding=true: both save the"
                " part of an update that rounding would lose, so one is enough; choose one"
            )
        for key in ("format", "gradient_format", "master_format"):
            self._check_format(key)
        rounds = self.simulated or (self.lns_format is not None and self.scope == "everywhere")
        if self.stochastic_rounding and not rounds:
            raise ValueError(
                f"precision.stochastic_rounding=true with precision.format={self.format},"
                f" precision.scope={self.scope}: the parameters are float32, which rounds to"
                " nearest; use another format with precision.scope=everywhere, or"
                " precision.kahan_sum=true"
            )
        self._check_simulated()
        self._check_sums()
        self._check_loss_scale()

    def _check_format(self, key: str) -> None:
        """Refuse a name of a number format that cannot be parsed."""
        name = getattr(self, key)
        if name is None and key != "format":
            return
        try:
            parse(name)
        except ValueError as error:
            raise ValueError(
                f"precision.{key}={name!r}: {error}; use for example precision.{key}=lns12"
            ) from None

    def _check_simulated(self) -> None:
        """Refuse simulated formats' options for other formats, and scopes for simulated formats."""
        if not self.simulated:
            for key in ("gradient_format", "master_format", "sum_format"):
                if (value := getattr(self, key)) is not None:
                    raise ValueError(
                        f"precision.{key}={value} with precision.format={self.format}: the trial"
                        " computes in that one format; leave it out, or use a simulated format"
                        " such as bfloat16 or lns8/channel"
                    )
            return
        if self.scope != "everywhere":
            raise ValueError(
                f"precision.scope={self.scope} with precision.format={self.format}: only LNS has"
                " scopes; use precision.scope=everywhere, with precision.master_format=float32 if"
                " weights are to be kept in float32"
            )
        if self.master_format is not None and parse(self.master_format) == self.number_format:
            raise ValueError(
                f"precision.master_format={self.master_format} with precision.format={self.format}:"
                " copies of the weights in their own format keep nothing; leave it out, or use a"
                " finer one such as bfloat16 or float32"
            )

    def _check_sums(self) -> None:
        """Refuse a sum format that is not a binary float, and options of sums without a format."""
        if self.sum_format is None:
            for key, default in (
                ("sum_block", None),
                ("sum_order", ORDERS[0]),
                ("sum_of_blocks", SUM_BLOCK_FORMATS[0]),
            ):
                if (value := getattr(self, key)) != default:
                    raise ValueError(
                        f"precision.{key}={value} with precision.sum_format=null: sums are float32,"
                        " which has no blocks and no order; leave it out, or use for example"
                        " precision.sum_format=float(8,13)"
                    )
            return
        try:
            Accumulation(format=self.sum_format)
        except ValueError as error:
            raise ValueError(
                f"precision.sum_format={self.sum_format!r}: {str(error).rpartition('; ')[0]};"
                " use for example precision.sum_format=float(8,13)"
            ) from None

    def _check_loss_scale(self) -> None:
        """Refuse a scale that is not a power of two, or whose inverse underflows in the format."""
        if self.loss_scale is None:
            return
        scale, fmt = self.loss_scale, self.lns_format
        most = 2.0**MOST_OCTAVES if fmt is None else min(2.0**MOST_OCTAVES, fmt.most_scale)
        require(
            f"precision.loss_scale={scale} with precision.format={self.format}",
            1 <= scale <= most and math.frexp(scale)[0] == 0.5,
            f"must be a power of two from 1 to {most:.0f}",
            f"use for example precision.loss_scale={min(256, most):.0f}",
        )

    @property
    def number_format(self) -> NumberFormat:
        """The format as an object with the common interface of all formats."""
        return parse(self.format)

    @property
    def lns_format(self) -> LNSFormat | None:
        """The LNS format whose arithmetic is used, or None for a different kind of format."""
        fmt = self.number_format
        return fmt.lns if isinstance(fmt, Logarithmic) else None

    @property
    def sums_of_codes(self) -> str:
        """:attr:`accumulation`, and ``contract`` for formats without codes of LNS arithmetic.

        It is a setting of the whole process, and ``float32`` may switch torch's float32 products
        to TF32 for a moment, so that trials without LNS products must not run beside it.
        """
        return "contract" if self.lns_format is None else self.accumulation

    @property
    def sums(self) -> Accumulation | None:
        """How sums of linear layers and convolutions are rounded; None for sums in float32."""
        if self.sum_format is None:
            return None
        promote = "float32" if self.sum_of_blocks == "float32" else None
        return Accumulation(
            format=self.sum_format, block=self.sum_block, order=self.sum_order, promote=promote
        )

    @property
    def gradient_scale(self) -> float:
        """The effective loss scale; 1 for float32 and by default."""
        return 1.0 if self.format in FLOAT_FORMATS else self.loss_scale or 1.0

    @property
    def simulated(self) -> bool:
        """Whether the format is simulated: values rounded to its grid, computed with in float32."""
        return self.format not in FLOAT_FORMATS and self.lns_format is None
