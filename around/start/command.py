"""generate.py's command line: what is asked for, the text as it comes, and what needs the engine: a
chat, several samples, guesses, several ranks. Read: asked_of, run_engine, stream, chat.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from around import settings
from around.folder import first_sampling, suggested_sampling
from around.machine import Ranks, say
from around.settings import EngineArgs, SamplingParams, SettingError, blame
from around.start.begin import cache_size, open_engine
from sampling import BROKEN, Sequence
from scheduler import Engine

HELP = "/new begins a new chat, /exit or Ctrl-D ends it, and Ctrl-C ends a reply, or here the chat."


class Asked(NamedTuple):
    """What a command line asks for: how to build the engine, how to sample, the text to continue,
    a line about sampling, and whether the plain loop is not enough."""

    args: EngineArgs
    params: SamplingParams
    text: str
    summary: str
    needs_engine: bool


def parse_args(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="generate.py", description="Generate text from a prompt.")
    settings.add_flags(parser, EngineArgs, speculate="--speculate-ngram", checkpoint="--model")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="text to continue")
    prompt.add_argument("--prompt-file", help="read the prompt from this file; - is stdin")
    prompt.add_argument("--chat", action="store_true", help="talk, with the chat template")
    parser.add_argument("--system", help="with --chat: what the model is told first")
    group = parser.add_argument_group(
        "sampling",
        "defaults: the checkpoint's generation_config.json, else as in parentheses; if it has no "
        "temperature, --chat starts at 0.2, with top-p 0.9",
    )
    settings.add_flags(group, SamplingParams, max_tokens="--max-new-tokens", n="--num-samples")
    return parser.parse_args(argv)


def asked_of(args: Namespace, ranks: Ranks) -> Asked:
    """Check a command line, and read the prompt's file."""
    engine_args = EngineArgs(**settings.given(EngineArgs, args))
    suggested = (first_sampling if args.chat else suggested_sampling)(engine_args.checkpoint)
    chosen = suggested | settings.given(SamplingParams, args)
    summary = f"sampling settings in place of the defaults: {chosen}"
    if args.chat:  # without another limit, only the context ends a reply
        chosen = {"max_tokens": 2**31} | chosen
    params = SamplingParams(**chosen)
    if args.system and not args.chat:
        raise ValueError("--system needs --chat")
    needs_engine = (
        args.chat
        or params.n > 1
        or ranks.world_size > 1
        or engine_args.speculate
        or engine_args.draft_checkpoint
        # a limit that the plain loop does not know
        or settings.given(settings.Limits, args).keys() - {"max_seq_len", "kv_dtype"}
    )
    if "max_num_seqs" not in args:  # make the cache only as large as these sequences need
        engine_args = replace(engine_args, max_num_seqs=1 if args.chat else params.n)
    return Asked(engine_args, params, read_prompt(args, ranks), summary, bool(needs_engine))


def run_engine(args: Namespace, asked: Asked, ranks: Ranks) -> int:
    """Answer by the engine: a chat, or n continuations."""
    engine = open_engine(asked.args, ranks)
    if not engine:
        return 0  # a rank that has followed the first one to its end
    say(asked.summary)
    if args.chat:
        model = engine.runner.model
        say(f"{asked.args.checkpoint.resolve().name}, {model.dtype} on {model.device}")
        say(cache_size(engine))
        status = chat(engine, asked.params, args.system)
    else:
        status = write_all(engine, asked.text, asked.params)
    offered = engine.proposer.offered.total()
    if offered:
        say(f"{engine.proposer.accepted.total()} of {offered} guesses were accepted")
    return status


def read_prompt(args: Namespace, ranks: Ranks) -> str:
    """Return the text to continue. Ranks other than the first do not need it, and read no file."""
    file = args.prompt_file
    if not file or ranks.rank:
        return args.prompt
    with blame(file):
        # Both ways keep the ends of lines, which read_text would change; for stdin see launch.
        return sys.stdin.read() if file == "-" else Path(file).read_bytes().decode()


def stream(sequence: Sequence, steps: Iterator[Any]) -> int:
    """Run `steps`, and write the text to stdout as it comes, then a line of statistics to stderr.

    Args:
        steps: each turn may extend the sequence; what it yields does not matter.

    Returns:
        0; or 130 after Ctrl-C, which ends the sequence with the text so far.

    Raises:
        ValueError: the sequence ended with an error.
    """
    shown = status = 0
    try:
        for _ in steps:
            new = sequence.text[shown:]
            shown = len(sequence.text)  # before it is printed: Ctrl-C there must not print it twice
            print(new, end="", flush=True)
    except KeyboardInterrupt:
        status = 130
        sequence.finish("interrupted")
    if sequence.finish_reason == "error":
        raise ValueError(BROKEN)
    print(sequence.text[shown:], flush=True)
    if sequence.finish_reason == "length" and len(sequence.tokens) < sequence.params.max_tokens:
        say("the context is full")
    if sequence.tokens:
        made, first, *later = sequence.times  # when the sequence was made, and each of its tokens
        rate = len(later) / max(sequence.times[-1] - first, 1e-9)
        say(
            f"{len(sequence.tokens)} new tokens after {sequence.prompt_len} of the prompt, "
            f"the first in {first - made:.3f} s, then {rate:.1f} tokens/s"
        )
    return status


def write_all(engine: Engine, prompt: str, params: SamplingParams) -> int:
    """Print n continuations of a prompt. All are made while the first one is shown, so run() has
    nothing left to do for the others."""
    for i, sequence in enumerate(engine.add_request(prompt, params).outputs):
        if i:
            print("---")
        status = stream(sequence, engine.run())
        if status:
            return status
    return 0


def chat(engine: Engine, params: SamplingParams, system: str | None = None) -> int:
    """Talk until the input ends, and return the status of the last reply. The engine's prefix cache
    holds the earlier turns. After Ctrl-C they are computed again."""
    tokenizer = engine.tokenizer
    params = replace(params, n=1).with_stop(tokenizer.chat_stop)
    messages = start = [{"role": "system", "content": system}] if system else []
    status = 0
    say(HELP)
    for line in iter(ask, ""):
        said = line.strip()
        if said in ("/exit", "/quit", "exit", "quit"):
            return status
        if said == "/new":
            messages = start
        elif said.startswith("/"):
            say(HELP)
        elif said:
            turns = [*messages, {"role": "user", "content": said}]
            try:
                (sequence,) = engine.add_request(tokenizer.encode_chat(turns), params).outputs
            except SettingError as error:  # the chat, or this message alone, is too long
                say(f"error: {error}; or begin a new chat by /new")
                continue
            status = stream(sequence, engine.run())
            if status:
                engine.reset()  # Ctrl-C may have come while blocks changed hands
            messages = [*turns, {"role": "assistant", "content": sequence.text}]
    say("")  # Ctrl-D leaves the cursor behind "> "
    return status


def ask() -> str:
    """Show "> ", and read a line; "" is the end of the input."""
    say("> ", end="")
    return sys.stdin.readline() if sys.stdin else ""
