"""Trains many small models, each by a schedule and in one process, and compares the bits.

`train_cells.py RANKS STAGES_PER_RANK MICROBATCHES STEPS` starts the ranks, and takes every schedule at all sizes up to these. `--device
cuda:0` puts all ranks, and the one process, on one GPU; `cuda:0,cuda:1` puts the ranks on two in turn, and the one process on the first.
`--break` makes a mistake in the ranks on purpose, which must be found.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

# Deterministic algorithms of a GPU need it, before PyTorch is imported.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

from pp_pipeline import _native
from pp_pipeline.train import Trainer, run_plain
from pp_pipeline.train._stage import ModelStage

KINDS = ["naive", "gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-h1", "looped-bfs", "zbv", "dualpipe-v"]
MISTAKES = ["twice", "other-weight", "other-slot", "left-out", "first", "crossed", "own-gradient", "other-values"]
WIDTH, ROWS = 8, 2


class First(nn.Module):
    """Takes token ids beside floats: what has no gradient goes on as it is."""

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


def batches(steps: int, microbatches: int, dtype: torch.dtype) -> list[Any]:
    made = torch.Generator().manual_seed(7)
    rows = ROWS * microbatches

    def batch() -> Any:
        words = torch.randint(0, 5, (rows,), generator=made)
        scale, targets = torch.rand(rows, 1, generator=made) + 0.5, torch.randn(rows, WIDTH, generator=made)
        return (words, scale.to(dtype)), targets.to(dtype)

    return [batch() for _ in range(steps)]


def one(kind: str, size: tuple[int, int, int], steps: int, devices: list[str], dtype: torch.dtype) -> str:
    """What differs between a job and one process; nothing if all is well."""
    ranks, stages_per_rank, microbatches = size
    count = ranks * stages_per_rank

    def stage(number: int) -> nn.Module:
        made = First() if number == 0 else Last(number) if number == count - 1 else Middle(number)
        return made.to(dtype)

    def terms(gradients: dict[int, list[list[torch.Tensor]]]) -> dict[str, Any]:
        order = iter(range(count)) if len(gradients) == count else iter(sorted(gradients))
        return dict(
            ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches, stages=stage, loss=nn.functional.mse_loss,
            optimizer=lambda params: watched(gradients[next(order)], params), clip=0.5, seed=3,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), names=None if microbatches % 2 else tied,
        )  # fmt: skip

    data = batches(steps, microbatches, dtype)
    losses, gradients, own = [], {}, {}
    rank = _native.place()[0]  # type: ignore[index]
    rank_of = _native.Schedule.build(kind, *size).rank_of
    gradients = {number: [] for number in range(count) if rank_of[number] == rank}
    with Trainer(kind, devices=(devices * ranks)[:ranks], **terms(gradients)) as trainer:
        for step, batch in enumerate(data):
            losses.append(trainer.step(batch))
            if step == 0:
                trainer.evaluate(batch)
        own = trainer.modules
    wanted: dict[int, list[list[torch.Tensor]]] = {number: [] for number in range(count)}
    plain_losses, plain = _plain(kind, data, dict(device=devices[0], **terms(wanted)))
    if losses != plain_losses:
        return f"losses {losses}, and {plain_losses} in one process"
    for number, module in own.items():
        pairs = [
            *zip(sum(gradients[number], []), sum(wanted[number], []), strict=True),
            *zip(module.state_dict().values(), plain[number].state_dict().values(), strict=True),
        ]
        if not all(torch.equal(a.to(b.device), b) for a, b in pairs):
            return f"gradients or weights of stage {number}"
    return ""


def _plain(kind: str, data: list[Any], terms: dict[str, Any]) -> Any:
    mistaken = {name: getattr(ModelStage, name) for name in _RIGHT}
    for name, right in _RIGHT.items():
        setattr(ModelStage, name, right)
    try:
        return run_plain(kind, data, **terms)
    finally:
        for name, broken in mistaken.items():
            setattr(ModelStage, name, broken)


_RIGHT: dict[str, Any] = {}


def broken(which: str) -> None:
    """Makes a mistake in the stages of ranks, and not in those of one process."""
    names = ("forward", "backward", "backward_input", "backward_weight", "squares", "take_tied", "tie")
    _RIGHT.update((name, getattr(ModelStage, name)) for name in names)
    forward, backward, backward_input, weight, squares, _, tie = _RIGHT.values()
    # The gradients that came last, of each job by stage.
    came: dict[Any, dict[int, Any]] = {}

    def twice(stage: Any, microbatch: int, grads: Any) -> Any:
        made = backward(stage, microbatch, grads)
        if microbatch == 1:
            for p in stage._params:
                p.grad.mul_(1.5)
        return made

    def other_weight(stage: Any, microbatch: int) -> Any:
        others = [other for other in stage._undone if other != microbatch]
        if others and not stage._kept:
            undone = stage._undone
            undone[microbatch], undone[others[0]] = undone[others[0]], undone[microbatch]
        return weight(stage, microbatch)

    def other_slot(stage: Any, at: Any, inputs: Any, targets: Any) -> Any:
        stage._before, inputs = inputs, getattr(stage, "_before", inputs) if at[1] == 1 else inputs
        return forward(stage, at, inputs, targets)

    def left_out(stage: Any) -> Any:
        total = squares(stage)
        if stage.number == 1:
            for p in stage._params:
                p.grad = None
        return total

    def first(stage: Any, microbatch: int) -> Any:
        if stage.number == 0:
            stage._kept.pop(microbatch)
            stage._undone.pop(microbatch)
            return None
        return weight(stage, microbatch)

    def crossed(right: Any) -> Any:
        # Where stages 0 and 2 stand on one rank, and 1 and 3 on another, each takes what came for the other one.
        def mistaken(stage: Any, microbatch: int, grads: Any) -> Any:
            of_job = came.setdefault(stage._settings, {})
            of_job[stage.number] = grads
            return right(stage, microbatch, of_job.get(2 - stage.number, grads))

        return mistaken

    def other_values(stage: Any, ties: Any, sums: Any) -> None:
        tie(stage, ties, {name: torch.zeros_like(flat) for name, flat in sums.items()} if stage.number else sums)

    made: dict[str, dict[str, Any]] = {
        "twice": {"backward": twice},
        "other-weight": {"backward_weight": other_weight},
        "other-slot": {"forward": other_slot},
        "left-out": {"squares": left_out},
        "first": {"backward_weight": first},
        "own-gradient": {"take_tied": lambda *_: None},
        "other-values": {"tie": other_values},
        "crossed": {"backward": crossed(backward), "backward_input": crossed(backward_input)},
    }
    for name, mistaken in made[which].items():
        setattr(ModelStage, name, mistaken)


def in_world(ranks: int) -> int:
    """Starts this program once for each rank. Gives the first exit code that is not 0."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = str(own.getsockname()[1])
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PP_JOB_SECRET": "0123456789abcdef" * 2}
    env = {"PP_FLIGHT_OPS": "0", "PP_HEARTBEAT_MS": "2000", **os.environ, **world}
    started = [subprocess.Popen([sys.executable, *sys.argv], env={**env, "RANK": str(rank)}) for rank in range(ranks)]
    return next(filter(None, [one.wait() for one in started]), 0)


def say(line: str) -> None:
    """Prints a line at once: other ranks print, too."""
    print(f"{line}\n", end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("ranks", "stages_per_rank", "microbatches", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--device", default="cpu", help="one for all ranks, or several in turn: cuda:0,cuda:1")
    parser.add_argument("--dtype", default="float32", help="of weights and activations, such as bfloat16")
    parser.add_argument("--break", dest="mistake", choices=MISTAKES)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(in_world(args.ranks))
    if args.mistake:
        broken(args.mistake)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    cells = wrong = 0
    for kind in KINDS:
        for stages_per_rank in range(1, args.stages_per_rank + 1):
            for microbatches in range(1, args.microbatches + 1):
                size = args.ranks, stages_per_rank, microbatches
                try:
                    _native.Schedule.build(kind, *size)
                except ValueError:
                    continue
                if args.ranks * stages_per_rank == 1:
                    continue
                cells += 1
                differs = one(kind, size, args.steps, args.device.split(","), getattr(torch, args.dtype))
                if differs:
                    wrong += 1
                    say(f"{kind} {size}: {differs}")
    say(f"{cells} cells, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
