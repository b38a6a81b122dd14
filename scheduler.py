"""Continuous batching: which tokens of which sequences run in the next step.

Decoding one sequence reads every weight to make one token; decoding 32 together reads them once to
make 32. The batch is formed anew at each step (Orca): a sequence that ends leaves at once, and a
waiting one takes its place. Prompts enter in chunks beside the running sequences' single tokens
(Sarathi), so that a long prompt does not hold up the others. Prefill and decode are not two phases:
every sequence has tokens whose keys and values are not in the cache yet, and a step runs some of
them.

    step        1         2         3         4             budget: 8 tokens a step
    A  running  a         a         a         a             a running sequence has one token
    B  prompt   bbbbbbb   bbbbbbb   bb        b             prompts share what is left, in the
    C  prompt                       ccccc     cccccc        order in which they arrived

    Request           what a user asked for: n outputs for one prompt, and their priority
      EngineSequence  one output: the ids of the prompt and of the text so far       [5 9 2 7 4 8]
        table         the blocks of its keys and values, and how many ids they hold  [3, 0] 4
        row           its share of a step: ids that are not in the cache yet         [4 8]

When blocks run out, the last sequence in line gives its blocks back and is computed again later.
That costs another prefill, less what the prefix cache still holds. The proposer that guesses tokens
and the matchers that restrict them are handed in. This file knows nothing about HTTP or attention.
Papers: Yu et al. 2022 (Orca), Agrawal et al. 2023 (Sarathi, arXiv:2308.16369), Kwon et al. 2023
(arXiv:2309.06180, section 4.5: preemption). Read: Engine.step, Engine.schedule, EngineSequence.
This is the engine's last file. The techniques come next, each on its own: quantize.py,
speculative.py, ...
"""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from around.folder import Ids, Tokenizer
from around.settings import CHUNK, Limits, SamplingParams, SettingError, check
from model import Transformer
from paged import BlockPool, BlockTable, Row, Runner
from sampling import Sequence, Token, finite, sample, scored

# --- What is served -------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """What one user asked for, and the result, like vLLM's RequestOutput.

    Attributes:
        prompt: its text; None: it was given as ids.
        outputs: n sequences, each with text, token_ids, logprobs, finish_reason, and times
            (created, first token, ..., last token). When the prompt of the first one has been
            computed, the others are forked from it and share its blocks.
        prompt_tokens: a Token for each prompt id, if prompt_logprobs are asked for. The first has
            no log-probability, as nothing comes before it.
        priority: the lowest number runs first, as in vLLM.
        cache_salt: only requests with the same salt share prefixes.
    """

    request_id: str | None = None
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    outputs: list["EngineSequence"] = field(default_factory=list)
    prompt_tokens: list[Token] = field(default_factory=list, repr=False)
    arrival: int = 0

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason for seq in self.outputs)

    @property
    def prompt_token_ids(self) -> Ids:
        first = self.outputs[0]
        return first.ids[: first.prompt_len]

    @property
    def prompt_logprobs(self) -> list[dict[int, Token] | None] | None:
        """Each prompt token's log-probabilities, if they are asked for; see Token.logprobs."""
        return [token.logprobs for token in self.prompt_tokens] or None


@dataclass
class Guess:
    """Draft tokens, which may follow a sequence, and how they were drawn; see speculative.py.

    Attributes:
        q: the probability with which each was drawn.
        probs: the distribution from which each was drawn, (V,); []: each was the only choice.
    """

    ids: Ids = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class EngineSequence(Sequence):
    """A sequence in the engine, and its state there.

    Attributes:
        table: its blocks; empty while it waits.
        num_scheduled: how many tokens schedule() last gave it: known ones that are not in the cache
            yet, then guesses.
        guess: the tokens that are guessed to follow, in this step.
        cached: how many tokens were found in the prefix cache when it began to run; -1: it has not.
    """

    def __init__(self, request: Request, *args: Any) -> None:
        super().__init__(*args)
        self.request = request
        self.table = BlockTable(chain=[request.cache_salt])
        self.num_scheduled = 0
        self.guess = Guess()
        self.cached = -1

    @property
    def num_guesses(self) -> int:
        """How many tokens may be guessed in this step: those that are scheduled after the last
        known one."""
        return max(0, self.table.length + self.num_scheduled - len(self.ids))

    @property
    def row(self) -> Row:
        """What it runs in this step: known tokens that are not in the cache, then guesses."""
        start = self.table.length
        ids = self.ids[start : start + self.num_scheduled] + self.guess.ids  # the slice: known ids
        num_logits = len(ids) if self.scores_prompt else 1 + len(self.guess.ids)
        return Row(self.table.blocks, start, ids, num_logits)

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt needs log-probabilities and has not run to its end. Then its row has
        the logits of all its tokens, schedule() looks for no prefix, _num_to_run() limits the
        tokens, and _commit() has the logits scored."""
        return self.params.prompt_logprobs is not None and not self.tokens


def place_in_line(seq: EngineSequence) -> tuple[int, int]:
    """Sort key of waiting and running sequences: by priority, then by arrival."""
    return seq.request.priority, seq.request.arrival


def run_order(seq: EngineSequence) -> tuple[int, int]:
    """Sort key that puts rows with equally many new tokens side by side, the longest context first;
    see attending.groups_of."""
    return len(seq.row.ids), -seq.table.length


class Proposer:
    """Guesses nothing: plain decoding. speculative.py has proposers that guess.

    Attributes:
        k: the most guesses for a sequence in a step.
        models: the models that guess.
        runners: their Runners. The engine creates them with as many blocks as its own Runner has,
            and all of them use the same block tables.
        offered, accepted: how many guesses were made, and how many were accepted, by their place:
            0 is that after the last known token.
    """

    k: int = 0
    models: tuple[Transformer, ...] = ()
    runners: tuple[Runner, ...] = ()

    def __init__(self) -> None:
        self.offered: Counter = Counter()
        self.accepted: Counter = Counter()

    def count(self, seq: EngineSequence) -> int:
        """How many tokens to guess for a sequence. It must be 0 before the sequence's first token,
        because all outputs of a request draw their first tokens from one row of logits. It must
        depend on the sequence alone. Then the random numbers that the sequence uses, and with them
        its tokens, do not depend on its neighbours."""
        return 0

    def propose(self, seqs: list[EngineSequence]) -> None:
        """Fill each sequence's `guess`, which is empty, with up to `num_guesses` tokens that may
        follow. The next forward runs the sequences' rows: known tokens, then these guesses."""

    def verify(self, logits: Tensor, seqs: list[EngineSequence]) -> list[list[Token]]:
        """Choose the next tokens of each sequence: the guesses that are accepted, and one more.

        Args:
            logits: (R, V), for each sequence those after its last known token and after each guess.
        """
        return [[token] for token in sample(logits, seqs)]


# --- The engine -----------------------------------------------------------------------------------


# A prompt that needs log-probabilities needs the logits of all its tokens. So a step runs at most
# this many tokens of such prompts, but at least one of each. For 64 tokens and a vocabulary of
# 150,000 the logits take 38 MB, and a copy as much again.
MAX_SCORED = 64

# What the engine counts, under vLLM's names where vLLM counts the same.
STATS = (
    "engine_steps",
    "num_preemptions",
    "generation_tokens",
    "computed_tokens",  # run through the model: tokens of prompts and outputs, and guesses
    "prefix_cache_queries",  # tokens of sequences that left `waiting`, but for scored prompts
    "prefix_cache_hits",  # how many of these the cache had
)


def step_budget(limits: Limits, model: Transformer, proposer: Proposer) -> tuple[int, int]:
    """The most tokens in a step, and in a step in which a sequence decodes.

    By default there is room for a token and the guesses of each of max_num_seqs sequences, and for
    CHUNK prompt tokens (2,048 on a GPU), or small_chunk ones while a sequence decodes. A larger
    budget finishes prompts sooner; with a smaller one, tokens come more evenly.

    Raises:
        SettingError: the budget is too small for one token (and its guesses) of each sequence: a
            running sequence would have to wait.
    """
    needed = limits.max_num_seqs * (1 + proposer.k)
    if limits.max_num_batched_tokens:
        budget = check("max_num_batched_tokens", limits.max_num_batched_tokens, int, needed)
        return budget, budget
    chunk = CHUNK if model.device.type == "cpu" else 2048  # vLLM's figure; not measured by us
    return needed + chunk, needed + (limits.small_chunk or chunk)


class Engine:
    """Runs many requests at once, step by step. One thread must make all calls that change it.

    Attributes:
        max_seq_len: the longest prompt and output together. The pool has blocks enough for all of
            it but the last token, which never runs.
        running: the sequences that hold blocks, in the order of place_in_line. The last one is
            preempted first.
        waiting: the sequences without blocks, in the same order.
        last_step: the sequences of the last step, and how many tokens of each it ran.
        stats: counts since the engine was made, by the names of STATS.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        proposer: Proposer | None = None,
        make_matcher: Callable | None = None,
        runner: type[Runner] = Runner,
        **options: Any,
    ) -> None:
        """Make the blocks.

        Args:
            model: on its device.
            tokenizer: None: prompts are ids, and there is no text.
            proposer: guesses tokens; see speculative.py. None: no guesses.
            make_matcher: SamplingParams.structured_outputs -> a matcher, as in start.make_engine.
                None: structured outputs are refused.
            runner: tp.Leader, if the model is one rank's share.
            options: see settings.Limits. Unless num_blocks is set, there are as many blocks as
                max_num_seqs sequences of max_seq_len can use; start.make_engine sets it by what
                fits into the memory. For the budget see step_budget.

        Raises:
            SettingError: a limit is out of range; see also step_budget.
            ValueError: there is not enough memory.
        """
        limits = Limits(**options)
        self.model = model
        self.config = model.config
        self.tokenizer: Any = tokenizer
        self.proposer = proposer or Proposer()
        self.make_matcher = make_matcher
        self.max_num_seqs = limits.max_num_seqs
        self.max_num_batched_tokens, self.small_budget = step_budget(limits, model, self.proposer)
        size = limits.block_size
        longest = limits.max_seq_len or self.config.max_position_embeddings
        num_blocks = limits.num_blocks or self.max_num_seqs * -(-longest // size)
        # A sequence's last token is sampled and never run, so it needs no slot.
        self.max_seq_len = min(longest, num_blocks * size + 1)
        shape = (num_blocks, size, limits.kv_dtype)
        self.runner = runner(model, *shape)  # raises an error if there is no memory
        self.pool = BlockPool(num_blocks, size)
        self.proposer.runners = tuple(Runner(each, *shape) for each in self.proposer.models)
        self.running: list[EngineSequence] = []
        self.waiting: list[EngineSequence] = []
        self.last_step: dict[EngineSequence, int] = {}
        self.stats = dict.fromkeys(STATS, 0)
        self._arrivals = itertools.count(1)

    @property
    def queue(self) -> list[EngineSequence]:
        """The sequences that run or wait. The other outputs of a request join them once its prompt
        has been computed."""
        return self.running + self.waiting

    # --- Requests come and go ---------------------------------------------------------------------

    def prepare(self, prompt: str | Ids, params: SamplingParams, **options: Any) -> Request:
        """Make a request for submit(). The engine does not change, so any thread may call this.

        Args:
            options: Request's request_id, priority and cache_salt.

        Raises:
            SettingError: see Sequence and structured.make_matcher.
        """
        request = Request(**options)
        if isinstance(prompt, str):
            assert self.tokenizer, "this engine has no tokenizer: give token ids"
            request.prompt = prompt
            prompt = self.tokenizer.encode(prompt)
        check("priority", request.priority, int, -(2**31))
        check("cache_salt", request.cache_salt, str | None)
        matcher = None
        if params.structured_outputs is not None:
            if not self.make_matcher:
                raise SettingError("structured_outputs", "needs an engine that can make matchers")
            matcher = self.make_matcher(params.structured_outputs)
        for i in range(params.n):
            seq = EngineSequence(
                request, prompt, params, self.config, self.tokenizer, self.max_seq_len
            )
            seq.seed += i
            seq.matcher = matcher and matcher.deep_copy()
            request.outputs.append(seq)
            seq.end_ids = request.outputs[0].end_ids  # one set for all, as it may be large
        return request

    def submit(self, request: Request) -> Request:
        """Queue a request and return it. step() advances it."""
        request.arrival = next(self._arrivals)
        request.request_id = request.request_id or f"request-{request.arrival}"
        if not request.finished:  # it may have been aborted before
            insort(self.waiting, request.outputs[0], key=place_in_line)
        return request

    def add_request(self, *args: Any, **options: Any) -> Request:
        """prepare() and submit()."""
        return self.submit(self.prepare(*args, **options))

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request early and free its blocks. Does nothing if it has ended."""
        for seq in request.outputs:
            self._leave(seq)
            seq.finish(reason)

    def reset(self) -> None:
        """Drop every request and the prefix cache. After an exception in the middle of step(),
        such as Ctrl-C, the blocks may be in any state."""
        dropped = self.queue
        self.running = []
        self.waiting = []
        self.pool = BlockPool(self.pool.num_blocks, self.pool.block_size)
        for seq in dropped:  # abort() frees no blocks, as the sequence is in no line now
            self.abort(seq.request)

    # --- A step -----------------------------------------------------------------------------------

    def run(self) -> Iterator[Request]:
        """Step until no request is left, and yield what each step returns: the requests that got a
        token or failed."""
        while self.queue:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one forward over the tokens that schedule() picks.

        Returns:
            The requests that got a token, and those that end with "error" because no token can be
            drawn from their logits. A long prompt gets its first token after its last chunk.

        After an exception, such as running out of memory, call reset() before the next step.

        Example: a budget of 4 tokens. A has ids [5 9 2], and the cache holds 5 9. B has the new
            prompt [7 4 8 1 3 6]. There are no guesses.
                1) A runs its last token, and B the first three of its six
                2) no guesses are made
                3) rows [2] at 2 and [7 4 8] at 0 give the logits after their last tokens, (V,) each
                4) both have finite logits
                5) the cache holds all 3 ids of A, which draws a token now, and 3 of B's 6
                6) A draws 6
                7) A has ids [5 9 2 6], and the cache holds 3 of them
        """
        # 1) schedule: set each sequence's num_scheduled
        batch = self.schedule()
        if not batch:
            return []
        # 2) guess
        self.proposer.propose(batch)
        # 3) run, with equally long rows side by side; see run_order
        batch.sort(key=run_order)
        rows = [seq.row for seq in batch]
        logits = self.runner.forward(rows)  # (R, V)
        sizes = [row.num_logits for row in rows]
        # 4) end the requests whose logits are NaN or infinite
        rows_are_finite = finite(logits).cpu().split(sizes)
        failed = [seq.request for seq, each in zip(batch, rows_are_finite) if not each.all()]
        for request in failed:
            self.abort(request, "error")
        # 5) record what has run, and find the sequences that draw a token now
        seqs, logits = self._commit(batch, logits, sizes)
        # 6) draw the next tokens of each sequence: the guesses that are accepted, and one more
        drawn = self.proposer.verify(logits, seqs)
        # 7) append, and retire the sequences that have ended
        for seq, tokens in zip(seqs, drawn, strict=True):
            self._append(seq, tokens)
        self.last_step = {seq: len(row.ids) for seq, row in zip(batch, rows)}
        self.stats["engine_steps"] += 1
        self.stats["computed_tokens"] += sum(self.last_step.values())
        return list(dict.fromkeys([seq.request for seq in seqs] + failed))  # each once

    def schedule(self) -> list[EngineSequence]:
        """Choose the sequences of this step, set their `num_scheduled`, and find room for them."""
        # While a sequence decodes, prompts may get a smaller budget (Limits.small_chunk), so that
        # its next token is not late.
        is_decoding = any(seq.table.length >= seq.prompt_len for seq in self.running)
        budget = self.small_budget if is_decoding else self.max_num_batched_tokens
        batch: list[EngineSequence] = []
        # 1) the running sequences, in line. Each leaves a share of the budget for each after it. If
        # blocks are short, the last in line gives its own back. So `running` shrinks at its end
        # while `batch` grows, and a sequence in the batch is never preempted.
        share = 1 + self.proposer.k  # a token and its guesses
        preempted = False
        while len(batch) < len(self.running):
            seq = self.running[len(batch)]
            later = self.running[len(batch) + 1 :]
            num_tokens = self._num_to_run(seq, budget - share * len(later), batch)
            if self._allocate(seq, num_tokens):
                budget -= num_tokens
                batch.append(seq)
            else:
                self._preempt_last()  # perhaps this sequence itself, which is then the last
                preempted = True
        # 2) the waiting sequences, while there are budget and blocks, but not after a preemption
        while self.waiting and len(self.running) < self.max_num_seqs and not preempted:
            seq = self.waiting[0]
            # A prompt that is scored needs the logits of all its tokens, and a token found in the
            # prefix cache does not run and has none. So no prefix is looked up.
            sought = [] if seq.scores_prompt else seq.ids
            self.pool.reuse(seq.table, sought)
            num_tokens = self._num_to_run(seq, budget, batch)
            if not num_tokens or not self._allocate(seq, num_tokens):
                self.pool.free(seq.table)  # gives back what reuse() took
                break
            if seq.cached < 0:
                seq.cached = seq.table.length
            budget -= num_tokens
            insort(self.running, self.waiting.pop(0), key=place_in_line)
            batch.append(seq)
            self.stats["prefix_cache_queries"] += len(sought)
            self.stats["prefix_cache_hits"] += seq.table.length
        return batch

    def _num_to_run(self, seq: EngineSequence, budget: int, batch: list[EngineSequence]) -> int:
        """How many tokens a sequence runs in this step, within the budget.

        The last known token and the guesses after it run together or wait together. So when a
        sequence draws a token, it has had room for as many guesses as count() says, whatever the
        budget is. If they do not fit, only the tokens before the last known one run.
        """
        if seq.scores_prompt:
            taken = sum(each.num_scheduled for each in batch if each.scores_prompt)
            budget = min(budget, max(1, MAX_SCORED - taken))
        known = len(seq.ids) - seq.table.length
        guesses = self.proposer.count(seq)
        if known + guesses <= budget:
            return known + guesses
        # The last known token waits with its guesses; if there are none, the budget is the smaller
        # one. For a running sequence the result is not 0: its budget has room for one known token
        # and all its guesses, so here it had two known tokens or more.
        return min(known - 1, budget)

    def _allocate(self, seq: EngineSequence, num_tokens: int) -> bool:
        """Let a sequence run this many tokens in this step, and give it blocks for them. Returns
        False if there are too few blocks."""
        end = seq.table.length + num_tokens
        if self.pool.cost(seq.table, end) > len(self.pool.available):
            return False
        seq.num_scheduled = num_tokens
        copies = self.pool.grow(seq.table, end)
        if copies:
            for runner in (self.runner, *self.proposer.runners):
                runner.copy_blocks(copies)
        return True

    def _preempt_last(self) -> None:
        """Take back the blocks of the last in line, which waits to be computed again."""
        last = self.running.pop()
        self.pool.free(last.table)
        insort(self.waiting, last, key=place_in_line)
        self.stats["num_preemptions"] += 1

    def _commit(
        self, batch: list[EngineSequence], logits: Tensor, sizes: list[int]
    ) -> tuple[list[EngineSequence], Tensor]:
        """Record that the sequences' rows have run, and find those whose next token can be drawn.

        Args:
            logits: (R, V), those of all rows.
            sizes: how many of them each row has.

        Returns:
            The sequences whose known tokens have all run, and their logits: for each sequence those
            after its last known token and after each guess, (R, V).
        """
        ready: list[EngineSequence] = []
        wanted: list[int] = []  # which of the R
        for seq, size, end_of_row in zip(batch, sizes, itertools.accumulate(sizes)):
            if seq.finish_reason:  # its logits, or those of another output, were NaN or infinite
                continue
            if seq.scores_prompt:
                self._score_prompt(seq, logits[end_of_row - size : end_of_row])
            # The guesses are not committed.
            end = min(seq.table.length + seq.num_scheduled, len(seq.ids))
            self.pool.commit(seq.table, seq.ids, end)
            if end == len(seq.ids):  # else known tokens are left for a later step
                # When a prompt has been computed, all outputs of its request begin, each from the
                # same logits. A sequence has no guesses before its first token, so that is one row.
                outputs = [seq] if seq.tokens else self._fork(seq)
                ready += outputs
                # The row's last logits: those after the last known token and after each guess. A
                # scored prompt's row has others before them, which are left out.
                wanted += [*range(end_of_row - 1 - len(seq.guess.ids), end_of_row)] * len(outputs)
        # Mostly all are wanted, in this order. A copy would take as long as the sampler.
        return ready, logits if wanted == [*range(len(logits))] else logits[wanted]

    def _fork(self, seq: EngineSequence) -> list[EngineSequence]:
        """Let a request's other outputs begin after its prompt. They share the first one's blocks,
        as far as max_num_seqs allows. Returns all outputs."""
        for other in seq.request.outputs[1:]:
            if len(self.running) < self.max_num_seqs:
                other.table = self.pool.fork(seq.table)
                insort(self.running, other, key=place_in_line)
            else:  # it gets its first token in this step too, then waits without blocks
                insort(self.waiting, other, key=place_in_line)
        return seq.request.outputs

    def _append(self, seq: EngineSequence, tokens: list[Token]) -> None:
        """Append the tokens of a step to a sequence, and let it leave if it has ended."""
        for token in tokens:
            if not seq.finish_reason:  # EOS or a stop string can come before the last token
                seq.append(token)
                self.stats["generation_tokens"] += 1
        seq.guess = Guess()
        # All tokens but the last are accepted guesses. The model's cache holds their keys and
        # values, so `length` counts them. Others can find them only a step later: until then a
        # draft's cache may lack the last of them.
        seq.table.length += len(tokens) - 1
        if seq.finish_reason:
            self._leave(seq)

    def _leave(self, seq: EngineSequence) -> None:
        """Take a sequence out of its line, if it stands in one, and free its blocks."""
        line = self.running if seq.table.blocks else self.waiting  # search one only: it may be long
        if seq in line:
            line.remove(seq)
            self.pool.free(seq.table)

    # --- The log-probabilities of a prompt --------------------------------------------------------

    def _score_prompt(self, seq: EngineSequence, logits: Tensor) -> None:
        """Record the log-probability of the prompt token after each token of a sequence's row.

        Args:
            logits: (T, V), after each token of the row.
        """
        prompt = seq.request.prompt_tokens
        # The row begins at table.length, as it is not committed yet. Its first logits score the
        # token after that.
        start = seq.table.length + 1
        if start == 1:  # the prompt begins, perhaps once more after a preemption
            prompt[:] = [Token(seq.ids[0])]  # nothing comes before it
        ids = seq.ids[start : start + len(logits)]  # one fewer at the end of the prompt
        prompt += scored(logits[: len(ids)], ids, [seq.params.prompt_logprobs] * len(ids))
