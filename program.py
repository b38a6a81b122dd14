"""How every program here begins and ends, where Ctrl-C would show a traceback.

To import PyTorch takes seconds, and Ctrl-C has to end a program meanwhile, too: with status 130,
and no other word. So each program, where it is run and not imported itself, imports this file
before PyTorch, and its last line is run(main). What is said on stderr is no result: where it cannot
be written, as on a full disk, it is lost, and the program goes on.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def leave(*_: Any) -> None:
    """Handle Ctrl-C. A KeyboardInterrupt would say where it came from."""
    os._exit(130)


BEFORE = signal.signal(signal.SIGINT, leave)


class Lossy(io.FileIO):
    """A file that takes what it is given, whether or not that can be written."""

    def write(self, data: bytes) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def run(main: Callable[[], int]) -> None:
    """Run a program, in which Ctrl-C is a KeyboardInterrupt, and exit with its status."""
    if sys.stderr:  # else it is closed
        sys.stderr = io.TextIOWrapper(Lossy(2, "w"), errors="backslashreplace", write_through=True)
    try:
        signal.signal(signal.SIGINT, BEFORE)
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, leave)  # Python takes its time to end
