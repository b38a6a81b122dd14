"""What a user may set, how it is checked, and how a program starts.

Each setting is a field of a dataclass, with a default, a help text and a range. The check of its
value and its command-line flag are made from them. SamplingParams is what a request may ask for.
EngineArgs is how an engine is built, from Python, the command line and the server alike. This file
does not know what the settings do. Read: SamplingParams, EngineArgs, check, launch.
"""

import os
import re
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, get_args

import torch

VERSION = "0.1.0"  # pyproject.toml reads it here
JSON = dict[str, Any]  # a JSON object

# --- Values from outside --------------------------------------------------------------------------


class SettingError(ValueError):
    """A setting has a wrong value. The message begins with the name of its field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field.partition("[")[0]  # "logit_bias[7]" belongs to logit_bias


# No model comes near the upper bounds. They keep a damaged number from filling the memory, from
# causing an endless loop and from overflowing float32.
RANGES = {int: (1, 2**24), int | None: (1, 2**24), float: (1e-15, 1e15)}


def check(name: str, value: Any, kind: Any, *bounds: float) -> Any:
    """Return `value` if it has the right type and is within its bounds.

    An int counts as a float, but True does not count as a number. NaN is outside all bounds, and
    None is within any.

    Args:
        kind: a type, or a union such as int | None.
        bounds: the least value and the greatest, which is 2**31 if it is left out. If both are left
            out, they are those of RANGES, if any.

    Raises:
        SettingError: the value has another type or is out of bounds.
    """
    limits = (*bounds, 2**31)[:2] if bounds else RANGES.get(kind)
    types = int | float if kind is float else kind
    is_kind = isinstance(value, types) and isinstance(value, bool) == (kind is bool)
    if is_kind and (value is None or not limits or limits[0] <= value <= limits[1]):
        return value
    span = " in {}..{}".format(*limits) if limits else ""
    raise SettingError(name, f"must be {getattr(kind, '__name__', kind)}{span}, is {value!r:.100}")


def supported(name: str, value: Any, *known: Any) -> Any:
    """Return `value` if it is among `known`; otherwise raise SettingError, which lists them.

    None, "", [] and {} mean that a setting is left out, so the list does not contain them.
    """
    if value not in known:
        names = ", ".join(sorted({str(each) for each in known if each or each is False}))
        way_out = f"supported: {names}" if names else "leave it out"
        raise SettingError(name, f"{value!r:.100} is not supported; {way_out}")
    return value


def setting(default: Any, text: str, *bounds: float, **flag: Any) -> Any:
    """Make a field of a settings dataclass.

    Args:
        text: the help text.
        bounds: the range of its values; see check.
        flag: further arguments for argparse, such as choices.
    """
    # With SUPPRESS the parser returns only what was given on the command line.
    flag |= dict(help=f"{text} ({default})" if default else text, default=SUPPRESS)
    return field(default=default, metadata=dict(range=bounds, flag=flag))


def check_fields(settings: Any) -> None:
    """Check a settings dataclass: types and ranges of numbers, bools and lists, and all choices.

    Raises:
        SettingError: a value has another type, or is not among those allowed.
    """
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.type in (*RANGES, bool, list):
            check(f.name, value, f.type, *f.metadata.get("range", ()))
        # Without choices, every value that has passed the check above is accepted.
        supported(f.name, value, *f.metadata.get("flag", {}).get("choices", [value]), f.default)


def check_items(name: str, values: Any, kind: Any, *each: Any) -> tuple:
    """Check a list and each of its values, or a dict and each of its keys; see check.

    Args:
        kind: the type of the list or dict.
        each: the type, and the bounds if any, of the values.
    """
    return tuple(check(name, value, *each) for value in check(name, values, kind))


def check_ids(name: str, ids: Iterable, vocab_size: int) -> None:
    """Raise SettingError if an id is not in the vocabulary. The error shows up to nine of those."""
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    if wrong:
        raise SettingError(
            name,
            f"has ids outside the model's vocabulary of {vocab_size}, {len(wrong)} in all: "
            f"{wrong[:9]!r:.200}",
        )


# --- What a request may set -----------------------------------------------------------------------


# Settings that `shaping` leaves out: temperature and structured_outputs, which the sampler handles
# separately, and those that do not change the distribution. A new setting counts as shaping unless
# it is added here, so the sampler cannot skip it by mistake.
NOT_SHAPING = {
    "temperature", "seed", "n", "max_tokens", "logprobs", "prompt_logprobs", "stop",
    "stop_token_ids", "ignore_eos", "structured_outputs",
}  # fmt: skip
FILTERS = {"top_k", "top_p", "min_p"}
PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose each token, and when to stop. Names and meanings are those of vLLM, but
    prompt_logprobs is a bool here.

    Raises:
        SettingError: a value has the wrong type, or is out of its range, NaN or infinite.
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
        None, "the same seed gives the same tokens; -1: another at each run", -(2**63), 2**63 - 1
    )
    n: int = setting(1, "continuations of each prompt, with consecutive seeds", 1, 128)
    max_tokens: int = setting(256, "generate at most this many tokens", 1)
    min_tokens: int = setting(
        0, "nothing ends the text before this many tokens, except structured output", 0
    )
    # Return log-probabilities of the sampled tokens, and of this many likeliest ones.
    logprobs: int | None = field(default=None, metadata=dict(range=(0, 20)))
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    prompt_logprobs: bool = False  # with logprobs, also those of the prompt; Engine only
    stop: tuple[str, ...] = setting((), "end before any of these texts", nargs="+", action="extend")
    stop_token_ids: tuple[int, ...] = setting(
        (), "end at any of these tokens (1024 at most)", nargs="+", action="extend"
    )
    ignore_eos: bool = setting(False, "continue past EOS, as benchmarks do", action="store_true")
    # One of json (a schema), regex, choice (a list), grammar (Lark, GBNF), as in vLLM; Engine only.
    structured_outputs: JSON | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        # Through vars, as the dataclass is frozen.
        vars(self).update(
            stop=check_items("stop", stop, str | list | tuple, str),
            seed=None if self.seed == -1 else self.seed,
        )
        if len(stop) > 16 or not all(0 < len(each) <= 256 for each in stop):
            raise SettingError("stop", "takes up to 16 strings of 1 to 256 characters")
        for name, kind in (("stop_token_ids", list | tuple), ("logit_bias", dict)):
            values = check_items(name, getattr(self, name), kind, int, 0)
            if len(values) > 1024:
                raise SettingError(name, f"has {len(values)} entries, but may have 1024 at most")
        for i, bias in self.logit_bias.items():
            check(f"logit_bias[{i}]", bias, float, -100, 100)

    # The settings that differ from their defaults, by what they do. A setting that is in none of
    # the sets above counts as an adjustment and as a filter, so the sampler cannot skip it.

    @property
    def shaping(self) -> set[str]:
        """Names of those that change the distribution."""
        defaults = vars(type(self)())
        changed = {name for name, value in defaults.items() if getattr(self, name) != value}
        return changed - NOT_SHAPING

    @property
    def adjustments(self) -> set[str]:
        """Names of those that change logits."""
        return self.shaping - FILTERS

    @property
    def filters(self) -> set[str]:
        """Names of those that drop tokens, but never the likeliest one."""
        return self.shaping - PENALTIES - {"logit_bias", "min_tokens"}

    @property
    def penalties(self) -> set[str]:
        """Names of those that look at the tokens so far."""
        return self.shaping & PENALTIES


# --- The engine's settings ------------------------------------------------------------------------

# Prompt tokens per forward. With larger chunks the weights are read less often: on a CPU 512 is up
# to 17 % faster than 256, and more than 512 gains little.
CHUNK = 512
DTYPES = dict(float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)
BUNDLED = Path(__file__).resolve().parent / "checkpoints/shakespeare"


@dataclass(frozen=True)
class Limits:
    """How much an engine runs at once, and in how much memory.

    Raises:
        SettingError: a value has the wrong type or is out of its range.
    """

    max_seq_len: int | None = setting(None, "tokens of prompt and output (default: the model's)", 2)
    max_num_seqs: int = setting(64, "sequences that run at once")
    max_num_batched_tokens: int | None = setting(None, "most tokens in a step (README, Serving)")
    # Unless that is set: prompt tokens in a step in which others decode; None: as in any step.
    small_chunk: int | None = None
    kv_memory: float = setting(
        0.5, "memory for the cache: bytes (4e9), or a share of the free memory if below 1"
    )
    kv_dtype: str = setting("auto", "keys and values; auto: as --dtype", choices=("auto", "int8"))
    block_size: int = setting(16, "tokens in a block of the cache")
    num_blocks: int | None = setting(None, "blocks in the cache, instead of --kv-memory")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EngineArgs(Limits):
    """Which model to run, and how."""

    checkpoint: Path = setting(BUNDLED, "a Hugging Face folder")
    device: str = setting("auto", "where to run", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = setting("auto", "auto: as in the checkpoint", choices=("auto", *DTYPES))
    quantize: str | None = setting(None, "round weights to fewer bits", choices=("int8", "int4"))
    group_size: int | None = setting(
        None,
        "input channels per scale, for int4 (default: the largest of 128, 64, 32 that fits)",
        -1,
    )
    attention: str = setting(
        "copy", "how to read the cache's blocks: copy, or flex on a GPU", choices=("copy", "flex")
    )
    compile: bool = setting(False, "start slower, run faster (README)", action="store_true")
    threads: int | None = setting(
        None,
        "CPU threads (default: $OMP_NUM_THREADS; else 1 for weights below 32 MB, or all cores)",
        1,
        1024,
    )
    draft_checkpoint: Path | None = setting(None, "a small model that guesses tokens")
    speculate: int | None = setting(None, "tokens to guess in a step (README)", 0, 64)


def add_flags(parser: Any, settings: type, **aliases: str) -> None:
    """Add a flag to a command line for each setting() of a dataclass.

    Args:
        aliases: field -> a second name of its flag.
    """
    for f in fields(settings):
        if "flag" in f.metadata:
            names = ["--" + f.name.replace("_", "-"), aliases.get(f.name)]
            kind = {} if f.type is bool else dict(type=(get_args(f.type) or [f.type])[0])
            parser.add_argument(*filter(None, names), **f.metadata["flag"], **kind)


def given(settings: type, args: Any) -> JSON:
    """Return the values of those fields of a dataclass that `args` has as attributes."""
    return {f.name: getattr(args, f.name) for f in fields(settings) if hasattr(args, f.name)}


# --- How a program starts -------------------------------------------------------------------------


class Ranks(NamedTuple):
    """This process among the ranks that share a model. By default it is the only one; see tp.py."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    shard: Callable | None = None  # for checkpoint.load_model: makes this rank's share of a model
    runner: type | None = None  # the Engine's runner
    follow: Callable = lambda model: 0  # runs this rank's share; called on all ranks but the first
    agree: Callable = lambda args: None  # checks that all ranks have the same settings: tp.agree


def launch(program: str, argv: list | None, parse: Callable, run: Callable, join: Callable) -> int:
    """Parse a command line, join the other ranks and run.

    An error is printed without a traceback. If all ranks have the same error, one rank of each
    machine prints it.

    Args:
        program: its name, for errors.
        parse: argv -> Namespace; the device is "auto" unless it has one.
        run: (Namespace, Ranks) -> exit status.
        join: device -> a context that gives Ranks; called if torchrun started several processes.

    Returns:
        The exit status: 2 after an error, 130 after Ctrl-C.
    """
    alone = os.getenv("RANK", "0") == "0" and os.getenv("WORLD_SIZE", "1") == "1"
    # Another rank prints the same, or stderr is closed.
    if os.getenv("LOCAL_RANK", "0") != "0" or not sys.stderr:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (tp.join gives it back)
    args = parse(argv)
    try:
        device = pick_device(getattr(args, "device", "auto"))
        with nullcontext(Ranks(device)) if alone else join(device) as ranks:
            ranks.agree(args)
            return run(args, ranks)
    except BrokenPipeError:  # as after `| head`
        sys.stdout = None  # or Python would print an error at exit
        return 0
    except KeyboardInterrupt:  # generate.stream handles Ctrl-C while text is generated
        return 130
    except (ValueError, OSError, ImportError) as error:
        say(f"{program}: error: {error}")
        return 2


def say(text: str, end: str = "\n") -> None:
    """Write to stderr at once what a program says beside its results."""
    print(text, end=end, file=sys.stderr, flush=True)


def progress(items: Collection, label: str) -> Iterator[Any]:
    """Yield from `items`, and show a progress bar after the first second if stderr is a terminal.

    Args:
        label: names the work in a word or two.
    """
    total = len(items)
    start = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        seconds = time.monotonic() - start
        if seconds > 1 and sys.stderr.isatty():
            bar = "#" * (24 * done // total)
            left = seconds * (total / done - 1)
            say(
                f"\r{label} [{bar:<24}] {done}/{total}  {left:.0f} s left ",
                end="\n" * (done == total),
            )


# --- This machine ---------------------------------------------------------------------------------


def pick_device(name: str) -> torch.device:
    """Turn --device into a device.

    Raises:
        ValueError: this machine has no such device.
    """
    best = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if name not in ("auto", "cpu", best.type):
        raise ValueError(f"--device {name}: this machine has none; use --device cpu or auto")
    return best if name == "auto" else torch.device(name)


# A model whose weights have fewer bytes than this runs on one thread. All threads of an operator
# wait for the slowest of them, and if another process uses its core, they wait long. With 20 MB of
# weights, one sequence made 424 tokens/s on one thread and 514 on two; while other processes kept
# both cores busy, 139 and 14.
SMALL = 2**25
ALL_THREADS = torch.get_num_threads()  # PyTorch's default: OMP_NUM_THREADS, or one for each core


def use_threads(threads: int | None, weights: int) -> None:
    """Set the number of CPU threads that compute, for the whole process. This replaces what
    torch.set_num_threads was given before.

    Args:
        threads: their number; None means OMP_NUM_THREADS if it is set, else one thread for small
            weights and all threads for others.
        weights: bytes of the model's weights, as loaded (before --quantize).
    """
    is_small = weights < SMALL and "OMP_NUM_THREADS" not in os.environ
    torch.set_num_threads(threads or (1 if is_small else ALL_THREADS))


class Waiting:
    """How the threads of an operator wait for each other: they spin, or they sleep.

    On an idle machine spinning is best, because the next operator comes within microseconds. But if
    another process takes a core, the threads that spin wait for one that does not run, and on two
    cores a step takes 3 to 7 times as long. PyTorch's OpenMP (libgomp) lets threads sleep soon once
    it has more of them than there are cores. So while other processes are busy, a second pool of
    threads is kept, which does nothing. The arithmetic is the same. Tokens/s of one sequence on two
    cores of a Zen 4, beside a process that never waits:
                                   idle     busy, spinning   busy, sleeping   idle, sleeping
        110m, float32, compiled     52            15               36               38
        135m, bfloat16              26             7               17               18
        135m, int4, compiled        80            23               48               45
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.before = others_seconds()
        self.idle_pool: Event | None = None  # the event that ends it, if there is one

    def adapt(self) -> None:
        """Look at the load twice a second, and choose. Called before each step."""
        now = time.monotonic()
        seconds = now - self.since
        if seconds < 0.5 or USER_DECIDES & os.environ.keys() or torch.get_num_threads() == 1:
            return
        others = others_seconds()
        wanted = torch.get_num_threads() + (others - self.before) / seconds  # cores
        self.since = now
        self.before = others
        # A process that never waits gets 0.67 of a core beside two threads that spin. In a virtual
        # machine, what its host takes now and then (steal) counts too; that is mostly less.
        is_busy = wanted > len(CORES) + 0.5
        if is_busy and not self.idle_pool:
            self.idle_pool = Event()
            Thread(target=keep_pool, args=(self.idle_pool,), daemon=True).start()
        elif self.idle_pool and not is_busy:
            self.idle_pool.set()
            self.idle_pool = None


def keep_pool(end: Event) -> None:
    """Make a pool of OpenMP's threads, which belongs to this thread, and keep it until `end`."""
    torch.zeros(2**20).add_(1)  # large enough for several threads
    end.wait()


def others_seconds(root: Path = Path("/")) -> float:
    """Return the CPU seconds that other processes have used so far on the cores that this process
    may use. Without Linux's /proc, return 0."""
    ticks = 0
    with suppress(OSError):
        for line in (root / "proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name in CORES:
                user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, fields)
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
    return 0.0


USER_DECIDES = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
CORES = {f"cpu{i}" for i in affinity(0)}
waiting = Waiting()

# The files with a container's memory limit and usage, in version 2 and 1 of control groups.
CGROUPS = {"memory.max": "memory.current", "memory/memory.limit_in_bytes": "memory.usage_in_bytes"}


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate.

    With CUDA it is the free memory of the GPU. Otherwise it is what the machine and the container
    have left, divided by the number of ranks on this machine.

    Args:
        root: where /proc and /sys are, for tests.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Systems without /proc: half of the physical memory.
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    # Cached files count as free, because the system drops them when memory is short.
    with suppress(OSError):
        found = re.findall(r"MemAvailable:\s+(\d+)", (root / "proc/meminfo").read_text())
        free = [int(found[0]) * 1024]  # it is in kB
    for limit, used in CGROUPS.items():
        file = root / "sys/fs/cgroup" / limit
        with suppress(OSError, ValueError):  # no such file; or "max", no limit
            cached = re.findall(r"active_file (\d+)", file.with_name("memory.stat").read_text())
            taken = int(file.with_name(used).read_text()) - sum(map(int, cached[-2:]))
            free.append(max(0, int(file.read_text()) - taken))
    return min(free) // int(os.getenv("LOCAL_WORLD_SIZE", "1"))
