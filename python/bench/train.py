"""What training costs: each figure beside its limit. docs/training.md has the commands.

`simulate` runs each schedule on two ranks of one thread, and compares each step with `pp schedule simulate` for the times that the actions
of this step took. `host` gives what an action costs beyond the same calls of PyTorch. `torch` trains the same modules with
torch.distributed.pipelining over gloo, in turn. `memory` compares the most memory of a rank with what its schedule holds at once.
`host` and `memory` take `--device cuda:0`. `gpus` takes two GPUs, with tensors of 22 MB between them: a step without the optimizer over
what its actions take, over the simulation, and beside torch.distributed.pipelining over NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
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
Costs = list[list[list[float]]]
"""By stage and microbatch, the seconds of F, of I or B, and of W."""
LARGE = 512, 256, 40
"""Rows, width and layers where memory is measured: most of it is activations."""
ON_GPUS = 2700, 4096, torch.bfloat16
"""Rows, width and type between two GPUs: 22 MB."""
TURNS = "BENCH_TURNS"
"""In the environment of ranks: rank 0 makes a step for each line that it gets, and says how long it took."""
GPUS_MUST = {"gpipe": 1.135, "1f1b": 1.14, "interleaved": 1.08, "interleaved-zb": 1.05}
"""A step over what its actions take, at forwards of 5 ms."""


def stage(layers: int, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def batch(rows: int = ROWS, width: int = WIDTH, device: str = "cpu") -> Any:
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(MICROBATCHES * rows, width, generator=made).to(device) for _ in range(2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 1e-3)


def layers_of(seconds: float, device: str = "cpu") -> int:
    """Layers whose forward takes this long."""
    rows, width, dtype = size_on(device)
    net, x, took = stage(8, width).to(device, dtype), torch.randn(rows, width, device=device, dtype=dtype), []
    for _ in range(10):
        begun = time.perf_counter()
        net(x)
        settle(device)
        took.append(time.perf_counter() - begun)
    return max(1, round((1.1 if device == "cpu" else 1) * seconds / statistics.median(took) * 8))


def steps_of(step: Any, count: int, behind: Any = lambda: None, warm_up: int = WARM_UP) -> list[float]:
    """How long each step takes, without the first ones. `behind` is called behind each."""
    took, in_turns = [], TURNS in os.environ and os.environ["RANK"] == "0"
    for _ in range(warm_up + count):
        if in_turns:
            input()
        begun = time.perf_counter()
        step()
        took.append(time.perf_counter() - begun)
        if in_turns:
            print(took[-1], flush=True)
        behind()
    return took[warm_up:]


def costs_in(trainer: train.Trainer) -> Costs:
    """What the actions of the last step took; W is 0 where all are B."""
    verdict = trainer._verdict
    assert verdict is not None
    moments = torch.tensor(verdict.moments, dtype=torch.float64).view(-1, MICROBATCHES, 3, 2)
    costs: Costs = (moments[..., 1] - moments[..., 0]).tolist()
    return costs


def length_of(trainer: train.Trainer) -> float:
    """The seconds from the start of the first action of the last step to the end of the last."""
    verdict = trainer._verdict
    assert verdict is not None
    moments = [moment for moment in verdict.moments if moment > 0]
    return max(moments) - min(moments)


class Still(torch.optim.SGD):
    """An optimizer that moves nothing."""

    def step(self, closure: Any = None) -> None:
        pass


def ours(args: argparse.Namespace) -> None:
    """A rank of ours. Rank 0 prints what it has measured."""
    rank, data, make, optimizer = terms_of(args)
    on_gpu = args.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        with train.Trainer(
            args.kind, ranks=2, stages_per_rank=KINDS[args.kind], microbatches=MICROBATCHES, stages=lambda _: make(),
            loss=nn.functional.mse_loss, optimizer=optimizer, devices=["cuda:0", "cuda:1"] if on_gpu else None, own_inputs=on_gpu,
            own_targets=on_gpu, timing=True, report=report if rank == 0 else None,
        ) as trainer:  # fmt: skip
            costs: list[Any] = []
            if on_gpu:
                # By the clock a step is measured without the times of its actions.
                trainer.step(data)
                times, trainer._rank.times = trainer._rank.times, None
                by_clock = steps_of(lambda: trainer.step(data), args.steps)
                trainer._rank.times = times
            took = steps_of(lambda: trainer.step(data), args.steps, lambda: costs.append((costs_in(trainer), length_of(trainer))))
        if rank == 0:
            cause = json.loads(report.read_text())["measures"]["training"]["cause"]
            print(json.dumps({"steps": by_clock if on_gpu else took, "costs": costs[WARM_UP:], "cause": cause}), flush=True)


def theirs(args: argparse.Namespace) -> None:
    """A rank of PyTorch's."""
    from torch.distributed import pipelining

    rank, (inputs, targets), make, optimizer = terms_of(args)
    device = inputs.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl", device_id=device)
    else:
        torch.distributed.init_process_group("gloo")
    count = KINDS[args.kind]
    own = nn.ModuleList(make() for _ in range(count))
    stages = [pipelining.PipelineStage(module, rank + 2 * at, 2 * count, device) for at, module in enumerate(own)]
    made = {
        "gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B, "interleaved": pipelining.ScheduleInterleaved1F1B,
        "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
    }  # fmt: skip
    schedule = made[args.kind](stages if count > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    of_weights = optimizer(own.parameters())

    def step() -> None:
        schedule.step(*[inputs][:1 - rank], **({"target": targets, "losses": []} if rank else {}))
        of_weights.step()
        settle(device.type)
        of_weights.zero_grad()

    took = steps_of(step, args.steps)
    if rank == 0:
        print(json.dumps({"steps": took}), flush=True)
    torch.distributed.destroy_process_group()


def terms_of(args: argparse.Namespace) -> tuple[int, list[torch.Tensor], Any, Any]:
    """The number of this rank, its batch, what makes a stage of its, and its optimizer: on a GPU one that moves nothing."""
    rank = int(os.environ["RANK"])
    device = torch.device("cpu" if args.device == "cpu" else f"cuda:{rank}")
    rows, width, dtype = size_on(args.device)

    def make() -> nn.Module:
        with device:
            return stage(args.layers, width).to(dtype)

    return rank, [one.to(dtype) for one in batch(rows, width, str(device))], make, sgd if args.device == "cpu" else Still


def size_on(device: str) -> tuple[int, int, torch.dtype]:
    """Rows, width and type of a microbatch."""
    return (ROWS, WIDTH, torch.float32) if device == "cpu" else ON_GPUS


def gpus(args: argparse.Namespace) -> None:
    rows, width, dtype = ON_GPUS
    here, there = (torch.empty(rows, width, dtype=dtype, device=f"cuda:{rank}") for rank in range(2))
    copies = []
    for _ in range(50):
        begun = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        copies.append(time.perf_counter() - begun)
    transfer = statistics.median(copies)
    print(f"a copy of {here.nbytes / 1e6:.1f} MB from GPU to GPU: {transfer * 1e6:.0f} us", flush=True)
    all_layers = {milliseconds: layers_of(milliseconds / 1e3, "cuda:0") for milliseconds in (5, 1)}
    del here, there
    torch.cuda.empty_cache()
    for milliseconds, layers in all_layers.items():
        print(
            f"{milliseconds} ms, {layers} layers: ms of a step; over its actions (must be), over its simulation (must be "
            f"{1.01 if milliseconds == 5 else 1.02}; in brackets with the mean of each stage), by the clock over its actions; PyTorch over these actions",
            flush=True,
        )  # fmt: skip
        for kind, must in GPUS_MUST.items():
            each = max(1, round(layers / KINDS[kind]))
            for _ in range(args.times):
                run = measured("ours", kind, each, args.steps, "cuda")[0]
                other = statistics.median(measured("theirs", kind, each, args.steps, "cuda")[0]["steps"])
                took, ratios = statistics.median(run["steps"]), []
                for costs, step in run["costs"]:
                    ideal = sum(seconds for stage in costs for one in stage for seconds in one) / 2
                    means = [[[statistics.mean(of) for of in zip(*stage)]] for stage in costs]
                    own, even = (step / simulated(args.pp, kind, of, transfer) for of in (costs, means))
                    ratios.append((step / ideal, own, even, took / ideal, other / ideal, step * 1e3))
                over, own, even, by_clock, theirs, step = sorted(ratios)[len(ratios) // 2]
                print(
                    f"{kind:<16}{step:>9.2f}{over:>8.4f} ({must if milliseconds == 5 else '-'}){own:>9.4f} ({even:.4f}){by_clock:>8.4f}"
                    f"{theirs:>9.4f}   {run['cause']}",
                    flush=True,
                )  # fmt: skip


def started(case: str, kind: str, layers: int, steps: int, device: str = "cpu", **more: str) -> list[subprocess.Popen[str]]:
    """This file on two ranks of one thread, with `more` variables."""
    command = [sys.executable, __file__, case, "--kind", kind, "--layers", str(layers), "--steps", str(steps), "--device", device]
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own.getsockname()[1])}
    world |= {"PP_JOB_SECRET": "0123456789abcdef" * 2, **more}
    # Large tensors go back to the system at once where memory is measured.
    world |= {"MALLOC_MMAP_THRESHOLD_": "65536"} if case == "kept" else {}
    ranks = [{**os.environ, **world, "RANK": str(rank)} for rank in range(2)]
    return [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=rank) for rank in ranks]


def measured(case: str, kind: str, layers: int, steps: int, device: str = "cpu") -> list[Any]:
    """What two ranks have measured."""
    ranks = started(case, kind, layers, steps, device)
    said = [one.communicate()[0] for one in ranks]
    if any(one.returncode for one in ranks):
        sys.exit(f"{case} {kind} failed")
    return [json.loads(line) for line in "".join(said).splitlines() if line.startswith("{")]


def simulated(program: str, kind: str, costs: Costs, transfer: float = 0.0) -> float:
    """The seconds of a step by the simulator, for actions and transfers that take so long."""
    command = [program, "schedule", "simulate", kind, "--ranks=2", f"--stages-per-rank={KINDS[kind]}", f"--microbatches={MICROBATCHES}"]
    command.append(f"--transfer={transfer * 1e3:.6f}")
    for at, name in enumerate(("forward", "input", "weight")):
        command.append(f"--{name}=" + ",".join(":".join(f"{one[at] * 1e3:.6f}" for one in stage) for stage in costs))
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
            steps = [(step, simulated(args.pp, kind, costs)) for step, (costs, _) in zip(run["steps"], run["costs"])]
            rows.append(sorted((step / ideal, step, ideal) for step, ideal in steps)[len(steps) // 2])
        ratio, step, ideal = sorted(rows)[len(rows) // 2]
        print(f"{kind:<16}{step:>10.3f}{ideal:>11.3f}{ratio:>8.3f}", flush=True)


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def host(args: argparse.Namespace) -> None:
    """Four stages more on a rank: what their actions cost beyond the same calls of PyTorch, which are also those that copy out of a slot
    and into one. Source and sink, the exchange and the optimizer's call do not count.
    """
    count, x = 32, torch.randn(32, 8, device=args.device)

    def ours(stages: int) -> Any:
        trainer = train.Trainer(
            "interleaved", ranks=1, stages_per_rank=stages, microbatches=count, stages=lambda _: nn.Linear(8, 8),
            loss=nn.functional.mse_loss, optimizer=sgd, devices=[args.device],
        )  # fmt: skip
        return lambda: trainer.step((x, x))

    def plain(stages: int) -> Any:
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

        return step

    # All four in turn: what disturbs the machine meets them alike.
    each: list[list[float]] = [[] for _ in range(4)]
    steps = [ours(8), ours(4), plain(8), plain(4)]
    for _ in range(args.times * 10):
        for took, step in zip(each, steps):
            took.extend(steps_of(step, 1, warm_up=0))
    rounds = [(a - b - (c - d)) / (4 * 2 * count) * 1e6 for a, b, c, d in list(zip(*each))[WARM_UP:]]
    a, b, c, d = (min(of[WARM_UP:]) for of in each)
    quarter = len(rounds) // 4
    low, high = sorted(rounds)[quarter], sorted(rounds)[-1 - quarter]
    print(
        f"host cost of an action: {statistics.median(rounds):.1f} us (half of {len(rounds)} rounds {low:.1f} to {high:.1f}; of the fastest "
        f"steps {(a - b - (c - d)) / (4 * 2 * count) * 1e6:.1f}); must be {60 if args.device == 'cpu' else 80} or less",
        flush=True,
    )  # fmt: skip


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
    """Both keep their ranks, and make a step in turn: what disturbs the machine meets them alike."""
    for milliseconds, must in ((50, "1 or less"), (5, "below 1")):
        layers, rounds = layers_of(milliseconds / 1e3), args.times * args.steps
        for kind in ("gpipe", "1f1b"):
            both = [started(case, kind, layers, rounds, **{TURNS: ""}) for case in ("ours", "theirs")]
            took: list[tuple[float, float]] = []
            for _ in range(WARM_UP + rounds):
                mine, other = map(step_of, both)
                took.append((mine, other))
            for one in both[0] + both[1]:
                one.communicate()
            mine, other, ratio = (statistics.median(of) for of in zip(*((a, b, a / b) for a, b in took[WARM_UP:])))
            mean = sum(a for a, _ in took[WARM_UP:]) / sum(b for _, b in took[WARM_UP:])
            print(
                f"{kind}, stages of {milliseconds} ms: {mine:.3f} s, PyTorch {other:.3f} s, ratio {ratio:.3f} (of the means {mean:.3f}), "
                f"{rounds} steps in turn; must be {must}",
                flush=True,
            )  # fmt: skip


def step_of(ranks: list[subprocess.Popen[str]]) -> float:
    """Lets ranks make a step. Gives the seconds."""
    asks, says = ranks[0].stdin, ranks[0].stdout
    assert asks is not None and says is not None
    print(file=asks, flush=True)
    said = says.readline()
    if not said:
        sys.exit("a rank has ended")
    return float(said)


def main() -> None:
    cases = {
        "simulate": simulate, "host": host, "torch": against_torch, "memory": memory, "gpus": gpus, "ours": ours, "theirs": theirs,
        "kept": kept,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=cases, help="what comes behind gpus are single ranks, for the others")
    parser.add_argument("--pp", default=str(ROOT / "target/release/pp"), help="the program pp, for `simulate` and `gpus`")
    parser.add_argument("--times", type=int, default=5, help="runs, or pairs of runs, of which the median counts")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run that count")
    parser.add_argument("--kind", choices=KINDS, default="1f1b", help="the schedule of a single rank")
    parser.add_argument("--device", default="cpu", help="the device of all ranks, for `host` and `memory`")
    parser.add_argument("--layers", type=int, default=8, help="the layers of a stage of a single rank")
    args = parser.parse_args()
    if args.case in ("simulate", "gpus") and not Path(args.pp).exists():
        parser.error(f"there is no {args.pp}: cargo build --release --package pp-cli, or give --pp")
    torch.set_num_threads(1)
    cases[args.case](args)


if __name__ == "__main__":
    main()
