"""The training schedules of PyTorch, made by PyTorch itself: a second source for those of `pp schedule`.

    python3 torch_schedules.py                  prints them, one JSON object a line
    python3 torch_schedules.py --compare PP     compares them with those of the program PP, action by action
    python3 torch_schedules.py --findings [PP]  gives ten bad schedules to PyTorch's checks, to PyTorch's runtime
                                                (processes on the CPU, over gloo) and to PP, and prints what each says
    --sizes P,V,M ...    ranks, stages a rank, microbatches; by default the sizes of PyTorch's own test, and more
    --names NAME ...     as `pp schedule list` has them; by default all that PyTorch has

Needs torch and no GPU. Only the runs of --findings need a process group. PyTorch builds its schedules on stages that are
mocks. The lists of GPipe and 1F1B are recorded from the loops that run them, which call the mock:
`Schedule1F1B._get_pipeline_order()` is wrong. The lowered lists are those of the runtime, without the actions of FSDP. A
comparison leaves out bubbles. If PyTorch refuses a size, PP must refuse it too. The last line of --compare has the
counts; a difference is exit code 1.
"""

import argparse
import contextlib
import datetime
import io
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import typing
from unittest import mock

import two_ranks

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules as pipelining
    from torch.distributed.pipelining.stage import PipelineStage
except ImportError as error:
    print(f"skipped: PyTorch's schedules, {error}; to have them: pip install torch")
    sys.exit(0)
if not hasattr(pipelining, "_add_wait_send"):
    print(f"skipped: PyTorch's schedules, torch {torch.__version__} has no WAIT_SEND; to have it: pip install 'torch>=2.15'")
    sys.exit(0)

TIMEOUT_S = 5

CLASSES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-h1": "InterleavedZeroBubble",
    "looped-bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
OF_FSDP = (pipelining.UNSHARD, pipelining.RESHARD, pipelining.REDUCE_GRAD, pipelining.WAIT_REDUCE_GRAD)
ONE_STAGE = ("gpipe", "1f1b", "zb-h1")
IN_A_V = ("zbv", "dualpipe-v")
# Those of TestSchedulePlan in PyTorch's test_schedule.py, as (ranks, stages a rank, microbatches), and more.
SIZES = [(2, 2, 2), (4, 2, 4), (2, 2, 8), (4, 2, 8), (8, 2, 8), (4, 4, 4), (4, 4, 8), (8, 4, 8), (4, 4, 16), (4, 4, 32)]
SIZES += [(4, 4, 64), (16, 4, 16), (32, 4, 32), (64, 4, 128), (2, 3, 2), (2, 3, 8), (4, 3, 12), (3, 4, 6), (5, 4, 10)]
SIZES += [(4, 2, 3), (4, 2, 10), (4, 2, 15)]
SIZES += [(1, 1, 1), (1, 2, 4), (2, 1, 2), (2, 1, 4), (4, 1, 4), (4, 1, 8), (4, 1, 16), (8, 1, 8), (8, 1, 16), (3, 2, 7)]


# --- PyTorch's schedules ----------------------------------------------------------------------------------------------


def stage_of(rank, ranks, stages):
    """A stage that does nothing; `stages` are those of all ranks."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.stage_index, stage.num_stages, stage.submod = rank, stages, None
    stage.group_rank, stage.group_size = rank, ranks
    stage.is_first, stage.is_last = rank == 0, rank == stages - 1
    for operations in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, operations).return_value = []
    return stage


def order_of_loop(schedule_class, ranks, microbatches):
    """What each rank of a schedule with one stage a rank does, as its loop calls the stage."""
    order = {}
    for rank in range(ranks):
        stage, actions = stage_of(rank, ranks, ranks), []

        def forward(microbatch, *_, **__):
            actions.append(pipelining._Action(rank, pipelining.F, microbatch))

        def backward(microbatch, **_):
            actions.append(pipelining._Action(rank, pipelining.B, microbatch))

        stage.forward_one_chunk.side_effect, stage.backward_one_chunk.side_effect = forward, backward
        schedule = schedule_class(stage, microbatches)
        schedule._stage_forward_initialized = True
        schedule._step_microbatches()
        order[rank] = actions
    return order


def compute_order(name, ranks, stages_per_rank, microbatches):
    """PyTorch's list of computations for each rank; ValueError where it refuses the size."""
    if name in ONE_STAGE and stages_per_rank != 1 or name in IN_A_V and stages_per_rank != 2:
        raise ValueError("stages a rank")
    schedule_class = pipelining.get_schedule_class(CLASSES[name])
    if issubclass(schedule_class, pipelining.PipelineScheduleSingle):
        return order_of_loop(schedule_class, ranks, microbatches)
    stages = [stage_of(0, ranks, ranks * stages_per_rank) for _ in range(stages_per_rank)]
    # It is lowered once, by the caller.
    with mock.patch.object(schedule_class, "_prepare_schedule_with_comms"):
        return schedule_class(stages, microbatches).pipeline_order


def schedule_of(name, ranks, stages_per_rank, microbatches):
    """A schedule as JSON has it; with `refused` where PyTorch refuses the size."""
    size = {"schedule": name, "ranks": ranks, "stages_per_rank": stages_per_rank, "microbatches": microbatches}
    stages = [stage_of(0, ranks, ranks * stages_per_rank) for _ in range(stages_per_rank)]
    runtime = pipelining._PipelineScheduleRuntime(stages, microbatches)
    try:
        compute = compute_order(name, ranks, stages_per_rank, microbatches)
        runtime._prepare_schedule_with_comms(compute)
    except (ValueError, AssertionError) as error:
        return {**size, "refused": str(error).splitlines()[0]}
    lowered = runtime.pipeline_order_with_comms
    rows = {
        "compute": [",".join("" if action is None else str(action) for action in compute[rank]) for rank in range(ranks)],
        "lowered": [
            ",".join(str(action) for action in lowered[rank] if action.computation_type not in OF_FSDP) for rank in range(ranks)
        ],
    }
    stage_to_rank = runtime.stage_index_to_group_rank
    return {**size, "stage_to_rank": [stage_to_rank[stage] for stage in range(len(stage_to_rank))], **rows}


def cases(names, sizes):
    for name in names:
        for ranks, stages_per_rank, microbatches in sizes:
            if name not in ONE_STAGE + IN_A_V or stages_per_rank == (1 if name in ONE_STAGE else 2):
                yield schedule_of(name, ranks, stages_per_rank, microbatches)


# --- beside ours ------------------------------------------------------------------------------------------------------


def ours(pp, case, level):
    """The rows that `pp` prints, or None where it refuses the size."""
    size = [f"--{key.replace('_', '-')}={case[key]}" for key in ("ranks", "stages_per_rank", "microbatches")]
    more = ["--lowered"] if level == "lowered" else []
    ended = subprocess.run([pp, "schedule", "show", case["schedule"], *size, *more, "--csv"], capture_output=True, text=True)
    if ended.returncode == 2:
        return None
    if ended.returncode:
        sys.exit(f"{pp}: {ended.stderr}")
    return ended.stdout.splitlines()


def first_difference(theirs, our):
    """The first action that differs, in words; None where all are equal."""
    if our is None or theirs is None:
        return None if our is theirs else f"{'pp' if our is None else 'PyTorch'} refuses the size"
    if len(theirs) != len(our):
        return f"PyTorch has {len(theirs)} ranks, pp {len(our)}"
    for rank, rows in enumerate(zip(theirs, our)):
        actions = [[action for action in row.split(",") if action] for row in rows]
        longest = max(map(len, actions))
        padded = [row + ["nothing"] * (longest - len(row)) for row in actions]
        for at, (their, own) in enumerate(zip(*padded)):
            if their != own:
                return f"rank {rank}, action {at + 1}: PyTorch has {their}, pp {own}"
    return None


def compare(pp, names, sizes):
    equal = refused = different = 0
    for case in cases(names, sizes):
        for level in ("compute", "lowered"):
            theirs = case.get(level)
            difference = first_difference(theirs, ours(pp, case, level))
            size = f"{case['ranks']} ranks, {case['stages_per_rank']} stages a rank, {case['microbatches']} microbatches"
            if difference:
                different += 1
                print(f"{case['schedule']}, {size}, {level}: {difference}" + (f" ({case['refused']})" if theirs is None else ""))
            elif theirs is None:
                refused += 1
            else:
                equal += 1
    print(f"PyTorch {torch.__version__}: {equal} lists equal, {refused} refused by both, {different} different")
    return 1 if different else 0


# --- bad schedules ----------------------------------------------------------------------------------------------------


class Bad(typing.NamedTuple):
    """A schedule that must be refused. Stage s is on rank s."""

    wrong: str
    microbatches: int
    rows: list[str]
    # It is a deadlock only if sends wait: such a run is tried too, and pp checks it with --slots 0.
    needs_waits: bool = False


BAD = [
    Bad(
        "receives in another order than sends",
        2,
        [
            "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
            "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
        ],
    ),
    Bad(
        "each rank sends before it receives",
        2,
        [
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
        ],
        needs_waits=True,
    ),
    Bad(
        "one forward done twice",
        2,
        [
            "0F0,0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
            "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
        ],
    ),
    Bad("a microbatch number that does not exist", 1, ["0F7,0SEND_F7,0RECV_B7,0B7", "1RECV_F7,1F7,1B7,1SEND_B7"]),
    Bad("stage 0 runs B without a gradient", 1, ["0F0,0SEND_F0,0B0", "1RECV_F0,1F0,1B0"]),
    Bad("a send without a receive", 1, ["0F0,0SEND_F0,0RECV_B0,0B0", "1F0,1B0,1SEND_B0"]),
    Bad("a send ahead of its F", 1, ["0SEND_F0,0F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"]),
    Bad("W ahead of its I", 1, ["0F0,0W0,0I0"]),
    Bad("B ahead of its F", 1, ["0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1B0,1F0,1SEND_B0"]),
]


def own_1f1b(ranks, microbatches):
    """What `Schedule1F1B._get_pipeline_order()` says, as rows."""
    order = pipelining.Schedule1F1B(stage_of(0, ranks, ranks), microbatches).pipeline_order
    rows = []
    for rank in range(ranks):
        actions = [action for action in order[rank] if action is not None and action.is_compute_op]
        rows.append(",".join(map(str, actions)))
    return rows


def verdict(check):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            check()
        except Exception as error:
            return f"refuses: {in_words(error)}"
    return "accepts"


def in_words(error):
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def rank_main(rank, order, microbatches, port, ends):
    """Runs its part of a schedule on one linear layer a stage, and compares the gradients with those of one process."""
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    ranks = len(order)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timeout)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(ranks)]
    given, wanted = torch.randn(2, 4 * microbatches, 8, dtype=torch.float64)
    loss = torch.nn.MSELoss(reduction="sum")
    for part, target in zip(given.chunk(microbatches), wanted.chunk(microbatches)):
        loss(torch.nn.Sequential(*layers)(part), target).backward()
    right = layers[rank].weight.grad.clone()
    layers[rank].zero_grad()
    try:
        stage = PipelineStage(layers[rank], rank, ranks, torch.device("cpu"))
        schedule = pipelining._PipelineScheduleRuntime([stage], microbatches, loss_fn=loss, scale_grads=False)
        is_bare = all(action.is_compute_op for actions in order.values() for action in actions)
        schedule._prepare_schedule_with_comms(order, format="compute_only" if is_bare else "compute_comms")
        schedule.step(*([given] if rank == 0 else []), **({"target": wanted} if rank == ranks - 1 else {}))
        made = layers[rank].weight.grad
        ends.put((rank, "right gradients" if made is not None and torch.allclose(made, right) else "WRONG GRADIENTS"))
    except Exception as error:
        ends.put((rank, in_words(error)))
    os._exit(0)


def waited_at_once(order):
    """With a wait right behind each send."""
    waits = {pipelining.SEND_F: pipelining.WAIT_SEND_F, pipelining.SEND_B: pipelining.WAIT_SEND_B}
    ranks = {}
    for rank, actions in order.items():
        ranks[rank] = []
        for action in actions:
            ranks[rank].append(action)
            if action.computation_type in waits:
                ranks[rank].append(action._replace(computation_type=waits[action.computation_type]))
    return ranks


def outcome(order, microbatches):
    """How each rank ends."""
    port = two_ranks.free_port()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=rank_main, args=(rank, order, microbatches, port, queue)) for rank in order]
    for process in processes:
        process.start()
    for process in processes:
        process.join(10 * TIMEOUT_S)
        process.kill()
    ends = dict.fromkeys(order, "did not end")
    while not queue.empty():
        rank, end = queue.get()
        ends[rank] = end
    return ends


def findings(pp):
    print(f"PyTorch {torch.__version__}")
    for bad in [*BAD, Bad("Schedule1F1B._get_pipeline_order()", 4, own_1f1b(2, 4))]:
        microbatches, rows = bad.microbatches, bad.rows
        order = {rank: [pipelining._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)}
        ranks = len(rows)
        print(f"\n{bad.wrong}")
        for row in rows:
            print(f"    {row}")
        checks = {
            "_validate_schedule": lambda: pipelining._validate_schedule(order, ranks, ranks, microbatches),
            "_simulate_comms_compute": lambda: pipelining._simulate_comms_compute(order, lambda stage: stage, ranks),
        }
        for check, call in checks.items():
            print(f"  {check}: {verdict(call)}")
        # PyTorch 2.15 wants a wait for each send.
        runs = {"run": pipelining._add_wait_send}
        if bad.needs_waits:
            runs["run with each send waited for at once"] = waited_at_once
        for run, add_waits in runs.items():
            for rank, end in outcome(add_waits(order), microbatches).items():
                print(f"  {run}, rank {rank}: {end}")
        if pp:
            slots = ["--slots", "0"] if bad.needs_waits else []
            command = [pp, "schedule", "check", "-", *slots]
            ended = subprocess.run(command, input="\n".join(rows), capture_output=True, text=True)
            answer = ended.stderr.strip() or "accepts"
            print(f"  pp schedule check {' '.join(slots)}: exit code {ended.returncode}: {answer}")
    print("\n_simulate() of PyTorch's own lowered schedules, 2 ranks, 8 microbatches")
    for name in ("interleaved", "interleaved-zb", "looped-bfs", "zbv", "dualpipe-v"):
        stages = [stage_of(0, 2, 4) for _ in range(2)]
        schedule = pipelining.get_schedule_class(CLASSES[name])(stages, 8)
        print(f"  {CLASSES[name]}: {verdict(schedule._simulate)}")


# --- the command line -------------------------------------------------------------------------------------------------


def size(text):
    ranks, stages_per_rank, microbatches = map(int, text.split(","))
    return ranks, stages_per_rank, microbatches


def main():
    first, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", metavar="PP")
    parser.add_argument("--findings", nargs="?", const="", metavar="PP")
    parser.add_argument("--sizes", nargs="+", type=size, default=SIZES, metavar="P,V,M")
    parser.add_argument("--names", nargs="+", choices=list(CLASSES), default=list(CLASSES), metavar="NAME")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    if args.compare:
        return compare(args.compare, args.names, args.sizes)
    if args.findings is not None:
        findings(args.findings)
        return 0
    for case in cases(args.names, args.sizes):
        print(json.dumps(case, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
