"""What training costs: each figure beside its limit. docs/training.md has the commands.

`simulate` runs each schedule on two ranks of one thread, and compares a step with `pp schedule simulate` for the run's own times of the
actions. `host` gives what an action costs on one rank beside the same calls of PyTorch. `torch` trains the same modules with
torch.distributed.pipelining over gloo, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pp_pipeline import train

ROOT = Path(__file__).parents[2]
KINDS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zb": 2, "zbv": 2}
"""The schedules that are measured, and their stages a rank."""
MICROBATCHES, ROWS, WIDTH, WARM_UP = 8, 64, 512, 2


def stage(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(layers)))


def batch() -> Any:
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(MICROBATCHES * ROWS, WIDTH, generator=made) for _ in range(2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 1e-3)


def layers_of(seconds: float) -> int:
    """Layers whose forward takes this long on one thread."""
    net, x, took = stage(8), torch.randn(ROWS, WIDTH), []
    for _ in range(10):
        begun = time.perf_counter()
        net(x)
        took.append(time.perf_counter() - begun)
    return max(1, round(1.1 * seconds / statistics.median(took) * 8))


def steps_of(step: Any, count: int) -> list[float]:
    """How long each step takes, without the first ones."""
    took = []
    for _ in range(WARM_UP + count):
        begun = time.perf_counter()
        step()
        took.append(time.perf_counter() - begun)
    return took[WARM_UP:]


def ours(args: argparse.Namespace) -> None:
    """A rank of ours. Rank 0 prints what it has measured."""
    data = batch()
    with train.Trainer(
        args.kind, ranks=2, stages_per_rank=KINDS[args.kind], microbatches=MICROBATCHES, stages=lambda _: stage(args.layers),
        loss=nn.functional.mse_loss, optimizer=sgd, timing=True,
    ) as trainer:  # fmt: skip
        took = steps_of(lambda: trainer.step(data), args.steps)
        if 0 in trainer.modules:
            print(json.dumps({"steps": took, "times": trainer.times()}), flush=True)


def theirs(args: argparse.Namespace) -> None:
    """A rank of PyTorch's."""
    from torch.distributed import pipelining

    torch.distributed.init_process_group("gloo")
    rank, own, (inputs, targets) = torch.distributed.get_rank(), stage(args.layers), batch()
    of_rank = pipelining.PipelineStage(own, rank, 2, torch.device("cpu"))
    made = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[args.kind]
    schedule, optimizer = made(of_rank, MICROBATCHES, loss_fn=nn.functional.mse_loss), sgd(own.parameters())

    def step() -> None:
        schedule.step(inputs) if rank == 0 else schedule.step(target=targets, losses=[])
        optimizer.step()
        optimizer.zero_grad()

    took = steps_of(step, args.steps)
    if rank == 0:
        print(json.dumps({"steps": took}), flush=True)
    torch.distributed.destroy_process_group()


def measured(case: str, kind: str, layers: int, steps: int) -> Any:
    """Runs this file on two ranks of one thread. Gives what rank 0 has measured."""
    command = [sys.executable, __file__, case, "--kind", kind, "--layers", str(layers), "--steps", str(steps)]
    world: dict[str, str] = {}
    if case == "theirs":
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own.getsockname()[1])}
    ranks = [{**world, "RANK": str(rank)} for rank in range(2)] if world else [{}]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}) for own in ranks]
    said = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        sys.exit(f"{case} {kind} failed")
    return json.loads(next(line for line in "".join(said).splitlines() if line.startswith('{"steps"')))


def simulated(program: str, kind: str, times: dict[str, dict[str, float]]) -> float:
    """The seconds of a step by the simulator, for these times of the actions of each stage."""
    costs: dict[str, list[float]] = {"F": [], "I": [], "W": []}
    for number in range(len(times)):
        of = times[str(number)]
        half = of.get("B", 0.0) / 2
        for op, default in (("F", 0.0), ("I", half), ("W", half)):
            costs[op].append(of.get(op, default))
    command = [program, "schedule", "simulate", kind, "--ranks=2", f"--stages-per-rank={KINDS[kind]}", f"--microbatches={MICROBATCHES}"]
    for op, name in (("F", "forward"), ("I", "input"), ("W", "weight")):
        command.append(f"--{name}=" + ",".join(f"{one * 1e3:.6f}" for one in costs[op]))
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(json.loads(done.stdout)["makespan"]) / 1e3


def simulate(args: argparse.Namespace) -> None:
    layers = layers_of(0.05)
    print(f"{'schedule':<16}{'step, s':>10}{'simulated':>11}{'ratio':>8}   must be 1.03 or less (median of {args.times})", flush=True)
    for kind in KINDS:
        rows = []
        for _ in range(args.times):
            run = measured("ours", kind, layers, args.steps)
            step, ideal = statistics.median(run["steps"]), simulated(args.pp, kind, run["times"])
            rows.append((step / ideal, step, ideal))
        ratio, step, ideal = sorted(rows)[len(rows) // 2]
        print(f"{kind:<16}{step:>10.3f}{ideal:>11.3f}{ratio:>8.3f}", flush=True)


def host(args: argparse.Namespace) -> None:
    count, x = 64, torch.randn(64, 8)
    terms = dict(ranks=1, microbatches=count, stages=lambda _: nn.Linear(8, 8), loss=nn.functional.mse_loss, optimizer=sgd)
    with train.Trainer("gpipe", **terms) as trainer:  # type: ignore[arg-type]
        whole = steps_of(lambda: trainer.step((x, x)), args.times * 10)
    own = nn.Linear(8, 8)
    optimizer = sgd(own.parameters())

    def plain() -> None:
        losses = [nn.functional.mse_loss(own(one), one) for one in x.chunk(count)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    cost = (statistics.median(whole) - statistics.median(steps_of(plain, args.times * 10))) / (2 * count)
    print(f"host cost of an action: {cost * 1e6:.1f} us; must be 60 or less", flush=True)


def against_torch(args: argparse.Namespace) -> None:
    for milliseconds, must in ((50, "1 or less"), (5, "below 1")):
        layers = layers_of(milliseconds / 1e3)
        for kind in ("gpipe", "1f1b"):
            pairs = []
            for _ in range(args.times):
                mine, other = (statistics.median(measured(case, kind, layers, args.steps)["steps"]) for case in ("ours", "theirs"))
                pairs.append((mine / other, mine, other))
            ratio, mine, other = sorted(pairs)[len(pairs) // 2]
            print(f"{kind}, stages of {milliseconds} ms: {mine:.3f} s, PyTorch {other:.3f} s, ratio {ratio:.3f}; must be {must}", flush=True)


def main() -> None:
    cases = {"simulate": simulate, "host": host, "torch": against_torch, "ours": ours, "theirs": theirs}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=cases, help="ours and theirs are single ranks, for the others")
    parser.add_argument("--pp", default=str(ROOT / "target/release/pp"), help="the program pp, for `simulate`")
    parser.add_argument("--times", type=int, default=5, help="runs, or pairs of runs, of which the median counts")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run that count")
    parser.add_argument("--kind", choices=KINDS, default="1f1b", help="the schedule of a single rank")
    parser.add_argument("--layers", type=int, default=8, help="the layers of a stage of a single rank")
    args = parser.parse_args()
    if args.case == "simulate" and not Path(args.pp).exists():
        parser.error(f"there is no {args.pp}: cargo build --release --package pp-cli, or give --pp")
    torch.set_num_threads(1)
    cases[args.case](args)


if __name__ == "__main__":
    main()
