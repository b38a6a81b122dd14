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
      Job         one output: the ids of prompt and text so far                  [5 9 2 7 4 8]
        table     which blocks hold its keys and values, and of how many ids     [3, 0] 4
        row       its share of a step: the ids that the cache lacks, or some     [4 8]

When blocks run out, the last in line gives its own back and is computed again later, which
costs another prefill, less what the prefix cache still holds. Who guesses tokens, and what a
structure allows, is handed in. Knows nothing of HTTP, and of attention only what it costs.
Papers: Yu et al. 2022 (Orca), Agrawal et al. 2023 (Sarathi, arXiv:2308.16369), Kwon et al. 2023
(arXiv:2309.06180, section 4.5: preemption). Read: Engine.step, Engine.schedule, Job. This is the
last file of the engine; the techniques come next, each for itself: quantize.py, speculative.py, ...
"""

import itertools
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model import Transformer
from paged import BlockPool, BlockTable, Row, Runner
from sampling import Sequence, Token, finite, sample, scored
from settings import CHUNK, Limits, SamplingParams, SettingError, check, free_memory
from tokenizer import Ids, Tokenizer

# --- Who is served --------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """What one user asked for, and what came of it: vLLM's RequestOutput.

    Attributes:
        outputs: n sequences, each with text, output_ids, tokens (log-probabilities), finish_reason,
            and times (queued, first token, ..., last token). The others are forked from the first
            once its prompt has been computed, sharing the prompt's blocks.
        prompt: where prompt_logprobs are asked for, a Token of each prompt id. The first has no
            log-probability, as nothing comes before it.
        priority: the lowest number runs first, as in vLLM.
    """

    id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    outputs: list["Job"] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)
    arrival: int = 0

    @property
    def finished(self) -> bool:
        return all(job.finish_reason for job in self.outputs)


@dataclass
class Guess:
    """Tokens that may follow a sequence, and how they were drawn; see speculative.py."""

    ids: Ids = field(default_factory=list)
    q: list[float] = field(default_factory=list)  # the probability that each was drawn with
    probs: list[Tensor] = field(default_factory=list)  # (V,) each; empty: each was certain


class Job(Sequence):
    """A sequence in the engine: what it generates, and where it stands.

    Attributes:
        table: its blocks; empty while it waits.
        guess: what may come next, in this step.
        end: how far it may run in this step: past its last id by as many as may be guessed.
        cached: how many of the prompt's tokens were found in the prefix cache.
    """

    def __init__(self, request: Request, *args: Any) -> None:
        super().__init__(*args)
        self.request = request
        self.table = BlockTable(chain=[request.cache_salt])
        self.guess = Guess()
        self.end = self.cached = 0

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt is being run, and the log-probabilities of that are wanted."""
        return self.params.prompt_logprobs and self.params.logprobs is not None and not self.tokens

    @property
    def row(self) -> Row:
        """What it runs in this step: known tokens that the cache lacks, and guesses."""
        start = self.table.length
        ids = self.ids[start : self.end] + self.guess.ids
        wanted = len(ids) if self.scores_prompt else 1 + len(self.guess.ids)
        return Row(self.table.blocks, start, ids, wanted)


def place_in_line(job: Job) -> tuple[int, int]:
    return job.request.priority, job.request.arrival


def run_order(job: Job) -> tuple[int, int]:
    """Equally many new tokens side by side, the longest context first; see paged.groups_of."""
    return len(job.row.ids), -job.table.length


class Proposer:
    """Guesses nothing, which is plain decoding: k is 0. Those that guess are in speculative.py.

    Attributes:
        k: guesses for each sequence in a step, at most.
        models: what guesses.
        runners: their Runners, which the engine makes: their pools follow its own block by block.
        offered, accepted: by position, how many guesses were made, and how many came out.
    """

    models: tuple[Transformer, ...] = ()
    runners: tuple[Runner, ...] = ()

    def __init__(self, k: int = 0) -> None:
        """Raises SettingError where k is out of range."""
        self.k = check("speculate", k, int, 0, 64)
        self.offered = [0] * k
        self.accepted = [0] * k

    def count(self, job: Job) -> int:
        """How many tokens to guess. A function of the job alone, so that the random numbers it
        uses, and with them its tokens, do not depend on its neighbours."""
        room = job.max_len - len(job.ids) - 1  # one token comes after the guesses
        return min(self.k, room) if job.tokens else 0

    def propose(self, jobs: list[Job]) -> None:
        """Put into each job's `guess`, which is empty, what may follow, up to its `end`. The next
        forward runs the jobs' rows: the known tokens that the cache lacks, then these guesses."""

    def take_back(self, job: Job, runner: Runner) -> Tensor:
        """Run a job again without its guesses, and empty its `guess`. Returns its logits, (1, V):
        those of its last token."""

    def verify(self, logits: Tensor, jobs: list[Job]) -> list[list[Token]]:
        """Choose the next tokens of each job: guesses that are accepted, and one more.

        Args:
            logits: (R, V), for each job at its last known token and at each guess.
        """
        return [[token] for token in sample(logits, jobs)]


# --- The engine -----------------------------------------------------------------------------------


# Tokens of a prompt that run in a step where its log-probabilities are wanted. These take the
# logits of each: of 256 tokens, and a vocabulary of 150,000, those are 154 MB, and some are made of
# them.
SCORED = 64

# What is counted, under vLLM's names where it has them.
STATS = ("engine_steps", "num_preemptions", "generation_tokens", "computed_tokens",
         "prefix_cache_queries", "prefix_cache_hits")  # fmt: skip


class Engine:
    """Runs many requests at once, a step at a time. To be driven from one thread.

    Attributes:
        max_seq_len: prompt and output together, also by what the pool holds.
        running: the sequences that hold blocks, first in line first. The last is the first to be
            preempted.
        waiting: those without blocks, likewise.
        ran: the sequences of the last step, and how many tokens of each it ran.
        stats: counts since the engine was made, by name. computed_tokens have run through the
            model: of prompts, outputs and guesses. prefix_cache_queries are tokens of sequences
            that began to run and were looked for there, hits those that were found.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None = None,
        proposer: Proposer | None = None, matcher: Callable | None = None,
        runner: type[Runner] = Runner, **limits: Any,
    ) -> None:  # fmt: skip
        """Make the block pool.

        Args:
            model: finished, on its device, compiled or not; see packed.compile_model.
            tokenizer: None: prompts are ids, and there is no text.
            proposer: who guesses tokens; see speculative.py. None: nobody.
            matcher: compiles a SamplingParams.structured_outputs; see structured.matcher. None:
                there are no structures here.
            runner: tp.Leader, where the model is one rank's share; or flex.FlexRunner.
            limits: see settings.Limits. The pool never has more blocks than max_num_seqs sequences
                of max_seq_len can use. Where nothing is said, a step's budget is one token of each
                sequence, and the guesses after it, and CHUNK of prompts (on a GPU 2,048): with a
                larger one prompts are done sooner, with a smaller one tokens come more evenly.

        Raises:
            SettingError: a limit out of range, or a budget too small for one token (and the guesses
                after it) of each sequence.
            ValueError: no room for a block.
        """
        limits = Limits(**limits)
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.proposer = proposer or Proposer()
        self.matcher = matcher
        self.max_seq_len = limits.max_seq_len or self.config.max_position_embeddings
        self.max_num_seqs = limits.max_num_seqs
        needed = self.max_num_seqs * (1 + self.proposer.k)  # or a running sequence would wait
        chunk = CHUNK if model.device.type == "cpu" else 2048  # vLLM's figure; not measured by us
        budget = limits.max_num_batched_tokens or needed + chunk
        self.max_num_batched_tokens = check("max_num_batched_tokens", budget, int, needed)
        shape = (limits.num_blocks or self._affordable(limits), limits.block_size, limits.kv_dtype)
        self.pool = BlockPool(*shape[:2])
        # A sequence's last token is sampled and never run, so it needs no slot in the pool.
        self.max_seq_len = min(self.max_seq_len, self.pool.num_blocks * self.pool.block_size + 1)
        self.runner = runner(model, *shape)
        self.proposer.runners = tuple(Runner(each, *shape) for each in self.proposer.models)
        self.running, self.waiting = [], []
        self.ran = {}
        self.stats = dict.fromkeys(STATS, 0)
        self._arrivals = itertools.count(1)

    def _affordable(self, limits: Limits) -> int:
        """How many blocks to make: what kv_memory holds, but no more than can be used."""
        size, config, model = limits.block_size, self.config, self.model
        # What attention copies, of one layer at a time: keys and values. Of int8 ones first the
        # bytes, then both in float32; and the scales, little: (1 + 4 + 1) * 2 where H is 8.
        copied = 2 * model.dtype.itemsize + (12 if limits.kv_dtype == "int8" else 0)
        block = size * config.num_key_value_heads * config.head_dim * copied
        for each in (model, *self.proposer.models):
            pools = Runner(each, 0, size, limits.kv_dtype).pools  # of one block, never written
            block += sum(pool.nbytes for pool in pools)
        free = free_memory(model.device) - self._activations() if limits.kv_memory < 1 else 1
        most = max(0, int(limits.kv_memory * free // block) - 1)
        return min(most, self.max_num_seqs * -(-self.max_seq_len // size))

    def _activations(self) -> int:
        """Bytes of the largest step's tensors: of its tokens within a layer; of its logits, of
        which the sampler has some in float32; and of the masks of attention."""
        c, itemsize = self.config, self.model.dtype.itemsize
        # hidden_size twice: for x, and for attention's tensors; the factor 4 covers wider heads.
        widths = 2 * c.hidden_size + c.intermediate_size * c.num_experts_per_tok
        tokens = self.max_num_batched_tokens * 4 * widths * itemsize
        logits = (self.max_num_seqs * (1 + self.proposer.k) + SCORED) * 6 * 4 * c.vocab_size
        # A piece's mask as wide as the queries, and some of one byte.
        pair = c.num_attention_heads // c.num_key_value_heads * (itemsize + 4)
        return tokens + logits + Runner.pairs * pair

    @property
    def queue(self) -> list[Job]:
        """The sequences that have not ended."""
        return self.running + self.waiting

    # --- Requests come and go ---------------------------------------------------------------------

    def prepare(self, prompt: str | Ids, params: SamplingParams, **options: Any) -> Request:
        """Make a request, which submit() queues. Changes nothing, so any thread may call it.

        Args:
            options: Request's id, priority and cache_salt.

        Raises:
            SettingError: see Sequence and structured.matcher.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = Request(**options)
        check("priority", request.priority, int, -(2**31))
        check("cache_salt", request.cache_salt, str | None)
        wish = params.structured_outputs
        if wish is not None and not self.matcher:
            raise SettingError("structured_outputs", "needs an engine that was given a matcher")
        matcher = None if wish is None else self.matcher(wish)
        for i in range(params.n):
            job = Job(request, ids, params, self.config, self.tokenizer, self.max_seq_len)
            job.seed += i
            job.matcher = matcher and matcher.deep_copy()
            request.outputs.append(job)
            job.ends = request.outputs[0].ends  # shared, as there may be many
        return request

    def submit(self, request: Request) -> Request:
        """Queue a request, and return it; step() moves it on."""
        request.arrival = next(self._arrivals)
        request.id = request.id or f"request-{request.arrival}"
        insort(self.waiting, request.outputs[0], key=place_in_line)
        return request

    def add_request(self, *args: Any, **options: Any) -> Request:
        """prepare() and submit()."""
        return self.submit(self.prepare(*args, **options))

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request where it stands, and free its blocks. Does nothing where it has ended."""
        for job in request.outputs:
            self._leave(job)
            job.finish(reason)

    def reset(self) -> None:
        """Drop every request and the prefix cache: after an exception out of step(), such as Ctrl-C
        between two lines, the books need not balance."""
        dropped = self.queue
        self.running, self.waiting = [], []
        self.pool = BlockPool(self.pool.num_blocks, self.pool.block_size)
        for job in dropped:
            self.abort(job.request)

    # --- A step -----------------------------------------------------------------------------------

    def run(self) -> Iterator[Request]:
        """Step until no request is left, yielding those that got a token."""
        while self.queue:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one forward over the tokens that schedule() picks.

        Returns:
            The requests that got a token, or had logits that no token can be drawn from: these end,
            with "error". A long prompt's chunks give none until the last.

        After an exception, such as running out of memory, only reset() makes it usable again.

        Example: a budget of 4 tokens. A has ids [5 9 2], of which the cache holds 5 9; B has the
            new prompt [5 9 2 7 4 8], and nothing is guessed:
                1) A may run up to its end, 3; B takes the three tokens that are left, up to 3
                2) nobody guesses
                3) rows [2] at 2, [5 9 2] at 0: their last tokens' logits, one (V,) each
                4) A is at its end, so its logits give a token, 6; those of B are not used
                5) A: ids [5 9 2 6], 3 of them in the cache. B: 3 of 6
        """
        # 1) schedule: each job's `end` says how far it is to run
        batch = self.schedule()
        if not batch:
            return []
        # 2) guess, where that is past its last token (n-grams may find fewer than they may)
        self.proposer.propose(batch)
        # 3) run. In order again, as guesses have made rows longer
        batch = sorted(batch, key=run_order)
        rows = [job.row for job in batch]
        logits = self.runner.forward(rows)
        # 4) sample, for those whose known tokens have all run
        sound = finite(logits).all().item()  # once: the host reads little, as a GPU waits for it
        drawing, parts, failed = [], [], []
        for job, row, part in zip(batch, rows, logits.split([row.wanted for row in rows])):
            broken = not sound and not finite(part).all()
            if broken and job.guess.ids:  # of which one may be at fault
                part = self.proposer.take_back(job, self.runner)
                row = job.row
                broken = not finite(part).all()
            if broken:
                failed.append(job.request)
                continue
            if job.scores_prompt:
                part = self._score(job, row, part)
            ready = self._computed(job, row)
            drawing += ready
            parts += [part] * len(ready)
        sampled = self.proposer.verify(torch.cat(parts), drawing) if parts else []
        # 5) append, and retire what has ended
        for job, tokens in zip(drawing, sampled, strict=True):
            self._append(job, tokens)
        for request in failed:
            self.abort(request, "error")
        self.ran = {job: len(row.ids) for job, row in zip(batch, rows)}
        self.stats["engine_steps"] += 1
        self.stats["computed_tokens"] += sum(self.ran.values())
        return list(dict.fromkeys([job.request for job in drawing] + failed))

    def schedule(self) -> list[Job]:
        """Choose the sequences of this step, set their `end`, and make room for their tokens."""
        budget, pool = self.max_num_batched_tokens, self.pool
        batch, copies, preempted = [], [], False
        # 1) the running, first in line first. Each later one is sure of its share of the budget.
        # Where memory is short, `running` shrinks from its end while `batch` grows.
        while len(batch) < len(self.running):
            job = self.running[len(batch)]
            reserved = (len(self.running) - len(batch) - 1) * (1 + self.proposer.k)
            end = self._reach(job, budget - reserved, batch)
            if pool.cost(job.table, end) > len(pool.available):
                # The last in line gives its blocks back, and waits to be computed again.
                last = self.running.pop()
                pool.free(last.table)
                insort(self.waiting, last, key=place_in_line)
                self.stats["num_preemptions"] += 1
                preempted = True
                continue
            budget -= end - job.table.length
            job.end = end
            copies += pool.grow(job.table, end)
            batch.append(job)
        # 2) the waiting, while there is budget and memory; not right after taking memory away
        while self.waiting and len(self.running) < self.max_num_seqs and not preempted:
            job = self.waiting[0]
            if not job.scores_prompt:  # of what is found there are no logits
                pool.reuse(job.table, job.ids)
            found = job.table.length
            end = self._reach(job, budget, batch)
            if end == found or pool.cost(job.table, end) > len(pool.available):
                pool.free(job.table)
                break
            if not job.scores_prompt:
                self.stats["prefix_cache_queries"] += len(job.ids)
                self.stats["prefix_cache_hits"] += found
            if not job.end:  # it has never run before
                job.cached = found
            budget -= end - found
            job.end = end
            copies += pool.grow(job.table, end)
            insort(self.running, self.waiting.pop(0), key=place_in_line)
            batch.append(job)
        if copies:
            for each in (self.runner, *self.proposer.runners):
                each.copy_blocks(copies)
        return sorted(batch, key=run_order)

    def _reach(self, job: Job, budget: int, batch: list[Job]) -> int:
        """Where a job's next tokens end: within the budget, and with all of its guesses or none, so
        that their number depends on the job alone. Where they do not fit, the last known token
        waits with them: guesses run in one forward with the token before them. Of a prompt that
        is scored, SCORED tokens run in a step, and of each further one a single token."""
        known, start = len(job.ids), job.table.length
        if job.scores_prompt:
            is_second = any(each.scores_prompt for each in batch)
            budget = min(budget, 1 if is_second else SCORED)
        end = known + self.proposer.count(job)
        return end if end - start <= budget else min(known - 1, start + budget)

    def _score(self, job: Job, row: Row, logits: Tensor) -> Tensor:
        """Note the log-probabilities of the prompt's tokens that follow each of a row's, from the
        row's logits, (len(row.ids), V). Returns the last of these, to draw the next token from."""
        prompt = job.request.prompt
        start = row.start + 1
        ids = job.ids[start : start + len(row.ids)]
        prompt[:1] = [Token(job.ids[0])]  # nothing comes before it
        prompt[start:] = scored(logits[: len(ids)], ids, [job] * len(ids))
        return logits[-1:]

    def _computed(self, job: Job, row: Row) -> list[Job]:
        """Note that a row has run. Returns who draws from its logits: nobody while known tokens are
        left; then the job, and at the end of its prompt also the n - 1 other outputs of its
        request, which go on from the same blocks."""
        end = row.positions.stop - len(job.guess.ids)
        self.pool.commit(job.table, job.ids, end)
        if end < len(job.ids):
            return []
        if job.tokens:
            return [job]
        for other in job.request.outputs[1:]:
            # One over max_num_seqs still gets this first token; then it waits, without blocks.
            has_room = len(self.running) < self.max_num_seqs
            if has_room:
                other.table = self.pool.fork(job.table)
            insort(self.running if has_room else self.waiting, other, key=place_in_line)
        return job.request.outputs

    def _append(self, job: Job, tokens: list[Token]) -> None:
        for token in tokens:
            if not job.finish_reason:  # EOS or a stop string can come before the last
                job.append(token)
                self.stats["generation_tokens"] += 1
        job.guess = Guess()
        # The cache now holds the accepted guesses too; refused ones will be overwritten. commit()
        # comes with the next step: the draft has not run the last of them yet.
        job.table.advance(len(tokens) - 1)
        if job.finish_reason:
            self._leave(job)

    def _leave(self, job: Job) -> None:
        line = self.running if job.table.blocks else self.waiting  # not both: it may be long
        if job in line:
            line.remove(job)
            self.pool.free(job.table)
