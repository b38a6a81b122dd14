"""How the threads that compute wait for each other. Read: Spinning."""

import os
import sys
import time
from contextlib import suppress
from threading import Event, Thread

import torch

from around import machine

# The cores on which this process may run, named as in /proc/stat. Only Linux has either.
CORES = {f"cpu{i}" for i in os.sched_getaffinity(0)} if sys.platform == "linux" else set()


class Spinning:
    """How the threads of an operator wait for each other: they spin, or they sleep.

    On an idle machine spinning is best, because the next operator comes within microseconds. But if
    another process takes a core, the threads that spin wait for one that does not run, and on two
    cores a step takes over 3 times as long. PyTorch's OpenMP (libgomp) spins only while it has no
    more threads than there are cores. So while other processes are busy, this class keeps a second
    pool, whose threads do nothing. Then libgomp has more threads than cores, and those that compute
    soon sleep where they wait. The arithmetic is the same. Tokens/s of one sequence on two cores of
    a Zen 4, idle, and busy with another process that never waits:
                                   idle     busy, spinning   busy, sleeping   idle, sleeping
        110m, float32, compiled     52            15               36               38
        135m, bfloat16              26             7               17               18
        135m, int4, compiled        80            23               48               45
    """

    def __init__(self) -> None:
        self.before = clocks()  # when adapt() last looked at the load
        self.end_pool: Event | None = None  # set it to end the second pool; None: there is none

    def adapt(self) -> None:
        """Choose by the load since the last choice, half a second ago or more. Called before each
        step. A time in which this process was mostly idle is left out: what others did then, such
        as a build that has ended, says nothing about sharing the cores."""
        if time.monotonic() - self.before[0] < 0.5 or not CORES or torch.get_num_threads() == 1:
            return
        now = clocks()
        seconds, own, others = (after - before for before, after in zip(self.before, now))
        self.before = now
        if own < seconds / 2:  # this process had less than half a core
            return
        # Busy: this process and the others together want over half a core more than there are. A
        # whole core would be too much to ask: on two cores, a process that never waits gets 0.67 of
        # one beside two threads that spin. What the host of a virtual machine takes (steal) counts
        # too, and is mostly less than a half.
        is_busy = torch.get_num_threads() + others / seconds > len(CORES) + 0.5
        if is_busy and not self.end_pool:
            self.end_pool = Event()
            Thread(target=keep_pool, args=(self.end_pool,), daemon=True).start()
        elif self.end_pool and not is_busy:
            self.end_pool.set()
            self.end_pool = None


def keep_pool(end: Event) -> None:
    """Make a pool of OpenMP's threads, which belongs to this thread, and keep it until `end`."""
    torch.zeros(2**20).add_(1)  # large enough for several threads
    end.wait()


def clocks() -> tuple[float, float, float]:
    """Return, in seconds, the time, the CPU time of this process, and that of others on the cores
    that this process may use. Without Linux's /proc, the last is wrong, and CORES is empty."""
    busy = 0.0
    with suppress(OSError):
        for line in (machine.ROOT / "proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in CORES:
                # user, nice, system; not idle and iowait; irq, softirq, steal
                busy += sum(map(int, fields[:3] + fields[5:8])) / os.sysconf("SC_CLK_TCK")
    own = time.process_time()
    return time.monotonic(), own, busy - own


spinning = Spinning()
