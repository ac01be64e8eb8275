"""What ends a job, as exceptions."""

from __future__ import annotations


class JobError(Exception):
    """A job ended early. The text names the rank and the operation.

    `kind` is the kind of fault, such as "peer died"; `rank` and `operation` are None where no rank is to blame; `code` is the
    exit code that docs/running.md lists.
    """

    def __init__(self, kind: str, rank: int | None, operation: str | None, text: str, code: int) -> None:
        super().__init__(text)
        self.kind = kind
        self.rank = rank
        self.operation = operation
        self.code = code


class StageError(JobError):
    """A stage, the source or the sink raised. The exception itself is the cause (`__cause__`) where it was raised in this process."""


def of_end(args: tuple[str, int | None, str | None, str, int]) -> JobError:
    """The exception for what the job ended with."""
    kind = StageError if args[0] == "plugin" else JobError
    return kind(*args)
