"""The table of torch operations that LNSTensor has, with the exactness of each.

The tests run it, and docs/operations.md shows it.

Names are from torch's OpInfo database
(``torch.testing._internal.common_methods_invocations.op_db``), whose sample inputs the tests use.
"""

from __future__ import annotations

import textwrap


def _names(text: str) -> list[str]:
    return text.split()


EXACT = _names("""
abs neg positive sign sgn signbit clone contiguous isnan isinf isfinite isreal nan_to_num eq ne lt
le gt ge logical_not logical_and logical_or logical_xor all any count_nonzero nonzero argwhere
maximum minimum fmax fmin max.binary min.binary max.reduction_no_dim max.reduction_with_dim
min.reduction_no_dim min.reduction_with_dim amax amin aminmax argmax argmin argsort sort msort topk
kthvalue clamp clamp_min clamp_max where masked_fill masked_select masked_scatter nn.functional.relu
nn.functional.relu6 nn.functional.hardtanh nn.functional.threshold nn.functional.hardshrink
broadcast_to broadcast_tensors expand expand_as expand_copy flip fliplr flipud roll rot90 permute
permute_copy transpose t T H mT mH movedim reshape reshape_as view view_as view_copy flatten ravel
unflatten squeeze squeeze.multiple unsqueeze atleast_1d atleast_2d atleast_3d cat stack hstack
vstack dstack column_stack chunk unsafe_chunk split split.list_args split_with_sizes unsafe_split
tensor_split hsplit vsplit dsplit unbind narrow select slice select_scatter slice_scatter diagonal
diagonal_copy diagonal_scatter diag_embed diagflat linalg.diagonal tril triu tile repeat
repeat_interleave unfold unfold_copy as_strided as_strided_copy meshgrid.variadic_tensors
meshgrid.list_of_tensors combinations cartesian_prod gather take take_along_dim index_select
index_copy index_fill __getitem__ scatter constant_pad_nd nn.functional.pad.constant
nn.functional.pad.circular nn.functional.pad.reflect nn.functional.pad.replicate
nn.functional.pad.replicate_negative nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
nn.functional.channel_shuffle nn.functional.unfold nn.functional.embedding nn.functional.max_pool1d
nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.adaptive_max_pool1d
nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d
nn.functional.interpolate.nearest nn.functional.interpolate.nearest-exact zeros_like ones_like
full_like new_zeros new_ones new_full zero_ isposinf isneginf
""")
"""Results are the exact ones: only signs, order and places of the arguments."""

ROUNDED = _names("""
add sub rsub mul div.no_rounding_mode true_divide __radd__ __rsub__ __rmul__ __rdiv__ reciprocal
square sqrt rsqrt outer kron exp exp2 expm1 pow __rpow__ log log2 log10 log1p sigmoid tanh
nn.functional.silu nn.functional.gelu nn.functional.mish nn.functional.elu nn.functional.celu
nn.functional.selu nn.functional.softplus nn.functional.logsigmoid nn.functional.hardswish
nn.functional.hardsigmoid nn.functional.leaky_relu nn.functional.prelu nn.functional.softshrink norm
norm.fro norm.inf linalg.norm linalg.vector_norm nn.functional.local_response_norm
""")
"""One rounding: results are within half an ulp of float64."""

SUMS = _names("""
sum mean cumsum sum_to_size mm bmm mv dot vdot inner matmul __rmatmul__ einsum tensordot addmm addmv
addr addbmm baddbmm linalg.multi_dot linalg.vecdot nn.functional.linear nn.functional.bilinear
nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d
nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.avg_pool1d
nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.adaptive_avg_pool1d
nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d nn.functional.interpolate.linear
nn.functional.interpolate.bilinear nn.functional.interpolate.trilinear
nn.functional.interpolate.area nn.functional.upsample_bilinear nn.functional.embedding_bag index_add
scatter_add index_put lerp addcmul addcdiv
""")
"""Sums in the contract's order: within ``SUM_HALF_ULPS`` half-ulps of the sum of magnitudes,
``f(|x|, ...)``."""

COMPOSED = _names("""
var var_mean std std_mean var.unbiased std.unbiased logsumexp softmax nn.functional.softmin
nn.functional.layer_norm nn.functional.group_norm nn.functional.normalize nn.functional.softsign
nn.functional.tanhshrink nn.functional.glu nn.functional.scaled_dot_product_attention
_segment_reduce.lengths _segment_reduce.offsets
""")
"""Several operations: the whole result is within ``COMPOSED_HALF_ULPS`` half-ulps of float64 in the
norm."""

IN_FLOAT32 = _names("""
log_softmax nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss
nn.functional.l1_loss nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.kl_div
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
nn.functional.soft_margin_loss nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss
nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.poisson_nll_loss
nn.functional.gaussian_nll_loss nn.functional.ctc_loss nn.functional.cosine_embedding_loss
nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss
nn.functional.multilabel_soft_margin_loss
""")
"""Losses: torch's own on the decoded values."""

DECODED = _names("""
sin cos tan asin acos atan sinh cosh asinh acosh atanh sinc erf erfc erfinv lgamma digamma logit
atan2 hypot heaviside xlogy logaddexp logaddexp2 logcumsumexp floor ceil round trunc frac remainder
fmod floor_divide div.floor_rounding div.trunc_rounding frexp prod cumprod cummax cummin median
nanmedian mode quantile histogram nansum unique unique_consecutive bucketize searchsorted isin
isclose dist cdist cross renorm linspace.tensor_overload lu_unpack trace cov corrcoef linalg.inv
linalg.det linalg.slogdet linalg.qr linalg.svd linalg.cholesky linalg.solve linalg.eigh matrix_exp
linalg.matrix_power nn.functional.pairwise_distance nn.functional.cosine_similarity
nn.functional.grid_sample nn.functional.interpolate.bicubic nn.functional.max_unpool1d
nn.functional.max_unpool2d scatter_reduce.amax scatter_reduce.amin scatter_reduce.mean
scatter_reduce.prod fft.fft fft.rfft stft view_as_complex to half double long bfloat16
""")
"""No LNS arithmetic: torch computes in float32, and the result is encoded once; the same for
gradients. Complex, boolean and integer results are not encoded."""

SUM_HALF_ULPS, COMPOSED_HALF_ULPS = 16, 24
GROUPS = {
    "exact": (EXACT, "the exact result: only signs, order and places"),
    "rounded once": (ROUNDED, "within half an ulp of float64"),
    "sums": (
        SUMS,
        (
            f"in the contract's order; within {SUM_HALF_ULPS} half-ulps of the sum of magnitudes on"
            " torch's samples"
        ),
    ),
    "composed": (
        COMPOSED,
        (
            f"several of the above; within {COMPOSED_HALF_ULPS} half-ulps in the norm on torch's"
            " samples"
        ),
    ),
    "decoded": (
        DECODED,
        "torch's float32 result of the decoded values (of integers, where it rounds), rounded once",
    ),
    "losses": (IN_FLOAT32, "torch's float32 result of the decoded values"),
}


def document() -> str:
    """Return the text of docs/operations.md."""
    head = """
This page lists the torch operations that work on an `LNSTensor`, and how exact each is. It is
generated by `python -m tests.lns_ops.operations` from the table that
`tests/lns_ops/tensor/ops/test_operations.py` tests with torch's own sample inputs. Names are from
torch's OpInfo database.

- These layers also work, and are tested elsewhere (`tests/lns_ops/tensor/test_layers.py`):
  BatchNorm, InstanceNorm, RMSNorm, dropout, LSTM (also with `proj_size`), GRU, RNN and their cells,
  packed sequences, MultiheadAttention, Transformer layers and `conv_tbc`.
- An operation without an LNS kernel raises an error with its name. Within
  `lns_ops.allow_float_fallback()` it is computed in float32 and counted instead.
- The bounds apply to results. A gradient consists of several operations and is rounded after each.
- `tests/lns_ops/at_length/test_operations.py` compares with float64: results and gradients of
  100,000 terms, values of 1,000, and values with a mean of 100."""
    lines = ["# Operations of LNSTensor", *head.splitlines()]
    for title, (names, meaning) in GROUPS.items():
        shown = ", ".join(f"`{name.removeprefix('nn.functional.')}`" for name in names)
        wrapped = textwrap.wrap(shown, 100, break_long_words=False, break_on_hyphens=False)
        lines += ["", f"## {title.capitalize()}", "", f"Result: {meaning}.", "", *wrapped]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from pathlib import Path

    Path("docs/operations.md").write_text(document())
