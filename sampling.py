"""What a request asks for, the sequence that comes of it, and the sampler that picks each token.

`sample` is the one sampler of the engine: the command line, the scheduler and the server call it,
and speculation draws from its `distribution`, so a seed means the same everywhere. Papers: Holtzman
et al. 2019 (top-p, arXiv:1904.09751), Nguyen et al. 2024 (min-p, arXiv:2407.01082), Keskar et al.
2019 (repetition penalty, arXiv:1909.05858). Read: SamplingParams, Sequence, sample, distribution,
draw, uniform. Next: runner.py.
"""

import secrets
import time
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model import Config
from tokenizer import Detokenizer, Tokenizer

# --- What a request asks for ----------------------------------------------------------------------


def setting(default: Any, low: float, high: float, text: str) -> Any:
    """A field of SamplingParams that must be a finite number in low..high; None only if default."""
    return field(default=default, metadata={"low": low, "high": high, "help": text})


TINY = 1e-6  # the least value of a setting that must be above zero


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token, and when to stop. Names and meanings are those of vLLM.

    Raises:
        ValueError: a value of the wrong type, out of its range, NaN or infinite.
    """

    temperature: float = setting(1.0, 0, 1e4, "0 takes the likeliest token")
    top_k: int = setting(0, -1, 2**31, "keep the k likeliest tokens; 0 or -1: all")
    top_p: float = setting(1.0, TINY, 1, "keep the likeliest tokens that have this mass")
    min_p: float = setting(0.0, 0, 1, "drop tokens below this share of the likeliest one")
    repetition_penalty: float = setting(1.0, TINY, 1e4, "weaken tokens of the prompt and output")
    presence_penalty: float = setting(0.0, -2, 2, "subtract for each token of the output")
    frequency_penalty: float = setting(0.0, -2, 2, "subtract for each time it is in the output")
    seed: int | None = setting(None, -(2**63), 2**63 - 1, "same seed, same tokens")
    n: int = setting(1, 1, 128, "continuations of each prompt; their seeds count up")
    max_tokens: int = setting(256, 1, 2**31, "new tokens at most")
    logprobs: int | None = setting(None, 0, 20, "report log-probabilities, of the top N too")
    prompt_logprobs: int | None = setting(None, 0, 20, "the same for the tokens of the prompt")
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    stop: tuple[str, ...] = ()  # end before any of these strings
    stop_token_ids: tuple[int, ...] = ()  # end at any of these tokens, besides EOS
    ignore_eos: bool = False  # run on past EOS, as benchmarks do

    def __post_init__(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), (int, float) if f.type is float else (int,)
            if f.metadata and not (value is None and f.default is None):
                low, high = f.metadata["low"], f.metadata["high"]
                if type(value) not in kind or not low <= value <= high:  # NaN is in no range
                    noun = "a number" if f.type is float else "an integer"
                    raise ValueError(f"{f.name} must be {noun} in {low}..{high}, is {value!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, items, kind in (
            ("stop", stop, str),
            ("stop_token_ids", self.stop_token_ids, int),
        ):
            if not isinstance(items, list | tuple) or not all(type(i) is kind for i in items):
                raise ValueError(f"{name} must be a list of {kind.__name__}, is {items!r}")
            object.__setattr__(self, name, tuple(items))  # frozen: only the constructor may
        if len(stop) > 16 or "" in stop:
            raise ValueError(f"stop takes up to 16 strings, none of them empty, is {stop!r}")
        if any(i < 0 for i in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, is {self.stop_token_ids!r}")
        bias = self.logit_bias.items() if isinstance(self.logit_bias, dict) else [(None, None)]
        for i, b in bias:
            if type(i) is not int or i < 0 or type(b) not in (int, float) or not -100 <= b <= 100:
                raise ValueError(f"logit_bias must map ids to -100..100, is {self.logit_bias!r}")
        if type(self.ignore_eos) is not bool:
            raise ValueError(f"ignore_eos must be true or false, is {self.ignore_eos!r}")

    def split(self) -> list["SamplingParams"]:
        """The parameters of each of the n continuations, whose seeds count up (and wrap around)."""
        if self.seed is None:
            return [self] * self.n
        seeds = [(self.seed + i + 2**63) % 2**64 - 2**63 for i in range(self.n)]
        return [replace(self, seed=seed) for seed in seeds]


class Token(NamedTuple):
    """A token, sampled or of a prompt. Log-probabilities are the model's, before any setting."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the likeliest, likeliest first


class Sequence:
    """One sequence being generated: its ids, its text so far, and why it ended.

    Attributes:
        ids: prompt and output.
        tokens: the output, with its log-probabilities.
        prompt_tokens: the prompt, where the parameters ask for its log-probabilities; nothing
            predicts the first token, so that one has none.
        text: what may be shown. A tail that could still turn out to be part of a stop string, or
            half a character, is held back, so `text` only ever grows.
        finish_reason: None while running; "stop" (EOS, stop token or string), "length", "abort"
            (by the scheduler) or "interrupted" (Ctrl-C).
        times: seconds on time.perf_counter's clock: when it was made, then at each token.
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
        context = max_seq_len or config.max_position_embeddings
        if not prompt_ids:
            raise ValueError("prompt is empty, and this tokenizer adds no BOS: give it some text")
        if len(prompt_ids) >= context:
            raise ValueError(
                f"prompt has {len(prompt_ids)} tokens, context is {context}: "
                "shorten it or raise --max-seq-len"
            )
        V = config.vocab_size
        ids = (*prompt_ids, *params.logit_bias)
        if unknown := [i for i in ids if type(i) is not int or not 0 <= i < V]:
            raise ValueError(
                f"token id {unknown[0]} is outside the model's vocabulary of "
                f"{V}: does the tokenizer belong to this model?"
            )
        self.ids, self.prompt_len = list(prompt_ids), len(prompt_ids)
        self.params, self.tokens, self.times = params, [], [time.perf_counter()]
        self.prompt_tokens = [Token(prompt_ids[0])] if params.prompt_logprobs is not None else []
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.text, self._held = "", ""  # _held: decoded, but perhaps the start of a stop string
        self.finish_reason: str | None = None
        self.max_len = min(context, len(prompt_ids) + params.max_tokens)
        self._ends = {*params.stop_token_ids, *(() if params.ignore_eos else config.eos_ids)}
        self._detokenizer = Detokenizer(tokenizer, prompt_ids) if tokenizer else None

    @property
    def prompt_ids(self) -> list[int]:
        return self.ids[: self.prompt_len]

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_len :]

    def ahead(self, guesses: list[int]) -> "History":
        """What the sampler would read of this sequence once these ids had been appended."""
        return History(self.params, self.seed, self.ids + guesses, self.prompt_len)

    def wanted(self, end: int) -> range:
        """Positions whose logits are needed of a forward that ends before `end`: the last known
        one's, those of guesses after it, and those that predict a prompt token to be scored."""
        first = len(self.prompt_tokens) - 1  # the position that predicts the next one to score
        last = min(end, len(self.ids)) - 1
        return range(min(first, last) if 0 <= first < self.prompt_len - 1 else last, end)

    def score_prompt(self, logits: Tensor, end: int) -> None:
        """Take the (T, V) logits of wanted(end) and note what they say of the prompt's tokens."""
        first = len(self.prompt_tokens) - 1
        # These logits begin where scoring stopped; not so where a preempted prompt runs again.
        if first == end - len(logits):
            ids = self.ids[first + 1 : min(end + 1, self.prompt_len)]
            counts = [self.params.prompt_logprobs] * len(ids)
            self.prompt_tokens += with_logprobs(logits[: len(ids)], ids, counts)

    def append(self, token: Token) -> None:
        """Take a sampled token: extend ids and text, and decide whether the sequence ends here."""
        assert self.finish_reason is None, "the sequence has ended"
        self.tokens.append(token)
        self.ids.append(token.id)
        self.times.append(time.perf_counter())
        if token.id in self._ends:
            self.finish("stop")
        elif self._detokenizer and self._show(self._detokenizer.push(token.id)):
            self.finish_reason = "stop"
        elif len(self.ids) >= self.max_len:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """End the sequence, showing what was held back (unless that completes a stop string).

        Does nothing where it has ended already, as when Ctrl-C falls on the last word.
        """
        if self.finish_reason:
            return
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
        # The longest tail of `held` that begins some stop string.
        starts = [stop[:n] for stop in stops for n in range(1, min(len(stop), len(held) + 1))]
        keep = max((len(start) for start in starts if held.endswith(start)), default=0)
        cut = min(found) if found else len(held) - keep
        self.text, self._held = self.text + held[:cut], held[cut:]
        return bool(found)


class History(NamedTuple):
    """All that the sampler reads of a sequence."""

    params: SamplingParams
    seed: int
    ids: list[int]
    prompt_len: int

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_len :]


# --- The sampler ----------------------------------------------------------------------------------


def sample(logits: Tensor, rows: list[Sequence]) -> list[Token]:
    """Choose the next token of each row by that row's own parameters and seed.

    Args:
        logits: (B, V), any float dtype.
        rows: B sequences; read, not changed.

    Returns:
        B tokens, with log-probabilities for the rows that ask for them.
    """
    if all(_is_argmax(row.params) for row in rows):
        ids = logits.argmax(-1)
    else:
        ids = draw(distribution(logits, rows), uniforms(rows))
    return with_logprobs(logits, ids.tolist(), [row.params.logprobs for row in rows])


def with_logprobs(logits: Tensor, ids: list[int], counts: list[int | None]) -> list[Token]:
    """Return B tokens with their log-probabilities under `logits`, (B, V).

    Args:
        counts: for each, how many of the likeliest tokens to add; None: no log-probabilities.
    """
    if all(n is None for n in counts):
        return [Token(i) for i in ids]
    logprobs = logits.float().log_softmax(-1)
    best, best_ids = (t.tolist() for t in logprobs.topk(min(20, logits.shape[-1])))
    tokens = []
    for b, (i, n) in enumerate(zip(ids, counts, strict=True)):
        top = tuple(zip(best_ids[b][:n], best[b][:n], strict=True))
        tokens.append(Token(i) if n is None else Token(i, logprobs[b, i].item(), top))
    return tokens


def distribution(logits: Tensor, rows: list[Sequence] | list[History]) -> Tensor:
    """The probabilities each row draws from, after every setting of its SamplingParams.

    Order: bias, penalties, temperature, top-k, top-p, min-p, as in Hugging Face. Temperature 0
    gives probability 1 to the likeliest token, so greedy needs no case of its own downstream.

    Args:
        logits: (B, V).
        rows: B sequences.

    Returns:
        (B, V) float32, each row summing to 1.
    """
    if all(_is_argmax(row.params) for row in rows):
        return _greedy(logits)
    logits = logits.float().clone()
    device = logits.device
    for row, scores in zip(rows, logits, strict=True):  # scores: (V,), a view to change
        p = row.params
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=device)
            scores[ids] += torch.tensor(list(p.logit_bias.values()), device=device)
        if p.repetition_penalty != 1:
            ids = torch.tensor(row.ids, device=device).unique()
            seen = scores[ids]
            scores[ids] = torch.where(
                seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty
            )
        if (p.presence_penalty or p.frequency_penalty) and row.output_ids:
            ids, counts = torch.tensor(row.output_ids, device=device).unique(return_counts=True)
            scores[ids] -= p.presence_penalty + p.frequency_penalty * counts

    def column(name: str) -> Tensor:  # (B, 1)
        values = [[float(getattr(row.params, name))] for row in rows]
        return torch.tensor(values, device=device)

    temperature = column("temperature")
    # The maximum is subtracted first, so a tiny temperature gives -inf, never inf - inf = NaN.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=1e-9)
    probs = scaled.softmax(-1)
    filtered = [b for b, row in enumerate(rows) if _filters(row.params)]
    if filtered:
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
    return torch.where(temperature == 0, _greedy(logits), probs)


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
    return torch.searchsorted(mass, target, right=True)[:, 0]


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


def uniforms(rows: list[Sequence] | list[History], stream: int = 0) -> Tensor:
    """Each row's random number for its next token: (B,) float64, on the CPU. `stream` is where in
    the seed's numbers the row's begin."""
    numbers = [uniform(r.seed, stream + len(r.ids) - r.prompt_len) for r in rows]
    return torch.tensor(numbers, dtype=torch.float64)


def _greedy(logits: Tensor) -> Tensor:
    zeros = torch.zeros(logits.shape, device=logits.device)
    return zeros.scatter_(1, logits.argmax(-1, keepdim=True), 1.0)


def _is_argmax(p: SamplingParams) -> bool:
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
    return p.temperature == 0 and not (penalties or p.logit_bias)


def _filters(p: SamplingParams) -> bool:
    return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
