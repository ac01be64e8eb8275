"""Runs a video diffusion transformer, its blocks in as many parts as the pipeline has, and compares with the whole model.

python transformer.py small|1.3B ["read@0 -> blocks@1 -> blocks@2 -> write@0" [cpu,cuda:0,cuda:0]]
The model is Wan 2.1 of the package `diffusers` on PyPI, with random weights from a seed; 1.3B needs a GPU. A chunk is one call of it.
"""

import sys

import pp_pipeline as pp
import torch
from diffusers import WanTransformer3DModel

SMALL = {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 256, "num_layers": 7, "text_dim": 64, "freq_dim": 64}
LARGE = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30, "text_dim": 4096}
# The model, its type, the size of a token, and height and width of the latents, which have 3 frames.
SIZES = {"small": (SMALL, torch.float32, 96, 12, 16), "1.3B": (LARGE, torch.bfloat16, 1536, 60, 104)}


def model(device):
    config, dtype, *_ = SIZES[sys.argv[1]]
    torch.manual_seed(0)
    with torch.device(device):
        net = WanTransformer3DModel(**config).eval()
    for module in (net.patch_embedding, net.condition_embedder, net.blocks, net.proj_out):
        module.to(dtype)
    return net


def chunks(count=8):
    config, dtype, _, height, width = SIZES[sys.argv[1]]
    for i in range(count):
        draw = torch.Generator().manual_seed(i)
        x, text = (torch.randn(of, generator=draw).to(dtype) for of in ((1, 16, 3, height, width), (1, 512, config["text_dim"])))
        yield {"x": x, "time": torch.tensor([999 - 100 * i]), "text": text}


class Blocks(pp.Stage):
    arrays = "torch"

    def __init__(self, at):
        net = self.net = model(at.device)
        net.blocks = net.blocks[len(net.blocks) * at.part // at.parts : len(net.blocks) * (at.part + 1) // at.parts]

    @staticmethod
    def outputs(inputs, at):
        if at.part == at.parts - 1:
            return {"x": inputs["x"]}
        _, dtype, size, height, width = SIZES[sys.argv[1]]
        shapes = {"hidden": (3 * height * width // 4,), "temb": (), "steps": (6,), "text": (512,)}
        return {"x": inputs["x"], **{name: pp.Spec((1, *shape, size), dtype) for name, shape in shapes.items()}}

    def run(self, chunk, out):
        net, x = self.net, chunk["x"]
        if "hidden" in chunk:
            hidden, temb, steps, text = (chunk[name] for name in ("hidden", "temb", "steps", "text"))
        else:
            hidden = net.patch_embedding(x).flatten(2).transpose(1, 2).contiguous()
            temb, steps, text, _ = net.condition_embedder(chunk["time"], chunk["text"])
        rotary = net.rope(x)  # It depends on the shape alone, so each part makes its own.
        for block in net.blocks:
            hidden = block(hidden, text, steps.view(1, 6, -1), rotary)
        if "hidden" in out:
            for name, made in (("x", x), ("hidden", hidden), ("temb", temb), ("steps", steps), ("text", text)):
                out[name].copy_(made.view_as(out[name]))
        else:
            shift, scale = (net.scale_shift_table + temb.unsqueeze(1)).chunk(2, dim=1)
            hidden = net.proj_out((net.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden))
            patches = out["x"].unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 2, 3, 5, 4, 6, 1)
            patches.copy_(hidden.view_as(patches))


if __name__ == "__main__":
    devices = sys.argv[3].split(",") if sys.argv[3:] else None
    job = pp.Job([*sys.argv[2:], "read@0 -> blocks@0 -> write@0"][0], devices=devices, read=chunks, blocks=Blocks)
    if made := [chunk["x"].to("cpu", copy=True) for chunk in job]:
        device = devices[-1] if devices else "cpu"
        with torch.inference_mode():
            net = model(device)
            plain = [net(*(tensor.to(device) for tensor in chunk.values()), return_dict=False)[0].cpu() for chunk in chunks()]
        print(f"{sum(map(torch.equal, made, plain))} of {len(made)} chunks have the bytes of the whole model")
