"""What training costs: each figure beside its limit. docs/training.md has the commands.

`simulate` runs each schedule on two ranks of one thread, and compares a step with `pp schedule simulate` for the run's own times of the
actions. `host` gives what an action costs beyond the same calls of PyTorch. `torch` trains the same modules with
torch.distributed.pipelining over gloo, in turn. `memory` compares the most memory of a rank with what its schedule holds at once.
`host` and `memory` take `--device cuda:0`.
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

from pp_pipeline import _native, train
from pp_pipeline.train import _backward

ROOT = Path(__file__).parents[2]
KINDS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zb": 2, "zbv": 2}
"""The schedules that are measured, and their stages a rank."""
MICROBATCHES, ROWS, WIDTH, WARM_UP = 8, 512, 512, 6
LARGE = 512, 256, 40
"""Rows, width and layers where memory is measured: most of it is activations."""


def stage(layers: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def batch(rows: int = ROWS, width: int = WIDTH, device: str = "cpu") -> Any:
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(MICROBATCHES * rows, width, generator=made).to(device) for _ in range(2))


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


def measured(case: str, kind: str, layers: int, steps: int, device: str = "cpu") -> list[Any]:
    """Runs this file on two ranks of one thread. Gives what they have measured."""
    command = [sys.executable, __file__, case, "--kind", kind, "--layers", str(layers), "--steps", str(steps), "--device", device]
    world: dict[str, str] = {}
    if case != "ours":
        with socket.socket() as own:
            own.bind(("127.0.0.1", 0))
            world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own.getsockname()[1])}
    if case == "kept":
        # Large tensors go back to the system at once.
        world |= {"PP_JOB_SECRET": "0123456789abcdef" * 2, "MALLOC_MMAP_THRESHOLD_": "65536"}
    ranks = [{**world, "RANK": str(rank)} for rank in range(2)] if world else [{}]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}) for own in ranks]
    said = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        sys.exit(f"{case} {kind} failed")
    return [json.loads(line) for line in "".join(said).splitlines() if line.startswith("{")]


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
            run = measured("ours", kind, layers, args.steps)[0]
            step, ideal = statistics.median(run["steps"]), simulated(args.pp, kind, run["times"])
            rows.append((step / ideal, step, ideal))
        ratio, step, ideal = sorted(rows)[len(rows) // 2]
        print(f"{kind:<16}{step:>10.3f}{ideal:>11.3f}{ratio:>8.3f}", flush=True)


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def host(args: argparse.Namespace) -> None:
    """Four stages more on a rank: what their actions cost beyond the same calls of PyTorch, which are also those that copy out of a slot
    and into one. Source and sink, the exchange and the optimizer's call do not count.
    """
    count, x, times = 32, torch.randn(32, 8, device=args.device), args.times * 10

    def ours(stages: int) -> float:
        with train.Trainer(
            "interleaved", ranks=1, stages_per_rank=stages, microbatches=count, stages=lambda _: nn.Linear(8, 8),
            loss=nn.functional.mse_loss, optimizer=sgd, devices=[args.device],
        ) as trainer:  # fmt: skip
            return statistics.median(steps_of(lambda: trainer.step((x, x)), times))

    def plain(stages: int) -> float:
        own = [nn.Linear(8, 8).to(args.device) for _ in range(stages)]
        slot, other = torch.empty_like(x[:1]), torch.empty_like(x[:1])
        optimizers = [sgd(one.parameters()) for one in own]

        def step() -> None:
            kept = []
            for one in x.chunk(count):
                acts, made = [], one
                for module in own:
                    taken = made.detach().clone().requires_grad_()
                    made = module(taken)
                    slot.copy_(made.detach())
                    other.copy_(one)
                    acts.append((taken, made))
                kept.append((nn.functional.mse_loss(made, one), acts))
            for loss, acts in kept:
                loss.backward()
                for (_, made), (above, _) in zip(acts[-2::-1], acts[:0:-1], strict=True):
                    slot.copy_(above.grad)
                    made.backward(above.grad.clone())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            settle(args.device)

        return statistics.median(steps_of(step, times))

    cost = ((ours(8) - ours(4)) - (plain(8) - plain(4))) / (4 * 2 * count)
    print(f"host cost of an action: {cost * 1e6:.1f} us; must be {60 if args.device == 'cpu' else 80} or less", flush=True)


class Memory:
    """The bytes of this process beyond those that it had when this was made: of a GPU those of PyTorch's tensors there."""

    def __init__(self, device: str) -> None:
        self._gpu = device != "cpu"
        settle(device)
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self._before = 0
        self._before = self.now()

    def now(self) -> int:
        return (torch.cuda.memory_allocated() if self._gpu else self._status("VmRSS")) - self._before

    def most(self) -> int:
        return (torch.cuda.max_memory_allocated() if self._gpu else self._status("VmHWM")) - self._before

    def _status(self, name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024


def kept(args: argparse.Namespace) -> None:
    """A rank that says how much memory a step takes, without weights, gradients, optimizers and edges. Rank 0 says also what a
    microbatch takes in a first, a middle and a last stage: between F and B, and between I and W.
    """
    rows, width, layers = LARGE
    data = batch(rows, width, args.device)
    with train.Trainer(
        args.kind, ranks=2, stages_per_rank=KINDS[args.kind], microbatches=MICROBATCHES, stages=lambda _: stage(layers, width),
        loss=nn.functional.mse_loss, optimizer=sgd, devices=[args.device] * 2,
    ) as trainer:  # fmt: skip
        steps_of(lambda: trainer.step(data), 0)
        # Weights, optimizers and slots are there; gradients come within the step.
        memory = Memory(args.device)
        trainer.step(data)
        gradients = sum(p.numel() * p.element_size() for module in trainer.modules.values() for p in module.parameters())
        told = {"rank": int(os.environ["RANK"]), "most": memory.most() - gradients}
    if told["rank"] == 0:
        told["held"] = [held(is_first, is_last, args.device) for is_first, is_last in ((True, False), (False, False), (False, True))]
    print(json.dumps(told), flush=True)


def held(is_first: bool, is_last: bool, device: str) -> tuple[int, int]:
    """The bytes of a microbatch between F and B, and between I and W."""
    rows, width, layers = LARGE
    net = stage(layers, width).to(device)
    weights = list(net.parameters())
    net(torch.randn(rows, width, device=device)).sum().backward()
    memory = Memory(device)
    x = torch.randn(rows, width, device=device).requires_grad_(not is_first)
    y = net(x)
    if is_last:
        y = nn.functional.mse_loss(y, torch.randn(rows, width, device=device))
    activation = memory.now()
    if is_first:
        # All of its backward is for the weights.
        return activation, activation + y.numel() * y.element_size()
    groups = _backward.divides([y], [x], weights)
    assert groups is not None
    _backward.backward_input([y], [torch.ones_like(y)], [x], groups)
    del x, y
    return activation, memory.now()


def memory(args: argparse.Namespace) -> None:
    print(f"{'schedule':<16}{'rank':>4}{'memory, MB':>12}{'held, MB':>10}{'ratio':>8}   must be 1.1 or less", flush=True)
    for kind in KINDS:
        told = sorted(measured("kept", kind, 0, 0, args.device), key=lambda one: int(one["rank"]))
        first, middle, last = told[0]["held"]
        schedule = _native.Schedule.build(kind, 2, KINDS[kind], MICROBATCHES)
        count = len(schedule.rank_of)
        of_stage = [first, *[middle] * (count - 2), last]
        for rank, actions in enumerate(schedule.actions()):
            now = most = 0
            for number, op, _ in actions:
                activation, pending = of_stage[number]
                now += {"F": activation, "B": -activation, "I": pending - activation, "W": -pending}[op]
                most = max(most, now)
            used = told[rank]["most"]
            print(f"{kind:<16}{rank:>4}{used / 1e6:>12.1f}{most / 1e6:>10.1f}{used / most:>8.3f}", flush=True)


def against_torch(args: argparse.Namespace) -> None:
    for milliseconds, must in ((50, "1 or less"), (5, "below 1")):
        layers = layers_of(milliseconds / 1e3)
        for kind in ("gpipe", "1f1b"):
            pairs = []
            for _ in range(args.times):
                mine, other = (statistics.median(measured(case, kind, layers, args.steps)[0]["steps"]) for case in ("ours", "theirs"))
                pairs.append((mine / other, mine, other))
            ratio, mine, other = sorted(pairs)[len(pairs) // 2]
            print(f"{kind}, stages of {milliseconds} ms: {mine:.3f} s, PyTorch {other:.3f} s, ratio {ratio:.3f}; must be {must}", flush=True)


def main() -> None:
    cases = {
        "simulate": simulate, "host": host, "torch": against_torch, "memory": memory, "ours": ours, "theirs": theirs, "kept": kept,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=cases, help="ours, theirs and kept are single ranks, for the others")
    parser.add_argument("--pp", default=str(ROOT / "target/release/pp"), help="the program pp, for `simulate`")
    parser.add_argument("--times", type=int, default=5, help="runs, or pairs of runs, of which the median counts")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run that count")
    parser.add_argument("--kind", choices=KINDS, default="1f1b", help="the schedule of a single rank")
    parser.add_argument("--device", default="cpu", help="the device of all ranks, for `host` and `memory`")
    parser.add_argument("--layers", type=int, default=8, help="the layers of a stage of a single rank")
    args = parser.parse_args()
    if args.case == "simulate" and not Path(args.pp).exists():
        parser.error(f"there is no {args.pp}: cargo build --release --package pp-cli, or give --pp")
    torch.set_num_threads(1)
    cases[args.case](args)


if __name__ == "__main__":
    main()
