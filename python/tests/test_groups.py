"""Stages that several ranks run together, on CPUs."""

from __future__ import annotations

import numpy as np
from conftest import Film

import pp_pipeline as pp

TOGETHER = """
class Together(pp.Stage):
    \"\"\"Each member computes a part of the rows; all of them know all that the others know.\"\"\"

    def __init__(self, at):
        self.group = at.group

    def run(self, chunk, out):
        group = self.group
        assert group.leads == (group.member == 0) and bool(chunk) == bool(out) == group.leads
        (x, spec), = chunk.specs.items()
        assert out.specs == chunk.specs and spec.dtype == "float32"
        rows, columns = spec.shape
        whole = chunk[x] if group.leads else None
        part = np.empty((rows // group.size, columns), np.float32)
        group.scatter(whole, part)
        part += 10 * group.member
        total = np.array([part.sum()], np.float32)
        group.all_reduce(total)
        group.gather(part, out[x] if group.leads else None)
        if group.leads:
            out[x][...] += total[0] + chunk.note["plus"]

def images(count=4):
    for i in range(count):
        yield pp.Item({"x": np.full((4, 3), i, np.float32)}, note={"plus": 1000 * i})

def wanted(i):
    return [i + 12 * i + 60 + 1000 * i] * 6 + [i + 10 + 12 * i + 60 + 1000 * i] * 6
"""


def test_members_share_a_chunk_and_one_that_is_killed_is_started_again(film: Film) -> None:
    code, out, error = film.run(
        TOGETHER
        + """
class Dies(Together):
    def run(self, chunk, out):
        if chunk.index == 2 and self.group.member == 1 and (HERE / "armed").exists() and once("died"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().run(chunk, out)

if __name__ == "__main__":
    for restarts in (0, 1):
        if restarts:
            (HERE / "armed").touch()
        got = []
        job = pp.Job("read@0 -> work@1+2 -> write@0", read=images, work=Dies, write=lambda c: got.append(c["x"].ravel().tolist()),
                     restarts=restarts)
        done = job.run()
        print(done and done.restarts, got == [wanted(i) for i in range(4)])
"""
    )
    assert (code, out) == (0, "0 True\n1 True\n"), (out, error)


def test_members_talk_in_every_way(film: Film) -> None:
    code, out, error = film.run(
        """
        class Talk(pp.Stage):
            def __init__(self, at):
                self.group = at.group

            def run(self, chunk, out):
                group = self.group
                x = np.empty(8, np.float32)
                group.broadcast(chunk["x"] if group.leads else x)
                group.barrier()
                said = np.arange(group.member * 3, group.member * 3 + 3)
                heard = np.empty(3, np.int64)
                if group.member == 0:
                    group.send(said, 2)
                    group.receive(heard, 1)
                elif group.member == 1:
                    group.send(said, 0)
                else:
                    group.receive(heard, 0)
                # Pieces of different sizes, and member 1 is the root.
                rows = [1, 3, 0]
                piece = np.full((rows[group.member], 2), group.member, np.int16)
                pieces = np.empty((4, 2), np.int16) if group.member == 1 else None
                group.gather(piece, pieces, root=1, rows=rows)
                if pieces is not None:
                    pieces *= 5
                group.scatter(pieces, piece, root=1, rows=rows)
                with open(HERE / f"member{group.member}", "a") as file:
                    print(0 if group.leads else x.sum(), [] if group.member == 1 else heard.tolist(), piece.tolist(), file=file)
                if group.leads:
                    out["x"][...] = chunk["x"]

        if __name__ == "__main__":
            pp.Job("read@0 -> talk@1+2+3 -> write@0", read=chunks(2), talk=Talk, write=lambda chunk: None).run()
        """
    )
    said = [(film.path.parent / f"member{member}").read_text().splitlines() for member in range(3)]
    assert code == 0 and said == [
        ["0 [3, 4, 5] [[0, 0]]"] * 2,
        ["0.0 [] [[5, 5], [5, 5], [5, 5]]", "8.0 [] [[5, 5], [5, 5], [5, 5]]"],
        ["0.0 [0, 1, 2] []", "8.0 [0, 1, 2] []"],
    ], (said, error)


def test_what_a_group_cannot_do_is_refused(film: Film) -> None:
    code, out, error = film.run(
        """
        class Wrong(pp.Stage):
            def __init__(self, at):
                self.group = at.group
                try:
                    at.group.barrier()
                except RuntimeError as error:
                    self.say(error)

            def say(self, error):
                with open(HERE / f"member{self.group.member}", "a") as file:
                    print(error, file=file)

            def run(self, chunk, out):
                group = self.group
                x = np.zeros(8, np.float32)
                # Arrays side by side do not overlap.
                group.scatter(x[:4] if group.leads else None, x[4:6])
                group.gather(x[:2], x[2:6] if group.leads else None)
                for wrong in (
                    lambda: group.broadcast(x, root=2),
                    lambda: group.send(x, group.member),
                    lambda: group.all_reduce(x.astype(np.float64)),
                    lambda: group.all_reduce(x[::2]),
                    lambda: group.all_reduce(x.astype(">f4")),
                    lambda: group.scatter(x, x[1:5], root=group.member),
                    lambda: group.gather(x[4:], x, root=group.member),
                    lambda: group.gather(x, None, root=group.member),
                    lambda: group.all_reduce(chunk["x"] if group.leads else np.broadcast_to(x, (2, 8))),
                    lambda: (chunk if not group.leads else out)["y"],
                    lambda: chunk["x"] if not group.leads else out["y"],
                    lambda: chunk.keep(),
                ):
                    try:
                        wrong()
                    except (ValueError, KeyError, RuntimeError) as error:
                        self.say(error)
                group.barrier()
                if group.leads:
                    out["x"][...] = 0
                else:
                    raise ValueError("out of cheese")

        if __name__ == "__main__":
            try:
                pp.Job("read@0 -> wrong@0+1 -> write@0", read=chunks(2), wrong=Wrong, write=lambda chunk: None).run()
            except pp.StageError as error:
                print(error.rank, error.stage, str(error).splitlines()[0])
        """
    )
    said = [(film.path.parent / f"member{member}").read_text() for member in range(2)]
    assert code == 0 and out.startswith("1 wrong plugin: rank 1: run: ValueError: out of cheese"), (out, error)
    assert "tensor 'x' is at the member that leads the group" in said[1] and "rank 1 is this rank" in said[1], said[1]
    for words in (
        "meet in run alone",
        "no member 2; it has 2",
        "rank 0 is this rank",
        "f64",
        "make a contiguous copy",
        "this one is of type '>f4': use x.astype",
        "member 0 is the root, and gives the whole tensor",
        "it is read-only: copy it",
        "there is no tensor 'y' here; there are x",
        "nobody else: copy it",
    ):
        assert words in said[0], (words, said[0], error)
    assert said[0].count("`whole` and `part` share memory") == 2, said[0]


def test_a_group_of_one_does_nothing_or_copies() -> None:
    class Alone(pp.Stage):
        def __init__(self, at: pp.At) -> None:
            self.group = at.group

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            group, x = self.group, chunk["x"]
            assert (group.member, group.size, group.leads) == (0, 1, True)
            part = np.empty_like(x)
            group.broadcast(x)
            group.scatter(x, part)
            group.all_reduce(part)
            group.barrier()
            group.gather(part + 1, out["x"])
            try:
                group.send(x, 0)
            except ValueError as error:
                assert "no other member" in str(error)

    items = [np.full(3, i, np.float32) for i in range(3)]
    job = pp.Job("read@0 -> work@0 -> write@0", read=items, work=Alone, arrays="numpy")
    assert [float(chunk["x"][2]) for chunk in job] == [1, 2, 3]
