"""Slots as arrays: NumPy arrays, or PyTorch tensors, that lie where a rank receives or sends.

Hazard: an array outlives the chunk that it shows, and then shows another one. Guarantee: after each call the users of an array
are counted, and one that was kept ends the job. Its memory stays mapped even then.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ._native import Layout, Memory

# The names of the contract, those of NumPy's array interface, and PyTorch's. Types that NumPy lacks travel as unsigned integers.
_TYPES = {
    "u8": ("|u1", "uint8"),
    "i8": ("|i1", "int8"),
    "bool": ("|b1", "bool"),
    "i16": ("<i2", "int16"),
    "u16": ("<u2", "uint16"),
    "i32": ("<i4", "int32"),
    "u32": ("<u4", "uint32"),
    "i64": ("<i8", "int64"),
    "f16": ("<f2", "float16"),
    "f32": ("<f4", "float32"),
    "f64": ("<f8", "float64"),
    "bf16": ("<u2", "bfloat16"),
    "f8e4m3fn": ("|u1", "float8_e4m3fn"),
    "f8e5m2": ("|u1", "float8_e5m2"),
}
_NAMES = {name: known for known, (_, name) in _TYPES.items()}
_NOT_IN_NUMPY = {"bf16", "f8e4m3fn", "f8e5m2"}


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The contract's name of a type: `np.float32`, `torch.bfloat16`, "float32" or "f32" alike."""
    if isinstance(dtype, str) and dtype in _TYPES:
        return dtype
    text = str(dtype).removeprefix("torch.")
    if text not in _NAMES:
        try:
            text = np.dtype(dtype).name
        except TypeError:
            pass
    if text not in _NAMES:
        raise TypeError(f"{dtype!r} is no type that travels; the types are {', '.join(sorted(_NAMES))}")
    return _NAMES[text]


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor of PyTorch, which is not imported for the question."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def copied(array: Any) -> Any:
    """An array or a tensor of one's own."""
    return array.clone() if is_tensor(array) else array.copy()


def _ml_dtype(name: str) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"NumPy has no {_TYPES[name][1]}: install ml_dtypes, or use PyTorch (arrays='torch')") from None
    return np.dtype(getattr(ml_dtypes, _TYPES[name][1]))


def _array(memory: Memory | None, name: str, shape: tuple[int, ...], offset: int, size: int) -> np.ndarray[Any, Any]:
    """The root of all views of a tensor: NumPy collapses chains of views, so each slice counts as its user."""
    if memory is None:
        return np.empty(shape, _TYPES[name][0])
    return np.asarray(memory.window(offset, size, shape, _TYPES[name][0]))


class _NumPy:
    """One tensor of a slot as a NumPy array."""

    __slots__ = ("root", "tensor", "users")

    def __init__(self, memory: Memory | None, name: str, shape: tuple[int, ...], offset: int, size: int, writes: bool) -> None:
        self.root = _array(memory, name, shape, offset, size)
        self.tensor = self.root.view(_ml_dtype(name)) if name in _NOT_IN_NUMPY else self.root.view()
        self.tensor.flags.writeable = writes
        self.users = self.count()

    def count(self) -> int:
        return sys.getrefcount(self.root) + sys.getrefcount(self.tensor)


class _Torch:
    """One tensor of a slot as a PyTorch tensor."""

    __slots__ = ("tensor", "users", "version", "_use_count")

    def __init__(self, memory: Memory | None, name: str, shape: tuple[int, ...], offset: int, size: int, writes: bool) -> None:
        import torch

        self._use_count = torch._C._storage_Use_Count
        # A tensor that is made under inference_mode has no version.
        with torch.inference_mode(False), torch.no_grad():
            raw = self._raw(torch, memory, offset, size)
            self.tensor = raw.view(getattr(torch, _TYPES[name][1])).view(shape)
        del raw
        self.version = self.tensor._version
        self.users = self.count()

    @staticmethod
    def _raw(torch: Any, memory: Memory | None, offset: int, size: int) -> Any:
        return torch.from_numpy(_array(memory, "u8", (size,), offset, size))

    def count(self) -> int:
        users: int = self._use_count(self.tensor.untyped_storage()._cdata)
        return users + sys.getrefcount(self.tensor)

    def begin(self) -> None:
        self.version = self.tensor._version

    def was_written(self) -> bool:
        return bool(self.tensor._version != self.version)


class _Cuda(_Torch):
    """One tensor of a slot as a PyTorch tensor on the GPU of this rank."""

    __slots__ = ()

    @staticmethod
    def _raw(torch: Any, memory: Memory | None, offset: int, size: int) -> Any:
        if memory is None or size == 0:
            return torch.empty(0, dtype=torch.uint8, device="cuda")
        return torch.as_tensor(memory.window(offset, size, (size,), "|u1"), device="cuda")


_KINDS: dict[str, type[_NumPy] | type[_Torch]] = {"numpy": _NumPy, "torch": _Torch, "cuda": _Cuda}


# A tensor of a payload: its name, its type, its shape, its place and its bytes.
Row = tuple[str, str, tuple[int, ...], int, int]
# In front of the names of the tensors of a chunk that goes along as context, with how many chunks before, and a dot.
PAST = "past."


def rows_of(layout: Layout, back: int = 0) -> list[Row]:
    """The tensors of the chunk itself, or of the one so many chunks before it."""
    if back == 0:
        return [row for row in layout.tensors if not row[0].startswith(PAST)]
    head = f"{PAST}{back}."
    return [(row[0].removeprefix(head), *row[1:]) for row in layout.tensors if row[0].startswith(head)]


class Views(Mapping[str, Any]):
    """The tensors of one slot by name. A stage sees it as a chunk or as what it writes."""

    def __init__(self, memory: Memory | None, rows: list[Row], arrays: str, writes: bool) -> None:
        view = _KINDS[arrays]
        self._rows = rows
        self._views: dict[str, _NumPy | _Torch] = {}
        self._tensors: dict[str, Any] = {}
        for name, dtype, shape, offset, size in rows:
            # A member of a group that does not lead has no slot.
            if memory is None and size > 0:
                continue
            self._views[name] = made = view(memory, dtype, shape, offset, size, writes)
            self._tensors[name] = made.tensor
        self._names = tuple(self._tensors)
        # With the user of the dict.
        for made in self._views.values():
            made.users = made.count()
        self._writes = writes
        self._said: set[str] = set()
        self._checks = list(self._views.items())
        # NumPy has no versions: nothing is known of writes.
        self._versions = [(name, view) for name, view in self._checks if isinstance(view, _Torch)]

    def __getitem__(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            if any(row[0] == name for row in self._rows):
                raise KeyError(
                    f"tensor {name!r} is at the member that leads the group (at.group.leads): the others get it by at.group"
                ) from None
            has = ", ".join(self._tensors) or "none"
            more = "; a stage that makes other tensors says so by outputs()" if self._writes else ""
            raise KeyError(f"there is no tensor {name!r} here; there are {has}{more}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _begin(self) -> None:
        if self._said:
            self._said.clear()
        for _, view in self._versions:
            view.begin()

    def _end(self, stage: str) -> None:
        """Finds what a call must not have done: keep a tensor, write into one that came, or leave one unwritten that goes on."""
        for name, view in self._checks:
            if view.count() > view.users:
                gc.collect()
                if view.count() > view.users:
                    raise RuntimeError(
                        f"{stage} keeps tensor {name!r} beyond its call, and the memory is used for another chunk next: "
                        "copy it (.copy() in NumPy, .clone() in PyTorch)"
                    )
        for name, view in self._versions:
            written = view.was_written()
            if self._writes and not written and name not in self._said:
                raise RuntimeError(
                    f"{stage} did not write tensor {name!r}: use out[{name!r}].copy_(...), or call out.written({name!r}) where "
                    "something else than PyTorch wrote it"
                )
            if not self._writes and written:
                raise RuntimeError(f"{stage} wrote into tensor {name!r}, which it received: write into what goes on, or copy it")
