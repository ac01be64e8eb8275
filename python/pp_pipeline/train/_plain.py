"""The same training in one process, without ranks: what the bits of a job are compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._settings import Settings, cut, halves
from ._stage import Casts, ModelStage, Randomness, casting, casts_here, loss_of, norm_of
from ._ties import forms_of, sums_specs, ties_among


def run_plain(schedule: str, data: Iterable[Any], *, device: str = "cpu", **settings: Any) -> tuple[list[float], list[torch.nn.Module]]:
    """Trains on all batches. Gives the loss of each step, and the modules of the stages.

    `settings` are the arguments of `Trainer` from `ranks` to `names`. Each backward is whole. The schedule says in which order a stage
    adds its gradients, and nothing else.
    """
    terms = Settings(schedule, **settings)
    at = torch.device(device)
    made: dict[int, ModelStage] = {}
    for number in range(terms.count):
        made[number] = terms.made(number, at, made)
    model = list(made.values())
    ties = ties_among([forms_of(stage.weights) for stage in model])
    sums = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=at) for name, spec in sums_specs(ties).items()}
    for stage in model:
        stage.tie(ties, sums)
    order = _order(terms.schedule.actions(), terms.count)
    losses, casts = [], casts_here()
    for step, batch in enumerate(data):
        inputs, targets = (cut((tensor.to(at) for tensor in half), terms.microbatches) for half in halves(batch))
        squares = _squares(model, sums, order, step, inputs, targets, casts, looks=False)
        each = [float(model[-1].losses[microbatch]) for microbatch in range(terms.microbatches)]
        norm = norm_of(squares, each)
        for stage in model:
            stage.take_tied(sums)
            stage.apply(norm)
        if norm is None:
            _squares(model, sums, order, step, inputs, targets, casts, looks=True)
            for stage in model:
                stage.apply(None)
            found = (stage.finding for stage in model if stage.finding)
            raise terms.not_finite(step, min(found, key=lambda one: one["order"], default=None))
        losses.append(loss_of(each, terms.reduction))
    return losses, [stage.module for stage in model]


def _order(actions: list[list[tuple[int, str, int]]], count: int) -> list[list[int]]:
    """Of each stage the microbatches in the order in which it adds the gradients of its weights."""
    order: list[list[int]] = [[] for _ in range(count)]
    for of_rank in actions:
        for stage, op, microbatch in of_rank:
            if op in ("B", "W"):
                order[stage].append(microbatch)
    return order


def _squares(
    model: list[ModelStage],
    sums: dict[str, torch.Tensor],
    order: list[list[int]],
    step: int,
    inputs: Any,
    targets: Any,
    casts: Casts,
    looks: bool,
) -> list[float]:
    """Makes the gradients of a step. Gives the sum of their squares, of each stage."""
    for stage in model:
        stage.begin(True, looks, casts)
    random = Randomness(model[0].device)
    try:
        with casting(None):
            for microbatch, given in enumerate(inputs):
                tensors = given
                for stage in model:
                    needs = [stage.number > 0 and one.requires_grad for one in tensors]
                    copies = (one.detach().clone(memory_format=torch.contiguous_format) for one in tensors)
                    own = tuple(one.requires_grad_(need) for one, need in zip(copies, needs, strict=True))
                    with torch.enable_grad():
                        tensors = stage.forward((step, microbatch), own, targets[microbatch])
            grads: dict[int, list[torch.Tensor]] = {microbatch: [] for microbatch in range(len(inputs))}
            for stage in reversed(model):
                made = ((microbatch, stage.backward(microbatch, grads[microbatch])) for microbatch in order[stage.number])
                grads = {microbatch: [one.contiguous() for one in of] for microbatch, of in made}
    finally:
        random.give_back()
    for one in sums.values():
        one.zero_()
    return [float(stage.add_tied(sums, stage.squares())) for stage in model]
