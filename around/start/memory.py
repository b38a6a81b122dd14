"""How many blocks of keys and values fit into this machine's memory. Read: affordable_blocks."""

import os
import re

import torch

from around import machine
from around.settings import EngineArgs
from model import Transformer
from paged import Runner
from scheduler import Proposer

MAX_BYTES = 2**32  # of the cache on a CPU, as in vLLM: other programs want memory too


def affordable_blocks(limits: EngineArgs, model: Transformer, proposer: Proposer) -> int:
    """How many blocks fit into limits.kv_memory, and no more than the sequences can use.

    A kv_memory of 1 or more is a number of bytes. Below 1 it is a share of the free memory, and on
    a CPU at most MAX_BYTES. A part of the rest is for a step: its activations, masks and logits,
    and what attention copies of one layer's keys and values.

    Args:
        proposer: each of the models that guess has as many blocks as the model.

    Raises:
        ValueError: no block fits.
    """
    size = limits.block_size
    block_bytes = sum(
        kv.nbytes
        for each in (model, *proposer.models)
        for kv in Runner(each, 1, size, limits.kv_dtype).kv
    )
    memory = limits.kv_memory
    if memory < 1:
        memory *= free_memory(model.device)
        if model.device.type == "cpu":
            memory = min(memory, MAX_BYTES)
    longest = limits.max_seq_len or model.config.max_position_embeddings
    num_blocks = min(int(memory // block_bytes), limits.max_num_seqs * -(-longest // size))
    if num_blocks < 1:
        raise ValueError("0 blocks fit into --kv-memory: raise it")
    return num_blocks


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate.

    With CUDA it is the free memory of the GPU. Otherwise it is what the machine and the control
    groups of this process have left, divided by the number of ranks on this machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Cached files count as free, because the system drops them when memory is short.
    try:
        found = re.findall(r"MemAvailable:\s+(\d+)", (machine.ROOT / "proc/meminfo").read_text())
        free = [int(found[0]) * 1024]  # it is in kB
    except (OSError, IndexError):  # no /proc, or an old one: half of the physical memory
        free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    # A control group's limit, its usage and what that consists of.
    for limit, used, *stat in machine.group_limits("memory.max", "memory.current", "memory.stat"):
        # The pattern finds inactive_file too. Both together are the cached files.
        cached = re.findall(r"active_file (\d+)", " ".join(stat))
        free.append(max(0, int(limit) - int(used) + sum(map(int, cached))))
    return min(free) // int(os.getenv("LOCAL_WORLD_SIZE", "1"))
