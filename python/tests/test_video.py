"""Video files as source and sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pp_pipeline as pp

pytest.importorskip("av")

ONE = "read@0 -> work@0 -> write@0"


def scenes(count: int) -> Any:
    """Pictures that a codec keeps nearly as they are."""
    for i in range(0, count, 4):
        x = np.zeros((min(4, count - i), 64, 96, 3), np.uint8)
        x[..., 0] = np.linspace(0, 200, 96, dtype=np.uint8)
        x += np.arange(i, i + len(x), dtype=np.uint8)[:, None, None, None] * 5
        yield {"x": x}


def same(chunk: pp.Chunk, out: pp.Out) -> None:
    out["x"][...] = chunk["x"]


def test_a_film_goes_through_a_job(tmp_path: Path) -> None:
    first, second = tmp_path / "a.mp4", tmp_path / "b.mkv"
    pp.Job(ONE, arrays="numpy", read=scenes(10), work=same, write=pp.video.write(first, rate=25)).run()
    pp.Job(
        ONE, arrays="numpy", read=pp.video.read(first, frames=3), work=same, write=pp.video.write(second, like=first)
    ).run()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.mp4", "b.mkv"]
    made = [chunk["x"] for chunk in pp.video.read(second, frames=4)]
    assert [len(x) for x in made] == [4, 4, 2]
    wanted = np.concatenate([chunk["x"] for chunk in scenes(10)])
    assert np.abs(np.concatenate(made).astype(int) - wanted).mean() < 4


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    write = pp.video.write(tmp_path / "a.mp4", rate=25)
    with pytest.raises(pp.StageError, match="video is uint8 of"):
        pp.Job(ONE, arrays="numpy", read=[np.zeros(3, np.float32)], work=same, write=write).run()
    with pytest.raises(TypeError, match="like= or rate="):
        pp.video.write(tmp_path / "a.mp4")
    with pytest.raises(ValueError, match="at least one frame"):
        pp.video.read(tmp_path / "a.mp4", frames=0)
    assert not (tmp_path / "a.mp4").exists()
