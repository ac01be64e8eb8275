"""Packages that `export` writes, in `pp run` and `pp plugin check`: they give what the eager module gives, or are refused.

PP_TEST_PP and PP_TEST_AOTI name the program and the plugin.
PP_TEST_DEVICE=cuda runs all of them on one GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import needs, of_package

import pp_pipeline as pp

torch = needs("torch")

PROGRAM, PLUGIN = os.environ.get("PP_TEST_PP", ""), os.environ.get("PP_TEST_AOTI", "")
if not PROGRAM or not PLUGIN:
    pytest.skip("PP_TEST_PP and PP_TEST_AOTI name the program pp and the plugin aoti", allow_module_level=True)
DEVICE = os.environ.get("PP_TEST_DEVICE", "cpu")
# cuDNN computes with tensor cores and chooses its algorithms by time.
EXACT = 2e-6 if DEVICE == "cpu" else 2e-3
WIDTH, HEIGHT = 64, 48
WHOLE, PARTS = "encode@0,phase_b@0,decode@0", "encode@0,phase_b@1,phase_b@2,decode@0"
Edit = Callable[[str, bytes], "bytes | None"]


class Head(torch.nn.Module):
    def __init__(self, video: pp.Video) -> None:
        super().__init__()
        self.video, self.conv = video, torch.nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, latents_in: Any) -> Any:
        return torch.relu(self.conv(self.video.planes(latents_in)[0] / 255))


class Tail(torch.nn.Module):
    def __init__(self, video: pp.Video) -> None:
        super().__init__()
        self.video, self.conv = video, torch.nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: Any, latents_in: Any, conditioning_embeds: Any) -> Any:
        y, *rest = self.video.planes(latents_in)
        return self.video.latents([y + conditioning_embeds[0].float() * self.conv(x), *rest])


def tiny() -> list[Any]:
    torch.manual_seed(0)
    video = pp.Video(WIDTH, HEIGHT)
    return [Head(video).eval().to(DEVICE), Tail(video).eval().to(DEVICE)]


def write_film(path: Path, planes: Any, width: int, height: int) -> None:
    """One array of bytes for each frame."""
    path.write_bytes(f"YUV4MPEG2 W{width} H{height} F25:1 C420jpeg\n".encode() + b"".join(b"FRAME\n" + p.tobytes() for p in planes))


def read_film(path: Path) -> Any:
    head, rest = path.read_bytes().split(b"\n", 1)
    sizes = {word[:1]: int(word[1:]) for word in head.split() if word[:1] in (b"W", b"H")}
    width, height = sizes[b"W"], sizes[b"H"]
    record = 6 + width * height + 2 * (-(-width // 2) * -(-height // 2))
    return np.frombuffer(rest, np.uint8).reshape(-1, record)[:, 6:]


def run(*arguments: str | Path, **env: str) -> tuple[int, str]:
    # The plugin finds PyTorch where this Python does.
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PP_FLIGHT_OPS": "0", **env}
    done = subprocess.run([PROGRAM, *map(str, arguments)], text=True, capture_output=True, env=environment, timeout=500, check=False)
    return done.returncode, done.stdout + done.stderr


def stream(package: Path, film: Path, out: Path, pipeline: str = WHOLE, *more: str, front: str = DEVICE, **env: str) -> tuple[int, str]:
    """`front` is the device of rank 0."""
    others = [DEVICE] * (2 if "@2" in pipeline else 1 if "@1" in pipeline else 0)
    devices = ",".join([front, *others]).replace("cuda", "cuda:0")
    where = ["--input", film, "--output", out, "--pipeline", pipeline, "--strength", "20", "--devices", devices]
    return run("run", "--kernels", PLUGIN, "--plugin-arg", f"phase_b={package}", *where, *more, **env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def film(folder: Path) -> Path:
    draw = np.random.default_rng(1)
    frames = draw.integers(0, 256, (5, WIDTH * HEIGHT * 3 // 2), np.uint8)
    write_film(folder / "in.y4m", frames, WIDTH, HEIGHT)
    return folder / "in.y4m"


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    pp.export(tiny(), pp.Video(WIDTH, HEIGHT).example(device=DEVICE), folder / "tiny.pt2", parts=2)
    return folder / "tiny.pt2"


def changed(package: Path, to: Path, edit: Edit) -> Path:
    """A copy whose entries were edited; one that becomes None is left out."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(to, "w") as new:
        for info in old.infolist():
            after = edit(info.filename.split("/", 1)[1], old.read(info))
            if after is not None:
                new.writestr(info.filename, after)
    return to


def about(**other: Any) -> Edit:
    """Changes what the package says about itself."""
    return lambda name, data: json.dumps({**json.loads(data), **other}).encode() if name == "extra/pp/package.json" else data


def tensor(at: int, **other: Any) -> Edit:
    """Changes what the package says about its first input."""

    def edit(name: str, data: bytes) -> bytes:
        if name != "extra/pp/package.json":
            return data
        of = json.loads(data)
        of["parts"][at]["inputs"][0].update(other)
        return json.dumps(of).encode()

    return edit


def of_library(old: bytes, new: bytes) -> Edit:
    return lambda name, data: data.replace(old, new) if name.endswith(".so") else data


def test_a_film_is_what_the_eager_module_makes_of_it_in_one_part_and_in_two(package: Path, film: Path, folder: Path) -> None:
    code, said = stream(package, film, folder / "whole.y4m")
    assert code == 0, said
    found = read_film(folder / "whole.y4m")
    for front in {DEVICE, "cpu"}:
        code, said = stream(package, film, folder / "parts.y4m", PARTS, front=front)
        assert code == 0, said
        assert np.array_equal(found, read_film(folder / "parts.y4m"))
    frames = torch.from_numpy(read_film(film).copy()).to(DEVICE)
    luma = frames[:, : WIDTH * HEIGHT].view(-1, 1, HEIGHT, WIDTH).float()
    head, tail = tiny()
    with torch.no_grad():
        made = luma + 20 * tail.conv(torch.relu(head.conv(luma / 255)))
    wanted = made.add(0.5).floor().clamp(0, 255).byte().view(len(frames), -1).cpu().numpy()
    # A value that lies at one half of a step may be rounded either way.
    steps = np.abs(found[:, : WIDTH * HEIGHT].astype(int) - wanted.astype(int))
    assert steps.max() <= 1 and (steps > 0).mean() < 500 * EXACT
    assert np.array_equal(found[:, WIDTH * HEIGHT :], frames[:, WIDTH * HEIGHT :].cpu().numpy())


def test_the_check_passes_and_the_self_test_holds_the_result_against_the_eager_one(package: Path, folder: Path) -> None:
    def exact(name: str, data: bytes) -> bytes:
        if name != "extra/pp/package.json":
            return data
        of = json.loads(data)
        # What goes from part to part is not rounded.
        of["parts"][0]["tolerance"] = EXACT
        return json.dumps(of).encode()

    sharp = changed(package, folder / "sharp.pt2", exact)
    code, said = run("plugin", "check", PLUGIN, "--plugin-arg", f"phase_b={sharp}", "--width", str(WIDTH), "--height", str(HEIGHT))
    assert code == 0 and "parts give what the whole stage gives ... ok" in said, said


REFUSED: dict[str, tuple[Edit, list[str]]] = {
    **({"gpu": (about(capability=[7, 5]), ["compute capability 7.5", "export it on such a GPU"])} if DEVICE == "cuda" else {}),
    "torch": (about(torch="2.4.1"), ["compiled by PyTorch 2.4.1", "PP_LIBTORCH"]),
    "device": (about(device="xpu"), ["compiled for xpu", f"export it with an example on {DEVICE}"]),
    "processor": (about(cpu=["avx9"]), ["processors with avx9", "export it on this machine"]),
    "form": (about(format=9), ["a package of form 9", "version"]),
    "type": (tensor(0, dtype="f32"), ["latents_in F32", "has Bf16", "pp_pipeline.Video"]),
    "shape": (tensor(0, dims=["frames", 9, 64]), ["latents_in Bf16 [4, 9, 64]", "pp_pipeline.Video"]),
    "name": (tensor(0, name="x"), ["takes a tensor x", "phase_b gets latents_in"]),
    "symbol": (of_library(b"aoti_torch_get_data_ptr\0", b"aoti_torch_get_data_ptX\0"), ["undefined symbol", "PyTorch that PP_LIBTORCH"]),
    "function": (of_library(b"AOTInductorModelContainerDelete\0", b"AOTInductorModelContainerDeletX\0"), ["cannot be loaded", "export it"]),
    "no library": (lambda name, data: None if name.endswith(".so") else data, ["has no library", "pp_pipeline.export"]),
    "plain": (lambda name, data: None if name.startswith("extra/") else data, ["does not say which tensors", "pp_pipeline.export"]),
    "example": (lambda name, data: data[:-8] + bytes(8) if name.endswith("part0.example") else data, ["self-test of a part failed"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_package_that_does_not_fit_is_refused_with_the_remedy(case: str, package: Path, film: Path, folder: Path) -> None:
    edit, words = REFUSED[case]
    code, said = stream(changed(package, folder / "changed.pt2", edit), film, folder / "out.y4m")
    assert code != 0 and all(word in said for word in words), said


def test_a_file_that_is_no_whole_package_and_a_missing_pytorch_are_refused(package: Path, film: Path, folder: Path) -> None:
    whole, cut = package.read_bytes(), folder / "cut.pt2"
    middle = whole.index(b"\x7fELF") + 5000
    for data, words in (
        (whole[: len(whole) // 2], "cut off or damaged"),
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "cut off or damaged"),
        (b"", "cut off or damaged"),
    ):
        cut.write_bytes(data)
        code, said = stream(cut, film, folder / "out.y4m")
        assert code != 0 and words in said and "copy it again" in said, said
    for bad, words in ((cut, "cut off or damaged"), (changed(package, folder / "changed.pt2", about(torch="2.4.1")), "PyTorch 2.4.1")):
        code, said = run("plugin", "check", PLUGIN, "--plugin-arg", f"phase_b={bad}", "--width", str(WIDTH), "--height", str(HEIGHT))
        assert code == 5 and f"every size ... FAILED: kernels aoti failed in create: {bad}" in said and words in said, said
    code, said = stream(package, film, folder / "out.y4m", "encode@0,phase_b@0,phase_b@1,phase_b@0,decode@0", "--denoise-steps", "3")
    assert code != 0 and "has 2 parts" in said and "parts=3" in said, said
    code, said = stream(folder / "missing.pt2", film, folder / "out.y4m")
    assert code != 0 and "STAGE=FILE.pt2" in said, said
    code, said = stream(package, film, folder / "out.y4m", PP_LIBTORCH=str(folder))
    assert code != 0 and "there is no libtorch.so" in said, said
    code, said = stream(package, film, folder / "out.y4m", VIRTUAL_ENV="", PATH=str(folder))
    assert code != 0 and "no PyTorch was found" in said and "PP_LIBTORCH" in said, said
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"pp-aoti-{os.getpid()}-*"))


class Fold(torch.nn.Module):
    """Frames to latents of another shape: six planes of half the size."""

    def __init__(self, video: pp.Video) -> None:
        super().__init__()
        self.video = video

    def forward(self, frames: Any) -> Any:
        y, u, v = self.video.planes(frames)
        return torch.cat((torch.nn.functional.pixel_unshuffle(y, 2), u, v), 1)


class Invert(torch.nn.Module):
    def forward(self, latents_in: Any, denoising_step_list: Any) -> Any:
        return 255 - latents_in + 0 * denoising_step_list.sum()


class Unfold(torch.nn.Module):
    def __init__(self, video: pp.Video) -> None:
        super().__init__()
        self.video = video

    def forward(self, latents_out: Any) -> Any:
        x = latents_out.float()
        return self.video.latents([torch.nn.functional.pixel_shuffle(x[:, :4], 2), x[:, 4:5], x[:, 5:]])


def test_packages_stand_in_place_of_encode_and_decode(package: Path, film: Path, folder: Path) -> None:
    video, names = pp.Video(WIDTH, HEIGHT), ("encode", "invert", "decode")
    fold, invert, unfold = (folder / f"{name}.pt2" for name in names)
    chunk = video.example(device=DEVICE, name="frames")
    pp.export(Fold(video).eval(), chunk, fold)
    latents = Fold(video)(chunk["frames"]).bfloat16()
    pp.export(Invert().eval(), {**video.example(device=DEVICE), "latents_in": latents}, invert)
    pp.export(Unfold(video).eval(), {"latents_out": latents}, unfold)
    given = ["--plugin-arg", f"encode={fold}", "--plugin-arg", f"decode={unfold}"]
    frames = read_film(film)
    for pipeline in (WHOLE, "encode@0,phase_b@1,decode@0"):
        code, said = stream(invert, film, folder / "out.y4m", pipeline, *given)
        assert code == 0, said
        assert np.array_equal(read_film(folder / "out.y4m"), 255 - frames)
    code, said = stream(invert, film, folder / "out.y4m", WHOLE, *given, "--denoise-steps", "0")
    assert code == 0 and np.array_equal(read_film(folder / "out.y4m"), frames), said
    size = ["--width", str(WIDTH), "--height", str(HEIGHT)]
    code, said = run("plugin", "check", PLUGIN, "--plugin-arg", f"phase_b={invert}", *given, *size)
    assert code == 0, said
    shape = list(latents.shape[1:])
    for phase_b, more, words in (
        (invert, ["--plugin-arg", f"encode={unfold}"], f"{unfold} is no package for encode, which takes frames and makes latents_in"),
        (invert, ["--plugin-arg", f"decode={invert}"], f"{invert} is no package for decode, which takes latents_out and makes frames"),
        (fold, [], f"{fold} is no package for phase_b, which takes latents_in and makes latents_out"),
        (package, given, f"is for latents_in Bf16 [4, 72, 64], and a chunk of this film has Bf16 [4, {shape[0]}, {shape[1]}, {shape[2]}]"),
        (invert, ["--plugin-arg", f"code={fold}"], "unknown argument code: this plugin takes --plugin-arg STAGE=FILE.pt2"),
    ):
        code, said = stream(phase_b, film, folder / "out.y4m", WHOLE, *more)
        assert code != 0 and words in said, said


def test_export_says_what_it_does_not_take(tmp_path: Path) -> None:
    video, blocks = pp.Video(WIDTH, HEIGHT), tiny()
    for wrong, words in (
        (lambda: pp.export(blocks, video.example(), tmp_path / "a.pt2", parts=3), "does not cut 2 blocks"),
        (lambda: pp.export(blocks, video.example(frames=1), tmp_path / "a.pt2"), "two frames or more"),
        (lambda: pp.export(blocks, {"latents_out": torch.zeros(2, 4)}, tmp_path / "a.pt2"), "latents_out is torch.float32"),
        (lambda: pp.export([blocks[0].train()], video.example(), tmp_path / "a.pt2"), "call .eval"),
        (lambda: pp.Video(8, 8, "411"), "chroma '411'"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    assert not list(tmp_path.iterdir())


# FFDNet as its paper describes it: half the resolution, the noise level as one more plane, and convolutions.
class Down(torch.nn.Module):
    def __init__(self, video: pp.Video) -> None:
        super().__init__()
        self.video = video

    def forward(self, latents_in: Any, conditioning_embeds: Any) -> Any:
        y = torch.nn.functional.pixel_unshuffle(self.video.planes(latents_in)[0] / 255, 2)
        return torch.cat(((conditioning_embeds[0].float() / 255).expand(y.shape[0], 1, *y.shape[2:]), y), 1)


class Up(torch.nn.Module):
    def __init__(self, video: pp.Video) -> None:
        super().__init__()
        self.video = video

    def forward(self, x: Any, latents_in: Any) -> Any:
        y, *rest = self.video.planes(latents_in)
        return self.video.latents([y - 255 * torch.nn.functional.pixel_shuffle(x, 2), *rest])


def ffdnet(layers: list[Any], video: pp.Video) -> list[Any]:
    blocks: list[Any] = [Down(video)]
    for at, (weight, bias) in enumerate(layers):
        conv = torch.nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=1)
        conv.weight.data, conv.bias.data = weight, bias
        blocks.append(conv if at + 1 == len(layers) else torch.nn.Sequential(conv, torch.nn.ReLU()))
    return [block.eval().to(DEVICE) for block in (*blocks, Up(video))]


def test_ffdnet_denoises_the_sample_clip_as_the_eager_module_does(example: Any, folder: Path) -> None:
    width, height = 352, 288
    video, samples = pp.Video(width, height), width * height
    weights = of_package("ffdnet", "ffdnet_weights_gray.pth")
    blocks = ffdnet(example("denoiser").convolutions(weights), video)
    package = folder / "ffdnet.pt2"
    pp.export(blocks, video.example(device=DEVICE), package, parts=2)
    clip = zlib.decompress((Path(__file__).parents[2] / "assets/cup.y4m.zlib").read_bytes())
    clean = folder / "clean.y4m"
    start = clip.index(b"\n") + 1
    clean.write_bytes(clip[: start + 12 * (6 + samples * 3 // 2)])
    code, said = stream(package, clean, folder / "noisy.y4m", WHOLE, "--add-noise", "20", "--denoise-steps", "0")
    assert code == 0, said
    for name, pipeline in (("whole", WHOLE), ("parts", PARTS)):
        code, said = stream(package, folder / "noisy.y4m", folder / f"{name}.y4m", pipeline)
        assert code == 0, said
    found, noisy, original = (read_film(folder / f"{name}.y4m")[:, :samples] for name in ("whole", "noisy", "clean"))
    assert np.array_equal(found, read_film(folder / "parts.y4m")[:, :samples])
    luma = torch.from_numpy(noisy.copy()).to(DEVICE).view(-1, 1, height, width).float()
    chunk = {"latents_in": video.latents([luma, *(torch.zeros(len(luma), 1, *size, device=DEVICE) for size in video.sizes[1:])])}
    with torch.no_grad():
        value = blocks[0](chunk["latents_in"], torch.full((3,), 20.0, device=DEVICE))
        for block in blocks[1:-1]:
            value = block(value)
        eager = video.planes(blocks[-1](value, chunk["latents_in"]))[0].byte().view(len(luma), -1).cpu().numpy()

    def psnr(of: Any) -> float:
        return float(10 * np.log10(255**2 / np.mean((of.astype(float) - original.astype(float)) ** 2)))

    print(f"luma PSNR {psnr(noisy):.3f} dB before, {psnr(found):.3f} dB as a package, {psnr(eager):.3f} dB in the eager module")
    assert abs(psnr(found) - psnr(eager)) < 0.05 and psnr(found) > psnr(noisy) + 18
