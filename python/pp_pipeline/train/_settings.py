"""What a trainer and the plain loop are told alike, and the parts that both are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import _native
from ._shapes import Tensors, tensors_in
from ._stage import ModelStage, Randomness, generators_of, seed_of
from ._ties import set_apart

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
# Of a stage and a name of a weight or buffer in it: its name in the whole model.
Names = Callable[[int, str], str]


class NotFiniteError(ArithmeticError):
    """A loss or a gradient is not finite. Weights, buffers and optimizers are as before the step.

    It names the first one: `stage`, its `rank`, `microbatch` and `tensor`; and `pipeline` where there are several. The first three are
    None where each gradient is finite and their sum is not. `step` counts from 0.
    """

    def __init__(
        self, step: int, rank: int | None, stage: int | None, microbatch: int | None, tensor: str, pipeline: int | None = None
    ) -> None:
        of = f" of pipeline {pipeline}" if pipeline is not None else ""
        where = "" if stage is None else f" of stage {stage} (rank {rank}{of}), in microbatch {microbatch},"
        super().__init__(f"step {step}: {tensor}{where} is not finite; the weights are as before")
        self.step, self.rank, self.stage, self.microbatch, self.tensor = step, rank, stage, microbatch, tensor
        self.pipeline = pipeline


class Settings:
    """How a model is trained, whatever runs it. `schedule` is a name that `pp schedule list` prints, or a file that ends in .csv."""

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
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r}: give 'mean', if the loss is a mean over its microbatch, or 'sum'")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip!r}: give the largest norm of all gradients, above 0, or None")
        for name, given in {"stages": stages, "loss": loss, "optimizer": optimizer}.items():
            if not callable(given) or (name == "stages" and isinstance(given, torch.nn.Module)):
                raise TypeError(f"{name}= is a {type(given).__name__}: give a function, such as stages=lambda s: blocks[s]")
        if isinstance(loss, torch.nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise ValueError("loss= has weights, and no stage of the model would train them: let the last stage have them")
        self.schedule = _schedule(schedule, ranks, stages_per_rank, microbatches)
        self.microbatches, self.seed, self.reduction, self.clip = microbatches, seed, reduction, clip
        self.stages, self.loss, self.optimizer, self.scheduler = stages, loss, optimizer, scheduler
        self.names = names or _named
        # The stages of the model.
        self.count = len(self.schedule.rank_of)
        # Where the microbatches of this pipeline begin among those of all pipelines.
        self.first = 0

    @property
    def may_tie(self) -> bool:
        """Weights of several stages may have one name."""
        return self.names is not _named

    def module(self, number: int, device: torch.device) -> torch.nn.Module:
        """What `stages` gives, its random numbers drawn by seed and number."""
        own = Randomness(device)
        for generator in generators_of(device):
            # No step has this number.
            generator.manual_seed(seed_of(self.seed, 2**63, number, 0))
        try:
            return self.stages(number)
        finally:
            own.give_back()

    def not_finite(self, step: int, found: dict[str, Any] | None) -> NotFiniteError:
        """The error of a step in which a stage has found such a tensor, or none has: then it is the sum of squares."""
        if found is None:
            return NotFiniteError(step, None, None, None, "a sum of gradients, or of their squares,")
        stage = found["stage"]
        return NotFiniteError(step, self.schedule.rank_of[stage], stage, found["microbatch"], found["tensor"], found.get("pipeline"))

    def made(self, number: int, device: torch.device, others: Mapping[int, ModelStage]) -> ModelStage:
        """A stage of the model; `others` are those that this process has already."""
        module = self.module(number, device)
        if isinstance(module, torch.nn.Module):
            taken = {part for stage in others.values() for part in stage.module.modules()}
            module = set_apart(number, module, self.names, {other: stage.weights for other, stage in others.items()}, taken)
        return ModelStage(number, number == self.count - 1, module, self, device)


def _schedule(given: str, ranks: int | None, stages_per_rank: int, microbatches: int) -> _native.Schedule:
    if not given.endswith(".csv") and ranks is None:
        raise TypeError(f"schedule {given!r} takes ranks=: on how many ranks the model stands")
    try:
        if ranks is not None and not given.endswith(".csv"):
            return _native.Schedule.build(given, ranks, stages_per_rank, microbatches)
        with open(given, encoding="utf-8") as file:
            made = _native.Schedule.csv(file.read(), given)
    except ValueError as error:
        raise ValueError(f"schedule {given!r}: {error}") from None
    if made.microbatches != microbatches:
        raise ValueError(f"microbatches={microbatches}, and {given} has {made.microbatches}: give that number")
    has = max(made.rank_of) + 1
    if ranks is not None and ranks != has:
        raise ValueError(f"ranks={ranks}, and {given} has {has}: give that number, or leave ranks= out")
    return made


def _named(stage: int, local: str) -> str:
    return f"stages.{stage}.{local}"


def halves(batch: Any) -> tuple[Tensors, Tensors]:
    """The inputs and the targets of a batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError("a batch is (inputs, targets), each a tensor or a tuple of tensors")
    return tensors_in(batch[0], "the inputs of a batch are", "give"), tensors_in(batch[1], "the targets of a batch are", "give")


def cut(tensors: Iterable[torch.Tensor], microbatches: int) -> list[Tensors]:
    """Equal microbatches of tensors, along dimension 0."""
    whole = list(tensors)
    for tensor in whole:
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows == 0 or rows % microbatches or rows != whole[0].shape[0]:
            shapes = ", ".join(str(tuple(one.shape)) for one in whole)
            raise ValueError(
                f"a batch of {shapes} is not {microbatches} equal microbatches along dimension 0: give all tensors the same number of "
                f"rows, a multiple of {microbatches}"
            )
    return [tuple(part) for part in zip(*(tensor.chunk(microbatches) for tensor in whole), strict=True)] or [()] * microbatches
