"""The local engine: worker processes on this machine, and those of the old path on a cluster."""
