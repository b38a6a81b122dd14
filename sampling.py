"""What a request asks for, the sequence that comes of it, and the sampler that picks each token.

`sample` is the one sampler of the engine: the command line, the scheduler and the server call it,
and speculation draws from its `distribution`, so a seed means the same everywhere. Papers: Holtzman
et al. 2019 (top-p, arXiv:1904.09751), Nguyen et al. 2024 (min-p, arXiv:2407.01082), Keskar et al.
2019 (repetition penalty, arXiv:1909.05858). Read: SamplingParams, Sequence, sample, distribution,
draw, uniform. Next: generate.py.
"""

import copy
import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model import Checked, Config, check, read_json
from tokenizer import Detokenizer, Tokenizer

# --- What a request asks for ----------------------------------------------------------------------


def setting(default: Any, low: float, high: float, text: str) -> Any:
    """A field of SamplingParams that must be in low..high; None is in any range, if of its type."""
    return field(default=default, metadata={"range": (low, high), "help": text})


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How to choose each token, and when to stop. Names and meanings are those of vLLM.

    Raises:
        ValueError: a value of the wrong type, out of its range, NaN or infinite.
    """

    temperature: float = setting(1.0, 0, 1e4, "0 takes the likeliest token")
    top_k: int = setting(0, -1, 2**31, "keep the k likeliest tokens; 0 or -1: all")
    top_p: float = setting(1.0, 1e-6, 1, "keep the likeliest tokens that have this mass")
    min_p: float = setting(0.0, 0, 1, "drop tokens below this share of the likeliest one")
    repetition_penalty: float = setting(1.0, 1e-6, 1e4, "weaken tokens of the prompt and output")
    presence_penalty: float = setting(0.0, -2, 2, "subtract for each token of the output")
    frequency_penalty: float = setting(0.0, -2, 2, "subtract for each time it is in the output")
    seed: int | None = setting(None, -(2**63), 2**63 - 1, "same seed, same tokens")
    n: int = setting(1, 1, 128, "continuations of each prompt; their seeds count up")
    max_tokens: int = setting(256, 1, 2**31, "new tokens at most")
    logprobs: int | None = setting(None, 0, 20, "report log-probabilities, of the top N too")
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    prompt_logprobs: bool = False  # where logprobs is given, of the prompt too; Engine only
    stop: tuple[str, ...] = ()  # end before any of these strings
    stop_token_ids: tuple[int, ...] = ()  # end at any of these tokens, besides EOS
    ignore_eos: bool = False  # run on past EOS, as benchmarks do
    # One of json (a schema), regex, choice (a list), grammar (Lark, GBNF), as vLLM; Engine only.
    structured_outputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        ids = ("stop_token_ids", self.stop_token_ids, int, 0)
        for name, items, *wanted in ("stop", stop, str), ids:
            items = tuple(check(name, i, *wanted) for i in check(name, items, list | tuple))
            object.__setattr__(self, name, items)  # frozen: only the constructor may
        if len(stop) > 16 or any(not 0 < len(each) <= 256 for each in stop):
            raise ValueError("stop takes up to 16 strings of 1 to 256 characters")
        for i, bias in check("logit_bias", self.logit_bias, dict).items():
            check("logit_bias", i, int, 0)
            check("logit_bias", bias, float, -100, 100)

    def split(self) -> list["SamplingParams"]:
        """The parameters of each of the n continuations, whose seeds count up (and wrap around)."""
        if self.seed is None:
            return [self] * self.n
        return [replace(self, seed=(self.seed + i + 2**63) % 2**64 - 2**63) for i in range(self.n)]


def sampling_params(checkpoint: Path, **given: Any) -> SamplingParams:
    """Put what the user gave (None: nothing) over generation_config.json over our defaults."""
    stored = read_json(checkpoint / "generation_config.json", optional=True)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    both = [*((name, stored.get(name)) for name in names), *given.items()]
    return SamplingParams(**{name: value for name, value in both if value is not None})


class Token(NamedTuple):
    """A sampled token. Log-probabilities are the model's, before any setting."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the likeliest, likeliest first
    text: str = ""  # what it added: of a character of several tokens, the last adds all


@dataclass
class Guess:
    """Tokens that may follow a sequence, and how they were drawn; see speculative.py."""

    ids: list[int] = field(default_factory=list)
    q: list[float] = field(default_factory=list)  # the probability that each was drawn with
    probs: list[Tensor] = field(default_factory=list)  # (V,) each; empty: each was certain


class Sequence:
    """One sequence being generated: its ids, its text so far, and why it ended.

    Attributes:
        ids: prompt and output.
        tokens: the output, with its log-probabilities.
        text: what may be shown. A tail that could still turn out to be part of a stop string, or
            half a character, is held back, so `text` only ever grows.
        finish_reason: None while running; "stop" (EOS, stop token or string), "length", "abort"
            (by the scheduler), "error" (nothing could be drawn, or its structure was too complex)
            or "interrupted" (Ctrl-C).
        times: seconds on time.perf_counter's clock: when it was made, then at each token.
        guess: what may come next. followed: see speculative.lookup.
        counts: (V,) float32, where a penalty needs it: how often each id came out, and half a time
            more if it is in the prompt. Kept as tokens come: no step's cost grows with the text.
        matcher: which tokens may come next, where that is restricted; see structured.py.
        request, table, end: its place in a scheduler; see scheduler.py.
        cached: how many of the prompt's tokens were found in the prefix cache.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        config: Config,
        tokenizer: Tokenizer | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        """Start a sequence.

        Args:
            prompt_ids: at least one id.
            config: gives the vocabulary, the EOS ids and the longest context.
            tokenizer: None: ids only, no text and no stop strings.
            max_seq_len: prompt and output together; None: what the model was trained for.

        Raises:
            ValueError: an empty prompt, one that leaves no room for a token, or an unknown id.
        """
        context, V = max_seq_len or config.max_position_embeddings, config.vocab_size
        if not (n := len(prompt_ids)):
            raise ValueError("prompt is empty, and this tokenizer adds no BOS: give it some text")
        if n >= context:
            raise ValueError(f"prompt has {n} tokens, context is {context}: raise --max-seq-len")
        for name, ids in (("prompt", prompt_ids), ("logit_bias", params.logit_bias)):
            if bad := [i for i in ids if type(i) is not int or not 0 <= i < V]:
                raise ValueError(f"{name} has {bad[0]!r}, outside the model's vocabulary of {V}")
        self.ids, self.prompt_len = list(prompt_ids), n
        self.params, self.tokens, self.times = params, [], [time.perf_counter()]
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.text, self._held = "", ""  # _held: decoded, but perhaps the start of a stop string
        self.finish_reason: str | None = None
        self.max_len = min(context, n + params.max_tokens)
        self.guess, self.followed, self.cached = Guess(), {}, 0
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        self.counts: Tensor | None = None
        if penalties != (0, 0, 1):  # frombuffer: torch.zeros would start threads, in any thread
            zeros = torch.frombuffer(bytearray(4 * V), dtype=torch.float32)
            self.counts = zeros.index_fill_(0, torch.tensor(prompt_ids), 0.5)
        self.matcher: Any = None
        self._ends = {*params.stop_token_ids, *(() if params.ignore_eos else config.eos_ids)}
        self._detokenizer = Detokenizer(tokenizer, prompt_ids) if tokenizer else None

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_len :]

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt is being run, and the log-probabilities of that are wanted."""
        return self.params.prompt_logprobs and self.params.logprobs is not None and not self.tokens

    def ahead(self, guesses: list[int]) -> "Sequence":
        """What the sampler would read once these ids had been appended: only to be read."""
        if not guesses:
            return self
        other = copy.copy(self)
        other.ids = self.ids + guesses
        if self.counts is not None:
            ids = torch.tensor(guesses)
            other.counts = self.counts.index_add(0, ids, torch.ones(len(ids)))
        if self.matcher:
            other.matcher = self.matcher.deep_copy()
            other.matcher.try_consume_tokens(guesses)  # a guess that breaks off has no chance
        return other

    def append(self, token: Token) -> None:
        """Take a sampled token: extend ids and text, and decide whether the sequence ends here."""
        self.ids.append(token.id)
        if self.counts is not None:
            self.counts[token.id] += 1
        broken = (m := self.matcher) and (not m.consume_token(token.id) or m.is_error())
        text, ends = "", broken or token.id in self._ends
        if self._detokenizer and not ends:
            text = self._detokenizer.push(token.id)
        reason = "length" if len(self.ids) >= self.max_len else None
        reason = "stop" if ends or (m and m.is_stopped()) else reason
        reason = "error" if broken else reason
        if self._detokenizer and reason:
            text += self._detokenizer.flush()
        self.tokens.append(token._replace(text=text))
        self.times.append(time.perf_counter())
        if self._show(text):
            self.finish_reason = "stop"
        elif reason:
            self.text, self.finish_reason = self.text + self._held, reason

    def finish(self, reason: str) -> None:
        """End the sequence from outside, showing what was held back, but for a stop string.

        Does nothing where it has ended already, as when Ctrl-C falls on the last word.
        """
        if not self.finish_reason:
            if self._detokenizer and not self._show(self._detokenizer.flush()):
                self.text += self._held
            self.finish_reason = reason

    def _show(self, new: str) -> bool:
        """Move decoded text to `text`, up to a stop string or to what could be the start of one.

        Example: stop "ab". After "xa" the text is "x", and "a" is held. Then "c" shows "xac",
        while "ab" shows "xa" and ends: the stop string began at the second "a".

        Returns:
            Whether a stop string was found.
        """
        held, stops = self._held + new, self.params.stop
        found = [at for stop in stops if (at := held.find(stop)) >= 0]
        # Or else the longest tail that begins some stop string, of which there is less than one.
        tails = range(max(0, len(held) - max(map(len, stops), default=0)), len(held))
        begins = (at for at in tails if any(stop.startswith(held[at:]) for stop in stops))
        cut = min(found, default=next(begins, len(held)))
        self.text, self._held = self.text + held[:cut], held[cut:]
        return bool(found)


# --- The sampler ----------------------------------------------------------------------------------


def sample(logits: Tensor, rows: list[Sequence]) -> list[Token]:
    """Choose the next token of each row by that row's own parameters and seed.

    Args:
        logits: (B, V), any float dtype.
        rows: B sequences; read, not changed.

    Returns:
        B tokens, with log-probabilities for the rows that ask for them.

    Raises:
        ValueError: a row is not finite().
    """
    if not finite(logits).all():
        raise ValueError(BROKEN)
    settings = [(r.params.temperature, r.params.logit_bias, r.matcher) for r in rows]
    if not any(map(any, settings)) and all(r.counts is None for r in rows):
        ids = logits.argmax(-1)
    else:
        ids = draw(distribution(logits, rows), uniforms(rows))
    return scored(logits, ids.tolist(), [row.params.logprobs for row in rows])


BROKEN = "the model's logits are NaN or infinite: the weights are damaged, or need another --dtype"


def finite(logits: Tensor) -> Tensor:
    """Whether a token can be drawn from each row: (B, V) -> (B,) bool. One of -inf may be there."""
    return logits.amax(-1).isfinite()


def scored(logits: Tensor, ids: list[int], counts: list[int | None]) -> list[Token]:
    """Return B tokens with their log-probabilities under `logits`, (B, V).

    Args:
        counts: for each, how many of the likeliest tokens to add; None: no log-probabilities.
    """
    if all(n is None for n in counts):
        return [Token(i) for i in ids]
    logprobs = logits.float().log_softmax(-1).clamp_(min=-9999)  # as vLLM: JSON has no infinity
    best, best_ids = (t.tolist() for t in logprobs.topk(min(20, logits.shape[-1])))
    return [
        Token(i) if n is None else Token(i, row[i].item(), (*zip(top_ids[:n], top[:n]),))
        for i, n, row, top_ids, top in zip(ids, counts, logprobs, best_ids, best, strict=True)
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
    logits = logits.float().clone()
    device = logits.device
    for row, scores in zip(rows, logits, strict=True):  # scores: (V,), a view to change
        p = row.params
        if row.matcher:  # 0 or 200 for each id
            may = torch.frombuffer(bytearray(row.matcher.compute_logit_bias()), dtype=torch.uint8)
            scores.masked_fill_(may[: len(scores)].to(device) == 0, -torch.inf)
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=device)
            scores[ids] += torch.tensor(list(p.logit_bias.values()), device=device)
        if row.counts is not None:
            ids, factor = row.counts.nonzero()[:, 0], p.repetition_penalty
            output, ids = row.counts.index_select(0, ids).floor().to(device), ids.to(device)
            seen = scores.index_select(0, ids)  # 6 times as fast as scores[ids]
            seen = torch.where(seen > 0, seen / factor, seen * factor)
            seen -= p.presence_penalty * (output > 0) + p.frequency_penalty * output
            scores.index_copy_(0, ids, seen)

    def column(name: str) -> Tensor:  # (B, 1)
        return torch.tensor([[float(getattr(row.params, name))] for row in rows], device=device)

    temperature = column("temperature")
    # The maximum is subtracted first, so a tiny temperature gives -inf, never inf - inf = NaN.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-9)).softmax(-1)
    settings = enumerate(row.params for row in rows)
    if filtered := [b for b, p in settings if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]:
        ranked, ids = probs[filtered].sort(dim=-1, descending=True, stable=True)  # (b, V) each
        rank = torch.arange(ranked.shape[1], device=device)
        top_k = column("top_k")[filtered]
        # Ranks, not values, are compared with k: of equals at the border just enough are kept.
        ranked *= (rank < top_k) | (top_k <= 0)
        mass = ranked.cumsum(-1)  # a token is kept while those before it are short of top_p
        ranked *= mass - ranked < column("top_p")[filtered] * mass[:, -1:]
        ranked *= ranked >= column("min_p")[filtered] * ranked[:, :1]
        ranked /= ranked.cumsum(-1)[:, -1:]  # sum() would add in another order in a batch
        probs[filtered] = torch.zeros_like(ranked).scatter_(1, ids, ranked)
    greedy = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(temperature == 0, greedy, probs)


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
    # Rounded up, u * total could equal the total; then no id would pass it.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(u[:, None].to(mass) * total, below)
    # A row of NaN, as where a grammar allows nothing that the model can say, passes nowhere.
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


def uniforms(rows: list[Sequence], stream: int = 0) -> Tensor:
    """Each row's random number for its next token: (B,) float64, on the CPU. `stream` is where in
    the seed's numbers the row's begin."""
    numbers = [uniform(r.seed, stream + len(r.ids) - r.prompt_len) for r in rows]
    return torch.tensor(numbers, dtype=torch.float64)
