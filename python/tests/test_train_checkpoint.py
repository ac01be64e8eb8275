"""Checkpoints of training, and ranks that are started again: the same bits as without a death."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Film, needs

torch = needs("torch")
safetensors = needs("safetensors.torch")

from pp_pipeline import train  # noqa: E402
from pp_pipeline.train import _checkpoint  # noqa: E402

# Trains 9 steps of 4 layers, with evaluations between them, and leaves what a rank ends with in a file. DEATHS says where a rank dies
# once: rank, place, step and how, such as 1:forward:5:kill.
PROGRAM = """
import hashlib, json, torch
from torch import nn
from pp_pipeline import train
from pp_pipeline.train import _checkpoint, _stage

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
E = os.environ.get
RANK = (pp._native.place() or (0,))[0]
RANKS, PER, DROP = int(E("RANKS_", 2)), int(E("PER", 1)), float(E("DROP", 0.3))
LAYERS = 4 // (RANKS * PER)
own = None

def dies(where):
    at = f"{RANK}:{where}:{len(own.losses) if own else 0}:"
    for death in E("DEATHS", "").split():
        if death.startswith(at) and once(death):
            how = death.removeprefix(at)
            if how == "raise":
                raise ZeroDivisionError(death)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

def dying(of, name, where):
    act = getattr(of, name)
    def acts(*args, **more):
        dies(where)
        return act(*args, **more)
    setattr(of, name, acts)

dying(_stage.ModelStage, "forward", "forward")
dying(_stage.ModelStage, "apply", "apply")
dying(_checkpoint, "_store", "save")

class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(DROP))
    def forward(self, x):
        return super().forward(x).float()

def data(steps):
    for k in range(steps):
        torch.manual_seed(k)
        yield torch.rand(8, 4), torch.rand(8, 4)

def layer(stage, local):
    number, _, rest = local.partition(".")
    if "TIED" in os.environ and local == "0.0.weight":
        return "shared"
    return f"layers.{LAYERS * stage + int(number)}.{rest}"

def trainer(**more):
    return train.Trainer(
        E("SCHEDULE", "1f1b"), **{**dict(ranks=RANKS, stages_per_rank=PER, microbatches=2, loss=nn.functional.mse_loss, names=layer,
        stages=lambda s: nn.Sequential(*(Layer() for _ in range(LAYERS))), optimizer=lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
        scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6], 0.5)), **more})

def main(given, skips=True, steps=9):
    global own
    gave = []
    with given as own:
        dies("begin")
        for batch in own.batches(data(steps)) if skips else data(steps):
            dies("loop")
            with torch.autocast("cpu", torch.bfloat16, enabled="TIED" in os.environ and len(own.losses) % 2 == 1):
                gave.append((own.step(batch).hex(), own.norm.hex()))
            if len(own.losses) % 3 == 1:
                gave.append(own.evaluate(batch).hex())
        dies("end")
        own.close()
        state = {}
        for stage, module in own.modules.items():
            state.update((layer(stage, name), hashlib.sha1(t.numpy().tobytes()).hexdigest()) for name, t in module.state_dict().items())
    (HERE / f"end-{RANK}.json").write_text(json.dumps([gave, [loss.hex() for loss in own.losses], state]))
"""
PLAIN = PROGRAM + 'main(trainer())'
# Each forward that was measured has its backward: what a job that was lost had measured is dropped.
PAIRED = """
from pp_pipeline.train import _work

def told(self, *given, known=_work.Times.told):
    ops = [op for _, op, *_ in self._measured]
    assert ops.count("F") == ops.count("B") + ops.count("I"), ops
    return known(self, *given)

_work.Times.told = told
"""
KEEPS = """
main(trainer(checkpoint=HERE / "points", every=2, resume="RESUME" in os.environ, restarts=int(E("LIVES", 0)), timing=True,
             report=str(HERE / "report.json")))
"""
KEPT = PROGRAM + PAIRED + KEEPS


def ends(folder: Path) -> dict[int, Any]:
    """What each rank ended with."""
    return {int(path.stem[4:]): json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))}


def weights(ended: dict[int, Any]) -> dict[str, str]:
    return {name: digest for _, _, state in ended.values() for name, digest in state.items()}


class Without:
    """What runs without a death end with."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, dict[str, Any]()

    def __call__(self, **env: str) -> dict[int, Any]:
        key = repr(env)
        if key not in self._ended:
            for left in self._folder.glob("end-*"):
                left.unlink()
            code, out, error = Film(self._folder).run(PLAIN, **env)
            assert code == 0, error
            self._ended[key] = ends(self._folder)
        found: dict[int, Any] = self._ended[key]
        return found


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Without:
    return Without(tmp_path_factory.mktemp("without"))


@pytest.mark.parametrize(
    ("deaths", "env"),
    [
        # Before there is a checkpoint, in the first one, in a step, in a later one, between two evaluations, and behind all steps.
        ("1:begin:0:kill 1:save:0:kill 1:forward:3:raise 1:save:6:kill 1:loop:8:stop 1:end:9:kill", {}),
        ("1:apply:2:kill 2:apply:2:kill 2:loop:5:raise", {"RANKS_": "4", "SCHEDULE": "zb-h1", "TIED": ""}),
    ],
)
def test_a_rank_is_started_again_to_the_same_bits(film: Film, without: Without, deaths: str, env: dict[str, str]) -> None:
    at = film.path.parent
    code, out, error = film.run(KEPT, DEATHS=deaths, LIVES="6", **env)
    assert code == 0, error
    assert [death for death in deaths.split() if not (at / death).exists()] == []
    assert ends(at) == without(**env), error
    assert sorted(path.name for path in (at / "points").iterdir()) == [f"step-{step}" for step in range(0, 9, 2)]
    if "TIED" in env:
        files = [safetensors.load_file(path) for path in sorted((at / "points/step-8").glob("stage-?.safetensors"))]
        assert ["shared" in file for file in files] == [True, False, False, False]
    report = json.loads((at / "report.json").read_text())
    lost = report["lost"]
    assert report["run"]["restarts"] == len(lost)
    assert error.count("are played again") == len(lost) in (len(deaths.split()), len(deaths.split()) - ("TIED" in env)), error
    assert lost[-1]["rank"] == int(deaths.split()[-1][0]), lost


@pytest.mark.parametrize("where", ["made", "forward"])
def test_a_job_begins_again_behind_the_stage_that_its_driver_was_in(film: Film, without: Without, where: str) -> None:
    # Rank 0 makes its stage, or is in a forward, until it begins again, and longer: if it can, until its stage works again.
    body = """
import threading
from pp_pipeline.train import _settings
came, again, anew = [], threading.Event(), threading.Event()

def begins(self, *given, known=_work.Rank.begins):
    came.append(self)
    if len(came) > 1:
        again.set()
    known(self, *given)

def left_behind(where):
    if RANK == 0 and len(came) == 1 and where == E("WHERE"):
        (HERE / "in").touch()
        assert again.wait(60)
        anew.wait(8 if where == "made" else 0.3)
        (HERE / "back").touch()

def made(self, *given, known=_settings.Settings.made):
    left_behind("made")
    return known(self, *given)

def forward(self, at, *given, known=_stage.ModelStage.forward):
    if at == (3, 1):
        left_behind("forward")
    if len(came) > 1:
        anew.set()
    return known(self, at, *given)

def dies_once():
    while not (HERE / "in").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

_work.Rank.begins, _settings.Settings.made, _stage.ModelStage.forward = begins, made, forward
if RANK == 1 and once("died"):
    threading.Thread(target=dies_once, daemon=True).start()
"""
    keeps = KEEPS.replace("timing=True", "timing=True, stuck_after=0")
    code, _, error = film.run(PROGRAM + PAIRED + body + keeps, WHERE=where, LIVES="1")
    assert code == 0, error
    assert (film.path.parent / "back").exists() and error.count("are played again") == 1, error
    assert ends(film.path.parent) == without(), error


@pytest.mark.parametrize("death", ["0:save:6:kill", "1:apply:3:raise"])
def test_a_job_resumes_from_disk_to_the_same_bits(film: Film, without: Without, death: str) -> None:
    points = film.path.parent / "points"
    code, out, error = film.run(KEPT, DEATHS=death)
    assert code != 0 and (points / "step-6.part").exists() == ("save" in death)
    # It is lost again: the ranks know of two beginnings.
    code, out, error = film.run(KEPT, RESUME="", LIVES="1", DEATHS="1:forward:7:kill")
    assert code == 0, error
    ended = ends(film.path.parent)
    for rank, (gave, losses, state) in without().items():
        assert ended[rank][1:] == [losses, state]
        assert ended[rank][0] == gave[-len(ended[rank][0]) :]
    assert not list(points.glob("*.part"))


def test_another_split_reads_a_checkpoint_and_a_loop_may_skip_nothing(film: Film, without: Without) -> None:
    at, env = film.path.parent, {"DROP": "0"}
    whole = without(**env)
    code, out, error = film.run(KEPT, DEATHS="0:loop:5:kill", **env)
    assert code != 0
    env.update(PER="2", SCHEDULE="interleaved-1f1b", RESUME="")
    code, out, error = film.run(KEPT, **env)
    assert code == 0, error
    assert ends(at)[0][1] == whole[0][1]
    assert weights(ends(at)) == weights(whole)
    code, out, error = film.run(PROGRAM + 'main(trainer(checkpoint=HERE / "points", every=2, resume=True), skips=False, steps=1)', **env)
    assert code == 0, error
    assert ends(at)[1][1][:8] == whole[0][1][:8] and len(ends(at)[1][1]) == 9 and weights(ends(at)) != weights(whole)


def test_a_rank_that_raises_for_good_ends_the_job_with_its_cause(film: Film) -> None:
    body = 'main(trainer(checkpoint=HERE / "points", every=2, restarts=5, stages=Bad))'
    bad = """
class Bad(nn.Sequential):
    def __init__(self, number):
        super().__init__(*(Layer() for _ in range(LAYERS)))
        self.number = number
    def forward(self, x):
        if self.number and own and len(own.losses) == 3 and self.training:
            raise ZeroDivisionError("for good")
        return super().forward(x)
"""
    code, out, error = film.run(PROGRAM + bad + body)
    assert code != 0
    last = r"StageError: .*: ZeroDivisionError: for good \(.*\), in the forward of stage 1, microbatch 0\n"
    assert error.count("are played again") == 1 and re.search(last, error), error


def test_a_program_that_fails_behind_the_job_is_lost_and_not_for_ever(film: Film) -> None:
    after = "\nif RANK:\n    print('behind', file=sys.stderr, flush=True)\n    sys.exit(3)"
    code, out, error = film.run(KEPT + after, LIVES="5")
    assert code != 0 and "rank 1: end: ended with exit code 3, behind the job" in error.splitlines()[-1], error
    assert error.count("behind\n") == 2 and error.count("are played again") == 1, error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        # Rank 1 may not write a file of more than some bytes behind the first checkpoint.
        (
            """
import resource
def full():
    if RANK and len(own.losses) == 3:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
dies = lambda where: full() if where == "loop" else None
main(trainer(checkpoint=HERE / "points", every=2))
""",
            ["cannot be written into", "File too large", "step-2 is the last whole checkpoint"],
        ),
        ('main(trainer(checkpoint=HERE / f"points{RANK or str()}", every=2))', ["step-2.part, which rank 0 has made", "all ranks share"]),
        ('main(trainer(checkpoint=HERE / "points", every=2 + RANK))', ["train.checkpoint"]),
    ],
)
def test_what_cannot_be_stored_ends_the_job(film: Film, body: str, words: list[str]) -> None:
    code, out, error = film.run(PROGRAM + body)
    assert code != 0
    assert all(word in error for word in words), error
    names = [path.name for path in (film.path.parent / "points").iterdir()]
    assert [name for name in names if not name.endswith(".part")] == (["step-2"] if "last whole" in words[-1] else [])


def terms(**more: Any) -> dict[str, Any]:
    return {
        **dict(ranks=2, microbatches=2, stages=lambda s: torch.nn.Linear(3, 3), loss=torch.nn.functional.mse_loss),
        **dict(optimizer=lambda p: torch.optim.SGD(p, 0.1)),
        **more,
    }  # fmt: skip


def stage_of(own: train.Trainer, number: int) -> Any:
    return own._settings.made(number, torch.device("cpu"), {})


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = train.Trainer("1f1b", **terms(checkpoint=tmp_path, every=1))
    points = own._checkpoints
    assert points is not None
    points.begin(4)
    for number in range(2):
        points.write(stage_of(own, number), 4)
    points.commit(4, 2, [0.5, 0.5, 0.5, math.nan])
    # Of JSON that every reader takes.
    json.loads((tmp_path / "step-4/model.safetensors.index.json").read_text(), parse_constant=pytest.fail)
    (tmp_path / "step-5.part").mkdir()
    for error, more, words in [
        (ValueError, {"checkpoint": tmp_path}, "give a folder and after how many steps"),
        (ValueError, {"checkpoint": tmp_path, "every": 1}, "step 4: give resume=True"),
        (ValueError, {"restarts": 1}, "take a checkpoint"),
        (ValueError, {"checkpoint": tmp_path, "every": 1, "resume": True, "seed": 1}, "seed=0, and this trainer has seed=1"),
    ]:
        with pytest.raises(error, match=words):
            train.Trainer("1f1b", **terms(**more))
    resumed = train.Trainer("1f1b", **terms(checkpoint=tmp_path, every=1, resume=True))
    assert repr(resumed.losses) == "[0.5, 0.5, 0.5, nan]" and list(resumed.batches(range(6))) == [4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    # Over all calls: the first epoch was two batches long.
    again = train.Trainer("1f1b", **terms(checkpoint=tmp_path, every=1, resume=True))
    assert [list(again.batches(range(3))) for _ in range(2)] == [[], [1, 2]]
    for stages, words in [
        (lambda s: torch.nn.Linear(3, 4), r"'stages.0.weight' in .* is \(3, 3\) torch.float32, .* is \(4, 3\)"),
        (lambda s: torch.nn.Linear(3, 3).double(), "torch.float32, .* torch.float64"),
        (lambda s: torch.nn.Sequential(torch.nn.Linear(3, 3)), "no tensor 'stages.0.0.weight', which is '0.weight' of stage 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            resumed._load(stage_of(train.Trainer("1f1b", **terms(stages=stages)), 0))
    norms = terms(stages=lambda s: torch.nn.BatchNorm1d(3), names=lambda s, name: f"{s}.{name}" if name in ("weight", "bias") else name)
    with pytest.raises(ValueError, match="'running_mean' to a buffer of stage 1, and stage 0 has it, too"):
        train.Trainer("1f1b", checkpoint=tmp_path / "names", every=1, **norms).step((torch.ones(4, 3),) * 2)
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "PP_JOB_SECRET": "0123456789abcdef" * 2}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="let the launcher start all ranks again"):
        train.Trainer("1f1b", **terms(checkpoint=tmp_path / "new", every=1, restarts=1))


def test_weights_of_other_files_are_taken(tmp_path: Path) -> None:
    # As Hugging Face writes them: names of the whole model, in one file.
    given = {f"net.{s}.{name}": torch.full((3, 3) if name == "weight" else (3,), s + 0.5) for s in range(2) for name in ("weight", "bias")}
    safetensors.save_file(given, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        own = train.Trainer("1f1b", **terms(names=lambda s, name: f"net.{s}.{name}"))
        own.load_weights(path)
        stage = stage_of(own, 1)
        own._load(stage)
        assert all(torch.equal(p, torch.full_like(p, 1.5)) for p in stage.module.parameters())
    with pytest.raises(FileNotFoundError, match="neither a .safetensors file"):
        own.load_weights(tmp_path / "none")


def test_what_an_optimizer_keeps_comes_back(tmp_path: Path) -> None:
    def stage(lr: float) -> Any:
        more = terms(
            optimizer=lambda p: torch.optim.AdamW([{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:]}], lr, betas=(0.8, 0.9)),
            scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
        )  # fmt: skip
        return stage_of(train.Trainer("1f1b", **more), 0)

    own, points = stage(0.1), _checkpoint.Checkpoints(tmp_path, 1, False, 0)
    for _ in range(2):
        own.module(torch.rand(2, 3)).sum().backward()
        own.apply(1.0)
    points.begin(2)
    points.write(own, 2)
    points.commit(2, 1, [])
    other = stage(0.3)
    points.load(other)
    for name in ("optimizer", "scheduler"):
        torch.testing.assert_close(getattr(other, name).state_dict(), getattr(own, name).state_dict(), rtol=0, atol=0)
    index = json.loads((tmp_path / "step-2/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {f"stages.0.{name}": "stage-0.safetensors" for name in ("weight", "bias")}
    assert index["metadata"]["total_size"] == 48 and os.path.exists(tmp_path / "step-2/stage-0.optimizer.pt")
