"""A sequence that is being generated, and the sampler that picks each of its tokens.

`sample` is the one sampler of the engine: the plain loop and the scheduler call it. Speculation
draws from the same `distribution`, with other random numbers where it samples. What a request may
ask for is settings.SamplingParams. Of the model it knows only the config. Papers: Holtzman et al.
2019 (top-p, arXiv:1904.09751), Nguyen et al. 2024 (min-p, arXiv:2407.01082), Keskar et al. 2019
(repetition penalty, arXiv:1909.05858). Read: Sequence, sample, distribution, draw, uniform. Next:
generate.py.
"""

import copy
import secrets
import time
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from model import Config
from settings import SamplingParams, SettingError, check_ids
from tokenizer import Ids, TextStream, Tokenizer

FILTERS = {"top_k", "top_p", "min_p"}  # which never leave out the likeliest
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
ADJUSTED = PENALTIES | {"logit_bias", "min_tokens"}  # which adjust_ applies


class Token(NamedTuple):
    """A sampled token. Log-probabilities are the model's, before any setting."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the likeliest, likeliest first
    text: str = ""  # what it added: of a character of several tokens, the last adds all


# --- The sequence ---------------------------------------------------------------------------------


class Sequence:
    """One sequence being generated: its ids, its text so far, and why it ended.

    Attributes:
        ids: prompt and output.
        tokens: the output, with its log-probabilities.
        finish_reason: None while running; "stop" (EOS, stop token or string), "length", "abort"
            (by the scheduler), "error" (nothing could be drawn, or its structure was too complex)
            or "interrupted" (Ctrl-C).
        times: seconds on time.perf_counter's clock: when it was made, then at each token.
        matcher: which tokens may come next, where that is restricted; see structured.py.
        ends: ids that end it.
        seen: where there are penalties, `ids` as an array, which a tensor can be made of at once.
    """

    def __init__(
        self, prompt_ids: Ids, params: SamplingParams, config: Config,
        tokenizer: Tokenizer | None = None, max_seq_len: int | None = None,
    ) -> None:  # fmt: skip
        """Start a sequence.

        Args:
            prompt_ids: at least one id.
            config: gives the vocabulary, the EOS ids and the longest context.
            tokenizer: None: ids only, no text and no stop strings.
            max_seq_len: prompt and output together; None: what the model was trained for.

        Raises:
            SettingError: an empty prompt, one that leaves no room for a token, or an unknown id.
        """
        context = max_seq_len or config.max_position_embeddings
        n, V = len(prompt_ids), config.vocab_size
        if not 0 < n < context:
            way_out = "shorten it or raise --max-seq-len, --kv-memory" if n else "give it some text"
            raise SettingError("prompt", f"has {n} tokens, context is {context}: {way_out}")
        check_ids("prompt", prompt_ids, V)
        check_ids("logit_bias", params.logit_bias, V)
        check_ids("stop_token_ids", params.stop_token_ids, V)
        self.ids, self.prompt_len = list(prompt_ids), n
        self.max_len = min(context, n + params.max_tokens)
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.tokens = []
        self.times = [time.perf_counter()]
        self.finish_reason = None
        self.matcher = None
        self.ends = {*params.stop_token_ids, *(() if params.ignore_eos else config.eos_ids)}
        self._stream = TextStream(tokenizer, prompt_ids, params.stop)
        self.shaping = params.shaping
        self.seen = array("q", prompt_ids) if self.shaping & PENALTIES else None

    @property
    def text(self) -> str:
        """The text of the output, which only ever grows; see tokenizer.TextStream."""
        return self._stream.text

    @property
    def output_ids(self) -> Ids:
        return self.ids[self.prompt_len :]

    def uniform(self, stream: int = 0) -> float:
        """The random number of its next token; `stream` is an offset into the seed's numbers."""
        return uniform(self.seed, stream + len(self.ids) - self.prompt_len)

    def ahead(self, guesses: Ids) -> "Sequence":
        """A read-only copy: this sequence as the sampler would see it with these ids appended."""
        if not guesses:
            return self
        other = copy.copy(self)
        other.ids = self.ids + guesses
        if self.seen:
            other.seen = self.seen + array("q", guesses)
        if self.matcher:
            other.matcher = self.matcher.deep_copy()
            other.matcher.try_consume_tokens(guesses)  # a guess that breaks off has no chance
        return other

    def append(self, token: Token) -> None:
        """Take a sampled token: extend ids and text, and decide whether the sequence ends here."""
        self.ids.append(token.id)
        if self.seen:
            self.seen.append(token.id)
        reason = self._reason_to_stop(token.id)
        is_text = token.id not in self.ends and reason != "error"
        text, stopped = self._stream.push(token.id if is_text else None, last=bool(reason))
        self.tokens.append(token._replace(text=text))
        self.times.append(time.perf_counter())
        self.finish_reason = "stop" if stopped else reason

    def finish(self, reason: str) -> None:
        """End the sequence from outside, showing what was held back, but for a stop string.

        Does nothing where it has ended already, as when Ctrl-C falls on the last word.
        """
        if not self.finish_reason:
            self._stream.push(None, last=True)
            self.finish_reason = reason

    def _reason_to_stop(self, token_id: int) -> str | None:
        """Why the sequence ends with this token, but for a stop string; None where it goes on."""
        if self.matcher and (not self.matcher.consume_token(token_id) or self.matcher.is_error()):
            return "error"
        if token_id in self.ends or (self.matcher and self.matcher.is_stopped()):
            return "stop"
        return "length" if len(self.ids) >= self.max_len else None


# --- The sampler ----------------------------------------------------------------------------------


def sample(logits: Tensor, rows: list[Sequence]) -> list[Token]:
    """Choose the next token of each row by that row's own parameters and seed.

    Args:
        logits: (B, V), any float dtype, finite().
        rows: B sequences; read, not changed.

    Returns:
        B tokens, with log-probabilities for the rows that ask for them.
    """
    if not any(row.params.temperature or row.matcher or row.shaping - FILTERS for row in rows):
        # Each takes the likeliest, as the model gives it.
        ids = logits.float().argmax(-1).tolist()  # of bfloat16 it takes three times as long
    else:
        # On a CPU a few rows at a time, so that what is made of them stays in its cache.
        few = 8 if logits.is_cpu else len(rows)
        ids = []
        for i in range(0, len(rows), few):
            some = rows[i : i + few]
            u = torch.tensor([row.uniform() for row in some])
            ids += draw(distribution(logits[i : i + few], some), u).tolist()
    return scored(logits, ids, rows)


BROKEN = "the model's logits are NaN or infinite: the weights are damaged, or need another --dtype"


def finite(logits: Tensor) -> Tensor:
    """Whether a token can be drawn from each row: (B, V) -> (B,) bool. Some may be -inf."""
    return logits.amax(-1).isfinite()


def scored(logits: Tensor, ids: Ids, rows: list[Sequence]) -> list[Token]:
    """Return B tokens with their log-probabilities under `logits`, (B, V).

    Args:
        rows: whose tokens they are: each one's params.logprobs says how many of the likeliest to
            add; None: no log-probabilities.
    """
    counts = [row.params.logprobs for row in rows]
    if all(n is None for n in counts):
        return [Token(i) for i in ids]
    logprobs = logits.float().log_softmax(-1).clamp_(min=-9999)  # as vLLM: JSON has no infinity
    own = logprobs.gather(1, torch.tensor([ids], device=logits.device).t())  # (B, 1)
    k = min(20, logits.shape[-1])
    best = logprobs.topk(k)
    # One read for all; float32 holds ids up to 2**24.
    read = torch.cat((own, best.values, best.indices), 1).tolist()
    return [
        Token(i) if n is None else Token(i, logprob, tuple(zip(map(int, top[k:]), top[:n])))
        for i, (logprob, *top), n in zip(ids, read, counts, strict=True)
    ]


def distribution(logits: Tensor, rows: list[Sequence]) -> Tensor:
    """The probabilities each row draws from, after every setting of its SamplingParams.

    Order: structure, bias, penalties, temperature, top-k, top-p, min-p, as in Hugging Face.
    Temperature 0 gives probability 1 to the likeliest token, so greedy needs no case of its own
    downstream.

    Args:
        logits: (B, V).
        rows: B sequences.

    Returns:
        (B, V) float32, each row summing to 1.
    """
    logits = logits.to(torch.float32, copy=True)
    for row, scores in zip(rows, logits, strict=True):
        adjust_(scores, row)
    params = [row.params for row in rows]
    greedy = [b for b, p in enumerate(params) if p.temperature == 0]
    likeliest = logits[greedy].argmax(-1)  # the first, where several tie
    logits[greedy] = -torch.inf
    logits[greedy, likeliest] = 0
    temperature = [[max(p.temperature, 1e-9)] for p in params]
    # In place: 32 rows of a large vocabulary are 20 MB, and fresh memory costs as much as the sum.
    # The maximum is subtracted first, so a tiny temperature gives -inf, never inf - inf = NaN.
    logits -= logits.amax(-1, keepdim=True)
    logits /= torch.tensor(temperature, device=logits.device)  # (B, 1)
    probs = logits.softmax(-1)
    filtered = [b for b, row in enumerate(rows) if row.shaping - ADJUSTED]
    if len(filtered) == len(rows):
        probs = keep_likeliest(probs, params)  # spares two copies
    elif filtered:
        probs[filtered] = keep_likeliest(probs[filtered], [params[b] for b in filtered])
    return probs


def adjust_(scores: Tensor, row: Sequence) -> None:
    """Change one row's logits, (V,), in place: by what its structure allows, or whether it may end
    yet, its bias, and its penalties."""
    p = row.params
    device = scores.device
    if row.matcher:  # 0 or 200 for each id
        may = torch.frombuffer(bytearray(row.matcher.compute_logit_bias()), dtype=torch.uint8)
        scores.masked_fill_(may[: len(scores)].to(device) == 0, -torch.inf)
    elif len(row.ids) < row.prompt_len + p.min_tokens:
        ends = [i for i in row.ends if i < len(scores)]
        if len(ends) < len(scores):  # else one of these has to be drawn all the same
            scores[ends] = -torch.inf
    if p.logit_bias:
        scores[[*p.logit_bias]] += torch.tensor([*p.logit_bias.values()], device=device)
    if row.seen:
        # This shares the array's memory, and must be gone before the next token is added. To an id
        # that stands there twice the same score is copied twice.
        ids = torch.frombuffer(row.seen, dtype=torch.int64).to(device)
        output = ids[row.prompt_len :]
        factor = p.repetition_penalty
        seen = scores.index_select(0, ids)  # 6 times as fast as scores[ids]
        scores.index_copy_(0, ids, torch.where(seen > 0, seen / factor, seen * factor))
        scores.index_copy_(0, output, scores.index_select(0, output) - p.presence_penalty)
        scores.index_add_(0, output, scores.new_full(output.shape, -p.frequency_penalty))


SELECTED = 256  # tokens that are looked at before the whole vocabulary is sorted


def keep_likeliest(probs: Tensor, params: list[SamplingParams], most: int = SELECTED) -> Tensor:
    """Leave out unlikely tokens by top_k, top_p and min_p, and let the others sum to 1.

    Sorting a vocabulary of 150,000 takes longer than a small model's step. What is kept is nearly
    always among the first few hundred, so these are selected, and only rows where that was too few
    are sorted.

    Args:
        probs: (B, V), each row summing to 1.
        most: tokens to select; V or more: all rows are sorted.

    Returns:
        (B, V), likewise.
    """
    V = probs.shape[1]
    if most >= V:
        ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
    else:
        # Of equals the one with the lower id comes first, as after a stable sort.
        ids = probs.topk(most).indices.sort(-1).values
        ranked, order = probs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    least = ranked[:, -1:]
    wanted = torch.tensor([[p.top_k, p.top_p, p.min_p] for p in params], device=probs.device)
    top_k, top_p, min_p = wanted.split(1, dim=1)  # (B, 1) each
    # 1) top-k. Ranks are compared, not values: of equals at the border just enough are kept.
    in_top_k = (torch.arange(ranked.shape[1], device=probs.device) < top_k) | (top_k <= 0)
    ranked = ranked * in_top_k
    # 2) top-p: a token is kept while those before it are short of the mass
    mass = ranked.cumsum(-1)
    total = mass[:, -1:].where(top_k > 0, 1.0)
    ranked *= mass - ranked < top_p * total
    # 3) min-p
    ranked *= ranked >= min_p * ranked[:, :1]
    kept = torch.zeros_like(probs)
    kept.scatter_(1, ids, ranked / ranked.cumsum(-1)[:, -1:])  # sum()'s order depends on B
    if most < V:
        # A token as unlikely as the last one selected: there may be more like it.
        short = ((ranked > 0) & (ranked <= least)).any(-1) | (top_k[:, 0] > most)
        again = [b for b, is_short in enumerate(short.tolist()) if is_short]
        if again:
            kept[again] = keep_likeliest(probs[again], [params[b] for b in again], V)
    return kept


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first id at which it passes u.

    Args:
        probs: (B, V), sums near 1.
        u: (B,) uniform in [0, 1), of any float dtype, on any device.

    Returns:
        (B,) int64 ids, each of non-zero probability.

    Example: probs [0.2, 0, 0.8], cumulative [0.2, 0.2, 1.0]: u = 0.1 -> 0, u = 0.2 -> 2
    """
    mass = probs.cumsum(-1)
    total = mass[:, -1:]
    # Rounded up, u * total could equal the total; then no id would pass it: the next float below.
    target = torch.minimum(u[:, None].to(mass) * total, total * (1 - 2**-24))
    # In a row of NaN no id passes: a grammar may allow nothing that the model can say.
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def uniform(seed: int, index: int) -> float:
    """Random number `index` of the stream `seed`, in [0, 1), computed without any state.

    A counter in place of a generator's state (Salmon et al. 2011) makes a sequence's randomness its
    own: the same alone or in a batch, on any device, and after being preempted and resumed. The
    mixer is splitmix64 (Steele et al. 2014).

    Example: splitmix64 of seed 0 begins with 0xE220A8397B1DCDAF, so uniform(0, 0) = 0.8833108...
    """
    z = seed + (index + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return ((z ^ z >> 31) >> 11) / 2**53
