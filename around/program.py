"""How every program here begins and ends, so that Ctrl-C never shows a traceback.

Importing PyTorch takes seconds, and Ctrl-C must end a program during that time too, with status 130
and without a message. So each program, if it is run and not imported, first imports this file, then
PyTorch, and its last line is run(main). tools/convert.py ends in its own way, and the chapters of
the course use lesson.run. Messages on stderr are not results: if they cannot be written, for
example to a full disk, they are lost, and the program goes on.
"""

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def leave(*_: Any) -> None:
    """Handle Ctrl-C: exit at once. A KeyboardInterrupt would print a traceback."""
    os._exit(130)


# From the import of this file until `run`, Ctrl-C calls leave.
PYTHONS_HANDLER = signal.signal(signal.SIGINT, leave)


class Lossy(io.FileIO):
    """A file that discards what cannot be written."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def run(main: Callable[[], int]) -> None:
    """Run a program and exit with its status. While it runs, Ctrl-C is a KeyboardInterrupt."""
    for stream in filter(None, (sys.stdin, sys.stdout)):
        # A terminal may not be UTF-8; and the line ends of a prompt are a part of it.
        stream.reconfigure(errors="replace", newline="")
    if sys.stderr:  # None if it is closed
        sys.stderr = io.TextIOWrapper(Lossy(2, "w"), errors="backslashreplace", write_through=True)
    try:
        try:
            signal.signal(signal.SIGINT, PYTHONS_HANDLER)
            status = main()
        finally:
            signal.signal(signal.SIGINT, leave)  # while Python shuts down
    except KeyboardInterrupt:  # from main, or just before `leave` is in place
        status = 130
    sys.exit(status)
