"""Where the loop of a rank, on the program's thread, and the driver of its job meet: once before a step and once behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from ._shapes import Tensors
from ._stage import Casts

# The modes of a turn, as they travel.
MODES = ["train", "evaluate", "look", "save", "tie"]


@dataclass
class Turn:
    """What the loop of this rank has asked for: a step ("train"), an evaluation, a step once more that looks for the first tensor
    that is not finite ("look"), a checkpoint ("save") or, before all others, that copies of tied weights begin alike ("tie").
    """

    number: int
    # How many steps came before.
    step: int
    mode: str
    # The rank's own microbatches.
    inputs: list[Tensors]
    targets: list[Tensors]
    # What `torch.autocast` did where the loop called.
    casts: Casts

    @property
    def trains(self) -> bool:
        """Gradients are made."""
        return self.mode in ("train", "look")

    @property
    def computes(self) -> bool:
        """Microbatches are worked on; otherwise they travel as zeros."""
        return self.trains or self.mode == "evaluate"


@dataclass
class Verdict:
    """How a turn ended, the same at every rank. `norm` is None where something was not finite, and where no step was made."""

    loss: float
    norm: float | None
    finding: dict[str, Any] | None
    # Of each stage the median time of its actions of each kind, in seconds.
    times: dict[int, dict[str, float]]
    # When each action was at work, by stage and microbatch: start and end of F, of I or B, and of W, in seconds.
    moments: list[float]


class Meeting:
    """The place where both wait for each other."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.has_ended = False
        # What the loop has asked for, and at last why it ended.
        self._turns: SimpleQueue[Turn | BaseException] = SimpleQueue()
        self._verdicts: SimpleQueue[Verdict] = SimpleQueue()

    def offer(self, turn: Turn) -> None:
        """The loop has come to a step."""
        self._turns.put(turn)

    def end(self, error: BaseException | None, calls: int) -> None:
        """The loop has ended. A driver that waits for it raises."""
        self.has_ended = True
        self._turns.put(
            error
            or RuntimeError(
                f"the loop of rank {self._rank} ended after {calls} calls of step and evaluate, and other ranks go on: give all "
                "ranks equally many batches"
            )
        )

    def turn(self) -> Turn:
        """Waits, in the driver, until the loop has come to the next turn."""
        turn = self._turns.get()
        if isinstance(turn, BaseException):
            self._turns.put(turn)
            raise turn
        return turn

    def tell(self, verdict: Verdict) -> None:
        """The driver has ended a turn."""
        self._verdicts.put(verdict)

    def verdict(self, goes_on: Callable[[], None]) -> Verdict:
        """Waits, in the loop, for the end of a turn. `goes_on` raises if the job has ended."""
        while True:
            with suppress(Empty):
                return self._verdicts.get(timeout=0.05)
            try:
                goes_on()
            except BaseException:
                # A job may end well behind the verdict.
                with suppress(Empty):
                    return self._verdicts.get_nowait()
                raise
