"""How the processes that torchrun has started meet. Read: join."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from around.machine import Ranks
from around.settings import blame
from tp import Leader, broadcast, shard

# --- Joining --------------------------------------------------------------------------------------


# The beginning of the error if meet() fails.
MEET_HELP = """to run one process, unset RANK and WORLD_SIZE; to run several, start them by \
torchrun, with a GPU each or --device cpu; if machines do not find each other, set \
GLOO_SOCKET_IFNAME"""


@contextmanager
def join(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes that torchrun has started, until the context ends. Then rank 0 tells
    the others to stop. They must have the same versions and options; that is not checked.

    Raises:
        ValueError: some of torchrun's variables are missing, this machine has fewer GPUs than
            ranks, or the ranks cannot reach each other.
        ConnectionError: see lead.
    """
    try:
        with blame(MEET_HELP):
            meet(device)
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        share = partial(shard, rank=rank, world_size=world_size)
        yield Ranks(device, rank, world_size, share, Leader)
        if rank == 0:
            with suppress(RuntimeError):  # the others may be gone
                broadcast()
    except Exception as error:
        # Only the first rank of each machine prints (see launch). Where a rank is lost, all have an
        # error of gloo, so that is enough. Any other error may be this rank's alone.
        if "gloo" not in str(error):
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
