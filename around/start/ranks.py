"""How the processes that torchrun has started meet, and check that they are alike. Read: join."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from around.machine import Ranks
from around.settings import VERSION, EngineArgs, blame, given
from tp import Leader, broadcast, shard

# --- Joining --------------------------------------------------------------------------------------


# The beginning of the error if meet() fails.
MEET_HELP = """to run one process, unset RANK and WORLD_SIZE; to run several, start them by \
torchrun, with a GPU each or --device cpu; if machines do not find each other, set \
GLOO_SOCKET_IFNAME"""


@contextmanager
def join(device: torch.device, args: Any = None) -> Iterator[Ranks]:
    """Join the other processes that torchrun has started, until the context ends. Then rank 0 tells
    the others to stop.

    Args:
        args: the command line, which agree() compares among the ranks; None: nothing is compared.

    Raises:
        ValueError: some of torchrun's variables are missing, this machine has fewer GPUs than
            ranks, or the ranks cannot reach each other, or differ (see agree).
        ConnectionError: see lead.
    """
    try:
        with blame(MEET_HELP):
            meet(device)
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        if args:
            agree(args)
        share = partial(shard, rank=rank, world_size=world_size)
        yield Ranks(device, rank, world_size, share, Leader)
        if rank == 0:
            with suppress(RuntimeError):  # the others may be gone
                broadcast()
    except Exception as error:
        # Only the first rank of each machine prints; see launch. That is enough when a rank
        # is lost, because then all ranks have an error of gloo. Any other error may be this rank's
        # alone, so this rank prints it too. But it waits 3 s: if the first rank has the same error,
        # torchrun ends this rank in the meantime, and the error is printed once.
        if os.getenv("LOCAL_RANK", "0") != "0" and "gloo" not in str(error):
            time.sleep(3)
            sys.stderr = sys.__stderr__
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def meet(device: torch.device) -> None:
    """Make the group of all ranks."""
    # Messages are CPU tensors and travel over gloo, even if the model runs on GPUs.
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # All ranks start at the same time, but one may read PyTorch from a slow disk, so they wait 5
    # minutes, even for a rank that cannot be reached. Later there is no deadline, as the next
    # prompt may be late.
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    dist.distributed_c10d._set_pg_timeout(timedelta(days=365))


# --- The same on every machine --------------------------------------------------------------------


def agree(args: Any) -> None:
    """Check that this rank has rank 0's versions and options, among them the path of the checkpoint
    folder. What is in the folder is not compared. Raises ValueError."""
    facts = f"kilolm {VERSION}, torch {torch.__version__}, {given(EngineArgs, args)}"
    first = broadcast(facts)
    if first != facts:
        raise ValueError(
            f"all ranks must be alike: rank {dist.get_rank()} has {facts}, rank 0 has {first}"
        )
