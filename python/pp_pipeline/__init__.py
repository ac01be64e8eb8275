"""Pipelines over CPUs and GPUs whose stages are Python: a source, stages and a sink on several ranks.

A program writes its stages, names where they stand, and runs the job:

    import pp_pipeline as pp

    def double(chunk, out):
        out["x"][...] = 2 * chunk["x"]

    if __name__ == "__main__":
        job = pp.Job("read@0 -> double@1 -> write@0", read=chunks, double=double)
        for chunk in job:
            print(chunk["x"])

`docs/python.md` of the project is the guide.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if not _sys.platform.startswith("linux"):
    raise ImportError("pp_pipeline runs on Linux alone: ranks share memory in ways that other systems do not have")

from ._errors import JobError, StageError
from ._flow import Flow, Stream, Streams, Summary
from ._group import Group
from ._job import Job
from ._native import Hold
from ._stages import At, Chunk, Item, Out, Spec, Stage

if _TYPE_CHECKING:
    from . import video
    from ._export import Video, export

__all__ = [
    "At", "Chunk", "Flow", "Group", "Hold", "Item", "Job", "JobError", "Out", "Spec", "Stage", "StageError", "Stream", "Streams",
    "Summary", "Video", "export", "video",
]


def __getattr__(name: str) -> _Any:
    """What few programs use is imported at its first use."""
    from importlib import import_module

    if name == "video":
        return import_module(".video", __name__)
    if name in ("Video", "export"):
        return getattr(import_module("._export", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
