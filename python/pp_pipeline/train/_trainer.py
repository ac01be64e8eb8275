"""A model that ranks train together."""

from __future__ import annotations

import atexit
import hashlib
import json
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from .. import _native
from .._flow import Run
from .._job import Job
from .._stages import Item, Spec, specs_of_item
from . import _shapes
from ._meeting import Meeting, Turn, Verdict
from ._pipelines import PipelineLostError, Pipelines
from ._settings import Names, NotFiniteError, Optimizer, cut, halves, settings
from ._stage import Tensors
from ._ties import sums_specs, table_of
from ._work import Backward, Forward, Rank


class Trainer:
    """Trains a model whose stages stand on several ranks, in the order of a schedule.

    `schedule` is a name that `pp schedule list` prints, or a file of that form that ends in .csv. `stages(s)` gives stage s of the
    model, and is called on its rank; rank 0 calls it for every stage once, to learn what the stages make. `loss(output, *targets)`
    gives one number for a microbatch; `reduction` says whether it is a "mean" over its rows, or a "sum". `optimizer(parameters)` and
    `scheduler(optimizer)` are called for each stage. `clip` is the largest norm of all gradients together. `seed` decides all random
    numbers in the stages. `names(stage, name)` gives a weight or buffer of a stage its name in the whole model; without it that is
    `stages.STAGE.NAME`; a weight to which several stages give one name is tied. `pipeline_of(rank)` makes several pipelines of the
    world of a launcher: the ranks to which it gives one value are a pipeline. With `own_inputs` the rank of stage 0 takes the inputs of
    its own loop, and with `own_targets` the rank of the last stage its targets; otherwise rank 0 sends its own. `devices`,
    `stuck_after`, `first_after`, `report` and `command` are those of `Job`. With `timing` the times of all actions are measured, for
    `times()`.

    Every rank runs the same loop over `step`. `close()`, or the end of a `with`, ends the job.
    """

    def __init__(
        self,
        schedule: str,
        *,
        ranks: int | None = None,
        stages_per_rank: int = 1,
        microbatches: int,
        stages: Callable[[int], torch.nn.Module],
        loss: Callable[..., torch.Tensor],
        reduction: str = "mean",
        optimizer: Optimizer,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip: float | None = None,
        seed: int = 0,
        names: Names | None = None,
        pipeline_of: Callable[[int], Any] | None = None,
        own_inputs: bool = False,
        own_targets: bool = False,
        devices: list[str] | None = None,
        stuck_after: float | None = 600.0,
        first_after: float = 600.0,
        report: str | None = None,
        command: list[str] | None = None,
        timing: bool = False,
    ) -> None:
        self._settings = settings(
            schedule, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, stages=stages, loss=loss,
            reduction=reduction, optimizer=optimizer, scheduler=scheduler, clip=clip, seed=seed, names=names,
        )  # fmt: skip
        self._of_job: dict[str, Any] = dict(devices=devices, stuck_after=stuck_after, first_after=first_after, report=report, command=command)
        self._own_inputs, self._own_targets, self._timing = own_inputs, own_targets, timing
        self._pipeline_of = pipeline_of
        self._pipelines: Pipelines | None = None
        self._turns = self._calls = self._steps = 0
        self._shapes: Any = None
        self._run: Run | None = None
        self._is_closed = False
        self._verdict: Verdict | None = None

    def step(self, batch: Any) -> float:
        """Trains on a batch, `(inputs, targets)`. Gives its loss, the same number at every rank.

        Raises `NotFiniteError` if a loss or a gradient is not finite, and what `Job.run` raises if the job ends.
        """
        verdict = self._take("train", batch)
        if verdict.norm is None:
            # The same once more tells where it began: the weights have not moved.
            found = self._take("look", batch).finding
            pipeline = None
            if self._pipelines is not None:
                pipeline, found = self._pipelines.finding(self._turns, found)
            step, self._steps = self._steps, self._steps + 1
            if found is None:
                raise NotFiniteError(step, 0, 0, 0, "the sum of the squares of all gradients")
            rank = self._settings.schedule.rank_of[found["stage"]]
            raise NotFiniteError(step, rank, found["stage"], found["microbatch"], found["tensor"], pipeline)
        self._steps += 1
        self._verdict = verdict
        return verdict.loss

    def evaluate(self, batch: Any) -> float:
        """The loss of a batch in evaluation mode. No gradient is made, and no weight moves."""
        return self._take("evaluate", batch).loss

    @property
    def norm(self) -> float | None:
        """The norm of all gradients of the last step, before it was clipped."""
        return self._verdict.norm if self._verdict is not None else None

    def times(self) -> dict[int, dict[str, float]]:
        """Of each stage of the model the median time of its actions F, I, W and B, in seconds; of those kinds that it has.

        The same at every rank, over up to 1,000 actions of a kind until the last step; empty before the first one. Raises
        RuntimeError without `timing=True`.
        """
        if not self._timing:
            raise RuntimeError("the times of actions were not measured: give Trainer(..., timing=True)")
        return self._verdict.times if self._verdict is not None else {}

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """The modules of the stages that stand on this rank, by their number, once a step was made. Look at them between steps."""
        return {number: stage.module for number, stage in sorted(self._rank.stages.items())} if self._run is not None else {}

    def close(self) -> None:
        """Ends the job, once all that was begun is done. At other ranks than 0 this waits for the loop of rank 0 to end."""
        self._end(None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._is_closed or self._run is None:
            self._is_closed = True
            return
        self._is_closed = True
        self._meeting.end(error, self._calls)
        if self._run.is_rank_0:
            self._stream.end(error=error)
        if self._pipelines is not None and error is not None:
            with suppress(PipelineLostError):
                self._pipelines.left(error)
        try:
            self._run.finish()
            if self._pipelines is not None and error is None:
                self._pipelines.end(self._turns, self._calls)
        except BaseException as raised:
            # It is the loop's own, or comes of it.
            if error is None:
                self._leaves(raised)
                raise

    def _leaves(self, error: BaseException) -> None:
        """The loop leaves with an error."""
        if self._pipelines is not None:
            try:
                self._pipelines.left(error)
            finally:
                if self._run is not None:
                    self._is_closed = True
                    self._run.abort()

    def _take(self, mode: str, batch: Any) -> Verdict:
        if self._is_closed:
            raise RuntimeError("the trainer is closed: make another one")
        parts = [cut(half, self._settings.microbatches) for half in halves(batch)]
        inputs, targets = parts
        shapes = [(tuple(one.shape), one.dtype) for half in halves(batch) for one in half]
        if self._shapes not in (None, shapes):
            raise ValueError(f"a batch of {shapes}, and the first had {self._shapes}: give batches of one shape and type")
        self._calls += mode != "look"
        if self._run is None:
            self._shapes = shapes
            try:
                self._begin(inputs[0], targets[0])
            except BaseException as error:
                self._leaves(error)
                raise
            if self._settings.may_tie:
                # Not every rank knows whether there are some.
                self._go("tie", inputs, targets)
        return self._go(mode, inputs, targets)

    def _go(self, mode: str, inputs: list[Tensors], targets: list[Tensors]) -> Verdict:
        """Asks for a turn, and waits for its end."""
        run = self._run
        assert run is not None
        number, self._turns = self._turns, self._turns + 1
        issued = None
        if any(one.is_cuda for one in (*inputs[0], *targets[0])):
            issued = torch.cuda.Event()
            issued.record()
        self._meeting.offer(Turn(number, self._steps, mode, inputs, targets, issued))
        if run.is_rank_0:
            for microbatch in range(self._settings.microbatches):
                self._push(Item(self._sent(inputs[microbatch], targets[microbatch])))
            self._push(Item(self._exchange))
        try:
            return self._meeting.verdict(number, self._goes_on)
        except BaseException as error:
            # The driver must not wait for a loop that has left.
            self._meeting.end(error, self._calls)
            self._leaves(error)
            raise

    def _sent(self, inputs: Tensors, targets: Tensors) -> dict[str, torch.Tensor]:
        """What the source sends of a microbatch."""
        sent = {} if self._own_inputs else {f"x{at}": one for at, one in enumerate(inputs)}
        if not self._own_targets:
            sent.update((f"t{at}", one) for at, one in enumerate(targets))
        return sent

    def _push(self, item: Item) -> None:
        try:
            while not self._stream.push(item, None, False, 0.2):
                self._goes_on()
        except RuntimeError:
            self._goes_on()
            raise

    def _goes_on(self) -> None:
        """Raises what has ended the job, if it has ended."""
        assert self._run is not None
        if self._pipelines is not None:
            self._pipelines.check()
        if self._run.is_over(0.0):
            self._is_closed = True
            self._run.finish()
            raise RuntimeError(f"the job ended after {self._calls - 1} calls of step and evaluate: the loop of rank 0 has ended")

    def _begin(self, inputs: Tensors, targets: Tensors) -> None:
        terms = self._settings
        place: list[tuple[str, str]] = []
        if self._pipeline_of is not None:
            self._pipelines = Pipelines(self._pipeline_of, max(terms.schedule.rank_of) + 1)
            self._of_job["devices"], place = self._pipelines.meet(
                {**dict(self._agreed()), "schedule": _digest(terms.schedule.actions())},
                self._of_job["devices"],
                self._of_job["first_after"] or 1e9,
            )
            terms = self._settings = replace(terms, first=self._pipelines.number * terms.microbatches)
            if self._pipelines.number > 0:
                self._of_job["report"] = None
        placed = _native.place(place)
        rank = 0 if placed is None else placed[0]
        self._meeting = Meeting(rank)
        self._rank = Rank(rank, terms, self._meeting, self._own_inputs, self._own_targets, self._timing, self._pipelines)
        self._rank.first_specs = specs_of_item(Item({f"x{at}": one for at, one in enumerate(inputs)}))
        exchange = _shapes.exchange_specs(terms.count, terms.microbatches, self._timing)
        microbatch = specs_of_item(Item(self._sent(inputs, targets)))
        own = self._rank.first_specs if self._own_inputs else {}
        # The other ranks learn of them from the exchange.
        ties = self._rank.ties({**own, **microbatch}) if rank == 0 and terms.may_tie else []
        if ties:
            exchange.update(sums_specs(ties), ties=Spec((len(table_of(ties)),), torch.uint8))
        self._exchange = {name: torch.zeros(spec.shape, dtype=_shapes.dtype_of(spec)) for name, spec in exchange.items()}
        if ties:
            self._exchange["ties"].copy_(table_of(ties))
        kinds = [microbatch, exchange]
        job = Job(
            terms.schedule.pipeline,
            most=kinds,
            forward=type("Forward", (Forward,), {"of": self._rank}),
            backward=type("Backward", (Backward,), {"of": self._rank}),
            done=_nothing,
            **self._of_job,
        )
        job.follow(terms.schedule, self._agreed(), place)
        flow = _native.Flow(terms.microbatches + 1, 2**62, False, False)
        self._stream = flow.stream(False)
        flow.end()
        run = job._begin(flow, None)
        if run is None:
            raise RuntimeError("a trainer must be the first job that its ranks come to")
        self._run = run
        _close_at_exit(weakref.ref(self))
        if self._pipelines is not None:
            self._pipelines.connect(run._running, self._goes_on)

    def _agreed(self) -> list[tuple[str, str]]:
        """What all ranks must have alike."""
        terms = self._settings
        about = {
            "torch": torch.__version__, "seed": terms.seed, "reduction": terms.reduction, "clip": terms.clip,
            "own": [self._own_inputs, self._own_targets], "timing": self._timing, "names": terms.may_tie,
        }  # fmt: skip
        return [(f"train.{name}", json.dumps(value)) for name, value in about.items()]


def _digest(actions: Any) -> str:
    return hashlib.sha256(repr(actions).encode()).hexdigest()[:16]


def _nothing(chunk: Any) -> None:
    """The sink of the job."""


def _close_at_exit(trainer: weakref.ref[Trainer]) -> None:
    def close() -> None:
        own = trainer()
        if own is not None:
            own.close()

    atexit.register(close)
