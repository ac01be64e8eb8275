"""A job, with the process of the caller as rank 0."""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from . import _native
from ._errors import of_end
from ._flow import Flow, Run, Streams, Summary
from ._program import Place, Program, context_of
from ._stages import Chunk, Spec, checked_specs

# Jobs that this program has begun, but for those with a command of their own, and whether it has opened one.
_begun = 0
_has_opened = False
# A stage that is at work when the program ends has this long to return.
atexit.register(_native.rest, 5.0)
# More chunks than a job has.
_ALL = 2**62


@dataclass
class _Terms:
    pipeline: str
    devices: list[str]
    depth: int | None
    restarts: int
    command: list[str]
    number: int
    stuck_after: float | None
    first_after: float
    report: str | None
    timeline: str | None
    drops: bool
    max_latency: float | None
    live: str | None
    live_token_file: str | None
    schedule: _native.Schedule | None
    settings: list[tuple[str, str]]
    place: list[tuple[str, str]]


class Job:
    """A pipeline and what its stages are.

    `pipeline` says which stage stands on which rank: `"read@0 -> denoise@1 -> denoise@2 -> write@0"` has a source, a stage in two
    parts and a sink on three ranks. Each name is a keyword argument: the source is an iterable of chunks, or a function that
    gives one; a stage is a `Stage` class or a function of `(chunk, out)`; the sink is a function of `(chunk)`. Without the sink
    the caller iterates over the job, and without the source it opens the job and pushes.

    `devices` names the device of each rank. `depth` is the most chunks in flight. `restarts` is how often lost ranks may be
    started again. `most` has the largest tensors of a chunk where the first chunk is not the largest; several, where chunks differ.
    `stuck_after` is how long a stage may take, in seconds, and `first_after` is the same until a chunk has gone through the whole
    pipeline, since the first calls may compile. `steps` is how often a chunk goes through a ring `(...)*steps`. `report` is a file for
    the report, `timeline` one for a picture (SVG) of the last chunks, and `profile` a folder for a trace of PyTorch's profiler of each
    rank. `live` is an address such as `"127.0.0.1:8000"` where rank 0 shows the job in a browser, and `live_token_file` a file with the
    token that a viewer must know. `command` starts another rank; without it the command line of this process does.

    `late` says what happens to chunks that come faster than they are worked on: with `"block"` a push waits; with `"drop"` the
    oldest chunk that waits is dropped, and `max_latency` drops those that would come out later than so many seconds after their push.
    The last chunk that waits is never dropped; `chunk.skipped` tells of a gap.
    """

    def __init__(
        self,
        pipeline: str,
        *,
        devices: list[str] | None = None,
        depth: int | None = None,
        restarts: int = 0,
        steps: int | None = None,
        most: Mapping[str, Spec] | Sequence[Mapping[str, Spec]] | None = None,
        arrays: str | None = None,
        stuck_after: float | None = None,
        first_after: float = 600.0,
        late: str = "block",
        max_latency: float | None = None,
        report: str | os.PathLike[str] | None = None,
        timeline: str | os.PathLike[str] | None = None,
        profile: str | os.PathLike[str] | None = None,
        live: str | None = None,
        live_token_file: str | os.PathLike[str] | None = None,
        command: list[str] | None = None,
        **stages: Any,
    ) -> None:
        self._places = [Place(*row) for row in _native.stages(pipeline)]
        names = [place.name for place in self._places]
        taken = [name for name in inspect.signature(Job.__init__).parameters if name != "stages"]
        for name in names:
            if name in taken:
                raise ValueError(f"a stage cannot be called {name!r}: Job takes {', '.join(taken)} otherwise; choose another name")
        _check("depth", depth, 1, 256)
        _check("restarts", restarts, 0)
        for argument, seconds in (("stuck_after", stuck_after), ("first_after", first_after)):
            _check(argument, seconds, 0, kind=Real, what="a number of seconds")
        _check("max_latency", max_latency, 0, kind=Real, what="a number of seconds")
        if late not in ("block", "drop"):
            raise ValueError(f"late={late!r}: give 'block' or 'drop'")
        self._late = (late == "drop", max_latency)
        for argument, given in (("devices", devices), ("command", command)):
            if isinstance(given, str):
                raise TypeError(f"{argument}={given!r}: give a list of strings, such as {given.split()}")
        self._pipeline = pipeline
        kinds = [most] if isinstance(most, Mapping) else most
        self._most = [checked_specs("most=", kind) for kind in kinds] if kinds is not None else None
        self._schedule: _native.Schedule | None = None
        self._settings: list[tuple[str, str]] = []
        self._place: list[tuple[str, str]] = []
        self._arrays = arrays
        self._counted: int | None = None
        self._devices = list(devices or [])
        self._given = stages
        self._command = command
        self._terms = (depth, restarts, stuck_after, first_after)
        self._files = (os.fspath(report) if report is not None else None, os.fspath(timeline) if timeline is not None else None)
        self._profile = os.fspath(profile) if profile is not None else None
        if live_token_file is not None and live is None:
            raise ValueError(f"live_token_file={os.fspath(live_token_file)!r} is for live=, and that is not given: give it, too")
        self._live = (live, os.fspath(live_token_file) if live_token_file is not None else None)
        self._steps = self._checked_steps(steps)
        if profile is not None and importlib.util.find_spec("torch") is None:
            raise ImportError("profile= takes PyTorch, and it is not installed: pip install torch, or leave profile= out")
        for name in stages:
            if name not in names:
                raise TypeError(f"there is no stage {name!r} in {pipeline!r}; a stage is given by its name in the pipeline")
        for name in names[1:-1]:
            if name not in stages:
                raise TypeError(f"stage {name!r} of {pipeline!r} is not given: Job(..., {name}=...)")

    def _checked_steps(self, steps: int | None) -> int:
        has_ring = any(place.ring is not None and place.ring[2] is None for place in self._places)
        if has_ring and steps is None:
            raise TypeError(f"{self._pipeline!r} has a ring of steps: Job(..., steps=N)")
        if not has_ring and steps is not None:
            raise TypeError(f"steps={steps}, and {self._pipeline!r} has no ring (...)*steps: leave steps= out, or add one")
        _check("steps", steps, 1, 65535)
        return steps or 1

    def follow(self, schedule: _native.Schedule, settings: list[tuple[str, str]], place: list[tuple[str, str]]) -> None:
        """Lets the ranks work in the order of a schedule. They must have the settings alike. `place` has variables of a launcher, which
        count instead of those of the environment.
        """
        self._schedule, self._settings, self._place = schedule, settings, place

    def run(self) -> Summary | None:
        """Runs the job to its end. Gives its summary on rank 0, and None on other ranks.

        Raises `StageError` if a stage raised, `JobError` for anything else that ended the job, and `KeyboardInterrupt` after
        Ctrl-C, once the chunks in flight are done.
        """
        self._needs(source=True, sink=True)
        flow, stream = self._one_stream(2, lends=False)
        running = self._begin(flow, stream)
        return running.finish() if running is not None else None

    def __iter__(self) -> Iterator[Chunk]:
        """Runs the job and lends the caller each chunk of the sink, until it asks for the next. Leaving early ends the job."""
        self._needs(source=True, sink=False)
        return self._results()

    def _results(self) -> Iterator[Chunk]:
        flow, stream = self._one_stream(2, lends=True)
        running = self._begin(flow, stream)
        if running is not None and running.is_rank_0:
            yield from Flow(flow, stream, running)
        elif running is not None:
            running.finish()

    def open(self, queue: int = 2) -> Flow:
        """Begins the job for a server: the caller pushes chunks, at most `queue` of which wait, and pulls results.

        On other ranks this works until the job ends, and then raises `SystemExit`.
        """
        _check("queue", queue, 1)
        flow, stream = self._one_stream(queue, lends=True)
        return Flow(flow, stream, self._open(flow))

    def streams(self, queue: int = 2, room: int | None = None) -> Streams:
        """Begins the job for a server of several streams, each with its order, its end and its results.

        Of each stream at most `queue` chunks wait to be taken into the job, and at most `room` are in the job or wait to be pulled: as
        many as the depth of the job, unless it is given. On other ranks this works until the job ends, and then raises `SystemExit`.
        """
        _check("queue", queue, 1)
        _check("room", room, 1)
        depth, restarts = self._terms[0] or _native.default_depth(self._pipeline), self._terms[1]
        for place in self._places[1:-1]:
            if restarts and context_of(self._given[place.name], place):
                raise ValueError(
                    f"stage {place.name!r} has context=, which would be of all streams together after a restart: leave restarts= out, or "
                    "give each stream a job"
                )
        flow = _native.Flow(queue, depth if room is None else room, False, self._late[0])
        return Streams(flow, self._open(flow))

    def _one_stream(self, queue: int, lends: bool) -> tuple[_native.Flow, _native.Stream]:
        flow = _native.Flow(queue, _ALL, lends, self._late[0])
        stream = flow.stream(False)
        flow.end()
        return flow, stream

    def _open(self, flow: _native.Flow) -> Run:
        self._needs(source=False, sink=False)
        if self._most is None:
            raise TypeError("a job that is pushed into has no first chunk to learn from: give most={'x': Spec(shape, dtype)}")
        running = self._begin(flow, None)
        if running is None:
            raise RuntimeError("a job that is opened must be the first that its ranks come to: give command=")
        if not running.is_rank_0:
            running.finish()
            raise SystemExit(0)
        return running

    def _needs(self, source: bool, sink: bool) -> None:
        first, last = self._places[0].name, self._places[-1].name
        for name, needed, instead in ((first, source, "open() the job and push"), (last, sink, "iterate over the job")):
            if needed and name not in self._given:
                raise TypeError(f"{name!r} is not given: give it, or {instead}")
            if not needed and name in self._given:
                raise TypeError(f"{name!r} is given, and the caller takes its place here: leave it out")
        if not sink and self._places[-1].ranks[0] != 0:
            raise ValueError(f"the caller is rank 0, and the sink {last!r} stands on another rank: place it on rank 0")

    def _number(self) -> int:
        """Which job of the program this is. A rank that was started for 0 takes part in the first job that it comes to.

        Raises `SystemExit` where other ranks were started for this job.
        """
        own = int(os.environ.get("PP_JOB_NUMBER", "0")) if "PP_SUPERVISOR_PID" in os.environ else None
        if own != 0 and self._command is not None:
            return 0
        # Also a job of one rank: other ranks pass over it.
        global _begun
        if self._counted is None:
            _begun += 1
            # One that begins again keeps it.
            self._counted = _begun
        if own is not None and self._counted > max(own, 1):
            raise SystemExit(0)
        return 0 if own == 0 else self._counted

    def _begin(self, flow: _native.Flow, read: _native.Stream | None) -> Run | None:
        """The job, begun; None where this rank is of a later job. `read` gets what the source yields, and None is an opened job."""
        global _has_opened
        placed = placed_at(self._place)
        has_others = any(rank > 0 for place in self._places for rank in place.ranks)
        if has_others and _has_opened and (placed is not None or self._command is None):
            # Another rank does not come here: in the opened job it stops.
            raise RuntimeError(
                "this job has ranks beyond 0 and comes behind one that was opened, which its other ranks cannot pass over: "
                + (
                    "give command=[sys.executable, 'worker.py'], a program that comes to this job first, or let all stages stand "
                    "on rank 0"
                    if placed is None
                    else "under a launcher, open one job alone, the last"
                )
            )
        number = self._number()
        if self._schedule is not None and has_others and placed is None and self._command is None and number > 1:
            raise RuntimeError(
                "this trainer comes behind another job of the program, and its other ranks would run that again: begin it first, give "
                "command=[sys.executable, 'worker.py'], or start all ranks with a launcher (torchrun)"
            )
        # All ranks of a job that trains come to its loop, and go on behind it.
        _has_opened = _has_opened or (read is None and self._schedule is None)
        command = self._command or []
        if self._command is None and placed is None and has_others:
            command = _own_command()
        depth, restarts, stuck_after, first_after = self._terms
        terms = _Terms(
            self._pipeline, self._devices, depth, restarts, command, number, stuck_after, first_after, *self._files, *self._late,
            *self._live, self._schedule, self._settings, self._place,
        )  # fmt: skip
        if "PP_SUPERVISOR_PID" in os.environ and threading.current_thread() is threading.main_thread():
            # Rank 0 hears of Ctrl-C, and tells this rank what to do.
            signal.signal(signal.SIGINT, lambda number, frame: None)
        is_rank_0 = placed is None or placed[0] == 0
        for argument, path in zip(("report", "timeline"), self._files, strict=True):
            folder = os.path.dirname(path or "") or "."
            if is_rank_0 and not os.path.isdir(folder):
                raise FileNotFoundError(f"{argument}={path!r}: there is no folder {folder!r}: create it")
        program = Program(
            self._places, self._given, self._most, self._arrays, self._devices, flow.lends, read, self._steps, restarts, self._profile
        )
        try:
            running = _native.begin(terms, program, flow)
        except _native.EndError as end:
            raise of_end(end.args) from None
        return None if running.is_passed_over else Run(running, is_rank_0, program)


def placed_at(instead: list[tuple[str, str]] | None = None) -> tuple[int, int] | None:
    """The rank that this process has and the number of all, where it has one."""
    try:
        return _native.place(instead or [])
    except _native.EndError as end:
        raise of_end(end.args) from None


def _check(
    name: str, value: Any, least: int, most: int | None = None, *, kind: Any = Integral, what: str = "a whole number"
) -> None:
    """Refuses an argument, unless it is None, that is no such number."""
    if value is None:
        return
    if not isinstance(value, kind) or not value >= least or (most is not None and value > most):
        raise ValueError(f"{name}={value!r}: give {what} from {least}" + (f" to {most}" if most is not None else ""))


def _own_command() -> list[str]:
    """The command line of this process, which starts another rank."""
    arguments = sys.orig_argv[1:]
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    can_start = "-c" in arguments or (main is not None and os.path.exists(main))
    if not can_start or "ipykernel" in sys.modules:
        raise RuntimeError(
            "several ranks need a file that each of them can run, and this program has none (standard input, a notebook): put "
            "the job into a file, give command=[...], or let all stages stand on rank 0"
        )
    return [sys.executable, *arguments]
