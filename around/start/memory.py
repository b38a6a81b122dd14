"""How many blocks of keys and values fit into this machine's memory. Read: affordable_blocks."""

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from around.settings import EngineArgs
from model import Transformer
from paged import Runner
from scheduler import Proposer

MAX_BYTES = 2**32  # of the cache on a CPU, as in vLLM: other programs want memory too


def affordable_blocks(limits: EngineArgs, model: Transformer, proposer: Proposer) -> int:
    """How many blocks fit into limits.kv_memory, and no more than the sequences can use.

    A kv_memory of 1 or more is a number of bytes. Below 1 it is a share of the free memory, and on
    a CPU at most MAX_BYTES. The activations, masks and logits of a step need a part of the rest.

    Args:
        proposer: each of the models that guess has as many blocks as the model.

    Raises:
        ValueError: no block fits.
    """
    size = limits.block_size
    config = model.config
    # A block counts once in each model's cache, and once in attention's copy: one row may have all
    # blocks, and attention then copies all of them, one layer at a time. Each value in the copy
    # has the model's dtype. While kv_cache.decode runs, an int8 value takes up to 6 bytes more: 1
    # as int8, 4 as float32, and 8 / H, which is at most 1, as its share of the scale, of which
    # there are two copies of 4 bytes.
    copied = model.dtype.itemsize + (6 if limits.kv_dtype == "int8" else 0)
    block_bytes = 2 * size * config.num_key_value_heads * config.head_dim * copied
    for each in (model, *proposer.models):
        one_block = Runner(each, 1, size, limits.kv_dtype)
        block_bytes += sum(kv.nbytes for kv in one_block.kv)
    memory = limits.kv_memory
    if memory < 1:
        memory *= free_memory(model.device)
        if model.device.type == "cpu":
            memory = min(memory, MAX_BYTES)
    longest = limits.max_seq_len or config.max_position_embeddings
    num_blocks = min(int(memory // block_bytes), limits.max_num_seqs * -(-longest // size))
    if num_blocks < 1:
        way_out = "raise it"
        raise ValueError(f"0 blocks fit into --kv-memory: {way_out}")
    return num_blocks


# The files with a container's memory limit and usage, in version 2 and 1 of control groups.
CGROUPS = {"memory.max": "memory.current", "memory/memory.limit_in_bytes": "memory.usage_in_bytes"}


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate.

    With CUDA it is the free memory of the GPU. Otherwise it is what the machine and the container
    have left, divided by the number of ranks on this machine.

    Args:
        root: where /proc and /sys are, for tests.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Cached files count as free, because the system drops them when memory is short.
    try:
        found = re.findall(r"MemAvailable:\s+(\d+)", (root / "proc/meminfo").read_text())
        free = [int(found[0]) * 1024]  # it is in kB
    except (OSError, IndexError):  # no /proc, or an old one: half of the physical memory
        free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    for limit, used in CGROUPS.items():
        file = root / "sys/fs/cgroup" / limit
        with suppress(OSError, ValueError):  # no such file; or "max", no limit
            # The pattern finds inactive_file too, and the sum of both is the cached files. Version
            # 1 lists the two for this group alone, and then for it with its subgroups (total_...).
            # The last two numbers are right in both versions.
            cached = re.findall(r"active_file (\d+)", file.with_name("memory.stat").read_text())
            taken = int(file.with_name(used).read_text()) - sum(map(int, cached[-2:]))
            free.append(max(0, int(file.read_text()) - taken))
    return min(free) // int(os.getenv("LOCAL_WORLD_SIZE", "1"))
