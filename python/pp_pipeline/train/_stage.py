"""A stage of a model: what it does with a microbatch, and with all of them at the end of a step."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import checkpoint

from ._backward import backward_input, backward_weight, divides, users_below
from ._shapes import Tensors, outputs_in
from ._ties import Tied, weights_of

# A kind of devices, and the type that autocast takes there.
Casts = list[tuple[str, torch.dtype]]
# Elements of a gradient whose squares are added at once.
_PART = 1 << 15
# Most bytes of gradients that travel at once between pipelines, unless one weight alone has more.
_FLAT = 32 << 20


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The seed of a forward. All numbers take part."""
    return _mixed(_mixed_of_stage(seed, step, stage), microbatch) % 2**63


@functools.lru_cache
def _mixed_of_stage(seed: int, step: int, stage: int) -> int:
    return _mixed(_mixed(seed, step), stage)


def _mixed(mixed: int, number: int) -> int:
    """The mixing of splitmix64 (Steele et al. 2014)."""
    mixed = (mixed + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """What PyTorch's random numbers come from, in work on this device."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        generators.append(torch.cuda.default_generators[number])
    return generators


class Randomness:
    """The program's own random numbers. It gets them back behind the work of stages, which set others."""

    def __init__(self, device: torch.device) -> None:
        self._states = [(one, one.get_state()) for one in generators_of(device)]

    def give_back(self) -> None:
        for one, state in self._states:
            one.set_state(state)


def casts_here() -> Casts:
    """What `torch.autocast` does on this thread."""
    return [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


@contextmanager
def casting(casts: Casts | None) -> Iterator[None]:
    """Has `torch.autocast` do this within a `with`; None turns it off. Casts of weights do not outlive it: weights move."""
    with ExitStack() as stack:
        for kind, dtype in casts_here() if casts is None else casts:
            stack.enter_context(torch.autocast(kind, dtype, enabled=casts is not None))
        try:
            yield
        finally:
            torch.clear_autocast_cache()


class ModelStage:
    """One stage of a model with its module and its optimizer. It knows neither ranks nor edges.

    `number` is its place in the model, and `is_last` says that it has the loss.
    """

    def __init__(self, number: int, is_last: bool, module: Any, settings: Any, device: torch.device) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"stages({number}) gave {module!r}: it must give a torch.nn.Module")
        self.number, self._is_last, self._settings, self.device = number, is_last, settings, device
        self.module = module.to(device)
        self._loss = settings.loss
        if is_last and isinstance(self._loss, torch.nn.Module):
            self._loss.to(device)
        self._generators = generators_of(device)
        self._params = [p for p in self.module.parameters() if p.requires_grad]
        # All weights by their names in the whole model, and those that other stages have, too.
        self.weights = weights_of(number, self.module, settings.names)
        self._ties: dict[str, Tied] = {}
        self.optimizer = settings.optimizer(self._params) if self._params else None
        if self._params and not hasattr(self.optimizer, "step"):
            raise TypeError(f"optimizer gave {self.optimizer!r} for stage {number}: it gives a torch.optim.Optimizer")
        own = set(map(id, self._params))
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            if any(id(p) not in own for p in group["params"]):
                raise ValueError(f"optimizer has weights that stage {number} does not train: let it have those that it is given")
        scheduler = settings.scheduler
        self.scheduler = scheduler(self.optimizer) if scheduler is not None and self.optimizer is not None else None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError("scheduler gave a ReduceLROnPlateau, which asks for a measure at each step: give one that counts steps")
        # Of each microbatch: its outputs and inputs until the backward, and what is left for the weights.
        self._kept: dict[int, tuple[Tensors, Tensors]] = {}
        self._undone: dict[int, Any] = {}
        # The buffers of each part by their names, and what they were before the step.
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None, torch.Tensor | None]] = []
        self._casts: Casts = []
        self.losses: dict[int, torch.Tensor] = {}
        # The backward is not divided, and the module works in place on its inputs. The first forward tells.
        self._is_whole = self._is_in_place = False
        self._is_new = True
        self._trains = self._looks = False
        self.finding: dict[str, Any] | None = None

    def name(self, local: str) -> str:
        """The name of a weight or buffer in the whole model."""
        name: str = self._settings.names(self.number, local)
        return name

    def owns(self, name: str) -> bool:
        """Says whether no earlier stage has a weight of this name, too."""
        return name not in self._ties or self._ties[name].stages[0] == self.number

    def forget(self) -> None:
        """Drops what a job that has ended left undone."""
        self._kept.clear()
        self._undone.clear()
        for p in self._params:
            p.grad = None

    def begin(self, trains: bool, looks: bool, casts: Casts) -> None:
        """A step begins, or an evaluation. With `looks` the first tensor that is not finite is kept in `finding`."""
        self._trains, self._looks, self._casts = trains, looks, casts
        self.losses.clear()
        self.finding = None
        # PyTorch's own walks take half a millisecond for a hundred modules. A part that has its own `train` is asked each time.
        parts = [self.module]
        for part in parts:
            parts.extend(one for one in part._modules.values() if one is not None)
        if any(part.training != trains or getattr(part.train, "__func__", None) is not torch.nn.Module.train for part in parts):
            self.module.train(trains)
        if self._is_last and isinstance(self._loss, torch.nn.Module):
            self._loss.train(trains)
        buffers = ((part._buffers, *one) for part in parts for one in part._buffers.items()) if trains else ()
        self._buffers = [(of, name, one, None if one is None else one.clone()) for of, name, one in buffers]
        if self.device.type == "cuda":
            # The driver issues forwards to another stream.
            torch.cuda.current_stream(self.device).synchronize()

    def forward(self, at: tuple[int, int], inputs: Tensors, targets: Tensors) -> Tensors:
        """Runs step and microbatch `at`. Gives what goes on; of the last stage nothing. Sets PyTorch's random numbers."""
        step, microbatch = at
        seed = seed_of(self._settings.seed, step, self.number, self._settings.first + microbatch)
        for generator in self._generators:
            generator.manual_seed(seed)
        checkpoints: list[bool] | None = None
        with casting(self._casts) if self._casts else nullcontext():
            if self._is_new and self._trains:
                own = _copies(inputs)
                with _checkpoints() as checkpoints:
                    made = self.module(*own)
                self._is_in_place = any(one._version > 0 for one in own if not one.is_leaf)
            else:
                made = self.module(*(_copies(inputs) if self._is_in_place else inputs))
            outputs = outputs_in(made, self.number)
            if any(isinstance(one, FakeTensor) for one in outputs):
                raise TypeError(
                    f"stage {self.number} works with a tensor that it made when it was asked for shapes alone, and that was kept outside "
                    "of the module, as by functools.cache: keep it in the module, or make it in each forward"
                )
            loss = self._loss(made, *targets) if self._is_last else None
        if self._is_last:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (self._trains and not loss.requires_grad):
                raise TypeError(f"loss gave {loss!r}: it gives a tensor of one number, with its gradient")
            self.losses[microbatch] = loss.detach()
            outputs = (loss,)
        if self._looks:
            if self.number == 0:
                self._look(0, microbatch, ((f"input {at}", one) for at, one in enumerate(inputs)))
            self._look(0, microbatch, (("loss" if self._is_last else f"output {at}", output) for at, output in enumerate(outputs)))
        if self._trains:
            if checkpoints is not None:
                self._is_whole, self._is_new = _is_compiled(outputs) or bool(checkpoints), False
            self._kept[microbatch] = outputs, inputs
        return () if self._is_last else outputs

    def backward(self, microbatch: int, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole backward. Gives the gradients of the inputs that need one."""
        outputs, inputs = self._kept.pop(microbatch)
        roots, came = self._roots(outputs, grads)
        if roots:
            torch.autograd.backward(roots, came)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        made = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanted]
        if self._looks:
            self._look_behind(microbatch, made)
        return made

    def backward_input(self, microbatch: int, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part of the backward for the inputs. `backward_weight` does the rest."""
        outputs, inputs = self._kept[microbatch]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not wanted:
            # Without an input that needs a gradient there is nothing to divide: all of it is for the weights.
            self._undone[microbatch] = grads
            return []
        roots, came = self._roots(outputs, grads)
        groups = None if self._is_whole or not roots else divides(roots, wanted, self._params)
        if groups is None:
            self._undone[microbatch] = None
            return self.backward(microbatch, grads)
        made = backward_input(roots, came, wanted, groups)
        self._kept.pop(microbatch)
        self._undone[microbatch] = groups
        whole = [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(wanted, made, strict=True)]
        if self._looks:
            self._look(1, microbatch, ((f"gradient of input {at}", grad) for at, grad in enumerate(whole)))
        return whole

    def backward_weight(self, microbatch: int) -> None:
        """The part of the backward for the weights."""
        undone = self._undone.pop(microbatch)
        if microbatch in self._kept:
            self.backward(microbatch, undone)
        elif undone is not None:
            backward_weight(undone)
        if self._looks:
            self._look_behind(microbatch, [])

    def _roots(self, outputs: Tensors, grads: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        roots = [output for output in outputs if output.requires_grad]
        return roots, None if self._is_last else list(grads)

    def _look_behind(self, microbatch: int, made: Sequence[torch.Tensor]) -> None:
        also = {id(self.weights[name]): f" (tied: {name!r})" for name in self._ties}
        weights = self.module.named_parameters()
        named = [(f"gradient of {name}{also.get(id(p), '')}", p.grad) for name, p in weights if p.grad is not None]
        self._look(1, microbatch, [*((f"gradient of input {at}", grad) for at, grad in enumerate(made)), *named])

    def _look(self, kind: int, microbatch: int, tensors: Any) -> None:
        """Keeps the first tensor that is not finite, as `NotFiniteError` tells it."""
        for name, tensor in tensors:
            if self.finding is None and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                order = [kind, microbatch, -self.number if kind else self.number]
                self.finding = {"order": order, "stage": self.number, "microbatch": microbatch, "tensor": name[:200]}

    def squares(self) -> torch.Tensor:
        """Makes the gradients of the step of what was added up, and gives the sum of their squares in f64, without tied weights."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tied = {id(self.weights[name]) for name in self._ties}
        made: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for p in self._params:
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                name = next(name for name, one in self.weights.items() if one is p)
                raise TypeError(f"the gradient of {name!r} is sparse: let the module make a dense one (Embedding(..., sparse=False))")
            if p.grad.is_conj():
                p.grad = p.grad.resolve_conj()
            made.append((p, torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad))
        if self.device.type == "cuda":
            # A GPU takes all at once. The norms need no copy in f64.
            if made and self._settings.reduction == "mean":
                torch._foreach_div_([grad for _, grad in made], self._settings.microbatches)
            own = [grad for p, grad in made if id(p) not in tied]
            return total + torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).square_().sum() if own else total
        for p, grad in made:
            # Parts stay in a processor's cache.
            for part in grad.view(-1).split(_PART) if grad.is_contiguous() else [grad]:
                if self._settings.reduction == "mean":
                    part.div_(self._settings.microbatches)
                if id(p) not in tied:
                    total += part.double().square_().sum()
        return total

    def flat_gradients(self) -> Iterator[tuple[torch.Tensor, list[torch.nn.Parameter]]]:
        """Lays the gradients into flat tensors of one type, with the weights that each is of. Behind them is 1 for a weight that had a
        gradient, and 0 for another one.
        """
        parts: list[list[torch.nn.Parameter]] = []
        for p in self._params:
            if not parts or parts[-1][0].dtype != p.dtype or sum(one.nbytes for one in parts[-1]) + p.nbytes > _FLAT:
                parts.append([])
            parts[-1].append(p)
        for part in parts:
            flat = torch.zeros(sum(p.numel() for p in part) + len(part), dtype=part[0].dtype, device=self.device)
            at = 0
            for number, p in enumerate(part):
                place = flat[at : at + p.numel()].view(p.shape)
                if p.grad is not None:
                    place.copy_(p.grad)
                    flat[number - len(part)] = 1
                # The memory of the old one is free before the next are laid.
                p.grad = place
                at += p.numel()
            yield flat, part

    def tie(self, ties: Sequence[Tied], sums: Any) -> None:
        """Takes its part of the tied weights. The values of the first holder are put into `sums`, and later ones take them."""
        self._ties = {one.name: one for one in ties if self.number in one.stages}
        for name, tied in self._ties.items():
            values, _ = tied.of(sums)
            if tied.stages[0] == self.number:
                values.copy_(self.weights[name].detach())
            else:
                self.weights[name].data.copy_(values)

    def add_tied(self, sums: Any, squares: torch.Tensor) -> torch.Tensor:
        """Adds the gradients of tied weights to the sums. Gives `squares` with those, in f64, of the weights whose last holder this is."""
        for name, tied in self._ties.items():
            values, count = tied.of(sums)
            grad = self.weights[name].grad
            if grad is not None:
                values += grad
                count += 1
            if tied.stages[-1] == self.number:
                squares = squares + values.double().square().sum()
                if self._looks:
                    self._look(2, self._settings.microbatches - 1, [(f"sum of the gradients of tied weight {name!r}", values)])
        return squares

    def take_tied(self, sums: Any) -> None:
        """Takes the sums as the gradients of tied weights."""
        for name, tied in self._ties.items():
            values, count = tied.of(sums)
            self.weights[name].grad = values.clone() if count > 0 else None

    def apply(self, norm: float | None) -> None:
        """Ends a step: with the norm of all gradients the weights move, and without it everything is as before the step."""
        if norm is None:
            for of, name, buffer, before in self._buffers:
                # A module may have another one by now.
                of[name] = buffer
                if buffer is not None and before is not None:
                    buffer.copy_(before)
        elif self.optimizer is not None:
            clip, grads = self._settings.clip, [p.grad for p in self._params if p.grad is not None]
            if grads and clip is not None and norm > clip:
                torch._foreach_mul_(grads, clip / norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        for p in self._params:
            p.grad = None


def norm_of(squares: Sequence[float], losses: Sequence[float]) -> float | None:
    """The norm of all gradients from the sums of the stages, in their order; None if a loss or a gradient is not finite."""
    total = _added(squares)
    return math.sqrt(total) if all(map(math.isfinite, (total, *losses))) else None


def loss_of(losses: Sequence[float], reduction: str) -> float:
    """The loss of a step, added in the order of the microbatches."""
    return _added(losses) / len(losses) if reduction == "mean" else _added(losses)


def _added(numbers: Sequence[float]) -> float:
    """Adds in order. What sum() gives depends on the version of Python."""
    return functools.reduce(operator.add, numbers, 0.0)


def _copies(inputs: Tensors) -> Tensors:
    """Copies of inputs that have a gradient: PyTorch lets no module work in place on the leaves themselves."""
    return tuple([one.clone() if one.requires_grad else one for one in inputs])


@contextmanager
def _checkpoints() -> Iterator[list[bool]]:
    """Gives a list that is not empty once activations were checkpointed within a `with`."""
    frame, made = getattr(checkpoint, "_CheckpointFrame", None), list[bool]()

    def noticed(*args: Any, **more: Any) -> Any:
        made.append(True)
        return frame(*args, **more)  # type: ignore[misc]

    if frame is not None:
        checkpoint._CheckpointFrame = noticed  # type: ignore[attr-defined,unused-ignore]
    try:
        yield made
    finally:
        if frame is not None:
            checkpoint._CheckpointFrame = frame  # type: ignore[attr-defined,unused-ignore]


def _is_compiled(outputs: Sequence[torch.Tensor]) -> bool:
    """Says whether torch.compile made a part of the graph: its backward runs once, and cannot be divided."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    names = {node.name() for node in (*roots, *users_below(roots))}
    if "CheckpointFunctionBackward" in names:
        raise TypeError("re-entrant checkpoints cannot run in a pipeline: give checkpoint(..., use_reentrant=False)")
    return any(name.startswith("CompiledFunction") for name in names)
