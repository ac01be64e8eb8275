"""The same two-stage pipeline over torch.distributed's gloo, in the best arrangement that we know of for it: a thread per
direction on each rank, distinct tags, preallocated buffers, two chunks queued.

usage: gloo_pilot.py BYTES DECODE_MS PHASE_B_MS CHUNKS
Prints one JSON object with the keys of `pp bench overlap --json`. It needs `pip install torch numpy`."""
import json
import queue
import statistics
import sys
import threading
import time

import two_ranks

WARM_UP = 5
BUFFERS = 4


def stage(ms):
    """Sleeps until shortly before the mark, then spins to it."""
    mark = time.perf_counter() + ms / 1e3
    if ms > 0.15:
        time.sleep(ms / 1e3 - 0.15e-3)
    while ms > 0 and time.perf_counter() < mark:
        pass


def main():
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    size, chunks = int(sys.argv[1]), int(sys.argv[4]) + WARM_UP
    decode_ms, phase_b_ms = float(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    peer, send_tag, receive_tag = 1 - rank, 1 + rank, 2 - rank
    outgoing = [torch.full((size,), 1, dtype=torch.uint8) for _ in range(BUFFERS)]
    incoming = [torch.zeros(size, dtype=torch.uint8) for _ in range(BUFFERS)]
    to_send, received = queue.Queue(maxsize=2), queue.Queue(maxsize=2)

    def send():
        for k in range(chunks):
            to_send.get()
            dist.send(outgoing[k % BUFFERS], peer, tag=send_tag)

    def receive():
        for k in range(chunks):
            dist.recv(incoming[k % BUFFERS], peer, tag=receive_tag)
            received.put(k)

    dist.barrier()
    threads = [threading.Thread(target=work) for work in (send, receive)]
    [thread.start() for thread in threads]
    ends, busy = [], []
    sent = 0
    for k in range(chunks):
        if rank == 0:
            while sent < min(chunks, k + 3):
                to_send.put(sent)
                sent += 1
        received.get()
        began = time.perf_counter()
        stage(decode_ms if rank == 0 else phase_b_ms)
        ends.append(time.perf_counter())
        busy.append((ends[-1] - began) * 1e3)
        if rank == 1:
            to_send.put(k)
    [thread.join() for thread in threads]

    mine = statistics.median(busy[WARM_UP:])
    both = [None, None]
    dist.all_gather_object(both, mine)
    if rank == 0:
        periods = [(b - a) * 1e3 for a, b in zip(ends[WARM_UP - 1:], ends[WARM_UP:])]
        period, mean = statistics.median(periods), statistics.mean(periods)
        print(json.dumps({
            "transport": "gloo", "bytes": size, "decode_ms": decode_ms, "phase_b_ms": phase_b_ms,
            "decode_ms_achieved": both[0], "phase_b_ms_achieved": both[1], "depth": 3, "chunks": chunks - WARM_UP,
            "period_ms": period, "period_mean_ms": mean, "efficiency": max(both) / period,
            "efficiency_by_mean": max(both) / mean,
        }))
    dist.destroy_process_group()


two_ranks.launch(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
main()
