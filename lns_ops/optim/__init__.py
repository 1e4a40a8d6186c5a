"""Optimizers for LNS and float parameters, with Kahan compensation or stochastic rounding.

>>> import torch, lns_ops
>>> model = lns_ops.convert_(torch.nn.Linear(4, 2), "lns16", scope="everywhere")
>>> optimizer = lns_ops.optim.Adam(model.parameters(), lr=1e-2, kahan_sum=True)
>>> model(torch.ones(3, 4)).sum().backward()
>>> optimizer.step()

In low precision rounding loses small updates. At f = 6 fraction bits the next larger number is
1.1 % away, so every update below half of that leaves the weight as it is. Two options prevent this:

- ``kahan_sum``: Kahan compensation (W. Kahan, "Further remarks on reducing truncation errors",
  1965) keeps the lost part in a second number of the same format and adds it at the next step. It
  is deterministic and takes 2 more bytes a parameter. It has a limit, because the second number is
  rounded, too. Once it has grown to half an ulp of the weight, an update u is lost if ::

      |u| < (2^(2^-f / 2) - 1)^2 |w|,  about (ln 2 / 2^(f + 1))^2 |w|:
                                       2^-17 |w| in lns16, 2^-15 |w| in lns12

  or if u is below the format's smallest magnitude. Equal updates below the limit move the weight by
  less than half an ulp in total.
- ``stochastic_rounding``: the sum of weight and update is rounded up or down at random, so that its
  expected value is the exact sum (S. Gupta et al. 2015). It takes no memory. The random bits depend
  only on (seed, parameter, step), so a run repeats bit for bit on any device.

SGD and Adam update an LNSTensor parameter with one fused kernel, in which every operation is an LNS
operation. With ``arithmetic="float32"`` the kernel decodes the codes, computes in float32 and
rounds the results. The other optimizers are composed of LNS or float32 operations
(:mod:`lns_ops.optim.backends`); in LNS they end with SGD's kernel. On a CPU Nesterov, RMSprop,
Adagrad, Lion, Madam, Mul and SignMul run one more fused kernel before it
(:mod:`lns_ops.functional.directions`), with the same bits as the separate operations. Float
parameters are updated by torch operations.

Memory per LNS parameter: 2 bytes, + 2 with Kahan compensation, + 2 for momentum or another average,
+ 4 for a second moment (2 in Adam with stochastic rounding).

An initial learning rate below the format's smallest magnitude raises. If a schedule lowers the rate
below it, the rate counts as 0, with a warning. Create optimizers after ``convert_``, because it
replaces the parameters. A step with replaced parameters raises, and so does a step of a torch
optimizer on LNS parameters.

``optimizer.init_compensation(float32_weights)`` initializes the compensations with the rounding
errors of the conversion. ``state_dict`` includes compensations and residues, in their dtypes.
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
