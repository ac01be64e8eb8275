"""Training over pipeline schedules: PyTorch modules on ranks, with the gradients of one process.

`docs/training.md` of the project is the guide.
"""

from ._pipelines import PipelineLostError
from ._plain import run_plain
from ._settings import NotFiniteError
from ._trainer import Trainer

__all__ = ["NotFiniteError", "PipelineLostError", "Trainer", "run_plain"]
