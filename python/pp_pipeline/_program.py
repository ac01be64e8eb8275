"""What a rank opens: the parts of a job that stand on it."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import _native
from ._arrays import rows_of
from ._group import Group
from ._native import Member
from ._stages import (
    At,
    Item,
    SinkCall,
    SourceCall,
    Spec,
    StageCall,
    chosen_arrays,
    item_of,
    layout_of,
    most_of_note,
    note_bytes,
    outputs_of,
    specs_of,
    specs_of_item,
)

# As many tensors as a payload has.
_MOST_TENSORS = 16
# CPython's own, 5 ms, would let each stage wait so long for another busy thread of its process, and each operation of PyTorch in
# it. Linux adds 50 µs to such a wait.
_SWITCH_INTERVAL = 5e-5


@dataclass(frozen=True)
class Place:
    """A stage of the pipeline."""

    name: str
    label: str
    part: int
    parts: int
    ranks: list[int]
    # Its ring: the first stage, the last one, and the laps, None for one lap a step.
    ring: tuple[int, int, int | None] | None

    def laps(self, steps: int) -> int:
        """How often a chunk goes through it."""
        return 1 if self.ring is None else self.ring[2] or steps


class Program:
    """Opens source, stages and sink. Its methods run on the thread that works, but for `__init__` and `check`."""

    def __init__(
        self,
        places: list[Place],
        given: dict[str, Any],
        most: list[dict[str, Spec]] | None,
        arrays: str | None,
        devices: list[str],
        lends: bool,
        read: _native.Stream | None,
        steps: int,
        restarts: int,
        profile: str | None,
    ) -> None:
        self._steps, self._profile = steps, profile
        self._profiler: Any = None
        # A stage that stands in a ring has a memory for each lap.
        contexts = [context_of(given[place.name], place) * place.laps(steps) for place in places[1:-1]]
        self._context = sum(contexts) if restarts else 0
        self._places, self._given, self._most, self._arrays = places, given, most, arrays
        self._devices, self._lends, self._read = devices, lends, read
        self._most_bytes = max((layout_of(kind).payload_bytes for kind in most or ()), default=0)
        self._enters = _caller_state()
        # The stream of this rank, as PyTorch's, where it has a GPU.
        self.gpu: Any = None

    def enter(self, rank: int) -> None:
        """Takes over what the caller has set for its thread, and profiles it if that was asked for."""
        if sys.getswitchinterval() > _SWITCH_INTERVAL:
            sys.setswitchinterval(_SWITCH_INTERVAL)
        self._enters()
        if self._profile is not None:
            import torch.profiler

            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def leave(self, rank: int) -> None:
        """The rank has ended, well or not."""
        if self._profile is not None:
            self._profiler.stop()
            os.makedirs(self._profile, exist_ok=True)
            self._profiler.export_chrome_trace(os.path.join(self._profile, f"rank{rank}.json"))

    def enter_gpu(self, number: int, stream: int) -> None:
        """Makes the stream of this rank the current one: PyTorch issues all work to it, and waits for nothing."""
        import torch

        torch.cuda.set_device(number)
        self.gpu = torch.cuda.ExternalStream(stream, device=number)
        torch.cuda.set_stream(self.gpu)

    def _at(self, rank: int, place: Place, member: Member | None = None) -> At:
        device = self._devices[rank] if self._devices else "cpu"
        if self.gpu is not None:
            device = f"cuda:{self.gpu.device_index}"
        group = Group()
        if len(place.ranks) > 1:
            group = Group(place.ranks.index(rank), len(place.ranks), member, self.gpu)
        return At(rank, device, place.part, place.parts, group)

    def check(self, item: Item) -> None:
        """Refuses what the caller pushes and no slot can take, before the job has it."""
        has = layout_of(specs_of_item(item)).payload_bytes
        if has > self._most_bytes:
            raise ValueError(
                f"the chunk has {has} bytes, and at most {self._most_bytes} were announced: give the largest chunk with most= of the job"
            )
        note_bytes(item.note, "that was pushed", most_of_note(self._context))

    def open_source(self) -> tuple[SourceCall, list[int], int, int]:
        """The source, the bytes of the largest payload behind each stage, the steps, and how many chunks before it a chunk needs.

        Waits for the first chunk unless `most` says it.
        """
        name = self._places[0].name
        first = self._most
        if self._read is not None:
            chunks = _chunks(self._given[name])
            if first is None:
                item = next((item_of(chunk) for chunk in chunks), None)
                first = [specs_of_item(item) if item is not None else {}]
                chunks = itertools.chain([item] if item is not None else [], chunks)
            threading.Thread(target=_read, args=(chunks, self._read), name="pp-read", daemon=True).start()
        assert first is not None
        call = SourceCall(name, self.gpu, self._steps, self._context)
        return call, self._slot_bytes(first), self._steps, self._context

    def _slot_bytes(self, kinds: list[dict[str, Spec]]) -> list[int]:
        def slot(at: int, specs: dict[str, Spec]) -> None:
            count = len(specs) * (self._context + 1)
            if self._context and count > _MOST_TENSORS:
                raise ValueError(
                    f"after a restart {self._places[at].label} sends a chunk with the {self._context} before it, which are {count} "
                    f"tensors, and at most {_MOST_TENSORS} travel: join tensors, let stages have less context=, or leave restarts= out"
                )
            # A stage may receive chunks of no bytes; the memory of a slot has some.
            sizes[at] = max(sizes[at], layout_of(specs, [specs] * self._context).payload_bytes)

        sizes = [1] * (len(self._places) - 1)
        for specs in kinds:
            slot(0, specs)
            at, lap, seen = 1, 0, [specs]
            while at < len(sizes):
                place = self._places[at]
                outputs = outputs_of(place.label, self._given[place.name], self._at(place.ranks[0], place))
                specs = specs_of(rows_of(layout_of(outputs(specs))))
                slot(at, specs)
                if place.ring is not None and at == place.ring[1]:
                    lap += 1
                    # What comes in as in a lap before goes out as there.
                    if lap < place.laps(self._steps) and specs not in seen:
                        seen.append(specs)
                        at = place.ring[0]
                        continue
                at += 1
                if place.ring is None or at > place.ring[1]:
                    lap, seen = 0, [specs]
        return sizes

    def open_stage(self, at: int, rank: int) -> tuple[StageCall, Member]:
        """A stage that stands on this rank, and this rank as a member of its group."""
        place = self._places[at]
        given = self._given[place.name]
        member = Member()
        here = self._at(rank, place, member)
        made = _made(given, here)
        call = StageCall(place.label, made, outputs_of(place.label, given, here), chosen_arrays(made, self._arrays, self.gpu))
        return call, member

    def open_sink(self, rank: int) -> tuple[SinkCall, bool]:
        """The sink, and whether the caller pulls in its place."""
        place = self._places[-1]
        sink = self._given.get(place.name)
        if sink is not None:
            sink = _made(sink, self._at(rank, place))
        call = SinkCall(place.name, sink, chosen_arrays(sink, self._arrays, self.gpu), self._lends)
        return call, sink is None


def context_of(given: Any, place: Place) -> int:
    """How many chunks before a chunk a stage must know."""
    context = getattr(given, "context", 0)
    if not isinstance(context, int) or context < 0:
        raise ValueError(f"context = {context!r} of stage {place.name!r}: it is a number of chunks, from 0")
    return context


def _made(given: Any, at: At) -> Any:
    """A stage: a class is called, with where it stands if it asks for that."""
    if not inspect.isclass(given):
        return given
    make: Callable[..., Any] = given
    takes = inspect.signature(make).parameters.values()
    return make(at) if any(p.kind is not p.KEYWORD_ONLY and p.default is p.empty for p in takes) else make()


def _chunks(source: Any) -> Any:
    """The iterator of a source: an iterable, or a function that gives one."""
    return iter(source() if callable(source) else source)


def _read(chunks: Iterable[Any], stream: _native.Stream) -> None:
    """Reads the source, on a thread of its own: a source that waits holds up nothing."""
    try:
        for chunk in chunks:
            item = item_of(chunk)
            while not stream.push(item, item.cut, False, 3600.0):
                pass
        stream.end()
    except BaseException as error:
        # Also that the job takes no more: then nobody hears of it.
        stream.end(error=error)


def _caller_state() -> Callable[[], None]:
    """What the caller's thread has set in PyTorch, to be set in another one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    grad, device = torch.is_grad_enabled(), torch.get_default_device()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    def enter() -> None:
        torch.set_grad_enabled(grad)
        if device != torch.get_default_device():
            torch.set_default_device(device)
        for kind, dtype in autocast:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)

    return enter

