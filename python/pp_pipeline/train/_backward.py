"""The backward of a stage in two parts: the gradients of its inputs first, those of its weights later.

The division of the graph is PyTorch's: it is copied from torch/distributed/pipelining/_backward.py of PyTorch 2.15, with
changes. Copyright (c) Meta Platforms, Inc. and affiliates, under the 3-clause BSD licence that is in LICENSE-PYTORCH. It is a
copy because that module is private and changes between versions.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node


@dataclass
class _Group:
    """Weights that hang on the same nodes of the graph, and the gradients that came to those nodes."""

    weights: dict[Node, torch.Tensor]
    nodes: list[Node]
    grads: list[tuple[torch.Tensor | None, ...] | None] = field(default_factory=list)
    # All of it is made with the gradients of the inputs. Then its nodes are those that accumulate, which all microbatches have.
    is_whole: bool = False


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node that makes a tensor, or the one that accumulates its gradient."""
    if tensor.requires_grad and tensor.grad_fn is None:
        # That node is created when something is made of the tensor.
        made = tensor.view_as(tensor).grad_fn
        assert made is not None, "gradients are off"
        node: Node | None = made.next_functions[0][0]
        return node
    return tensor.grad_fn


def users_below(roots: list[Node]) -> dict[Node, list[Node]]:
    """Of each node below the roots, the nodes that use what it makes."""
    users: dict[Node, list[Node]] = collections.defaultdict(list)
    waiting, seen = collections.deque(dict.fromkeys(roots)), set(roots)
    while waiting:
        node = waiting.popleft()
        for below, _ in node.next_functions:
            if below is not None:
                users[below].append(node)
                if below not in seen:
                    seen.add(below)
                    waiting.append(below)
    return users


def _above(start: list[Node], ends: set[Node], users: dict[Node, list[Node]]) -> tuple[set[Node], set[Node]]:
    """The nodes above `start`, up to `ends`; and those of `ends` that were met."""
    above, met = set(start), set()
    waiting = collections.deque(start)
    while waiting:
        for node in users.get(waiting.popleft(), ()):
            if node in ends:
                met.add(node)
            elif node not in above:
                above.add(node)
                waiting.append(node)
    return above, met


def _groups(
    roots: list[Node], inputs: list[Node], weights: dict[Node, torch.Tensor], users: dict[Node, list[Node]]
) -> list[_Group] | None:
    """The weights by the nodes where they meet what depends on the inputs; None if one has a gradient by another way than inputs."""
    of_inputs, _ = _above(inputs, set(), users)
    by_node: dict[Node, tuple[set[Node], set[Node]]] = {}
    for weight in weights:
        above, met = _above([weight], of_inputs, users)
        if not met or not above.isdisjoint(roots):
            return None
        group: tuple[set[Node], set[Node]] = ({weight}, set(met))
        for known in [by_node[node] for node in met if node in by_node]:
            group = (group[0] | known[0], group[1] | known[1])
        for node in group[1]:
            by_node[node] = group
    unique = {id(group): group for group in by_node.values()}
    return [_Group({node: weights[node] for node in of}, list(nodes)) for of, nodes in unique.values()]


def divides(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[_Group] | None:
    """How the backward of these outputs is divided; None if a weight has a gradient by another way than inputs, or is none of these."""
    roots, of_inputs = ([node for node in map(node_of, of) if node is not None] for of in (outputs, inputs))
    users, wanted = users_below(roots), {id(weight) for weight in weights}
    # The graph names the weights in it, which takes less than asking each weight for its node.
    leaves = ((node, node.variable) for node in users if hasattr(node, "variable") and not node.next_functions)
    own = {node: weight for node, weight in leaves if node not in of_inputs}
    if any(id(weight) not in wanted for weight in own.values()):
        return None
    groups = _groups(roots, of_inputs, own, users)
    # The backward of a `torch.autograd.Function` may free or change what it has kept, so it runs once.
    functions = {node for node in (*roots, *users) if isinstance(node, BackwardCFunction)}
    for group in groups or ():
        # Between two nodes there may be others, which run again.
        group.is_whole = group.nodes[0] in functions if len(group.nodes) == 1 else bool(functions)
        if group.is_whole and any(weight._backward_hooks for weight in group.weights.values()):
            return None
    return groups


def backward_input(
    outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None, inputs: Sequence[torch.Tensor], groups: list[_Group]
) -> list[torch.Tensor | None]:
    """The gradients of the inputs; `grads` is None of a loss. Keeps in `groups` what those of the weights take."""
    whole = [group for group in groups if group.is_whole]
    for group in groups:
        group.grads = [None] * len(group.nodes)
        for at, node in enumerate(group.nodes):
            # It goes with the graph.
            node.register_prehook(functools.partial(_first, group.grads, at))
    asked = [*inputs, *(weight for group in whole for weight in group.weights.values())]
    made = list(torch.autograd.grad(outputs, asked, grads, retain_graph=True, allow_unused=True))
    for group in whole:
        group.nodes = list(group.weights)
        group.grads = [(made.pop(len(inputs)),) for _ in group.nodes]
    return made


def _first(came: list[tuple[torch.Tensor | None, ...] | None], at: int, grads: tuple[torch.Tensor | None, ...]) -> Any:
    """Has a node that runs again take what came first. That has passed its hooks, and what a node above it gives now is a part of it."""
    if came[at] is None:
        came[at] = grads
        return None
    return came[at]


def backward_weight(groups: list[_Group]) -> None:
    """Adds the gradients of the weights to them."""
    for group in groups:
        edges, grads = [], []
        for came, node in zip(group.grads, group.nodes, strict=True):
            for at, grad in enumerate(came or ()):
                if grad is not None:
                    edges.append(GradientEdge(node, at))
                    grads.append(grad)
        hooks = [node.register_prehook(functools.partial(_first, group.grads, at)) for at, node in enumerate(group.nodes) if group.is_whole]
        if edges:
            # Another group may go through the same nodes. The graph goes with the groups.
            # What torch.autograd.backward calls. Its own checks take as long as the call, and there is one for each layer.
            torch.autograd.Variable._execution_engine.run_backward(
                tuple(edges), tuple(grads), True, False, tuple(group.weights.values()), allow_unreachable=True, accumulate_grad=True
            )
        for hook in hooks:
            hook.remove()
        group.nodes, group.grads = [], []
