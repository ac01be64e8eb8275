"""How a pipeline in PyTorch ends when its peer fails: the cells that `pp-trials shutdown` has, in PyTorch's own means.

    python3 torch_faults.py [--settings NAME...] [--states NAME...] [--events NAME...] [--jobs N] [--patience S] [--backend nccl|gloo]
    python3 torch_faults.py --dry-run      names the cases and runs none; needs no PyTorch

Two ranks send and receive through torch.distributed with a timeout of 10 s, as the documentation recommends. Rank 0 is
brought into a state: waiting in a receive, in a send of more bytes than NCCL takes without a receiver, or idle between
two chunks. Then rank 1 dies (SIGKILL), stops (SIGSTOP), leaves (exit code 0), or goes on computing for longer than the
timeout. Measured from outside: when rank 0 first said something, when it ended and how, and where its main thread was
at the end. A rank 0 that has not ended after the patience is killed, and counts as "not ended".

Settings: `defaults` sets no variable; `best` sets what is documented for ending early (the watchdog aborts and ends the
process, nothing is dumped first, the monitor of the watchdog waits 10 s and not minutes); `blocking` makes waits blocking,
so that a timeout is an exception in the thread that waits. Prints one JSON object for each line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import two_ranks

TIMEOUT_S = 10
LARGE = 256 << 20  # no send of this size completes without its receiver
SMALL = 4 << 20
READY_WITHIN_S = 120

SETTINGS = {
    "defaults": {},
    "best": {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_FR_BUFFER_SIZE": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
        "TORCH_NCCL_COORD_CHECK_MILSEC": "100",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10",
    },
    "blocking": {"TORCH_NCCL_BLOCKING_WAIT": "1"},
}
STATES = ("recv", "send", "idle")
EVENTS = ("killed", "stopped", "left", "computing")


# --- a rank -----------------------------------------------------------------------------------------------------------


def rank_main(state, event, backend):
    import datetime
    import faulthandler

    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    peer = 1 - rank
    more = {}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        more["device_id"] = torch.device("cuda", rank)
    device = "cuda" if backend == "nccl" else "cpu"

    def settle():
        if backend == "nccl":
            torch.cuda.synchronize()

    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S), **more)
    chunk = torch.ones(SMALL, dtype=torch.uint8, device=device)
    # The pipeline as it runs: there and back, until it is warm.
    for _ in range(3):
        if rank == 0:
            dist.send(chunk, peer)
            dist.recv(chunk, peer)
        else:
            dist.recv(chunk, peer)
            dist.send(chunk, peer)
        settle()
    large = torch.ones(LARGE, dtype=torch.uint8, device=device) if state == "send" else None
    print("ready", flush=True)
    sys.stdin.readline()  # both go on at the same moment
    if rank == 0:
        # Where the main thread is, shortly before the patience is over.
        faulthandler.dump_traceback_later(float(os.environ["PP_TRACEBACK_AFTER"]), exit=False)
        try:
            if state == "recv":
                dist.recv(chunk, peer)
                settle()
            elif state == "send":
                dist.send(large, peer)
                settle()
            else:
                time.sleep(3600)
            print("done", flush=True)
        except Exception as error:
            print("raised", type(error).__name__, str(error).splitlines()[0][:200], flush=True)
            raise
        return
    time.sleep(0.5)  # rank 0 is in its state now
    print("now", flush=True)
    if event == "left":
        sys.stdout.flush()
        os._exit(0)
    time.sleep(3600)  # killed, stopped, or busy


# --- the cases --------------------------------------------------------------------------------------------------------


class Rank:
    """A process, and what it said and when."""

    def __init__(self, command, env):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        self.lines = []
        self.changed = threading.Condition()
        self.readers = [
            threading.Thread(target=self.read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self.readers:
            reader.start()

    def read(self, name, stream):
        for line in stream:
            with self.changed:
                self.lines.append((time.monotonic(), name, line.rstrip()))
                self.changed.notify_all()

    def says(self, word, within):
        """When it said this, or None."""
        deadline = time.monotonic() + within
        with self.changed:
            while True:
                for at, name, line in self.lines:
                    if name == "out" and line.split(" ")[0] == word:
                        return at
                if self.process.poll() is not None and not any(reader.is_alive() for reader in self.readers):
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(min(left, 0.1))

    def go(self):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended, which is seen elsewhere

    def end(self):
        for what in (signal.SIGCONT, signal.SIGKILL):
            try:
                self.process.send_signal(what)
            except OSError:
                pass
        self.process.wait()


def threads_of(pid):
    """What each thread of a process is inside of, as far as the kernel tells."""
    found = {}
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            try:
                with open(f"/proc/{pid}/task/{task}/comm") as comm, open(f"/proc/{pid}/task/{task}/wchan") as wchan:
                    key = f"{comm.read().strip()}:{wchan.read().strip() or '0'}"
            except OSError:
                continue
            found[key] = found.get(key, 0) + 1
    except OSError:
        pass
    return found


def play(case, patience, backend):
    settings, state, event = case
    figures = dict(what="torch_fault", settings=settings, state=state, event=event, timeout_s=TIMEOUT_S, backend=backend)
    environments = two_ranks.environments(
        PP_TRACEBACK_AFTER=str(max(1.0, patience - 3)),
        TORCH_CPP_LOG_LEVEL="INFO",
        **SETTINGS[settings],
    )
    # A core file of gigabytes would be PyTorch's fault no more than ours.
    command = ["sh", "-c", 'ulimit -c 0; exec "$@"', "sh", sys.executable, __file__, "--rank", state, event, backend]
    ranks = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for env in environments:
                env["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(folder, "fr_")
                env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = os.path.join(folder, "nccl_")
                ranks.append(Rank(command, env))
            for number, rank in enumerate(ranks):
                if rank.says("ready", READY_WITHIN_S) is None:
                    last = [line for _, _, line in rank.lines][-1:]
                    return dict(figures, failed=f"rank {number} was never ready: {last}")
            for rank in ranks:
                rank.go()
            front, back = ranks
            began = back.says("now", READY_WITHIN_S)
            if began is None:
                return dict(figures, failed="rank 1 never came to its point")
            if event == "killed":
                began = time.monotonic()
                back.process.send_signal(signal.SIGKILL)
            elif event == "stopped":
                began = time.monotonic()
                back.process.send_signal(signal.SIGSTOP)
            return dict(figures, **watch(front, began, patience))
    finally:
        for rank in ranks:
            rank.end()


def watch(front, began, patience):
    """Rank 0 from the event to its end."""
    deadline = began + patience
    while front.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    ended = time.monotonic() if front.process.poll() is not None else None
    held = threads_of(front.process.pid) if ended is None else None
    if ended is not None:
        for reader in front.readers:
            reader.join(2)
    said = [(at - began, line) for at, name, line in front.lines if name == "err" and at >= began]
    # PyTorch's log has a letter and the date in front; what it says of a timeout or of an error.
    words = ("timeout", "timed out", "Timeout", "exception", "Exception", "error", "Error", "stuck", "abort")
    # The line of faulthandler, which is asked for above, is none of PyTorch's.
    told = [(after, line) for after, line in said if any(word in line for word in words) and not line.startswith("Timeout (")]
    raised = [(at - began, line) for at, name, line in front.lines if name == "out" and line.startswith("raised")]
    frames = [line.strip() for _, line in said if line.strip().startswith('File "')]
    return dict(
        ended_after_s=None if ended is None else round(ended - began, 2),
        exit=front.process.poll(),
        first_told_after_s=round(told[0][0], 2) if told else None,
        first_told=told[0][1][:300] if told else None,
        last_told_after_s=round(told[-1][0], 2) if told else None,
        last_told=told[-1][1][:300] if told else None,
        raised_after_s=round(raised[0][0], 2) if raised else None,
        raised=raised[0][1][:300] if raised else None,
        main_thread=frames[:2],
        threads=held,
        # The steps of the watchdog, in short: why it took so long, or did not end.
        steps=[f"{after:.2f} {line[:160]}" for after, line in told[:12]],
    )


def versions(backend):
    script = "import torch; print(torch.__version__, torch.version.cuda)"
    if backend == "nccl":
        script += "; print(torch.cuda.nccl.version(), torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return " ".join((done.stdout or done.stderr.strip().splitlines()[-1]).split())


def main():
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--settings", nargs="+", choices=SETTINGS, default=["defaults", "best"])
    about.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    about.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS)
    about.add_argument("--jobs", type=int, default=12, help="cases at a time; they mostly wait")
    about.add_argument("--patience", type=float, default=45, help="seconds that rank 0 is given to end")
    about.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    about.add_argument("--dry-run", action="store_true")
    given = about.parse_args()
    cases = [(s, st, e) for s in given.settings for st in given.states for e in given.events]
    if given.dry_run:
        for case in cases:
            print(json.dumps(dict(what="torch_fault", settings=case[0], state=case[1], event=case[2])))
        return
    print(json.dumps(dict(what="torch_faults_about", torch=versions(given.backend), settings=SETTINGS)), flush=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        for figures in pool.map(lambda case: play(case, given.patience, given.backend), cases):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:5])
    else:
        main()
