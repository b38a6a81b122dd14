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


@pytest.fixture
def main(tmp_path):
    """Run the command line on a text; None: there is no file. Its --out holds an older target."""
    (tmp_path / "out" / "shakespeare").mkdir(parents=True)
    for name, content in OLD.items():
        (tmp_path / "out" / "shakespeare" / name).write_text(content)

    def run(text, *more):
        if text is not None:
            (tmp_path / "text").write_bytes(text)
        words = ["--text", tmp_path / "text", "--out", tmp_path / "out", *more]
        return trainer.main([*map(str, words)])

    return run


def is_old(folder):
    """No file more, none less, none other; and no hidden folder."""
    target = folder / "out" / "shakespeare"
    assert [*(folder / "out").iterdir()] == [target]
    return {file.name: file.read_text() for file in target.iterdir()} == OLD


BAD = [  # a text, options, and the message
    (None, (), "No such file"),
    (b"", (), "has 0 characters"),
    (b"To be, or not to be", (), "give a longer text"),
    (TEXT.replace("\n\n", "\n").encode(), (), "no empty line in its last tenth"),
    (TEXT.replace("\n\n", "\n").encode() + b"\n\n", (), "no empty line in its"),
    (b"To be, or not to be\n\n" * 30, (), "too short for 1024 pieces"),
    (TEXT.encode() + "\xe9t\xe9\n\nmore".encode("latin-1"), (), "is no UTF-8"),
    # A batch was taken from a list that was empty, at the last third of the training.
    (TEXT.encode(), ("--batch-tokens", 2**20), "tokens to train on"),
    (TEXT.encode(), ("--batch-tokens", 1000), "less than a window of 1024"),
]


def test_what_is_refused(main, capsys, tmp_path):
    """A traceback; a bundled tokenizer that is gone before the text was looked at."""
    for text, words, message in BAD:
        assert main(text, *words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("train.py: error: ")
        assert message in err and is_old(tmp_path), message
    # One token short of what the worst offset leaves.
    for batch, needed in ((1024, 1025 + 1024), (8192, 8 * 1025 + 1024)):
        trainer.check_length(torch.zeros(needed), batch)
        with pytest.raises(ValueError, match=f"{needed - 1} tokens.* need {needed}"):
            trainer.check_length(torch.zeros(needed - 1), batch)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), None])
def test_the_target_is_replaced_at_the_end(main, capsys, tmp_path, monkeypatch, error):
    """An interrupted run that left a new tokenizer beside old weights: a model of garbage."""

    def train(config, text, held_out, out, args, teacher):
        assert text + held_out == TEXT and out.name == "shakespeare"
        assert (out / "tokenizer.model").stat().st_size > 1000
        (out / "model.safetensors").write_text("new weights")
        if error:
            raise error
        return {"steps": 1}

    monkeypatch.setattr(trainer, "train", train)
    status = main(TEXT.encode(), "--only", "target")
    if error:
        assert status == (2 if isinstance(error, OSError) else 130) and is_old(tmp_path)
        return
    out = tmp_path / "out"
    assert status == 0 and json.loads((out / "train.json").read_text())["shakespeare"]
    assert (out / "shakespeare" / "model.safetensors").read_text() == "new weights"
    assert {file.name for file in out.iterdir()} == {"shakespeare", "train.json", "README.md"}


def test_resume_begins_with_what_is_there(main, tmp_path, monkeypatch):
    """Weights and tokenizer that --resume does not find in the folder where it works."""
    (tmp_path / "out" / "train.json").write_text('{"shakespeare": [{"steps": 1}]}')

    def train(config, text, held_out, out, args, teacher):
        assert {file.name: file.read_text() for file in out.iterdir()} == OLD
        return {"steps": 2}

    monkeypatch.setattr(trainer, "train", train)
    assert main(TEXT.encode(), "--only", "target", "--resume") == 0
    runs = json.loads((tmp_path / "out" / "train.json").read_text())
    assert [run["steps"] for run in runs["shakespeare"]] == [1, 2]
