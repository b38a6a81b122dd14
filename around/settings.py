"""What a user may set, and how values from outside are checked.

Each setting is a field of a dataclass, with a default, a help text and a range. The check of its
value and its command-line flag are made from them. SamplingParams is what a request may ask for.
EngineArgs is how an engine is built, from Python, the command line and the server alike. This file
does not know what the settings do. Read: SamplingParams, EngineArgs, check.
"""

import json
import os
from argparse import SUPPRESS
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch

VERSION = "0.1.0"  # pyproject.toml reads it here
JSON = dict[str, Any]  # a JSON object

# --- Values from outside --------------------------------------------------------------------------


class SettingError(ValueError):
    """A setting has a wrong value. The message begins with the name of its field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field.partition("[")[0]  # "logit_bias[7]" belongs to logit_bias


# The bounds of a number for which check() is given none. No model comes near the upper ones. They
# keep a damaged number from filling the memory, from causing an endless loop and from overflowing
# float32.
RANGES = {
    int: (1, 2**24), int | None: (1, 2**24), float: (1e-15, 1e15), float | None: (1e-15, 1e15)
}  # fmt: skip


def check(name: str, value: Any, kind: Any, least: float | None = None, most: float = 2**31) -> Any:
    """Return `value` if it has the right type and is within its bounds.

    An int counts as a float, but True does not count as a number. NaN is outside all bounds, and
    None is within any.

    Args:
        kind: a type, or a union such as int | None.
        least, most: the bounds. Without `least`, they are those of RANGES, if any.

    Raises:
        SettingError: the value has another type or is out of bounds.
    """
    if least is None and kind in RANGES:
        least, most = RANGES[kind]
    types = (int | kind) if isinstance(1.0, kind) else kind  # where a float may be, so may an int
    is_right = isinstance(value, types) and (kind is bool or type(value) is not bool)
    if is_right and (value is None or least is None or least <= value <= most):
        return value
    span = "" if least is None else f" in {least}..{most}"
    raise SettingError(name, f"must be {getattr(kind, '__name__', kind)}{span}, is {value!r:.100}")


def supported(name: str, value: Any, *known: Any) -> Any:
    """Return `value` if it is among `known`; otherwise raise SettingError, which lists them.

    None, "", [] and {} mean that a setting is left out, so the list does not contain them.
    """
    if value not in known:
        names = sorted({str(each) for each in known if each or each == 0})
        way_out = f"supported: {', '.join(names)}" if names else "leave it out"
        raise SettingError(name, f"{value!r:.100} is not supported; {way_out}")
    return value


def choose(name: str, value: Any, table: dict) -> Any:
    """Return the entry of `table` under `value`; raise SettingError if there is none."""
    return table[supported(name, value, *table)]


def setting(default: Any, text: str, *bounds: float, **flag: Any) -> Any:
    """Make a field of a settings dataclass.

    Args:
        text: the help text.
        bounds: the range of its values; see check.
        flag: further arguments for argparse, such as choices.
    """
    # With SUPPRESS the parser returns only what was given on the command line. It formats the help,
    # so a % in a path is doubled.
    if default:
        text = f"{text} ({default})"
    flag |= dict(help=text.replace("%", "%%"), default=SUPPRESS)
    return field(default=default, metadata=dict(range=bounds, flag=flag))


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass, one of this file's or model.Config: types and ranges of
    numbers, bools and lists, and all choices. Other types are not checked here.

    Raises:
        SettingError: a value has another type, or is not among those allowed.
    """
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.type in (*RANGES, bool, list):
            check(f.name, value, f.type, *f.metadata.get("range", ()))
        choices = f.metadata.get("flag", {}).get("choices")
        if choices:
            supported(f.name, value, *choices, f.default)  # a default of None is not in choices


def check_items(name: str, values: Any, kind: Any, *each: Any, max_len: int = 1024) -> tuple:
    """Check a list and each of its values, or a dict and each of its keys; see check.

    Args:
        kind: the type of the list or dict.
        each: the type of the values (of a dict, the keys), and their bounds if any.
        max_len: how many there may be.

    Returns:
        The values (of a dict, the keys).
    """
    if len(check(name, values, kind)) > max_len:
        raise SettingError(name, f"has {len(values)} entries, but may have {max_len} at most")
    return tuple(check(name, value, *each) for value in values)


def check_ids(name: str, ids: Iterable, vocab_size: int) -> None:
    """Raise SettingError if an id is not in the vocabulary. The error shows up to nine of those."""
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    if wrong:
        raise SettingError(
            name, f"has ids that are not int or not in the vocabulary of {vocab_size}: {wrong[:9]}"
        )


class InputError(ValueError):
    """A checkpoint, or something else from outside, cannot be used: a prompt file, a chat template,
    the other ranks. The message is for the user."""


# Follows the name of a file that a parser reads.
AGAIN = " (if it is damaged, download it again, or git lfs pull)"


@contextmanager
def blame(what: Path | str) -> Iterator[None]:
    """Turn any exception raised inside into an InputError that begins with `what`.

    For a damaged file, parsers raise exceptions of many kinds.

    Args:
        what: a file or a folder that is read, or a word for what is done.
    """
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, ValueError | OSError) else repr(error)
        raise InputError(f"{what}: {text}") from error


def read_json(path: Path) -> JSON:
    """Read a JSON object."""
    with blame(f"{path}{AGAIN}"):
        return check("its content", json.loads(path.read_text(encoding="utf-8")), dict)


def read_optional(path: Path) -> JSON:
    """Read a JSON object without its nulls; return {} if the file does not exist. A link to nowhere
    is an error, as where a cache of downloads has lost a file."""
    return without_nulls(read_json(path)) if os.path.lexists(path) else {}


def without_nulls(raw: JSON) -> JSON:
    """Drop the names whose value is null, which means that a setting is left out."""
    return {name: value for name, value in raw.items() if value is not None}


# --- What a request may set -----------------------------------------------------------------------


# The settings that shape the distribution, and that a checkpoint may suggest.
SHAPING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token, and when to stop. Names, meanings and defaults are vLLM's, except
    that max_tokens is 256 here and 16 in vLLM.

    Raises:
        SettingError: a value has the wrong type, or is out of its range, NaN or infinite. But
            structured_outputs is checked later; see structured.make_matcher.
    """

    temperature: float = setting(1.0, "0 always takes the likeliest token", 0, 1e4)
    top_k: int = setting(0, "keep the k likeliest tokens; 0 or -1: all", -1)
    top_p: float = setting(1.0, "keep the likeliest tokens that add up to this mass", 1e-6, 1)
    min_p: float = setting(0.0, "drop tokens below this share of the likeliest one", 0, 1)
    repetition_penalty: float = setting(
        1.0, "above 1, make tokens of the prompt and output less likely", 1e-6, 1e4
    )
    presence_penalty: float = setting(0.0, "subtract this from an output token's logit", -2, 2)
    frequency_penalty: float = setting(0.0, "subtract this for each time a token was output", -2, 2)
    seed: int | None = setting(
        None, "the same seed gives the same tokens; -1: a random seed", -(2**63), 2**63 - 1
    )
    n: int = setting(1, "continuations of each prompt, with consecutive seeds", 1, 128)
    max_tokens: int = setting(256, "generate at most this many tokens", 1)
    min_tokens: int = setting(
        0, "no EOS, stop token or stop string ends the text earlier, but a structure does", 0
    )
    # Return log-probabilities of the sampled tokens, or of the prompt's, and of this many likeliest
    # ones in each place; prompt_logprobs: not in generate.py.
    logprobs: int | None = field(default=None, metadata=dict(range=(0, 20)))
    prompt_logprobs: int | None = field(default=None, metadata=dict(range=(0, 20)))
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    stop: tuple[str, ...] = setting((), "end before any of these texts", nargs="+", action="extend")
    stop_token_ids: tuple[int, ...] = setting(
        (), "end at any of these tokens (1024 at most)", nargs="+", action="extend"
    )
    ignore_eos: bool = setting(False, "continue past EOS, as benchmarks do", action="store_true")
    # One of json (a schema), regex, choice (a list), grammar (Lark, GBNF), as in vLLM; not in
    # generate.py.
    structured_outputs: JSON | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        # Through vars, as the dataclass is frozen. None is vLLM's way to leave a field out.
        vars(self).update(
            # `stop` is a list or tuple here. The type includes str only for the text of the error.
            stop=check_items(
                "stop", () if stop is None else stop, str | list | tuple, str, max_len=16
            ),
            stop_token_ids=() if self.stop_token_ids is None else self.stop_token_ids,
            logit_bias=self.logit_bias or {},
            seed=None if self.seed == -1 else self.seed,
        )
        if not all(0 < len(each) <= 256 for each in self.stop):
            raise SettingError("stop", "takes strings of 1 to 256 characters")
        if self.min_tokens > self.max_tokens:
            raise SettingError(
                "min_tokens", f"{self.min_tokens} is above max_tokens, {self.max_tokens}"
            )
        check_items("stop_token_ids", self.stop_token_ids, list | tuple, int, 0)
        check_items("logit_bias[id]", self.logit_bias, dict, int, 0)
        for i, bias in self.logit_bias.items():
            check(f"logit_bias[{i}]", bias, float, -100, 100)

    def with_stop(self, more: tuple[str, ...]) -> "SamplingParams":
        """Return these settings with more stop strings, as a chat template needs them. The user's
        own come first. If there are more than 16 in all, the last ones are dropped. A structure
        gets none: it ends by itself, and may contain them."""
        if self.structured_outputs:
            return self
        return replace(self, stop=(self.stop + more)[:16])

    @property
    def filters(self) -> bool:
        """Whether tokens are dropped, but never the likeliest one."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens so far."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed."""
        return self.penalizes or bool(self.logit_bias) or self.min_tokens > 0


# --- The engine's settings ------------------------------------------------------------------------

# Prompt tokens per forward. With larger chunks the weights are read less often: on a CPU 512 is up
# to 17 % faster than 256, and more than 512 gains little.
CHUNK = 512
DTYPES = dict(
    auto=None, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16
)  # auto: as in the checkpoint
BUNDLED = Path(__file__).resolve().parents[1] / "checkpoints/shakespeare"


@dataclass(frozen=True)
class Limits:
    """How much an engine runs at once, and in how much memory.

    Raises:
        SettingError: a value has the wrong type or is out of its range.
    """

    max_seq_len: int | None = setting(None, "tokens of prompt and output (default: the model's)", 2)
    max_num_seqs: int = setting(64, "sequences that run at once")
    max_num_batched_tokens: int | None = setting(None, "most tokens in a step (docs/serving.md)")
    # The most prompt tokens in a step in which other sequences decode; None: as many as in any
    # step. It is not read if max_num_batched_tokens is set.
    small_chunk: int | None = None
    kv_dtype: str = setting("auto", "keys and values; auto: as --dtype", choices=("auto", "int8"))
    kv_memory: float = setting(
        0.5, "memory for the cache: bytes (4e9), or a share of the free memory if below 1"
    )
    block_size: int = setting(16, "tokens in a block of the cache")
    num_blocks: int | None = setting(None, "blocks in the cache, instead of --kv-memory")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EngineArgs(Limits):
    """Which model to run, and how."""

    plain: bool = setting(
        False, "run the root's code alone, without around/fast", action="store_true"
    )
    checkpoint: Path = setting(BUNDLED, "a Hugging Face folder")
    device: str = setting("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = setting("auto", "auto: as in the checkpoint", choices=[*DTYPES])
    quantize: str | None = setting(None, "round weights to fewer bits", choices=("int8", "int4"))
    compile: bool = setting(
        False, "start slower, run faster (docs/quantisation.md)", action="store_true"
    )
    threads: int | None = setting(
        None,
        "CPU threads (default: $OMP_NUM_THREADS; else 1 for weights below 32 MB, or one a core)",
        1,
        1024,
    )
    draft_checkpoint: Path | None = setting(None, "a small model that guesses tokens")
    speculate: int | None = setting(None, "tokens to guess in a step (docs/quantisation.md)", 0, 64)


def add_flags(parser: Any, settings: type, **aliases: str) -> None:
    """Add a flag to a command line for each setting() of a dataclass.

    Args:
        aliases: field -> a second name of its flag.
    """
    for f in fields(settings):
        if "flag" in f.metadata:
            names = ["--" + f.name.replace("_", "-")]
            if f.name in aliases:
                names.append(aliases[f.name])
            flag = dict(f.metadata["flag"])
            if f.type is not bool:
                # The type in a union or a tuple: int of int | None, str of tuple[str, ...].
                flag["type"] = (get_args(f.type) or [f.type])[0]
            parser.add_argument(*names, **flag)


def given(settings: type, args: Any) -> JSON:
    """Return the values of those fields of a dataclass that `args` has as attributes."""
    return {f.name: getattr(args, f.name) for f in fields(settings) if hasattr(args, f.name)}
