"""Generate text: the loop over one sequence.

    python generate.py                                   the bundled model, with no download
    python generate.py --checkpoint DIR --prompt "..."   any Hugging Face folder of a known family

`generate` shows the three steps of generating text: forward, sample, append. `command` puts
together what it needs. A chat, guesses, several samples and several processes (ranks) need
scheduler.Engine, which around/start runs. Read: generate, command. Next: paged.py.
"""

from argparse import Namespace
from collections.abc import Iterator

import torch

from around.folder import Tokenizer
from around.machine import Ranks, say
from around.settings import CHUNK
from around.start import asked_of, launch, load_models, parse_args, run_engine, stream
from kv_cache import StaticCache
from model import Transformer
from sampling import BROKEN, Sequence, Token, finite, sample


@torch.no_grad()
def generate(
    model: Transformer, sequence: Sequence, cache: StaticCache, chunk: int = CHUNK
) -> Iterator[Token]:
    """Extend `sequence` until it ends, and yield each token as it is made.

    Prefill and decode are one loop: run the tokens that the cache does not hold yet (first chunks
    of the prompt, then always one), and after the last known token sample the next one.

    Args:
        model: on any device.
        sequence: the tokens are appended to it; it also has the text and the finish_reason.
        cache: for a batch of one, long enough for `sequence.max_len`.
        chunk: prompt tokens per forward, which limits the memory of a long prompt.

    Raises:
        ValueError: the cache is too short for the sequence, or the logits are NaN or infinite; or
            its settings ask for what only scheduler.Engine does.
    """
    params = sequence.params
    lacks_matcher = params.structured_outputs and not sequence.matcher
    if lacks_matcher or params.prompt_logprobs is not None or params.n > 1:
        raise ValueError("structured_outputs, prompt_logprobs and n need scheduler.Engine, or LLM")
    ids = sequence.ids  # the list itself, which append() makes longer
    cached = 0  # how many tokens' keys and values the cache holds
    last = torch.tensor([-1], device=model.device)  # the index of a forward's last token
    while not sequence.finish_reason:
        end = min(cached + chunk, len(ids))
        tokens = torch.tensor([ids[cached:end]], device=model.device)  # (1, T)
        positions, caches = cache.plan(cached, end)
        logits = model(tokens, positions, caches, last)  # (1, V)
        cached = end
        if not finite(logits).all():
            raise ValueError(BROKEN)
        if cached == len(ids):
            (token,) = sample(logits, [sequence])
            sequence.append(token)
            yield sequence.tokens[-1]  # the same, with its text


def command(args: Namespace, ranks: Ranks) -> int:
    """Print what a model writes: text on stdout, everything else on stderr. What needs the engine,
    such as a chat, is answered by it."""
    asked = asked_of(args, ranks)
    if asked.needs_engine:
        return run_engine(args, asked, ranks)
    model, _ = load_models(asked.args, ranks, batch_size=1)
    tokenizer = Tokenizer(asked.args.checkpoint)
    ids = tokenizer.encode(asked.text)
    sequence = Sequence(ids, asked.params, model.config, tokenizer, asked.args.max_seq_len)
    cache = StaticCache(model, 1, sequence.max_len, asked.args.kv_dtype)
    say(asked.summary)
    return stream(sequence, generate(model, sequence, cache))


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit status: 0; 2 after an error; 130 after Ctrl-C."""
    return launch("generate.py", argv, parse_args, command)


if __name__ == "__main__":
    raise SystemExit(main())
