"""Generate text: the sampler, the loop over one sequence, and the command line.

    python generate.py                                   the bundled model, at once
    python generate.py --checkpoint DIR --prompt "..."   any Hugging Face folder model.py supports

`sample` is the one sampler of the engine: the command line, the scheduler, speculation and the
server call it, so a seed means the same everywhere. Papers: Holtzman et al. 2019 (top-p,
arXiv:1904.09751), Nguyen et al. 2024 (min-p, arXiv:2407.01082), Keskar et al. 2019 (repetition
penalty, arXiv:1909.05858). Read: SamplingParams, Sequence, sample, distribution, draw, generate,
compile_model, main.
"""

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kv_cache import PagedCache, StaticCache
from measure import bytes_per_token, read_bandwidth
from model import DTYPES, Config, Transformer, progress, read_json
from quantize import MODES, load, pack_linears, quantize_model
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
        finish_reason: None while running; "stop" (EOS, stop token or string) or "length".
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

    def wanted(self, end: int) -> range:
        """Positions whose logits are needed of a forward that ends before `end`: the last one's,
        and those that predict a prompt token whose log-probability is asked for."""
        scored = len(self.prompt_tokens) - 1  # the position that predicts the next one to score
        return range(min(scored, end - 1) if 0 <= scored < self.prompt_len - 1 else end - 1, end)

    def score_prompt(self, logits: Tensor, end: int) -> None:
        """Take the (T, V) logits of wanted(end) and note what they say of the prompt's tokens."""
        scored = len(self.prompt_tokens) - 1
        if scored == end - len(logits):  # not where a preempted prompt is computed again
            ids = self.ids[scored + 1 : min(end + 1, self.prompt_len)]
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
        starts = [stop[:n] for stop in stops for n in range(1, len(stop))]
        keep = max((len(start) for start in starts if held.endswith(start)), default=0)
        cut = min(found) if found else len(held) - keep
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
    """
    if all(_is_argmax(row.params) for row in rows):
        ids = logits.argmax(-1)
    else:
        u = [uniform(row.seed, len(row.ids) - row.prompt_len) for row in rows]
        ids = draw(distribution(logits, rows), torch.tensor(u, device=logits.device))
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


def distribution(logits: Tensor, rows: list[Sequence]) -> Tensor:
    """The probabilities each row draws from, after every setting of its SamplingParams.

    Order: bias, penalties, temperature, top-k, top-p, min-p, as in Hugging Face. Temperature 0
    gives probability 1 to the likeliest token, so greedy needs no case of its own downstream.

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
    greedy = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(temperature == 0, greedy, probs)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first id at which it passes u.

    Args:
        probs: (B, V), sums near 1.
        u: (B,) uniform in [0, 1).

    Returns:
        (B,) int64 ids, each of non-zero probability.

    Example: probs [0.2, 0, 0.8], cumulative [0.2, 0.2, 1.0]: u = 0.1 -> 0, u = 0.2 -> 2
    """
    mass = probs.cumsum(-1)
    total = mass[:, -1:]
    # Rounded up, u * total could equal the total; then no id would pass it.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(u[:, None].to(mass.dtype) * total, below)
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


def _is_argmax(p: SamplingParams) -> bool:
    penalties = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
    return p.temperature == 0 and not (penalties or p.logit_bias)


def _filters(p: SamplingParams) -> bool:
    return p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


# --- The loop -------------------------------------------------------------------------------------

# Prompt tokens per forward. Smaller chunks skip more of the keys that causality hides, larger ones
# read the weights less often: on two Zen 5 cores 256 is 3 to 5 % faster than 128 or 512 (1b shape).
CHUNK = 256


@torch.no_grad()
def generate(
    model: Transformer, sequence: Sequence, cache: StaticCache | None = None, chunk: int = CHUNK
) -> Iterator[Token]:
    """Extend `sequence` until it ends, yielding each token as it is made.

    Prefill and decode are one loop: run the tokens the cache does not hold yet (first the whole
    prompt, then always one), sample from the last one's logits, append.

    Args:
        model: on any device.
        sequence: is appended to; read its text and finish_reason.
        cache: for a batch of one; None recomputes everything at each step (slow, and the oracle).
        chunk: prompt tokens per forward; bounds the memory of a long prompt.

    Raises:
        ValueError: the cache is too short for the sequence.
    """
    device = next(model.parameters()).device
    end = 0  # tokens whose keys and values the cache holds
    while sequence.finish_reason is None:
        ids = sequence.ids
        if cache is None:
            end, chunk = 0, len(ids)
        while end < len(ids):
            start, end = end, min(end + chunk, len(ids))
            part = torch.tensor([ids[start:end]], device=device)  # (1, T)
            positions = torch.arange(start, end, device=device)[None]
            select = torch.tensor([p - start for p in sequence.wanted(end)], device=device)
            logits = model(part, positions, cache.upto(end) if cache else None, select)
            sequence.score_prompt(logits, end)
        (token,) = sample(logits[-1:], [sequence])
        sequence.append(token)
        yield token


def compile_model(
    model: Transformer, cache: StaticCache | PagedCache | None = None, chunk: int = CHUNK
) -> Transformer:
    """Make a finished model fast: pack its weights for the CPU and compile it, in place.

    On a CPU one block is compiled and serves all layers, which differ only in their tensors: 5 s
    instead of 35 s for 22 layers as one graph, and no slower, as the guards of one big graph cost
    as much as entering 22 small ones. Lengths are symbolic, so nothing is compiled again later.
    On CUDA the whole model is one graph; with a static cache it is replayed as a CUDA graph for
    each length bucket.

    Args:
        cache: like the one that the model will run against; None: static, for one sequence. One
            sequence and many want their weights in memory differently, see quantize.py.
        chunk: prompt tokens per forward, to warm up with.

    Raises:
        ValueError: there is no C++ compiler, which torch.compile needs on a CPU.
    """
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    cache = cache or StaticCache(model.config, 1, 2 * chunk, dtype, device)
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # here: importing it takes 1 s

        try:
            get_cpp_compiler()
        except RuntimeError:
            message = "--compile needs a C++ compiler such as g++: install one or leave it out"
            raise ValueError(message) from None
        if torch.backends.mkldnn.is_available():
            pack_linears(model, one_row=cache.batch_size == 1)
        for part in (*model.layers, model.lm_head):
            part.compile(fullgraph=True)
    else:
        # A paged step is another one each time, in numbers that only the host sees: never replayed.
        replay = cache.batch_size is not None
        model.compile(fullgraph=True, mode="reduce-overhead" if replay else None)
    # The default of 8 graphs for one piece of code is few for several models in a process.
    torch._dynamo.config.recompile_limit = 64
    for length in progress([1, chunk], "compiling decode, prefill"):
        view, positions = cache.probe(length)
        with torch.no_grad():
            # The logits of one token, then of two, which stands for any number.
            select = torch.arange(min(length, 2), device=device)
            model(torch.zeros_like(positions), positions, view, select)
    return model


# --- The command line -----------------------------------------------------------------------------

BUNDLED = Path(__file__).resolve().parent / "checkpoints" / "shakespeare"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    args = parse_args(argv)
    try:
        return run(args)
    except BrokenPipeError:  # `| head` has read enough; spare the user Python's complaint at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        print(f"generate.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while loading; during generation it just ends the text
        return 130


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description="Generate text from a prompt.")
    add = parser.add_argument
    add("--checkpoint", type=Path, default=BUNDLED, help="Hugging Face folder (default: bundled)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="text to continue")
    prompt.add_argument(
        "--prompt-file", type=argparse.FileType(encoding="utf-8"), help="from a file; - is stdin"
    )
    prompt.add_argument("--chat", action="store_true", help="talk, with the chat template")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: as stored")
    add(
        "--kv-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="of the cache; auto: as --dtype",
    )
    add("--quantize", choices=MODES, help="fewer bits for the weights, on the fly; see quantize.py")
    add("--compile", action="store_true", help="slower to start, faster to run; see the README")
    add("--max-seq-len", type=int, help="prompt and output (default: what the model can)")
    add("--profile", type=Path, metavar="TRACE.JSON", help="write a Chrome trace")
    add("--json", action="store_true", help="print one JSON object per sample instead of text")
    text = "defaults: the checkpoint's generation_config.json, else as in parentheses"
    sampling = parser.add_argument_group("sampling", text)
    for f in fields(SamplingParams):
        if f.metadata:
            flags = ["--" + f.name.replace("_", "-")]
            flags += {"max_tokens": ["--max-new-tokens"], "n": ["--num-samples"]}.get(f.name, [])
            kind = float if f.type is float else int
            text = f"{f.metadata['help']} ({f.default})"
            sampling.add_argument(*flags, dest=f.name, type=kind, help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text")
    sampling.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID")
    sampling.add_argument("--logit-bias", type=_logit_bias, metavar='{"ID": BIAS}')
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    return parser.parse_args(argv)


def sampling_params(checkpoint: Path, **given: Any) -> SamplingParams:
    """Put what the user gave (None: nothing) over generation_config.json over our defaults."""
    file = checkpoint / "generation_config.json"
    stored = read_json(file) if file.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    chosen = {name: stored.get(name) for name in names}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


def run(args: argparse.Namespace) -> int:
    """Load, generate, and report: text on stdout, everything else on stderr."""
    if args.max_seq_len is not None and args.max_seq_len < 2:
        raise ValueError(f"max_seq_len must be at least 2, is {args.max_seq_len}")
    if args.chat and args.json:
        raise ValueError("--json prints samples of a prompt: it does not go with --chat")
    if args.profile:
        args.profile.open("a").close()  # fail now rather than after all the work
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams)}
    params = sampling_params(args.checkpoint, **given)
    device, tokenizer = pick_device(args.device), Tokenizer(args.checkpoint)
    model = load(args.checkpoint, device, DTYPES.get(args.dtype))
    if args.quantize:
        quantize_model(model, args.quantize)
    kv_dtype = torch.int8 if args.kv_dtype == "int8" else model.embed_tokens.weight.dtype
    if args.compile:
        compile_model(model, StaticCache(model.config, 1, 2 * CHUNK, kv_dtype, device))
    if (args.max_seq_len or 0) > (trained := model.config.max_position_embeddings):
        print(f"warning: this model was trained on up to {trained} tokens", file=sys.stderr)
    done: list[Sequence] = []

    def reply(prompt_ids: list[int], params: SamplingParams) -> Sequence:
        sequence = Sequence(prompt_ids, params, model.config, tokenizer, args.max_seq_len)
        done.append(sequence)
        stream(model, sequence, kv_dtype, show=not args.json)
        return sequence

    profiler = torch.profiler.profile() if args.profile else contextlib.nullcontext()
    with profiler:
        chat(reply, tokenizer, params) if args.chat else complete(reply, tokenizer, params, args)
    if args.profile:
        profiler.export_chrome_trace(str(args.profile))
    if any(sequence.output_ids for sequence in done):
        print(statistics(model, done), file=sys.stderr)
    return 130 if done and done[-1].finish_reason == "interrupted" else 0


Reply = Callable[[list[int], SamplingParams], Sequence]


def complete(
    reply: Reply, tokenizer: Tokenizer, params: SamplingParams, args: argparse.Namespace
) -> None:
    """Continue the prompt --n times."""
    prompt = args.prompt_file.read() if args.prompt_file else args.prompt
    for sample_params in params.split():
        sequence = reply(tokenizer.encode(prompt), sample_params)
        if args.json:
            result = {
                "prompt": prompt,
                "text": sequence.text,
                "token_ids": sequence.output_ids,
                "finish_reason": sequence.finish_reason,
                "timing": {
                    "token_s": [round(t - sequence.times[0], 6) for t in sequence.times[1:]]
                },
            }
            if params.logprobs is not None:
                result["logprobs"] = [token._asdict() for token in sequence.tokens]
            if params.prompt_logprobs is not None:
                result["prompt_logprobs"] = [token._asdict() for token in sequence.prompt_tokens]
            print(json.dumps(result), flush=True)
        if sequence.finish_reason == "interrupted":
            return


def chat(reply: Reply, tokenizer: Tokenizer, params: SamplingParams) -> None:
    """Talk turn by turn until the input ends. Ctrl-C cuts a reply short; at the prompt it ends."""
    messages: list[dict[str, str]] = []
    params = replace(params, stop=(*params.stop, *tokenizer.chat_stop))
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        messages.append({"role": "user", "content": line.strip()})
        sequence = reply(tokenizer.encode_chat(messages), params)
        messages.append({"role": "assistant", "content": sequence.text})


def stream(model: Transformer, sequence: Sequence, kv_dtype: torch.dtype, show: bool) -> None:
    """Generate, writing the text to stdout as it comes. Ctrl-C ends it with the text so far."""
    device, shown = model.embed_tokens.weight.device, 0
    cache = StaticCache(model.config, 1, sequence.max_len, kv_dtype, device)
    try:
        for _ in generate(model, sequence, cache):
            if show:
                print(sequence.text[shown:], end="", flush=True)
                shown = len(sequence.text)
    except KeyboardInterrupt:
        sequence.finish("interrupted")
    if show:
        print(sequence.text[shown:], flush=True)


def statistics(model: Transformer, done: list[Sequence]) -> str:
    """One line: time to first token, tokens/s, and how near that is to the memory's limit."""
    done = [sequence for sequence in done if sequence.output_ids]
    new = sum(len(sequence.output_ids) for sequence in done)
    prompts = sum(len(sequence.prompt_ids) for sequence in done)
    first = done[0].times[1] - done[0].times[0]
    line = f"{prompts} prompt + {new} new tokens, first one after {first:.3f} s"
    if decoded := new - len(done):
        rate = decoded / sum(sequence.times[-1] - sequence.times[1] for sequence in done)
        middle = (prompts + new // 2) // len(done)  # how much KV a step reads, on average
        speed = rate * bytes_per_token(model, middle) / 1e9
        limit = read_bandwidth(model.embed_tokens.weight.device)
        line += f", then {rate:.1f} tokens/s = {speed:.1f} GB/s"
        line += f", {speed / limit:.0%} of the {limit:.1f} GB/s this machine reads"
    return line


def pick_device(name: str) -> torch.device:
    """Turn --device into a device. Raises ValueError where this machine does not have it."""
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind, there in have.items() if there), "cpu")
    if not have.get(name, True):
        raise ValueError(f"--device {name}: there is none here: use --device cpu or auto")
    return torch.device(name)


def _logit_bias(text: str) -> dict[int, float]:
    return {int(i): bias for i, bias in dict(json.loads(text)).items()}


if __name__ == "__main__":
    sys.exit(main())
