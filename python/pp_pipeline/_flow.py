"""A job that runs, and what the caller pushes into it and pulls from it."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import JobError, of_end
from ._program import Program
from ._stages import Chunk, item_of

if TYPE_CHECKING:
    # A program that uses it imports it: the import takes as long as all others together.
    import asyncio

# How long a wait lasts before signals are looked at again.
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Summary:
    """A job that is done: its chunks, how often a rank was started again, and its seconds."""

    chunks: int
    restarts: int
    seconds: float


async def _in_thread(act: Callable[..., Any], *given: Any) -> None:
    import asyncio

    await asyncio.to_thread(act, *given)


class Run:
    """A job that runs, and how it ends."""

    def __init__(self, running: _native.Running, is_rank_0: bool, program: Program) -> None:
        self._running = running
        self._program = program
        self.is_rank_0 = is_rank_0
        self.check = program.check
        self._is_over = self._is_left = False
        # The caller has heard what ended the job.
        self.is_told = False
        self._end: _native.EndError | None = None

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
                # In this order: another thread may look, too.
                self._end = end
                self._is_over = True
            if interrupt is None:
                break
            seconds = _LOOK_EVERY
        # A caller that has left the job knows why it ended.
        if self._end is not None and not (self._is_left and interrupt is None):
            self.is_told = True
            self._raise(self._end, interrupt)
        if interrupt is not None:
            raise interrupt
        return self._is_over

    @staticmethod
    def _raise(end: _native.EndError, interrupt: KeyboardInterrupt | None) -> None:
        error = of_end(end.args)
        if "PP_SUPERVISOR_PID" in os.environ:
            # Rank 0 tells why.
            raise SystemExit(error.code)
        if interrupt is not None or error.code == 128 + signal.SIGINT:
            raise interrupt or KeyboardInterrupt from None
        raise error from end.__cause__

    def finish(self) -> Summary | None:
        """Waits for the end."""
        while not self.is_over(_LOOK_EVERY):
            pass
        summary = self._running.summary
        return Summary(*summary) if summary is not None else None

    def tell(self) -> None:
        """Raises what has ended the job, which takes nothing any more, unless the caller has ended it or knows it."""
        if not self._is_left and not self.is_told:
            self.finish()

    def leave(self, is_raising: bool, is_closed: bool) -> None:
        """The caller leaves the job, which ends at once. If the job takes nothing any more, it has ended by itself: that is raised,
        unless the caller raises or knows it.
        """
        if is_closed and not is_raising and not self.is_told:
            self.finish()
        elif not self._is_over:
            self.abort()

    def abort(self) -> None:
        """Ends the job at once and waits for that."""
        self._is_left = True
        self._running.abort()
        try:
            self.finish()
        except (JobError, KeyboardInterrupt):
            pass

    def await_gpu(self, chunk: Chunk) -> bool:
        """Lets the caller's stream wait for the work on a result. Says whether there is a GPU."""
        gpu = self._program.gpu
        if gpu is None:
            return False
        import torch

        current = torch.cuda.current_stream(gpu.device_index)
        current.wait_stream(gpu)
        for tensor in chunk.values():
            tensor.record_stream(current)
        return True

    def issued(self) -> None:
        """Waits for what the caller has issued: it still reads the slot."""
        import torch

        torch.cuda.current_stream(self._program.gpu.device_index).synchronize()


class Stream:
    """One of the streams of a job: chunks are pushed, and their results are pulled, in their order.

    Pushes and pulls may come from different threads, and each may wait. In coroutines `await push_async(...)` and `async for` do the
    same, in one event loop. `end()` ends the stream, and so does leaving a `with` over it, which also drops its results.
    """

    def __init__(self, native: _native.Stream, run: Run, tells: bool) -> None:
        self._native, self._run, self._tells = native, run, tells
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def number(self) -> int:
        """Which stream it is, from 0: what stages read as `chunk.stream`."""
        return self._native.number

    def push(self, chunk: Any, timeout: float | None = None) -> bool:
        """Adds a chunk, an array, a dict of them or an `Item`. Waits for room; returns False after `timeout` seconds without."""
        given = self._given(chunk)
        left = timeout
        try:
            while not self._native.push(*given, _LOOK_EVERY if left is None else min(left, _LOOK_EVERY)):
                if left is not None:
                    left -= _LOOK_EVERY
                    if left <= 0:
                        return False
        except RuntimeError:
            if self._native.is_closed:
                self._run.tell()
            raise
        return True

    async def push_async(self, chunk: Any) -> None:
        """Adds a chunk as `push` does, and waits for room without holding up the event loop."""
        given = self._given(chunk)
        self._use_loop()
        try:
            while not self._native.push(*given, 0.0):
                await self._again()
        except RuntimeError:
            if self._native.is_closed:
                await _in_thread(self._run.tell)
            raise

    def _given(self, chunk: Any) -> tuple[Any, str | None, bool]:
        item = item_of(chunk)
        self._run.check(item)
        if not self._tells:
            return item, item.cut, False
        if item.cut == "hard":
            raise ValueError("a hard cut drops what is in flight, of all streams: one of several streams takes none; cut='flush'")
        if item.cut not in (None, "flush"):
            raise ValueError(f"a cut is None or 'flush' here, and not {item.cut!r}")
        return item, None, item.cut is not None

    def end(self) -> None:
        """Nothing more is pushed."""
        self._native.end()

    def __len__(self) -> int:
        """Chunks that wait to be taken into the job."""
        return len(self._native)

    def __iter__(self) -> Iterator[Chunk]:
        """The results, each of which is the caller's own."""
        while True:
            chunk: Chunk | None = self._native.next(_LOOK_EVERY)
            if chunk is not None:
                self._run.await_gpu(chunk)
                yield chunk
            elif self._native.is_over:
                if not self._native.is_through:
                    self._run.finish()
                return

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._pulled_async()

    async def _pulled_async(self) -> AsyncIterator[Chunk]:
        self._use_loop()
        while True:
            chunk: Chunk | None = self._native.next(0.0)
            if chunk is not None:
                self._run.await_gpu(chunk)
                yield chunk
            elif self._native.is_over:
                if not self._native.is_through:
                    await _in_thread(self._run.finish)
                return
            else:
                await self._again()

    def _use_loop(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop, own = loop, weakref.ref(self)
            self._native.calls(lambda: loop.call_soon_threadsafe(_wake, own))
        elif self._loop is not loop:
            raise RuntimeError("a stream is used in one event loop: begin another stream")

    def _again(self) -> asyncio.Future[None]:
        assert self._loop is not None
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()
        self._native.leave()


def _wake(stream: weakref.ref[Stream]) -> None:
    """Wakes the coroutines that wait for a stream, which must not live on for that."""
    own = stream()
    if own is not None:
        waiters, own._waiters = own._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Flow(Stream):
    """A job that is pushed into and pulled from. A result is lent until the next one is asked for. `with` ends the job."""

    def __init__(self, flow: _native.Flow, native: _native.Stream, run: Run) -> None:
        super().__init__(native, run, tells=False)
        self._flow = flow
        # One of each: a result is given back when the next one is asked for, also by another loop.
        self._pulled = self._results()
        self._pulled_by_coroutines = self._pulled_async()

    def _results(self) -> Generator[Chunk, None, None]:
        """Lends each result until the next is asked for. Leaving early ends the job."""
        is_done = False
        try:
            while True:
                chunk: Chunk | None = self._native.next(_LOOK_EVERY)
                if chunk is not None:
                    yield from self._lend(chunk)
                elif self._native.is_over:
                    self._run.finish()
                    is_done = True
                    return
        except JobError:
            is_done = True
            raise
        finally:
            if not is_done:
                self._run.abort()

    def _lend(self, chunk: Chunk) -> Generator[Chunk, None, None]:
        has_gpu = self._run.await_gpu(chunk)
        yield chunk
        if has_gpu:
            self._run.issued()
        self._flow.give_back()

    def __iter__(self) -> Iterator[Chunk]:
        return self._pulled

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._pulled_by_coroutines

    async def _pulled_async(self) -> AsyncIterator[Chunk]:
        self._use_loop()
        while True:
            chunk: Chunk | None = self._native.next(0.0)
            if chunk is not None:
                for lent in self._lend(chunk):
                    yield lent
            elif self._native.is_over:
                await _in_thread(self._run.finish)
                return
            else:
                await self._again()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.end()
        self._run.leave(kind is not None, self._native.is_closed)

    async def __aenter__(self) -> Flow:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await _in_thread(self.__exit__, *raised)


class Streams:
    """A job of several streams, each with its order, its end and its results. `with` ends the job: at once, unless all streams have
    ended and nobody is to pull a result any more.

    A stream whose results nobody pulls holds up no other. A result is the caller's own, copied out of its slot.
    """

    def __init__(self, flow: _native.Flow, run: Run) -> None:
        self._flow, self._run = flow, run

    def begin(self) -> Stream:
        """Begins a stream; also while others run."""
        return Stream(self._flow.stream(True), self._run, tells=True)

    def finish(self) -> Summary | None:
        """No stream begins any more. Waits until all have ended and every chunk has come to the sink; results can still be pulled."""
        self._flow.lift_room()
        self._flow.end()
        return self._run.finish()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None and not self._run.is_told and self._flow.is_done:
            self.finish()
        else:
            self._run.leave(kind is not None, self._flow.is_closed)

    async def __aenter__(self) -> Streams:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await _in_thread(self.__exit__, *raised)
