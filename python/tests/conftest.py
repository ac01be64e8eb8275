"""Runs programs of several ranks, and what all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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


class Film:
    """A program in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "film.py"

    def write(self, text: str) -> list[str]:
        self.path.write_text(HEAD + textwrap.dedent(text))
        return [sys.executable, str(self.path)]

    def start(self, text: str, **env: str) -> subprocess.Popen[str]:
        command = self.write(text)
        environment = {**os.environ, "PP_FLIGHT_OPS": "0", **env}
        return subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
        )

    def run(self, text: str, **env: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        film = self.start(text, **env)
        out, error = film.communicate(timeout=120)
        return film.returncode, out, error


@pytest.fixture
def film(tmp_path: Path) -> Film:
    return Film(tmp_path)
