"""Stages in PyTorch on a CPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Film, needs

import pp_pipeline as pp
from pp_pipeline._group import Group

torch = needs("torch")

ONE = "read@0 -> work@0 -> write@0"


def chunks(count: int = 4, size: int = 8) -> Any:
    for i in range(count):
        yield {"x": torch.full((size,), float(i))}


def double(chunk: pp.Chunk, out: pp.Out) -> None:
    out["x"].copy_(2 * chunk["x"])


def refused(work: Any, words: str) -> None:
    with pytest.raises(pp.StageError, match=words):
        pp.Job(ONE, read=chunks, work=work, write=lambda chunk: None).run()


def test_a_module_runs_in_parts_in_inference_mode() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Sigmoid())

    class Part(pp.Stage):
        def __init__(self, at: pp.At) -> None:
            self.net = layers[2 * at.part : 2 * at.part + 2]

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            assert torch.is_inference_mode_enabled()
            out["x"].copy_(self.net(chunk["x"]))

    job = pp.Job("read@0 -> part@0 -> part@0 -> write@0", read=chunks, part=Part)
    got = [chunk["x"].clone() for chunk in job]
    with torch.inference_mode():
        for chunk, made in zip(chunks(), got, strict=True):
            assert torch.equal(layers(chunk["x"]), made)


def test_every_type_goes_through() -> None:
    names = "uint8 int8 bool int16 uint16 int32 uint32 int64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2"
    item = {name: torch.arange(3).to(getattr(torch, name)) for name in names.split()}

    def same(chunk: pp.Chunk, out: pp.Out) -> None:
        for name, tensor in chunk.items():
            out[name].copy_(tensor)

    for chunk in pp.Job(ONE, read=[item], work=same):
        for name, tensor in item.items():
            assert chunk[name].dtype == tensor.dtype and torch.equal(chunk[name].float(), tensor.float())


def test_a_tensor_that_is_kept_is_found() -> None:
    kept: list[Any] = []

    def whole(chunk: pp.Chunk, out: pp.Out) -> None:
        double(chunk, out)
        kept.append(chunk["x"])

    def part(chunk: pp.Chunk, out: pp.Out) -> None:
        double(chunk, out)
        kept.append(out["x"][1:])

    class Graph(pp.Stage):
        inference = False
        weight = torch.ones(8, requires_grad=True)

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            y = self.weight * chunk["x"]
            out["x"].copy_(y.detach())
            kept.append(y)

    for work in (whole, part, Graph):
        refused(work, "work keeps tensor 'x'")
    assert all(tensor.shape[0] >= 7 for tensor in kept)


def test_a_tensor_that_came_is_not_written_and_one_that_goes_is() -> None:
    def write(chunk: pp.Chunk, out: pp.Out) -> None:
        chunk["x"].mul_(2)
        double(chunk, out)

    refused(write, "wrote into tensor 'x', which it received")
    refused(lambda chunk, out: None, "did not write tensor 'x'")

    def by_numpy(chunk: pp.Chunk, out: pp.Out) -> None:
        out["x"].numpy()[...] = 2 * chunk["x"].numpy()
        out.written("x")

    assert [float(chunk["x"][0]) for chunk in pp.Job(ONE, read=chunks, work=by_numpy)] == [0, 2, 4, 6]


def test_the_callers_settings_hold_in_the_stage() -> None:
    seen: list[Any] = []

    class Look(pp.Stage):
        inference = False

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            double(chunk, out)

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        pp.Job(ONE, read=chunks(1), work=Look, write=lambda chunk: None).run()
    pp.Job(ONE, read=chunks(1), work=Look, write=lambda chunk: None).run()
    assert seen[0] == (False, True, torch.bfloat16) and seen[1][:2] == (True, False)


def test_a_loader_with_workers_is_a_source() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)
    assert [chunk["x"].tolist() for chunk in pp.Job(ONE, read=loader, work=double)] == [[0, 2], [4, 6], [8, 10], [12, 14]]


def test_a_group_works_on_tensors(film: Film) -> None:
    code, out, error = film.run(
        """
        import torch

        class Sum(pp.Stage):
            def __init__(self, at):
                self.group = at.group

            def run(self, chunk, out):
                group = self.group
                x = out["x"] if group.leads else torch.full((8,), 0.5)
                if group.leads:
                    x.copy_(chunk["x"])
                group.all_reduce(x)
                y = out["y"] if group.leads else torch.zeros(3, dtype=torch.bfloat16)
                if not group.leads:
                    y += 2
                # Nothing but this writes it at the leader.
                group.broadcast(y, root=1)
                if (HERE / "spoil").exists() and group.leads:
                    group.receive(chunk["x"], 1)
                elif (HERE / "spoil").exists():
                    group.send(x, 0)

            @staticmethod
            def outputs(inputs):
                return {**inputs, "y": pp.Spec((3,), torch.bfloat16)}

        if __name__ == "__main__":
            job = lambda: pp.Job("read@0 -> sum@1+2 -> write@0", read=chunks(3), sum=Sum)
            print([(float(chunk["x"][7]), float(chunk["y"][2])) for chunk in job()])
            (HERE / "spoil").touch()
            try:
                list(job())
            except pp.StageError as error:
                print(str(error).splitlines()[0])
        """
    )
    lines = out.splitlines()
    assert code == 0 and lines[0] == "[(0.5, 2.0), (1.5, 2.0), (2.5, 2.0)]", (out, error)
    assert "wrote into tensor 'x', which it received" in lines[1], out


def test_a_group_on_a_gpu_says_that_its_stream_uses_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor(torch.Tensor):  # type: ignore[misc]
        def record_stream(self, stream: Any) -> None:
            used.append(stream)
            if is_foreign:
                raise RuntimeError("ptr not found in ptr_info")

    used: list[Any] = []
    stream = SimpleNamespace(device=torch.device("cpu"), cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    native: Any = SimpleNamespace(all_reduce=lambda place, dtype: None)
    group = Group(0, 2, native, stream)
    x = torch.ones(4).as_subclass(Tensor)
    is_foreign = False
    group.all_reduce(x)
    assert used == [stream]
    is_foreign = True
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    group.all_reduce(x)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    with pytest.raises(RuntimeError, match="ptr not found"):
        group.all_reduce(x)


def test_each_rank_writes_a_profile(film: Film) -> None:
    code, out, error = film.run(
        """
        import torch

        def sine(chunk, out):
            torch.sin(chunk["x"], out=out["x"])

        if __name__ == "__main__":
            pp.Job("read@0 -> sine@1 -> write@0", read=chunks(3), sine=sine, write=lambda chunk: None, profile=HERE / "traces").run()
        """
    )
    assert code == 0, error
    traces = [json.loads((film.path.parent / f"traces/rank{rank}.json").read_text()) for rank in range(2)]
    sines = [sum(event.get("name") == "aten::sin" for event in trace["traceEvents"]) for trace in traces]
    assert sines == [0, 3], sines
