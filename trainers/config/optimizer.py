"""The configuration of a trial's optimizer: its name and its options.

:mod:`trainers.optim.build` makes the optimizer from this configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.config.validation import finite, one_of, plain_values, positive, require

_ADAM = frozenset({"betas", "eps", "weight_decay"})
OPTIMIZERS: dict[str, frozenset[str]] = {
    "sgd": frozenset({"momentum", "nesterov", "weight_decay"}),
    "adam": _ADAM | {"amsgrad"},
    "adamw": _ADAM | {"amsgrad"},
    "adamax": _ADAM,
    "nadam": _ADAM,
    "radam": _ADAM,
    "adagrad": frozenset({"eps", "weight_decay"}),
    "adadelta": frozenset({"rho", "eps", "weight_decay"}),
    "rmsprop": frozenset({"alpha", "eps", "weight_decay", "momentum", "centered"}),
    "rprop": frozenset(),
    "asgd": frozenset({"weight_decay"}),
    "lars": frozenset({"momentum", "nesterov", "weight_decay", "trust_coefficient"}),
    "lamb": _ADAM,
    "lion": frozenset({"betas", "weight_decay"}),
    "madam": frozenset({"beta", "eps"}),
    "mul": frozenset(),
    "signmul": frozenset(),
}
"""The optimizers of :mod:`lns_ops.optim` that a trial can use, with their options except ``lr``."""
DECAYS = {"alpha": 0.99, "rho": 0.9, "beta": 0.999}
MULTIPLICATIVE = ("madam", "mul", "signmul")
"""The optimizers that multiply weights."""
WHOLE_TENSORS = ("lars", "lamb", *MULTIPLICATIVE)
"""The optimizers whose step needs the norm of a whole tensor."""
RATE_OF_HOST = ("rprop", *MULTIPLICATIVE)
"""The optimizers whose ``lr`` is a Python number, which a captured CUDA graph cannot change."""
SLICEABLE = ("sgd", "adam", "adamw")
"""The optimizers that work element by element: the step of a slice, even one that runs across
tensors, is the slice of the step."""


@plain_values
@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of a trial and its options, for the mean loss of a batch.

    An option that the optimizer does not have is refused.

    Attributes:
        name: ``sgd``, ``adam``, ``adamw``, ``adamax``, ``nadam``, ``radam``, ``adagrad``,
            ``adadelta``, ``rmsprop``, ``rprop``, ``asgd``, ``lars``, ``lamb``, ``lion``, ``madam``,
            ``mul`` or ``signmul``, with the classes of :mod:`lns_ops.optim`.
        lr: step size.
        momentum: momentum of sgd (heavy ball), rmsprop and lars.
        nesterov: whether sgd or lars with momentum looks ahead.
        betas: decays of the two averages in lion, Adam and Adam's variants.
        eps: number added to a root in a denominator.
        weight_decay: weight decay; decoupled in adamw, lamb and lion, else added to the gradient.
        alpha: decay of the second moment of rmsprop.
        rho: decay of the two averages of adadelta.
        beta: decay of the second moment of madam.
        centered: whether rmsprop divides by the standard deviation instead of the root mean square.
        amsgrad: whether adam and adamw divide by the largest root so far.
        trust_coefficient: trust coefficient of lars. lars and lamb update biases and other vectors
            without trust ratio and without decay.

    Example::

        >>> decayed = OptimizerConfig(name="adamw", lr=0.001, weight_decay=0.1)
    """

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    alpha: float = DECAYS["alpha"]
    rho: float = DECAYS["rho"]
    beta: float = DECAYS["beta"]
    centered: bool = False
    amsgrad: bool = False
    trust_coefficient: float = 1e-3

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, tuple(OPTIMIZERS))
        finite("optimizer.lr", self.lr, 0.0, "0.1 is a good start for sgd, 0.001 for adam")
        finite("optimizer.momentum", self.momentum, 0.0, "0 turns it off")
        finite("optimizer.weight_decay", self.weight_decay, 0.0, "0 turns it off")
        require(
            f"optimizer.momentum={self.momentum}",
            self.momentum < 1,
            "must be below 1, or the buffer grows without bound",
            "try 0.9",
        )
        require(
            f"optimizer.betas={list(self.betas)}",
            len(self.betas) == 2 and all(1e-6 <= beta < 1 for beta in self.betas),
            "must be two numbers of at least 1e-6 and below 1",
            "use for example [0.9, 0.999]",
        )
        for name, usual in DECAYS.items():
            require(
                f"optimizer.{name}={getattr(self, name)}",
                1e-6 <= getattr(self, name) < 1,
                "must be at least 1e-6 and below 1",
                f"use for example {usual}",
            )
        positive("optimizer.eps", self.eps, "1e-8")
        positive("optimizer.trust_coefficient", self.trust_coefficient, "0.001")
        if self.nesterov and not self.momentum:
            raise ValueError(
                "optimizer.nesterov=true with optimizer.momentum=0: there is nothing to look ahead"
                " with; use 0.9"
            )
        self._refuse_what_means_nothing()

    def _refuse_what_means_nothing(self) -> None:
        """Refuse an option that was set but that this optimizer does not have."""
        usual = {"betas": [0.9, 0.999], "eps": 1e-8, "trust_coefficient": 1e-3, **DECAYS}
        for option in sorted(frozenset().union(*OPTIMIZERS.values()) - OPTIMIZERS[self.name]):
            value, default = getattr(self, option), usual.get(option, 0)
            if value != default:
                takers = ", ".join(
                    name for name, options in OPTIMIZERS.items() if option in options
                )
                raise ValueError(
                    f"optimizer.{option}={value} with optimizer.name={self.name}: means nothing to"
                    f" it, but to {takers}; leave it out, or use one of those"
                )
