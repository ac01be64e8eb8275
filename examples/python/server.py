"""A server: requests are pushed from one thread, and results are pulled in another. Here each request is an array of numbers."""

import threading

import numpy as np

import pp_pipeline as pp


class Smooth(pp.Stage):
    """A moving average over what it has seen, which it forgets where a new epoch begins."""

    arrays = "numpy"

    def __init__(self):
        self.mean = 0.0

    def run(self, chunk, out):
        if chunk.starts_epoch:
            self.mean = 0.0
        for i, value in enumerate(chunk["x"]):
            self.mean = 0.9 * self.mean + 0.1 * float(value)
            out["x"][i] = self.mean


def main():
    most = {"x": pp.Spec((16,), "float32")}
    with pp.Job("push@0 -> smooth@1 -> pull@0", smooth=Smooth, most=most).open() as flow:

        def serve():
            for request in range(4):
                cut = "flush" if request == 2 else None
                flow.push(pp.Item({"x": np.full(request + 1, 10, np.float32)}, note={"request": request}, cut=cut))
            flow.end()

        threading.Thread(target=serve).start()
        for result in flow:
            print(result.note["request"], result["x"].round(2).tolist())


if __name__ == "__main__":
    main()
