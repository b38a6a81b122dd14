"""Continuous batching: which tokens of which sequences run in the next step.

Decoding one sequence reads every weight to make one token; decoding 32 together reads them once for
32. The batch is formed anew at each step (Orca): a sequence that ends leaves it at once, and a
waiting one takes its place. Prompts enter in chunks beside the running sequences' single tokens
(Sarathi), so a long prompt holds nobody up. There is no prefill and no decode phase: every sequence
has tokens whose keys and values are not in the cache yet, and a step runs some of them.

    step        1         2         3         4             budget: 8 tokens a step
    A  running  a         a         a         a             one token each ...
    B  prompt   bbbbbbb   bbbbbbb   bb        b             ... a prompt takes what is left,
    C  prompt                       ccccc     cccccc        in the order of arrival

    Request       what a user asked for: a prompt, its SamplingParams, n outputs
      Sequence    one output: the ids of prompt and text so far                  [5 9 2 7 4 8]
        table     which blocks hold its keys and values, and of how many ids     [3, 0] 4
        row       its share of a step: the ids that the cache lacks, or some     [4 8]

When blocks run out, the last in line gives its own back and will be computed again (what its
prefill took; its blocks are often still in the prefix cache). What it buys: 32 requests at once
give 7 times the tokens per second of one after another (`tools/bench.py throughput`, on two Zen 5
cores). Knows requests and blocks; knows nothing of HTTP or of how attention reads the blocks.
Papers: Yu et al. 2022 (Orca), Agrawal et al. 2023 (Sarathi, arXiv:2308.16369), Kwon et al. 2023
(arXiv:2309.06180, section 4.5: preemption). Read: Engine.step, Engine.schedule. Next: quantize.py.
"""

import itertools
import os
import re
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import Transformer, check
from paged import BlockPool, BlockTable, Row, Runner
from sampling import Guess, SamplingParams, Sequence, Token, finite, scored
from speculative import DraftModel, NGram
from structured import matcher
from tokenizer import Tokenizer


@dataclass(eq=False)
class Request:
    """What one user asked for, and what came of it: vLLM's RequestOutput.

    `outputs` holds the n sequences, each with text, output_ids, tokens (log-probabilities),
    finish_reason, and times (queued, first token, ..., last token). The others are forked from the
    first once its prompt has been computed, sharing the prompt's blocks. `prompt` holds a Token of
    each prompt id, with its log-probability where params ask for that, but for the first's, which
    nothing comes before.
    """

    id: str | None = None
    outputs: list[Sequence] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    priority: int = 0  # the lowest number runs first, as in vLLM
    cache_salt: str | None = None
    arrival: int = 0

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.outputs)


@dataclass
class Stats:
    """Counters since the engine was made; the names are those of vLLM's metrics, if it has them."""

    engine_steps: int = 0
    num_preemptions: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0  # run through the model: prompts, outputs and guesses
    prefix_cache_queries: int = 0  # tokens of sequences that began to run, looked for there
    prefix_cache_hits: int = 0  # tokens found there


class Engine:
    """Runs many requests at once, a step at a time. To be driven from one thread.

    Attributes:
        queue: the sequences that have not ended, first in line first; those with blocks run, and
            those without wait. The last in line is the first to be preempted.
        ran: the sequences of the last step, and how many tokens of each it ran.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_seq_len: int | None = None,
        kv_memory: float = 0.5,
        num_blocks: int | None = None,
        block_size: int = 16,
        kv_dtype: str = "auto",
        draft: Transformer | None = None,
        speculate: int = 0,
        runner: type[Runner] = Runner,
    ) -> None:
        """Make the block pool.

        Args:
            model: finished, on its device, compiled or not; see quantize.compile_model.
            tokenizer: None: prompts are ids, and there is no text.
            max_num_seqs: sequences running at once.
            max_num_batched_tokens: token budget of a step. Larger, prompts are done sooner;
                smaller, the tokens of running sequences come more evenly.
            max_seq_len: prompt and output together; None: what the model was trained for.
            kv_memory: bytes for keys and values, or below 1 the share of the free memory. Never
                more than max_num_seqs sequences of max_seq_len can use.
            num_blocks: blocks in the pool, instead of kv_memory.
            block_size: tokens in a block.
            kv_dtype: of the keys and values: "auto" is the model's own, or "int8".
            draft: a small model that guesses tokens, on the same device; see speculative.py.
            speculate: tokens to guess in a step; without a draft, from what the text repeats.
            runner: tp.Leader, where the model is one rank's share.

        Raises:
            ValueError: a budget too small for one token (and the guesses after it) of each
                sequence, no room for a block, or a draft with another vocabulary.
        """
        check("max_num_seqs", max_num_seqs, int)
        check("block_size", block_size, int)
        # Or a running sequence would have to wait.
        check("max_num_batched_tokens", max_num_batched_tokens, int, max_num_seqs * (1 + speculate))
        self.config, self.tokenizer = model.config, tokenizer
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_seq_len = max_seq_len or model.config.max_position_embeddings
        if num_blocks is None:
            one = [Runner(each, 0, block_size, kv_dtype) for each in (model, draft) if each]
            size = sum(t.nbytes for each in one for pool in each.pools for t in pool)
            c = self.config  # and what attention copies: at most a layer's keys and values
            size += 2 * block_size * c.num_key_value_heads * c.head_dim * model.dtype.itemsize
            free = free_memory(model.device) if kv_memory < 1 else 1
            most = max_num_seqs * -(-self.max_seq_len // block_size)
            num_blocks = min(int(kv_memory * free // size) - 1, most)
        self.pool, shape = BlockPool(num_blocks, block_size), (num_blocks, block_size, kv_dtype)
        self.runner, self.proposer = runner(model, *shape), NGram(speculate)
        if draft:
            self.proposer = DraftModel(Runner(draft, *shape), speculate, self.config.vocab_size)
        self.queue: list[Sequence] = []
        self.ran: dict[Sequence, int] = {}
        self.stats, self._arrivals = Stats(), itertools.count(1)

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.queue if sequence.table.blocks]

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for sequence in self.queue if not sequence.table.blocks]

    # --- Requests come and go ---------------------------------------------------------------------

    def prepare(self, prompt: str | list[int], params: SamplingParams, **options: Any) -> Request:
        """Make a request, which submit() queues. Changes nothing, so any thread may call it.

        Args:
            options: Request's id, priority and cache_salt.

        Raises:
            ValueError: see Sequence and structured.matcher; or it could never fit into the cache,
                however long it waited.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = Request(prompt=[*map(Token, ids)], **options)
        check("cache_salt", request.cache_salt, str | None)
        wish = params.structured_outputs
        first = None if wish is None else matcher(self.tokenizer, self.config, wish)
        for each in params.split():
            sequence = Sequence(ids, each, self.config, self.tokenizer, self.max_seq_len)
            sequence.matcher = first and first.deep_copy()
            sequence.request, sequence.table = request, BlockTable()
            request.outputs.append(sequence)
        # The last token is sampled and never run, so its keys and values need no slot.
        need = -(-(sequence.max_len - 1) // self.pool.block_size)
        what = "prompt and max_tokens (lower it or raise --kv-memory), in blocks of the cache,"
        check(what, need, int, 0, self.pool.num_blocks)
        return request

    def submit(self, request: Request) -> None:
        """Queue a request; step() moves it on."""
        request.arrival = next(self._arrivals)
        request.id = request.id or f"request-{request.arrival}"
        insort(self.queue, request.outputs[0], key=rank)

    def add_request(self, *args: Any, **options: Any) -> Request:
        """prepare() and submit()."""
        self.submit(request := self.prepare(*args, **options))
        return request

    def abort(self, request: Request) -> None:
        """End a request where it stands, and free its blocks. Does nothing where it has ended."""
        for sequence in request.outputs:
            if sequence in self.queue:
                self._leave(sequence)
            sequence.finish("abort")

    def reset(self) -> None:
        """Drop every request and the prefix cache: after an exception out of step(), such as Ctrl-C
        between two lines, the books need not balance."""
        queue, self.queue = self.queue, []
        self.pool = BlockPool(self.pool.num_blocks, self.pool.block_size)
        self.pool.dirty.update(range(self.pool.num_blocks))
        for sequence in queue:
            self.abort(sequence.request)

    # --- A step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one forward over the tokens that schedule() picks.

        Returns:
            The requests that got a token, or whose logits no token can be drawn from: these end,
            with "error". A long prompt's chunks give none until the last.

        After an exception, such as running out of memory, only reset() makes it usable again.

        Example: a budget of 4 tokens. A has ids [5 9 2], of which the cache holds 5 9; B has the
            new prompt [5 9 2 7 4 8], and nothing is guessed:
                1) A may run up to its end, 3; B takes the three tokens that are left, up to 3
                3) rows [2] at 2, [5 9 2] at 0: their last tokens' logits, one (V,) each
                4) A is at its end, so its logits give a token, 6; those of B are not used
                5) A: ids [5 9 2 6], 3 of them in the cache. B: 3 of 6
        """
        # 1) schedule: each sequence's `end` says how far it is to run
        batch = self.schedule()
        if not batch:
            return []
        # 2) guess, where that is past its last token
        self.proposer.propose(batch)
        # 3) run
        rows = [self._row(sequence) for sequence in batch]
        logits = self.runner.run(rows)
        # 4) sample, for those whose known tokens have all run
        drawing, parts, failed, broken = [], [], [], not finite(logits).all()
        spans = logits.split([row.wanted for row in rows])
        for sequence, row, part in zip(batch, rows, spans, strict=True):
            if broken and not finite(part).all():
                failed.append(self._fail(sequence))
                continue
            if sequence.scores_prompt:
                part = self._score(sequence, row, part)
            drawing += (new := self._computed(sequence, row))
            parts += [part] * len(new)
        sampled = self.proposer.verify(torch.cat(parts), drawing) if parts else []
        # 5) append, and retire what has ended
        for sequence, tokens in zip(drawing, sampled, strict=True):
            self._append(sequence, tokens)
        self.ran = {each: len(row.ids) for each, row in zip(batch, rows, strict=True)}
        self.stats.engine_steps += 1
        self.stats.computed_tokens += sum(self.ran.values())
        return [*dict.fromkeys(sequence.request for sequence in drawing + failed)]

    def run(self) -> Iterator[Request]:
        """Step until no request is left, yielding those that got a token."""
        while self.queue:
            yield from self.step()

    def schedule(self) -> list[Sequence]:
        """Choose the sequences of this step, set their `end`, and make room for their tokens.

        `end` is past a sequence's last token by as many as are to be guessed.
        """
        budget, batch, copies, pool = self.max_num_batched_tokens, [], [], self.pool
        running, waiting, stats = self.running, self.waiting, self.stats
        preemptions = stats.num_preemptions
        # 1) the running, first in line first. Each later one is sure of its share of the budget.
        for i, sequence in enumerate(running):
            reserved = (len(running) - i - 1) * (1 + self.proposer.k)
            end = self._end(sequence, budget - reserved)
            # The last in line gives its blocks back, and waits to be computed again.
            while i < len(running) and pool.cost(sequence.table, end) > pool.num_available:
                pool.free(running.pop().table)
                stats.num_preemptions += 1
            if i < len(running):  # else it was itself the last
                copies += pool.grow(sequence.table, end)
                budget -= end - sequence.table.length
                sequence.end = end
                batch.append(sequence)
        # 2) the waiting, while there is budget and memory; not right after taking memory away
        room = self.max_num_seqs - len(running) if preemptions == stats.num_preemptions else 0
        for sequence in waiting[:room]:
            table = sequence.table
            if not sequence.scores_prompt:  # of what is found there are no logits
                pool.reuse(table, sequence.ids, sequence.request.cache_salt)
            end = self._end(sequence, budget)
            if end == table.length or pool.cost(table, end) > pool.num_available:
                pool.free(table)
                break
            stats.prefix_cache_queries += 0 if sequence.scores_prompt else len(sequence.ids)
            stats.prefix_cache_hits += table.length
            sequence.cached = sequence.cached if sequence.tokens else table.length
            copies += pool.grow(table, end)
            budget -= end - table.length
            sequence.end = end
            batch.append(sequence)
        if copies:
            self.runner.copy_blocks(copies)
            self.proposer.copy_blocks(copies)
        return batch

    def _end(self, sequence: Sequence, budget: int) -> int:
        """Where a sequence's next tokens end: within the budget, and never among its guesses, so
        that how many these are depends on nothing but the sequence. Where the guesses do not fit,
        the last known token waits with them, as they run in one step."""
        known, start = len(sequence.ids), sequence.table.length
        end = known + self.proposer.count(sequence)
        return end if end - start <= budget else min(known - 1, start + budget)

    def _row(self, sequence: Sequence) -> Row:
        """What a sequence runs: known tokens that the cache lacks, and guesses."""
        table, guesses = sequence.table, sequence.guess.ids
        ids = sequence.ids[table.length : sequence.end] + guesses
        wanted = len(ids) if sequence.scores_prompt else 1 + len(guesses)
        return Row(table.blocks, table.length, ids, wanted)

    def _score(self, sequence: Sequence, row: Row, logits: Tensor) -> Tensor:
        """Note the log-probabilities of the prompt's tokens after a row's, (len(row.ids), V) logits
        each. Returns those that the next token may be drawn from."""
        ids, at = sequence.ids[row.start + 1 :][: len(row.ids)], row.start + 1
        tokens = scored(logits[: len(ids)], ids, [sequence.params.logprobs] * len(ids))
        sequence.request.prompt[at : at + len(ids)] = tokens
        return logits[-1 - len(sequence.guess.ids) :]

    def _computed(self, sequence: Sequence, row: Row) -> list[Sequence]:
        """Take note that a row has run. Returns who draws from its logits: nobody before the end;
        the sequence; and at the end of a prompt also the n - 1 others of its request, which go on
        from the same blocks."""
        end = row.start + len(row.ids) - len(sequence.guess.ids)
        self.pool.commit(sequence.table, sequence.ids, end, sequence.request.cache_salt)
        if end < len(sequence.ids):
            return []
        if sequence.tokens:
            return [sequence]
        for other in sequence.request.outputs[1:]:
            # One over max_num_seqs still gets this first token; then it waits, without blocks.
            if len(self.running) < self.max_num_seqs:
                other.table = self.pool.fork(sequence.table)
            insort(self.queue, other, key=rank)
        return sequence.request.outputs

    def _fail(self, sequence: Sequence) -> Sequence:
        """End a sequence that nothing can be drawn for; at its prompt, all that were to follow."""
        sequence.table.spoilt = True
        self._leave(sequence)
        for each in [sequence] if sequence.tokens else sequence.request.outputs:
            each.finish("error")
        return sequence

    def _append(self, sequence: Sequence, tokens: list) -> None:
        for token in tokens:
            if not sequence.finish_reason:  # EOS or a stop string can come before the last
                sequence.append(token)
                self.stats.generation_tokens += 1
        sequence.guess = Guess()
        if sequence.table.blocks:
            # The cache now holds the accepted guesses too; refused ones will be overwritten.
            # commit() comes with the next step: the draft has not run the last of them yet.
            sequence.table.length = len(sequence.ids) - 1
        if sequence.finish_reason:
            self._leave(sequence)

    # --- The queue --------------------------------------------------------------------------------

    def _leave(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        self.pool.free(sequence.table)


def rank(sequence: Sequence) -> tuple[int, int]:
    """A sequence's place in line."""
    return sequence.request.priority, sequence.request.arrival


# --- Memory ---------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")  # what the kernel could free, caches of files included
    if meminfo.is_file():
        return int(re.search(r"MemAvailable: *(\d+)", meminfo.read_text())[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
