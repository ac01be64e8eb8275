"""What ends a job, as exceptions."""

from __future__ import annotations

import re

# What the command line calls otherwise, and what the package does not have.
_WORDS = {
    "raise PP_STUCK_MS if": "raise stuck_after= (first_after= until a chunk is through) if",
    "PP_STUCK_MS": "stuck_after=",
    "--devices": "devices=",
    "--restarts": "restarts=",
    "--depth": "depth=",
    "does a kernel plugin call exit?": "does a stage or a library call os._exit?",
    "a crash in a kernel plugin": "a crash in a stage or a library",
}
_RECORDING = re.compile(r" \(what the ranks did last: pp flight .*\)$", re.MULTILINE)


class JobError(Exception):
    """A job ended early. The text names the rank and the operation.

    `kind` is the kind of fault, such as "peer died"; `rank` and `operation` are None where no rank is to blame; `code` is the
    exit code that docs/running.md lists. `stage` is the stage that failed, such as "b 1/2", and `chunk` the number of the chunk
    on which it worked; None where it was in no stage. `text` is what else the rank said, such as its traceback, and may be empty.
    """

    def __init__(
        self,
        kind: str,
        rank: int | None,
        operation: str | None,
        line: str,
        code: int,
        stage: str | None = None,
        chunk: int | None = None,
        text: str = "",
    ) -> None:
        super().__init__(line)
        self.kind = kind
        self.rank = rank
        self.operation = operation
        self.code = code
        self.stage = stage
        self.chunk = chunk
        self.text = text

    def __str__(self) -> str:
        """The line, and below it the text, unless Python shows it as the cause."""
        line = super().__str__()
        if not self.text or self.__cause__ is not None:
            return line
        return f"{line}\n{self.text}"


class StageError(JobError):
    """A stage, the source or the sink raised. The exception itself is the cause (`__cause__`) where it was raised in this process."""


def of_end(args: tuple[str, int | None, str | None, str, int, str | None, int | None, str]) -> JobError:
    """The exception for what the job ended with."""
    kind, rank, operation, line, code, stage, chunk, text = args
    line = _RECORDING.sub("", line)
    if kind == "plugin":
        # The words are those of the stage.
        return StageError(kind, rank, operation, line, code, stage, chunk, text)
    for word, here in _WORDS.items():
        line = line.replace(word, here)
    return JobError(kind, rank, operation, line, code, stage, chunk, text)
