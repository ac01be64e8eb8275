"""Checkpoints: folders that are whole or not there, which any split of the same model reads by the names of its weights.

`step-K` has of each stage `stage-S.safetensors`, its weights and buffers, and of a stage that learns `stage-S.optimizer.safetensors`,
the tensors of its optimizer as `NAME/KEY`, with the rest of optimizer and scheduler in `stage-S.optimizer.pt`. The index is that of
Hugging Face, and has step, seed and losses. While the ranks write, the folder is called `step-K.part`.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import math
import os
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import torch

from .._job import placed_at
from ._meeting import Verdict
from ._stage import ModelStage

_INDEX = "model.safetensors.index.json"
# What rank 0 tells ranks that it starts again.
_TOLD = "restart.json"


class Checkpoints:
    """The checkpoints of a job, in a folder that all its ranks see.

    `last` is the step of the last whole one that is this job's, and `begun` the step at which the job began. A rank that was started
    again has in `recorded` what the calls of its loop gave before that checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int, resume: bool, seed: int) -> None:
        check_safetensors()
        self.folder, self.every, self._seed = Path(folder), every, seed
        self.recorded: deque[tuple[str, Verdict]] = deque()
        placed = placed_at()
        told = None
        if placed is None or placed[0] == 0:
            self._clear(resume)
        elif "PP_SUPERVISOR_PID" in os.environ:
            told = self._told()
        if told is not None:
            self.last, self.begun = told["step"], told["begun"]
            self.recorded.extend((mode, Verdict(loss, norm, finding, {}, [])) for mode, loss, norm, finding in told["calls"])
        else:
            self.last = max(self._steps(), default=None) if resume else None
            self.begun = self.last or 0
        self.losses: list[float] = self._read(self.last) if self.last is not None else []
        del self.losses[self.begun :]

    def _clear(self, resume: bool) -> None:
        """Rank 0 removes what an earlier job left unfinished."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"checkpoint={os.fspath(self.folder)!r} is a file: give a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._steps() and not resume:
            raise ValueError(
                f"checkpoint={os.fspath(self.folder)!r} has a checkpoint of step {max(self._steps())}: give resume=True to go on from "
                "there, or another folder"
            )
        for left in self.folder.glob("step-*.part"):
            shutil.rmtree(left)
        self.forget()

    def _steps(self) -> list[int]:
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return [int(name) for name in names if name.isdecimal()]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _part(self, step: int) -> Path:
        return self.folder / f"step-{step}.part"

    def _read(self, step: int) -> list[float]:
        """The losses of all steps before a checkpoint."""
        about = json.loads((self._path(step) / _INDEX).read_text())["metadata"]
        if about["seed"] != self._seed:
            raise ValueError(
                f"{self._path(step)} was trained with seed={about['seed']}, and this trainer has seed={self._seed}: give the same one, "
                "or take its weights alone with load_weights"
            )
        # A loss that was not finite is none in JSON.
        return [math.nan if loss is None else loss for loss in about["losses"]]

    # A checkpoint is made.

    def begin(self, step: int) -> None:
        """Rank 0 makes the folder into which all ranks write."""
        if self._part(step).exists():
            shutil.rmtree(self._part(step))
        self._part(step).mkdir()

    def write(self, stage: ModelStage, step: int) -> None:
        """A rank writes a stage. It is stored once this returns."""
        part = self._part(step)
        if not part.is_dir():
            raise FileNotFoundError(f"{part}, which rank 0 has made, is not seen here: give checkpoint= a folder that all ranks share")
        try:
            _write(part, stage)
        except Exception as error:
            whole = "no checkpoint is whole yet" if self.last is None else f"{self._path(self.last)} is the last whole checkpoint"
            raise OSError(f"stage {stage.number} cannot be written into {part}: {error}; {whole}") from error

    def commit(self, step: int, stages: int, losses: list[float]) -> None:
        """Rank 0 gives the folder its name. All ranks have written."""
        part = self._part(step)
        weights: dict[str, str] = {}
        size = 0
        for number in range(stages):
            file = part / f"stage-{number}.safetensors"
            for name, about in _header(file).items():
                if name in weights:
                    raise OSError(f"{weights[name]} and {file.name} both have {name!r}: let names= give each buffer a name of its own")
                weights[name] = file.name
                size += about["data_offsets"][1] - about["data_offsets"][0]
        told = [loss if math.isfinite(loss) else None for loss in losses]
        about = {"total_size": size, "step": step, "seed": self._seed, "losses": told}
        (part / _INDEX).write_text(json.dumps({"metadata": about, "weight_map": weights}))
        _store(part / _INDEX)
        _store(part)
        part.rename(self._path(step))
        _store(self.folder)
        self.last = step

    # A checkpoint is read.

    def load(self, stage: ModelStage) -> None:
        """Makes a stage what it was at the last checkpoint."""
        assert self.last is not None
        load_weights(stage, self._path(self.last))
        if stage.optimizer is not None:
            _load_optimizer(stage, places_of(self._path(self.last)))

    # A rank is started again.

    def tell(self, results: list[tuple[str, Verdict]]) -> None:
        """Rank 0 tells ranks that it starts again what their loops are to know of the calls before the last checkpoint."""
        calls = [(mode, one.loss, one.norm, one.finding) for mode, one in results]
        about = {"supervisor": os.getpid(), "step": self.last, "begun": self.begun, "calls": calls}
        (self.folder / _TOLD).write_text(json.dumps(about))

    def _told(self) -> dict[str, Any] | None:
        try:
            about: dict[str, Any] = json.loads((self.folder / _TOLD).read_text())
        except FileNotFoundError:
            return None
        # Another one was left by a program that died.
        return about if str(about["supervisor"]) == os.environ["PP_SUPERVISOR_PID"] else None

    def forget(self) -> None:
        """No rank is started again from here on."""
        (self.folder / _TOLD).unlink(missing_ok=True)


def check_safetensors() -> None:
    """Raises where the package is missing."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("checkpoints take the package safetensors, and it is not installed: pip install pp-pipeline[train]")


def places_of(path: Path) -> dict[str, Path]:
    """Of each tensor of a checkpoint, of a folder of Hugging Face or of one file, the file that has it."""
    if path.is_file():
        return {name: path for name in _header(path)}
    if (path / _INDEX).exists():
        weights = json.loads((path / _INDEX).read_text())["weight_map"]
        return {name: path / file for name, file in weights.items()}
    if (path / "model.safetensors").exists():
        return places_of(path / "model.safetensors")
    raise FileNotFoundError(f"{path} is neither a .safetensors file nor a folder with {_INDEX} or model.safetensors")


def load_weights(stage: ModelStage, path: Path) -> None:
    """Copies weights and buffers into a stage, by their names."""
    places, opened = places_of(path), functools.cache(_opened)
    kept = stage.module.state_dict().keys()
    for name, local, tensor in _named(stage):
        if name not in places:
            # A buffer that the module itself would not store.
            if local not in kept:
                continue
            raise ValueError(f"{path} has no tensor {name!r}, which is {local!r} of stage {stage.number}: let names= give what it has")
        found = opened(places[name]).get_tensor(name)
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{name!r} in {path} is {tuple(found.shape)} {found.dtype}, and {local!r} of stage {stage.number} is "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
        with torch.no_grad():
            tensor.copy_(found)


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, "pt")


def _named(stage: ModelStage) -> list[tuple[str, str, torch.Tensor]]:
    """Weights and buffers of a stage: their names in the model, and in the stage."""
    own = [*stage.module.named_parameters(), *stage.module.named_buffers()]
    return [(stage.name(local), local, tensor) for local, tensor in own]


def _write(part: Path, stage: ModelStage) -> None:
    base = part / f"stage-{stage.number}"
    # The first stage that has a weight writes it.
    names = {tensor: name for name, _, tensor in _named(stage) if stage.owns(name)}
    if len(set(names.values())) < len(names):
        raise ValueError("two buffers have one name: let names= give each its own")
    _save(Path(f"{base}.safetensors"), {name: tensor for tensor, name in names.items()})
    if stage.optimizer is None:
        return
    groups = stage.optimizer.param_groups
    group_of = {names[p]: number for number, group in enumerate(groups) for p in group["params"] if p in names}
    state = {name: stage.optimizer.state.get(p, {}) for p, name in names.items() if name in group_of}
    about: dict[str, Any] = {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "group_of": group_of,
        # Of each weight the tensors that the optimizer keeps, and what else it keeps.
        "keys": {name: [key for key in of if isinstance(of[key], torch.Tensor)] for name, of in state.items()},
        "rest": {name: {key: one for key, one in of.items() if not isinstance(one, torch.Tensor)} for name, of in state.items()},
        "scheduler": stage.scheduler.state_dict() if stage.scheduler is not None else None,
    }
    tensors = {f"{name}/{key}": state[name][key] for name, keys in about["keys"].items() for key in keys}
    _save(Path(f"{base}.optimizer.safetensors"), tensors)
    written = io.BytesIO()
    torch.save(about, written)
    Path(f"{base}.optimizer.pt").write_bytes(written.getvalue())
    _store(Path(f"{base}.optimizer.pt"))


def _load_optimizer(stage: ModelStage, places: dict[str, Path]) -> None:
    """Reads what the optimizers had that learned these weights."""
    assert stage.optimizer is not None
    names = {tensor: name for name, _, tensor in _named(stage)}
    opened = functools.cache(_opened)
    about_of = functools.cache(lambda path: torch.load(path, weights_only=True) if path.exists() else {"keys": {}})
    state: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    scheduler = None
    for group in stage.optimizer.param_groups:
        options = []
        for p in group["params"]:
            base = places[names[p]].with_suffix("")
            about = about_of(Path(f"{base}.optimizer.pt"))
            if names[p] not in about["keys"]:
                raise ValueError(f"{base.parent} has no optimizer of {names[p]!r}: it was not trained there")
            options.append(about["groups"][about["group_of"][names[p]]])
            if repr(options[-1]) != repr(options[0]):
                raise ValueError(f"{names[p]!r} had other options of the optimizer in {base.parent} than others of its group have")
            file = opened(Path(f"{base}.optimizer.safetensors"))
            tensors = {key: file.get_tensor(f"{names[p]}/{key}").clone() for key in about["keys"][names[p]]}
            state.append({**tensors, **about["rest"][names[p]]})
            scheduler = scheduler or about["scheduler"]
        groups.append({**(options[0] if options else group), "params": list(range(len(state) - len(options), len(state)))})
    stage.optimizer.load_state_dict({"state": {number: one for number, one in enumerate(state) if one}, "param_groups": groups})
    if stage.scheduler is not None and scheduler is None:
        raise ValueError("the checkpoint has no state of a scheduler: it was trained without scheduler=")
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(scheduler)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    # A view of a larger tensor is written alone.
    whole = {name: one.detach().contiguous() for name, one in tensors.items()}
    save_file({name: one if one.nbytes == one.untyped_storage().nbytes() else one.clone() for name, one in whole.items()}, path)
    _store(path)


def _header(path: Path) -> dict[str, Any]:
    """Type, shape and place of each tensor of a file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.path.getsize(path):
            raise ValueError(f"{path} is no file of safetensors")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def _store(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
