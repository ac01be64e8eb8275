"""Stages in PyTorch on GPUs. They run where PyTorch sees one; several ranks share it."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Film, cells

import pp_pipeline as pp

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

ONE = "read@0 -> work@0 -> write@0"


def chunks(count: int = 8, size: int = 1 << 20) -> Any:
    for i in range(count):
        yield {"x": torch.full((size,), float(i))}


def double(chunk: pp.Chunk, out: pp.Out) -> None:
    torch.mul(chunk["x"], 2, out=out["x"])


def test_one_rank_on_a_gpu_runs_and_lends_results() -> None:
    got: list[Any] = []
    job = pp.Job(ONE, devices=["cuda:0"], read=chunks, work=double, write=lambda chunk: got.append(chunk["x"].clone()))
    job.run()
    torch.cuda.synchronize()
    assert [float(x[-1]) for x in got] == [2.0 * i for i in range(8)] and got[0].is_cuda
    job = pp.Job(ONE, devices=["cuda:0"], read=chunks, work=double)
    assert [float(chunk["x"].sum() / chunk["x"].numel()) for chunk in job] == [2.0 * i for i in range(8)]


def test_a_tensor_that_is_kept_written_or_left_out_is_found() -> None:
    kept: list[Any] = []

    def keep(chunk: pp.Chunk, out: pp.Out) -> None:
        double(chunk, out)
        kept.append(chunk["x"][1:])

    def write(chunk: pp.Chunk, out: pp.Out) -> None:
        chunk["x"].mul_(2)
        double(chunk, out)

    for work, words in ((keep, "keeps tensor"), (write, "which it received"), (lambda chunk, out: None, "did not write")):
        with pytest.raises(pp.StageError, match=words):
            pp.Job(ONE, devices=["cuda:0"], read=chunks, work=work, write=lambda chunk: None).run()


def test_a_gpu_between_cpus_and_restarts_give_the_bytes_of_one_rank(film: Film) -> None:
    code, out, error = film.run(
        """
        import hashlib, torch

        class Net(pp.Stage):
            def __init__(self, at):
                torch.manual_seed(at.part)
                self.net = torch.nn.Conv2d(4, 4, 3, padding=1).to(at.device)

            def run(self, chunk, out):
                if (HERE / "die").exists() and chunk.index == 5 and once("died"):
                    os.kill(os.getpid(), signal.SIGKILL)
                out["x"].copy_(self.net(chunk["x"]))

        def images():
            for i in range(12):
                yield {"x": torch.rand((2, 4, 64, 64), generator=torch.Generator().manual_seed(i))}

        if __name__ == "__main__":
            torch.backends.cudnn.deterministic = True
            for text, devices, restarts in (
                ("read@0 -> net@0 -> net@0 -> write@0", ["cuda:0"], 0),
                ("read@0 -> net@1 -> net@2 -> write@0", ["cpu", "cuda:0", "cuda:0"], 0),
                ("read@0 -> net@1 -> net@2 -> write@0", ["cpu", "cuda:0", "cuda:0"], 1),
            ):
                digest = hashlib.sha256()
                if restarts:
                    (HERE / "die").touch()
                job = pp.Job(text, devices=devices, read=images, net=Net, restarts=restarts)
                for chunk in job:
                    digest.update(chunk["x"].cpu().numpy().tobytes())
                print(digest.hexdigest())
        """
    )
    digests = out.split()
    assert code == 0 and len(digests) == 3 and len(set(digests)) == 1, (out, error)
    assert (film.path.parent / "died").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_that_share_a_gpu_train_with_the_bits_of_one_process(dtype: str) -> None:
    assert cells(2, 2, 3, 3, "--device", "cuda:0", "--dtype", dtype) == ["32 cells, 0 wrong"] * 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank of a group has a GPU of its own")
def test_a_group_works_on_tensors_of_two_gpus(film: Film) -> None:
    code, out, error = film.run(
        """
        import torch

        class Sum(pp.Stage):
            def __init__(self, at):
                self.group, self.device = at.group, at.device

            def run(self, chunk, out):
                group, (count,) = self.group, chunk.specs["x"].shape
                x = out["x"] if group.leads else torch.full((count,), 0.5, device=self.device)
                part = torch.empty(count // 2, device=self.device)
                group.scatter(chunk["x"] if group.leads else None, part)
                part.add_(group.member)
                group.gather(part, x if group.leads else None)
                group.all_reduce(x)
                total = x.sum().reshape(1)
                group.broadcast(total)
                group.barrier()
                if group.leads:
                    group.receive(out["total"], 1)
                else:
                    group.send(total, 0)
                    try:
                        group.all_reduce(torch.zeros(4))
                    except ValueError as error:
                        print(error, file=sys.stderr)

            @staticmethod
            def outputs(inputs):
                return {**inputs, "total": pp.Spec((1,), "float32")}

        if __name__ == "__main__":
            job = pp.Job("read@0 -> sum@1+2 -> write@0", devices=["cpu", "cuda:0", "cuda:1"], read=chunks(4, 1024), sum=Sum)
            print([(float(chunk["x"][0]), float(chunk["x"][-1]), float(chunk["total"])) for chunk in job])
        """
    )
    wanted = [(i + 0.5, i + 1.5, 1024.0 * (i + 1)) for i in range(4)]
    assert (code, out) == (0, f"{wanted}\n"), (out, error)
    assert error.count("a group on GPUs takes tensors of cuda:1, and this one is on cpu") == 4, error
