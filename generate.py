"""Generate text: the loop over one sequence, and the command line.

    python generate.py                                   the bundled model, at once
    python generate.py --checkpoint DIR --prompt "..."   any Hugging Face folder model.py supports

Knows one sequence at a time; for many at once see scheduler.py. What `proposer` and `ranks` do can
wait for speculative.py and tp.py. Read: generate, main. Next: paged.py.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import tp
from kv_cache import Row, StaticCache
from measure import bytes_per_token, read_bandwidth
from model import DTYPES, KVCache, Transformer, read_json
from quantize import MODES, load, quantize_model
from runner import CHUNK, Runner
from sampling import SamplingParams, Sequence, Token
from speculative import DraftModel, NGram, Proposer
from tokenizer import Tokenizer

# --- The loop -------------------------------------------------------------------------------------


def generate(
    model: Transformer,
    sequence: Sequence,
    cache: StaticCache | None = None,
    chunk: int = CHUNK,
    proposer: Proposer | None = None,
    runner: type[Runner] = Runner,
) -> Iterator[Token]:
    """Extend `sequence` until it ends, yielding each token as it is made.

    Prefill and decode are one loop: run the tokens the cache does not hold yet (first chunks of the
    prompt, then always one) and the guesses that may follow; sample from their logits; append.

    Args:
        model: on any device.
        sequence: is appended to; read its text and finish_reason.
        cache: for a batch of one; None recomputes everything at each step (slow, and the oracle).
        chunk: prompt tokens per forward; bounds the memory of a long prompt.
        proposer: guesses tokens, for speculation; None: no guesses.
        runner: tp.Leader, where the model is one rank's share.

    Raises:
        ValueError: the cache is too short for the sequence.
    """
    forward, proposer = runner(model, cache or KVCache(model.config)), proposer or Proposer()
    end = 0  # tokens whose keys and values the cache holds
    while sequence.finish_reason is None:
        ids = sequence.ids
        start, end = (end, min(end + chunk, len(ids))) if cache else (0, len(ids))
        count = proposer.count(sequence) if end == len(ids) else 0
        (guess,) = proposer.propose([sequence], [Row([], start, end)], [count])
        known, end = ids[start:end], end + len(guess.ids)
        wanted = [p - start for p in sequence.wanted(end)]
        logits = forward([Row([], start, end)], known + guess.ids, wanted)
        sequence.score_prompt(logits, end)
        if end < len(ids):
            continue
        (tokens,) = proposer.verify(logits[-1 - len(guess.ids) :], [sequence], [guess])
        for token in tokens:
            if not sequence.finish_reason:  # EOS or a stop string can come before the last
                sequence.append(token)
                yield token
        end = len(ids) - 1  # ids has grown; its last has not run, and refused guesses are garbage


# --- The command line -----------------------------------------------------------------------------

BUNDLED = Path(__file__).resolve().parent / "checkpoints" / "shakespeare"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    tp.silence()
    args = parse_args(argv)
    try:
        with tp.join(pick_device(args.device)) as ranks:
            return run(args, ranks)
    except BrokenPipeError:  # `| head` has read enough; spare the user Python's complaint at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        return tp.report("generate.py", error)
    except KeyboardInterrupt:  # while loading; during generation it just ends the text
        return 130


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what to run, and on what."""
    add = parser.add_argument
    add("--checkpoint", type=Path, default=BUNDLED, help="Hugging Face folder (default: bundled)")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: as stored")
    add("--kv-dtype", choices=("auto", "int8"), default="auto", help="of the cache; auto: as dtype")
    add("--quantize", choices=MODES, help="fewer bits for the weights, on the fly; see quantize.py")
    add("--compile", action="store_true", help="slower to start, faster to run; see the README")
    add("--draft-checkpoint", type=Path, metavar="DIR", help="guess tokens with a small model")
    add("--speculate", type=int, metavar="K", help="tokens that it guesses in a step (4)")
    add("--speculate-ngram", type=int, metavar="K", help="guess from what the text repeats")
    add("--max-seq-len", type=int, help="prompt and output (default: what the model can)")


def load_models(
    args: argparse.Namespace, ranks: tp.Ranks
) -> tuple[Transformer, Transformer | None, int]:
    """Load what model_arguments asks for.

    Returns:
        The model, or this rank's share; the draft, on rank 0 alone and whole; tokens to guess.
    """
    if args.max_seq_len is not None and args.max_seq_len < 2:
        raise ValueError(f"max_seq_len must be at least 2, is {args.max_seq_len}")
    if args.speculate and not args.draft_checkpoint:
        raise ValueError("--speculate needs --draft-checkpoint; without one: --speculate-ngram")
    if args.speculate_ngram and args.draft_checkpoint:
        raise ValueError("--speculate-ngram and --draft-checkpoint both guess: give one of them")
    model = load(args.checkpoint, ranks.device, DTYPES.get(args.dtype), ranks.shard)
    if args.quantize:
        quantize_model(model, args.quantize)
    if not args.draft_checkpoint or ranks.rank:
        return model, None, args.speculate_ngram or 0
    draft = load(args.draft_checkpoint, ranks.device, DTYPES.get(args.dtype))
    return model, draft, 4 if args.speculate is None else args.speculate


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description="Generate text from a prompt.")
    model_arguments(parser)
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="text to continue")
    prompt.add_argument(
        "--prompt-file", type=argparse.FileType(encoding="utf-8"), help="from a file; - is stdin"
    )
    prompt.add_argument("--chat", action="store_true", help="talk, with the chat template")
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


def run(args: argparse.Namespace, ranks: tp.Ranks) -> int:
    """Load, generate, and report: text on stdout, everything else on stderr."""
    if args.chat and args.json:
        raise ValueError("--json prints samples of a prompt: it does not go with --chat")
    if args.profile:
        args.profile.open("a").close()  # fail now rather than after all the work
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams)}
    params = sampling_params(args.checkpoint, **given)
    device, tokenizer = ranks.device, Tokenizer(args.checkpoint)
    model, draft, guesses = load_models(args, ranks)
    if ranks.rank:
        tp.follow(model)
        return 0

    def cache_for(model: Transformer, length: int) -> StaticCache:
        dtype = torch.int8 if args.kv_dtype == "int8" else model.embed_tokens.weight.dtype
        return StaticCache(model.config, 1, length, dtype, device)

    proposer = NGram(guesses)
    if draft:
        draft_runner = Runner(draft, cache_for(draft, 2 * CHUNK))
        proposer = DraftModel(draft_runner, guesses, model.config.vocab_size)
    if args.compile:
        ranks.runner(model, cache_for(model, 2 * CHUNK)).compile()
        proposer.compile()
    if (args.max_seq_len or 0) > (trained := model.config.max_position_embeddings):
        print(f"warning: this model was trained on up to {trained} tokens", file=sys.stderr)
    done: list[Sequence] = []

    def reply(prompt_ids: list[int], params: SamplingParams) -> Sequence:
        sequence = Sequence(prompt_ids, params, model.config, tokenizer, args.max_seq_len)
        cache = cache_for(model, sequence.max_len)
        if draft:
            draft_runner.cache = cache_for(draft, sequence.max_len)
        done.append(sequence)
        steps = generate(model, sequence, cache, proposer=proposer, runner=ranks.runner)
        stream(sequence, steps, show=not args.json)
        return sequence

    profiler = torch.profiler.profile() if args.profile else contextlib.nullcontext()
    with profiler:
        chat(reply, tokenizer, params) if args.chat else complete(reply, tokenizer, params, args)
    if args.profile:
        profiler.export_chrome_trace(str(args.profile))
    if any(sequence.output_ids for sequence in done):
        kv_dtype = torch.int8 if args.kv_dtype == "int8" else None
        print(statistics(model, done, proposer, kv_dtype), file=sys.stderr)
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


def stream(sequence: Sequence, steps: Iterator[Token], show: bool) -> None:
    """Generate, writing the text to stdout as it comes. Ctrl-C ends it with the text so far."""
    shown = 0
    try:
        for _ in steps:
            if show:
                print(sequence.text[shown:], end="", flush=True)
                shown = len(sequence.text)
    except KeyboardInterrupt:
        sequence.finish("interrupted")
    if show:
        print(sequence.text[shown:], flush=True)


def statistics(
    model: Transformer, done: list[Sequence], proposer: Proposer, kv_dtype: torch.dtype | None
) -> str:
    """One line: time to first token, tokens/s, and how near that is to the memory's limit; or what
    became of the guesses."""
    done = [sequence for sequence in done if sequence.output_ids]
    new = sum(len(sequence.output_ids) for sequence in done)
    prompts = sum(sequence.prompt_len for sequence in done)
    first = done[0].times[1] - done[0].times[0]
    line = f"{prompts} prompt + {new} new tokens, first one after {first:.3f} s"
    if decoded := new - len(done):
        rate = decoded / sum(sequence.times[-1] - sequence.times[1] for sequence in done)
        line += f", then {rate:.1f} tokens/s"
        if proposer.k:
            return line + f"; {proposer.summary()}"
        middle = (prompts + new // 2) // len(done)  # how much KV a step reads, on average
        speed = rate * bytes_per_token(model, middle, kv_dtype) / 1e9
        limit = read_bandwidth(model.embed_tokens.weight.device)
        line += f" = {speed:.1f} GB/s, {speed / limit:.0%} of the {limit:.1f} this machine reads"
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
