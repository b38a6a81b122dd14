"""Generate text: the loop over one sequence, the same made fast, and the command line.

    python generate.py                                   the bundled model, at once
    python generate.py --checkpoint DIR --prompt "..."   any Hugging Face folder model.py supports

`generate` is all that generating is: forward, sample, append. Many sequences at once, guesses and
several processes go through scheduler.Engine, which LLM wraps. Read: generate, LLM, run. Next:
paged.py.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

import tp
from kv_cache import StaticCache
from model import DTYPES, Transformer, check, pick_device, progress
from quantize import CHUNK, MODES, compile_model, load, quantize_model
from sampling import BROKEN, SamplingParams, Sequence, Token, sample, sampling_params
from scheduler import Engine, Request
from tokenizer import Tokenizer

# --- One sequence ---------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: Transformer, sequence: Sequence, cache: StaticCache | None = None, chunk: int = CHUNK
) -> Iterator[Token]:
    """Extend `sequence` until it ends, yielding each token as it is made.

    Prefill and decode are one loop: run the tokens that the cache does not hold yet (first chunks
    of the prompt, then always one), and at the end of what is known sample the next.

    Args:
        model: on any device.
        sequence: is appended to; read its text and finish_reason.
        cache: for a batch of one; None recomputes everything at each step (slow, and the oracle).
        chunk: prompt tokens per forward; bounds the memory of a long prompt.

    Raises:
        ValueError: the cache is too short for the sequence, or the logits are NaN or infinite.
    """
    end = 0  # tokens whose keys and values the cache holds
    while not sequence.finish_reason:
        ids = sequence.ids
        start, end = (end, min(end + chunk, len(ids))) if cache else (0, len(ids))
        tokens = torch.tensor([ids[start:end]], device=model.device)
        positions, layers = cache.step(start, end) if cache else (torch.arange(end)[None], None)
        last = torch.tensor([end - start - 1], device=model.device)
        logits = model(tokens, positions.to(model.device), layers, last)  # (1, V)
        if end == len(ids):
            (token,) = sample(logits, [sequence])
            sequence.append(token)
            yield token


# --- Many sequences -------------------------------------------------------------------------------


class LLM:
    """The engine behind the call that everybody knows.

    Example:
        llm = LLM("checkpoints/shakespeare")
        for request in llm.generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=20)):
            print(request.outputs[0].text)
    """

    def __init__(self, checkpoint: Path | str, **options: Any) -> None:
        """Load a checkpoint, plain or quantised.

        Args:
            options: those of the command line, by the same names: device, dtype, quantize, compile,
                draft_checkpoint, speculate, ...; and Engine's: max_num_seqs, kv_memory, ...
        """
        model_arguments(parser := argparse.ArgumentParser())
        usual = vars(parser.parse_args([]))
        args = argparse.Namespace(**{name: options.pop(name, usual[name]) for name in usual})
        self.checkpoint = args.checkpoint = Path(checkpoint)
        model, draft, guesses = load_models(args, tp.Ranks(pick_device(args.device)))
        more = {"kv_dtype": args.kv_dtype, "draft": draft, "speculate": guesses, **options}
        self.engine = Engine(model, Tokenizer(checkpoint), max_seq_len=args.max_seq_len, **more)

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Request]:
        """Complete the prompts, all at once, with a progress bar.

        Args:
            prompts: texts, or lists of token ids.
            params: for all, or one for each; None: what the checkpoint suggests.

        Returns:
            One finished request for each prompt, in order. An output whose finish_reason is "error"
            met logits that are no numbers, or a structure that became too complex.

        Raises:
            ValueError: a prompt that cannot be run; then none is.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        params = sampling_params(self.checkpoint) if params is None else params
        params = params if isinstance(params, list) else [params] * len(prompts)
        requests = [self.engine.prepare(*each) for each in zip(prompts, params, strict=True)]
        try:
            for request in requests:
                self.engine.submit(request)
            finished = (request for request in self.engine.run() if request.finished)
            for _ in progress(finished, "generating", len(requests)):
                pass
        except BaseException:  # Ctrl-C, at any line
            self.engine.reset()
            raise
        return requests


# --- The command line -----------------------------------------------------------------------------

BUNDLED = Path(__file__).resolve().parent / "checkpoints" / "shakespeare"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    return tp.launch("generate.py", argv, parse_args, run)


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what to run, and on what."""
    add = parser.add_argument
    add("--checkpoint", type=Path, default=BUNDLED, help="Hugging Face folder (default: bundled)")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: as stored")
    add("--kv-dtype", choices=("auto", "int8"), default="auto", help="of the cache; auto: as dtype")
    add("--quantize", choices=MODES, help="fewer bits for the weights, on the fly; see quantize.py")
    add("--group-size", type=int, default=128, help="input channels per scale, for int4 (128)")
    add("--compile", action="store_true", help="slower to start, faster to run; see the README")
    add("--draft-checkpoint", type=Path, metavar="DIR", help="guess tokens with a small model")
    text = "tokens to guess in a step: by the small model (4), or from what the text repeats (0)"
    add("--speculate", "--speculate-ngram", type=int, metavar="K", help=text)
    add("--max-seq-len", type=int, help="prompt and output (default: what the model can)")


def load_models(
    args: argparse.Namespace, ranks: tp.Ranks, paged: bool = True
) -> tuple[Transformer, Transformer | None, int]:
    """Load what model_arguments asks for, and compile it for a paged or a static cache.

    Returns:
        The model, or this rank's share; the draft, on rank 0 alone and whole; tokens to guess.
    """
    check("--max-seq-len", args.max_seq_len, int | None, 2)
    dtype, draft = DTYPES.get(args.dtype), None
    model = load(args.checkpoint, ranks.device, dtype, ranks.shard)
    if args.quantize:
        quantize_model(model, args.quantize, args.group_size)
    if args.draft_checkpoint and not ranks.rank:
        draft = load(args.draft_checkpoint, ranks.device, dtype)
    for each in filter(None, (model, draft) if args.compile else ()):
        compile_model(each, None if paged else 1, args.kv_dtype)
    return model, draft, (4 if draft else 0) if args.speculate is None else args.speculate


ALIASES = {"max_tokens": ["--max-new-tokens"], "n": ["--num-samples"]}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description="Generate text from a prompt.")
    model_arguments(parser)
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", help="text to continue")
    prompt.add_argument("--prompt-file", help="from a file; - is stdin")
    prompt.add_argument("--chat", action="store_true", help="talk, with the chat template")
    add("--json", action="store_true", help="print one JSON object per sample instead of text")
    text = "defaults: the checkpoint's generation_config.json, else as in parentheses"
    sampling = parser.add_argument_group("sampling", text)
    for f in fields(SamplingParams):
        if text := f.metadata.get("help"):
            flags = ["--" + f.name.replace("_", "-"), *ALIASES.get(f.name, [])]
            kind = float if f.type is float else int
            sampling.add_argument(*flags, type=kind, help=f"{text} ({f.default})")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text")
    sampling.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID")
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, ranks: tp.Ranks) -> int:
    """Load, generate, and report: text on stdout, everything else on stderr."""
    if sys.stdin is None and (args.chat or args.prompt_file == "-"):
        raise ValueError("stdin is closed: use --prompt TEXT or --prompt-file FILE")
    given = {f.name: getattr(args, f.name, None) for f in fields(SamplingParams)}
    params, tokenizer = sampling_params(args.checkpoint, **given), Tokenizer(args.checkpoint)
    text, file = args.prompt, args.prompt_file
    if file and not ranks.rank:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    plain = not (args.speculate or args.draft_checkpoint) and params.n == ranks.ranks == 1
    model, draft, guesses = load_models(args, ranks, paged=not plain)
    if ranks.rank:
        return tp.follow(model)
    engine = None if plain else Engine(
        model, tokenizer, 1, CHUNK + guesses, args.max_seq_len, kv_dtype=args.kv_dtype,
        draft=draft, speculate=guesses, runner=ranks.runner,
    )  # fmt: skip
    done = []
    once = ((text, tokenizer.encode(text), each) for each in params.split())
    for prompt, ids, each in turns(tokenizer, params, done) if args.chat else once:
        if engine:
            (sequence,) = engine.add_request(ids, replace(each, n=1)).outputs
            steps = engine.run()
        else:
            sequence = Sequence(ids, each, model.config, tokenizer, args.max_seq_len)
            cache = StaticCache(model, 1, sequence.max_len, args.kv_dtype)
            steps = generate(model, sequence, cache)
        done.append(sequence)
        stream(sequence, steps, show=not args.json)
        report(sequence)
        if args.json:
            result = {"prompt": prompt, "text": sequence.text, "token_ids": sequence.output_ids,
                      "finish_reason": sequence.finish_reason,
                      "logprobs": [token._asdict() for token in sequence.tokens]}  # fmt: skip
            print(json.dumps(result), flush=True)
        if sequence.finish_reason == "interrupted":  # Ctrl-C cuts a reply short; in a chat no more
            if not args.chat:
                break
            if engine:
                engine.reset()
    if guesses:
        print(engine.proposer.summary(), file=sys.stderr)
    return 130 if done and done[-1].finish_reason == "interrupted" else 0


def turns(
    tokenizer: Tokenizer, params: SamplingParams, done: list[Sequence]
) -> Iterator[tuple[str, list[int], SamplingParams]]:
    """Yield a conversation to continue, turn by turn, until the input ends.

    Args:
        done: the replies so far.
    """
    messages, params = [], replace(params, stop=(*params.stop, *tokenizer.chat_stop)[:16])
    print("> ", end="", file=sys.stderr, flush=True)
    while line := sys.stdin.readline():
        messages.append({"role": "user", "content": line.strip()})
        yield line, tokenizer.encode_chat(messages), params
        messages.append({"role": "assistant", "content": done[-1].text})
        print("> ", end="", file=sys.stderr, flush=True)


def stream(sequence: Sequence, steps: Iterator[Any], show: bool) -> None:
    """Generate, writing the text to stdout as it comes. Ctrl-C ends it with the text so far."""
    shown = 0
    try:
        for _ in steps:
            if show:
                print(sequence.text[shown:], end="", flush=True)
                shown = len(sequence.text)
    except KeyboardInterrupt:
        sequence.finish("interrupted")
    if sequence.finish_reason == "error":
        raise ValueError(BROKEN)
    if show:
        print(sequence.text[shown:], flush=True)


def report(sequence: Sequence) -> None:
    """One line: tokens, time to the first, and tokens/s after it."""
    start, *times = sequence.times
    if times:
        rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
        line = f"{sequence.prompt_len} prompt + {len(times)} new tokens, first one after "
        print(f"{line}{times[0] - start:.3f} s, then {rate:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
