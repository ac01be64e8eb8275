"""Ranks that run a stage together: what one of them can do with the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from . import _arrays
from ._native import Member


class Group:
    """The ranks that run a stage together, as one of them sees it: `at.group`.

    `member` is the place of this rank among them, from 0, and `size` is how many there are: 1 for a stage on one rank, whose
    collectives do nothing or copy. Member 0 leads: it alone has the tensors of a chunk and of `out`.

    The collectives work on arrays of the host on CPUs, and on CUDA tensors on GPUs, which lie in one piece (contiguous). On a GPU
    they are issued to the rank's stream, and nothing waits. All members make the same calls in the same order, in `run`. A lost
    member ends a call of the others with an error that the job takes over: do not catch it.

    A collective works on the memory itself: until it has come back, on a GPU until the stream has passed it, no other thread or
    stream writes into its arrays, and none reads one that it writes. The caller promises that. Nothing checks it.
    """

    def __init__(self, member: int = 0, size: int = 1, native: Member | None = None, gpu: Any = None) -> None:
        self.member, self.size = member, size
        self._native, self._gpu = native, gpu

    @property
    def leads(self) -> bool:
        """Whether this member has the tensors of the chunk and of `out`."""
        return self.member == 0

    def all_reduce(self, x: Any) -> None:
        """Replaces each element of `x` by its sum over all members. All members get the same bits.

        Types: i32, i64, f16, bf16 and f32.
        """
        if self._native is not None:
            self._native.all_reduce(self._written(x), _arrays.dtype_name(x.dtype))
            _is_written(x)

    def broadcast(self, x: Any, root: int = 0) -> None:
        """Copies `x` of member `root` into `x` of all others. It has the same type and shape at all members."""
        if self._native is not None:
            is_root = self.member == root
            self._native.broadcast(self._read(x) if is_root else self._written(x), root)
            if not is_root:
                _is_written(x)

    def scatter(self, whole: Any, part: Any, root: int = 0, rows: Sequence[int] | None = None) -> None:
        """Cuts `whole` of member `root` along its first dimension, and copies a piece into `part` of each member.

        `rows` has the rows of each member's part; without it all have as many. Members that are not the root give None as
        `whole`.
        """
        if self._native is None:
            _copy(part, whole)
            return
        to, parts = self._written(part), self._parts(part, rows)
        self._native.scatter(self._whole(whole, root, self._read), parts, to, root)
        _is_written(part)

    def gather(self, part: Any, whole: Any, root: int = 0, rows: Sequence[int] | None = None) -> None:
        """Joins `part` of each member along its first dimension in `whole` of member `root`, as `Group.scatter` cuts it."""
        if self._native is None:
            _copy(whole, part)
            return
        one, parts = self._read(part), self._parts(part, rows)
        self._native.gather(one, parts, self._whole(whole, root, self._written), root)
        if self.member == root:
            _is_written(whole)

    def send(self, x: Any, to: int) -> None:
        """Sends `x` to another member, which receives as many bytes. Two members that both send first end the job."""
        self._others().send(self._read(x), to)

    def receive(self, x: Any, source: int) -> None:
        """Receives what another member sends, into `x`."""
        self._others().receive(self._written(x), source)
        _is_written(x)

    def barrier(self) -> None:
        """Comes back, or lets the stream go on, when all members are here."""
        if self._native is not None:
            self._native.barrier()

    def _others(self) -> Member:
        if self._native is None:
            raise ValueError("one rank runs this stage: there is no other member")
        return self._native

    def _parts(self, part: Any, rows: Sequence[int] | None) -> list[int]:
        """The bytes of each member's part."""
        each = part.itemsize * math.prod(part.shape[1:])
        return [each * count for count in (rows if rows is not None else [part.shape[0]] * self.size)]

    def _whole(self, whole: Any, root: int, place: Any) -> tuple[int, int]:
        if self.member != root:
            return 0, 0
        if whole is None:
            raise ValueError(f"member {root} is the root, and gives the whole tensor")
        found: tuple[int, int] = place(whole)
        return found

    def _read(self, x: Any) -> tuple[int, int]:
        """Where the elements lie: address and bytes."""
        is_tensor = _arrays.is_tensor(x)
        if self._gpu is None:
            if is_tensor and x.device.type != "cpu":
                raise ValueError(f"a group on CPUs takes tensors of the CPU, and this one is on {x.device}")
        elif not is_tensor or x.device != self._gpu.device:
            has = x.device if is_tensor else "the CPU"
            raise ValueError(f"a group on GPUs takes tensors of {self._gpu.device}, and this one is on {has}")
        else:
            import torch

            if torch.cuda.current_stream(x.device).cuda_stream != self._gpu.cuda_stream:
                raise RuntimeError("a group works on the stream of its rank: call it where that is the current stream")
            # Its memory may be of another stream, which would use it again once the tensor is gone.
            try:
                x.record_stream(self._gpu)
            except RuntimeError:
                # cudaMallocAsync knows only what it has allocated itself, and a slot is not.
                if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
                    raise
        if not (x.is_contiguous() if is_tensor else x.flags.c_contiguous):
            raise ValueError("a group takes arrays that lie in one piece: make a contiguous copy")
        if not is_tensor and not x.dtype.isnative:
            raise ValueError(
                f"a group takes arrays in the byte order of this machine, and this one is of type {x.dtype.str!r}: "
                "use x.astype(x.dtype.newbyteorder('='))"
            )
        return (x.data_ptr() if is_tensor else x.__array_interface__["data"][0]), x.nbytes

    def _written(self, x: Any) -> tuple[int, int]:
        if not _arrays.is_tensor(x) and not x.flags.writeable:
            raise ValueError("a group writes into this array, and it is read-only: copy it")
        return self._read(x)


def _is_written(x: Any) -> None:
    """Lets PyTorch know: a stage must have written its outputs, and must not write its inputs."""
    if _arrays.is_tensor(x) and not x.is_inference():
        import torch

        torch.autograd.graph.increment_version(x)


def _copy(to: Any, source: Any) -> None:
    if _arrays.is_tensor(to):
        to.copy_(source)
    else:
        to[...] = source
