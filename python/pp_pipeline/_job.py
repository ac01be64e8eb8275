"""A job, with the process of the caller as rank 0."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import _native
from ._errors import JobError, of_end
from ._native import Feed, Results
from ._program import Place, Program
from ._stages import Chunk, Spec, item_of

# Jobs that this program has begun by the command line of its process.
_begun = 0
# A stage that is at work when the program ends has this long to return.
atexit.register(_native.rest, 5.0)
# How long a wait lasts before signals are looked at again.
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Summary:
    """A job that is done: its chunks, how often a rank was started again, and its seconds."""

    chunks: int
    restarts: int
    seconds: float


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


class Job:
    """A pipeline and what its stages are.

    `pipeline` says which stage stands on which rank: `"read@0 -> denoise@1 -> denoise@2 -> write@0"` has a source, a stage in two
    parts and a sink on three ranks. Each name is a keyword argument: the source is an iterable of chunks, or a function that
    gives one; a stage is a `Stage` class or a function of `(chunk, out)`; the sink is a function of `(chunk)`. Without the sink
    the caller iterates over the job, and without the source it opens the job and pushes.

    `devices` names the device of each rank. `depth` is the most chunks in flight. `restarts` is how often lost ranks may be
    started again. `most` has the largest tensors of a chunk where the first chunk is not the largest. `stuck_after` is how long a
    stage may take, in seconds, and `first_after` is the same until a chunk has gone through the whole pipeline, since the first
    calls may compile. `report` is a file for the report. `command` starts another rank; without it the command line
    of this process does.
    """

    def __init__(
        self,
        pipeline: str,
        *,
        devices: list[str] | None = None,
        depth: int | None = None,
        restarts: int = 0,
        most: Mapping[str, Spec] | None = None,
        arrays: str | None = None,
        stuck_after: float | None = None,
        first_after: float = 600.0,
        report: str | os.PathLike[str] | None = None,
        command: list[str] | None = None,
        **stages: Any,
    ) -> None:
        self._places = [Place(*row) for row in _native.stages(pipeline)]
        self._pipeline = pipeline
        self._most = dict(most) if most is not None else None
        self._arrays = arrays
        self._devices = list(devices or [])
        self._given = stages
        self._command = command
        self._terms = (depth, restarts, stuck_after, first_after, os.fspath(report) if report is not None else None)
        names = [place.name for place in self._places]
        for name in stages:
            if name not in names:
                raise TypeError(f"there is no stage {name!r} in {pipeline!r}; a stage is given by its name in the pipeline")
        for name in names[1:-1]:
            if name not in stages:
                raise TypeError(f"stage {name!r} of {pipeline!r} is not given: Job(..., {name}=...)")

    def run(self) -> Summary | None:
        """Runs the job to its end. Gives its summary on rank 0, and None on other ranks.

        Raises `StageError` if a stage raised, `JobError` for anything else that ended the job, and `KeyboardInterrupt` after
        Ctrl-C, once the chunks in flight are done.
        """
        self._needs(source=True, sink=True)
        running = self._begin(None, None)
        if running is None:
            return None
        return running.finish()

    def __iter__(self) -> Iterator[Chunk]:
        """Runs the job and lends the caller each chunk of the sink, until it asks for the next. Leaving early ends the job."""
        self._needs(source=True, sink=False)
        return self._results()

    def _results(self) -> Iterator[Chunk]:
        results = Results()
        running = self._begin(None, results)
        if running is not None and running.is_rank_0:
            yield from running.results(results)
        elif running is not None:
            running.finish()

    def open(self, queue: int = 2) -> Flow:
        """Begins the job for a server: the caller pushes chunks, at most `queue` of which wait, and pulls results.

        On other ranks this works until the job ends, and then raises `SystemExit`.
        """
        self._needs(source=False, sink=False)
        if self._most is None:
            raise TypeError("a job that is pushed into has no first chunk to learn from: give most={'x': Spec(shape, dtype)}")
        feed, results = Feed(queue), Results()
        running = self._begin(feed, results)
        if running is None:
            raise RuntimeError("a job that is opened must be the first that its ranks come to: give command=")
        if not running.is_rank_0:
            running.finish()
            raise SystemExit(0)
        return Flow(feed, results, running)

    def _needs(self, source: bool, sink: bool) -> None:
        first, last = self._places[0].name, self._places[-1].name
        for name, needed, instead in ((first, source, "open() the job and push"), (last, sink, "iterate over the job")):
            if needed and name not in self._given:
                raise TypeError(f"{name!r} is not given: give it, or {instead}")
            if not needed and name in self._given:
                raise TypeError(f"{name!r} is given, and the caller takes its place here: leave it out")
        if not sink and self._places[-1].ranks[0] != 0:
            raise ValueError(f"the caller is rank 0, and the sink {last!r} stands on another rank: place it on rank 0")

    def _begin(self, feed: Feed | None, results: Results | None) -> _Run | None:
        """The job, begun; None where this rank is of a later job."""
        placed = _native.place()
        ranks = 1 + max(rank for place in self._places for rank in place.ranks)
        command, number = self._command or [], 0
        if self._command is None and (ranks > 1 or placed is not None):
            global _begun
            _begun += 1
            number = _begun
            own = int(os.environ.get("PP_JOB_NUMBER", "0"))
            if "PP_SUPERVISOR_PID" in os.environ and number > own:
                # Other ranks were started for this job.
                raise SystemExit(0)
            if placed is None:
                command = _own_command()
        depth, restarts, stuck_after, first_after, report = self._terms
        terms = _Terms(
            self._pipeline, self._devices, depth, restarts, command, number, stuck_after, first_after, report
        )
        is_rank_0 = placed is None or placed[0] == 0
        program = Program(
            self._places, self._given, self._most, self._arrays, self._devices, feed, results if is_rank_0 else None
        )
        try:
            running = _native.begin(terms, program)
        except _native.EndError as end:
            raise of_end(end.args) from None
        return None if running.is_passed_over else _Run(running, is_rank_0, program)


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


class _Run:
    """A job that runs, and how it ends."""

    def __init__(self, running: _native.Running, is_rank_0: bool, program: Program) -> None:
        self._running = running
        self._program = program
        self.is_rank_0 = is_rank_0
        self._is_over = False

    def is_over(self, seconds: float) -> bool:
        """Waits so long for the end; raises what ended the job. After Ctrl-C it waits until the job has drained."""
        interrupt: KeyboardInterrupt | None = None
        while not self._is_over:
            try:
                self._is_over = self._running.wait(seconds)
                if interrupt is not None:
                    # It has heard the signal by itself, unless the program has another handler by now.
                    self._running.drain()
            except KeyboardInterrupt as raised:
                interrupt = raised
            except _native.EndError as end:
                self._is_over = True
                self._raise(end, interrupt)
            if interrupt is None:
                return self._is_over
            seconds = _LOOK_EVERY
        if interrupt is not None:
            raise interrupt
        return True

    @staticmethod
    def _raise(end: _native.EndError, interrupt: KeyboardInterrupt | None) -> None:
        error = of_end(end.args)
        if interrupt is not None or error.code == 128 + signal.SIGINT:
            raise interrupt or KeyboardInterrupt from None
        if "PP_SUPERVISOR_PID" in os.environ:
            # Rank 0 tells why.
            raise SystemExit(error.code)
        raise error from end.__cause__

    def finish(self) -> Summary | None:
        """Waits for the end."""
        while not self.is_over(_LOOK_EVERY):
            pass
        summary = self._running.summary
        return Summary(*summary) if summary is not None else None

    def abort(self) -> None:
        """Ends the job at once and waits for that."""
        self._running.abort()
        try:
            self.finish()
        except (JobError, KeyboardInterrupt):
            pass

    def results(self, results: Results) -> Generator[Chunk, None, None]:
        """Lends each result until the next is asked for."""
        is_done = False
        try:
            while True:
                chunk = results.next(_LOOK_EVERY)
                if chunk is None:
                    if self.is_over(0.0) and len(results) == 0:
                        is_done = True
                        return
                    continue
                gpu = self._program.gpu
                if gpu is not None:
                    import torch

                    torch.cuda.current_stream(gpu.device_index).wait_stream(gpu)
                yield chunk
                if gpu is not None:
                    # What the caller has issued still reads the slot.
                    torch.cuda.current_stream(gpu.device_index).synchronize()
                results.give_back()
        except (JobError, KeyboardInterrupt):
            is_done = True
            raise
        finally:
            if not is_done:
                self.abort()


class Flow:
    """A job that is pushed into and pulled from. `with` ends it.

    Pushes and pulls may come from different threads, and each may wait.
    """

    def __init__(self, feed: Feed, results: Results, run: _Run) -> None:
        self._feed, self._results, self._run = feed, results, run
        self._pulled = run.results(results)

    def push(self, chunk: Any, timeout: float | None = None) -> bool:
        """Adds a chunk, an array, a dict of them or an `Item`. Waits for room; returns False after `timeout` seconds without."""
        item = item_of(chunk)
        return self._feed.push(item, item.cut, timeout)

    def end(self) -> None:
        """Nothing more is pushed. The job ends once all results are pulled."""
        self._feed.end()

    def __len__(self) -> int:
        """Chunks that wait to be taken into the job."""
        return len(self._feed)

    def __iter__(self) -> Iterator[Chunk]:
        return self._pulled

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: Any) -> None:
        self._feed.end()
        self._pulled.close()
        if not self._run._is_over:
            self._run.abort()
