"""The machine that a program runs on: its device, terminal and other processes.

This file knows no model, and no setting but --device and --threads. Read: Ranks.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

# --- Processes and the terminal -------------------------------------------------------------------


class Ranks(NamedTuple):
    """The processes that share a model, seen from this one. By default it is alone.

    Attributes:
        device: where this process computes.
        rank: its number. Rank 0 schedules, samples and prints.
        world_size: how many processes there are.
        shard: for load_model: makes this rank's share of a model; None: all of it.
        runner: the class of the Engine's runner; None: paged.Runner.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    shard: Callable | None = None
    runner: type | None = None


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Let Ctrl-C take effect only at the end. Only the main thread may call this; engines run in
    it."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: pressed.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        # Call the handler, if there is one. If the signal were raised again instead, the server
        # would count a second Ctrl-C (see front.watch_signals), and end at once.
        for signum in pressed:
            if callable(before):
                before(signum, None)


def say(text: str, end: str = "\n") -> None:
    """Write to stderr, if it is open, what a program says beside its results. Text and end are one
    write, so that the lines of several threads do not mix."""
    if sys.stderr:
        print(text + end, end="", file=sys.stderr, flush=True)


def progress(items: Collection, label: str) -> Iterator[Any]:
    """Yield from `items`, and count them on stderr, if it is a terminal.

    Args:
        label: names the work in a word or two.
    """
    for done, item in enumerate(items, 1):
        yield item
        if sys.stderr and sys.stderr.isatty():
            say(f"\r{label} {done}/{len(items)} ", "\n" if done == len(items) else "")


# --- This machine ---------------------------------------------------------------------------------

ROOT = Path("/")  # where /proc and /sys are; tests have another


def cgroup_limits(*files: str) -> Iterator[list[str]]:
    """Yield the limits of this process's control group (version 2; systemd and Kubernetes have
    dropped version 1) and of all groups around it, which hold too.

    A container, a service of systemd or a job of Slurm is such a group.

    Yields:
        The words in the files, if the first one is a number. Otherwise it is "max", and there is no
        limit.

    Example: /proc/self/cgroup has the line 0::/a/b. The folders are a/b, a and that of the root in
        /sys/fs/cgroup. Where a container sees only its own group, this has the place of the root
    """
    with suppress(OSError):  # no Linux
        for group in re.findall("0::/(.*)", (ROOT / "proc/self/cgroup").read_text()):
            own = ROOT / "sys/fs/cgroup" / group
            for folder in (own, *own.parents):
                with suppress(OSError):
                    found = " ".join((folder / file).read_text() for file in files)
                    if found[0].isdigit():
                        yield found.split()


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate.

    With CUDA it is the free memory of the GPU. Otherwise it is what the machine and the control
    groups of this process have left, divided by the number of ranks on this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Cached files count as free, because the system drops them when memory is short.
    try:
        found = re.findall(r"MemAvailable:\s+(\d+)", (ROOT / "proc/meminfo").read_text())
        free = [int(found[0]) * 1024]  # it is in kB
    except (OSError, IndexError):  # no /proc, or an old one: all of the physical memory
        free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # A control group's limit, its usage and what that consists of.
    for limit, used, *stat in cgroup_limits("memory.max", "memory.current", "memory.stat"):
        # The pattern finds inactive_file too. Both together are the cached files.
        cached = re.findall(r"active_file (\d+)", " ".join(stat))
        free.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(free) // int(os.getenv("LOCAL_WORLD_SIZE", "1"))


# A model whose weights have fewer bytes than this runs on one thread. All threads of an operator
# wait for the slowest of them, and if another process uses its core, they wait long. With 20 MB of
# weights, one sequence made 424 tokens/s on one thread and 514 on two; while other processes kept
# both cores busy, 139 and 14.
SMALL = 2**25
ALL_THREADS = torch.get_num_threads()  # PyTorch's default: OMP_NUM_THREADS, or one for each core


def use_threads(threads: int | None, weights: int) -> None:
    """Set the number of CPU threads that compute, for the whole process. This replaces what
    torch.set_num_threads was given before.

    Args:
        threads: their number; None means OMP_NUM_THREADS if it is set, else one thread for small
            weights and those of allowed_threads for others.
        weights: bytes of the model's weights, as loaded (before --quantize).
    """
    if threads is None:
        threads = ALL_THREADS
        if "OMP_NUM_THREADS" not in os.environ:
            threads = 1 if weights < SMALL else allowed_threads()
    torch.set_num_threads(threads)


def allowed_threads() -> int:
    """Return how many threads can run all the time: one for each core, but no more than the CPU
    quotas of this process's control groups.

    More threads would use up the quota early in each period of 0.1 s, and then all of them stand
    still until the next one.
    """
    # The microseconds in a period that may be used, and those of the period.
    found = cgroup_limits("cpu.max")
    return min([ALL_THREADS, *(max(1, int(quota) // int(period)) for quota, period in found)])


def pick_device(name: str) -> torch.device:
    """Turn --device into a device.

    Raises:
        ValueError: this machine has no such device.
    """
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", best.type):
        raise ValueError(f"--device {name}: this machine has none; use --device cpu or auto")
    return best if name == "auto" else torch.device(name)
