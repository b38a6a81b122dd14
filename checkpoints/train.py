"""Train the bundled Shakespeare model and its draft with this repository's own model.py.

    python checkpoints/train.py --text tinyshakespeare.txt

writes checkpoints/shakespeare (the target), checkpoints/shakespeare-draft and the record in
checkpoints/README.md. The draft needs about a twelfth of the target's compute. It is trained to
imitate the target's distribution, so that speculative decoding accepts its guesses. The corpus is
so small that a model overfits in minutes, so the run uses three regularisers: dropout (added to the
model from outside, by hooks); BPE dropout (Provilkov et al. 2020, arXiv:1910.13267), which
tokenises the text anew in every epoch; and early stopping, which keeps the weights with the best
held-out loss. A second, short run without BPE dropout (--resume --bpe-dropout 0) then teaches the
spelling.
"""

import argparse
import contextlib
import json
import math
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from around.folder.weights import load_model, named_tensors
from model import Config, LayerCache, Transformer

VOCAB, CONTEXT = 1024, 1024  # pieces; positions
SHORT = 256  # tokens in a window during the first two thirds of training
TARGET = Config(
    vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
)  # fmt: skip
DRAFT = replace(
    TARGET, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, windows=(),
)  # fmt: skip
HELD_OUT = 0.1  # the last tenth of the text is never trained on
BOS, EOS = 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 2 for a usage error, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="the tiny-shakespeare corpus")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--steps", type=int, default=1600, help="steps of the target")
    parser.add_argument("--draft-steps", type=int, default=2400)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--bpe-dropout", type=float, default=0.1)
    parser.add_argument("--peak-lr", type=float, default=2e-3, help="the draft uses twice this")
    parser.add_argument("--only", choices=("target", "draft"), help="train only this one")
    parser.add_argument("--resume", action="store_true", help="continue from the weights in --out")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        train_both(args)
    except (ValueError, OSError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def train_both(args: argparse.Namespace) -> None:
    """Train the target, then the draft with the target as its teacher. Write the record of both."""
    text, held_out = read(args.text)
    args.out.mkdir(parents=True, exist_ok=True)
    target_dir, draft_dir = args.out / "shakespeare", args.out / "shakespeare-draft"
    record = args.out / "train.json"
    runs = json.loads(record.read_text()) if record.is_file() else {}
    if args.only != "draft":
        with replacing(target_dir, args.resume) as work:
            if not args.resume:
                train_tokenizer(text, work)
                runs["shakespeare"] = []
            runs["shakespeare"] += [train(TARGET, text, held_out, work, args, None)]
    if args.only != "target":
        with replacing(draft_dir, args.resume) as work:
            for name in ("tokenizer.model", "tokenizer_config.json"):
                shutil.copyfile(target_dir / name, work / name)
            teacher = load_model(target_dir, dtype=torch.float32)
            if not args.resume:
                runs["shakespeare-draft"] = []
            runs["shakespeare-draft"] += [train(DRAFT, text, held_out, work, args, teacher)]
    record.write_text(json.dumps(runs, indent=1) + "\n")
    write_record(args.out / "README.md", runs)


# --- Text -----------------------------------------------------------------------------------------


def read(file: Path) -> tuple[str, str]:
    """Read a text, and split it at the start of a speech: (training text, held-out text).

    Raises:
        ValueError: the file is not UTF-8, or too short to be split.
        OSError: the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is no UTF-8 text: {error}") from error
    gap = text.find("\n\n", int(len(text) * (1 - HELD_OUT)))
    cut = gap + 2
    if gap < 0 or not text[cut:].strip():
        raise ValueError(
            f"--text {file} has {len(text)} characters and no empty line in its last tenth, so it "
            "cannot be split: give a longer text, of speeches separated by empty lines"
        )
    return text[:cut], text[cut:]


def train_tokenizer(text: str, out: Path) -> None:
    """Train a BPE tokenizer of VOCAB pieces with byte fallback, as Llama's is, on the text.

    Raises:
        ValueError: the text is too short for that many pieces.
    """
    lines = (line for line in text.split("\n") if line)
    with open(out / "tokenizer.model", "wb") as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines, model_writer=file, model_type="bpe", vocab_size=VOCAB,
                byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
                remove_extra_whitespaces=False, add_dummy_prefix=False, split_digits=True,
                minloglevel=2,
            )  # fmt: skip
        except RuntimeError as error:
            problem = f"--text is too short for {VOCAB} pieces: {len(text)} characters to train on"
            raise ValueError(problem) from error
    config = {
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def encode(sp: sentencepiece.SentencePieceProcessor, text: str, bpe_dropout: float = 0) -> Tensor:
    """Tokenise speech by speech. Some speeches follow a BOS, so that an empty prompt starts one."""
    ids: list[int] = []
    for speech in text.split("\n\n"):
        if len(ids) % 16 == 0:  # one in 16, more or less: the others follow the speech before
            ids.append(BOS)
        ids += sp.encode(
            speech + "\n\n", enable_sampling=bpe_dropout > 0, alpha=bpe_dropout, nbest_size=-1
        )
    return torch.tensor(ids)


def check_length(ids: Tensor, batch_tokens: int) -> None:
    """Check that a text fills a batch wherever its windows begin, and a batch a window.

    Raises:
        ValueError: one of them is too short.
    """
    if batch_tokens < CONTEXT:
        raise ValueError(f"--batch-tokens {batch_tokens} is less than a window of {CONTEXT}")
    for length in (SHORT, CONTEXT):
        needed = batch_tokens // length * (length + 1) + length
        if len(ids) < needed:
            raise ValueError(
                f"--text has {len(ids)} tokens to train on, and batches need {needed}: give a "
                "longer text, or lower --batch-tokens"
            )


# --- Training -------------------------------------------------------------------------------------


def train(
    config: Config,
    text: str,
    held_out: str,
    out: Path,
    args: argparse.Namespace,
    teacher: Transformer | None,
) -> dict:
    """Train one model, write its best weights to `out`, and return the record of the run.

    Args:
        teacher: the model whose distribution is imitated; None: learn from the text alone.
    """
    sp = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # as in GPT-2: smaller where a layer writes to the residual stream
            depth = 2 * config.num_hidden_layers
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=0.02 / (math.sqrt(depth) if last else 1))
    if args.resume:
        stored = load_model(out, dtype=torch.float32)
        model.load_state_dict(stored.state_dict())
    dropout = args.dropout if teacher is None else 0.0
    for block in model.layers:
        for part in (block.self_attn, block.mlp):
            part.register_forward_hook(lambda m, _, y: F.dropout(y, dropout, m.training))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    fast = torch.compile(model)  # shares the parameters; about 1.4x
    steps = args.steps if teacher is None else args.draft_steps
    peak = args.peak_lr if teacher is None else 2 * args.peak_lr
    valid = encode(sp, held_out)
    check_length(encode(sp, text), args.batch_tokens)
    best, best_step = math.inf, 0
    if args.resume:
        best = evaluate(model, valid)
    start = time.monotonic()
    epoch: list[Tensor] = []
    for step in range(1, steps + 1):
        warm, decay = min(1, step / 100), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * warm * (0.05 + 0.95 * decay)
        # Short windows are cheap and teach most of the language. The last third of the steps uses
        # long windows, to learn the later positions.
        length = SHORT if step < steps * 2 // 3 else CONTEXT
        rows = args.batch_tokens // length
        epoch = [e for e in epoch if e.shape[1] == length + 1]
        if len(epoch) < rows:  # a new epoch: tokenise anew, cut at a random offset, shuffle
            ids = encode(sp, text, args.bpe_dropout)
            ids = ids[torch.randint(length, ()).item() :]
            ids = ids[: len(ids) // (length + 1) * (length + 1)].view(-1, 1, length + 1)
            epoch = list(ids[torch.randperm(len(ids))])
        batch = torch.cat([epoch.pop() for _ in range(rows)])  # (B, T + 1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(fast, batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            if teacher is not None:  # distillation (Hinton et al. 2015)
                with torch.no_grad():
                    soft = forward(teacher, batch[:, :-1]).float().softmax(-1)
                loss = 0.1 * loss - 0.9 * (soft * logits.float().log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            score = evaluate(model, valid)
            if score < best:
                best, best_step = score, step
                save(model, config, out)
            minutes = (time.monotonic() - start) / 60
            print(
                f"{out.name} step {step}/{steps}  train {loss.item():.3f}  held out {score:.3f}"
                f"  best {best:.3f} at {best_step}  {minutes:.1f} min", file=sys.stderr, flush=True
            )  # fmt: skip
    characters = len(held_out) / (len(valid) - 1)
    return {
        "command": " ".join(["python checkpoints/train.py", *sys.argv[1:]]).replace(
            str(args.text), args.text.name
        ),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "best_step": best_step,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "held_out_loss": round(best, 4),
        "perplexity": round(math.exp(best), 2),
        "bits_per_character": round(best / math.log(2) / characters, 3),
        "machine": f"{torch.get_num_threads()} threads, {platform.machine()}",
        "torch": torch.__version__,
    }


class Causal(LayerCache):
    """Attention within one call, like model.NoCache's, but with `is_causal` in place of a mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def forward(model: Transformer, tokens: Tensor) -> Tensor:
    """Run whole windows without a cache: tokens (B, T) -> logits (B, T, V)."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, [Causal() for _ in model.layers])


@torch.no_grad()
def evaluate(model: Transformer, ids: Tensor, length: int = 512) -> float:
    """Mean negative log-likelihood per token, in nats, over windows of `length`."""
    model.eval()
    total = 0.0
    for at in range(0, len(ids) - 1, length):
        window = ids[None, at : at + length + 1]
        logits = forward(model, window[:, :-1]).flatten(0, 1)
        total += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    model.train()
    return total / (len(ids) - 1)


# --- Files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(folder: Path, resume: bool) -> Iterator[Path]:
    """Yield a temporary folder to write to. At the end its files replace those of `folder`, all
    together, because weights are useless with another tokenizer. After an error the temporary
    folder is deleted, and `folder` is unchanged.

    Args:
        resume: whether the temporary folder begins as a copy of `folder`.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as temporary:
        work = Path(temporary) / folder.name
        if resume:
            shutil.copytree(folder, work)
        else:
            work.mkdir()
        yield work
        folder.mkdir(exist_ok=True)
        for file in work.iterdir():
            file.replace(folder / file.name)


def save(model: Transformer, config: Config, out: Path) -> None:
    """Write a model in the standard Llama layout: bfloat16 safetensors, config.json and
    generation_config.json."""
    tensors = {
        f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in named_tensors(model)
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    fields = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    )  # fmt: skip
    settings = {name: getattr(config, name) for name in fields} | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        # In float32, processors seldom break a near tie differently, and so small a model is as
        # fast as in bfloat16.
        "torch_dtype": "float32", "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    defaults = {"bos_token_id": BOS, "eos_token_id": EOS, "temperature": 0.8, "top_p": 0.95}
    (out / "generation_config.json").write_text(json.dumps(defaults, indent=1) + "\n")


def write_record(path: Path, runs: dict) -> None:
    """Write README.md from the recorded runs, so that no figure is typed by hand."""
    lines = [
        "# The bundled models",
        "",
        "`train.py` trained these two Llama-shaped models on tiny-shakespeare (public domain). The"
        " README's first command, the tests and the examples of speculative decoding use them."
        " `train.py` also writes this file, from `train.json`.",
        "",
        "The last tenth of the text is held out. The loss is in nats per token, over windows of 512"
        " tokens. There is one column for each run; a later run continues from the best weights of"
        " the run before. The minutes were measured on a machine that was busy with other work.",
    ]
    for name, stages in runs.items():
        lines += ["", f"## {name}", "", "| what |" + " figure |" * len(stages)]
        lines += ["|---" * (1 + len(stages)) + "|"]
        for key in stages[0]:
            cells = " | ".join(str(stage[key]) for stage in stages)
            lines += [f"| {key.replace('_', ' ')} | {cells} |"]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exits through `replacing`'s cleanup
    sys.exit(main())
