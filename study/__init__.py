"""Studies: a config becomes trials, worker processes train them, a ledger records what happens,
MLflow and a report show it.

Imports ``trainers``; the only package that uses Ray Tune, MLflow and OmegaConf. The flow, one file
per step::

    compose -> config -> plan -> preflight -> runner (agenda, scheduler, pool, leases)
            -> ledger -> tracking (MLflow), report, progress
"""
