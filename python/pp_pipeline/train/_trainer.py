"""A model that ranks train together."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from .._errors import JobError, StageError
from .._flow import Run
from .._job import Job, placed_at
from .._stages import Item, specs_of_item
from . import _shapes
from ._checkpoint import Checkpoints, check_safetensors, load_weights, places_of
from ._meeting import Meeting, Turn, Verdict
from ._pipelines import PipelineLostError, Pipelines
from ._settings import Names, Optimizer, Settings, cut, halves
from ._shapes import Tensors
from ._stage import Casts, ModelStage, casts_here
from ._ties import sums_specs
from ._work import Backward, Forward, Rank


# A rank that ended like this may do better the next time.
_WORTH_IT = ("peer died", "timed out", "device", "plugin")


class Trainer:
    """Trains a model whose stages stand on several ranks, in the order of a schedule.

    `schedule` is a name that `pp schedule list` prints, or a file of that form that ends in .csv. `stages(s)` gives stage s of the
    model, and is called on its rank; rank 0 calls it for other stages, too, to learn what they make. `loss(output, *targets)`
    gives one number for a microbatch; `reduction` says whether it is a "mean" over its rows, or a "sum". `optimizer(parameters)` and
    `scheduler(optimizer)` are called for each stage. `clip` is the largest norm of all gradients together. `seed` decides all random
    numbers in the stages. `names(stage, name)` gives a weight or buffer of a stage its name in the whole model; without it that is
    `stages.STAGE.NAME`; a weight to which several stages give one name is tied. `pipeline_of(rank)` makes several pipelines of the
    world of a launcher: the ranks to which it gives one value are a pipeline. With `own_inputs` the rank of stage 0 takes the inputs of
    its own loop, and with `own_targets` the rank of the last stage its targets; otherwise rank 0 sends its own. `devices`,
    `stuck_after`, `first_after`, `report`, `live`, `live_token_file` and `command` are those of `Job`. With `timing` the times of all
    actions are measured, for `times()` and the report; `timeline` is then a file for a picture (SVG) of a step beside its simulation.

    `checkpoint` is a folder that all ranks see. Each step whose number is a multiple of `every` leaves a checkpoint there. With
    `resume` the trainer begins with the last one, if there is one. If another rank than 0 is lost, up to `restarts` times in all, the
    ranks begin again with the last checkpoint, and rank 0 plays again what came behind it.

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
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        resume: bool = False,
        restarts: int = 0,
        devices: list[str] | None = None,
        stuck_after: float | None = 600.0,
        first_after: float = 600.0,
        report: str | os.PathLike[str] | None = None,
        timeline: str | os.PathLike[str] | None = None,
        live: str | None = None,
        live_token_file: str | os.PathLike[str] | None = None,
        command: list[str] | None = None,
        timing: bool = False,
    ) -> None:
        self._settings = Settings(
            schedule, ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, stages=stages, loss=loss,
            reduction=reduction, optimizer=optimizer, scheduler=scheduler, clip=clip, seed=seed, names=names,
        )  # fmt: skip
        if timeline is not None and not timing:
            raise ValueError(f"timeline={timeline!r} shows when actions were at work, and that is not measured: give timing=True, too")
        self._of_job: dict[str, Any] = dict(
            devices=devices, stuck_after=stuck_after, first_after=first_after, report=report, timeline=timeline, live=live,
            live_token_file=live_token_file, command=command,
        )  # fmt: skip
        self._own_inputs, self._own_targets, self._timing = own_inputs, own_targets, timing
        self._turns = self._calls = 0
        self._pipeline_of = pipeline_of
        self._pipelines: Pipelines | None = None
        # Variables of a launcher, which count instead of those of the environment.
        self._place: list[tuple[str, str]] = []
        _check(checkpoint, every, resume, restarts, pipeline_of)
        self._checkpoints = Checkpoints(checkpoint, every, resume, seed) if checkpoint is not None and every is not None else None
        # The loss of each step, also of those before this trainer resumed.
        self.losses: list[float] = list(self._checkpoints.losses) if self._checkpoints is not None else []
        self._to_skip = len(self.losses)
        self._weights: Path | None = None
        self._restarts = restarts
        # What the calls gave, and the batches of those since the last checkpoint.
        self._results: list[tuple[str, Verdict]] = []
        self._kept: list[tuple[str, Any, Casts]] = []
        # How many calls came before these.
        self._saved = 0
        self._lost: list[dict[str, Any]] = []
        self._shapes: Any = None
        self._run: Run | None = None
        self._is_closed = False
        self._verdict: Verdict | None = None

    def step(self, batch: Any) -> float:
        """Trains on a batch, `(inputs, targets)`. Gives its loss, the same number at every rank.

        Raises `NotFiniteError` if a loss or a gradient is not finite, what `Job.run` raises if the job ends, `PipelineLostError` if
        another pipeline ends it, `OSError` if a checkpoint cannot be written, and `TimeoutError` if a stage of rank 0 does not end within
        `stuck_after` seconds, behind the loss of another rank.
        """
        verdict = self._call("train", batch)
        if verdict.norm is None:
            raise self._settings.not_finite(len(self.losses) - 1, verdict.finding)
        return verdict.loss

    def evaluate(self, batch: Any) -> float:
        """The loss of a batch in evaluation mode. No gradient is made, and no weight moves."""
        return self._call("evaluate", batch).loss

    def batches(self, data: Iterable[Any]) -> Iterator[Any]:
        """The batches of `data` without those that were trained on before this trainer resumed: the first ones, over all calls."""
        for batch in data:
            if self._to_skip > 0:
                self._to_skip -= 1
            else:
                yield batch

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Begins with the weights and buffers of a checkpoint, of a folder of Hugging Face or of a .safetensors file.

        Every rank calls it before the first call of `step` or `evaluate`. Where the trainer resumes it does nothing. A tensor that is
        missing, or has another shape or type, ends the job with its name.
        """
        if self._run is not None:
            raise RuntimeError("the job has begun: call load_weights before step and evaluate")
        if self._checkpoints is not None and self._checkpoints.last is not None:
            return
        check_safetensors()
        self._weights = Path(path)
        places_of(self._weights)

    @property
    def norm(self) -> float | None:
        """The norm of all gradients of the last step, before it was clipped."""
        return self._verdict.norm if self._verdict is not None else None

    def times(self) -> dict[int, dict[str, float]]:
        """Of each stage of the model the median time of its actions F, I, W and B, in seconds; of those kinds that it has.

        The same at every rank, over the latest 100 actions of each kind; empty before the first one. Raises
        RuntimeError without `timing=True`.
        """
        if not self._timing:
            raise RuntimeError("the times of actions were not measured: give Trainer(..., timing=True)")
        return self._verdict.times if self._verdict is not None else {}

    @property
    def rank(self) -> int:
        """The rank of this process; of several pipelines its rank in its own, once the job has begun."""
        placed = placed_at(self._place)
        return 0 if placed is None else placed[0]

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """The modules of the stages that stand on this rank, by their number, once a step was made. Look at them between steps."""
        return {number: stage.module for number, stage in sorted(self._rank.stages.items())} if self._run is not None else {}

    def close(self) -> None:
        """Ends the job, once all that was begun is done. At other ranks than 0 this waits for the loop of rank 0 to end.

        At rank 0 it also waits for the processes that it has started, whose programs may go on. One that does not end well is lost.
        """
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
                if not isinstance(raised, JobError):
                    raise
                self._begin_again(raised)
                self._play_all(self._kept.copy())
                return self._end(None)
        if self._restarts and self._run.is_rank_0 and self._checkpoints is not None:
            self._checkpoints.forget()
            if error is None:
                self._report()
        if "PP_SUPERVISOR_PID" in os.environ and threading.current_thread() is threading.main_thread():
            # Nobody tells this program any more what to do.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _call(self, mode: str, batch: Any) -> Verdict:
        """A call of `step` or `evaluate`. In a rank that was started again it gives what it gave before the last checkpoint."""
        if self._is_closed:
            raise RuntimeError("the trainer is closed: make another one")
        given = halves(batch)
        shapes = [(tuple(one.shape), one.dtype) for half in given for one in half]
        if self._run is None:
            self._shapes = shapes
            try:
                self._begin(*(cut(half, self._settings.microbatches)[0] for half in given))
            except BaseException as error:
                self._leaves(error)
                raise
        elif shapes != self._shapes:
            raise ValueError(f"a batch of {shapes}, and the first had {self._shapes}: give batches of one shape and type")
        self._calls += 1
        if self._checkpoints is not None and self._checkpoints.recorded:
            was, verdict = self._checkpoints.recorded.popleft()
            if was != mode:
                raise RuntimeError(f"the loop came to {mode!r} where it had come to {was!r} before this rank was lost")
            self._done(mode, verdict)
            return verdict
        casts = casts_here()
        if self._keeps:
            copies = tuple(tuple(one.detach().to("cpu", copy=True) for one in half) for half in given)
            self._kept.append((mode, copies, casts))
        return self._play_all([(mode, batch, casts)])[-1]

    @property
    def _keeps(self) -> bool:
        """Says whether this rank keeps what is played again."""
        return self._restarts > 0 and self._run is not None and self._run.is_rank_0

    def _play_all(self, calls: list[tuple[str, Any, Casts]]) -> list[Verdict]:
        """Plays calls, and all since the last checkpoint again if a rank is lost."""
        while True:
            try:
                return [self._play(*call) for call in calls]
            except JobError as lost:
                self._begin_again(lost)
                calls = self._kept.copy()

    def _play(self, mode: str, batch: Any, casts: Casts) -> Verdict:
        assert self._run is not None
        points, begins = self._checkpoints, self._turns == 0
        if begins and self._settings.may_tie:
            # Not every rank knows whether there are some.
            self._take("tie", batch, [])
        if begins and points is not None and points.last is None and self._restarts:
            # Whatever the modules began with: a rank that is started again needs the same.
            self._save(points, batch)
        verdict = self._take(mode, batch, casts)
        if mode == "train" and verdict.norm is None:
            # The same once more tells where it began: the weights have not moved.
            verdict.finding = self._take("look", batch, casts).finding
            if self._pipelines is not None:
                verdict.finding = self._pipelines.finding(verdict.finding)
        self._done(mode, verdict)
        if mode == "train" and verdict.norm is not None:
            self._run._running.trained(verdict.loss, verdict.moments)
        if mode == "train" and points is not None and len(self.losses) % points.every == 0:
            self._save(points, batch)
        return verdict

    def _done(self, mode: str, verdict: Verdict) -> None:
        if mode == "train":
            self.losses.append(verdict.loss)
            self._verdict = verdict if verdict.norm is not None else self._verdict
        if self._keeps:
            self._results.append((mode, replace(verdict, times={}, moments=[])))

    def _save(self, points: Checkpoints, batch: Any) -> None:
        """Makes a checkpoint of the steps until now. It is whole where rank 0 comes back."""
        assert self._run is not None
        step = len(self.losses)
        try:
            commits = self._run.is_rank_0 and self._rank.checkpoints is not None
            if commits:
                points.begin(step)
            self._take("save", batch, [])
            if commits:
                points.commit(step, self._settings.count, self.losses)
        except OSError as error:
            self._end(error)
            raise
        points.last = step
        # What came before is not played again.
        self._kept = self._kept[len(self._results) - self._saved :]
        self._saved = len(self._results)

    def _begin_again(self, lost: JobError) -> None:
        """Begins the job again with the last checkpoint where another rank was lost; else raises what it was lost to."""
        at = lost.rank, lost.operation, len(self._results)
        # One that fails again where it failed before, in a stage or behind the job, would do so for ever.
        may_repeat = isinstance(lost, StageError) or lost.operation == "end"
        is_again = may_repeat and self._lost and self._lost[-1]["at"] == at
        points, left = self._checkpoints, self._restarts - len(self._lost)
        if points is None or not self._keeps or not left or not lost.rank or lost.kind not in _WORTH_IT or is_again:
            raise lost
        played = len(self._results) - self._saved
        step = points.last if points.last is not None else 0
        self._lost.append({"rank": lost.rank, "at": at, "why": super(JobError, lost).__str__(), "step": step, "calls": played})
        print(
            f"pp: rank {lost.rank} is lost: {lost}\npp: all ranks begin again with step {step}, and {played} calls are played again; "
            f"{left - 1} of {self._restarts} restarts are left",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        del self._results[self._saved :], self.losses[step:]
        points.tell(self._results)
        self._start()

    def _report(self) -> None:
        """Says in the report which ranks were lost."""
        path = self._of_job["report"]
        if path is not None and self._lost and os.path.exists(path):
            about = json.loads(Path(path).read_text())
            about["lost"] = [{key: value for key, value in one.items() if key != "at"} for one in self._lost]
            about["run"]["restarts"] = len(self._lost)
            part = Path(f"{path}.part")
            part.write_text(json.dumps(about))
            part.replace(path)

    def _load(self, stage: ModelStage) -> None:
        """What a stage begins with, where that is not what `stages` gave."""
        if self._checkpoints is not None and self._checkpoints.last is not None:
            self._checkpoints.load(stage)
        elif self._weights is not None:
            load_weights(stage, self._weights)

    def _leaves(self, error: BaseException) -> None:
        """The loop leaves with an error."""
        if self._pipelines is not None:
            try:
                self._pipelines.left(error)
            finally:
                if self._run is not None:
                    self._is_closed = True
                    self._run.abort()

    def _take(self, mode: str, batch: Any, casts: Casts) -> Verdict:
        """Asks for a turn, and waits for its end."""
        inputs, targets = (cut(half, self._settings.microbatches) for half in halves(batch))
        assert self._run is not None
        number, self._turns = self._turns, self._turns + 1
        # Other streams read what the loop has issued on a GPU.
        for device in {one.device for one in (*inputs[0], *targets[0]) if one.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        turn = Turn(number, len(self.losses), mode, inputs, targets, casts)
        try:
            # In the first turn of a job the driver may still make the stages. A loop that has left finds it at work.
            if number > 0 and not self._meeting.has_ended:
                self._rank.prepare(turn)
            self._meeting.offer(turn)
            if self._run.is_rank_0:
                for microbatch in range(self._settings.microbatches):
                    self._push(Item(self._sent(inputs[microbatch], targets[microbatch])))
                self._push(Item(self._exchange))
            return self._meeting.verdict(self._goes_on)
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
            self._goes_on(self._stream.is_closed)
            raise

    def _goes_on(self, is_closed: bool = False) -> None:
        """Raises what has ended the job, if it has ended. Waits for its end where the job takes nothing any more."""
        assert self._run is not None
        if self._pipelines is not None:
            self._pipelines.check()
        if self._run.is_over(0.0) or is_closed:
            self._is_closed = True
            self._run.finish()
            raise RuntimeError(
                f"the loop of rank 0 ended after {self._calls - 1} calls of step and evaluate, and this one goes on: give all ranks "
                "equally many batches"
            )

    def _begin(self, inputs: Tensors, targets: Tensors) -> None:
        terms = self._settings
        if self._pipeline_of is not None:
            self._pipelines = Pipelines(self._pipeline_of, max(terms.schedule.rank_of) + 1, terms.reduction)
            schedule = hashlib.sha256(repr(terms.schedule.actions()).encode()).hexdigest()[:16]
            self._of_job["devices"], self._place = self._pipelines.meet(
                {**dict(self._agreed()), "schedule": schedule}, self._of_job["devices"], self._of_job["first_after"] or 1e9
            )
            terms.first = self._pipelines.number * terms.microbatches
            if self._pipelines.number > 0:
                self._of_job.update(report=None, timeline=None, live=None, live_token_file=None)
        placed = placed_at(self._place)
        _shapes.learn_first()
        rank = 0 if placed is None else placed[0]
        # All pipelines have the same weights.
        writes = self._checkpoints if self._pipelines is None or self._pipelines.number == 0 else None
        own = specs_of_item(Item({f"x{at}": one for at, one in enumerate(inputs)})) if self._own_inputs else {}
        self._rank = Rank(rank, terms, writes, self._load, own, self._own_targets, self._timing, self._pipelines)
        microbatch = specs_of_item(Item(self._sent(inputs, targets)))
        # The other ranks learn of them from the exchange.
        ties = self._rank.ties(microbatch) if rank == 0 and terms.may_tie else []
        exchange = {**self._rank.exchange, **sums_specs(ties)}
        self._exchange = {name: torch.zeros(spec.shape, dtype=_shapes.dtype_of(spec)) for name, spec in exchange.items()}
        if ties:
            self._exchange["ties"] = _shapes.encoded([astuple(one) for one in ties])
        self._job = Job(
            terms.schedule.pipeline,
            most=[microbatch, specs_of_item(Item(self._exchange))],
            forward=type("Forward", (Forward,), {"of": self._rank}),
            backward=type("Backward", (Backward,), {"of": self._rank}),
            done=lambda chunk: None,
            **self._of_job,
        )
        self._start()
        atexit.register(_close, weakref.ref(self))

    def _start(self) -> None:
        """Starts the job, the first time or again."""
        self._turns, self._is_closed = 0, False
        self._meeting = Meeting(self._rank.rank)
        self._rank.begins(self._meeting, self._of_job["stuck_after"])
        self._job.follow(self._settings.schedule, self._agreed(), self._place)
        flow, self._stream = self._job._one_stream(self._settings.microbatches + 1, lends=False)
        run = self._job._begin(flow, None)
        if run is None:
            raise RuntimeError("a trainer must be the first job that its ranks come to")
        self._run = run
        if self._pipelines is not None:
            self._pipelines.connect(run._running, self._goes_on)

    def _agreed(self) -> list[tuple[str, str]]:
        """What all ranks must have alike."""
        terms = self._settings
        about = {
            "torch": torch.__version__, "seed": terms.seed, "reduction": terms.reduction, "clip": terms.clip,
            "own": [self._own_inputs, self._own_targets], "timing": self._timing, "names": terms.may_tie,
        }  # fmt: skip
        if self._checkpoints is not None:
            about["checkpoint"] = {"last": self._checkpoints.last, "every": self._checkpoints.every, "restarts": self._restarts}
        return [(f"train.{name}", json.dumps(value)) for name, value in about.items()]


def _check(checkpoint: Any, every: int | None, resume: bool, restarts: int, pipeline_of: Any) -> None:
    """Refuses what does not go together."""
    if (checkpoint is None) != (every is None) or (every is not None and every < 1):
        raise ValueError(f"checkpoint={checkpoint!r} and every={every!r}: give a folder and after how many steps, or neither")
    if checkpoint is None and (resume or restarts):
        raise ValueError("resume= and restarts= take a checkpoint: give checkpoint='folder' and every=N")
    if restarts < 0:
        raise ValueError(f"restarts={restarts}: give how often ranks may be started again")
    if restarts and pipeline_of is not None:
        raise ValueError("restarts= is for one pipeline: leave it out with pipeline_of=, and give resume=True")
    if restarts and placed_at() is not None and "PP_SUPERVISOR_PID" not in os.environ:
        raise ValueError(
            "restarts= starts ranks again that the trainer has started, and here a launcher has: leave it out, give resume=True, and let "
            "the launcher start all ranks again (torchrun --max-restarts)"
        )


def _close(trainer: weakref.ref[Trainer]) -> None:
    own = trainer()
    if own is not None:
        own.close()
