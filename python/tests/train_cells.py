"""Trains many small models, each by a schedule and in one process, and compares the bits.

A launcher starts as many ranks as the schedules have: `train_cells.py RANKS STAGES_PER_RANK MICROBATCHES STEPS [BREAK]` takes every
schedule at all sizes up to these. A BREAK makes a mistake in the ranks on purpose, which must be found.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from pp_pipeline import _native
from pp_pipeline.train import Trainer, run_plain
from pp_pipeline.train._stage import ModelStage

KINDS = ["naive", "gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-h1", "looped-bfs", "zbv", "dualpipe-v"]
WIDTH, ROWS = 8, 2


class First(nn.Module):
    """Takes numbers of words beside floats: what has no gradient goes on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.all = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(self.all(self.words(words))), scale, self.words(words).transpose(0, 1).transpose(0, 1)


class Middle(nn.Module):
    """Several tensors, dropout, a buffer that each forward changes, and an input that one in two stages does not use."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.number = nn.Dropout(0.2), number

    def forward(self, x: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = x + self.two(self.drop(torch.relu(self.one(self.norm(x)))))
        return (made * scale, scale, y + self.one(y)) if self.number % 2 else (made, scale, made.view(-1).view_as(made))


class Last(Middle):
    """Has the words of the first stage, too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.words = nn.Embedding(5, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = super().forward(x, scale, y)[0] + y
        return made + 0.1 * made @ self.words.weight.T @ self.words.weight


def tied(number: int, local: str) -> str:
    """Ties the words of the first and of the last stage, and one weight of all but the first."""
    return local if local in ("words.weight", "one.weight") else f"{number}.{local}"


def watched(gradients: list[list[torch.Tensor]], params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer that keeps the gradients of each step."""
    optimizer = torch.optim.AdamW(params, 1e-2)
    optimizer.register_step_pre_hook(lambda *_: gradients.append([p.grad.clone() for p in params if p.grad is not None]))
    return optimizer


def batches(steps: int, microbatches: int) -> list[Any]:
    made = torch.Generator().manual_seed(7)
    rows = ROWS * microbatches

    def batch() -> Any:
        words = torch.randint(0, 5, (rows,), generator=made)
        return (words, torch.rand(rows, 1, generator=made) + 0.5), torch.randn(rows, WIDTH, generator=made)

    return [batch() for _ in range(steps)]


def one(kind: str, size: tuple[int, int, int], steps: int) -> str:
    """What differs between a job and one process; nothing if all is well."""
    ranks, stages_per_rank, microbatches = size
    count = ranks * stages_per_rank

    def stage(number: int) -> nn.Module:
        return First() if number == 0 else Last(number) if number == count - 1 else Middle(number)

    def terms(gradients: dict[int, list[list[torch.Tensor]]]) -> dict[str, Any]:
        order = iter(range(count)) if len(gradients) == count else iter(sorted(gradients))
        return dict(
            ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, stages=stage, loss=nn.functional.mse_loss,
            optimizer=lambda params: watched(gradients[next(order)], params), clip=0.5, seed=3,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), names=None if microbatches % 2 else tied,
        )  # fmt: skip

    data = batches(steps, microbatches)
    losses, gradients, own = [], {}, {}
    rank = _native.place()[0]  # type: ignore[index]
    rank_of = _native.Schedule.build(kind, *size).rank_of
    gradients = {number: [] for number in range(count) if rank_of[number] == rank}
    with Trainer(kind, **terms(gradients)) as trainer:
        for step, batch in enumerate(data):
            losses.append(trainer.step(batch))
            if step == 0:
                trainer.evaluate(batch)
        own = trainer.modules
    wanted: dict[int, list[list[torch.Tensor]]] = {number: [] for number in range(count)}
    plain_losses, plain = _plain(kind, data, terms(wanted))
    if losses != plain_losses:
        return f"losses {losses}, and {plain_losses} in one process"
    for number, module in own.items():
        pairs = [
            *zip(sum(gradients[number], []), sum(wanted[number], []), strict=True),
            *zip(module.state_dict().values(), plain[number].state_dict().values(), strict=True),
        ]
        if not all(torch.equal(a, b) for a, b in pairs):
            return f"gradients or weights of stage {number}"
    return ""


def _plain(kind: str, data: list[Any], terms: dict[str, Any]) -> Any:
    kept = {name: getattr(ModelStage, name) for name in _BROKEN}
    for name, right in _RIGHT.items():
        setattr(ModelStage, name, right)
    try:
        return run_plain(kind, data, **terms)
    finally:
        for name, broken in kept.items():
            setattr(ModelStage, name, broken)


_RIGHT: dict[str, Any] = {}
_BROKEN: list[str] = []


def broken(which: str) -> None:
    """Makes a mistake in the stages of ranks, and not in those of one process."""
    _BROKEN.extend(["backward", "backward_weight", "squares", "forward", "take_tied", "tie"])
    _RIGHT.update((name, getattr(ModelStage, name)) for name in _BROKEN)
    backward, weight, squares, forward, _, tie = _RIGHT.values()

    def twice(stage: Any, microbatch: int, grads: Any, looks: bool = False) -> Any:
        made = backward(stage, microbatch, grads, looks)
        if microbatch == 1:
            for p in stage._params:
                p.grad.mul_(1.5)
        return made

    def other_weight(stage: Any, microbatch: int, looks: bool = False) -> Any:
        others = [other for other in stage._undone if other != microbatch]
        if others and not stage._kept:
            undone = stage._undone
            undone[microbatch], undone[others[0]] = undone[others[0]], undone[microbatch]
        return weight(stage, microbatch, looks)

    def other_slot(stage: Any, at: Any, inputs: Any, targets: Any, trains: bool, looks: bool = False) -> Any:
        stage._before, inputs = inputs, getattr(stage, "_before", inputs) if at[1] == 1 else inputs
        return forward(stage, at, inputs, targets, trains, looks)

    def left_out(stage: Any) -> Any:
        total = squares(stage)
        if stage.number == 1:
            for p in stage._params:
                p.grad = None
        return total

    def first(stage: Any, microbatch: int, looks: bool = False) -> Any:
        if stage.number == 0:
            stage._kept.pop(microbatch)
            stage._undone.pop(microbatch)
            return None
        return weight(stage, microbatch, looks)

    def other_values(stage: Any, ties: Any, sums: Any) -> None:
        tie(stage, ties, {name: torch.zeros_like(flat) for name, flat in sums.items()} if stage.number else sums)

    name, made = {
        "twice": ("backward", twice),
        "other-weight": ("backward_weight", other_weight),
        "other-slot": ("forward", other_slot),
        "left-out": ("squares", left_out),
        "first": ("backward_weight", first),
        "own-gradient": ("take_tied", lambda *_: None),
        "other-values": ("tie", other_values),
    }[which]
    setattr(ModelStage, name, made)


def main() -> None:
    ranks, most_stages, most_microbatches, steps = map(int, sys.argv[1:5])
    if len(sys.argv) > 5:
        broken(sys.argv[5])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    cells = wrong = 0
    for kind in KINDS:
        for stages_per_rank in range(1, most_stages + 1):
            for microbatches in range(1, most_microbatches + 1):
                size = ranks, stages_per_rank, microbatches
                try:
                    _native.Schedule.build(kind, *size)
                except ValueError:
                    continue
                if ranks * stages_per_rank == 1:
                    continue
                cells += 1
                differs = one(kind, size, steps)
                if differs:
                    wrong += 1
                    print(f"{kind} {size}: {differs}", flush=True)
    print(f"{cells} cells, {wrong} wrong", flush=True)


if __name__ == "__main__":
    main()
