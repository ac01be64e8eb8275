"""Jobs of several processes: programs in files of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from conftest import EXAMPLES, Film

TWO = """
if __name__ == "__main__":
    job = pp.Job("read@0 -> double@1 -> write@0", read=chunks, double=double)
    print([float(chunk["x"][0]) for chunk in job])
"""


def test_other_ranks_run_the_same_file(film: Film) -> None:
    code, out, error = film.run(TWO)
    assert (code, out) == (0, "[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]\n"), error
    assert error == "[]\n"


def test_a_program_runs_several_jobs(film: Film) -> None:
    code, out, error = film.run(
        """
        for size, rank in ((1, 0), (2, 1), (3, 1), (4, 0)):
            job = pp.Job(f"read@0 -> double@{rank} -> write@0", read=chunks(2, size), double=double, write=lambda chunk: None)
            done = job.run()
            print(size, done and done.chunks)
        """
    )
    assert (code, out) == (0, "1 2\n2 2\n3 2\n4 2\n"), error


def test_a_rank_that_is_killed_is_started_again(film: Film) -> None:
    code, out, error = film.run(
        """
        def work(chunk, out):
            if chunk.index == 3 and once("died"):
                os.kill(os.getpid(), signal.SIGKILL)
            double(chunk, out)

        if __name__ == "__main__":
            got = []
            job = pp.Job("read@0 -> work@1 -> write@0", read=chunks, work=work, write=lambda c: got.append(float(c["x"][0])),
                         restarts=1)
            print(job.run().restarts, got)
        """
    )
    assert (code, out) == (0, "1 [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]\n"), error
    assert "rank 1 is gone" in error


def test_a_rank_that_is_started_again_forgets_every_stream(film: Film) -> None:
    code, out, error = film.run(
        """
        class Count(pp.Stage):
            counts = {}

            def run(self, chunk, out):
                if chunk.note["n"] == 3 and once("died"):
                    os.kill(os.getpid(), signal.SIGKILL)
                self.counts[chunk.stream] = 1 if chunk.starts_epoch else self.counts[chunk.stream] + 1
                out["x"][...] = self.counts[chunk.stream]

        if __name__ == "__main__":
            job = pp.Job("push@0 -> count@1 -> pull@0", count=Count, most={"x": pp.Spec((1,), "int64")}, restarts=1)
            with job.streams() as streams:
                both = [streams.begin(), streams.begin()]
                for n in range(6):
                    stream = both[n % 2]
                    stream.push(pp.Item({"x": np.zeros(1, np.int64)}, note={"n": n}))
                    result = next(iter(stream))
                    print(result.stream, result.index, int(result["x"][0]))
                for stream in both:
                    stream.end()
                print(streams.finish().restarts)
        """
    )
    # Stream 1 is at its second chunk when the rank dies, and stream 0 has its third one next.
    assert (code, out) == (0, "0 0 1\n1 0 1\n0 1 2\n1 1 1\n0 2 1\n1 2 2\n1\n"), error


def test_faults_of_another_rank_are_exceptions(film: Film) -> None:
    code, out, error = film.run(
        """
        def fail(chunk, out):
            raise ValueError("out of cheese")

        def die(chunk, out):
            os.kill(os.getpid(), signal.SIGKILL)

        for stage in (fail, die):
            job = pp.Job("read@0 -> work@1 -> write@0", read=chunks, work=stage, write=print)
            start = time.monotonic()
            try:
                job.run()
            except pp.JobError as error:
                print(type(error).__name__, error.rank, error.code, str(error).splitlines()[0])
        print("alive")
        """
    )
    lines = out.splitlines()
    assert code == 0, error
    assert lines[0].startswith("StageError 1 5 plugin: rank 1: run: ValueError: out of cheese"), out
    assert lines[1].startswith("JobError 1 7 peer died: rank 1: run: the process was ended by signal 9"), out
    assert lines[2:] == ["alive"]


FAILS = """
def fail(chunk, out):
    raise ValueError("out of cheese\\nand out of bread")
"""


def test_an_exception_of_another_rank_has_its_stage_its_chunk_and_its_traceback(film: Film) -> None:
    code, out, error = film.run(
        FAILS
        + """
if __name__ == "__main__":
    try:
        pp.Job("read@0 -> work@1 -> write@0", read=chunks, work=fail, write=print).run()
    except pp.StageError as error:
        print(error.rank, error.stage, error.chunk, error.operation)
        print(error.text)
"""
    )
    lines = out.splitlines()
    assert code == 0 and lines[:2] == ["1 work 0 run", "Traceback (most recent call last):"], error + out
    number = next(at for at, line in enumerate(film.path.read_text().splitlines(), 1) if "out of cheese" in line)
    assert f'  File "{film.path}", line {number}, in fail' in lines, out
    assert lines[-2:] == ["ValueError: out of cheese", "and out of bread"], out


def test_the_traceback_of_an_exception_is_shown_once(film: Film) -> None:
    raises = 'raise ValueError("out of cheese'
    for rank in (0, 1):
        program = FAILS + f"""
pp.Job("read@0 -> work@{rank} -> write@0", read=chunks, work=fail, write=print).run()
"""
        code, _, error = film.run(program)
        assert code == 1 and error.count(raises) == 1, error
        assert f"plugin: rank {rank}: run: ValueError: out of cheese and out of bread" in error, error
        assert error.count("Traceback (most recent call last)") == 2, error


def test_a_rank_dies_while_the_loop_sleeps(film: Film) -> None:
    code, out, error = film.run(
        """
        def die(chunk, out):
            if chunk.index == 1:
                while not (HERE / "looped").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            double(chunk, out)

        if __name__ == "__main__":
            try:
                for chunk in pp.Job("read@0 -> die@1 -> write@0", read=chunks, die=die):
                    print(chunk.index)
                    (HERE / "looped").touch()
                    time.sleep(1)
            except pp.JobError as error:
                print(error.code)
        """
    )
    assert (code, out) == (0, "0\n7\n"), error


def test_ctrl_c_drains_and_is_then_raised(film: Film) -> None:
    running = film.start(
        """
        built, taken = [], []

        def endless():
            for i in range(1000000):
                built.append(i)
                yield np.zeros(4)

        def take(chunk):
            taken.append(chunk.index)
            print("went", flush=True)
            time.sleep(0.01)

        if __name__ == "__main__":
            for _ in range(2):
                try:
                    pp.Job("read@0 -> double@1 -> write@0", read=endless, double=double, write=take).run()
                except KeyboardInterrupt:
                    print("drained", len(built) - len(taken) <= 3, flush=True)
                # Whatever the job has set for the process is gone for the next one.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                built.clear(), taken.clear()
            try:
                for chunk in pp.Job("read@0 -> double@1 -> write@0", read=endless, double=double):
                    # The signal may come within a print, between its text and the end of its line.
                    os.write(1, b"went\\n")
                    time.sleep(0.01)
            except KeyboardInterrupt:
                print("left", flush=True)
            time.sleep(60)
        """
    )
    assert running.stdout is not None
    for words in ("drained True\n", "drained True\n", "left\n"):
        assert running.stdout.readline() == "went\n"
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        line = running.stdout.readline()
        while line == "went\n":
            line = running.stdout.readline()
        assert line == words
    # No job takes the signal any more.
    time.sleep(1.2)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=30)
    assert running.returncode == -signal.SIGINT and "KeyboardInterrupt" in error
    assert "finishing the chunks in flight" in error


def test_a_program_that_ends_while_a_stage_works_ends_in_good_order(film: Film) -> None:
    code, out, error = film.run(
        """
        class Late:
            # It makes the end of the interpreter last.
            def __del__(self, sleep=time.sleep):
                sleep(0.5)

        late = Late()

        def slow(chunk, out):
            end = time.monotonic() + 2 * (chunk.index > 0)
            while time.monotonic() < end:
                time.sleep(0.002)
            double(chunk, out)

        for chunk in pp.Job("read@0 -> slow@0 -> write@0", read=chunks, slow=slow):
            time.sleep(0.3)
            sys.exit(3)
        """
    )
    assert (code, out, error) == (3, "", "")


def test_a_job_that_is_dropped_ends_although_its_tasks_wait(film: Film) -> None:
    code, out, error = film.run(
        """
        import asyncio, gc

        def work(chunk, out):
            if chunk.index == 1:
                time.sleep(1000)
            double(chunk, out)

        class Server:
            def __init__(self):
                # Only the collector drops it.
                self.own = self
                self.streams = pp.Job("read@0 -> work@0 -> write@0", work=work, most={"x": pp.Spec((8,), "float32")}).streams()
                self.all = [self.streams.begin() for _ in range(3)]

            async def serve(self, stream):
                for _ in range(2):
                    await stream.push_async({"x": np.zeros(8, np.float32)})
                async for _ in stream:
                    pass

        async def main():
            server = Server()
            try:
                await asyncio.wait_for(asyncio.gather(*map(server.serve, server.all)), 0.5)
            except asyncio.TimeoutError:
                print("left")

        asyncio.run(main())
        gc.collect()
        print("dropped")
        """,
        seconds=60,
    )
    assert (code, out) == (0, "left\ndropped\n"), error


def test_a_stage_that_holds_pythons_lock_loses_no_heartbeat(film: Film) -> None:
    code, out, error = film.run(
        """
        import ctypes
        sleep = ctypes.PyDLL(None).sleep  # keeps Python's lock

        def work(chunk, out):
            sleep(4)
            double(chunk, out)

        if __name__ == "__main__":
            print(pp.Job("read@0 -> work@1 -> write@0", read=chunks(1), work=work, write=lambda chunk: None).run().chunks)
        """,
        PP_HEARTBEAT_MS="1000",
    )
    assert (code, out) == (0, "1\n"), error


def test_ranks_of_a_launcher_raise_and_end_nobody(film: Film) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = film.write(
        """
        def fail(chunk, out):
            raise ValueError("out of cheese")

        for stage in (double, fail):
            job = pp.Job("read@0 -> work@1 -> write@0", read=chunks(3), work=stage, write=lambda chunk: None)
            try:
                done = job.run()
                print("done", done and done.chunks)
            except pp.JobError as error:
                print(error.rank, error.code)
        """
    )
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PP_JOB_SECRET": "0123456789abcdef" * 2}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    outs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert outs == ["done 3\n1 5\n", "done None\n1 5\n"]


def test_a_launcher_without_a_secret_is_an_error_of_the_job(film: Film) -> None:
    code, out, error = film.run(
        """
        try:
            pp.Job("read@0 -> double@1 -> write@0", read=chunks, double=double, write=print).run()
        except pp.JobError as error:
            print(error.code, error)
        """,
        **{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    )
    assert code == 0 and out.startswith("2 ") and "export PP_JOB_SECRET" in out, error


OPENED = """
def job(**more):
    return pp.Job("push@0 -> double@1 -> pull@0", double=double, most={"x": pp.Spec((8,), "float32")}, **more)

def serve(**more):
    with job(**more).open() as flow:
        flow.push(np.ones(8, np.float32))
        flow.end()
        return [float(chunk["x"][0]) for chunk in flow]
"""


def test_a_job_behind_an_opened_one_is_refused_before_it_starts_a_rank(film: Film) -> None:
    code, out, error = film.run(
        OPENED
        + """
done = pp.Job("read@0 -> double@1 -> write@0", read=chunks, double=double, write=lambda chunk: None).run()
print(done and done.chunks, serve())
try:
    job().streams()
except RuntimeError as error:
    print(error)
"""
    )
    assert code == 0 and out.startswith("6 [2.0]\nthis job has ranks beyond 0") and "give command=" in out, error + out


def test_a_worker_of_its_own_takes_part_in_its_first_job_alone(film: Film) -> None:
    job = 'pp.Job("read@0 -> double@1 -> write@0", read=chunks, double=double, write=lambda chunk: None'
    film.write(f'for job in ("first", "second"):\n    print(job)\n    {job}).run()\nprint("third")\n')
    film.path.rename(film.path.with_name("worker.py"))
    code, out, error = film.run(
        f"""
        for _ in range(2):
            print({job}, command=[sys.executable, str(HERE / "worker.py")]).run().chunks)
        """
    )
    # What a rank that was started prints comes as standard error.
    assert (code, out, error.split()) == (0, "6\n6\n", 2 * ["first", "second"])


def test_the_remedies_of_a_rank_that_ends_are_those_of_the_package(film: Film, tmp_path: Path) -> None:
    code, out, error = film.run(
        """
        def leave(chunk, out):
            os._exit(3)

        try:
            pp.Job("read@0 -> leave@1 -> write@0", read=chunks, leave=leave, write=print).run()
        except pp.JobError as error:
            print(error)
        """,
        PP_FLIGHT_OPS="1024",
        PP_FLIGHT_DIR=str(tmp_path / "flight"),
    )
    assert code == 0 and "exit code 3" in out and out.endswith("does a stage or a library call os._exit?\n"), error + out
    assert list((tmp_path / "flight").iterdir()), "the ranks have recorded"


def test_a_program_without_a_file_is_refused_and_one_rank_is_not(film: Film) -> None:
    film.write(TWO.replace('if __name__ == "__main__":', "if True:"))
    text = film.path.read_text().replace("Path(__file__).parent", "None")
    for ranks, code in ((text, 1), (text.replace("@1", "@0"), 0)):
        run = subprocess.run([sys.executable, "-"], input=ranks, text=True, capture_output=True, timeout=60)
        assert run.returncode == code, run.stderr
    assert "10.0]" in run.stdout
    run = subprocess.run([sys.executable, "-"], input=text, text=True, capture_output=True, timeout=60)
    assert "put the job into a file" in run.stderr
    run = subprocess.run([sys.executable, "-c", text], text=True, capture_output=True, timeout=60)
    assert "10.0]" in run.stdout, run.stderr


def test_signal_handlers_are_the_programs_during_and_after_a_job(film: Film) -> None:
    running = film.start(
        """
        def handled():
            return [line for line in open("/proc/self/status") if line.startswith(("SigCgt", "SigIgn"))]

        def note(signum, frame):
            print("noted", flush=True)

        def wait(chunk):
            print("went", flush=True)
            time.sleep(0.01)

        def endless():
            while True:
                yield np.zeros(4)

        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            before = handled()
            for pipeline in ("read@0 -> double@1 -> write@0", "read@0 -> double@0 -> write@0"):
                pp.Job(pipeline, read=chunks, double=double, write=lambda chunk: None).run()
                print(handled() == before, flush=True)
            # A handler that the program sets between two jobs is there again after the second.
            signal.signal(signal.SIGHUP, note)
            try:
                pp.Job("read@0 -> double@1 -> write@0", read=endless, double=double, write=wait).run()
            except pp.JobError as error:
                print(error.code, flush=True)
            # A process that is forked ends by SIGTERM.
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.kill(child, signal.SIGTERM)
            print(os.waitpid(child, 0)[1], flush=True)
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        """
    )
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(3)]
    assert lines == ["True\n", "True\n", "went\n"], lines
    running.send_signal(signal.SIGHUP)
    out, error = running.communicate(timeout=60)
    said = [line for line in out.splitlines() if line != "went"]
    assert said == ["129", "15", "noted", "interrupted"], (out, error)
    assert running.returncode == -signal.SIGTERM, error


def test_the_server_of_the_examples_answers_each_request() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLES / "server.py")], text=True, capture_output=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert [line.split(" [")[0] for line in run.stdout.splitlines()] == ["ada 0", "ada 1", "bob 0", "bob 1"], run.stdout
