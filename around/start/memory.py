"""How many blocks of keys and values fit into this machine's memory. Read: affordable_blocks."""

from around.machine import free_memory
from around.settings import EngineArgs
from model import Transformer
from paged import Runner
from scheduler import Proposer

MAX_BYTES = 2**32  # of the cache without CUDA, as in vLLM: other programs want memory too


def affordable_blocks(limits: EngineArgs, model: Transformer, proposer: Proposer) -> int:
    """How many blocks fit into limits.kv_memory, and no more than the sequences can use.

    A kv_memory of 1 or more is a number of bytes. Below 1 it is a share of the free memory, and
    without CUDA at most MAX_BYTES. A part of the rest is for a step: its activations, masks and
    logits, and what attention copies of one layer's keys and values.

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
        if model.device.type != "cuda":
            memory = min(memory, MAX_BYTES)
    longest = limits.max_seq_len or model.config.max_position_embeddings
    num_blocks = min(int(memory // block_bytes), limits.max_num_seqs * -(-longest // size))
    if num_blocks < 1:
        raise ValueError("0 blocks fit into --kv-memory: raise it")
    return num_blocks
