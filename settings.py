"""What a user may set, how it is checked, and how a program starts.

A setting is a field of a dataclass, with its default, its help and its range. From that come the
check, which names the field in its error, and the flag of the command line. SamplingParams is what
a request may ask for; EngineArgs is how an engine is built, for Python, the command line and the
server alike. What the settings do is elsewhere. Read: SamplingParams, EngineArgs, check, launch.
"""

import contextlib
import os
import re
import sys
import time
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

VERSION = "0.1.0"  # pyproject.toml reads it here
JSON = dict[str, Any]  # an object, as read

# --- Values from outside --------------------------------------------------------------------------


class SettingError(ValueError):
    """A setting that cannot be. Its text begins with the name of the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field.partition("[")[0]  # of "logit_bias[7]", all of it


# No model is near these bounds. A garbled number must not fill the memory, run for ever, or make
# float32 overflow.
RANGES = {int: (1, 2**24), int | None: (1, 2**24), float: (1e-15, 1e15)}


def check(name: str, value: Any, kind: Any, *bounds: float) -> Any:
    """Return `value` if it is of this type and within the bounds.

    An int will do for a float, True is not a number, NaN is in no range, None is in any.

    Args:
        bounds: least and most. Without the second, 2**31; without both, RANGES of the type.

    Raises:
        SettingError: it is not.
    """
    bounds = (*bounds, 2**31)[:2] if bounds else RANGES.get(kind)
    right = isinstance(value, int | float if kind is float else kind)
    right = right and isinstance(value, bool) == (kind is bool)
    if right and (value is None or not bounds or bounds[0] <= value <= bounds[1]):
        return value
    span = " in {}..{}".format(*bounds) if bounds else ""
    raise SettingError(name, f"must be {getattr(kind, '__name__', kind)}{span}, is {value!r:.100}")


def supported(name: str, value: Any, *known: Any) -> Any:
    """Return `value` if it is one of those we run; else raise SettingError with all of them."""
    if value not in known:
        names = ", ".join(map(str, known)) or "nothing"
        raise SettingError(name, f"{value!r:.100} is not supported; supported: {names}")
    return value


def setting(default: Any, text: str, *bounds: float, **flag: Any) -> Any:
    """A field of a dataclass of settings.

    Args:
        text: its help.
        bounds: its range; see check.
        flag: what else argparse is to know, such as choices.
    """
    # SUPPRESS: only what is given comes out of the parser.
    flag |= dict(help=f"{text} ({default})" if default else text, default=SUPPRESS)
    return field(default=default, metadata=dict(range=bounds, flag=flag))


def check_fields(settings: Any) -> None:
    """Check each number, flag and list of a dataclass: by its type, and by its own range or choices
    where it is a setting(). Raises SettingError."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.type in (*RANGES, bool, list):
            check(f.name, value, f.type, *f.metadata.get("range", ()))
        # Without choices, any value is one.
        supported(f.name, value, *f.metadata.get("flag", {}).get("choices", [value]), f.default)


def check_items(name: str, values: Any, kind: Any, *each: Any) -> tuple:
    """Check a list, or the keys of a dict, and each of its values; see check."""
    return tuple(check(name, value, *each) for value in check(name, values, kind))


def check_ids(name: str, ids: Iterable, vocab_size: int) -> None:
    """Raise SettingError if some of these are no ids of the vocabulary; it shows a few of them."""
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    if wrong:
        raise SettingError(
            name,
            f"has {wrong[:9]!r:.200}: {len(wrong)} outside the model's vocabulary of {vocab_size}",
        )


# --- What a request may set -----------------------------------------------------------------------


# Settings that neither change logits nor leave tokens out. The sampler takes no short cut past any
# other: a new one has its effect wherever it is read.
ASIDE = {"temperature", "seed", "n", "max_tokens", "logprobs", "prompt_logprobs", "stop",
         "stop_token_ids", "ignore_eos", "structured_outputs"}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token, and when to stop. Names and meanings are those of vLLM.

    Raises:
        SettingError: a value of the wrong type, out of its range, NaN or infinite.
    """

    temperature: float = setting(1.0, "0 takes the likeliest token", 0, 1e4)
    top_k: int = setting(0, "keep the k likeliest tokens; 0 or -1: all", -1)
    top_p: float = setting(1.0, "keep the likeliest tokens that have this mass", 1e-6, 1)
    min_p: float = setting(0.0, "drop tokens below this share of the likeliest one", 0, 1)
    repetition_penalty: float = setting(1.0, "weaken tokens of the prompt and output", 1e-6, 1e4)
    presence_penalty: float = setting(0.0, "subtract for each token of the output", -2, 2)
    frequency_penalty: float = setting(0.0, "subtract for each time it is in the output", -2, 2)
    seed: int | None = setting(None, "same seed, same tokens", -(2**63), 2**63 - 1)
    n: int = setting(1, "continuations of each prompt; their seeds count up", 1, 128)
    max_tokens: int = setting(256, "new tokens at most", 1)
    min_tokens: int = setting(0, "no EOS or stop token before so many; a structure may end", 0)
    logprobs: int | None = field(default=None, metadata=dict(range=(0, 20)))  # of the top N, too
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    prompt_logprobs: bool = False  # where logprobs is given, of the prompt too; Engine only
    stop: tuple[str, ...] = setting((), "end before any of these texts", nargs="+", action="extend")
    stop_token_ids: tuple[int, ...] = setting(
        (), "end at these: 1024 at most", nargs="+", action="extend"
    )
    ignore_eos: bool = setting(False, "run on past EOS, as benchmarks do", action="store_true")
    # One of json (a schema), regex, choice (a list), grammar (Lark, GBNF), as vLLM; Engine only.
    structured_outputs: JSON | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        # Frozen: only the constructor may.
        vars(self).update(stop=check_items("stop", stop, list | tuple, str))
        if len(stop) > 16 or not all(0 < len(each) <= 256 for each in stop):
            raise SettingError("stop", "takes up to 16 strings of 1 to 256 characters")
        for name, kind in (("stop_token_ids", list | tuple), ("logit_bias", dict)):
            values = check_items(name, getattr(self, name), kind, int, 0)
            if len(values) > 1024:
                raise SettingError(name, f"has {len(values)} entries, of 1024 at most")
        for i, bias in self.logit_bias.items():
            check(f"logit_bias[{i}]", bias, float, -100, 100)

    @property
    def shaping(self) -> set[str]:
        """The names of the settings that are not as by default, of those that shape what is drawn
        from."""
        plain = vars(type(self)())
        return {name for name, value in plain.items() if getattr(self, name) != value} - ASIDE


# --- The engine's settings ------------------------------------------------------------------------

# Prompt tokens per forward. Larger chunks read the weights less often: on a Sapphire Rapids 512 are
# faster than 256 by 3 to 9 % for one long prompt, and by 1 to 17 % for 8 or 32 prompts of 64. More
# than 512 gain little.
CHUNK = 512
DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)
BUNDLED = Path(__file__).resolve().parent / "checkpoints/shakespeare"


@dataclass(frozen=True)
class Limits:
    """How much an engine runs at once, and in how much memory.

    Raises:
        SettingError: a value of the wrong type, or out of its range.
    """

    max_seq_len: int | None = setting(None, "prompt and output (default: what the model can)", 2)
    max_num_seqs: int = setting(64, "sequences running at once")
    max_num_batched_tokens: int | None = setting(None, "tokens in a step (README: Serving)")
    kv_memory: float = setting(0.5, "bytes (4e9), or below 1 a share of the free memory")
    kv_dtype: str = setting("auto", "of the cache; auto: as dtype", choices=("auto", "int8"))
    block_size: int = setting(16, "tokens in a block of the cache")
    num_blocks: int | None = setting(None, "blocks in the cache, in place of --kv-memory")
    __post_init__ = check_fields


@dataclass(frozen=True)
class EngineArgs(Limits):
    """What to run, and on what."""

    checkpoint: Path = setting(BUNDLED, "Hugging Face folder")
    device: str = setting("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = setting("auto", "auto: as stored", choices=("auto", *DTYPES))
    quantize: str | None = setting(None, "fewer bits, on the fly", choices=("int8", "int4"))
    group_size: int = setting(128, "input channels per scale, for int4", -1)
    attention: str = setting("copy", "of blocks: copy, or flex (GPU)", choices=("copy", "flex"))
    compile: bool = setting(False, "start slower, run faster (see README)", action="store_true")
    threads: int | None = setting(
        None, "of the CPU (default: $OMP_NUM_THREADS; else 1 for weights below 32 MB, "
        "as many as there are cores for others)", 1, 1024
    )  # fmt: skip
    draft_checkpoint: Path | None = setting(None, "guess tokens with a small model")
    speculate: int | None = setting(None, "tokens to guess in a step; see the README", 0, 64)


def add_flags(parser: ArgumentParser, settings: type, **aliases: str) -> None:
    """Give a command line a flag for each setting() of a dataclass.

    Args:
        aliases: field -> another name of its flag.
    """
    for f in fields(settings):
        if "flag" in f.metadata:
            names = ["--" + f.name.replace("_", "-"), aliases.get(f.name)]
            kind = {} if f.type is bool else dict(type=(get_args(f.type) or [f.type])[0])
            parser.add_argument(*filter(None, names), **f.metadata["flag"], **kind)


def given(settings: type, args: Any) -> JSON:
    """Of a dataclass's fields, those that `args` has: what the command line gave, or all."""
    return {f.name: getattr(args, f.name) for f in fields(settings) if hasattr(args, f.name)}


# --- How a program starts -------------------------------------------------------------------------


class Ranks(NamedTuple):
    """This process's place among those that share a model: alone, unless tp.py says otherwise."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    shard: Callable | None = None  # what checkpoint.load_model is to prepare
    runner: type | None = None  # the Engine's
    follow: Callable | None = None  # what all but the first do with their share
    agree: Callable | None = None  # checks that all have been given the same; see tp.agree


def launch(program: str, argv: list | None, parse: Callable, run: Callable, join: Callable) -> int:
    """Parse a command line, join the other ranks, run, and return the exit status: 2 after an
    error, which is printed in one line, by one rank of each machine if all have it; 130 after
    Ctrl-C.

    Args:
        parse: argv -> Namespace, with `device`, or without: "auto".
        run: that and Ranks -> exit status.
        join: device -> a context that gives Ranks; called where torchrun started several processes.
    """
    alone = os.environ.get("RANK", "0") == "0" and os.environ.get("WORLD_SIZE", "1") == "1"
    # What this rank would print is said by another, or stderr is closed.
    if os.environ.get("LOCAL_RANK", "0") != "0" or not sys.stderr:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (tp.join gives it back)
    args = parse(argv)
    try:
        device = pick_device(getattr(args, "device", "auto"))
        with contextlib.nullcontext(Ranks(device)) if alone else join(device) as ranks:
            if ranks.agree:
                ranks.agree(args)
            return run(args, ranks)
    except BrokenPipeError:  # `| head` has read enough; spare the user Python's complaint at exit
        sys.stdout = None
        return 0
    except KeyboardInterrupt:  # while loading; during generation it just ends the text
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2


def progress(items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
    """Yield from `items`, with a bar on stderr, where that is a terminal, once more than a second
    has passed.

    Args:
        items: what to go through; needs a len() unless `total` is given.
        label: what is going on, in a word or two.
    """
    total = len(items) if total is None else total
    start = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        spent = time.monotonic() - start
        if spent > 1 and sys.stderr.isatty():
            bar = "#" * (24 * done // total)
            print(
                f"\r{label} [{bar:<24}] {done}/{total}  {spent * (total / done - 1):.0f} s left ",
                end="\n" * (done == total), file=sys.stderr, flush=True,
            )  # fmt: skip


# --- This machine ---------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """Turn --device into a device. Raises ValueError where this machine does not have it."""
    there = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", there.type):
        raise ValueError(f"--device {name}: there is none here: use --device cpu or auto")
    return there if name == "auto" else torch.device(name)


# Weights of fewer bytes run on one thread. The threads of an operator wait for the slowest of them:
# one whose core is taken away keeps the others waiting. One sequence in float32 on two cores of a
# Sapphire Rapids made 424 tokens/s on one thread and 514 on two with 20 MB of weights, 155 and 243
# with 63 MB; while four other processes kept both cores busy, 139 and 14, 48 and 10.
SMALL = 2**25
ALL_THREADS = torch.get_num_threads()  # as PyTorch began: by the cores, or by OMP_NUM_THREADS


def use_threads(threads: int | None, weights: int) -> None:
    """Choose how many threads of the CPU compute, for the whole process. What was given to
    torch.set_num_threads before is replaced: `threads` is the way to choose.

    Args:
        threads: as many as these; None: OMP_NUM_THREADS where it is set, else one for small weights
            and all for others.
        weights: bytes that a forward reads.
    """
    is_small = weights < SMALL and "OMP_NUM_THREADS" not in os.environ
    torch.set_num_threads(threads or (1 if is_small else ALL_THREADS))


# Where a container's control group, version 2 or 1, has its limit, and what is used of it.
CGROUPS = {"memory.max": "memory.current", "memory/memory.limit_in_bytes": "memory.usage_in_bytes"}


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that this process could still allocate: on CUDA of its GPU's memory, else its share,
    among the ranks that run here, of what the machine and the container have left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Where nothing says more: half of what is there.
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    # What is cached of files can be given back, so it counts as free.
    with contextlib.suppress(OSError):
        kilobytes = (root / "proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
        free = [int(kilobytes) * 1024]
    for limit, used in CGROUPS.items():
        file = root / "sys/fs/cgroup" / limit
        with contextlib.suppress(OSError, ValueError):  # not there; "max", which is no limit
            cached = re.findall(r"active_file (\d+)", file.with_name("memory.stat").read_text())
            taken = int(file.with_name(used).read_text()) - sum(map(int, cached[-2:]))
            free.append(max(0, int(file.read_text()) - taken))
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
