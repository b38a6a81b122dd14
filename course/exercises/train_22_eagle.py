"""Train the head of exercise 22 for the bundled model, in minutes on two cores.

    python course/exercises/train_22_eagle.py --text tinyshakespeare.txt

writes data/eagle.safetensors beside this file. The model stays as it is. A token's feature is the
stream behind the model's last layer, from which norm and lm_head make the next token's logits. The
head is one more layer that continues the features, without the model's other layers:

    position            0         1         2
    token              the       cat       sat
    feature before     zeros     f(the)    f(cat)      the model's
    head               f'(the)   f'(cat)   f'(sat)     should be f(the), f(cat), f(sat)
    norm, lm_head       cat       sat       on         the guesses

Its second guess has to start from f'(sat), as the model has not run "sat" yet. So that it learns
from its own mistakes, some features of the second row are the head's own here as well. Papers: Li
et al. 2024 (EAGLE, arXiv:2401.15077), Bengio et al. 2015 (scheduled sampling, arXiv:1506.03099).
Knows nothing of caches. Read: Head, train.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "checkpoints"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train import Causal, encode, read

from around.folder import load_model
from model import Layer, Transformer

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "checkpoints" / "shakespeare"
LENGTH, ROWS = 512, 8  # tokens in a window; windows in a batch
OWN = 0.3  # the share of features that are the head's own


class Head(nn.Module):
    """One layer that reads a token and the feature of the token before it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        D = model.config.hidden_size
        self.fc = nn.Linear(2 * D, D, bias=False)
        self.layers = nn.ModuleList([Layer(replace(model.config, num_hidden_layers=1, windows=()))])

    def forward(self, model: Transformer, tokens: Tensor, before: Tensor) -> Tensor:
        """Foretell the model's features.

        Args:
            model: gives the embedding and the angles of rope.
            tokens: (B, T) int64.
            before: (B, T, D), the feature of the token before each; of the first, zeros.

        Returns:
            (B, T, D), the feature of each token.
        """
        cos, sin = model.rope(torch.arange(tokens.shape[1])[None])[0]
        x = self.fc(torch.cat((model.embed(tokens), before), -1))
        x = x.to(before.dtype)  # the stream stays float32, as the model's does, under autocast
        return self.layers[0](x, cos, sin, Causal())


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="the tiny-shakespeare corpus")
    parser.add_argument("--out", type=Path, default=HERE / "data" / "eagle.safetensors")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the weights in --out")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    try:
        train(args)
    except (ValueError, OSError) as error:
        print(f"train_22_eagle.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def train(args: argparse.Namespace) -> None:
    """Train a head, and write it in bfloat16. Raises ValueError where the text is too short."""
    start = time.monotonic()
    model = load_model(MODEL, dtype=torch.float32)
    head = Head(model)
    if args.resume:
        head.load_state_dict(load_file(args.out))
    else:
        for weight in head.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.02)
    # 1) every feature that is needed, once
    texts, held_out = (windows(part) for part in read(args.text))
    known, known_held_out = features(model, texts), features(model, held_out)
    # 2) train
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    epoch = []
    for step in range(1, args.steps + 1):
        warm, decay = min(1, step / 30), 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = args.peak_lr * warm * (0.02 + 0.98 * decay)
        if len(epoch) < ROWS:
            epoch = torch.randperm(len(texts)).tolist()
        batch = [epoch.pop() for _ in range(min(ROWS, len(texts)))]
        tokens, feature = texts[batch], known[batch].float()
        with torch.autocast("cpu", torch.bfloat16):
            before = shifted(feature)
            with torch.no_grad():
                p = logprobs(model, feature)
                own = shifted(head(model, tokens, before))
            is_own = torch.rand(*tokens.shape, 1) < OWN
            foretold = head(model, tokens, torch.where(is_own, own, before))
            q = logprobs(model, foretold)
        loss = F.kl_div(q, p, reduction="sum", log_target=True) / tokens.numel()
        loss = loss + 0.2 * F.smooth_l1_loss(foretold, feature)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        # 3) write what there is
        if step % 100 == 0 or step == args.steps:
            rates = " ".join(f"{x:.0%}" for x in evaluate(model, head, held_out, known_held_out))
            minutes = (time.monotonic() - start) / 60
            print(
                f"step {step}/{args.steps}  loss {loss.item():.3f}  held out: accepted {rates} of "
                f"the first, second, third guesses  {minutes:.1f} min", file=sys.stderr, flush=True
            )  # fmt: skip
            args.out.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: x.bfloat16() for name, x in head.state_dict().items()}, args.out)


def windows(text: str) -> Tensor:
    """Tokenise a text and cut it: (windows, LENGTH). Raises ValueError where it is too short."""
    model_file = str(MODEL / "tokenizer.model")
    ids = encode(sentencepiece.SentencePieceProcessor(model_file=model_file), text)
    if len(ids) < LENGTH:
        raise ValueError(f"--text has a part of {len(ids)} tokens, {LENGTH} are needed")
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


@torch.no_grad()
def features(model: Transformer, texts: Tensor) -> Tensor:
    """The model's features of each text: (B, T) -> (B, T, D) bfloat16, some hundred MB."""
    seen = []
    hook = model.layers[-1].register_forward_hook(lambda block, args, x: seen.append(x.bfloat16()))
    positions, last = torch.arange(LENGTH)[None], torch.tensor([-1])  # one token's logits suffice
    with torch.autocast("cpu", torch.bfloat16):
        for rows in texts.split(16):
            model(rows, positions.expand_as(rows), [Causal() for _ in model.layers], last)
    hook.remove()
    return torch.cat(seen)


def shifted(feature: Tensor) -> Tensor:
    """Features moved to where they are read, at the next token: (B, T, D), zeros at the first."""
    return F.pad(feature, (0, 0, 1, 0))[:, :-1]


def logprobs(model: Transformer, feature: Tensor) -> Tensor:
    """What the model's norm and lm_head make of features: (B, T, D) -> (B, T, V) float32."""
    return model.lm_head(model.norm(feature)).float().log_softmax(-1)


@torch.no_grad()
def evaluate(model: Transformer, head: Head, texts: Tensor, known: Tensor) -> list[float]:
    """How likely the first, the second and the third guess are accepted where the ones before them
    were: the mean of the sum over tokens of min(p, q)."""
    texts, known = texts[:24], known[:24].float()
    p, before, rates = logprobs(model, known), shifted(known), []
    for _ in range(3):
        foretold = head(model, texts, before)
        q = logprobs(model, foretold)
        rates.append(torch.minimum(p, q).exp().sum(-1).mean().item())
        before = shifted(foretold)
    return rates


if __name__ == "__main__":
    sys.exit(main())
