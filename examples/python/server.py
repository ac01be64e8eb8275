"""A server of several streams: each request of a user is an array of numbers, and a coroutine for each user pushes and pulls."""

import asyncio

import numpy as np

import pp_pipeline as pp


class Smooth(pp.Stage):
    """A moving average over what it has seen of each user."""

    arrays = "numpy"

    def __init__(self):
        self.means = {}

    def run(self, chunk, out):
        mean = 0.0 if chunk.starts_epoch else self.means[chunk.stream]
        for i, value in enumerate(chunk["x"]):
            mean = 0.9 * mean + 0.1 * float(value)
            out["x"][i] = mean
        self.means[chunk.stream] = mean

    def end_stream(self, stream):
        del self.means[stream]


async def serve(name, value, streams):
    """A user with two requests."""
    answers = []
    with streams.begin() as stream:
        for request in range(2):
            await stream.push_async(pp.Item({"x": np.full(request + 1, value, np.float32)}, note={"request": request}))
        stream.end()
        async for result in stream:
            answers.append(f"{name} {result.note['request']} {result['x'].round(2).tolist()}")
    return answers


async def main():
    most = {"x": pp.Spec((16,), "float32")}
    async with pp.Job("push@0 -> smooth@1 -> pull@0", smooth=Smooth, most=most).streams() as streams:
        for answers in await asyncio.gather(serve("ada", 10, streams), serve("bob", 20, streams)):
            print(*answers, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
