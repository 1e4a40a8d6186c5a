"""Optimizers for LNS and float parameters, with Kahan compensation or stochastic rounding.

In low precision a small update vanishes in a large weight: at f = 6 the nearest neighbour of a
weight is 1.1 % away, so any update below half of that is lost, every time. Two ways to keep it:

- ``kahan_sum``: Kahan compensation (W. Kahan, "Further remarks on reducing truncation errors",
  1965) keeps what was lost in a second number of the same format and offers it again at the next
  step. Deterministic; 2 bytes more a parameter. Its limit: the second number has ulps, too. Once it
  has grown to half an ulp of the weight, an update u is lost if ::

      |u| < (2^(2^-f / 2) - 1)^2 |w|,  about (ln 2 / 2^(f + 1))^2 |w|:
                                       2^-17 |w| in lns16, 2^-15 |w| in lns12

  or if u is below the format's smallest magnitude. Equal updates under it end within half an ulp of
  where they began.
- ``stochastic_rounding``: the sum of weight and update rounds up or down at random with the exact
  sum as its expected value (S. Gupta et al. 2015). No memory; the random bits come from (seed,
  parameter, step) alone, so a run repeats bit for bit on any device.

SGD and Adam update an LNSTensor parameter by one fused kernel in which every operation is an LNS
operation, or with ``arithmetic="float32"`` by one that computes in float32 between loads and stores
of codes. The other optimizers are composed of LNS or float32 operations
(:mod:`lns_ops.optim.backends`), the former ending in SGD's kernel; on a CPU Nesterov, RMSprop,
Adagrad, Lion, Madam, Mul and SignMul take one pass before it
(:mod:`lns_ops.functional.directions`), with the same bits. A float parameter takes torch
operations. Memory for an LNS parameter: 2 bytes, + 2 with Kahan, + 2 with momentum or another
average, + 4 for a second moment (Adam with stochastic rounding: 2).

A rate that a schedule takes below the format's smallest magnitude counts as 0, with a warning; one
that begins there is refused. Optimizers are made after ``convert_``, which replaces parameters: a
step of one made before is refused, and so is one of torch's own on LNS parameters.

``optimizer.init_compensation(float32_weights)`` begins with what the conversion of those weights
has lost. ``state_dict`` carries compensations and residues, in their dtypes.
"""

from lns_ops.optim import step_check  # noqa: F401 (registers the check)
from lns_ops.optim.adam import Adam, AdamW
from lns_ops.optim.adam_variants import Adamax, Lion, NAdam, RAdam
from lns_ops.optim.adaptive import ASGD, Adadelta, Adagrad, RMSprop, Rprop
from lns_ops.optim.base import LNSOptimizer, parameters_by_format
from lns_ops.optim.layerwise import LAMB, LARS
from lns_ops.optim.multiplicative import HybridMul, Madam, Mul, SignMul
from lns_ops.optim.sgd import SGD
from lns_ops.spec.reference_updates import ARITHMETICS

__all__ = [
    "ARITHMETICS", "ASGD", "LAMB", "LARS", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax",
    "HybridMul", "LNSOptimizer", "Lion", "Madam", "Mul", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SignMul", "parameters_by_format",
]  # fmt: skip
