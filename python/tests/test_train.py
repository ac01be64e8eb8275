"""Training over schedules: the same bits as in one process, and what ends a job."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import EXAMPLES, Film, cells, free_port, needs

torch = needs("torch")

from pp_pipeline import train  # noqa: E402
from pp_pipeline.train import _backward, _work  # noqa: E402

HEAD = """
import torch
from torch import nn
from pp_pipeline import train

torch.set_num_threads(1)
def batch(rows=4):
    return torch.ones(rows, 3), torch.zeros(rows, 3)

def trainer(schedule="1f1b", **more):
    return train.Trainer(schedule, **{**dict(ranks=2, microbatches=2, stages=lambda s: nn.Linear(3, 3), loss=nn.functional.mse_loss,
                         optimizer=lambda p: torch.optim.SGD(p, 0.1)), **more})
"""


@pytest.mark.parametrize(
    ("ranks", "sizes", "dtype", "count"), [(2, (2, 3), "float32", 32), (2, (2, 1), "bfloat16", 10), (4, (1, 4), "float32", 25)]
)
def test_every_schedule_gives_the_bits_of_one_process(ranks: int, sizes: tuple[int, int], dtype: str, count: int) -> None:
    lines = cells(ranks, *sizes, 3, "--dtype", dtype)
    assert lines == [f"{count} cells, 0 wrong"] * ranks


@pytest.mark.parametrize("mistake", ["twice", "other-weight", "other-slot", "left-out", "first", "own-gradient", "other-values"])
def test_a_mistake_is_found(mistake: str) -> None:
    lines = cells(2, 1, 4, 2, "--break", mistake)
    assert any("losses" in line or "gradients or weights" in line for line in lines), lines


def test_gradients_that_cross_between_two_edges_of_a_pair_of_ranks_are_found() -> None:
    lines = cells(2, 2, 2, 2, "--break", "crossed")
    wrong = {line.split(":")[0] for line in lines if "losses" in line or "gradients or weights" in line}
    # At one stage a rank, and in a V, no pair of ranks has two edges for gradients.
    assert wrong == {f"{kind} (2, 2, {n})" for kind in ("interleaved", "interleaved-zb", "looped-bfs") for n in (1, 2)}, lines


def test_the_losses_are_those_of_pytorchs_own_runner(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("train_peers.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.findall(r"(\S+): (\S+) to (\S+), apart (\S+)", done.stdout)
    assert done.returncode == 0 and len(found) == 7, done.stdout + done.stderr
    assert all(float(last) < float(first) and float(apart) <= 1e-6 for _, first, last, apart in found), done.stdout


class Product(torch.autograd.Function):
    """A node of Python in the graph, whose backward changes what it has kept, and frees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x.clone(), w.expand_as(x).clone()
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_x, of_w = ctx.w.mul_(grad), ctx.x.mul_(grad).sum(0)
        del ctx.x, ctx.w
        return of_x, of_w


class Together(torch.nn.Module):
    """Two weights whose gradients are one tensor, one whose gradient is expanded, one that is used twice around another whose output has
    a hook, and one with a node of Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w, self.delta, self.sum, self.own = (torch.nn.Parameter(torch.randn(4)) for _ in range(4))
        self.shared, self.between = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Product.apply(x * (self.w + self.delta), self.own)
        between = Product.apply(self.between(self.shared(x)), torch.full((4,), 2.0))
        between.register_hook(lambda grad: grad * 2)
        made: torch.Tensor = self.shared(torch.relu(between)) * self.sum.sum()
        return made


def test_a_divided_backward_adds_the_gradients_of_a_whole_one() -> None:
    torch.manual_seed(0)
    module = Together()
    weights = list(module.parameters())
    batches = [torch.randn(3, 4) for _ in range(3)]
    for x in batches:
        module(x.requires_grad_()).square().sum().backward()
    whole = [x.grad for x in batches] + [weight.grad for weight in weights]
    for x in (*batches, *weights):
        x.grad = None
    divided, undone = [], []
    for x in batches:
        y = module(x).square().sum()
        groups = _backward.divides([y], [x], weights)
        assert groups is not None
        divided += _backward.backward_input([y], None, [x], groups)
        undone.append(groups)
    for groups in undone:
        _backward.backward_weight(groups)
    assert all(torch.equal(a, b) for a, b in zip(whole, divided + [weight.grad for weight in weights], strict=True))


def test_a_part_with_its_own_train_has_it_from_the_first_step_on() -> None:
    class Still(torch.nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Still:
            super().train(False)
            return self

    terms: dict[str, Any] = dict(
        ranks=1, microbatches=2, stages=lambda s: torch.nn.Sequential(torch.nn.Linear(3, 3), Still(3)), loss=torch.nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip
    _, (module,) = train.run_plain("gpipe", [(torch.ones(4, 3), torch.zeros(4, 3))], **terms)
    assert module[1].num_batches_tracked == 0


def test_a_weight_with_a_gradient_by_another_way_than_the_inputs_is_not_divided() -> None:
    x, w = (torch.randn(3, requires_grad=True) for _ in range(2))
    twice = w * 2
    for also in (w.sum(), twice, w):
        assert _backward.divides([x * twice, also], [x], [w]) is None
    assert _backward.divides([x * twice], [x], [w]) is not None
    # A weight of another stage would get no gradient.
    assert _backward.divides([x * twice], [x], []) is None


def test_a_loss_that_is_not_finite_is_named_and_nothing_moves(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
class Two(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.own, self.norm, self.number = nn.Linear(3, 3), nn.BatchNorm1d(3), number
        self.register_buffer("mean", torch.zeros(3))
    def forward(self, x):
        self.mean = self.mean + x.detach().mean(0)
        made = x + 0 * self.norm(self.own(x))
        return torch.where(made > 50, float("inf"), made) if self.number else made

if __name__ == "__main__":
    with trainer(stages=Two) as own:
        own.step(batch())
        before = {k: {n: t.clone() for n, t in m.state_dict().items()} for k, m in own.modules.items()}
        bad = torch.ones(4, 3)
        bad[2] = 1e6
        try:
            own.step((bad, torch.zeros(4, 3)))
        except train.NotFiniteError as raised:
            same = all(torch.equal(t, before[k][n]) for k, m in own.modules.items() for n, t in m.state_dict().items())
            print((raised.stage, raised.rank, raised.microbatch, raised.tensor), same)
        own.step(batch())
"""
    )
    assert code == 0, error
    assert (out + error).count("(1, 1, 1, 'loss') True") == 2, (out, error)


class Embeds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.words(x))


class Predicts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.own(x)))


def words_of(stage: int, local: str) -> str:
    return "words" if local in ("words.weight", "head.weight") else f"{stage}.{local}"


@pytest.mark.parametrize("is_shared", [False, True])
def test_tied_weights_train_as_one_parameter(is_shared: bool) -> None:
    torch.manual_seed(0)
    one = torch.nn.Sequential(Embeds(), torch.nn.Linear(4, 4), Predicts())
    parts = copy.deepcopy(list(one))
    one[2].head.weight = one[0].words.weight
    if is_shared:
        # As a program has it that ties them by itself.
        parts[2].head.weight = parts[0].words.weight
    data = [(torch.randint(0, 6, (8,)), torch.randint(0, 6, (8,))) for _ in range(5)]
    cross_entropy = torch.nn.functional.cross_entropy
    losses, model = train.run_plain(
        "gpipe", data, ranks=3, microbatches=4, stages=lambda s: parts[s], loss=cross_entropy, clip=0.3,
        optimizer=lambda p: torch.optim.AdamW(p, 0.05), names=words_of,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(one.parameters(), 0.05)
    for (inputs, targets), loss in zip(data, losses, strict=True):
        optimizer.zero_grad()
        wanted = cross_entropy(one(inputs), targets)
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.3)
        optimizer.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-6)
    assert model[2].head.weight is not model[0].words.weight and torch.equal(model[2].head.weight, model[0].words.weight)
    torch.testing.assert_close(model[0].words.weight, one[0].words.weight, rtol=1e-5, atol=1e-6)


def test_a_sum_of_tied_gradients_that_is_not_finite_is_named(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
    def forward(self, x):
        # The gradient of each is finite, and of their sum not; and with large inputs that of each is not.
        return x + self.w * torch.where(x > 5, 3e38, 0.8e38)

if __name__ == "__main__":
    made = dict(stages=lambda s: Huge(), names=lambda stage, local: "both", loss=lambda y, t: y.sum(), reduction="sum")
    with trainer(**made) as own:
        for scale in (1, 9):
            for plain in (False, True):
                bad = torch.full((4, 3), float(scale)), torch.zeros(4, 3)
                try:
                    if plain:
                        made["optimizer"] = lambda p: torch.optim.SGD(p, 0.1)
                        train.run_plain("1f1b", [bad], ranks=2, microbatches=2, **made)
                    else:
                        own.step(bad)
                except train.NotFiniteError as raised:
                    print((raised.stage, raised.microbatch, raised.tensor))
        assert not any(module.w.any() for module in own.modules.values())
"""
    )
    assert code == 0, error
    assert (out + error).count("(1, 1, \"sum of the gradients of tied weight 'both'\")") == 4, (out, error)
    assert (out + error).count("(1, 0, \"gradient of w (tied: 'both')\")") == 4, (out, error)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("own.step(batch()) if k < 2 or rank == 0 else os._exit(3)", "rank 1"),
        ("own.step(batch()) if k < 2 or rank == 0 else 1 / 0", "rank 1.*ZeroDivisionError"),
        ("own.step(batch()) if k < 2 or rank == 1 else 1 / 0", "ZeroDivisionError"),
        ("own.step(batch()) if k < 2 or rank == 0 else None", "loop of rank 1 ended after 2 calls"),
        ("own.step(batch()) if k < 2 or rank == 1 else None", "loop of rank 0 ended after 2 calls"),
        ("own.step(batch()) if k < 2 or rank == 0 else own.evaluate(batch())", "let all ranks run the same loop"),
    ],
)
def test_a_loop_that_dies_or_differs_is_named(film: Film, loop: str, words: str) -> None:
    code, out, error = film.run(
        HEAD
        + f"""
if __name__ == "__main__":
    rank = 1 if "PP_SUPERVISOR_PID" in os.environ else 0
    with trainer() as own:
        for k in range(4):
            {loop}
"""
    )
    assert re.search(words, out + error, re.DOTALL), out + error
    # Where the loop of rank 0 ends first, it waits for the program of rank 1, which does not end well.
    assert code != 0


def test_a_second_trainer_and_an_output_that_changes_are_refused(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
if __name__ == "__main__":
    with trainer() as own:
        own.step(batch())
    try:
        trainer().step(batch())
    except RuntimeError as raised:
        print(raised)
"""
    )
    assert code == 0 and "comes behind another job of the program" in out, (out, error)
    code, out, error = film.run(
        HEAD
        + """
class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x).to(torch.float32 if self.training else torch.float64)

if __name__ == "__main__":
    with trainer(stages=lambda s: Other(3, 3)) as own:
        own.step(batch())
        own.evaluate(batch())
"""
    )
    assert code != 0 and "stage 0 gave (2, 3) torch.float64 as output 0, and (2, 3) torch.float32 before" in error, (out, error)


def test_what_cannot_be_trained_is_refused() -> None:
    good = dict(
        ranks=2, microbatches=4, stages=lambda s: torch.nn.Linear(2, 2), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD
    )
    for schedule, more, words in [
        ("1f1", {}, "schedule '1f1': .*1f1b"),
        ("1f1b", {"reduction": "max"}, "reduction="),
        ("1f1b", {"clip": 0}, "clip="),
        ("zbv", {}, "stages a rank"),
        ("1f1b", {"timeline": "t.svg"}, "timing=True"),
        ("1f1b", {"loss": torch.nn.Linear(2, 2)}, "loss= has weights"),
        ("1f1b", {"stages": torch.nn.ModuleList()}, "stages= is a ModuleList: give a function"),
        ("1f1b", {"optimizer": torch.optim.SGD([torch.ones(1)])}, "optimizer= is a SGD: give a function"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            train.Trainer(schedule, **{**good, **more})  # type: ignore[arg-type]
    for stages, names, words in [
        (lambda s: torch.nn.Linear(2, 2 + s), lambda s, local: local, "'weight' is float32 .2, 2. in stage 0, and float32 .3, 2. in stage 1"),
        (lambda s: torch.nn.Linear(2, 2), lambda s, local: str(s), "two weights of stage 0 the name '0'"),
        (lambda s: torch.nn.Linear(2, 2), lambda s, local: s, "gave 0: it gives the name"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            train.Trainer("1f1b", **{**good, "stages": stages, "names": names}).step((torch.ones(4, 2),) * 2)  # type: ignore[arg-type]
    data, numbers = [(torch.ones(4, 2),) * 2], [(torch.ones(4, dtype=torch.long), torch.ones(4, 2))]
    sgd: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, 0.1)}
    sparse = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 2)
    for wrong, words in [
        ({"optimizer": lambda p: None}, "optimizer gave None for stage 0"),
        ({**sgd, "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau, which asks for a measure"),
        ({"optimizer": lambda p: torch.optim.SGD([*p, torch.ones(1)])}, "optimizer has weights that stage 0 does not train"),
        ({"stages": lambda s: torch.nn.LSTM(2, 2)}, "stage 0 gave tuple with a tuple in it"),
        ({**sgd, "stages": lambda s: sparse[s]}, "gradient of 'stages.0.weight' is sparse"),
        ({"loss": lambda y, t: (y - t).square().mean().detach()}, "with its gradient"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            train.run_plain("1f1b", numbers if "sparse" in words else data, **{**good, **wrong})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="report='missing/r.json': there is no folder 'missing'"):
        train.Trainer("1f1b", report="missing/r.json", **good).step(data[0])  # type: ignore[arg-type]
    same = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="stages 0 and 1 share a Parameter"):
        train.run_plain("1f1b", [], **{**good, "stages": lambda s: same})  # type: ignore[arg-type]
    own = train.Trainer("1f1b", **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 equal microbatches"):
        own.step((torch.ones(6, 2), torch.ones(6, 2)))


def test_modules_that_keep_look_share_or_work_in_place_train_as_in_one_process(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
import types

class Part(nn.Module):
    # One part that all stages of a process share, a table that the first forward makes, a number that each forward changes, a look at
    # a value, and a first layer in place.
    def __init__(self, number):
        super().__init__()
        self.shared, self.own, self.turn = SHARED, nn.Linear(3, 3), nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.tables, self.number, self.count = {}, number, torch.zeros(())
        self.register_buffer("mean", torch.zeros(3))
    def forward(self, x):
        self.count += 1
        if self.number:
            x = nn.functional.relu_(x)
        if self.number == 1 and (x > 1e9).any():
            return x
        table = self.tables.setdefault(x.shape[1], torch.arange(3.0))
        made = torch.tanh(self.shared(x)).float()
        with torch.autocast("cpu", enabled=False):
            # Its backward is of f32, too.
            made = self.own(made)
        return made * (1 + self.count / 100) + (torch.fft.fft(x.float()) * self.turn.conj()).real * table

def made():
    global SHARED
    torch.manual_seed(3)
    SHARED = nn.Linear(3, 3)
    SHARED.forward = types.MethodType(nn.Linear.forward, SHARED)
    return dict(ranks=2, stages_per_rank=2, stages=Part, names=named)

def named(stage, name):
    # Only a checkpoint has names for buffers.
    assert name != "mean"
    return name if "shared" in name else f"{stage}.{name}"

def plain(data):
    return train.run_plain("interleaved-zb", data, microbatches=2, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1),
                           **made())[0]

if __name__ == "__main__":
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.randn(4, 3))] * 4
    mixed = torch.autocast("cpu", torch.bfloat16)
    with mixed:
        wanted = plain(data)
    with trainer("interleaved-zb", **made()) as own:
        for one in data:
            with mixed:
                own.step(one)
    print(own.rank in own.modules, own.losses == wanted, plain(data) != wanted, wanted == sorted(set(wanted), reverse=True) and len(set(wanted)))
"""
    )
    assert code == 0 and (out + error).count("True True True 4") == 2, (out, error)


def test_a_table_that_is_kept_outside_of_a_module_is_refused(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
import functools
table = functools.cache(lambda n: torch.arange(float(n)))

class Cached(nn.Linear):
    def forward(self, x):
        return super().forward(x) * table(3)

if __name__ == "__main__":
    with trainer(ranks=1, stages_per_rank=2, schedule="interleaved", stages=lambda s: Cached(3, 3)) as own:
        own.step(batch())
"""
    )
    assert code != 0 and "stage 0 works with a tensor that it made when it was asked for shapes alone" in error, (out, error)


def test_the_times_of_actions_are_measured_on_request(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
if __name__ == "__main__":
    with trainer("zb-h1", timing=True) as own:
        assert own.times() == {}
        for _ in range(2):
            own.step(batch())
            own.evaluate(batch())
        print({stage: "".join(times) for stage, times in own.times().items()}, own.times()[1]["F"].hex())
    try:
        trainer().times()
    except RuntimeError as raised:
        print(raised)
"""
    )
    assert code == 0, error
    both = re.findall(r"(\{.*\}) (\S+)", out + error)
    assert len(both) == 2 and both[0] == both[1] and both[0][0] == "{0: 'FIW', 1: 'FIW'}", (out, error)
    assert "timing=True" in out


def test_a_stage_of_a_lost_job_does_nothing_in_the_next_one() -> None:
    rank = SimpleNamespace(meeting="lost", working=threading.Lock(), stage=lambda number, device: None, settings=SimpleNamespace(microbatches=2))
    work = type("Forward", (_work.Forward,), {"of": rank})(SimpleNamespace(part=0, parts=1, device="cpu"))
    rank.meeting = "next"
    chunk = SimpleNamespace(index=0)
    for call in (lambda: work.run(chunk, None), lambda: work.later(0)):
        with pytest.raises(RuntimeError, match="the job of this stage was lost"):
            call()


def test_a_job_that_takes_no_batch_any_more_says_why_when_it_has_ended() -> None:
    def refuse(*given: Any) -> bool:
        raise RuntimeError("the job takes no more chunks")

    def finish() -> None:
        raise ValueError("why")

    # It takes nothing any more, and it is not known yet why.
    run = SimpleNamespace(is_over=lambda seconds: False, finish=finish)
    loop = SimpleNamespace(_stream=SimpleNamespace(push=refuse, is_closed=True), _run=run, _pipelines=None)
    loop._goes_on = lambda *given: train.Trainer._goes_on(loop, *given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="why"):
        train.Trainer._push(loop, None)  # type: ignore[arg-type]


def test_events_of_a_gpu_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    now = iter(range(1000))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            made.append(self)

        def record(self, stream: str) -> None:
            assert stream == "of the job"
            self.at = next(now)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return 1e3 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "of the job")
    times, stage = _work.Times(), SimpleNamespace(number=1, device=torch.device("cuda"))
    for step in range(3):
        for microbatch in range(2):
            times.of(stage, "F", microbatch, lambda: None)
        median, *moments = [one for one in times.told(1, 2) if one]
        assert len(made) == 5 and median == 1 and [one - moments[0] for one in moments] == [0, 1, 2, 3], (step, moments)


def test_a_training_is_shown_while_it_runs_and_reported_at_its_end(film: Film, tmp_path: Path) -> None:
    port = free_port()
    code, out, error = film.run(
        HEAD
        + f"""
import json, time, urllib.request
def get(path):
    request = urllib.request.Request("http://127.0.0.1:{port}/" + path, headers={{"Authorization": "Bearer 0123456789abcdef"}})
    return urllib.request.urlopen(request).read().decode()

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

if __name__ == "__main__":
    os.chdir(HERE)
    is_rank_0 = "PP_SUPERVISOR_PID" not in os.environ
    if is_rank_0:
        open("token", "w").write("0123456789abcdef")
        os.chmod("token", 0o600)
    with trainer("interleaved-zb", stages_per_rank=2, stages=lambda s: Slow(3, 3), timing=True, report="r.json", timeline="t.svg",
                 live="127.0.0.1:{port}", live_token_file="token") as own:
        losses = [own.step(batch()) for _ in range(3)]
        if is_rank_0:
            print(json.dumps([losses[-1], json.loads(get("snapshot.json"))["training"], get("metrics")]))
"""
    )
    assert code == 0, error
    loss, seen, metrics = json.loads(out.splitlines()[0])
    assert (seen["schedule"], seen["steps"], seen["loss"]) == ("interleaved-zb", 3, loss) and 0 < seen["bubble"] < 1
    assert f"pp_training_bubble_ratio {seen['bubble']}" in metrics
    training = json.loads((tmp_path / "r.json").read_text())["measures"]["training"]
    stages = training["stages"]
    assert [(one["stage"], one["rank"]) for one in stages] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert all(one["forward_ms"] > 19 and one["input_ms"] is not None and one["backward_ms"] is None for one in stages)
    # A microbatch goes forward through four stages.
    assert min(training["step_ms"], training["step_simulated_ms"]) > 80 and 0 < training["bubble_simulated"] < 1
    cause = training["cause"]
    assert cause["rank"] == int(cause["action"][0]) % 2 and cause["began_late_ms"] + cause["took_longer_ms"] > 0
    picture = (tmp_path / "t.svg").read_text()
    assert picture.count("<title>3F1, ") == 2 and ">measured" in picture and ">simulated" in picture


def test_the_example_learns(tmp_path: Path) -> None:
    # From end to end: the trained parts of both ranks come together, and say what they gain.
    def run(*more: str) -> str:
        command = [sys.executable, str(EXAMPLES / "train_denoiser.py"), "--steps", "200", "--weights", str(tmp_path), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PP_FLIGHT_OPS": "0"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    out = run()
    losses = [float(loss) for loss in re.findall(r"loss (\S+), \d+ patches/s, idle \d+%, \d+ MB", out)]
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0], out
    gains = re.findall(r"\S+ dB with noise.*", out)
    assert len(gains) == 2 and all(float(gain.split()[-2]) > 0 for gain in gains), out
    assert (tmp_path / "losses.svg").read_text().count(",") == 200
    # From the middle, and from the end: the same network.
    shutil.rmtree(tmp_path / "step-200")
    again, only_read = run("--resume"), run("--resume")
    assert "step 110:" in again and "step 100:" not in again and "step" not in only_read, again + only_read
    assert [re.findall(r"\S+ dB with noise.*", text) for text in (again, only_read)] == [gains] * 2, again + only_read
