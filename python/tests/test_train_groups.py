"""Several pipelines of one launcher's world: they train as one, and a pipeline that is lost is named at all others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import free_port, needs

torch = needs("torch")

import torch.distributed as dist  # noqa: E402

from pp_pipeline import train  # noqa: E402

HEAD = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from pp_pipeline import train

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
mine, place = divmod(rank, 2)

def trainer(schedule="1f1b", **more):
    return train.Trainer(schedule, **{**dict(ranks=2, microbatches=2, stages=lambda s: nn.Linear(3, 3), loss=nn.functional.mse_loss,
                         optimizer=lambda p: torch.optim.SGD(p, 0.1), pipeline_of=lambda rank: rank // 2), **more})

def batch(rows=4):
    return torch.ones(rows, 3), torch.zeros(rows, 3)
"""


def world(path: Path, text: str, ranks: int = 4) -> list[tuple[int, str]]:
    """The exit code of each rank, and what it said."""
    (path / "program.py").write_text(HEAD + text)
    port = str(free_port())
    env = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PP_JOB_SECRET": "0123456789abcdef" * 2}
    env.update(PP_FLIGHT_OPS="0")
    started = [
        subprocess.Popen(
            [sys.executable, path / "program.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [one.communicate(timeout=600)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, text) for one, text in zip(started, said, strict=True)]


def test_pipelines_train_as_one(tmp_path: Path) -> None:
    ends = world(
        tmp_path,
        """
class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(6, 4), nn.Dropout(0.2)
        # The weights of the first pipeline count.
        self.words.weight.data += mine
        self.register_buffer("mask", torch.tensor(mine == 0))
    def forward(self, x):
        return self.drop(torch.tanh(self.words(x))) * self.mask

class Predicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.unused = nn.Linear(4, 6, bias=False), nn.Parameter(torch.ones(2))
    def forward(self, x):
        return self.head(x)

def stage(number):
    return [Embeds, lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4), Predicts][number]()

def terms(reduction):
    return dict(ranks=2, stages_per_rank=2, stages=stage, loss=nn.CrossEntropyLoss(reduction=reduction), seed=5,
                clip=0.4 if reduction == "sum" else None, reduction=reduction, names=lambda s, name: "w" if name in ("words.weight", "head.weight") else f"{s}.{name}",
                optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01))

made = torch.Generator().manual_seed(1)
data = [tuple(torch.randint(0, 6, (16,), generator=made) for _ in range(2)) for _ in range(4)]
for schedule, reduction in (("interleaved-zb", "mean"), ("zbv", "sum")):
    with train.Trainer(schedule, microbatches=4, pipeline_of=lambda rank: rank // 2, **terms(reduction)) as own:
        losses = [own.step(tuple(half[8 * mine : 8 * mine + 8] for half in one)) for one in data]
        held = own.evaluate(tuple(half[8 * mine : 8 * mine + 8] for half in data[0]))
        norm, modules = own.norm, own.modules
    mine, was = 0, mine
    wanted, plain = train.run_plain(schedule, data, microbatches=8, **terms(reduction))
    mine = was
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=0)
    for number, module in modules.items():
        for name, weight in module.state_dict().items():
            torch.testing.assert_close(weight, plain[number].state_dict()[name], rtol=1e-5, atol=1e-6)
            print(schedule, number, name, weight.numpy().tobytes().hex()[:400])
    print(schedule, "all", [one.hex() for one in (*losses, held, norm)])
""",
    )
    assert [code for code, _ in ends] == [0] * 4, ends
    said = [[line for line in text.splitlines() if re.match("interleaved-zb|zbv", line)] for _, text in ends]
    assert said[0] == said[2] and said[1] == said[3] and len(said[0] + said[1]) == 2 * (2 + 8), said
    assert said[0][-1] == said[1][-1]


@pytest.mark.parametrize(
    ("loop", "at_others", "at_own"),
    [
        ("step(k) if k < 2 or rank != 3 else os._exit(3)", "pipeline 1 is lost: rank 3 of the world: JobError: .*rank 1", "JobError: .*k 1"),
        ("step(k) if k < 2 or rank != 0 else os._exit(3)", "pipeline 0 is lost: rank 0 of the world: ", "JobError: .*rank 0"),
        ("step(k) if k < 2 or rank != 2 else 1 / 0", "pipeline 1 is lost: rank [23] of the world: .*ZeroDivisionError", "DivisionError"),
        ("step(k) if k < 2 or mine else os._exit(3)", "pipeline 0 is lost: rank [01] of the world: ", ""),
        # None is left that could tell.
        ("mute(k); step(k) if k < 2 or not mine else os._exit(3)", "pipeline 1 is lost: rank [23] of the world: a collective between", ""),
        # The loop of the other rank is not in a step meanwhile.
        ("step(k) if k < 2 or not mine else time.sleep(3) if place == 0 else os._exit(3)", "pipeline 1 is lost: rank 3 of the world: J", ""),
    ],
)  # fmt: skip
def test_a_pipeline_that_is_lost_is_named(tmp_path: Path, loop: str, at_others: str, at_own: str) -> None:
    ends = world(
        tmp_path,
        f"""
with trainer() as own:
    step = lambda k: own.step(batch())
    def mute(k):
        # Of both ranks, before one of them can see the other go.
        if mine and k == 1:
            own._pipelines._tell = lambda **news: None
    for k in range(5):
        {loop}
""",
    )
    lost = 0 if "rank != 0" in loop or "or mine" in loop else 1
    at_others = rf"\n(\[rank\d\]: )?pp_pipeline\S+\.PipelineLostError: {at_others}"
    for rank, (code, text) in enumerate(ends):
        assert code != 0, (rank, text)
        words = at_own if rank // 2 == lost else at_others
        assert code == 3 or re.search(words, text, re.DOTALL), (rank, text)


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ("own.step(batch()) if k < 2 or not mine else None", "loops of pipeline 1 ended after 2 calls"),
        ("own.step(batch()) if k < 2 or not mine else own.evaluate(batch())", "let all pipelines run the same loop"),
        ("own.step(batch())", "train.seed is '1' at rank 2 of the world, and '0' at rank 0"),
    ],
)
def test_pipelines_that_differ_are_refused(tmp_path: Path, loop: str, words: str) -> None:
    ends = world(
        tmp_path,
        f"""
from pathlib import Path
gone = [Path(__file__).with_name(f"gone-{{other}}") for other in range(4)]
try:
    with trainer(seed=mine * {"seed" in words:d}) as own:
        for k in range(4):
            {loop}
finally:
    gone[rank].touch()
    # The store is rank 0's: it goes last.
    until = time.monotonic() + 60
    while rank == 0 and not all(other.exists() for other in gone) and time.monotonic() < until:
        time.sleep(0.01)
""",
    )
    assert all(code != 0 and re.search(words, text) for code, text in ends), ends


def test_a_loss_that_is_not_finite_is_named_in_all_pipelines(tmp_path: Path) -> None:
    ends = world(
        tmp_path,
        """
with trainer() as own:
    own.step(batch())
    before = [p.clone() for module in own.modules.values() for p in module.parameters()]
    bad = torch.ones(4, 3)
    bad[3] = float("inf") if mine else 1.0
    try:
        own.step((bad, torch.zeros(4, 3)))
    except train.NotFiniteError as raised:
        same = all(torch.equal(p, q) for p, q in zip(before, (p for m in own.modules.values() for p in m.parameters())))
        print((raised.pipeline, raised.stage, raised.microbatch, raised.tensor), same)
    own.step(batch())
""",
    )
    assert [text.count("(1, 0, 1, 'input 0') True") for _, text in ends] == [1] * 4, ends
    assert [code for code, _ in ends] == [0] * 4, ends


def test_pipelines_that_cannot_be_are_refused() -> None:
    def step(pipeline_of: object) -> None:
        own = train.Trainer(
            "1f1b", ranks=2, microbatches=2, stages=lambda s: torch.nn.Linear(2, 2), loss=torch.nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, 0.1), pipeline_of=pipeline_of,
        )  # type: ignore[arg-type]  # fmt: skip
        own.step((torch.ones(4, 2), torch.ones(4, 2)))

    with pytest.raises(RuntimeError, match="init_process_group"):
        step(lambda rank: rank)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"pipelines of the ranks \[0\], and the schedule takes 2"):
            step(lambda rank: rank)
    finally:
        dist.destroy_process_group()


def test_pipelines_resume_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ("3", "6"):
        monkeypatch.setenv("STEPS", steps)
        ends = world(
            tmp_path,
            f"""
STEPS = int(os.environ["STEPS"])
terms = dict(optimizer=lambda p: torch.optim.AdamW(p, 0.1))

def data(*pipelines):
    for step in range(STEPS):
        made = []
        for pipeline in pipelines:
            torch.manual_seed(2 * step + pipeline)
            made.append(torch.rand(2, 4, 3))
        yield torch.cat(made, 1)

own = trainer(checkpoint={str(tmp_path / "points")!r}, every=2, resume=True, **terms)
with own:
    for batch in own.batches(data(mine)):
        own.step(tuple(batch))
    whole = (tuple(batch) for batch in data(0, 1))
    losses, modules = train.run_plain("1f1b", whole, ranks=2, microbatches=4, stages=lambda s: nn.Linear(3, 3), loss=nn.functional.mse_loss, **terms)
    print("alike", max(abs(a - b) for a, b in zip(losses, own.losses, strict=True)) < 1e-6, len(own.losses))
    torch.testing.assert_close(own.modules[place].weight, modules[place].weight)
""",
        )
        assert [(code, text.splitlines()[-1]) for code, text in ends] == [(0, f"alike True {steps}")] * 4, ends
        assert sorted(path.name for path in (tmp_path / "points").iterdir()) == [f"step-{step}" for step in range(2, int(steps) + 1, 2)]
