"""Video files as source and sink: whatever PyAV reads and writes. Needs the extra `pp-pipeline[video]`.

    pp.Job("read@0 -> work@1 -> write@0", read=pp.video.read("in.mp4"), work=Work, write=pp.video.write("out.mp4", like="in.mp4"))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from ._stages import Chunk


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise ImportError("pp_pipeline.video needs PyAV: pip install 'pp-pipeline[video]', or pip install av") from None
    return av


class read:
    """The frames of a video file, `frames` of them a chunk: `{"x": uint8 of (frames, height, width, 3)}`, RGB.

    Videos of more bits a sample are rounded to 8. The last chunk may have fewer. It may be iterated over several times.
    """

    def __init__(self, path: str | os.PathLike[str], frames: int = 8) -> None:
        if frames < 1:
            raise ValueError(f"frames={frames}: a chunk has at least one frame")
        self._path, self._frames = os.fspath(path), frames

    def __iter__(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        with _av().open(self._path) as file:
            if not file.streams.video:
                raise ValueError(f"{self._path} has no video")
            stream = file.streams.video[0]
            stream.thread_type = "AUTO"
            waiting: list[np.ndarray[Any, Any]] = []
            for frame in file.decode(stream):
                waiting.append(frame.to_ndarray(format="rgb24"))
                if len(waiting) == self._frames:
                    yield {"x": np.stack(waiting)}
                    waiting = []
            if waiting:
                yield {"x": np.stack(waiting)}


class write:
    """Writes chunks of frames as `read` gives them, as H.264, or with another codec that PyAV has.

    The rate is that of the file `like`, or `rate`. The file has its name once it is whole: until then it is `PATH.part`, which a
    job that fails leaves behind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str] | None = None,
        rate: float | Fraction | None = None,
        codec: str = "libx264",
        tensor: str = "x",
    ) -> None:
        if (like is None) == (rate is None):
            raise TypeError("the rate is that of a file or a number: give like= or rate=")
        self._path, self._like, self._rate = os.fspath(path), like, rate
        self._codec, self._tensor = codec, tensor
        self._file: Any = None
        self._stream: Any = None

    def __call__(self, chunk: Chunk) -> None:
        frames = chunk[self._tensor]
        frames = frames if isinstance(frames, np.ndarray) else frames.cpu().numpy()
        if self._file is None:
            self._open(frames)
        for pixels in frames:
            self._encode(_av().VideoFrame.from_ndarray(pixels, format="rgb24"))

    def _open(self, frames: np.ndarray[Any, Any]) -> None:
        av = _av()
        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
            raise ValueError(f"video is uint8 of (frames, height, width, 3), and not {frames.dtype} of {frames.shape}")
        rate: Any = self._rate
        if self._like is not None:
            with av.open(os.fspath(self._like)) as like:
                rate = like.streams.video[0].average_rate
        kind = os.path.splitext(self._path)[1].lstrip(".")
        self._file = av.open(self._path + ".part", "w", format="matroska" if kind == "mkv" else kind)
        self._stream = self._file.add_stream(self._codec, rate=Fraction(rate).limit_denominator(65536))
        self._stream.height, self._stream.width = frames.shape[1:3]
        self._stream.pix_fmt = "yuv420p"

    def _encode(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._file.mux(packet)

    def finish(self) -> None:
        """Everything was taken: the file gets its name."""
        if self._file is None:
            return
        self._encode(None)
        self._file.close()
        os.replace(self._path + ".part", self._path)

