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

When blocks run out, the last in line gives its own back and will be computed again (recompute of a
few hundred tokens takes a few cheap steps; its blocks are often still in the prefix cache). What it
buys: 32 requests at once give 7 times the tokens per second of one after another (`bench.py
throughput`, on two Zen 5 cores). Knows requests and blocks; knows nothing of HTTP or of how
attention reads the blocks. Papers: Yu et al. 2022 (Orca), Agrawal et al. 2023 (Sarathi,
arXiv:2308.16369), Kwon et al. 2023 (arXiv:2309.06180, section 4.5: preemption). Read: Engine.step,
Engine.schedule, LLM. Next: quantize.py.
"""

import os
import re
import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from generate import pick_device, sampling_params
from kv_cache import PagedCache, Row, stored_dim
from model import DTYPES, Transformer, progress
from paged import BlockPool, BlockTable
from quantize import load
from runner import Runner
from sampling import SamplingParams, Sequence
from speculative import DraftModel, Guess, NGram, Proposer
from tokenizer import Tokenizer


@dataclass(eq=False)
class Request:
    """What one user asked for, and what came of it: vLLM's RequestOutput.

    `outputs` holds the n sequences, each with text, output_ids, tokens (log-probabilities),
    finish_reason, and times (queued, first token, ..., last token). The others are forked from the
    first once its prompt has been computed, sharing the prompt's blocks.
    """

    id: str | None
    outputs: list[Sequence]
    priority: int = 0  # the lowest number runs first, as in vLLM
    cache_salt: str | None = None
    arrival: int = 0

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.outputs)


@dataclass(eq=False)
class Task:
    """One sequence's place in the scheduler: waiting (an empty table) or running."""

    request: Request
    sequence: Sequence
    table: BlockTable = field(default_factory=BlockTable)

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.request.arrival


@dataclass
class Stats:
    """Counters since the engine was made; times in seconds, on the host's clock: what a GPU still
    runs when the model returns is waited for in the sampler."""

    steps: int = 0
    computed_tokens: int = 0  # run through the model: prompts, outputs and guesses
    queried_tokens: int = 0  # of sequences that began to run, looked for in the prefix cache
    cached_tokens: int = 0  # found there
    output_tokens: int = 0
    preemptions: int = 0
    guess_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    host_s: float = 0.0  # the rest of step(): what scheduling costs

    @property
    def total_s(self) -> float:
        return self.guess_s + self.model_s + self.sample_s + self.host_s


class Engine:
    """Runs many requests at once, a step at a time. To be driven from one thread."""

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
        kv_dtype: torch.dtype | None = None,
        compile: bool = False,
        draft: Transformer | None = None,
        speculate: int = 0,
        runner: type[Runner] = Runner,
    ) -> None:
        """Make the block pool.

        Args:
            model: finished, on its device.
            tokenizer: None: prompts are ids, and there is no text.
            max_num_seqs: sequences running at once.
            max_num_batched_tokens: token budget of a step. Larger, prompts are done sooner;
                smaller, the tokens of running sequences come more evenly.
            max_seq_len: prompt and output together; None: what the model was trained for.
            kv_memory: bytes for keys and values, or below 1 the share of the free memory. Never
                more than max_num_seqs sequences of max_seq_len can use.
            num_blocks: blocks in the pool, instead of kv_memory.
            block_size: tokens in a block.
            kv_dtype: torch.int8, or None: the model's own.
            compile: make the models fast first, in place; see runner.compile_model.
            draft: a small model that guesses tokens, on the same device; see speculative.py.
            speculate: tokens to guess in a step; without a draft, from what the text repeats.
            runner: tp.Leader, where the model is one rank's share.

        Raises:
            ValueError: a budget too small for one token (and the guesses after it) of each
                sequence, no room for a block, or a draft with another vocabulary.
        """
        if max_num_batched_tokens < max_num_seqs * (1 + speculate) or max_num_seqs < 1:
            raise ValueError(
                f"max_num_batched_tokens {max_num_batched_tokens} is less than max_num_seqs "
                f"{max_num_seqs} times {1 + speculate} tokens: raise the first or lower the second,"
                " or a running sequence would have to wait"
            )
        config, weight = model.config, model.embed_tokens.weight
        self.config, self.tokenizer = config, tokenizer
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_seq_len = max_seq_len or config.max_position_embeddings
        models = [model, draft] if draft else [model]
        dtypes = [kv_dtype or each.embed_tokens.weight.dtype for each in models]
        if num_blocks is None:
            block_bytes = 0
            for each, dtype in zip(models, dtypes, strict=True):
                heads = 2 * each.config.num_hidden_layers * each.config.num_key_value_heads
                block_bytes += block_size * heads * stored_dim(each.config, dtype) * dtype.itemsize
            if kv_memory < 1:
                kv_memory *= free_memory(weight.device)
            most = max_num_seqs * -(-self.max_seq_len // block_size)
            num_blocks = min(int(kv_memory // block_bytes), most)
        self.pool = BlockPool(num_blocks, block_size)
        caches = [
            PagedCache(each.config, num_blocks, block_size, dtype, weight.device)
            for each, dtype in zip(models, dtypes, strict=True)
        ]
        self.runner = runner(model, caches[0])
        self.proposer: Proposer = NGram(speculate)
        if draft:
            self.proposer = DraftModel(Runner(draft, caches[1]), speculate, config.vocab_size)
        if compile:
            self.runner.compile()
            self.proposer.compile()
        self.running: list[Task] = []  # by rank: the first is served first, the last preempted
        self.waiting: list[Task] = []  # by rank
        self.stats, self._arrivals = Stats(), 0
        self.batch: dict[Task, int] = {}  # of the last step: how many tokens of whom it ran

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Make a request, which submit() queues. Changes nothing, so any thread may call it.

        Raises:
            ValueError: see Sequence; or it could never fit into the cache, however long it waited.
        """
        if not isinstance(cache_salt, str | None):
            raise ValueError(f"cache_salt must be a text, is {cache_salt!r}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        outputs = [
            Sequence(ids, each, self.config, self.tokenizer, self.max_seq_len)
            for each in params.split()
        ]
        # The last token is sampled and never run, so its keys and values need no slot.
        need = -(-(outputs[0].max_len - 1) // self.pool.block_size)
        if need > self.pool.num_blocks:
            raise ValueError(
                f"prompt and max_tokens need {need} blocks of {self.pool.block_size} tokens, the "
                f"cache has {self.pool.num_blocks}: lower max_tokens or raise --kv-memory"
            )
        return Request(request_id, outputs, priority, cache_salt)

    def submit(self, request: Request) -> None:
        """Queue a request; step() moves it on."""
        self._arrivals += 1
        request.arrival = self._arrivals
        request.id = request.id or f"request-{self._arrivals}"
        insort(self.waiting, Task(request, request.outputs[0]), key=lambda task: task.rank)

    def add_request(
        self, prompt: str | list[int], params: SamplingParams, *args: Any, **options: Any
    ) -> Request:
        """prepare() and submit()."""
        request = self.prepare(prompt, params, *args, **options)
        self.submit(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request where it stands, and free its blocks. Does nothing where it has ended."""
        for task in [t for t in (*self.running, *self.waiting) if t.request is request]:
            self._leave(task)
        for sequence in request.outputs:
            sequence.finish("abort")

    def reset(self) -> None:
        """Drop every request and the prefix cache: after an exception out of step(), such as Ctrl-C
        between two lines, the books need not balance."""
        tasks, self.running, self.waiting = self.running + self.waiting, [], []
        self.pool = BlockPool(self.pool.num_blocks, self.pool.block_size)
        for sequence in [s for task in tasks for s in task.request.outputs]:
            sequence.finish("abort")

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one forward over the tokens that schedule() picks.

        Returns:
            The requests that got a token. A long prompt's chunks give none until the last.

        After an exception, such as running out of memory, only reset() makes it usable again.
        """
        t_start = time.perf_counter()
        # 1) schedule
        batch = self.schedule()
        if not batch:
            return []
        # Rows with equally many tokens side by side, as the cache wants them.
        batch.sort(key=lambda pair: pair[1] - pair[0].table.length)
        tasks = [task for task, _ in batch]
        sequences = [task.sequence for task in tasks]
        # 2) guess, where a sequence has no further token to run
        known_ends = [min(end, len(task.sequence.ids)) for task, end in batch]
        counts = [end - at for (_, end), at in zip(batch, known_ends, strict=True)]
        rows = [Row(t.table.blocks, t.table.length, end) for t, end in zip(tasks, known_ends)]
        t_guess = time.perf_counter()
        guesses = self.proposer.propose(sequences, rows, counts)
        # 3) run
        t_run = time.perf_counter()
        tokens: list[int] = []
        select: list[int] = []
        wanted_counts: list[int] = []
        for i, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            rows[i] = row._replace(end=row.end + len(guess.ids))
            positions = sequences[i].wanted(rows[i].end)
            select += [len(tokens) + p - row.start for p in positions]
            wanted_counts.append(len(positions))
            tokens += row.of(sequences[i].ids) + guess.ids
        logits = self.runner(rows, tokens, select)
        t_sample = time.perf_counter()
        # 4) sample
        draws: list[tuple[Task, Guess]] = []
        logit_rows: list[int] = []
        at = 0
        for i, (task, guess, end) in enumerate(zip(tasks, guesses, known_ends, strict=True)):
            at += wanted_counts[i]
            task.sequence.score_prompt(logits[at - wanted_counts[i] : at], rows[i].end)
            self.pool.commit(task.table, task.sequence.ids, end, task.request.cache_salt)
            if end == len(task.sequence.ids):
                for other in self._fork(task):
                    draws.append((other, guess))
                    logit_rows += range(at - 1 - len(guess.ids), at)
        picked = logits if logit_rows == [*range(len(logits))] else logits[logit_rows]
        drawing = [task.sequence for task, _ in draws]
        sampled = self.proposer.verify(picked, drawing, [guess for _, guess in draws])
        t_append = time.perf_counter()
        # 5) append, and retire what has ended
        stats = self.stats
        for (task, _), new in zip(draws, sampled, strict=True):
            sequence = task.sequence
            for token in new:
                if not sequence.finish_reason:  # EOS or a stop string can come before the last
                    sequence.append(token)
                    stats.output_tokens += 1
            if task.table.blocks:
                # The cache now holds the accepted guesses too; refused ones will be overwritten.
                # commit() comes with the next step: the draft has not run the last of them yet.
                task.table.length = len(sequence.ids) - 1
            if sequence.finish_reason:
                self._leave(task)
        t_end = time.perf_counter()
        self.batch = {task: row.end - row.start for task, row in zip(tasks, rows, strict=True)}
        stats.steps += 1
        stats.computed_tokens += len(tokens)
        stats.guess_s += t_run - t_guess
        stats.model_s += t_sample - t_run
        stats.sample_s += t_append - t_sample
        stats.host_s += t_end - t_append + t_guess - t_start
        return [*dict.fromkeys(task.request for task, _ in draws)]

    def schedule(self) -> list[tuple[Task, int]]:
        """Choose the sequences of this step, and make room for their tokens.

        Returns:
            (task, end): its tokens from table.length up to `end` are to run; those past its last
            are to be guessed.
        """
        budget, batch, copies = self.max_num_batched_tokens, [], []
        # 1) the running, first in line first. Each later one is sure of its share of the budget.
        before, pool = [*self.running], self.pool
        for i, task in enumerate(before):
            left = budget - (len(self.running) - i - 1) * (1 + self.proposer.k)
            end = self._end(task, left)
            while i < len(self.running) and pool.cost(task.table, end) > pool.num_available:
                self._preempt(self.running[-1])
            if i < len(self.running):  # else it has been preempted itself
                copies += pool.grow(task.table, end)
                budget -= end - task.table.length
                batch.append((task, end))
        preempted = len(self.running) < len(before)
        # 2) the waiting, while there is budget and memory; not right after taking memory away
        while self.waiting and budget and len(self.running) < self.max_num_seqs and not preempted:
            task = self.waiting[0]
            sequence, table = task.sequence, task.table
            # A prompt that is being scored needs every logit, so nothing of it is reused.
            if not 0 < len(sequence.prompt_tokens) < sequence.prompt_len:
                pool.reuse(table, sequence.ids, task.request.cache_salt)
            end = self._end(task, budget)
            if end == table.length or pool.cost(table, end) > pool.num_available:
                pool.free(table)
                break
            copies += pool.grow(table, end)
            self.stats.queried_tokens += len(sequence.ids)
            self.stats.cached_tokens += table.length
            budget -= end - table.length
            batch.append((task, end))
            insort(self.running, self.waiting.pop(0), key=lambda task: task.rank)
        self.runner.copy_blocks(copies)
        self.proposer.copy_blocks(copies)
        return batch

    def _end(self, task: Task, budget: int) -> int:
        """Where a sequence's next tokens end: within the budget, and never among its guesses, so
        that how many these are depends on nothing but the sequence. Where the guesses do not fit,
        the last known token waits with them, as they run in one step."""
        known, start = len(task.sequence.ids), task.table.length
        end = known + self.proposer.count(task.sequence)
        if end - start <= budget:
            return end
        return min(known - 1, start + budget)

    def check(self) -> None:
        """Assert that every block is accounted for, and every sequence is in one place."""
        tasks = self.running + self.waiting
        self.pool.check(task.table for task in tasks)
        assert not any(task.table.blocks for task in self.waiting)
        assert len({id(task.sequence) for task in tasks}) == len(tasks)
        assert not any(task.sequence.finish_reason for task in tasks)
        assert len(self.running) <= self.max_num_seqs
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=lambda task: task.rank)

    def _fork(self, task: Task) -> list[Task]:
        """The sequences to sample for: the task's own; and, at the end of a prompt, the n - 1
        others of its request, which go on from the same blocks."""
        request, tasks = task.request, [task]
        if len(task.sequence.ids) > task.sequence.prompt_len:
            return tasks
        for sequence in request.outputs[1:]:
            sequence.prompt_tokens = task.sequence.prompt_tokens
            # One over max_num_seqs still gets this first token; then it waits, without blocks.
            room = len(self.running) < self.max_num_seqs
            other = Task(request, sequence, self.pool.fork(task.table) if room else BlockTable())
            insort(self.running if room else self.waiting, other, key=lambda task: task.rank)
            tasks.append(other)
        return tasks

    def _preempt(self, task: Task) -> None:
        """Take a sequence's blocks; it waits to be computed again, ahead of those after it."""
        self._leave(task)
        insort(self.waiting, task, key=lambda task: task.rank)
        self.stats.preemptions += 1

    def _leave(self, task: Task) -> None:
        (self.running if task in self.running else self.waiting).remove(task)
        self.pool.free(task.table)


class LLM:
    """The engine behind the call that everybody knows.

    Example:
        llm = LLM("checkpoints/shakespeare")
        for request in llm.generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=20)):
            print(request.outputs[0].text)
    """

    def __init__(
        self,
        checkpoint: Path | str,
        device: str = "auto",
        dtype: str = "auto",
        draft_checkpoint: Path | str | None = None,
        **options: Any,
    ) -> None:
        """Load a checkpoint, plain or quantised, and a draft for it.

        Args:
            options: Engine's: compile, kv_memory, max_num_seqs, speculate, ...
        """
        self.checkpoint, place = Path(checkpoint), pick_device(device)
        model, draft = (
            path and load(path, place, DTYPES.get(dtype)) for path in (checkpoint, draft_checkpoint)
        )
        if draft:
            options = {"speculate": 4} | options
        self.engine = Engine(model, Tokenizer(checkpoint), draft=draft, **options)

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Request]:
        """Complete the prompts, all at once, with a progress bar.

        Args:
            prompts: texts, or lists of token ids.
            params: for all, or one for each; None: what the checkpoint suggests.

        Returns:
            One finished request for each prompt, in order.

        Raises:
            ValueError: a prompt that cannot be run; then none is.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        params = sampling_params(self.checkpoint) if params is None else params
        params = params if isinstance(params, list) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(params)} sampling parameters")
        requests: list[Request] = []

        def finished() -> Iterator[Request]:
            while self.engine.has_work:
                yield from (request for request in self.engine.step() if request.finished)

        try:
            for prompt, each in zip(prompts, params, strict=True):
                requests.append(self.engine.add_request(prompt, each))
            for _ in progress(finished(), "generating", len(requests)):
                pass
        except ValueError:  # a prompt that cannot be run
            for request in requests:
                self.engine.abort(request)
            raise
        except BaseException:  # Ctrl-C, at any line
            self.engine.reset()
            raise
        return requests


def memory_size(text: str) -> float:
    """Read a --kv-memory: a share of the free memory, or bytes. "2GiB" -> 2147483648.0

    Raises:
        ValueError: neither.
    """
    match = re.fullmatch(r"([0-9.]+) *([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no memory size: give bytes, 2GiB, or a share such as 0.5")
    return float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")  # what the kernel could free, caches of files included
    if meminfo.is_file():
        line = next(x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
