"""How each program begins: from a command line and torchrun's variables to an engine.

Techniques, such as quantisation and speculation, are imported only when they are needed, so on a
CPU a plain model runs without their files. Read: launch, load_models, make_engine.
"""

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from around import settings
from around.folder import Tokenizer, load_model, named_tensors
from around.machine import Ranks, pick_device, say, use_threads
from around.settings import JSON, EngineArgs
from around.start.memory import affordable_blocks
from model import Transformer
from paged import Runner
from scheduler import Engine, Proposer

# --- Launching ------------------------------------------------------------------------------------


def launch(program: str, argv: list | None, parse: Callable, run: Callable) -> int:
    """Parse a command line, join the other ranks and run.

    An error that a user can mend is printed without a traceback. If all ranks have the same error,
    one rank of each machine prints it.

    Args:
        program: its name, for errors.
        parse: argv -> Namespace. If that has no `device`, the device is "auto".
        run: (Namespace, Ranks) -> exit status.

    Returns:
        What `run` returns; or 2 after an error, 130 after Ctrl-C, 0 if stdout was closed early.
        SIGTERM ends the process with 143.
    """
    # Only the first rank of each machine writes to stderr. The others get theirs back in
    # ranks.join, after an error that may be one rank's alone. Where stderr is closed, it is None.
    if os.getenv("LOCAL_RANK", "0") != "0" or not sys.stderr:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            # A terminal may not be UTF-8; and the line ends of a prompt are a part of it.
            stream.reconfigure(errors="replace", newline="")
    args = parse(argv)
    # A container's first process ignores SIGTERM where it has no handler: also while it loads.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        device = pick_device(getattr(args, "device", "auto"))
        # Either variable can say that there are other ranks. If one is missing, join says so.
        if os.getenv("RANK", "0") == "0" and os.getenv("WORLD_SIZE", "1") == "1":
            return run(args, Ranks(device))
        from around.start.ranks import join

        with join(device) as ranks:
            return run(args, ranks)
    except BrokenPipeError:  # as after `| head`
        sys.stdout = None  # or Python would print an error at exit
        return 0
    except KeyboardInterrupt:  # command.stream handles Ctrl-C while text is generated
        return 130
    except (ValueError, OSError, ImportError) as error:
        say(f"{program}: error: {error}")
        return 2


# --- Loading --------------------------------------------------------------------------------------


def load_models(
    args: EngineArgs, ranks: Ranks, batch_size: int | None = None
) -> tuple[Transformer, Proposer]:
    """Load what the arguments ask for.

    Args:
        batch_size: how many sequences the static cache holds with which the model will run; None:
            it will run with a paged cache.

    Returns:
        The model, or this rank's share of it; and the proposer, which only the first rank uses.
    """
    model = load_model(args.checkpoint, ranks.device, settings.DTYPES[args.dtype], ranks.shard)
    context = model.config.max_position_embeddings
    if (args.max_seq_len or 0) > context:
        say(f"--max-seq-len {args.max_seq_len} is beyond this model's context of {context} tokens")
    num_bytes = sum(each.nbytes for _, each in named_tensors(model))
    if args.quantize:
        from quantize import quantize_model

        quantize_model(model, args.quantize)
    proposer = Proposer() if ranks.rank else load_proposer(args, ranks.device, model)
    use_threads(args.threads, num_bytes)
    if not args.plain:
        from around.fast import make_fast

        for each in (model, *proposer.models):
            make_fast(each, args.compile, batch_size, args.kv_dtype)
    return model, proposer


def load_proposer(args: EngineArgs, device: torch.device, model: Transformer) -> Proposer:
    """Load what guesses tokens for a model, if anything does."""
    if args.draft_checkpoint:
        from speculative import DraftModel

        draft = load_model(args.draft_checkpoint, device, settings.DTYPES[args.dtype])
        k = 4 if args.speculate is None else args.speculate
        return DraftModel(draft, k, model.config.vocab_size)
    if args.speculate:
        from speculative import NGram

        return NGram(args.speculate)
    return Proposer()


def open_engine(args: EngineArgs, ranks: Ranks) -> Engine | None:
    """Load what the arguments ask for, and make an engine. None: this process is not the first
    rank, and has followed that one until its end."""
    model, proposer = load_models(args, ranks)
    if ranks.rank:
        from tp import follow

        follow(model)
        return None
    return make_engine(args, ranks, model, proposer)


def make_engine(args: EngineArgs, ranks: Ranks, model: Transformer, proposer: Proposer) -> Engine:
    """Make an engine around what load_models has loaded."""
    tokenizer = Tokenizer(args.checkpoint)

    def make_matcher(structure: JSON) -> Any:
        from around import structured

        return structured.make_matcher(tokenizer, model.config, structure)

    limits = settings.given(settings.Limits, args)
    limits["num_blocks"] = args.num_blocks or affordable_blocks(args, model, proposer)
    return Engine(model, tokenizer, proposer, make_matcher, ranks.runner or Runner, **limits)


def cache_size(engine: Engine) -> str:
    """Say how many tokens the cache holds."""
    tokens = engine.pool.num_blocks * engine.pool.block_size
    return f"cache: room for {tokens:,} tokens; --kv-memory and --max-num-seqs change it"
