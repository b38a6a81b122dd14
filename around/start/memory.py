"""How many blocks of keys and values fit into this machine's memory. Read: affordable_blocks."""

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from around.settings import MAX_PAIRS, EngineArgs
from model import Transformer
from paged import Runner
from scheduler import MAX_SCORED, Proposer, step_budget

MAX_BYTES = 2**32  # of the cache on a CPU, as in vLLM: other programs want memory too


def affordable_blocks(limits: EngineArgs, model: Transformer, proposer: Proposer) -> int:
    """How many blocks fit into limits.kv_memory, and no more than the sequences can use.

    A kv_memory of 1 or more is a number of bytes. Below 1 it is a share of the free memory that a
    step leaves (see step_bytes); on a CPU this share is at most MAX_BYTES.

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
        num_tokens, _ = step_budget(limits, model, proposer)
        # Those that Engine._commit repeats, for a prompt with several outputs, are not counted.
        num_logits = limits.max_num_seqs * (1 + proposer.k) + MAX_SCORED
        memory *= free_memory(model.device) - step_bytes(model, num_tokens, num_logits)
        if model.device.type == "cpu":
            memory = min(memory, MAX_BYTES)
    longest = limits.max_seq_len or config.max_position_embeddings
    num_blocks = min(int(memory // block_bytes), limits.max_num_seqs * -(-longest // size))
    if num_blocks < 1:
        way_out = "raise it, or lower --max-num-batched-tokens or --max-num-seqs"
        raise ValueError(f"0 blocks fit into --kv-memory: {way_out}")
    return num_blocks


def step_bytes(model: Transformer, num_tokens: int, num_logits: int) -> int:
    """Peak bytes of one step: one layer's activations, the logits with the sampler's float32
    copies, and a mask and the scores of attention."""
    config = model.config
    itemsize = model.dtype.itemsize
    # hidden_size counts twice, for x and for attention's tensors. The factor 4 is a margin, which
    # is enough for models with N * H > D as well.
    widths = 2 * config.hidden_size + config.intermediate_size * config.num_experts_per_tok
    activations = num_tokens * 4 * widths * itemsize
    logits = num_logits * 6 * 4 * config.vocab_size  # six float32 tensors
    # To make a mask takes up to four bool tensors, and attention widens it to the queries' dtype.
    heads = config.num_attention_heads // config.num_key_value_heads  # query heads per kv head
    # Prompts in bfloat16 also have a score for each query head, and its softmax: 4 bytes.
    pair = heads * (itemsize + 4) + 4 * config.num_attention_heads
    return activations + logits + MAX_PAIRS * pair


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
