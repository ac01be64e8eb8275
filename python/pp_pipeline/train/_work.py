"""The stages of a job that trains: each stage of the model stands there as a forward and as a backward."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from .._arrays import rows_of
from .._stages import At, Chunk, Out, Spec, layout_of, specs_of
from . import _shapes
from ._checkpoint import Checkpoints
from ._meeting import MODES, Meeting, Turn, Verdict
from ._pipelines import Pipelines
from ._settings import Settings
from ._shapes import Specs
from ._stage import ModelStage, Randomness, casts_here, loss_of, norm_of
from ._ties import Form, Tied, forms_of, ties_among, weights_of

T = TypeVar("T")


class Rank:
    """The stages of the model that stand on this rank, and where their job is. The driver calls it, and the loop before a job and
    between turns.
    """

    meeting: Meeting

    def __init__(
        self,
        rank: int,
        settings: Settings,
        checkpoints: Checkpoints | None,
        load: Callable[[ModelStage], None],
        own_inputs: Specs,
        own_targets: bool,
        timing: bool,
        pipelines: Pipelines | None,
    ) -> None:
        self.rank, self.settings, self.checkpoints, self._load, self.pipelines = rank, settings, checkpoints, load, pipelines
        self._added: Counter[int] = Counter()
        # The inputs that the rank of stage 0 takes from its own loop, and whether that of the last stage takes targets there.
        self.own_inputs, self.own_targets = own_inputs, own_targets
        self.stages: dict[int, ModelStage] = {}
        self._specs: dict[int, Specs] = {}
        # Of each stage that was made to learn what it makes: its inputs, its outputs, its weights and the names of its buffers in a
        # checkpoint.
        self._learnt: dict[int, tuple[Specs, Specs, dict[str, Form], list[str]]] = {}
        # The backwards that have two parts, by stage and microbatch.
        self.splits = {
            (stage, microbatch)
            for actions in settings.schedule.actions()
            for stage, op, microbatch in actions
            if op == "W"
        }
        self._turn: Turn | None = None
        # How many stages of the model stand here, and how many of them have not ended the turn.
        self._count, self._left = settings.schedule.rank_of.count(rank), 0
        self._random = Randomness(torch.device("cpu"))
        self._verdict: Verdict | None = None
        # Held by the driver while it makes a stage, or is in one.
        self.working = threading.Lock()
        self.times: Times | None = Times() if timing else None
        self.exchange = _shapes.exchange_specs(settings.count, settings.microbatches, timing)

    def begins(self, meeting: Meeting, within: float | None) -> None:
        """A job begins. What an earlier one left undone is dropped, once its driver has come out of the stage that it was in.

        Raises `TimeoutError` if that takes longer than `within` seconds.
        """
        # As in a job, 0 is no limit.
        if not self.working.acquire(timeout=within or -1):
            raise TimeoutError(f"rank {self.rank}: a stage still works {within:g} s after its job was lost: see what its module waits for")
        try:
            self._begins(meeting)
        finally:
            self.working.release()

    def _begins(self, meeting: Meeting) -> None:
        if self._turn is not None and self._left:
            self._random.give_back()
        self.meeting, self._turn = meeting, None
        if any(stage.device.type == "cuda" for stage in self.stages.values()):
            # What an earlier job has issued may still write into buffers.
            torch.cuda.synchronize()
        if self.times is not None:
            self.times.forget()
        for stage in self.stages.values():
            stage.forget()
            self._load(stage)

    def stage(self, number: int, device: str) -> ModelStage:
        """A stage of this rank; it is made at the first call."""
        if number not in self.stages:
            stage = self.settings.made(number, torch.device(device), self.stages)
            self._load(stage)
            self.stages[number] = stage
        return self.stages[number]

    def prepare(self, turn: Turn) -> None:
        """Begins a turn at all stages, on the loop's thread: other ranks wait for the first work of the driver."""
        device = torch.device("cpu")
        for stage in self.stages.values() if turn.computes else ():
            stage.begin(turn.trains, turn.mode == "look", turn.casts)
            device = stage.device
        self._random = Randomness(device)

    def turn(self, number: int) -> Turn:
        """The turn that the driver is at. At its first work in it the driver waits for the loop."""
        if self._turn is None or self._turn.number != number:
            turn = self.meeting.turn()
            assert turn.number == number
            if number == 0:
                # The loop could not: the stages are made by the driver.
                self.prepare(turn)
                # A job begins with that of the call that began it.
                for kind, _ in casts_here():
                    torch.set_autocast_enabled(kind, False)
                # A backward on this thread: handing each part of one to PyTorch's thread of the device takes longer than issuing it.
                torch.autograd.set_multithreading_enabled(False)
            if torch.is_grad_enabled() != turn.trains:
                torch.set_grad_enabled(turn.trains)
            self._turn, self._left, self._verdict = turn, self._count, None
            self._added.clear()
            if self.pipelines is not None:
                if number == 0:
                    self.pipelines.begin(self.stages)
                self.pipelines.turn(number, turn.mode)
        return self._turn

    def added(self, stage: ModelStage, turn: Turn) -> None:
        """A stage has added the gradients of a microbatch. Behind the last one the other pipelines get their sum."""
        if self.pipelines is None:
            return
        self._added[stage.number] += 1
        if turn.mode == "train" and self._added[stage.number] == self.settings.microbatches:
            self.pipelines.agree()
            self.pipelines.add(stage)

    def ends(self, turn: Turn, told: Mapping[str, torch.Tensor]) -> Verdict:
        """What the exchange says of a turn."""
        if self._verdict is None:
            numbers = _shapes.numbers_in(told["numbers"].cpu(), self.settings.count, self.settings.microbatches)
            place, squares, losses, times = (one.tolist() for one in numbers)
            mode = MODES[int(place[0])]
            if mode != turn.mode:
                raise RuntimeError(
                    f"rank {self.rank} came to {turn.mode!r} where the rank of stage 0 came to {mode!r}: let all ranks run the same loop"
                )
            ops = _shapes.OPS
            self._verdict = Verdict(
                loss_of(losses, self.settings.reduction),
                norm_of(squares, losses) if mode == "train" else None,
                _shapes.decoded(told["finding"]) if mode == "look" else None,
                {number: {op: one for op, one in zip(ops, of, strict=False) if one > 0} for number, of in enumerate(times) if of},
                [moment for of in times for moment in of[len(ops) :]],
            )
        return self._verdict

    def leaves(self) -> None:
        """A stage has ended a turn. The last one tells the loop."""
        self._left -= 1
        if self._left == 0:
            assert self._verdict is not None
            if any(stage.device.type == "cuda" for stage in self.stages.values()):
                torch.cuda.current_stream().synchronize()
            self._random.give_back()
            self.meeting.tell(self._verdict)

    # What travels.

    def forward_specs(self, number: int, inputs: Mapping[str, Spec], learns: bool = False) -> Specs:
        """The tensors behind the forward of a stage. Keeps them, and what its weights look like; of the last one with `learns`."""
        if _shapes.is_exchange(inputs):
            return dict(inputs)
        if number == 0:
            inputs = {**self.own_inputs, **inputs}
        self._specs[number] = {name: inputs[name] for name in _shapes.inputs_in(tuple(inputs))}
        known = self._learnt.get(number)
        if known is not None and known[0] == inputs:
            return known[1]
        is_last = number == self.settings.count - 1
        if is_last and not learns:
            return {}
        module = self.stages[number].module if number in self.stages else self.settings.module(number, torch.device("cpu"))
        targets = {name: inputs[name] for name in _shapes.targets_in(tuple(inputs))}
        outputs = {} if is_last else {**_shapes.outputs_of(number, module, inputs), **targets}
        # Only a checkpoint asks for them.
        buffers = [self.settings.names(number, local) for local, _ in module.named_buffers()] if self.checkpoints is not None else []
        self._learnt[number] = dict(inputs), outputs, forms_of(weights_of(number, module, self.settings.names)), buffers
        return outputs

    def ties(self, specs: Specs) -> list[Tied]:
        """The tied weights of the model, for a microbatch like this. Each stage is made once, for a moment."""
        for number in range(self.settings.count):
            specs = self.forward_specs(number, specs_of(rows_of(layout_of(specs))), learns=True)
        learnt = [self._learnt[number] for number in range(self.settings.count)]
        holders: dict[str, int] = {name: number for number, of in enumerate(learnt) for name in of[2]}
        for number, of in enumerate(learnt):
            for name in of[3]:
                if holders.setdefault(name, number) != number or name in of[2]:
                    raise ValueError(
                        f"names gives {name!r} to a buffer of stage {number}, and stage {holders[name]} has it, too: a checkpoint takes "
                        "names of their own"
                    )
        return ties_among([of[2] for of in learnt])

    def backward_specs(self, number: int, inputs: Mapping[str, Spec]) -> Specs:
        """The tensors behind the backward of a stage."""
        if _shapes.is_exchange(inputs):
            return dict(inputs)
        wanted = [spec for name, spec in self._specs[number].items() if name[0] == "g"]
        return {f"d{at}": spec for at, spec in enumerate(wanted)}


class Times:
    """When the actions of this rank's stages were at work: on a CPU by its clock, on a GPU by events of its stream."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        # Of the latest step, by stage, kind and microbatch.
        self._moments: dict[tuple[int, str, int], tuple[float, float]] = {}
        # When an action began and ended, as it was measured.
        self._measured: list[tuple[int, str, int, Any, Any]] = []
        # The stream of a job on a GPU, and events that were told. A GPU may wait while an event is made or a stream is found.
        self._stream: Any = None
        self._free: list[Any] = []

    def forget(self) -> None:
        """Drops what a job that has ended left untold. The next one has another stream."""
        self._measured.clear()
        self._stream = None

    def of(self, stage: ModelStage, op: str, microbatch: int, action: Callable[[], None]) -> None:
        """Measures what a stage does in a call."""
        now = self._event if stage.device.type == "cuda" else time.perf_counter
        begun = now()
        action()
        self._measured.append((stage.number, op, microbatch, begun, now()))

    def _event(self) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.current_stream()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _read(self) -> None:
        """Takes in what was measured. Waits for a GPU."""
        measured, self._measured = self._measured, []
        if measured and self._stream is not None:
            # Behind all others.
            last = self._event()
            last.synchronize()
            now = time.perf_counter()
            self._free += [last, *(event for *_, begun, ended in measured for event in (begun, ended))]
            measured = [(*of, *(now - event.elapsed_time(last) / 1e3 for event in (begun, ended))) for *of, begun, ended in measured]
        for stage, op, microbatch, begun, ended in measured:
            self._seconds.setdefault((stage, op), deque(maxlen=100)).append(ended - begun)
            self._moments[stage, op, microbatch] = begun, ended

    def told(self, number: int, microbatches: int) -> list[float]:
        """What travels of a stage: the median of each kind of its actions, 0 of a kind that it does not have, and their moments in
        the latest step. Waits for a GPU.
        """
        self._read()
        told = [statistics.median(self._seconds.get((number, op), [0.0])) for op in _shapes.OPS]
        for microbatch in range(microbatches):
            for ops in ("F", "IB", "W"):
                known = (self._moments.get((number, op, microbatch)) for op in ops)
                told.extend(next((moment for moment in known if moment is not None), (0.0, 0.0)))
        return told


class _Work:
    """What a forward and a backward have in common. `of` is the rank, which a subclass of its own names."""

    of: Rank
    arrays = "torch"
    # Gradients are recorded, no mode of inference is on, and what autograd keeps is a copy: nothing is to check behind a call.
    inference = _is_checked = False
    # A driver that issues the next action sends nothing meanwhile, so the results of this one must be on their way before.
    _is_ahead = True
    is_forward: bool

    def __init__(self, at: At) -> None:
        with self.of.working:
            self.number, self._meeting = self._number(at), self.of.meeting
            self.stage = self.of.stage(self.number, at.device)

    @classmethod
    def _number(cls, at: At) -> int:
        return at.part if cls.is_forward else at.parts - 1 - at.part

    def _at(self, chunk: int) -> tuple[Turn, int]:
        if self._meeting is not self.of.meeting:
            # A driver that was left behind may come to the second stage of a pair.
            raise RuntimeError("the job of this stage was lost, and another one has begun")
        number, microbatch = divmod(chunk, self.of.settings.microbatches + 1)
        return self.of.turn(number), microbatch

    def run(self, chunk: Chunk, out: Out) -> None:
        """Works on a microbatch, or on the exchange."""
        with self.of.working:
            self._run(*self._at(chunk.index), chunk, out)

    def later(self, chunk: int) -> None:
        """Does what was put off of a microbatch, or what can be done of the exchange before it comes."""
        with self.of.working:
            self.do_later(*self._at(chunk))

    def _run(self, turn: Turn, microbatch: int, chunk: Chunk, out: Out) -> None:
        if microbatch == self.of.settings.microbatches:
            for name in chunk:
                out[name].copy_(chunk[name])
            self.exchange(turn, chunk, out)
        elif turn.computes if self.is_forward else turn.trains:
            op = "F" if self.is_forward else "I" if (self.number, microbatch) in self.of.splits else "B"
            self._timed(turn, op, microbatch, lambda: self.work(turn, microbatch, chunk, out))
        else:
            for tensor in out.values():
                tensor.zero_()

    def _timed(self, turn: Turn, op: str, microbatch: int, action: Callable[[], None]) -> None:
        """Does an action, and measures it where that is asked for."""
        if self.of.times is not None and turn.mode == "train":
            self.of.times.of(self.stage, op, microbatch, action)
        else:
            action()

    def _named(self, what: str, microbatch: int, call: Callable[..., T], *given: Any) -> T:
        """Calls the stage. An exception of the model says where it was."""
        try:
            return call(*given)
        except Exception as error:
            note = f"in the {what} of stage {self.number}, microbatch {microbatch}"
            # Python 3.10 has no `add_note`. The exception may have been raised before.
            notes = error.__dict__.setdefault("__notes__", [])
            if isinstance(notes, list) and note not in notes:
                notes.append(note)
            raise

    def work(self, turn: Turn, microbatch: int, chunk: Chunk, out: Out) -> None:
        raise NotImplementedError

    def exchange(self, turn: Turn, chunk: Chunk, out: Out) -> None:
        raise NotImplementedError

    def do_later(self, turn: Turn, microbatch: int) -> None:
        raise NotImplementedError


class Forward(_Work):
    """The forward of a stage."""

    is_forward = True
    # What was made of the exchange before it came.
    _squares: torch.Tensor | None = None
    _losses: torch.Tensor | None = None

    @classmethod
    def outputs(cls, inputs: Specs, at: At) -> Specs:
        """The tensors that go on."""
        with cls.of.working:
            return cls.of.forward_specs(cls._number(at), inputs)

    def work(self, turn: Turn, microbatch: int, chunk: Chunk, out: Out) -> None:
        device, is_last, trains = self.stage.device, self.number == self.of.settings.count - 1, turn.trains
        to_take, to_pass = _shapes.inputs_in(chunk._names), _shapes.targets_in(chunk._names)
        # The slot goes back before autograd has read what it keeps.
        inputs = tuple([chunk[name].clone().requires_grad_(trains and name[0] == "g") for name in to_take])
        if self.number == 0 and self.of.own_inputs:
            inputs = tuple(one.to(device, copy=True) for one in turn.inputs[microbatch])
        targets = tuple(chunk[name].clone() for name in to_pass) if is_last else ()
        if is_last and self.of.own_targets:
            targets = tuple(one.to(device, copy=True) for one in turn.targets[microbatch])
        made = self._named("forward", microbatch, self.stage.forward, (turn.step, microbatch), inputs, targets)
        if is_last:
            return
        for at, (name, one) in enumerate(zip(_shapes.inputs_in(out._names), made, strict=True)):
            slot = out[name]
            if slot.shape != one.shape or slot.dtype != one.dtype:
                raise TypeError(
                    f"stage {self.number} gave {tuple(one.shape)} {one.dtype} as output {at}, and {tuple(slot.shape)} {slot.dtype} before: "
                    "give one shape and type"
                )
            slot.copy_(one.detach())
        for name in to_pass:
            out[name].copy_(chunk[name])

    def exchange(self, turn: Turn, chunk: Chunk, out: Out) -> None:
        stage, settings, pipelines = self.stage, self.of.settings, self.of.pipelines
        if turn.mode == "save" and self.of.checkpoints is not None:
            # It is stored before the next stage hears of the turn's end, so the verdict says that all are.
            self.of.checkpoints.write(stage, turn.step)
        mode, squares, losses, times = _shapes.numbers_in(out["numbers"], settings.count, settings.microbatches)
        if self.number == 0:
            mode.fill_(MODES.index(turn.mode))
        if turn.mode == "tie" and "ties" in chunk:
            stage.tie([Tied(*row) for row in _shapes.decoded(chunk["ties"])], out)
        if pipelines is not None:
            pipelines.agree()
            if turn.mode == "train":
                pipelines.added(stage)
        if turn.trains:
            known, self._squares = self._squares, None
            squares[self.number] = stage.add_tied(out, stage.squares() if known is None else known)
        if self._losses is not None:
            own, self._losses = self._losses, None
            losses.copy_(pipelines.losses(own) if pipelines is not None and turn.mode != "look" else own)
        if self.of.times is not None:
            times[self.number] = torch.tensor(self.of.times.told(self.number, settings.microbatches), dtype=torch.float64)
        if stage.finding is not None:
            # It takes the place of what a stage before has found later.
            earlier = _shapes.decoded(out["finding"])
            if earlier is None or earlier["order"] > stage.finding["order"]:
                out["finding"].copy_(_shapes.encoded(stage.finding, _shapes.FINDING))

    def do_later(self, turn: Turn, microbatch: int) -> None:
        """Makes the squares, unless other pipelines still add to the gradients, and stacks the losses: other ranks wait for them in the
        exchange. Waits for no GPU, as results may still have to leave behind its work.
        """
        stage, count = self.stage, self.of.settings.microbatches
        if turn.trains and self.of.pipelines is None:
            self._squares = stage.squares()
        if turn.computes and self.number == self.of.settings.count - 1:
            self._losses = torch.stack([stage.losses[number].reshape(()) for number in range(count)]).double()


class Backward(_Work):
    """The backward of a stage, and its part of the end of a step."""

    is_forward = False
    _told: Mapping[str, torch.Tensor] = {}

    @classmethod
    def outputs(cls, inputs: Specs, at: At) -> Specs:
        """The gradients that go on."""
        return cls.of.backward_specs(cls._number(at), inputs)

    def work(self, turn: Turn, microbatch: int, chunk: Chunk, out: Out) -> None:
        grads = [chunk[name].clone() for name in chunk._names]
        is_divided = (self.number, microbatch) in self.of.splits
        backward = self.stage.backward_input if is_divided else self.stage.backward
        made = self._named("backward", microbatch, backward, microbatch, grads)
        if not is_divided:
            self.of.added(self.stage, turn)
        for name, gradient in zip(out._names, made, strict=True):
            out[name].copy_(gradient)

    def exchange(self, turn: Turn, chunk: Chunk, out: Out) -> None:
        if turn.mode == "train":
            self.stage.take_tied(chunk)
        self._told = {name: chunk[name].clone() for name in self.of.exchange if turn.mode == "look" or name == "numbers"}

    def do_later(self, turn: Turn, microbatch: int) -> None:
        """The part of a backward for the weights, and the work of the optimizer behind the exchange."""
        if microbatch < self.of.settings.microbatches:
            if turn.trains:
                weight = self.stage.backward_weight
                self._timed(turn, "W", microbatch, lambda: self._named("backward", microbatch, weight, microbatch))
                self.of.added(self.stage, turn)
            return
        verdict = self.of.ends(turn, self._told)
        if turn.trains:
            self.stage.apply(verdict.norm)
        self.of.leaves()
