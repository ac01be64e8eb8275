"""Stages as the user writes them, and as the job calls them."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from . import _arrays
from ._arrays import PAST, Row, Views, rows_of
from ._group import Group
from ._native import Hold, Layout, Memory


@dataclass(frozen=True)
class Spec:
    """The shape and the type of a tensor: `Spec((8, 3, 720, 1280), "float16")`."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class At:
    """Where a stage stands: its rank and device, which of its parts it is, from 0, and the ranks that run it together."""

    rank: int
    device: str
    part: int
    parts: int
    group: Group = field(default_factory=Group, compare=False, repr=False)


@dataclass(frozen=True)
class Item:
    """A chunk that a source yields where tensors are not all: with a note for the stages and the sink, and a cut.

    `cut="flush"` begins a new epoch, and what is in flight goes on; `cut="hard"` drops it. `steps` is how often this chunk goes
    through a ring that is walked once for each step: at most as often as the job says, which is meant without it. One tensor
    alone is called "x".
    """

    tensors: Mapping[str, Any] | Any
    note: dict[str, Any] | None = None
    cut: str | None = None
    steps: int | None = None


class Chunk(Views):
    """What a stage receives: tensors by name. It is good until the stage returns.

    In the sink `keep()` keeps it.
    """

    # Its number, its lap, how many laps there are, whether it starts an epoch, its stream, and how many were dropped before it; and
    # how many chunks before another one it goes along.
    _at: tuple[int, int, int, bool, int, int] = (0, 0, 1, False, 0, 0)
    _back = 0
    _note: bytes | None = None
    _hold: Hold | None = None
    _may_keep = False

    @property
    def index(self) -> int:
        """Its number in its stream, from 0."""
        return self._at[0] - self._back

    @property
    def lap(self) -> int:
        """In a ring, how often it was here before."""
        return self._at[1]

    @property
    def laps(self) -> int:
        """In a ring, how often it comes in all."""
        return self._at[2]

    @property
    def starts_epoch(self) -> bool:
        """Whether nothing of the chunks before, in its stream, may influence it."""
        return self._at[3]

    @property
    def stream(self) -> int:
        """The number of its stream, where the job has several."""
        return self._at[4]

    @property
    def skipped(self) -> int:
        """How many chunks of its stream were dropped right before it, with `late="drop"`."""
        return 0 if self._back else self._at[5]

    @property
    def is_context(self) -> bool:
        """Whether it was here before a rank was started again, and comes once more because stages must know it. What is made of it
        goes no further than to the sink.
        """
        return self._back > 0

    def keep(self) -> Hold:
        """In the sink: keeps the chunk beyond the call, until `release()` of what this returns is called, from any thread.

        The job takes fewer chunks meanwhile, and none once all that may be in flight are kept. On a GPU, release a chunk when
        the work that reads it is done.
        """
        if not self._may_keep:
            raise RuntimeError("a sink that is a function or a class may keep a chunk, and nobody else: copy it")
        if self._hold is None:
            self._hold = Hold()
        return self._hold

    @property
    def specs(self) -> dict[str, Spec]:
        """Shapes and types of the tensors; in a group at all members."""
        return specs_of(self._rows)

    @property
    def note(self) -> dict[str, Any]:
        """What the source says of the chunk beside its tensors."""
        return json.loads(self._note) if self._note else {}

    def copy(self) -> Chunk:
        """A chunk of one's own, whose tensors are copies."""
        made = copy.copy(self)
        made._tensors = {name: _arrays.copied(tensor) for name, tensor in self.items()}
        return made


class Out(Views):
    """What a stage sends: tensors by name, to be written in place."""

    def __setitem__(self, name: str, value: Any) -> None:
        # What `out["x"] += y` gives back is the tensor itself.
        if value is not self[name]:
            raise TypeError(f"out[{name!r}] lies in shared memory: write into it: out[{name!r}].copy_(y), or out[{name!r}][...] = y")

    def written(self, name: str) -> None:
        """Says that something else than PyTorch wrote this tensor, such as NumPy, Triton or a CUDA graph."""
        self[name]
        self._said.add(name)

    @property
    def specs(self) -> dict[str, Spec]:
        """Shapes and types of the tensors; in a group at all members."""
        return specs_of(self._rows)


def alike(inputs: dict[str, Spec]) -> dict[str, Spec]:
    """The tensors that a stage makes of tensors like these, if its `outputs` says nothing else: they are alike.

    `outputs` is a static method. One whose parts differ takes where the part stands, too: `outputs(inputs, at)`.
    """
    return inputs


class Stage:
    """A stage between source and sink. Its `__init__` may take an `At`.

    `arrays` is "numpy" or "torch"; by default PyTorch where it is imported when the stage is opened. `context` is how many chunks
    before a chunk its result depends on; they are given again after a rank was started again.
    """

    arrays: str | None = None
    context: int = 0

    def run(self, chunk: Chunk, out: Out) -> None:
        """Works on one chunk: reads `chunk`, and writes all of `out`."""
        raise NotImplementedError

    def end_stream(self, stream: int) -> None:
        """Nothing more comes of this stream, where a job has several."""

    def finish(self) -> None:
        """Nothing more comes."""

    outputs: ClassVar[Callable[..., dict[str, Spec]]] = staticmethod(alike)


def checked_specs(whose: str, specs: Any) -> dict[str, Spec]:
    """Tensors as the program has named them."""
    if not isinstance(specs, Mapping) or not all(isinstance(spec, Spec) for spec in specs.values()):
        raise TypeError(f"{whose} is {specs!r}, and must be a dict of pp.Spec, such as {{'x': pp.Spec((2, 2), 'float32')}}")
    return dict(specs)


def outputs_of(name: str, stage: Any, at: At) -> Callable[[dict[str, Spec]], dict[str, Spec]]:
    """What a stage, a class or a function says of its outputs."""
    outputs: Callable[..., Any] | None = getattr(stage, "outputs", None)
    if outputs is None:
        return lambda inputs: inputs
    more = (at,) if len(inspect.signature(outputs).parameters) > 1 else ()
    return lambda inputs: checked_specs(f"what outputs() of stage {name} returned", outputs(inputs, *more))


def layout_of(specs: Mapping[str, Spec], past: Sequence[Mapping[str, Spec]] = ()) -> Layout:
    """The layout of tensors like these, with those of the chunks before behind them, the nearest first."""
    for name in specs:
        if name.startswith(PAST):
            raise ValueError(f"tensor {name!r}: names that begin with {PAST!r} are for the chunks before; choose another one")
    heads = {"": specs, **{f"{PAST}{back}.": of for back, of in enumerate(past, 1)}}
    return Layout(
        [
            (head + name, _arrays.dtype_name(spec.dtype), tuple(spec.shape))
            for head, of in heads.items()
            for name, spec in of.items()
        ]
    )


def specs_of(rows: Sequence[Row]) -> dict[str, Spec]:
    """Tensors of a layout, with types as NumPy and PyTorch name them."""
    return {name: Spec(tuple(shape), _arrays._TYPES[dtype][1]) for name, dtype, shape, _, _ in rows}


def chosen_arrays(stage: Any, job: str | None, gpu: Any = None) -> str:
    """In which arrays a stage works."""
    if gpu is not None:
        return "cuda"
    arrays = getattr(stage, "arrays", None) or job or ("torch" if "torch" in sys.modules else "numpy")
    if arrays not in ("numpy", "torch"):
        raise ValueError(f"arrays={arrays!r}: the choice is 'numpy' or 'torch'")
    return arrays


class Slots:
    """The views of slots, made once for each slot and layout."""

    _MOST = 256

    def __init__(self, view: type[Views], arrays: str, writes: bool) -> None:
        self._made: dict[tuple[Memory | None, Layout, int], Views] = {}
        self._view, self._arrays, self._writes = view, arrays, writes

    def get(self, memory: Memory | None, layout: Layout, back: int = 0) -> Any:
        """The views of the chunk itself, or of the one so many chunks before it."""
        views = self._made.get((memory, layout, back))
        if views is None:
            if len(self._made) >= self._MOST:
                self._made.clear()
            views = self._view(memory, rows_of(layout, back), self._arrays, self._writes)
            self._made[(memory, layout, back)] = views
        return views


def inference(stage: Any, arrays: str) -> Callable[[], Any] | None:
    """What a call of the stage runs under: PyTorch's inference_mode, unless the stage says otherwise."""
    if arrays == "numpy" or not getattr(stage, "inference", True):
        return None
    import torch

    under: Callable[[], Any] = torch.inference_mode
    return under


_At = tuple[int, int, int, bool, int, int]
# The note of a chunk, and those of the chunks before that go along, the nearest first, each with a line end behind it.
_Notes = tuple[bytes | None, bytes | None]


class StageCall:
    """Calls a stage between source and sink, first on the chunks that go along as context."""

    def __init__(self, name: str, stage: Any, outputs: Any, arrays: str) -> None:
        self._name = f"stage {name}"
        self._run = stage.run if hasattr(stage, "run") else stage
        self.ends = getattr(stage, "end_stream", lambda stream: None)
        self.finish = getattr(stage, "finish", lambda: None)
        if hasattr(stage, "later"):
            self.later = stage.later
        self._outputs = outputs
        self._ready: dict[tuple[Memory | None, Layout, Memory | None, int], tuple[list[tuple[Chunk, Out]], Layout]] = {}
        self._in, self._out = Slots(Chunk, arrays, False), Slots(Out, arrays, True)
        self._under = inference(stage, arrays)
        self._checks = getattr(stage, "_is_checked", True)
        # On a GPU: its results go on once its work is issued.
        self.is_ahead = getattr(stage, "_is_ahead", False)

    def call(self, memory: Memory | None, layout: Layout, out: Memory | None, at: _At, notes: _Notes) -> Layout:
        note, past = notes
        before = past.count(b"\n") if past is not None else 0
        ready = self._ready.get((memory, layout, out, before))
        if ready is None:
            ready = self._prepared(memory, layout, out, before)
        calls, made = ready
        if past is not None:
            # The oldest of them starts the epoch.
            rest, own = (*at[:3], False, *at[4:]), past.split(b"\n")
            for back in range(before, 0, -1):
                self._call(*calls[back], at if back == before else rest, own[back - 1])
            at = rest
        self._call(*calls[0], at, note)
        return made

    def _call(self, chunk: Chunk, result: Out, at: _At, note: bytes | None) -> None:
        chunk._at, chunk._note = at, note
        if not self._checks:
            self._run(chunk, result)
            return
        chunk._begin()
        result._begin()
        if self._under is None:
            self._run(chunk, result)
        else:
            with self._under():
                self._run(chunk, result)
        chunk._end(self._name)
        result._end(self._name)

    def _prepared(
        self, memory: Memory | None, layout: Layout, out: Memory | None, before: int
    ) -> tuple[list[tuple[Chunk, Out]], Layout]:
        """The views of the chunk, and of those that go along, the nearest first; and what the stage makes."""
        made = self._made(layout, before, out)
        calls = []
        for back in range(before + 1):
            chunk = self._in.get(memory, layout, back)
            chunk._back = back
            calls.append((chunk, self._out.get(out, made, back)))
        if len(self._ready) >= Slots._MOST:
            self._ready.clear()
        self._ready[memory, layout, out, before] = calls, made
        return calls, made

    def _made(self, layout: Layout, before: int, out: Memory | None) -> Layout:
        own, *past = [self._outputs(specs_of(rows_of(layout, back))) for back in range(before + 1)]
        made = layout_of(own, past)
        if out is not None and made.payload_bytes > out.bytes:
            raise ValueError(
                f"{self._name} makes {made.payload_bytes} bytes, and a slot has {out.bytes}: give the largest chunk with "
                "most= of the job"
            )
        return made


class SinkCall:
    """Calls the sink, or makes a chunk for the caller."""

    def __init__(self, name: str, sink: Any, arrays: str, lends: bool) -> None:
        self._name = f"sink {name}"
        self._take, self._lends = sink if callable(sink) else getattr(sink, "run", sink), lends
        self.ends = getattr(sink, "end_stream", lambda stream: None)
        self.finish = getattr(sink, "finish", lambda: None)
        self._in, self._arrays = Slots(Chunk, arrays, False), arrays

    def call(self, memory: Memory | None, layout: Layout, _: None, at: _At, notes: _Notes) -> Chunk | Hold | None:
        # Chunks without bytes share no slot by which they would be told apart.
        chunk: Chunk = self._in.get(memory, layout) if memory else Chunk(None, rows_of(layout), self._arrays, False)
        if chunk._hold is not None:
            # It was released, and its memory has another chunk now.
            chunk._end(self._name)
        chunk._at, chunk._note = at, notes[0]
        chunk._begin()
        if self._take is None:
            # The caller has it for longer than this call.
            return chunk if self._lends else chunk.copy()
        chunk._hold, chunk._may_keep = None, True
        self._take(chunk)
        chunk._may_keep = False
        if chunk._hold is None:
            chunk._end(self._name)
        return chunk._hold


def item_of(given: Any) -> Item:
    """A chunk as a source may yield it: an `Item`, a dict of tensors, or one tensor, which is called "x"."""
    if isinstance(given, Item):
        return given if isinstance(given.tensors, Mapping) else replace(given, tensors={"x": given.tensors})
    if isinstance(given, Mapping):
        return Item(given)
    return Item({"x": given})


def as_array(value: Any) -> Any:
    """A value of a chunk as an array or as a tensor."""
    return value if _arrays.is_tensor(value) else np.asarray(value)


def specs_of_item(item: Item) -> dict[str, Spec]:
    """The tensors of a chunk."""
    arrays = {name: as_array(value) for name, value in item.tensors.items()}
    return {name: Spec(tuple(array.shape), array.dtype) for name, array in arrays.items()}


class SourceCall:
    """Writes what the source yields into slots."""

    def __init__(self, name: str, gpu: Any = None, steps: int = 1, context: int = 0) -> None:
        self._name, self._steps, self._context = name, steps, context
        self._layouts: dict[tuple[tuple[str, tuple[int, ...], str], ...], Layout] = {}
        self._torch = Slots(Out, "torch" if gpu is None else "cuda", True)
        self._numpy = Slots(Out, "numpy", True) if gpu is None else self._torch

    def call(self, item: Item, memory: Memory, number: int) -> tuple[Layout, bytes, int]:
        arrays = {name: as_array(value) for name, value in item.tensors.items()}
        key = tuple((name, tuple(a.shape), _arrays.dtype_name(a.dtype)) for name, a in arrays.items())
        layout = self._layouts.get(key)
        if layout is None:
            layout = layout_of({name: Spec(shape, dtype) for name, shape, dtype in key})
            self._layouts[key] = layout
        if layout.payload_bytes > memory.bytes:
            raise ValueError(
                f"chunk {number} of {self._name} has {layout.payload_bytes} bytes, and a slot has {memory.bytes}, as the first "
                "chunk needs: give the largest chunk with most= of the job"
            )
        has_tensor = any(_arrays.is_tensor(array) for array in arrays.values())
        slots = self._torch if has_tensor else self._numpy
        out = slots.get(memory, layout)
        for name, array in arrays.items():
            if slots is self._torch:
                out[name].copy_(array if _arrays.is_tensor(array) else _from_numpy(array))
            else:
                out[name][...] = array
        return layout, note_bytes(item.note, number, most_of_note(self._context)), self._steps_of(item, number)

    def _steps_of(self, item: Item, number: int) -> int:
        steps = self._steps if item.steps is None else item.steps
        if not 1 <= steps <= self._steps:
            raise ValueError(f"chunk {number} of {self._name} has {steps} steps, and the job takes 1 to {self._steps} (steps=)")
        if self._context and steps != self._steps:
            raise ValueError(
                f"chunk {number} of {self._name} has steps of its own, and a stage has context: after a restart the chunks before "
                "it go through the ring with it, so give all chunks the steps of the job, or leave restarts= out"
            )
        return steps


def _from_numpy(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array)


def most_of_note(context: int) -> int:
    """The most bytes of a note. Those of the chunks before travel together."""
    return 4096 // context - 1 if context else 4096


def note_bytes(note: dict[str, Any] | None, number: int | str, most: int) -> bytes:
    """A note as it travels."""
    if not note:
        return b""
    try:
        text = json.dumps(note, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"the note of chunk {number}: {error}; a note has numbers, strings, lists and dicts") from None
    if len(text) > most:
        raise ValueError(f"the note of chunk {number} takes {len(text)} bytes as JSON; at most {most:,} travel")
    return text
