"""Training over schedules: the same bits as in one process, and what ends a job."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import EXAMPLES, Film, free_port, needs

torch = needs("torch")

from pp_pipeline import train  # noqa: E402

CELLS = Path(__file__).with_name("train_cells.py")
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


def cells(ranks: int, *arguments: int | str) -> list[str]:
    """The lines of all ranks of a run of cells."""
    world = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PP_JOB_SECRET": "0123456789abcdef" * 2,
        "PP_FLIGHT_OPS": "0",
    }  # fmt: skip
    command = [sys.executable, str(CELLS), str(ranks), *map(str, arguments)]
    started = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(ranks)
    ]  # fmt: skip
    said = [one.communicate(timeout=600)[0] for one in started]
    assert all(one.returncode == 0 for one in started), "\n".join(said)
    # On a machine with much other work a rank says that it waits.
    return [line for line in "".join(said).splitlines() if not line.startswith("pp: ")]


@pytest.mark.parametrize(("ranks", "sizes", "count"), [(2, (2, 3), 32), (4, (1, 4), 25)])
def test_every_schedule_gives_the_bits_of_one_process(ranks: int, sizes: tuple[int, int], count: int) -> None:
    lines = cells(ranks, *sizes, 3)
    assert lines == [f"{count} cells, 0 wrong"] * ranks


@pytest.mark.parametrize("mistake", ["twice", "other-weight", "other-slot", "left-out", "first", "own-gradient", "other-values"])
def test_a_mistake_is_found(mistake: str) -> None:
    lines = cells(2, 1, 4, 2, mistake)
    assert any("losses" in line or "gradients or weights" in line for line in lines), lines


def test_a_loss_that_is_not_finite_is_named_and_nothing_moves(film: Film) -> None:
    code, out, error = film.run(
        HEAD
        + """
class Two(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.own, self.norm, self.number = nn.Linear(3, 3), nn.BatchNorm1d(3), number
    def forward(self, x):
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
        ("own.step(batch()) if k < 2 or rank == 1 else None", "loop of rank 0 has ended"),
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
    # Rank 0 has done all that it came for where its loop ends first.
    assert (code != 0) == (words != "loop of rank 0 has ended")


def test_what_cannot_be_trained_is_refused() -> None:
    good = dict(
        ranks=2, microbatches=4, stages=lambda s: torch.nn.Linear(2, 2), loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD
    )
    for schedule, more, words in [
        ("1f1", {}, "1f1b"),
        ("1f1b", {"reduction": "max"}, "reduction="),
        ("1f1b", {"clip": 0}, "clip="),
        ("zbv", {}, "stages a rank"),
    ]:
        with pytest.raises(ValueError, match=words):
            train.Trainer(schedule, **{**good, **more})  # type: ignore[arg-type]
    for stages, names, words in [
        (lambda s: torch.nn.Linear(2, 2 + s), lambda s, local: local, "'weight' is float32 .2, 2. in stage 0, and float32 .3, 2. in stage 1"),
        (lambda s: torch.nn.Linear(2, 2), lambda s, local: str(s), "two weights of stage 0 the name '0'"),
        (lambda s: torch.nn.Linear(2, 2), lambda s, local: s, "gave 0: it gives the name"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            train.Trainer("1f1b", **{**good, "stages": stages, "names": names}).step((torch.ones(4, 2),) * 2)  # type: ignore[arg-type]
    same = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="stages 0 and 1 share a Parameter"):
        train.run_plain("1f1b", [], **{**good, "stages": lambda s: same})  # type: ignore[arg-type]
    own = train.Trainer("1f1b", **good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 equal microbatches"):
        own.step((torch.ones(6, 2), torch.ones(6, 2)))


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


def test_the_example_learns(tmp_path: Path) -> None:
    # From end to end: the trained parts of both ranks come together, and say what they gain.
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_denoiser.py", "--steps", "200", "--weights", tmp_path],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PP_FLIGHT_OPS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", done.stdout)]
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0], done.stdout
    gains = re.findall(r"(\S+) dB with noise, (\S+) dB denoised", done.stdout)
    assert len(gains) == 2 and all(float(after) > float(before) for before, after in gains), done.stdout
