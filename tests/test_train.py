"""checkpoints/train.py: what it refuses, and what a run that does not end leaves as it was."""

import importlib.util
import json
import random

import pytest
import torch
from conftest import ROOT

spec = importlib.util.spec_from_file_location("train", ROOT / "checkpoints" / "train.py")
trainer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trainer)

RNG = random.Random(0)
WORDS = ["".join(RNG.choices("abcdefghij", k=RNG.randint(2, 9))) for _ in range(2000)]
TEXT = "".join(" ".join(RNG.choices(WORDS, k=30)) + "\n\n" for _ in range(300))
OLD = {"tokenizer.model": "old tokenizer", "model.safetensors": "old weights"}
BAD = [  # a text, options, and the message
    (b"", (), "has 0 characters"),
    (TEXT.replace("\n\n", "\n").encode() + b"\n\n", (), "no empty line in its"),
    (b"To be, or not to be\n\n" * 30, (), "too short for 1024 pieces"),
    (TEXT.encode() + "\xe9t\xe9\n\nmore".encode("latin-1"), (), "is no UTF-8"),
    # A batch was taken from a list that was empty, at the last third of the training.
    (TEXT.encode(), ("--batch-tokens", "1000000"), "tokens to train on"),
    (TEXT.encode(), ("--batch-tokens", "1000"), "less than a window of 1024"),
]


@pytest.mark.slow
def test_the_command_line(tmp_path, capsys, monkeypatch):
    """A traceback; a bundled tokenizer that is gone before the text was looked at. An interrupted
    run that left a new tokenizer beside old weights: a model of garbage. Weights and tokenizer that
    --resume does not find in the folder where it works."""
    out = tmp_path / "out" / "shakespeare"
    out.mkdir(parents=True)
    for name, content in OLD.items():
        (out / name).write_text(content)

    def main(text, *more):
        """Return the status, and what --out, an older target, holds then."""
        (tmp_path / "text").write_bytes(text)
        status = trainer.main(["--text", f"{tmp_path}/text", "--out", f"{tmp_path}/out", *more])
        files = [file for file in out.parent.rglob("*") if file.is_file()]
        return status, {file.name: file.read_bytes().decode(errors="replace") for file in files}

    for text, words, message in BAD:
        assert main(text, *words) == (2, OLD), message
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("train.py: error: ") and message in line
    trainer.check_length(torch.zeros(8 * 1025 + 1024), 8192)  # what the worst offset leaves
    with pytest.raises(ValueError, match=r"9223 tokens.* need 9224"):
        trainer.check_length(torch.zeros(8 * 1025 + 1023), 8192)
    runs = [(KeyboardInterrupt(), 130), (OSError("disk full"), 2), (None, 0), (None, 0)]

    def train(config, text, held_out, out, args, teacher):
        error, _ = runs[0]
        assert text + held_out == TEXT and out.name == "shakespeare"
        assert (out / "tokenizer.model").stat().st_size > 1000
        assert (out / "model.safetensors").exists() == args.resume
        (out / "model.safetensors").write_text("new weights")
        if error:
            raise error
        return {"steps": len(runs)}

    monkeypatch.setattr(trainer, "train", train)
    while runs:
        error, expected = runs[0]
        resume = ["--resume"] * (len(runs) == 1)
        status, files = main(TEXT.encode(), "--only", "target", *resume)
        assert status == expected and (files == OLD) == bool(error)
        runs.pop(0)
    assert files["model.safetensors"] == "new weights" and len(files) == 5
    assert [run["steps"] for run in json.loads(files["train.json"])["shakespeare"]] == [2, 1]
