"""The same windowed patch attention in PyTorch, to time beside ours: one pass over a chunk of 1280x720 4:2:0 frames.

    python3 attention.py [--frames 4 8] [--size 1280x720] [--only NAME ...]

Queries, keys, values and windows are those of crates/pp-kernels/src/denoise/reference.rs (first pass: the guide is the frame
itself): 8x8 patches at multiples of 4; keys at every place within 4 samples in the same frame and within 2 in the two
frames before and after. Three ways to write it, and for each the best that was found:

- sdpa: tiles of 8x8 queries, their common windows gathered as keys and values (bf16), -|k|^2/2 as three more channels,
  a mask for each query's own window, aten's scaled_dot_product with the log-sum-exp by which overlapping patches merge.
  It cannot express the floor of the distance: it does a little less work than ours, and removes less noise.
- flex: the same tiles through a compiled flex_attention, whose score_mod has the floor, the norms and the mask.
- offsets: no attention call at all; squared differences for all offsets at once, summed over 4x4 cells, weights, and a
  weighted sum (f32), through torch.compile. Algebraically the same; what a good PyTorch programmer would write.
  `written_out` is the same with the sums over cells written out instead of a reduction.

Each is checked on a small clip against `offsets` in f64 before it is timed (sdpa without the floor). Prints one JSON
object for each line.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F

FLOOR = 1.1
STRENGTH = 0.4
SIGMA = 20.0
RADIUS = {0: 4, 1: 2, 2: 2}
PATCH, CELL, TILE = 8, 4, 8
SCALE = 1.0 / (64 * (STRENGTH * SIGMA) ** 2)
LIMIT = 64 * FLOOR * 2 * SIGMA**2


def mirrored(length, before, after):
    """Indices of a line with a margin in which it is mirrored, edge sample repeated."""
    i = torch.arange(-before, length + after) % (2 * length)
    return torch.minimum(i, 2 * length - 1 - i)


def padded(frames, before, after):
    rows = mirrored(frames.shape[-2], before, after).to(frames.device)
    columns = mirrored(frames.shape[-1], before, after).to(frames.device)
    return frames[..., rows, :][..., columns]


# --- offsets ---------------------------------------------------------------------------------------------------------


def windows(big, radius):
    """[frames, dy, dx, height, width]: padded frames moved by each offset; a view."""
    height, width = big.shape[1] - 2 * radius, big.shape[2] - 2 * radius
    return big.unfold(1, height, 1).unfold(2, width, 1)


def cells_of(query, big, radius):
    """Squared differences, summed over 4x4 cells: [frames, dy, dx, rows of cells, cells]."""
    squares = (query[:, None, None] - windows(big, radius)).square()
    return squares.unflatten(4, (-1, CELL)).unflatten(3, (-1, CELL)).sum((4, 6))


def cells_written_out(query, big, radius):
    """The same without a reduction."""
    keys = windows(big, radius)
    cells = 0
    for y in range(CELL):
        for x in range(CELL):
            cells = cells + (query[:, None, None, y::CELL, x::CELL] - keys[..., y::CELL, x::CELL]).square()
    return cells


def weights_of(cells, known, limit):
    """Weights of the patches, with a margin of zeros; all zero where a frame is not known."""
    rows = cells[..., 1:, :] + cells[..., :-1, :]
    distance = rows[..., 1:] + rows[..., :-1]
    weight = torch.exp(-torch.clamp(distance - limit, min=0) * SCALE) * known[:, None, None, None, None]
    return F.pad(weight, (1, 1, 1, 1))


def gather_of(weight, big, radius):
    """Numerators of the samples and denominators of the cells."""
    rows = weight[..., 1:, :] + weight[..., :-1, :]
    cover = rows[..., 1:] + rows[..., :-1]
    values = windows(big, radius).unflatten(4, (-1, CELL)).unflatten(3, (-1, CELL))
    numerator = (cover[:, :, :, :, None, :, None] * values).sum((1, 2))
    return numerator.flatten(3, 4).flatten(1, 2), cover.sum((1, 2))


PLAIN = (cells_of, weights_of, gather_of)


def offsets(frames, parts, limit=LIMIT):
    """`parts` are the three functions above, compiled or not; they are compiled one by one, or their loads multiply."""
    cells, weights, gather = parts
    results = []
    for first in range(0, frames.shape[0], 4):
        query = frames[first : first + 4]
        at = torch.arange(first, first + query.shape[0], device=frames.device)
        numerator, denominator = 0, 0
        for distance in range(-2, 3):
            radius = RADIUS[abs(distance)]
            near = at + distance
            known = ((near >= 0) & (near < frames.shape[0])).to(frames.dtype)
            big = padded(frames[near.clamp(0, frames.shape[0] - 1)], radius, radius)
            n, d = gather(weights(cells(query, big, radius), known, limit), big, radius)
            numerator, denominator = numerator + n, denominator + d
        results.append(numerator / denominator.repeat_interleave(CELL, 1).repeat_interleave(CELL, 2))
    return torch.cat(results)


# --- tiles -----------------------------------------------------------------------------------------------------------


class Tiles:
    """Queries in tiles of 8x8 patches, with the windows they have in common."""

    def __init__(self, frames, height, width, device):
        self.patches = (height // CELL - 1, width // CELL - 1)
        self.tiles = tuple(-(-n // TILE) for n in self.patches)
        self.frames, self.height, self.width = frames, height, width
        self.reach = [(d, RADIUS[abs(d)]) for d in range(-2, 3)]
        self.sides = [CELL * (TILE - 1) + 2 * r + 1 for _, r in self.reach]
        self.keys = sum(s * s for s in self.sides)
        self.padded_keys = -(-self.keys // 128) * 128
        self.mask = self.make_mask(device)

    def make_mask(self, device):
        """[64, keys]: which keys lie in each query's own window."""
        at = torch.arange(TILE, device=device) * CELL
        parts = []
        for (_, radius), side in zip(self.reach, self.sides):
            near = (torch.arange(side, device=device)[None] - radius - at[:, None]).abs() <= radius
            parts.append((near[:, None, :, None] & near[None, :, None, :]).reshape(TILE * TILE, side * side))
        mask = torch.cat(parts, 1)
        return F.pad(mask, (0, self.padded_keys - self.keys))

    def known(self, t, device):
        """[keys]: which keys of query frame t lie in frames of the chunk."""
        parts = [
            torch.full((side * side,), 0 <= t + d < self.frames, device=device)
            for (d, _), side in zip(self.reach, self.sides)
        ]
        return F.pad(torch.cat(parts), (0, self.padded_keys - self.keys))

    def gather(self, frames, t):
        """Of query frame t: queries [tiles, 64, 64] and keys [tiles, keys, 64]."""
        ty, tx = self.tiles
        step = CELL * TILE
        near = frames[[min(max(t + d, 0), self.frames - 1) for d, _ in self.reach]]
        patches = padded(near, 4, 4 + step + PATCH).unfold(1, PATCH, 1).unfold(2, PATCH, 1)  # [5, y, x, 8, 8], a view
        own = patches[2, 4::CELL, 4::CELL][: ty * TILE, : tx * TILE]
        own = own.reshape(ty, TILE, tx, TILE, 64).transpose(1, 2).reshape(-1, TILE * TILE, 64)
        parts = []
        for n, ((_, radius), side) in enumerate(zip(self.reach, self.sides)):
            window = patches[n, 4 - radius :, 4 - radius :].unfold(0, side, step).unfold(1, side, step)[:ty, :tx]
            # [ty, tx, 8, 8, side, side]
            parts.append(window.permute(0, 1, 4, 5, 2, 3).reshape(ty * tx, side * side, 64))
        parts.append(own.new_zeros(ty * tx, self.padded_keys - self.keys, 64))
        return own, torch.cat(parts, 1)

    def merge(self, out, lse, norms):
        """Overlapping patches by their softmax denominators; `lse` is relative to each query's own norm."""
        ty, tx = self.tiles
        py, px = self.patches

        def place(values):
            values = values.reshape(ty, tx, TILE, TILE, -1).transpose(1, 2)
            return values.reshape(ty * TILE, tx * TILE, -1)[:py, :px].reshape(1, py * px, -1)

        weight = torch.exp(lse - norms)[..., None]
        size = (self.height, self.width)
        numerator = F.fold(place(out.float() * weight).transpose(1, 2), size, PATCH, stride=CELL)
        denominator = F.fold(place(weight.expand(-1, -1, 64)).transpose(1, 2), size, PATCH, stride=CELL)
        return (numerator / denominator)[0, 0]


def split(value):
    """Three bf16 whose sum is `value` (up to 24 bits)."""
    pieces = []
    for _ in range(3):
        piece = value.bfloat16()
        pieces.append(piece)
        value = value - piece.float()
    return pieces


def sdpa(frames, tiles):
    count = tiles.tiles[0] * tiles.tiles[1]
    results = []
    for t in range(tiles.frames):
        own, keys = tiles.gather(frames, t)
        pieces = split(keys.float().square().sum(-1) / 2)
        keys = torch.cat([keys, torch.stack(pieces + [torch.zeros_like(pieces[0])] * 5, -1)], -1)
        queries = torch.cat([own, torch.full_like(own[..., :3], -1), torch.zeros_like(own[..., :5])], -1)
        mask = tiles.mask & tiles.known(t, frames.device)
        bias = torch.where(mask, 0.0, float("-inf")).to(queries.dtype)
        # Tiles take the place of heads, so that all of them share the mask.
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            queries[None], keys[None], keys[None], bias.expand(1, count, -1, -1), True, scale=2 * SCALE
        )[:2]
        results.append(tiles.merge(out[0, ..., :64], lse[0, :, :64], own.float().square().sum(-1) * SCALE))
    return torch.stack(results)


def make_flex(tiles, device):
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    seen = torch.stack([tiles.mask & tiles.known(t, device) for t in range(tiles.frames)])

    def run(frames):
        results = []
        for t in range(tiles.frames):
            own, keys = tiles.gather(frames, t)
            key_norms = keys.float().square().sum(-1)
            query_norms = own.float().square().sum(-1)
            mask = seen[t]

            def score(value, b, h, q, k):
                distance = query_norms[b, q] + key_norms[b, k] - 2 * value
                return torch.where(mask[q, k], -torch.clamp(distance - LIMIT, min=0) * SCALE, -float("inf"))

            out, lse = compiled(own[:, None], keys[:, None], keys[:, None], score_mod=score, scale=1.0, return_lse=True)
            results.append(tiles.merge(out[:, 0], lse[:, 0], torch.zeros_like(lse[:, 0])))
        return torch.stack(results)

    return run


# --- checking and timing ---------------------------------------------------------------------------------------------


def clip(frames, height, width, device):
    generator = torch.Generator(device).manual_seed(5)
    y = torch.arange(height, device=device)[:, None].float()
    x = torch.arange(width, device=device)[None].float()
    all_frames = []
    for t in range(frames):
        u, v = x + 0.7 * t, y - 0.4 * t
        picture = 120 + 60 * torch.sin(u * 0.021) * torch.cos(v * 0.017) + 25 * torch.sin(u * 0.31 + v * 0.11)
        picture = picture + SIGMA * torch.randn(height, width, generator=generator, device=device)
        all_frames.append(picture.round().clamp(0, 255))
    return torch.stack(all_frames)


def median_us(work, runs=9):
    times = []
    for i in range(runs + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(stop) * 1000)
    return sorted(times)[len(times) // 2]


def variants(frames, height, width, device):
    """name -> function of bf16 frames [frames, height, width], all sizes multiples of 8."""
    tiles = Tiles(frames, height, width, device)
    cells, written_out, weights, gather = (
        torch.compile(part, dynamic=False) for part in (cells_of, cells_written_out, weights_of, gather_of)
    )
    return {
        "offsets": lambda planes: offsets(planes.float(), (cells, weights, gather)),
        "written_out": lambda planes: offsets(planes.float(), (written_out, weights, gather)),
        "sdpa": lambda planes: sdpa(planes, tiles),
        "flex": make_flex(tiles, device),
    }


def failed(failure):
    """Reported, and no reason to end: the others are still worth their time."""
    return {"failed": f"{type(failure).__name__}: {failure}"[-400:]}


def checked(name, device):
    """How far one variant is from f64 on a small clip."""
    began = time.monotonic()
    small = clip(4, 72, 104, device)
    expected = offsets(small.double(), PLAIN, 0 if name == "sdpa" else LIMIT)
    try:
        error = (variants(4, 72, 104, device)[name](small.bfloat16()).double() - expected).abs()
        line = {"worst": error.max().item(), "rms": error.square().mean().sqrt().item()}
    except Exception as failure:
        line = failed(failure)
    return {"check": name} | line | {"seconds": round(time.monotonic() - began, 1)}


def timed(name, frames, sizes, device):
    """One variant on a plane of luma and two of chroma."""
    planes = [clip(frames, *size, device).bfloat16() for size in sizes]
    runs = [variants(frames, *size, device)[name] for size in sizes]

    def work():
        for plane, run, times in zip(planes, runs, (1, 2)):
            for _ in range(times):
                run(plane)

    try:
        us = median_us(work)
        line = {"us": round(us, 1), "us_per_frame": round(us / frames, 1)}
    except Exception as failure:
        line = failed(failure)
    return {"peer": name, "frames": frames} | line


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--only", nargs="+", default=["offsets", "sdpa", "flex", "written_out"])
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    device = "cuda"
    torch._dynamo.config.recompile_limit = 64
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)

    chroma = ((height // 2 + 7) // 8 * 8, (width // 2 + 7) // 8 * 8)
    sizes = [((height + 7) // 8 * 8, (width + 7) // 8 * 8), chroma]
    # One after the other, so that a run that is ended early has all of the first.
    for name in args.only:
        print(json.dumps(checked(name, device)), flush=True)
        for frames in args.frames:
            print(json.dumps(timed(name, frames, sizes, device)), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
