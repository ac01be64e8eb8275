"""Jobs of one process: what stages get, and what they must not do."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib.util
import json
import queue
import socket
import threading
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pp_pipeline as pp

ONE = "read@0 -> work@0 -> write@0"


def chunks(count: int = 4, size: int = 8) -> Any:
    for i in range(count):
        yield {"x": np.full((size,), i, np.float32)}


def double(chunk: pp.Chunk, out: pp.Out) -> None:
    out["x"][...] = 2 * chunk["x"]


# PyTorch may be imported by another test.
Job = functools.partial(pp.Job, arrays="numpy")


def values(job: pp.Job) -> list[float]:
    return [float(chunk["x"][0]) for chunk in job]


def test_a_job_runs_and_a_job_is_iterated_over() -> None:
    got: list[float] = []
    summary = Job(ONE, read=chunks, work=double, write=lambda chunk: got.append(float(chunk["x"][0]))).run()
    assert summary is not None and (summary.chunks, summary.restarts) == (4, 0)
    assert got == [0, 2, 4, 6]
    assert values(Job(ONE, read=chunks(), work=double)) == got
    assert values(Job(ONE, read=[], work=double)) == []


def test_a_job_is_shown_while_it_runs(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    seen: list[Any] = []

    def look(chunk: pp.Chunk) -> None:
        request = urllib.request.Request(f"http://{address}/snapshot.json", headers={"Authorization": "Bearer 0123456789abcdef"})
        with urllib.request.urlopen(request) as answer:
            seen.append(json.load(answer))

    Job(ONE, read=chunks, work=double, write=look, live=address, live_token_file=token).run()
    assert [one["totals"]["chunks"] for one in seen] == [0, 1, 2, 3] and seen[3]["job"]["pipeline"].startswith("read@0")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/healthz")
    with pytest.raises(ValueError, match='live="x": it takes ADDRESS:PORT'):
        Job(ONE, read=chunks, work=double, write=look, live="x").run()
    with pytest.raises(ValueError, match="live="):
        Job(ONE, read=chunks, work=double, write=look, live_token_file=token)


def test_a_class_is_told_where_it_stands_and_finishes() -> None:
    told: list[Any] = []

    class Add(pp.Stage):
        def __init__(self, at: pp.At) -> None:
            self.at = at

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            out["x"][...] = chunk["x"] + 10**self.at.part

        def finish(self) -> None:
            told.append(self.at)

    job = Job("read@0 -> add@0 -> add@0 -> write@0", read=chunks, add=Add)
    assert values(job) == [11, 12, 13, 14]
    assert told == [pp.At(0, "cpu", 0, 2), pp.At(0, "cpu", 1, 2)]


def test_outputs_have_other_names_types_and_shapes() -> None:
    class Halve(pp.Stage):
        @staticmethod
        def outputs(inputs: dict[str, pp.Spec]) -> dict[str, pp.Spec]:
            x = inputs["x"]
            return {"y": pp.Spec((x.shape[0] // 2,), np.float64), "n": pp.Spec((), "int64")}

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            out["y"][...] = chunk["x"][::2]
            out["n"][...] = len(chunk["x"])

    for chunk in Job(ONE, read=chunks, work=Halve):
        assert list(chunk) == ["y", "n"]
        assert chunk["y"].dtype == np.float64 and chunk["y"].shape == (4,)
        assert chunk["n"] == 8 and chunk["y"][3] == chunk.index


def test_every_type_goes_through() -> None:
    kinds = "uint8 int8 bool int16 uint16 int32 uint32 int64 float16 float32 float64".split()
    item = {kind: np.arange(3).astype(kind) for kind in kinds}

    def same(chunk: pp.Chunk, out: pp.Out) -> None:
        for name, array in chunk.items():
            out[name][...] = array

    [got] = [{name: array.copy() for name, array in chunk.items()} for chunk in Job(ONE, read=[item], work=same)]
    for name, array in item.items():
        assert got[name].dtype == array.dtype and (got[name] == array).all()


def test_a_note_and_a_cut_travel() -> None:
    notes: list[Any] = []
    epochs: list[bool] = []

    def work(chunk: pp.Chunk, out: pp.Out) -> None:
        notes.append(chunk.note)
        epochs.append(chunk.starts_epoch)
        double(chunk, out)

    note = {"prompt": "a cat", "steps": [1, 2]}
    items = [pp.Item({"x": np.zeros(2)}, note=note), {"x": np.zeros(2)}, pp.Item({"x": np.zeros(2)}, cut="flush")]
    assert [chunk.note for chunk in Job(ONE, read=items, work=work)] == notes == [note, {}, {}]
    assert epochs == [True, False, True]
    long = pp.Item({"x": np.zeros(2)}, note={"text": "x" * 5000})
    with pytest.raises(pp.StageError, match="at most 4,096"):
        Job(ONE, read=[long], work=work, write=print).run()


def test_sizes_vary_up_to_the_most() -> None:
    sizes = [3, 8, 1]
    items = [{"x": np.zeros(size)} for size in sizes]
    with pytest.raises(pp.StageError, match="most="):
        Job(ONE, read=items, work=double, write=lambda chunk: None).run()
    job = Job(ONE, read=items, work=double, most={"x": pp.Spec((8,), "float64")})
    assert [len(chunk["x"]) for chunk in job] == sizes


def test_an_exception_reaches_the_caller_with_its_cause() -> None:
    def fail(chunk: pp.Chunk, out: pp.Out) -> None:
        raise ZeroDivisionError("no cheese")

    with pytest.raises(pp.StageError, match="ZeroDivisionError: no cheese") as caught:
        Job(ONE, read=chunks, work=fail, write=print).run()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.rank, caught.value.code) == (0, 5)

    def broken() -> Any:
        yield {"x": np.zeros(1)}
        raise OSError("the camera is gone")

    with pytest.raises(pp.StageError, match="OSError: the camera is gone"):
        list(Job(ONE, read=broken, work=double))


def test_an_array_that_is_kept_ends_the_job_and_stays_good() -> None:
    kept: list[np.ndarray] = []

    def keep(chunk: pp.Chunk, out: pp.Out) -> None:
        double(chunk, out)
        kept.append(chunk["x"][1:3])

    with pytest.raises(pp.StageError, match="work keeps tensor 'x'.*copy"):
        Job(ONE, read=chunks, work=keep, write=lambda chunk: None).run()
    gc.collect()
    assert kept[0].shape == (2,) and float(kept[0].sum()) == float(kept[0].sum())
    # A loop leaves its names bound, so what it keeps is not refused.
    for chunk in Job(ONE, read=chunks, work=double):
        last = chunk["x"]
    assert last.shape == (8,)


def test_what_is_received_is_read_only() -> None:
    def write(chunk: pp.Chunk, out: pp.Out) -> None:
        chunk["x"][0] = 1

    with pytest.raises(pp.StageError, match="read-only"):
        Job(ONE, read=chunks, work=write, write=print).run()


def test_a_result_is_there_while_the_source_waits() -> None:
    go = threading.Event()

    def slow() -> Any:
        yield {"x": np.zeros(1)}
        go.wait(60)

    for chunk in Job(ONE, read=slow, work=double):
        assert chunk.index == 0
        go.set()


def test_a_result_stays_as_it_is_until_the_next_one() -> None:
    seen = []
    for chunk in Job("read@0 -> write@0", read=lambda: chunks(20)):
        time.sleep(0.01)
        seen.append(float(chunk["x"][-1]))
    assert seen == list(range(20))


def test_a_loop_that_is_left_ends_the_job() -> None:
    def endless() -> Any:
        while True:
            yield {"x": np.zeros(1)}

    for chunk in Job(ONE, read=endless, work=double):
        if chunk.index == 3:
            break
    threads = {thread.name for thread in threading.enumerate()}
    deadline = time.monotonic() + 10
    while "pp-read" in threads and time.monotonic() < deadline:
        time.sleep(0.01)
        threads = {thread.name for thread in threading.enumerate()}
    assert "pp-read" not in threads


MOST = {"x": pp.Spec((8,), "float32")}


def test_a_server_pushes_and_pulls() -> None:
    with Job(ONE, work=double, most=MOST).open() as flow:

        def push() -> None:
            for chunk in chunks():
                flow.push(chunk)
            flow.end()

        pusher = threading.Thread(target=push)
        pusher.start()
        assert [float(chunk["x"][0]) for chunk in flow] == [0, 2, 4, 6]
        pusher.join()
    with Job(ONE, work=double, most=MOST).open(queue=1) as flow:
        pushed = 0
        while flow.push(next(chunks()), timeout=2):
            pushed += 1
        assert pushed >= 2 and len(flow) == 1
    with pytest.raises(RuntimeError, match="takes no more"):
        flow.push(np.zeros(8, np.float32))


def test_where_late_chunks_are_dropped_no_push_waits_and_the_gap_is_told() -> None:
    job = Job(ONE, work=double, most=MOST, late="drop", max_latency=600.0)
    with job.open(queue=1) as flow:
        for k in range(50):
            assert flow.push(np.full(8, k, np.float32), timeout=0.0)
        flow.end()
        expected = 0.0
        for chunk in flow:
            expected += chunk.skipped
            assert float(chunk["x"][0]) == 2 * expected
            expected += 1
        assert expected == 50, "the last one is never dropped"


def test_a_latency_that_no_chunk_can_have_ends_the_job_with_the_figure() -> None:
    def slow(chunk: pp.Chunk, out: pp.Out) -> None:
        time.sleep(0.01)
        double(chunk, out)

    with pytest.raises(pp.JobError, match=r"at most 1\.0 ms is asked for, and one chunk takes \d"):
        Job(ONE, read=chunks(20), work=slow, write=lambda chunk: None, max_latency=0.001).run()


class Sum(pp.Stage):
    """Adds up the chunks of each stream, until it is to forget them."""

    ended: list[int] = []

    def __init__(self) -> None:
        self.sums: dict[int, float] = {}

    def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
        before = 0.0 if chunk.starts_epoch else self.sums[chunk.stream]
        self.sums[chunk.stream] = before + float(chunk["x"][0])
        out["x"][...] = self.sums[chunk.stream]

    def end_stream(self, stream: int) -> None:
        del self.sums[stream]
        self.ended.append(stream)


def test_each_stream_has_its_order_its_state_and_its_end() -> None:
    Sum.ended = []
    kept: list[pp.Chunk] = []
    with Job(ONE, work=Sum, most=MOST).streams(room=2) as streams:
        idle, busy = streams.begin(), streams.begin()
        while idle.push(np.ones(8, np.float32), timeout=2):
            pass
        # Two are in the job or wait to be pulled, and two wait in front of it.
        assert len(idle) == 2
        for i, chunk in enumerate(chunks(6)):
            busy.push(pp.Item(chunk, cut="flush" if i == 4 else None))
            kept.append(next(iter(busy)))
        assert [float(chunk["x"][7]) for chunk in kept] == [0, 1, 3, 6, 4, 9]
        assert [(chunk.stream, chunk.index) for chunk in kept] == [(1, i) for i in range(6)]
        with pytest.raises(ValueError, match="one of several streams takes none"):
            busy.push(pp.Item({"x": np.zeros(8, np.float32)}, cut="hard"))
        busy.end()
        assert list(busy) == []
        assert Sum.ended == [1]
        idle.end()
        assert [float(chunk["x"][0]) for chunk in idle] == [1, 2, 3, 4]
        with streams.begin() as late:
            late.push(np.ones(8, np.float32))
        summary = streams.finish()
    # With the three ends.
    assert summary is not None and summary.chunks == 4 + 6 + 1 + 3
    assert Sum.ended == [1, 0, 2]


def test_what_ends_the_job_reaches_each_stream() -> None:
    with Job(ONE, work=lambda chunk, out: 1 / 0, most=MOST).streams() as streams:
        both = [streams.begin(), streams.begin()]
        both[0].push(np.zeros(8, np.float32))
        for stream in both:
            with pytest.raises(pp.StageError, match="division by zero"):
                next(iter(stream))
    with pytest.raises(RuntimeError, match="takes no more"):
        both[0].push(np.zeros(8, np.float32))


def fail(chunk: pp.Chunk, out: pp.Out) -> None:
    raise ValueError("out of cheese")


def test_leaving_a_server_tells_what_ended_the_job() -> None:
    def wait_for_the_end(stream: pp.Stream) -> None:
        while not stream._native.is_closed:
            time.sleep(0.001)

    for pushes_again in (False, True):
        with pytest.raises(pp.StageError, match="out of cheese"):
            with Job(ONE, work=fail, most=MOST).open() as flow:
                flow.push(np.zeros(8, np.float32))
                wait_for_the_end(flow)
                if pushes_again:
                    flow.push(np.zeros(8, np.float32))
        with pytest.raises(pp.StageError, match="out of cheese"):
            with Job(ONE, work=fail, most=MOST).streams() as streams:
                stream = streams.begin()
                stream.push(np.zeros(8, np.float32))
                wait_for_the_end(stream)
                if pushes_again:
                    stream.push(np.zeros(8, np.float32))


def test_streams_that_were_left_end_the_job_in_good_order() -> None:
    Sum.ended = []
    for _ in range(10):
        with Job(ONE, work=Sum, most=MOST).streams() as streams:
            with streams.begin() as stream:
                stream.push(np.ones(8, np.float32))
            dropped = streams.begin()
            dropped.push(np.ones(8, np.float32))
            del dropped
    assert sorted(Sum.ended) == 10 * [0] + 10 * [1]


def test_each_of_several_threads_hears_of_a_fault() -> None:
    for _ in range(10):
        heard: list[str] = []

        def pull(stream: pp.Stream) -> None:
            try:
                for _ in stream:
                    pass
                heard.append("nothing")
            except pp.StageError as error:
                heard.append(str(error.stage))

        with Job(ONE, work=fail, most=MOST).streams() as streams:
            begun = [streams.begin() for _ in range(4)]
            threads = [threading.Thread(target=pull, args=(stream,)) for stream in begun]
            for thread in threads:
                thread.start()
            begun[0].push(np.zeros(8, np.float32))
            for thread in threads:
                thread.join()
            # The caller of this thread has not heard of it.
            with pytest.raises(pp.StageError):
                next(iter(begun[0]))
        assert heard == 4 * ["work"]


def test_what_no_slot_can_take_is_refused_at_the_push() -> None:
    with Job(ONE, work=double, most=MOST).open() as flow:
        for chunk, words in ((np.zeros(9, np.float32), "has 36 bytes"), (np.array(["a"]), "is no type that travels")):
            with pytest.raises((ValueError, TypeError), match=words):
                flow.push(chunk)
        with pytest.raises(ValueError, match="at most 4,096 travel"):
            flow.push(pp.Item({"x": np.zeros(8, np.float32)}, note={"text": 5000 * "a"}))
        flow.push(np.ones(8, np.float32))
        assert float(next(iter(flow))["x"][0]) == 2


def test_chunks_without_bytes_keep_their_notes() -> None:
    items = [pp.Item({"x": np.zeros((0, 3), np.float32)} if n % 2 else {}, note={"n": n}) for n in range(6)]
    got = [(chunk.index, chunk.note["n"]) for chunk in Job(ONE, read=items, work=double_all, most=MOST)]
    assert got == [(n, n) for n in range(6)]


def double_all(chunk: pp.Chunk, out: pp.Out) -> None:
    for name in out:
        out[name][...] = 2 * chunk[name]


def test_coroutines_push_and_pull() -> None:
    async def serve(stream: pp.Stream) -> list[float]:
        async def push() -> None:
            for chunk in chunks(6):
                await stream.push_async(chunk)
            stream.end()

        pushes = asyncio.create_task(push())
        pulled = [float(chunk["x"][0]) async for chunk in stream]
        await pushes
        return pulled

    async def program() -> list[list[float]]:
        async with Job(ONE, work=double, most=MOST).open(queue=1) as flow:
            one = await serve(flow)
        async with Job(ONE, work=double, most=MOST).streams(queue=1) as streams:
            several = await asyncio.gather(*(serve(streams.begin()) for _ in range(3)))
        return [one, *several]

    assert asyncio.run(program()) == 4 * [[0, 2, 4, 6, 8, 10]]


def test_results_are_lent_to_one_loop_after_the_other() -> None:
    async def program() -> list[float]:
        got = []
        async with Job(ONE, work=double, most=MOST).open() as flow:
            for chunk in chunks(12):
                await flow.push_async(chunk)
                async for result in flow:
                    got.append(float(result["x"][0]))
                    break
        return got

    assert asyncio.run(program()) == [2.0 * n for n in range(12)]


def test_a_stream_that_was_used_by_a_coroutine_is_freed() -> None:
    async def program() -> None:
        async with Job(ONE, work=double, most=MOST).streams() as streams:
            stream = streams.begin()
            await stream.push_async(np.zeros(8, np.float32))
            stream.end()
            assert [float(chunk["x"][0]) async for chunk in stream] == [0]
            freed.append(weakref.ref(stream))
            del stream

    freed: list[Any] = []
    asyncio.run(program())
    gc.collect()
    assert freed[0]() is None


def test_a_coroutine_hears_of_a_fault() -> None:
    async def program() -> None:
        async with Job(ONE, work=lambda chunk, out: 1 / 0, most=MOST).open() as flow:
            await flow.push_async(np.zeros(8, np.float32))
            async for _ in flow:
                pass

    with pytest.raises(pp.StageError, match="division by zero"):
        asyncio.run(program())


def test_a_stage_that_is_stuck_is_an_exception() -> None:
    forever = threading.Event()

    def stick(chunk: pp.Chunk, out: pp.Out) -> None:
        forever.wait()

    with pytest.raises(pp.JobError, match="timed out: rank 0: work: no progress .* stuck_after=") as caught:
        Job(ONE, read=chunks, work=stick, write=print, stuck_after=1, first_after=0).run()
    assert caught.value.code == 9
    forever.set()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Job(ONE, read=chunks, wrok=double), "there is no stage 'wrok'"),
        (lambda: Job(ONE, read=chunks), "stage 'work' of .* is not given"),
        (lambda: Job(ONE, read=chunks, work=double).run(), "'write' is not given"),
        (lambda: list(Job(ONE, read=chunks, work=double, write=print)), "'write' is given"),
        (lambda: Job(ONE, work=double).open(), "most="),
        (lambda: Job("read@0 -> work@", read=chunks, work=double), "write a rank here"),
        (lambda: Job(ONE, read=chunks, work=double, devices=["tpu"], write=print).run(), "a device is cpu, cuda or cuda:N"),
        (lambda: Job(ONE, read=chunks, work=double, devices="cuda:0"), "devices='cuda:0': give a list"),
        (lambda: Job(ONE, read=chunks, work=double, devices=["cpu", "cpu"], write=print).run(), "^devices= names 2 devices"),
        (lambda: Job(ONE, read=chunks, work=double, restarts=-1), "restarts=-1"),
        (lambda: Job(ONE, read=chunks, work=double, restarts=1, write=print).run(), "leave restarts= out"),
        (lambda: Job(ONE, read=chunks, work=double, late="never"), "late='never': give 'block' or 'drop'"),
        (lambda: Job(ONE, read=chunks, work=double, max_latency=0.0, write=print).run(), "max_latency is 0"),
        (lambda: Job(ONE, read=chunks, work=double, depth=0), "depth=0: .* 1 to 256"),
        (lambda: Job(ONE, read=chunks, work=double, stuck_after=float("nan")), "stuck_after=nan: give a number of seconds"),
        (lambda: Job(ONE, work=double, most=MOST).open(queue=0), "queue=0"),
        (lambda: Job(ONE, work=double, most=MOST).streams(room=0), "room=0"),
        (lambda: Job(ONE, read=chunks, work=double, most={"x": (2, 2)}), "most= is .*must be a dict of pp.Spec"),
        (lambda: Job("read@0 -> report@0 -> write@0", read=chunks, report=double), "cannot be called 'report': Job takes .*depth"),
    ],
)
def test_a_job_that_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError, pp.JobError), match=words):
        make()


def assigns(chunk: pp.Chunk, out: pp.Out) -> None:
    out["x"] = chunk["x"]


def names(chunk: pp.Chunk, out: pp.Out) -> None:
    out["y"][...] = chunk["x"]


class Vague(pp.Stage):
    def run(self, chunk: pp.Chunk, out: pp.Out) -> None: ...

    @staticmethod
    def outputs(inputs: Any) -> Any:
        return {"x": (2, 2)}


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (assigns, r"write into it: out\['x'\].copy_"),
        (names, r"there are x; .* outputs\(\)"),
        (Vague, r"outputs\(\) of stage work returned is .*must be a dict of pp.Spec"),
    ],
)
def test_a_stage_that_does_something_else_is_told_what_to_do(stage: Any, words: str) -> None:
    with pytest.raises(pp.StageError, match=words):
        values(Job(ONE, read=chunks, work=stage))


def test_an_array_in_an_item_an_operator_in_place_and_a_sink_with_run_are_taken() -> None:
    got: list[float] = []

    def add(chunk: pp.Chunk, out: pp.Out) -> None:
        out["x"][...] = 1
        out["x"] += chunk["x"]

    class Sink:
        def run(self, chunk: pp.Chunk) -> None:
            got.append(float(chunk["x"][0]))

    Job(ONE, read=[pp.Item(np.ones(3, np.float32))], work=add, write=Sink).run()
    assert got == [2]


def test_a_sink_keeps_chunks_and_another_thread_releases_them() -> None:
    kept: queue.SimpleQueue[Any] = queue.SimpleQueue()
    got: list[float] = []
    most = 0

    def keep(chunk: pp.Chunk) -> None:
        nonlocal most
        kept.put((chunk.keep(), chunk.index, chunk["x"]))
        most = max(most, kept.qsize())

    def release() -> None:
        for _ in range(0, 20, 2):
            # The later one goes first.
            pair = [kept.get(), kept.get()]
            while pair:
                hold, index, x = pair.pop()
                assert index == x[0], "it shows its own chunk"
                got.append(float(x[0]))
                del x
                hold.release()
                hold.release()

    thread = threading.Thread(target=release)
    thread.start()
    done = Job("read@0 -> write@0", read=lambda: chunks(20), write=keep, depth=3).run()
    thread.join()
    assert done is not None and done.chunks == 20 and most <= 3
    assert got == [i + 1 - 2 * (i % 2) for i in range(20)]


def test_a_chunk_that_is_never_released_is_named_and_a_view_kept_beyond_that_is_found() -> None:
    with pytest.raises(pp.JobError, match="timed out: rank 0: wait for the sink: .* not released") as caught:
        Job(ONE, read=chunks, work=double, write=lambda chunk: chunk.keep(), stuck_after=1, first_after=1).run()
    assert caught.value.code == 9
    views: list[Any] = []

    def keep(chunk: pp.Chunk) -> None:
        hold = chunk.keep()
        views.append(chunk["x"])
        hold.release()

    with pytest.raises(pp.StageError, match="write keeps tensor 'x'.*copy"):
        Job("read@0 -> write@0", read=lambda: chunks(20), write=keep).run()
    with pytest.raises(RuntimeError, match="nobody else"):
        for chunk in Job(ONE, read=chunks, work=double):
            chunk.keep()


def test_a_profile_without_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install torch"):
        Job(ONE, read=chunks, work=double, profile="traces")
