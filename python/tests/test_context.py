"""Stages that remember chunks, and ranks that are started again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Film

import pp_pipeline as pp

MEMORY = """
import collections, hashlib

class Mean(pp.Stage):
    \"\"\"Its result depends on this chunk and on two before it, and on their notes.\"\"\"
    context = 2

    def __init__(self, at):
        self.last = {}
        (HERE / f"rank{at.rank}").write_text(str(os.getpid()))

    def run(self, chunk, out):
        last = self.last.setdefault(chunk.lap, collections.deque(maxlen=3))
        if chunk.starts_epoch:
            last.clear()
        last.append(chunk["x"] * (chunk.note.get("scale", 1) + chunk.index / 7 + chunk.lap))
        out["x"][...] = chunk["x"] + sum(np.sin(x).sum() for x in last)
        out["n"][...] = chunk["n"] + len(last)
        self.die(chunk)

    def die(self, chunk):
        if not chunk.is_context and (HERE / f"kill{chunk.index}").exists() and once(f"died{chunk.index}"):
            os.kill(os.getpid(), signal.SIGKILL)

def images():
    for i in range(12):
        x = np.random.default_rng(i).random(100 + i % 3).astype(np.float32)
        note = {"scale": i / 3} if i % 2 else None
        before(i)
        yield pp.Item({"x": x, "n": np.zeros(1, np.int32)}, note=note, cut="flush" if i == 7 else None)

def before(i):
    pass

def digests(pipeline, **more):
    most = {"x": pp.Spec((102,), "float32"), "n": pp.Spec((1,), "int32")}
    got.clear()
    job = pp.Job(pipeline, read=images, mean=Mean, most=most,
                 write=lambda c: got.append((hashlib.sha256(c["x"].tobytes()).hexdigest(), int(c["n"][0]))), **more)
    done = job.run()
    return done and done.restarts, list(got)

got = []
"""


@pytest.mark.parametrize(
    ("pipeline", "steps"), [("read@0 -> mean@1 -> mean@2 -> write@0", None), ("read@0 -> (mean@1)*steps -> mean@2 -> write@0", 2)]
)
def test_stages_that_remember_give_the_same_bytes_after_kills(film: Film, pipeline: str, steps: int | None) -> None:
    code, out, error = film.run(
        MEMORY
        + f"""
if __name__ == "__main__":
    pipeline, steps = {pipeline!r}, {steps}
    _, alone = digests(pipeline.replace("@1", "@0").replace("@2", "@0"), steps=steps)
    for i in (4, 5, 8, 11):
        (HERE / f"kill{{i}}").touch()
    restarts, again = digests(pipeline, restarts=4, steps=steps)
    print(restarts, len(alone), again == alone)
"""
    )
    assert (code, out) == (0, "4 12 True\n"), (out, error)


def test_a_rank_that_is_killed_while_nothing_is_in_flight_gets_its_context(film: Film) -> None:
    code, out, error = film.run(
        MEMORY
        + """
def before(i):
    if i != 5 or not (HERE / "armed").exists():
        return
    while len(got) < i:
        time.sleep(0.01)
    pid = (HERE / "rank1").read_text()
    os.kill(int(pid), signal.SIGKILL)
    # The next chunk is there when nothing else is.
    while (HERE / "rank1").read_text() in ("", pid):
        time.sleep(0.01)
    time.sleep(0.2)

if __name__ == "__main__":
    _, alone = digests("read@0 -> mean@0 -> mean@0 -> write@0")
    (HERE / "armed").touch()
    restarts, again = digests("read@0 -> mean@1 -> mean@1 -> write@0", restarts=1)
    print(restarts, again == alone)
"""
    )
    assert (code, out) == (0, "1 True\n"), (out, error)


@pytest.mark.parametrize("cut", [None, "flush"])
def test_a_chunk_without_tensors_is_context_as_any_other(film: Film, cut: str | None) -> None:
    code, out, error = film.run(
        f"""
        class Note(pp.Stage):
            context = 1

            def run(self, chunk, out):
                if chunk.index == 2 and once("died"):
                    os.kill(os.getpid(), signal.SIGKILL)
                for name in chunk:
                    out[name][...] = chunk[name]
                with open(HERE / "notes", "a") as file:
                    print(chunk.index, chunk.is_context, chunk.note["n"], [float(x[0]) for x in chunk.values()], file=file)

        got = []

        def read():
            for i in range(3):
                # So that the chunks before are context, and none is sent again as itself.
                while len(got) < i:
                    time.sleep(0.01)
                x = {{}} if i == 1 else {{"x": np.full(2, 10 + i, np.float32)}}
                yield pp.Item(x, note={{"n": i}}, cut={cut!r} if i == 1 else None)

        if __name__ == "__main__":
            done = pp.Job("read@0 -> note@1 -> write@0", read=read, note=Note, write=lambda c: got.append(c.index), restarts=1).run()
            print(done.restarts, got)
        """
    )
    assert (code, out) == (0, "1 [0, 1, 2]\n"), (out, error)
    notes = (film.path.parent / "notes").read_text().splitlines()
    assert notes == ["0 False 0 [10.0]", "1 False 1 []", "1 True 1 []", "2 False 2 [12.0]"], notes


def test_context_that_cannot_travel_is_refused(film: Film) -> None:
    code, out, error = film.run(
        """
        def four(chunk, out):
            double(chunk, out)

        four.context = 4

        def many():
            yield {name: np.zeros(1) for name in "abcd"}

        def noted():
            yield pp.Item({"x": np.zeros(1)}, note={"text": "x" * 1020})

        def stepped():
            yield pp.Item({"x": np.zeros(1)}, steps=1)

        def taken():
            yield {"past.x": np.zeros(1)}

        if __name__ == "__main__":
            for read, pipeline, steps in (
                (many, "read@0 -> four@1 -> write@0", None),
                (noted, "read@0 -> four@1 -> write@0", None),
                (stepped, "read@0 -> (four@1)*steps -> write@0", 2),
                (taken, "read@0 -> four@1 -> write@0", None),
            ):
                try:
                    pp.Job(pipeline, read=read, four=four, write=print, restarts=1, steps=steps).run()
                except pp.StageError as error:
                    print(str(error).splitlines()[0])
        """
    )
    lines = out.splitlines()
    words = ["which are 20 tensors, and at most 16 travel", "at most 1,023 travel", "steps of its own", "are for the chunks before"]
    assert code == 0 and len(lines) == 4, (out, error)
    for line, said in zip(lines, words, strict=True):
        assert said in line, line


def test_a_context_that_is_no_number_of_chunks_is_refused() -> None:
    class Odd(pp.Stage):
        context: Any = "all"

    with pytest.raises(ValueError, match="context = 'all' of stage 'odd'"):
        pp.Job("read@0 -> odd@0 -> write@0", read=[np.zeros(1)], odd=Odd, write=print).run()
