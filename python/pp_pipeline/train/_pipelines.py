"""Several pipelines of one launcher's world: each trains on batches of its own, and all have the same weights.

Hazard: a collective with a rank that is lost does not end. Guarantee: every wait looks at the news, a list of events in the store of
`torch.distributed`, where each pipeline says why it ended; a collective that does not end is left behind. Ranks of the same place in
their pipelines hold the same stages, and are a group.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .. import _native
from .._errors import JobError, of_end
from ._meeting import MODES
from ._shapes import FINDING, decoded, encoded
from ._stage import ModelStage

# How often the news are read, in seconds.
_EVERY = 0.05
_numbers = itertools.count()


class PipelineLostError(RuntimeError):
    """Another pipeline has ended early, `pipeline`; `rank` is the rank of the world that is to blame, and `cause` says why."""

    def __init__(self, pipeline: int, rank: int, cause: str) -> None:
        super().__init__(f"pipeline {pipeline} is lost: rank {rank} of the world: {cause}")
        self.pipeline, self.rank, self.cause = pipeline, rank, cause


class Pipelines:
    """The pipelines as a rank of one of them sees them. `number` is that of its own, `place` its rank there."""

    def __init__(self, pipeline_of: Callable[[int], Any], ranks: int, reduction: str) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "pipeline_of= takes the group of torch.distributed, through which gradients are averaged: call "
                "torch.distributed.init_process_group() before the first step"
            )
        self._world: int = dist.get_world_size()
        self._rank: int = dist.get_rank()
        self._is_mean = reduction == "mean"
        pipelines: dict[Any, list[int]] = {}
        for rank in range(self._world):
            pipelines.setdefault(pipeline_of(rank), []).append(rank)
        self._members = list(pipelines.values())
        if any(len(members) != ranks for members in self._members):
            shown = ", ".join(map(str, self._members))
            raise ValueError(f"pipeline_of= makes pipelines of the ranks {shown}, and the schedule takes {ranks} ranks: give each as many")
        self.number = next(number for number, members in enumerate(self._members) if self._rank in members)
        self.place = self._members[self.number].index(self._rank)
        self.count = len(self._members)
        self._holders = [members[self.place] for members in self._members]
        base: Any = dist.PrefixStore(f"pp_pipeline/{next(_numbers)}", dist.distributed_c10d._get_default_store())
        # One for each thread that must not wait for another one's call.
        self._reads, self._tells = base.clone(), base.clone()
        self._news: list[dict[str, Any]] = []
        self._broken: tuple[float, str] | None = None
        self._is_over = self._is_told = False
        # How often the store has answered, and for how long it did not answer until which time.
        self._answers = 0
        self._silence = (0, 0.0, 0.0)
        # As a rank that does not answer.
        self._silent = 3e-3 * float(os.environ.get("PP_HEARTBEAT_MS", 250))
        self._job: _native.Running | None = None
        self._sums: dict[int, list[tuple[Any, torch.Tensor, list[torch.nn.Parameter]]]] = {}
        self._turn: tuple[int, Any, torch.Tensor] | None = None
        self._host_group: Any = None
        self._group: Any = None
        self._reader = threading.Thread(target=self._read, name="pp-news", daemon=True)
        self._reader.start()
        # Before version 3.14, Python ends a thread by force that wants its lock while the interpreter ends.
        atexit.register(self._stop)

    # The news.

    def _read(self) -> None:
        try:
            while not self._is_over:
                while self._reads.check([str(len(self._news) + 1)]):
                    self._news.append(json.loads(self._reads.get(str(len(self._news) + 1))))
                self._answers += 1
                self._look_at_job()
                time.sleep(_EVERY)
        except Exception as error:
            self._broken = time.monotonic(), f"the store of torch.distributed is gone ({type(error).__name__}: {error})"[:500]

    def _stop(self) -> None:
        self._is_over = True
        self._reader.join(1.0)

    def _look_at_job(self) -> None:
        """Tells what has ended the job of this pipeline, also while the loop does something else."""
        try:
            if self._job is not None and not self._is_told:
                self._job.wait(0.0)
        except _native.EndError as end:
            if self._lost() is None:
                self._tell_lost(of_end(end.args))

    def _tell_lost(self, error: BaseException) -> None:
        self._is_told = True
        of = error.rank if isinstance(error, JobError) and error.rank is not None else self.place
        cause = f"{type(error).__name__}: {error}"[:1000]
        self._tell(lost=self.number, rank=self._members[self.number][of], cause=cause)

    def _tell(self, **event: Any) -> None:
        """Adds to the news. A store that does not answer holds up nobody for long."""

        text, last = json.dumps(event), len(self._news)

        def tell() -> None:
            try:
                # The first number that no other rank has taken. Number and text are there at once, so no news is missing.
                next(at for at in itertools.count(last + 1) if self._tells.compare_set(str(at), "", text).decode() == text)
            except Exception:
                # The reader finds it gone, too.
                pass

        thread = threading.Thread(target=tell, name="pp-tell", daemon=True)
        thread.start()
        thread.join(0.2)

    def _lost(self) -> PipelineLostError | None:
        """What the first pipeline that was lost says, if it is another one than this."""
        first = next((event for event in self._news if "lost" in event), None)
        if first is not None:
            return None if first["lost"] == self.number else PipelineLostError(first["lost"], first["rank"], first["cause"])
        answers, silence, last = self._silence
        now = time.monotonic()
        # A look counts little by itself: between many of them the reader had chances to run.
        silence = silence + min(now - last, _EVERY) if answers == self._answers else 0.0
        self._silence = self._answers, silence, now
        if self._broken is None and silence > max(self._silent, 5 * _EVERY) and self._silent > 0:
            self._broken = now, f"the store of torch.distributed has not answered for {silence:.2g} s"
        # Rank 0 of the world is in pipeline 0. Where that is the own one, the job knows more.
        if self._broken is not None and (self.number > 0 or now - self._broken[0] > 2):
            return PipelineLostError(0, 0, f"{self._broken[1]}; as a rule it is in the process of this rank")
        return None

    def check(self) -> None:
        """Raises if another pipeline was lost."""
        lost = self._lost()
        if lost is not None:
            raise lost

    def left(self, error: BaseException) -> None:
        """The loop of this rank leaves with an error. It is told to others, unless it comes of another pipeline: that is raised."""
        for group in (self._host_group, self._group):
            # One whose collective does not end would wait for that where it is destroyed, at the end of the program.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        # The other ranks read the news before this one is gone, and the store with it.
        time.sleep(2 * _EVERY)
        if isinstance(error, PipelineLostError) or self._is_told:
            return
        # What ended the own job may be younger news than its end.
        self._wait(lambda: self._lost() is not None, 3 * _EVERY, checks=False)
        lost = self._lost()
        if lost is not None:
            raise lost from error
        self._tell_lost(error)

    def _wait(self, is_there: Callable[[], bool], seconds: float = 1e9, checks: bool = True, turn: int = -1) -> bool:
        """Waits so long. With `checks` it raises if a pipeline is lost, or has ended before this turn."""
        until, pause = time.monotonic() + seconds, 2e-5
        while not is_there():
            if checks:
                self._check_all(turn)
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
        return True

    def _check_all(self, turn: int) -> None:
        self.check()
        for event in self._news:
            if event.get("lost") == self.number:
                raise RuntimeError(f"a rank of this pipeline has left: {event['cause']}")
            if "ended" in event and event["turns"] <= turn:
                raise RuntimeError(
                    f"the loops of pipeline {event['ended']} ended after {event['calls']} calls of step and evaluate, and those of "
                    f"pipeline {self.number} go on: give all pipelines equally many batches"
                )

    # Begin and end.

    def meet(self, about: dict[str, Any], devices: list[str] | None, seconds: float) -> tuple[list[str] | None, list[tuple[str, str]]]:
        """Compares what all ranks must have alike. Gives the devices of this pipeline, and the variables that make it a job."""
        about = {**about, "pipeline_of": self._members}
        device = devices[self.place] if devices and self.place < len(devices) else "cpu"
        address, port = _free_address()
        here = {"address": address, "port": port, "host": socket.gethostname(), "id": secrets.token_hex(8)}
        self._tell(hello=self._rank, about=about, device=device, **here)
        are_all = self._wait(lambda: sum("hello" in event for event in self._news) == self._world, seconds)
        came = {event["hello"]: event for event in self._news if "hello" in event}
        if not are_all:
            missing = ", ".join(str(rank) for rank in range(self._world) if rank not in came)
            raise RuntimeError(f"no word of the ranks {missing} of the world within {seconds:g} s: let all come to their first step")
        about = came[0]["about"]
        for rank, event in sorted(came.items()):
            for name, value in event["about"].items():
                known = about.get(name)
                if value != known:
                    raise ValueError(f"{name} is {value!r} at rank {rank} of the world, and {known!r} at rank 0: give all the same")
        kinds = {came[rank]["device"].split(":")[0] for rank in self._holders}
        if len(kinds) > 1:
            raise ValueError(f"the ranks {self._holders} hold the same stages, and are on {sorted(kinds)}: give them devices of one kind")
        members = self._members[self.number]
        root = came[members[0]]
        of_host = [rank for rank in members if came[rank]["host"] == came[self._rank]["host"]]
        # Each pipeline would begin with the first GPU of its host.
        taken: Counter[str] = Counter()
        for _, one in sorted(came.items()):
            if one["device"] == "cuda":
                one["device"] = f"cuda:{taken[one['host']]}"
                taken[one["host"]] += 1
        if devices is not None and len(devices) == len(members):
            devices = [came[rank]["device"] for rank in members]
        # NCCL takes no two ranks on one GPU.
        gpus = {(came[rank]["host"], came[rank]["device"]) for rank in self._holders}
        self._has_nccl = kinds == {"cuda"} and len(gpus) == self.count
        return devices, [
            ("RANK", str(self.place)),
            ("WORLD_SIZE", str(len(members))),
            ("LOCAL_RANK", str(of_host.index(self._rank))),
            ("MASTER_ADDR", root["address"]),
            ("PP_PORT", str(root["port"])),
            ("PP_JOB_ID", f"{came[0]['id']}/pipeline-{self.number}"),
        ]

    def connect(self, job: _native.Running, goes_on: Callable[[], None]) -> None:
        """Makes the groups; all ranks of the world come here. `goes_on` raises if the job has ended."""
        self._job = job
        raised: list[BaseException] = []

        def work() -> None:
            try:
                for place, ranks in enumerate(zip(*self._members, strict=True)):
                    on_host = dist.new_group(list(ranks), backend="gloo")
                    if place == self.place:
                        self._host_group = self._group = on_host
                if self._has_nccl:
                    self._group = dist.new_group(self._holders, backend="nccl", use_local_synchronization=True)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work, name="pp-groups", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_EVERY)
            goes_on()
        if raised:
            raise raised[0]

    def begin(self, stages: Mapping[int, ModelStage]) -> None:
        """Lets the stages of all pipelines begin with the weights and buffers of the first."""
        for _, stage in sorted(stages.items()):
            for tensor in (*stage.module.parameters(), *stage.module.buffers()):
                whole = tensor.detach().clone(memory_format=torch.contiguous_format)
                if whole.numel():
                    # Not every type of PyTorch is one of gloo's.
                    self._ends(dist.broadcast(whole.view(-1).view(torch.uint8), self._holders[0], group=self._group, async_op=True))
                if not torch.equal(tensor, whole):
                    tensor.detach().copy_(whole)

    def end(self, turns: int, calls: int) -> None:
        """The loops of this pipeline have ended. Waits for those of all others."""
        if self.place == 0:
            self._tell(ended=self.number, turns=turns, calls=calls)
        self._wait(lambda: self._broken is not None or sum("ended" in event for event in self._news) == self.count)
        self._is_over = True
        for group in {self._host_group, self._group}:
            dist.destroy_process_group(group)

    # A turn.

    def turn(self, number: int, mode: str) -> None:
        """A turn begins."""
        self._turn = number, *self._gathers(torch.tensor([MODES.index(mode)]))

    def agree(self) -> None:
        """Waits until all pipelines have begun this turn, and raises if they differ."""
        if self._turn is None:
            return
        number, work, rows = self._turn
        self._ends(work, number)
        self._turn = None
        modes = [MODES[row] for row in rows.flatten().tolist()]
        for other, mode in enumerate(modes):
            if mode != modes[self.number]:
                raise RuntimeError(
                    f"pipeline {self.number} came to {modes[self.number]!r} where pipeline {other} came to {mode!r}: let all pipelines "
                    "run the same loop"
                )

    def _gathers(self, own: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Begins to collect a tensor of the host from all pipelines, one row of each."""
        rows = torch.zeros(self.count, len(own), dtype=own.dtype)
        return dist.all_gather(list(rows), own, group=self._host_group, async_op=True), rows

    def losses(self, own: torch.Tensor) -> torch.Tensor:
        """The losses of the microbatches over all pipelines, added in their order."""
        work, rows = self._gathers(own.cpu())
        self._ends(work)
        total = torch.zeros_like(rows[0])
        for row in rows:
            total += row
        return total / self.count if self._is_mean else total

    def add(self, stage: ModelStage) -> None:
        """Begins to add the gradients of a stage over all pipelines."""
        self._sums[stage.number] = [
            (dist.all_reduce(flat, group=self._group, async_op=True), flat, params)
            for flat, params in stage.flat_gradients()
        ]

    def added(self, stage: ModelStage) -> None:
        """Waits for the gradients of a stage."""
        if self._has_nccl:
            # NCCL does not notice a process that is gone.
            self._ends(self._gathers(torch.zeros(1))[0])
        for work, flat, params in self._sums.pop(stage.number):
            self._ends(work)
            has = flat[-len(params) :].tolist()
            if self._is_mean:
                flat /= self.count
            for p, count in zip(params, has, strict=True):
                p.grad = p.grad if count > 0 else None

    def _ends(self, work: Any, turn: int = -1) -> None:
        """Waits for the end of a collective. It is left behind if a pipeline is lost, or has ended before this turn."""
        self._wait(work.is_completed, turn=turn)
        try:
            work.wait()
        except RuntimeError as error:
            text = f"a collective between the ranks {self._holders} of the world failed: {error}"
            # A rank may be silent for that long before it counts as lost, and then its pipeline says why.
            seconds = max(0.5, min(self._silent, 10.0)) + 2 * _EVERY
            has_cause = self._wait(
                lambda: self._lost() is not None or any("lost" in event for event in self._news), seconds, checks=False
            )
            if not has_cause and self.count == 2:
                # No rank of the other pipeline is left that could tell.
                other = 1 - self.number
                self._tell(lost=other, rank=self._holders[other], cause=text[:1000])
                self._wait(lambda: self._lost() is not None, 1.0, checks=False)
            self.check()
            raise RuntimeError(text) from error

    def finding(self, own: dict[str, Any] | None) -> dict[str, Any] | None:
        """The first tensor that is not finite in any pipeline, with the number of the pipeline."""
        work, rows = self._gathers(encoded(own, FINDING))
        self._ends(work)
        found = [{**one, "pipeline": number} for number, one in enumerate(map(decoded, rows)) if one is not None]
        return min(found, key=lambda one: one["order"], default=None)


def _free_address() -> tuple[str, int]:
    """An address of this host that the others reach, and a port there that is free now."""
    towards = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, place = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe, socket.socket(family) as own:
        probe.connect(place)
        address: str = probe.getsockname()[0]
        own.bind((address, 0))
        return address, own.getsockname()[1]
