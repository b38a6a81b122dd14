"""The sampler, which picks the next token from the logits, and the sequence that grows.

`sample` is the engine's only sampler: the plain loop and the scheduler call it, and speculation
draws from the same `distribution`. settings.SamplingParams lists what a request may ask for. This
file knows nothing of the model but its config. Papers: Holtzman et al. 2019 (top-p,
arXiv:1904.09751), Nguyen et al. 2024 (min-p, arXiv:2407.01082), Keskar et al. 2019 (repetition
penalty, arXiv:1909.05858). Read: sample, choose_ids, distribution, keep_likeliest, draw, uniform;
then Sequence (settings.SamplingParams and text.TextStream first). Next: generate.py.
"""

import copy
import secrets
import time
from array import array
from collections import abc
from typing import NamedTuple

import torch
from torch import Tensor

from around.folder import Ids, TextStream, Tokenizer
from around.settings import SamplingParams, SettingError, check_ids
from model import Config


class Token(NamedTuple):
    """A token of the output, or of a prompt that is scored. The log-probabilities are the model's,
    before any setting changes them."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the likeliest, likeliest first
    text: str = ""  # what it adds; of several tokens that make one character, the last adds it

    @property
    def logprobs(self) -> "dict[int, Token] | None":
        """As in vLLM: id -> Token, of this token and the likeliest ones; None if there are none."""
        if self.logprob is None:
            return None
        return {i: Token(i, logprob) for i, logprob in ((self.id, self.logprob), *self.top)}


# --- The sampler ----------------------------------------------------------------------------------

Batch = abc.Collection["Sequence"]  # B objects of class Sequence, below, or of a subclass


def sample(logits: Tensor, batch: Batch) -> list[Token]:
    """Choose the next token of each sequence by its own parameters and seed.

    Args:
        logits: (B, V), any float dtype; finite() holds for each row.
        batch: B sequences.

    Returns:
        B tokens, with log-probabilities for the sequences that ask for them.
    """
    if all(sequence.takes_argmax for sequence in batch):  # as choose_ids, but faster
        ids = logits.max(-1).indices.tolist()  # argmax takes two to four times as long
    else:
        ids = choose_ids(logits, batch)
    return scored(logits, ids, [sequence.params.logprobs for sequence in batch])


def choose_ids(logits: Tensor, batch: Batch) -> Ids:
    """Draw the next id of each sequence: (B, V) -> B ids."""
    probs = distribution(logits, batch)  # (B, V)
    u = torch.tensor([sequence.uniform() for sequence in batch])
    return draw(probs, u).tolist()


def distribution(logits: Tensor, batch: Batch) -> Tensor:
    """The probabilities that each sequence draws from, after every setting of its SamplingParams.

    Order: structure (of structured outputs) or min_tokens, bias, penalties; then temperature,
    top-k, top-p and min-p, as in Hugging Face. Temperature 0 gives probability 1 to the likeliest
    token, so that greedy decoding is no special case downstream.

    Args:
        logits: (B, V).
        batch: B sequences.

    Returns:
        (B, V) float32, each row summing to 1.
    """
    # Steps 1 and 2, except for the softmax, change this copy in place. Allocating another tensor
    # (20 MB for 32 rows and a large vocabulary) would take as long as the arithmetic itself.
    logits = logits.to(torch.float32, copy=True)
    # 1) structure, bias, penalties
    for scores, sequence in zip(logits, batch, strict=True):
        adjust_(scores, sequence)
    # 2) temperature. The maximum is subtracted first, so that a tiny temperature gives -inf, never
    # inf - inf.
    params = [sequence.params for sequence in batch]
    temperature = [[max(p.temperature, 1e-9)] for p in params]
    logits -= logits.amax(-1, keepdim=True)
    logits /= torch.tensor(temperature, device=logits.device)  # (B, 1)
    probs = logits.softmax(-1)
    # 3) temperature 0: of several that tie, the first has probability 1
    greedy = [b for b, p in enumerate(params) if p.temperature == 0]
    best = logits[greedy].argmax(-1)
    probs[greedy] = 0
    probs[greedy, best] = 1
    # 4) top-k, top-p, min-p, in the rows that have one of them
    filtered = [b for b, p in enumerate(params) if p.filters]
    if len(filtered) == len(batch):
        return keep_likeliest(probs, params)  # the same as below, without a copy of the rows
    if filtered:
        probs[filtered] = keep_likeliest(probs[filtered], [params[b] for b in filtered])
    return probs


def adjust_(scores: Tensor, sequence: "Sequence") -> None:
    """Change one sequence's logits, (V,), in place: by its structure, or by min_tokens if it has
    none; then by its bias and its penalties."""
    p = sequence.params
    if sequence.matcher:  # its bias is 0 for the ids that it forbids, and 200 for the others
        bias = bytearray(sequence.matcher.compute_logit_bias())
        is_forbidden = torch.frombuffer(bias, dtype=torch.uint8)[: len(scores)] == 0
        scores.masked_fill_(is_forbidden.to(scores.device), -torch.inf)
    elif len(sequence.ids) < sequence.prompt_len + p.min_tokens:
        # The tokenizer's own EOS may lie outside V.
        scores[[i for i in sequence.end_ids if i < len(scores)]] = -torch.inf
    if p.logit_bias:
        ids = torch.tensor([*p.logit_bias], device=scores.device)
        values = torch.tensor([*p.logit_bias.values()], dtype=torch.float32, device=scores.device)
        scores.index_add_(0, ids, values)
    if p.penalizes:
        penalize_(scores, sequence)


def penalize_(scores: Tensor, sequence: "Sequence") -> None:
    """Change one sequence's logits, (V,), in place, by its penalties."""
    p = sequence.params
    # Through an array, because torch.tensor takes seven times as long for a list.
    ids = torch.frombuffer(array("q", sequence.ids), dtype=torch.int64).to(scores.device)
    output = ids[sequence.prompt_len :]
    # 1) repetition, of the prompt and the output. An id that occurs twice is still changed once:
    # index_copy_ writes the same new score twice.
    old = scores.index_select(0, ids)  # 6 times as fast as scores[ids]
    new = torch.where(old > 0, old / p.repetition_penalty, old * p.repetition_penalty)
    scores.index_copy_(0, ids, new)
    # 2) presence, once for each id of the output
    scores.index_copy_(0, output, scores.index_select(0, output) - p.presence_penalty)
    # 3) frequency, as often as it occurs
    scores.index_add_(0, output, scores.new_full(output.shape, -p.frequency_penalty))


def keep_likeliest(probs: Tensor, params: list[SamplingParams], most: int = 256) -> Tensor:
    """Drop tokens by top_k, top_p and min_p, and normalise the others.

    Sorting 150,000 tokens takes longer than a small model's step, and those that are kept are
    nearly always among the first few hundred. So only the `most` likeliest are sorted, and a row
    that turns out to need more is done again with all.

    Args:
        probs: (B, V), each row summing to 1.

    Returns:
        (B, V), each row summing to 1.
    """
    most = min(most, probs.shape[1])
    # 1) The selected ids are put in order, so that of two tied ids the lower one comes first.
    ids = probs.topk(most).indices.sort(-1).values
    ranked, order = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    # 2) Filter.
    filtered = filter_ranked(ranked, params)
    kept = torch.zeros_like(probs).scatter_(1, ids.gather(1, order), filtered)
    if most == probs.shape[1]:
        return kept
    # 3) A row that keeps the last selected token, or one tied with it, may have to keep more. Where
    # top_k is above `most`, the mass that it keeps, of which top-p takes a share, is not known yet.
    unsure = ((filtered > 0) & (ranked == ranked[:, -1:])).any(-1).tolist()
    for b, p in enumerate(params):
        if unsure[b] or p.top_k > most:  # one by one, as sorting all takes much memory
            kept[b] = keep_likeliest(probs[b : b + 1], [p], probs.shape[1])
    return kept


def filter_ranked(ranked: Tensor, params: list[SamplingParams]) -> Tensor:
    """Zero the probabilities that top_k, top_p and min_p exclude, and normalise the rest.

    Args:
        ranked: (B, m), the probabilities of the m likeliest tokens of each row, likeliest first.
        params: of each row. top_k is 0 or -1 where all may stay.

    Returns:
        (B, m), each row summing to 1.

    Example: ranked [0.5, 0.3, 0.15, 0.05]: top_k = 3 keeps the first three, which sum to 0.95. Then
        top_p = 0.8 keeps each token with less than 0.8 * 0.95 = 0.76 before it: 0.3 stays, with 0.5
        before it, and 0.15 goes, with 0.8 before it. The result is [0.625, 0.375, 0, 0].
    """
    limits = torch.tensor([[p.top_k, p.top_p, p.min_p] for p in params], device=ranked.device)
    top_k, top_p, min_p = limits.split(1, dim=1)  # (B, 1) each
    # 1) top-k keeps the first k. Comparing ranks, and not values, keeps at most k despite ties.
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    ranked = ranked * ((rank < top_k) | (top_k <= 0))
    # 2) top-p keeps a token if the tokens before it have less than the share p of what top-k has
    # kept. Without top-k that is the mass of all V tokens, 1.
    mass = ranked.cumsum(-1)
    total = torch.where(top_k > 0, mass[:, -1:], 1.0)
    ranked *= (mass - ranked) < (top_p * total)
    # 3) min-p keeps a token if it has at least min_p times the likeliest one's probability
    ranked *= ranked >= min_p * ranked[:, :1]
    return ranked / ranked.cumsum(-1)[:, -1:]  # not sum(): its order of adding depends on B


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution: find the first id at which it passes u.

    Args:
        probs: (B, V), at least 0. A row need not sum to 1, because u is scaled by its sum.
        u: (B,), uniform in [0, 1), any float dtype, on any device.

    Returns:
        (B,) int64 ids, each with a probability above 0; for a row of NaN, the last id.

    Example: probs [0.2, 0, 0.8], cumulative [0.2, 0.2, 1.0]: u = 0.1 -> 0, u = 0.2 -> 2
    """
    mass = probs.cumsum(-1)
    total = mass[:, -1:]
    target = u[:, None].to(mass) * total
    # Rounding can make the target equal to the total, which no id passes. So the target is limited
    # to the next float below the total.
    target = torch.minimum(target, total * (1 - 2**-24))
    # In a row of NaN no id passes. Such a row can come from a grammar that allows only tokens whose
    # logit is -inf.
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def uniform(seed: int, index: int) -> float:
    """Random number `index` of the stream `seed`, uniform in [0, 1), without any state.

    A counter in place of a generator's state (Salmon et al. 2011) gives each sequence random
    numbers of its own. They are the same alone or in a batch, on any device, and after a
    preemption. The mixing function is splitmix64 (Steele et al. 2014).

    Example: splitmix64 of seed 0 begins with 0xE220A8397B1DCDAF, so uniform(0, 0) = 0.8833108...
    """
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return ((z ^ (z >> 31)) >> 11) / 2**53


BROKEN = "the model's logits are NaN or infinite: the weights are damaged, or need another --dtype"


def finite(logits: Tensor) -> Tensor:
    """For each row, whether a token can be drawn from it: (B, V) -> (B,) bool. Some of its logits
    may be -inf."""
    return logits.amax(-1).isfinite()


def scored(logits: Tensor, ids: Ids, counts: list[int | None]) -> list[Token]:
    """Add log-probabilities to token ids.

    Args:
        logits: (B, V), any float dtype.
        ids: the B tokens' ids.
        counts: for each of them, how many of the likeliest tokens are added (params.logprobs);
            None: it gets no log-probabilities.

    Returns:
        B tokens.
    """
    tokens = [Token(i) for i in ids]
    asked = [b for b, count in enumerate(counts) if count is not None]  # A of the B
    if not asked:
        return tokens
    # (A, V). As in vLLM, none is below -9999: JSON has no infinity.
    logprobs = logits[asked].float().log_softmax(-1).clamp_(min=-9999)
    own = logprobs.gather(1, torch.tensor(ids, device=logits.device)[asked, None])  # (A, 1)
    k = min(20, logits.shape[-1])  # SamplingParams allow no more
    best = logprobs.topk(k)
    # One copy to the host for all numbers, because each copy waits for the GPU to finish. float32
    # holds ids up to 2**24.
    numbers = torch.cat((own, best.values, best.indices), 1).tolist()  # (A, 1 + 2k)
    for b, (own_logprob, *rest) in zip(asked, numbers):
        top_ids = map(int, rest[k:])  # of the k likeliest, of which zip takes the first counts[b]
        tokens[b] = Token(ids[b], own_logprob, tuple(zip(top_ids, rest[: counts[b]])))
    return tokens


# --- The sequence ---------------------------------------------------------------------------------


class Sequence:
    """One sequence being generated: its ids, its text so far, and why it ended.

    Attributes:
        ids: the prompt's and the output's.
        tokens: the output, with its log-probabilities.
        finish_reason: None while it runs; then "stop" (EOS, a stop token, a stop string, or the
            end of the structure), "length", "abort" (Engine.abort or Engine.reset was called),
            "error" (no token could be drawn, or the grammar became too complex) or "interrupted"
            (Ctrl-C).
        times: seconds on time.perf_counter's clock: when the sequence was made, then when each
            token came.
        matcher: decides which tokens may come next, if a structure is asked for; see
            around/structured.py.
        end_ids: the ids that end it.
        stream: makes the text from the ids.
    """

    def __init__(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        config: Config,
        tokenizer: Tokenizer | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Start a sequence.

        Args:
            prompt_ids: at least one id.
            config: gives the vocabulary, the EOS ids and the longest context.
            tokenizer: None: there are ids only, and no text or stop strings.
            max_seq_len: the longest prompt and output together; None: the model's longest context.

        Raises:
            SettingError: the prompt is empty or leaves no room for a token, or an id is unknown.
        """
        context = max_seq_len or config.max_position_embeddings
        n = len(prompt_ids)
        if not 0 < n < context:
            shorter = (
                "shorten it, or raise --max-seq-len, --kv-memory or --num-blocks where one set this"
            )
            way_out = shorter if n else "give it some text"
            raise SettingError("prompt", f"has {n} tokens, context is {context}: {way_out}")
        check_ids("prompt", prompt_ids, config.vocab_size)
        check_ids("logit_bias", params.logit_bias, config.vocab_size)
        check_ids("stop_token_ids", params.stop_token_ids, config.vocab_size)
        self.ids = list(prompt_ids)
        self.prompt_len = n
        self.max_len = min(context, n + params.max_tokens)
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.tokens: list[Token] = []
        self.times = [time.perf_counter()]
        self.finish_reason: str | None = None
        self.matcher = None
        # Most special tokens have no text in the output (see Tokenizer.special), so the search for
        # stop strings would not find them. If a stop string is a special token, its id ends the
        # sequence.
        special = tokenizer.special if tokenizer else {}
        self.end_ids = {*params.stop_token_ids, *(special[s] for s in params.stop if s in special)}
        if not params.ignore_eos:
            self.end_ids |= tokenizer.eos_ids(config) if tokenizer else {*config.eos_ids}
        self.stream = TextStream(tokenizer, prompt_ids, params.stop)

    @property
    def text(self) -> str:
        """The output's text, which only ever grows; see TextStream."""
        return self.stream.text

    @property
    def token_ids(self) -> Ids:
        """The output's ids."""
        return self.ids[self.prompt_len :]

    @property
    def logprobs(self) -> list[dict[int, Token] | None] | None:
        """Each output token's log-probabilities, if they are asked for; see Token.logprobs."""
        return (
            [token.logprobs for token in self.tokens] if self.params.logprobs is not None else None
        )

    def __repr__(self) -> str:
        return f"{self.text!r} ({len(self.tokens)} tokens, {self.finish_reason or 'running'})"

    @property
    def takes_argmax(self) -> bool:
        """Whether its next token is the likeliest one under the model's own logits. Filters do not
        matter, as they never drop that one."""
        return not (self.params.temperature or self.params.adjusts or self.matcher)

    def uniform(self, offset: int = 0) -> float:
        """The random number for its next token; `offset` is added to its index in the stream."""
        return uniform(self.seed, offset + len(self.ids) - self.prompt_len)

    def with_guesses(self, guesses: Ids) -> "Sequence":
        """Return this sequence as the sampler would see it with these ids appended; to be read
        only."""
        if not guesses:
            return self
        other = copy.copy(self)
        other.ids = self.ids + guesses
        if self.matcher:
            other.matcher = self.matcher.deep_copy()
            # The matcher stops before a forbidden guess. Verification refuses this guess and what
            # follows it.
            other.matcher.try_consume_tokens(guesses)
        return other

    def append(self, token: Token) -> None:
        """Append a sampled token to ids and text, and decide whether the sequence ends here."""
        self.ids.append(token.id)
        reason = self._advance(token.id)
        # What ends a text is no part of it, nor is a token that the structure does not allow.
        shown_id = None if token.id in self.end_ids or reason == "error" else token.id
        can_stop = len(self.ids) > self.prompt_len + self.params.min_tokens
        text, stopped = self.stream.push(shown_id, last=bool(reason), can_stop=can_stop)
        self.tokens.append(token._replace(text=text))
        self.times.append(time.perf_counter())
        self.finish_reason = "stop" if stopped else reason

    def finish(self, reason: str) -> None:
        """End the sequence from outside, and show the text that was held back as a possible stop
        string. Does nothing if it has ended already, as when Ctrl-C comes with the last word."""
        if not self.finish_reason:
            self.stream.push(None, last=True)
            self.finish_reason = reason

    def _advance(self, token_id: int) -> str | None:
        """Advance the matcher, and return why the sequence ends with this token, leaving stop
        strings aside; None: it goes on."""
        if self.matcher and (not self.matcher.consume_token(token_id) or self.matcher.is_error()):
            return "error"
        if token_id in self.end_ids or (self.matcher and self.matcher.is_stopped()):
            return "stop"
        return "length" if len(self.ids) >= self.max_len else None
