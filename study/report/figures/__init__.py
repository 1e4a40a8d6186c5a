"""Pictures of a report.

matplotlib is imported here, before the modules of this folder import parts of it.
"""

from trainers.settings import load_matplotlib

load_matplotlib()
