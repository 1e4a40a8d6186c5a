"""Studies: a config becomes hashed trials, worker processes train them, a ledger keeps what
happened, MLflow and a report show it.

Imports ``trainers``; the only package that touches Ray Tune, MLflow and OmegaConf. The flow, one
file a step::

    compose -> config -> plan -> preflight -> runner (agenda, scheduler, pool, leases)
            -> ledger -> tracking (MLflow), report, progress
"""
