"""A PyTorch module as a file that `pp run` executes without Python: compiled by AOTInductor, for the plugin `plugins/aoti`.

The file is a `.pt2` of PyTorch with two things more under `extra/pp/`: `package.json`, which says which tensors of a chunk the
module reads and makes, and for each part an example with its result, which the plugin computes again before it runs the part.

Guarantee: a package that this function wrote says everything that must fit, so that what does not fit is refused before a chunk
runs. PyTorch is imported when a function is called, not before.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._arrays import dtype_name

_FORMAT = 1
_PATCH = 8
# What a package makes, by the first tensor that it takes: in place of encode, of decode, and else of phase_b.
_MAKES = {"frames": "latents_in", "latents_out": "frames"}
_ISA = ("avx", "sse", "ssse", "fma", "f16c", "bmi", "amx", "vaes", "vpclmul", "gfni", "sha_ni", "asimd", "sve")


class Video:
    """The tensors that the built-in `encode` and `decode` of `pp run` make of frames and take for them.

    A frame is a row of tokens: patches of 8×8 samples, plane after plane, the values 0 to 255 in bfloat16.
    """

    def __init__(self, width: int, height: int, chroma: str = "420") -> None:
        halves = {"mono": None, "420": (2, 2), "422": (1, 2), "444": (1, 1)}
        if chroma not in halves:
            raise ValueError(f"chroma {chroma!r}: it is one of {', '.join(halves)}")
        half = halves[chroma]
        sizes = [(height, width)]
        if half is not None:
            sizes += 2 * [(-(-height // half[0]), -(-width // half[1]))]
        self.sizes: list[tuple[int, int]] = sizes

    def example(self, frames: int = 2, steps: int = 2, device: str = "cpu", name: str = "latents_in") -> dict[str, Any]:
        """A chunk of random frames with a noise of 20, as `encode` makes it. A package in place of `encode` gets the first tensor
        under the name "frames"."""
        import torch

        draw = torch.Generator().manual_seed(1)
        planes = [torch.randint(0, 256, (frames, 1, *size), generator=draw).float() for size in self.sizes]
        chunk = {
            name: self.latents(planes),
            "conditioning_embeds": torch.full((len(self.sizes),), 20.0).bfloat16(),
            "denoising_step_list": torch.tensor([400, 450] * steps)[:steps],
        }
        return {name: tensor.to(device) for name, tensor in chunk.items()}

    def planes(self, latents: Any) -> list[Any]:
        """The planes of a chunk, luma first: float32 `[frames, 1, height, width]`, values 0 to 255."""
        planes, first = [], 0
        for height, width in self.sizes:
            rows, columns = -(-height // _PATCH), -(-width // _PATCH)
            tokens = latents[:, first : first + rows * columns].float()
            first += rows * columns
            grid = tokens.reshape(-1, rows, columns, _PATCH, _PATCH).permute(0, 1, 3, 2, 4)
            planes.append(grid.reshape(-1, 1, rows * _PATCH, columns * _PATCH)[:, :, :height, :width])
        return planes

    def latents(self, planes: Sequence[Any]) -> Any:
        """The way back: bfloat16 `[frames, tokens, 64]`. Values are rounded to whole ones, as `decode` rounds them."""
        import torch

        tokens = []
        for plane, (height, width) in zip(planes, self.sizes, strict=True):
            rows, columns = -(-height // _PATCH), -(-width // _PATCH)
            padding = (0, columns * _PATCH - width, 0, rows * _PATCH - height)
            if any(padding):
                plane = torch.nn.functional.pad(plane, padding, mode="replicate")
            grid = plane.reshape(-1, rows, _PATCH, columns, _PATCH).permute(0, 1, 3, 2, 4)
            tokens.append(grid.reshape(-1, rows * columns, _PATCH * _PATCH))
        return torch.cat(tokens, 1).add(0.5).floor().clamp(0, 255).bfloat16()


def export(
    module: Any,
    example: Mapping[str, Any],
    path: str | os.PathLike[str],
    parts: int | Sequence[int] | None = None,
    *,
    dynamic: Sequence[str] = ("frames", "steps"),
    tolerance: float = 0.01,
) -> None:
    """Compiles a module, or a list of blocks, into a package for the plugin `aoti`.

    `example` has the tensors of a chunk by name; the first dimension of the first is the number of frames. A parameter of `forward`
    that bears the name of one gets it. The one other parameter gets what the block before made, and in the first block the first
    tensor. The module gives one tensor, like the first tensor of the example.

    The name of the first tensor says for which stage the package is: "latents_in" for `phase_b`; "frames" for one in place of
    `encode`, which makes `latents_in`; "latents_out" for one in place of `decode`, which makes the frames. The latents of the latter
    two have any shape whose first dimension is the number of frames.

    `parts` cuts a list of blocks into parts, which can stand on ranks of their own: a number, or how many blocks each part has.
    `dynamic` says what may differ between chunks; leave "steps" out of it for a module that walks over the steps.
    `tolerance` is how far a result of the self-test may lie from that of the eager module, in parts of its largest value.
    """
    import torch

    blocks = list(module) if isinstance(module, (list, tuple)) or (parts and isinstance(module, torch.nn.Sequential)) else [module]
    tensors = dict(example)
    _check(blocks, tensors, dynamic)
    first = next(iter(tensors.values()))
    sizes = {"frames": int(first.shape[0])}
    if "denoising_step_list" in tensors:
        sizes["steps"] = int(tensors["denoising_step_list"].shape[0])
    about: dict[str, Any] = {"format": _FORMAT, "torch": str(torch.__version__), "device": first.device.type, **_machine(first)}
    about["example"] = sizes
    path, counts = Path(path), _cut(len(blocks), parts)
    # Beside the package, which gets its name when it is whole.
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        whole = Path(folder) / "whole.pt2"
        with torch.no_grad(), zipfile.ZipFile(whole, "w") as archive:
            about["parts"] = _parts(archive, path.stem, blocks, counts, tensors, sizes, dynamic, tolerance)
            archive.writestr(f"{path.stem}/extra/pp/package.json", json.dumps(about, indent=1))
        os.replace(whole, path)


def _parts(
    archive: zipfile.ZipFile,
    stem: str,
    blocks: list[Any],
    counts: list[int],
    tensors: dict[str, Any],
    sizes: dict[str, int],
    dynamic: Sequence[str],
    tolerance: float,
) -> list[dict[str, Any]]:
    """Compiles one part after the other into the archive, and says what each reads and makes."""
    named, first = next(iter(tensors.items()))
    output = _MAKES.get(named, "latents_out")
    takes = [_takes(block, tensors, at) for at, block in enumerate(blocks)]
    value, begin, parts = None, 0, []
    for at, count in enumerate(counts):
        end = begin + count
        piece = _piece(blocks[begin:end], takes[begin:end], tensors, value)
        value = piece.eager(tensors, value)
        if end < len(blocks):
            name, value = "guide", _between(value, end)
        elif named in _MAKES or value.shape == first.shape:
            name, value = output, value.to(first.dtype).contiguous()
        else:
            raise ValueError(f"the module gives {list(value.shape)}; {output} must be like the first tensor, {list(first.shape)}")
        all_of = [*piece.inputs.items(), (name, value)]
        dims = [_dims(tensor, label, sizes, dynamic) for label, tensor in all_of]
        _compile(archive, f"{stem}/", at, piece, value, dims)
        archive.writestr(f"{stem}/extra/pp/part{at}.example", b"".join(_bytes(tensor) for _, tensor in all_of))
        specs = [{"name": label, "dtype": dtype_name(of.dtype), "dims": dim} for (label, of), dim in zip(all_of, dims, strict=True)]
        parts.append({"inputs": specs[:-1], "output": specs[-1], "tolerance": tolerance})
        begin = end
    return parts


def _check(blocks: list[Any], tensors: dict[str, Any], dynamic: Sequence[str]) -> None:
    if not blocks or not tensors:
        raise ValueError("export takes at least one block, and an example with at least one tensor")
    for at, block in enumerate(blocks):
        if getattr(block, "training", False):
            raise ValueError(f"block {at} is in training mode: call .eval() first")
    for name in dynamic:
        if name not in ("frames", "steps"):
            raise ValueError(f"dynamic={name!r}: what may differ between chunks is 'frames' and 'steps'")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"the example of {name} is not contiguous: call .contiguous()")
    devices = {str(tensor.device) for tensor in tensors.values()}
    if len(devices) > 1:
        raise ValueError(f"the example lies on {', '.join(sorted(devices))}: put it on one device")
    name, first = next(iter(tensors.items()))
    if str(first.dtype) != "torch.bfloat16":
        raise ValueError(f"the example of {name} is {first.dtype}: frames and latents are bfloat16 between the stages; call .bfloat16()")
    if first.shape[0] < 2 and "frames" in dynamic:
        raise ValueError("give an example of two frames or more: PyTorch takes a size of 1 for a fixed one")


def _machine(first: Any) -> dict[str, Any]:
    """What the compiled code asks of the machine."""
    import torch

    if first.device.type == "cuda":
        return {"capability": list(torch.cuda.get_device_capability(first.device))}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return {"cpu": sorted(flag for flag in line.split(":")[1].split() if flag.startswith(_ISA))}
    return {"cpu": []}


def _cut(blocks: int, parts: int | Sequence[int] | None) -> list[int]:
    """How many blocks each part has; of unequal parts the longer ones come first."""
    if parts is None or isinstance(parts, int):
        count = parts or 1
        counts = [blocks // count + (at < blocks % count) for at in range(count)] if count > 0 else []
    else:
        counts = list(parts)
    if not counts or min(counts) < 1 or sum(counts) != blocks:
        raise ValueError(f"parts={parts!r} does not cut {blocks} blocks: each part has one or more, and they add up to {blocks}")
    return counts


def _takes(block: Any, tensors: dict[str, Any], at: int) -> list[str | None]:
    """The tensors that a block takes, in the order of its parameters; None is what the block before made."""
    takes: list[str | None] = []
    for name, parameter in inspect.signature(block.forward).parameters.items():
        if name in tensors:
            takes.append(name)
        elif parameter.default is parameter.empty:
            takes.append(None if at else next(iter(tensors)))
    if takes.count(None) > 1 or (at and None not in takes):
        names = ", ".join(tensors)
        raise ValueError(
            f"forward of block {at} takes {takes.count(None)} tensors that the chunk does not have; beside {names} it takes one, what "
            "the block before made"
        )
    return takes


def _between(value: Any, at: int) -> Any:
    """What goes from part to part: float32 or bfloat16 alone."""
    import torch

    if not value.is_floating_point():
        raise ValueError(f"block {at - 1} gives {value.dtype}: what goes to the next part is float32, bfloat16 or float16")
    return (value if value.dtype == torch.bfloat16 else value.float()).contiguous()


def _dims(tensor: Any, name: str, sizes: dict[str, int], dynamic: Sequence[str]) -> list[int | str]:
    dims: list[int | str] = list(tensor.shape)
    varies = {"denoising_step_list": "steps", "conditioning_embeds": None}.get(name, "frames")
    if varies is None or varies not in dynamic:
        return dims
    if not dims or dims[0] != sizes[varies]:
        raise ValueError(f"{name} is {dims}: its first dimension must be the number of {varies}, which is {sizes[varies]}")
    return [varies, *dims[1:]]


def _piece(blocks: list[Any], takes: list[list[str | None]], tensors: dict[str, Any], before: Any) -> Any:
    """The blocks of one part as a module that writes its result into its last argument."""
    import torch

    names = [name for name in tensors if any(name in of for of in takes)]
    inputs = {name: tensors[name] for name in names}
    if before is not None:
        inputs["guide"] = before

    class Piece(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)
            self.inputs = inputs

        def eager(self, chunk: Mapping[str, Any], value: Any) -> Any:
            for block, of in zip(self.blocks, takes, strict=True):
                value = block(*(value if name is None else chunk[name] for name in of))
            return value

        def forward(self, *tensors: Any) -> tuple[()]:
            chunk = dict(zip(inputs, tensors, strict=False))
            tensors[-1].copy_(self.eager(chunk, chunk.get("guide")))
            return ()

    return Piece().eval()


def _compile(archive: zipfile.ZipFile, stem: str, at: int, piece: Any, value: Any, dims: list[list[int | str]]) -> None:
    """Compiles a part, and copies what AOTInductor made of it; of the first part also what marks the archive."""
    import torch
    import torch._inductor

    sizes = {
        "frames": torch.export.Dim("frames", min=1, max=1024),
        "steps": torch.export.Dim("steps", min=0, max=1024),
    }
    shapes = tuple({place: sizes[size] for place, size in enumerate(of) if isinstance(size, str)} for of in dims)
    arguments = (*piece.inputs.values(), torch.empty_like(value))
    program = torch.export.export(piece, arguments, dynamic_shapes={"tensors": shapes})
    # The host says how many threads a call may use.
    options = {"cpp.dynamic_threads": True}
    model = "data/aotinductor/model/"
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/part.pt2", inductor_configs=options)
        with zipfile.ZipFile(package) as made:
            for info in made.infolist():
                name = info.filename.split("/", 1)[-1]
                if at and not name.startswith(model):
                    continue
                name = name.replace(model, f"data/aotinductor/part{at}/", 1)
                with made.open(info) as source, archive.open(stem + name, "w", force_zip64=True) as to:
                    shutil.copyfileobj(source, to)


def _bytes(tensor: Any) -> bytes:
    import torch

    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(raw.numpy().tobytes())
