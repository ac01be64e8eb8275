"""Trains the same stages with torch.distributed.pipelining over gloo, and compares the losses of each step.

`train_peers.py FOLDER` starts two ranks, which meet over a file there. Sizes are those at which PyTorch's own runner is right: see
docs/schedules.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import pipelining
from train_cells import in_world

from pp_pipeline import _native
from pp_pipeline.train import Trainer

# PyTorch's classes, and the stages a rank.
PEERS = {
    "gpipe": ("ScheduleGPipe", 1), "1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2),
    "looped-bfs": ("ScheduleLoopedBFS", 2), "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2), "dualpipe-v": ("ScheduleDualPipeV", 2),
}  # fmt: skip
RANKS, MICROBATCHES, STEPS, WIDTH = 2, 6, 5, 16


def stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.5, momentum=0.9)


def batches() -> list[Any]:
    made = torch.Generator().manual_seed(7)
    return [tuple(torch.randn(4 * MICROBATCHES, WIDTH, generator=made) for _ in range(2)) for _ in range(STEPS)]


def ours(kind: str, stages_per_rank: int) -> list[float]:
    with Trainer(
        kind, ranks=RANKS, stages_per_rank=stages_per_rank, microbatches=MICROBATCHES, stages=stage, loss=nn.functional.mse_loss,
        optimizer=sgd,
    ) as trainer:  # fmt: skip
        return [trainer.step(batch) for batch in batches()]


def theirs(kind: str, stages_per_rank: int, rank: int) -> list[float]:
    """The losses of PyTorch's runner, on the rank of the last stage."""
    rank_of = _native.Schedule.build(kind, RANKS, stages_per_rank, MICROBATCHES).rank_of
    own = {number: stage(number) for number, of in enumerate(rank_of) if of == rank}
    parts = [pipelining.PipelineStage(module, number, len(rank_of), torch.device("cpu")) for number, module in own.items()]
    made = getattr(pipelining.schedules, PEERS[kind][0])
    schedule = made(parts[0] if stages_per_rank == 1 else parts, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizers = [sgd(module.parameters()) for module in own.values()]
    told = []
    for inputs, targets in batches():
        losses: list[torch.Tensor] = []
        is_last = len(rank_of) - 1 in own
        schedule.step(*((inputs,) if 0 in own else ()), **(dict(target=targets, losses=losses) if is_last else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if is_last:
            told.append(sum(float(loss.detach()) for loss in losses) / MICROBATCHES)
    return told


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(in_world(RANKS))
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", store=distributed.FileStore(str(Path(sys.argv[1]) / "met"), RANKS), rank=rank, world_size=RANKS)
    for kind, (name, stages_per_rank) in PEERS.items():
        if not hasattr(pipelining.schedules, name):
            continue
        mine, other = ours(kind, stages_per_rank), theirs(kind, stages_per_rank, rank)
        if other:
            apart = max(abs(a - b) / b for a, b in zip(mine, other, strict=True))
            print(f"{kind}: {mine[0]:.4f} to {mine[-1]:.4f}, apart {apart:.1e}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
