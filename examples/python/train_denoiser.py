"""Trains a small convolutional denoiser on two ranks, and says what it gains on pictures that it has not seen.

python train_denoiser.py [--steps 2000] [--weights FOLDER] [--pt2 net.pt2 [--size 1280x720]]
The pictures are grey ones that scikit-image ships; without it, made ones. The network learns the noise (K. Zhang et al., "Beyond a
Gaussian Denoiser", 2017), at half the size of the picture.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import pp_pipeline as pp
import torch
from pp_pipeline import train
from torch import nn

SIGMA = 20 / 255
MICROBATCHES, ROWS, SIDE, WIDTH, DEPTH = 8, 2, 32, 32, 3
LEARNS, HELD_OUT = ("brick", "grass", "gravel", "moon", "page", "text", "clock", "cell"), ("camera", "coins")


def stage(number):
    """Half of the network. The whole of it gives the noise in a picture, one channel from 0 to 1."""
    layers = [nn.PixelUnshuffle(2), nn.Conv2d(4, WIDTH, 3, padding=1), nn.ReLU()] if number == 0 else []
    for _ in range(DEPTH):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Conv2d(WIDTH, 4, 3, padding=1), nn.PixelShuffle(2)] if number else []))


def pictures(names):
    try:
        from skimage import data
    except ImportError:
        x = torch.linspace(0, 9, 256)
        return [torch.sin(x * (k + 1) / 3).outer(torch.cos(x)).mul(0.4).add(0.5) for k, _ in enumerate(names)]
    return [torch.from_numpy(np.ascontiguousarray(getattr(data, name)())).float() / 255 for name in names]


def batches(steps):
    """Noisy patches, and the noise in them. Every rank makes the same."""
    made, films = torch.Generator().manual_seed(1), pictures(LEARNS)
    for _ in range(steps):
        patches = []
        for film in torch.randint(len(films), (MICROBATCHES * ROWS,), generator=made).tolist():
            y, x = (int(torch.randint(size - SIDE + 1, (1,), generator=made)) for size in films[film].shape)
            patches.append(films[film][y : y + SIDE, x : x + SIDE].rot90(int(torch.randint(4, (1,), generator=made))))
        noise = torch.randn(len(patches), 1, SIDE, SIDE, generator=made) * SIGMA
        yield torch.stack(patches)[:, None] + noise, noise


def psnr(a, b):
    return -10 * math.log10(float((a - b).square().mean()))


def gains(net):
    """Of each held-out picture the PSNR with noise, and behind the network, in dB."""
    made = torch.Generator().manual_seed(2)
    for name, clean in zip(HELD_OUT, pictures(HELD_OUT), strict=True):
        clean = clean[None, None, : len(clean) // 2 * 2, : clean.shape[1] // 2 * 2]
        noisy = clean + torch.randn(clean.shape, generator=made) * SIGMA
        with torch.no_grad():
            yield name, psnr(noisy, clean), psnr(noisy - net(noisy), clean)


class Denoise(nn.Module):
    """The network as `pp run` calls it."""

    def __init__(self, video, net):
        super().__init__()
        self.video, self.net = video, net

    def forward(self, latents_in):
        y, u, v = self.video.planes(latents_in)
        return self.video.latents([y - 255 * self.net(y / 255), u, v])


def learn(steps, folder):
    """Trains, and leaves what each rank has learnt in a folder. Gives the network at rank 0, nothing at rank 1."""
    begun, losses, every = time.monotonic(), [], max(1, steps // 20)
    with train.Trainer(
        "1f1b",
        ranks=2,
        microbatches=MICROBATCHES,
        stages=stage,
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, 2e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    ) as trainer:
        for step, batch in enumerate(batches(steps), 1):
            losses.append(trainer.step(batch))
            if step % every == 0 and 0 in trainer.modules:
                patches = step * MICROBATCHES * ROWS / (time.monotonic() - begun)
                print(f"step {step}: loss {sum(losses[-every:]) / every:.6f}, {patches:.0f} patches/s", flush=True)
        for number, module in trainer.modules.items():
            torch.save(module.state_dict(), folder / f"stage{number}.pt")
        # Both ranks come to this once they have written theirs.
        trainer.evaluate(batch)
        if 0 not in trainer.modules:
            return None
    net = nn.Sequential(stage(0), stage(1)).eval()
    for number, part in enumerate(net):
        part.load_state_dict(torch.load(folder / f"stage{number}.pt", weights_only=True))
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--weights", type=Path, default=Path("denoiser"), help="the folder of the trained weights")
    parser.add_argument("--pt2", help="where the trained network goes for `pp run`")
    parser.add_argument("--size", default="1280x720", help="the size of the film of --pt2")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give 1 or more")
    torch.set_num_threads(1)
    args.weights.mkdir(parents=True, exist_ok=True)
    net = learn(args.steps, args.weights)
    if net is None:
        return
    for name, before, after in gains(net):
        print(f"{name}: {before:.2f} dB with noise, {after:.2f} dB denoised, {after - before:+.2f} dB", flush=True)
    if args.pt2:
        video = pp.Video(*map(int, args.size.split("x")))
        pp.export(Denoise(video, net).eval(), video.example(), args.pt2)


if __name__ == "__main__":
    main()
