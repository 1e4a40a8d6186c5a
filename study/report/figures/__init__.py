"""Pictures of a report.

Configures and imports matplotlib before the modules of this package use it.
"""

from trainers.settings import load_matplotlib

load_matplotlib()
