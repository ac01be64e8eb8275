"""Trains a small convolutional denoiser on two ranks, and says what it gains on pictures that it has not seen.

python train_denoiser.py [--steps 2000] [--weights FOLDER] [--resume] [--pt2 net.pt2 [--size 1280x720]]
FOLDER gets checkpoints, and losses.svg, a picture of the losses. The training pictures are grey ones that scikit-image ships; without it,
made ones. The network learns the noise (K. Zhang et al., "Beyond a Gaussian Denoiser", 2017), at half the size of the picture.
"""

import argparse
import math
import resource
import time
from pathlib import Path

import numpy as np
import pp_pipeline as pp
import torch
from pp_pipeline import train
from safetensors.torch import load_file
from torch import nn

SIGMA = 20 / 255
RANKS, MICROBATCHES, ROWS, SIDE, WIDTH, DEPTH = 2, 8, 2, 32, 32, 3
LEARNS, HELD_OUT = ("brick", "grass", "gravel", "moon", "page", "text", "clock", "cell"), ("camera", "coins")


def stage(number):
    """Half of the network. The whole of it gives the noise in a picture, one channel from 0 to 1."""
    layers = [nn.PixelUnshuffle(2), nn.Conv2d(4, WIDTH, 3, padding=1), nn.ReLU()] if number == 0 else []
    for _ in range(DEPTH):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Conv2d(WIDTH, 4, 3, padding=1), nn.PixelShuffle(2)] if number else []))


def pictures(names):
    """Pictures by their names."""
    try:
        from skimage import data
    except ImportError:
        x = torch.linspace(0, 9, 256)
        return {f"made {k}": torch.sin(x * (k + 1) / 3).outer(torch.cos(x)).mul(0.4).add(0.5) for k, _ in enumerate(names)}
    return {name: torch.from_numpy(np.ascontiguousarray(getattr(data, name)())).float() / 255 for name in names}


def batches(steps):
    """Noisy patches, and the noise in them. Every rank makes the same."""
    made, films = torch.Generator().manual_seed(1), list(pictures(LEARNS).values())
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
    for name, clean in pictures(HELD_OUT).items():
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


def picture(losses, path):
    """Draws the losses on a logarithmic scale, each point the mean of its neighbours."""
    count = min(200, len(losses))
    means = [math.log10(np.mean(losses[len(losses) * i // count : len(losses) * (i + 1) // count])) for i in range(count)]
    low, high = min(means), max(means)
    points = " ".join(f"{70 + 510 * i / max(1, count - 1):.1f},{20 + 290 * (high - y) / ((high - low) or 1):.1f}" for i, y in enumerate(means))
    path.write_text(
        f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 350" font-family="sans-serif" font-size="12">
<rect width="600" height="350" fill="white"/><path d="M70 20V310H580" stroke="black" fill="none"/>
<text x="65" y="24" text-anchor="end">{10**high:.2g}</text><text x="65" y="314" text-anchor="end">{10**low:.2g}</text>
<text x="70" y="330">1</text><text x="580" y="330" text-anchor="end">{len(losses)}</text><text x="325" y="340" text-anchor="middle">step</text>
<text x="20" y="165" text-anchor="middle" transform="rotate(-90 20 165)">loss</text>
<polyline points="{points}" stroke="#0868ac" stroke-width="1.5" fill="none"/></svg>
'''
    )


def told(trainer, seconds, steps):
    """How the last steps went, which took so many seconds."""
    # The ranks are idle while none of their actions is at work: in bubbles, and at exchange, optimizer and data.
    work = MICROBATCHES * sum(sum(times.values()) for times in trainer.times().values())
    idle, memory = 1 - work / (RANKS * seconds / steps), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    loss, patches = np.mean(trainer.losses[-steps:]), steps * MICROBATCHES * ROWS / seconds
    return f"loss {loss:.6f}, {patches:.0f} patches/s, idle {idle:.0%}, {memory:.0f} MB at rank 0"


def learn(args):
    """Trains. Gives the network at rank 0, nothing at rank 1."""
    every = max(1, args.steps // 20)
    trainer = train.Trainer(
        "1f1b",
        ranks=RANKS,
        microbatches=MICROBATCHES,
        stages=stage,
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, 2e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps),
        names=lambda number, name: f"{number}.{name}",
        checkpoint=args.weights,
        every=args.every,
        resume=args.resume,
        timing=True,
    )
    with trainer:
        begun = None
        for batch in trainer.batches(batches(args.steps)):
            trainer.step(batch)
            step, now = len(trainer.losses), time.monotonic()
            if begun is not None and step % every == 0 and 0 in trainer.modules:
                print(f"step {step}: {told(trainer, now - begun[0], step - begun[1])}", flush=True)
                picture(trainer.losses, args.weights / "losses.svg")
            # The first step starts the ranks, and is not counted.
            if begun is None or step % every == 0:
                begun = now, step
        if 1 in trainer.modules:
            return None
    net, folder = nn.Sequential(stage(0), stage(1)).eval(), args.weights / f"step-{args.steps}"
    net.load_state_dict({name: value for part in folder.glob("stage-?.safetensors") for name, value in load_file(part).items()})
    return net


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="a multiple of --every")
    parser.add_argument("--every", type=int, default=100, help="steps from a checkpoint to the next")
    parser.add_argument("--weights", type=Path, default=Path("denoiser"), help="the folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    parser.add_argument("--pt2", help="where the trained network goes for `pp run`")
    parser.add_argument("--size", default="1280x720", help="the size of the film of --pt2")
    args = parser.parse_args()
    if args.steps < 1 or args.every < 1 or args.steps % args.every:
        parser.error(f"--steps {args.steps}: give a multiple of --every {args.every}, above 0")
    torch.set_num_threads(1)
    args.weights.mkdir(parents=True, exist_ok=True)
    net = learn(args)
    if net is None:
        return
    for name, before, after in gains(net):
        print(f"{name}: {before:.2f} dB with noise, {after:.2f} dB denoised, {after - before:+.2f} dB", flush=True)
    if args.pt2:
        video = pp.Video(*map(int, args.size.split("x")))
        pp.export(Denoise(video, net).eval(), video.example(), args.pt2)


if __name__ == "__main__":
    main()
