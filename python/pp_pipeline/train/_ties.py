"""Weights that several stages share: which they are, and how their gradients become one.

Each stage that has such a weight holds a copy. Copies begin alike, and each optimizer steps with the same sum of gradients, so
they stay alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from .._stages import Spec

# Shape, type and whether it learns.
Form = tuple[list[int], str, bool]


@dataclass(frozen=True)
class Tied:
    """A weight that several stages hold. In the flat tensor of its type its elements begin at `at`, and behind them it is counted
    how many gradients were added.
    """

    name: str
    shape: list[int]
    dtype: str
    stages: list[int]
    at: int

    def of(self, sums: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Its elements and its count among the flat tensors."""
        flat, end = sums[f"tied.{self.dtype}"], self.at + math.prod(self.shape)
        return flat[self.at : end].view(self.shape), flat[end]


def weights_of(number: int, module: torch.nn.Module, names: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of a stage by their names in the whole model."""
    found: dict[str, torch.nn.Parameter] = {}
    for local, weight in module.named_parameters():
        name = names(number, local)
        if not isinstance(name, str):
            raise TypeError(f"names({number}, {local!r}) gave {name!r}: it gives the name of a weight in the whole model, a str")
        if name in found:
            raise ValueError(
                f"names gives two weights of stage {number} the name {name!r}: give each its own, or let the module have one Parameter "
                "in both places"
            )
        found[name] = weight
    return found


def forms_of(weights: Mapping[str, torch.nn.Parameter]) -> dict[str, Form]:
    """What the weights of a stage look like."""
    return {name: (list(one.shape), str(one.dtype).removeprefix("torch."), one.requires_grad) for name, one in weights.items()}


def ties_among(stages: Sequence[Mapping[str, Form]]) -> list[Tied]:
    """The weights to which several stages give one name."""
    holders: dict[str, list[int]] = {}
    for number, forms in enumerate(stages):
        for name in forms:
            holders.setdefault(name, []).append(number)
    made: list[Tied] = []
    for name, numbers in holders.items():
        shape, dtype, learns = form = stages[numbers[0]][name]
        for other in numbers[1:]:
            if stages[other][name] != form:
                raise ValueError(
                    f"weight {name!r} is {_said(form)} in stage {numbers[0]}, and {_said(stages[other][name])} in stage {other}: "
                    "weights of one name are alike; give them two names, or make them alike"
                )
        if len(numbers) > 1:
            at = sum(math.prod(one.shape) + 1 for one in made if one.dtype == dtype)
            made.append(Tied(name, shape, dtype, numbers, at))
    return made


def _said(form: Form) -> str:
    shape, dtype, learns = form
    return f"{dtype} {tuple(shape)}{'' if learns else ' without a gradient'}"


def sums_specs(ties: Sequence[Tied]) -> dict[str, Spec]:
    """The flat tensors, one of each type."""
    ends = {one.dtype: one.at + math.prod(one.shape) + 1 for one in ties}
    return {f"tied.{dtype}": Spec((end,), dtype) for dtype, end in ends.items()}


def set_apart(
    number: int, module: torch.nn.Module, names: Any, others: Mapping[int, Mapping[str, torch.nn.Parameter]], taken: Set[torch.nn.Module]
) -> torch.nn.Module:
    """Gives a module a copy of each weight that another stage of this process has, too, and of each part of it that is `taken`: a part
    that another stage has.
    """
    owners = {id(weight): (other, name) for other, weights in others.items() for name, weight in weights.items()}
    copies: dict[int, torch.nn.Parameter] = {}
    for name, weight in weights_of(number, module, names).items():
        if id(weight) not in owners or not weight.requires_grad:
            continue
        other, known = owners[id(weight)]
        if known != name:
            raise ValueError(
                f"stages {other} and {number} share a Parameter, and it is called {known!r} in the one and {name!r} in the other: let "
                "names= give both one name"
            )
        copies[id(weight)] = torch.nn.Parameter(weight.detach().clone())
    if copies:
        try:
            module = _parts_apart(module, taken, {})
        except Exception as error:
            raise ValueError(
                f"stage {number} has a module of another stage of its process, which cannot be copied ({type(error).__name__}: {error}): "
                "give each stage a module of its own, and their weights one name with names="
            ) from error
    for part in module.modules():
        for local, weight in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(weight) in copies:
                setattr(part, local, copies[id(weight)])
    return module


def _parts_apart(part: torch.nn.Module, taken: Set[torch.nn.Module], made: dict[Any, Any]) -> torch.nn.Module:
    """The part, or a copy of it with the same tensors if it is taken; and so of the parts in it."""
    if part in taken:
        for one in part.modules():
            tensors = (*one.parameters(False), *one.buffers(False), *vars(one).values())
            made.update((id(tensor), tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
        return copy.deepcopy(part, made)
    for name, inner in part._modules.items():
        if inner is not None:
            part._modules[name] = _parts_apart(inner, taken, made)
    return part
