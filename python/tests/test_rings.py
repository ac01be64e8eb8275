"""Rings of steps: stages that a chunk goes through several times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Film

import pp_pipeline as pp


def items(steps: list[int | None]) -> Any:
    for i, own in enumerate(steps):
        yield pp.Item({"x": np.full(2, i, np.float32)}, steps=own)


def test_a_chunk_goes_through_a_ring_once_a_step() -> None:
    seen: list[tuple[int, int, int]] = []

    def add(chunk: pp.Chunk, out: pp.Out) -> None:
        seen.append((chunk.index, chunk.lap, chunk.laps))
        out["x"][...] = chunk["x"] + 1

    def scale(chunk: pp.Chunk, out: pp.Out) -> None:
        out["x"][...] = chunk["x"] * 2

    def value(x: float, steps: int) -> float:
        for _ in range(steps):
            x = (x + 1) * 2
        return x

    steps = [None, 1, 2, 3]
    job = pp.Job(
        "read@0 -> (add@0 -> scale@0)*steps -> write@0", read=items(steps), add=add, scale=scale, steps=3, arrays="numpy"
    )
    assert [float(chunk["x"][1]) for chunk in job] == [value(i, own or 3) for i, own in enumerate(steps)]
    assert sorted(seen) == [(i, lap, own or 3) for i, own in enumerate(steps) for lap in range(own or 3)]
    job = pp.Job("read@0 -> (add@0)*4 -> scale@0 -> write@0", read=items([None]), add=add, scale=scale, arrays="numpy")
    assert [(float(chunk["x"][0]), chunk.laps) for chunk in job] == [(8, 1)] and seen[-1] == (0, 3, 4)
    with pytest.raises(pp.StageError, match="chunk 1 of read has 4 steps, and the job takes 1 to 3"):
        list(pp.Job("read@0 -> (add@0)*steps -> write@0", read=items([None, 4]), add=add, steps=3, arrays="numpy"))


def test_a_slot_holds_what_a_ring_makes_in_any_lap(film: Film) -> None:
    code, out, error = film.run(
        """
        class Grow(pp.Stage):
            @staticmethod
            def outputs(inputs):
                x = inputs["x"]
                return {"x": pp.Spec((2 * x.shape[0],), x.dtype)}

            def run(self, chunk, out):
                out["x"].reshape(2, -1)[...] = chunk["x"] + chunk.lap

        if __name__ == "__main__":
            job = pp.Job("read@0 -> (grow@1 -> double@2)*steps -> double@1 -> write@0", read=chunks(3, 1), grow=Grow, double=double,
                         steps=4)
            print([(chunk["x"].shape[0], float(chunk["x"][-1])) for chunk in job])
        """
    )

    def value(x: float) -> float:
        for lap in range(4):
            x = 2 * (x + lap)
        return 2 * x

    assert (code, out) == (0, f"{[(16, value(float(i))) for i in range(3)]}\n"), error


def test_steps_without_a_ring_and_a_ring_without_steps_are_refused() -> None:
    def same(chunk: pp.Chunk, out: pp.Out) -> None: ...

    ring, chain = "read@0 -> (a@0)*steps -> write@0", "read@0 -> (a@0)*2 -> write@0"
    for text, steps, words in (
        (ring, None, "has a ring of steps"),
        (chain, 2, "leave steps= out"),
        (ring, 0, "1 to 65535"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            pp.Job(text, read=items([None]), a=same, steps=steps)
