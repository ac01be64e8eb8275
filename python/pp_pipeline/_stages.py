"""Stages as the user writes them, and as the job calls them."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from . import _arrays
from ._arrays import Views
from ._native import Layout, Memory


@dataclass(frozen=True)
class Spec:
    """The shape and the type of a tensor: `Spec((8, 3, 720, 1280), "float16")`."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class At:
    """Where a stage stands: its rank and device, and which of its parts it is, from 0."""

    rank: int
    device: str
    part: int
    parts: int


@dataclass(frozen=True)
class Item:
    """A chunk that a source yields where tensors are not all: with a note for the stages and the sink, and a cut.

    `cut="flush"` begins a new epoch, and what is in flight goes on; `cut="hard"` drops it.
    """

    tensors: Mapping[str, Any]
    note: dict[str, Any] | None = None
    cut: str | None = None


class Chunk(Views):
    """What a stage receives: tensors by name. It is good until the stage returns."""

    index = 0
    lap = 0
    starts_epoch = False
    stream = 0
    _note: bytes | None = None

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

    def written(self, name: str) -> None:
        """Says that something else than PyTorch wrote this tensor, such as NumPy, Triton or a CUDA graph."""
        self[name]
        self._said.add(name)


def alike(inputs: dict[str, Spec]) -> dict[str, Spec]:
    """The tensors that a stage makes of tensors like these, if its `outputs` says nothing else: they are alike.

    `outputs` is a static method. One whose parts differ takes where the part stands, too: `outputs(inputs, at)`.
    """
    return inputs


class Stage:
    """A stage between source and sink. Its `__init__` may take an `At`.

    `arrays` is "numpy" or "torch"; by default PyTorch where it is imported when the stage is opened.
    """

    arrays: str | None = None

    def run(self, chunk: Chunk, out: Out) -> None:
        """Works on one chunk: reads `chunk`, and writes all of `out`."""
        raise NotImplementedError

    def end_stream(self, stream: int) -> None:
        """Nothing more comes of this stream, where a job has several."""

    def finish(self) -> None:
        """Nothing more comes."""

    outputs: ClassVar[Callable[..., dict[str, Spec]]] = staticmethod(alike)


def outputs_of(stage: Any, at: At) -> Callable[[dict[str, Spec]], dict[str, Spec]]:
    """What a stage, a class or a function says of its outputs."""
    outputs: Callable[..., dict[str, Spec]] | None = getattr(stage, "outputs", None)
    if outputs is None:
        return lambda inputs: inputs
    if len(inspect.signature(outputs).parameters) < 2:
        return outputs
    return lambda inputs: outputs(inputs, at)


def layout_of(specs: Mapping[str, Spec]) -> Layout:
    """The layout of tensors like these."""
    return Layout([(name, _arrays.dtype_name(spec.dtype), tuple(spec.shape)) for name, spec in specs.items()])


def specs_of(layout: Layout) -> dict[str, Spec]:
    """The tensors of a layout, with types as NumPy and PyTorch name them."""
    return {name: Spec(tuple(shape), _arrays._TYPES[dtype][1]) for name, dtype, shape, _, _ in layout.tensors}


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
        self._made: dict[tuple[Memory | None, Layout], Views] = {}
        self._view, self._arrays, self._writes = view, arrays, writes

    def get(self, memory: Memory | None, layout: Layout) -> Any:
        views = self._made.get((memory, layout))
        if views is None:
            if len(self._made) >= self._MOST:
                self._made.clear()
            views = self._view(memory, layout, self._arrays, self._writes)
            self._made[(memory, layout)] = views
        return views


def inference(stage: Any, arrays: str) -> Callable[[], Any] | None:
    """What a call of the stage runs under: PyTorch's inference_mode, unless the stage says otherwise."""
    if arrays == "numpy" or not getattr(stage, "inference", True):
        return None
    import torch

    under: Callable[[], Any] = torch.inference_mode
    return under


class StageCall:
    """Calls a stage between source and sink."""

    def __init__(self, name: str, stage: Any, outputs: Any, arrays: str) -> None:
        self._name = f"stage {name}"
        self._run = stage.run if hasattr(stage, "run") else stage
        self.ends = getattr(stage, "end_stream", lambda stream: None)
        self.finish = getattr(stage, "finish", lambda: None)
        self._outputs = outputs
        self._layouts: dict[Layout, Layout] = {}
        self._in, self._out = Slots(Chunk, arrays, False), Slots(Out, arrays, True)
        self._under = inference(stage, arrays)

    def call(
        self, memory: Memory | None, layout: Layout, out: Memory, at: tuple[int, int, bool, int], note: bytes | None
    ) -> Layout:
        made = self._layouts.get(layout)
        if made is None:
            made = self._made(layout, out)
        chunk, result = self._in.get(memory, layout), self._out.get(out, made)
        chunk.index, chunk.lap, chunk.starts_epoch, chunk.stream = at
        chunk._note = note
        chunk._begin()
        result._begin()
        if self._under is None:
            self._run(chunk, result)
        else:
            with self._under():
                self._run(chunk, result)
        chunk._end(self._name)
        result._end(self._name)
        return made

    def _made(self, layout: Layout, out: Memory) -> Layout:
        made = layout_of(self._outputs(specs_of(layout)))
        if made.payload_bytes > out.bytes:
            raise ValueError(
                f"{self._name} makes {made.payload_bytes} bytes, and a slot has {out.bytes}: give the largest chunk with "
                "most= of the job"
            )
        if len(self._layouts) >= 64:
            self._layouts.clear()
        self._layouts[layout] = made
        return made


class SinkCall:
    """Calls the sink, or makes a chunk for the caller."""

    def __init__(self, name: str, sink: Any, arrays: str, lends: bool) -> None:
        self._name = f"sink {name}"
        self._take, self._lends = sink, lends
        self.ends = getattr(sink, "end_stream", lambda stream: None)
        self.finish = getattr(sink, "finish", lambda: None)
        self._in = Slots(Chunk, arrays, False)

    def call(
        self, memory: Memory | None, layout: Layout, _: None, at: tuple[int, int, bool, int], note: bytes | None
    ) -> Chunk | None:
        chunk: Chunk = self._in.get(memory, layout)
        chunk.index, chunk.lap, chunk.starts_epoch, chunk.stream = at
        chunk._note = note
        chunk._begin()
        if self._take is None:
            # The caller has it for longer than this call.
            return chunk if self._lends else chunk.copy()
        self._take(chunk)
        chunk._end(self._name)
        return None


def item_of(given: Any) -> Item:
    """A chunk as a source may yield it: an `Item`, a dict of tensors, or one tensor, which is called "x"."""
    if isinstance(given, Item):
        return given
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

    def __init__(self, name: str, gpu: Any = None) -> None:
        self._name = name
        self._layouts: dict[tuple[tuple[str, tuple[int, ...], str], ...], Layout] = {}
        self._torch = Slots(Out, "torch" if gpu is None else "cuda", True)
        self._numpy = Slots(Out, "numpy", True) if gpu is None else self._torch

    def call(self, item: Item, memory: Memory, number: int) -> tuple[Layout, bytes]:
        arrays = {name: as_array(value) for name, value in item.tensors.items()}
        key = tuple((name, tuple(a.shape), _arrays.dtype_name(a.dtype)) for name, a in arrays.items())
        layout = self._layouts.get(key)
        if layout is None:
            layout = Layout([(name, dtype, shape) for name, shape, dtype in key])
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
        return layout, note_bytes(item.note, number)


def _from_numpy(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array)


def note_bytes(note: dict[str, Any] | None, number: int) -> bytes:
    """A note as it travels."""
    if not note:
        return b""
    try:
        text = json.dumps(note, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"the note of chunk {number}: {error}; a note has numbers, strings, lists and dicts") from None
    if len(text) > 4096:
        raise ValueError(f"the note of chunk {number} takes {len(text)} bytes as JSON; at most 4,096 travel")
    return text
