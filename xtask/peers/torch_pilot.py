"""How such a pipeline is commonly written today: PyTorch, dist.send and dist.recv over NCCL, a thread and two queues.

    python3 torch_pilot.py

It starts its two ranks itself. Rank 0 decodes on its main thread; a second thread, with a queue of two chunks on either
side, sends each chunk and receives what comes back. Rank 1 receives, works and answers. A message is the length of a
pickled header, the header, and a tensor. Stages are torch.cuda._sleep, calibrated; chunks and answers have the same size.
Before that: bare dist.send and dist.recv, one way (many in a row, timed by events) and there and back (one at a time,
timed by the host). Prints one JSON object for each line; times are medians.
"""

import json
import os
import pickle
import queue
import statistics
import threading
import time

import two_ranks

BARE_SIZES = (4, 22_118_400, 1 << 30)
PAYLOADS = (65_536, 22_118_400)
STAGES_MS = (0, 0.2, 1, 5)
CHUNKS = 200
RUNS = 3
DEPTH = 2
PATIENCE_S = 30


two_ranks.launch()  # without PyTorch, which takes seconds to import

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
peer = 1 - rank


def emit(**figures):
    if rank == 0:
        print(json.dumps(figures), flush=True)


# --- bare operations -------------------------------------------------------------------------------------------------


def one_way_us(x):
    row = 30 if x.numel() > 32 << 20 else 200
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(9):
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(row):
            dist.send(x, peer) if rank == 0 else dist.recv(x, peer)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / row)
    return statistics.median(times[2:])


def round_trip_us(x):
    times = []
    for _ in range(105):
        start = time.perf_counter()
        if rank == 0:
            dist.send(x, peer)
            dist.recv(x, peer)
        else:
            dist.recv(x, peer)
            dist.send(x, peer)
        torch.cuda.current_stream().synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[5:])


def bare_operations():
    for size in BARE_SIZES:
        x = torch.ones(size, dtype=torch.uint8, device="cuda")
        emit(what="torch_one_way", bytes=size, us=round(one_way_us(x), 2))
        emit(what="torch_round_trip_host", bytes=size, us=round(round_trip_us(x), 2))


# --- the pipeline ----------------------------------------------------------------------------------------------------


def calibrate():
    """Cycles of torch.cuda._sleep in a millisecond."""
    cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(12):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        rates.append(cycles / start.elapsed_time(end))
    return statistics.median(rates[5:])  # the clock has risen by then


def work(ms, cycles_per_ms):
    if ms > 0:
        torch.cuda._sleep(int(ms * cycles_per_ms))


def send_message(meta, tensor=None):
    shape = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    header = torch.frombuffer(bytearray(pickle.dumps((meta, shape))), dtype=torch.uint8).cuda()
    dist.send(torch.tensor([header.numel()], dtype=torch.int64, device="cuda"), peer)
    dist.send(header, peer)
    if tensor is not None:
        dist.send(tensor, peer)


def receive_message():
    length = torch.empty(1, dtype=torch.int64, device="cuda")
    dist.recv(length, peer)
    header = torch.empty(int(length.item()), dtype=torch.uint8, device="cuda")
    dist.recv(header, peer)
    meta, shape = pickle.loads(bytes(header.tolist()))
    if shape is None:
        return meta, None
    tensor = torch.empty(shape[0], dtype=shape[1], device="cuda")
    dist.recv(tensor, peer)
    return meta, tensor


def phase_b(ms, cycles_per_ms):
    while True:
        meta, tensor = receive_message()
        if tensor is None:
            return
        work(ms, cycles_per_ms)
        send_message(meta, tensor)


def front(size, ms, cycles_per_ms):
    """Milliseconds between two chunks that are done; the first quarter does not count."""
    x = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()  # the other thread has a stream of its own
    to_send, received = queue.Queue(DEPTH), queue.Queue(DEPTH)

    def communicate():
        torch.cuda.set_device(rank)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while (chunk := to_send.get()) is not None:
                send_message({"chunk": chunk}, x)
                answer = receive_message()
                stream.synchronize()
                received.put(answer)
            send_message({"stop": True})
            stream.synchronize()

    thread = threading.Thread(target=communicate, daemon=True)
    thread.start()
    done = []
    for chunk in range(CHUNKS + DEPTH):
        if chunk < CHUNKS:
            to_send.put(chunk, timeout=PATIENCE_S)
        if chunk >= DEPTH:
            meta, tensor = received.get(timeout=PATIENCE_S)
            assert meta["chunk"] == chunk - DEPTH and tensor.numel() == x.numel()
            work(ms, cycles_per_ms)
            torch.cuda.current_stream().synchronize()
            done.append(time.perf_counter())
    to_send.put(None, timeout=PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the other rank did not take the last message"
    return statistics.median((after - before) * 1e3 for before, after in zip(done[CHUNKS // 4 :], done[CHUNKS // 4 + 1 :]))


def main():
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    emit(what="torch_versions", torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())))
    bare_operations()
    cycles_per_ms = calibrate()
    for size in PAYLOADS:
        for ms in STAGES_MS:
            if rank == 1:
                for _ in range(RUNS):
                    phase_b(ms, cycles_per_ms)
                continue
            period = statistics.median(front(size, ms, cycles_per_ms) for _ in range(RUNS))
            emit(what="torch_pilot", bytes=size, decode_ms=ms, phase_b_ms=ms, depth=DEPTH, chunks=CHUNKS, runs=RUNS,
                 period_ms=round(period, 4), efficiency=round(ms / period, 4))
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


main()
