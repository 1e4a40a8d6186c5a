"""Functions without an LNS arithmetic: decoded, computed in float32, encoded once.

A sine, a matrix inverse, a sampling grid or a random draw does not benefit from logarithms. Such a
function decodes its LNS arguments, runs torch's float32 function, and encodes its floating-point
results, each rounded once. The backward pass is the same in reverse: torch's float32 gradient,
rounded once. Functions that only compare or select (``unique``, ``cummax``) are therefore exact.
Complex, sparse, boolean and integer results are not encoded. For example a Fourier transform
continues in complex float32 until an operation combines its real values with LNS.

Before rounding functions (``floor``, ``remainder``), integers are restored
(:mod:`lns_ops.tensor.integers`). Functions that compare with numbers and tensors (``bucketize``,
``isin``) compare with their encoded values, as ``==`` does.

An infinite or NaN result raises, as everywhere in LNS.
"""

from __future__ import annotations

from functools import cache

_TEXT = """
sin cos tan asin acos atan arcsin arccos arctan sinh cosh asinh acosh atanh arcsinh arccosh arctanh
atan2 arctan2 sinc erf erfc erfinv lgamma digamma polygamma mvlgamma logit deg2rad rad2deg hypot
heaviside copysign ldexp xlogy logaddexp logaddexp2 logcumsumexp floor ceil round trunc fix frac
remainder __mod__ __rmod__ fmod floor_divide div.Tensor_mode div.Scalar_mode __floordiv__
__rfloordiv__ prod cumprod cummax cummin _cummax_helper _cummin_helper median nanmedian mode
quantile nanquantile nansum nanmean unique unique_consecutive _unique _unique2 unique_dim histc
bincount bucketize searchsorted isin isclose allclose cov corrcoef cdist _cdist_forward pdist
_pdist_forward pairwise_distance cosine_similarity cross embedding_renorm renorm trace inverse
pinverse det logdet slogdet cholesky cholesky_solve cholesky_inverse qr svd lu lu_solve geqrf orgqr
ormqr triangular_solve matrix_exp matrix_power lstsq eig grid_sample grid_sampler grid_sampler_2d
grid_sampler_3d affine_grid affine_grid_generator upsample_bicubic2d _upsample_bicubic2d_aa
_upsample_bilinear2d_aa upsample_bilinear2d upsample_trilinear3d upsample_linear1d max_unpool1d
max_unpool2d max_unpool3d rrelu fractional_max_pool2d fractional_max_pool3d
fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices index_reduce rand_like
randn_like randint_like bernoulli multinomial poisson normal exponential_ geometric_ log_normal_
cauchy_ random_ _standard_gamma _sample_dirichlet _dirichlet_grad _standard_gamma_grad binomial
complex polar view_as_complex stft istft angle conj_physical linspace logspace dist histogram
histogramdd _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors frexp
lu_unpack numpy tolist __array__ __format__ __dlpack__ __dlpack_device__ sparse_coo_tensor
sparse_csr_tensor to_sparse to_sparse_coo to_sparse_csr _sparse_coo_tensor_with_dims_and_tensors nms
roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward
ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward
"""
NAMES = frozenset(_TEXT.split())
"""Names of torch functions, Tensor methods, and operators of aten and torchvision."""
_ROUNDING = {
    "floor", "ceil", "trunc", "fix", "frac", "remainder", "__mod__", "__rmod__", "fmod",
    "floor_divide", "__floordiv__", "__rfloordiv__", "div.Tensor_mode", "div.Scalar_mode",
}  # fmt: skip
_COMPARING = {"bucketize", "searchsorted", "isin", "isclose", "allclose"}
COMPARED = {"input", "other", "boundaries", "sorted_sequence", "elements", "test_elements", "self"}
"""Names of the first two arguments, which such a function compares."""
_FAMILIES = (
    "linalg_", "_linalg_", "fft_", "_fft_", "special_", "fake_quantize_", "_fake_quantize_",
    "fused_moving_avg_obs_fake_quant",
)  # fmt: skip


@cache
def is_decoded(name: str) -> bool:
    """Return whether the function with this name is computed in float32."""
    return (
        name in NAMES
        or name.startswith(_FAMILIES)
        or (name.endswith("_backward") and name.removesuffix("_backward") in NAMES)
    )


def rounds(name: str) -> bool:
    """Return whether a function rounds to integers (:mod:`lns_ops.tensor.integers`)."""
    own, _, overload = name.partition(".")
    own = own if own.startswith("__") else own.removesuffix("_")
    return own in _ROUNDING or f"{own}.{overload}" in _ROUNDING


def compares(name: str) -> bool:
    """Return whether a function compares values, so that its float arguments must be encoded."""
    return name in _COMPARING
