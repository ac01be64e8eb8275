"""Runs programs of several ranks, and what all tests share."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/python"

# A busy machine may leave a rank without a core for a second.
os.environ.setdefault("PP_HEARTBEAT_MS", "2000")

HEAD = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import pp_pipeline as pp

HERE = Path(__file__).parent

def once(name):
    \"\"\"True in the first process that asks.\"\"\"
    try:
        os.close(os.open(HERE / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def chunks(count=6, size=8):
    for i in range(count):
        yield {"x": np.full((size,), i, np.float32)}

def double(chunk, out):
    out["x"][...] = 2 * chunk["x"]
"""


def needs(module: str) -> Any:
    """A module that not every machine has. A build machine must have it."""
    return importlib.import_module(module) if "PP_TESTS_MUST_RUN" in os.environ else pytest.importorskip(module)


def of_package(package: str, file: str) -> str:
    """The path of a file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        needs(package)
        pytest.fail(f"{package} is no package")
    return str(next(Path(spec.submodule_search_locations[0]).rglob(file)))


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example as if these were its arguments."""

    def load(name: str, *arguments: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return importlib.import_module(name)

    return load


def _hear_all() -> None:
    """A shell ignores SIGINT for a program in the background, and nohup SIGHUP, and that is passed on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Film:
    """A program in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "film.py"

    def write(self, text: str) -> list[str]:
        self.path.write_text(HEAD + textwrap.dedent(text))
        return [sys.executable, str(self.path)]

    def start(self, text: str, *, seconds: float = 600, **env: str) -> subprocess.Popen[str]:
        command = self.write(text)
        environment = {**os.environ, "PP_FLIGHT_OPS": "0", **env}
        film = subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=_hear_all,
        )
        # A test that waits for a line must not wait for ever.
        timer = threading.Timer(seconds, film.kill)
        timer.daemon = True
        timer.start()
        return film

    def run(self, text: str, *, seconds: float = 600, **env: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        film = self.start(text, seconds=seconds, **env)
        out, error = film.communicate(timeout=seconds + 20)
        return film.returncode, out, error


@pytest.fixture
def film(tmp_path: Path) -> Film:
    return Film(tmp_path)


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


def cells(ranks: int, *arguments: int | str) -> list[str]:
    """The lines of all ranks of a run of train_cells.py."""
    command = [sys.executable, str(Path(__file__).with_name("train_cells.py")), str(ranks), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    # Where the machine has much other work, a rank says that it waits.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("pp: ")]
    assert sum(line.endswith(" wrong") for line in lines) == ranks, done.stdout
    assert (done.returncode == 0) == all(line.endswith(" 0 wrong") for line in lines if line.endswith(" wrong")), done.stdout
    return lines
