"""What travels between the stages of a model: names, shapes and types.

A tensor that needs a gradient is called `g0`, `g1` and so on by its place among the inputs of a stage, one that needs none `x0`,
`x1`, and a target `t0`. A gradient is called `d0`. The exchange at the end of a step has `numbers`, which `numbers_in` divides, and
`finding`; and where weights are tied `ties`, the table of them, and a flat tensor of each type, such as `tied.float32`.
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .._stages import Spec

Specs = dict[str, Spec]
Tensors = tuple[torch.Tensor, ...]
# Most bytes of what is told of a tensor that is not finite: a character of its name takes up to 12.
FINDING = 2560
# The kinds of actions, in the order in which their times travel.
OPS = "FIWB"
# Where a module may keep tensors, apart from its attributes.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@functools.cache
def inputs_in(names: tuple[str, ...]) -> list[str]:
    """The names of a stage's inputs among these, by their places."""
    return _by_place(names, "gx")


@functools.cache
def targets_in(names: tuple[str, ...]) -> list[str]:
    """The names of the targets among these."""
    return _by_place(names, "t")


def _by_place(names: tuple[str, ...], letters: str) -> list[str]:
    return sorted((name for name in names if name[0] in letters), key=lambda name: int(name[1:]))


def is_exchange(names: Any) -> bool:
    """Says whether these are the tensors of an exchange."""
    return "numbers" in names


def exchange_specs(stages: int, microbatches: int, timing: bool) -> Specs:
    """The tensors of an exchange, without tied weights."""
    # The median of each kind of actions, and start and end of F, of I or B, and of W of each microbatch.
    times = len(OPS) + 6 * microbatches if timing else 0
    count = 1 + stages + microbatches + stages * times
    return {"numbers": Spec((count,), torch.float64), "finding": Spec((FINDING,), torch.uint8)}


def numbers_in(numbers: torch.Tensor, stages: int, microbatches: int) -> Tensors:
    """Views of the mode, of the sum of squares of each stage, of the loss of each microbatch, and of the times of each stage, which have
    no elements where they are not measured.
    """
    times = (numbers.numel() - 1 - stages - microbatches) // stages
    mode, squares, losses, flat = numbers.split([1, stages, microbatches, stages * times])
    return mode, squares, losses, flat.view(stages, times)


def encoded(value: Any, least: int = 0) -> torch.Tensor:
    """A value as JSON in a tensor of so many bytes, or more."""
    return torch.frombuffer(bytearray(json.dumps(value).encode().ljust(least, b"\0")), dtype=torch.uint8)


def decoded(tensor: torch.Tensor) -> Any:
    """The value in such a tensor; None if nothing was put there."""
    text = bytes(tensor.tolist()).rstrip(b"\0")
    return json.loads(text) if text else None


def dtype_of(spec: Spec) -> torch.dtype:
    """The type of a tensor, as PyTorch has it."""
    dtype: torch.dtype = getattr(torch, spec.dtype) if isinstance(spec.dtype, str) else spec.dtype
    return dtype


def tensors_in(given: Any, says: str, remedy: str) -> Tensors:
    """A tensor, or several, as a tuple."""
    if isinstance(given, torch.Tensor):
        return (given,)
    tensors = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            within = f" with a {type(tensor).__name__} in it" if isinstance(given, (tuple, list)) else ""
            raise TypeError(f"{says} {type(given).__name__}{within}: {remedy} a tensor, or a tuple of tensors")
    return tensors


def outputs_in(made: Any, number: int) -> Tensors:
    """What a stage has made."""
    return tensors_in(made, f"stage {number} gave", "a stage gives")


def learn_first() -> None:
    """Called by a thread that lives on: in a PyTorch for CUDA that finds no GPU (2.11), others crash in `outputs_of` once the first
    thread there has ended.
    """
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        with FakeTensorMode():
            pass


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Gives a module back behind a `with` what its parts had, so that a table which the first forward makes is made again. Within it the
    parts have copies of their tensors, apart from weights and buffers.
    """
    kept: dict[int, tuple[Any, Any]] = {}
    waiting: list[Any] = [vars(part) for part in module.modules()]
    of_modules = {id(own) for part in module.modules() for own in (part._parameters, part._buffers)}
    while waiting:
        one = waiting.pop()
        if id(one) in kept:
            continue
        kept[id(one)] = one, one.copy()
        for at, inner in () if isinstance(one, set) else list(one.items() if isinstance(one, dict) else enumerate(one)):
            if type(inner) in _CONTAINERS:
                waiting.append(inner)
            elif isinstance(inner, torch.Tensor) and id(one) not in of_modules:
                one[at] = inner.detach().clone()
    try:
        yield
    finally:
        for one, was in kept.values():
            one.clear()
            one.extend(was) if isinstance(one, list) else one.update(was)


def outputs_of(number: int, module: torch.nn.Module, specs: Mapping[str, Spec]) -> Specs:
    """The outputs of a stage for inputs like these. Nothing is computed, unless the forward needs values: then it has zeros."""
    try:
        return _outputs_of(number, module, specs, FakeTensorMode(allow_non_fake_inputs=True))
    except Exception:
        return _outputs_of(number, module, specs, None)


def _outputs_of(number: int, module: torch.nn.Module, specs: Mapping[str, Spec], mode: FakeTensorMode | None) -> Specs:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    device = next((one.device for one in own.values()), None)
    gpus = [device] if device is not None and device.type == "cuda" else []
    with _unchanged(module), torch.random.fork_rng(gpus), mode or nullcontext():
        copied = mode.from_tensor if mode is not None else lambda one: one.detach().clone().requires_grad_(one.requires_grad)
        state = {name: copied(tensor) for name, tensor in own.items()}
        inputs = [
            torch.zeros(specs[name].shape, dtype=dtype_of(specs[name]), requires_grad=name[0] == "g", device=device)
            for name in inputs_in(tuple(specs))
        ]
        try:
            with torch.enable_grad():
                # No leaves, so that the module may work in place.
                made = torch.func.functional_call(
                    module if device is not None else module.cpu(), state, tuple(one.clone() for one in inputs)
                )
        except Exception as error:
            shapes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in inputs)
            raise ValueError(f"stage {number} cannot work on inputs of {shapes}: {type(error).__name__}: {error}") from error
        finally:
            # What autocast has kept of a weight is none of it.
            torch.clear_autocast_cache()
        rows = enumerate(outputs_in(made, number))
        return {f"{'g' if one.requires_grad else 'x'}{at}": Spec(tuple(one.shape), one.dtype) for at, one in rows}
