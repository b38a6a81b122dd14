"""The instruments: what bench.py measures and refuses, and the pages that report.py makes of it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT, SHAKESPEARE
from test_quantize import QWEN2, TIED, tiny_folder

from model import Config, Transformer, load_model, named_tensors
from quantize import pack_linears, quantize_model
from tools import bench, report
from tools.measure import bytes_per_step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def measure(monkeypatch, capsys, tmp_path):
    """Run bench.py on a tiny shape; return the figures, and the page that is made of the record."""
    monkeypatch.setitem(bench.SHAPES, "tiny", Config(64, 64, 96, 4, 4, 2, 16))
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 30.0)  # measuring it takes seconds
    monkeypatch.setattr(report, "RECORDS", tmp_path)

    def run(words, *more):
        capsys.readouterr()
        words = [*words.split(), *map(str, more), "--dtype", "float32", "--record", "r", "--json"]
        assert bench.main(words) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["command"] == "python tools/bench.py " + " ".join(words)
        assert json.loads((tmp_path / "r.json").read_text()) == result
        for row in result["runs"].values():
            assert all(low <= median <= high for median, low, high in row.values())
        page = report.speed_tables()
        assert result["command"] in page and all(f"\n| {row} |" in page for row in result["runs"])
        return {
            name: {key: value[0] for key, value in row.items()}
            for name, row in result["runs"].items()
        }, page

    return run


LATENCY = "latency --shape tiny --prompt-tokens 20 --new-tokens 8 --repeat 1 "
THROUGHPUT = "throughput --shape tiny --prompt-tokens 4 40 --new-tokens 2 9 --requests 5 "


@pytest.mark.parametrize(
    "compiled", [(), pytest.param(("--compile",), marks=pytest.mark.slow)], ids=["eager", "compile"]
)
class TestCommands:
    def test_latency(self, measure, compiled):
        """A row for each form, batch and capacity; another cache than the row says."""
        modes = ("none", "int8") if compiled else ("none",)
        rows, page = measure(
            LATENCY + "--batch 3 1 --max-seq-len 28 200 --quantize", *modes, *compiled
        )
        assert len(rows) == 4 * len(modes)
        assert next(iter(rows)) == "batch 3, capacity 28"
        assert ("int8, batch 1, capacity 200" in rows) == bool(compiled)
        assert all(row["decode_tok_s"] > 0 and row["of_gemm_peak"] > 0 for row in rows.values())
        assert rows["batch 3, capacity 28"]["times_first_row"] == 1
        assert "decode, tok/s | of the read limit" in page

    @pytest.mark.parametrize("noise", [0, 3])
    def test_speculation_with_a_draft(self, measure, compiled, noise):
        """A draft of the first layers that does not say what the model says; a noise that does
        nothing; figures of the run before."""
        words = f"--new-tokens 31 --draft-noise {noise} --speculate 3"
        rows, page = measure(LATENCY + words, *compiled)
        assert [*rows] == ["plain", "3 guesses"]
        assert rows["3 guesses"]["same_tokens"] == 1
        # 30 tokens after the first, of which each step makes four, and the last perhaps fewer
        assert (rows["3 guesses"]["accepted"] >= 22 / 8) == (noise == 0)
        assert (rows["3 guesses"]["accepted_1"] == 1) == (noise == 0)
        assert rows["3 guesses"]["draft_cost"] > 0 and "times plain" in page

    def test_speculation_from_the_text(self, measure, compiled):
        """Guesses of a draft in its place."""
        rows, _ = measure(LATENCY + "--new-tokens 40 --speculate-ngram 4", *compiled)
        guessed = rows["4 guesses"]
        assert guessed["same_tokens"] == 1 and guessed["draft_cost"] == 0
        assert guessed["theory"] == pytest.approx(1 + guessed["accepted"])

    def test_throughput(self, measure, compiled):
        """Requests lost, or run twice; time counted into the forward that is not spent there."""
        rows, page = measure(THROUGHPUT + "--max-num-seqs 2 --baseline-requests 1", *compiled)
        assert [*rows] == ["continuous batching", "static batches", "one at a time"]
        assert rows["one at a time"]["mean_batch"] == rows["one at a time"]["times_one"] == 1
        assert 1 < rows["static batches"]["mean_batch"] <= rows["continuous batching"]["mean_batch"]
        for row in rows.values():
            assert row["total_tok_s"] > row["output_tok_s"] > 0 and 0 <= row["kv_waste"] < 1
            assert 0 < row["outside_ms"] < row["step_ms"] and row["cached_share"] == 0
        assert "outside the forward" in page and "host" not in page
        rows, _ = measure(THROUGHPUT)
        assert [*rows] == ["continuous batching", "one at a time"]  # all fit into one batch

    def test_prefix(self, measure, compiled):
        """A prefix that is not found, or one that is no longer cold."""
        rows, _ = measure("prefix --shape tiny --prompt-tokens 128 --repeat 2", *compiled)
        assert [*rows] == ["cold", "cached", "floor"]
        assert [row["cached_tokens"] for row in rows.values()] == [0, 112, 0]
        assert rows["cold"]["of_cold"] == rows["floor"]["times_floor"] == 1


def test_quality(measure, tmp_path, monkeypatch):
    """Text that calibrates scored too, the plain model scored in the place of a quantised one."""

    class Letters:
        def __init__(self, checkpoint):
            pass

        def encode(self, text):
            return [ord(letter) % 40 for letter in text]

    monkeypatch.setattr(bench, "Tokenizer", Letters)
    folder, text = tiny_folder(tmp_path / "plain"), tmp_path / "text"
    text.write_text("To be, or not to be, that is the question:\n" * 40)
    words = ("--checkpoint", folder, "--text", text, "--group-size", 32)
    rows, _ = measure("quality", *words)
    plain, int8, rtn, gptq, cache = rows.values()
    assert plain["kl_nats"] == plain["more"] == 0
    assert 0 < int8["kl_nats"] < gptq["kl_nats"] < rtn["kl_nats"] and 0 < cache["kl_nats"] < 0.01
    assert plain["weights_mb"] == cache["weights_mb"] > int8["weights_mb"] > rtn["weights_mb"]


REFUSED = {
    "latency --batch 0": "--batch",
    "latency --batch 1 -1": "--batch",
    "latency --prompt-tokens 0": "--prompt-tokens",
    "latency --new-tokens 0": "--new-tokens",
    "latency --max-seq-len 20": "--max-seq-len",
    "latency --repeat 0": "--repeat",
    "latency --speculate -1": "--speculate",
    "latency --speculate 2 --batch 2": "--batch",
    "latency --speculate 2 --new-tokens 1": "--new-tokens",
    "latency --speculate 2 --quantize int8": "--draft-checkpoint",
    "latency --speculate 2 --draft-layers 9": "--draft-layers",
    "latency --speculate 2 --draft-noise nan": "--draft-noise",
    "latency --speculate 2 --prompt-file README.md": "--checkpoint",
    "throughput --requests 0": "--requests",
    "throughput --prompt-tokens 9 5": "--prompt-tokens",
    "throughput --new-tokens 1 2 3": "--new-tokens",
    "throughput --kv-memory nan": "--kv-memory",
    "throughput --max-num-seqs 64 --max-num-batched-tokens 8": "max_num_batched_tokens",
    "prefix --prompt-tokens 16": "--new-prefix-tokens",
    "quality --text README.md": "--checkpoint",
    "serve --rate 0": "--rate",
    "serve --rate nan": "--rate",
    "serve --rate -2": "--rate",
    "serve --requests 0": "--requests",
    "serve --ttft-limit 0": "--ttft-limit",
    "serve --vocab-size 3": "--vocab-size",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(measure, capsys, monkeypatch, words):
    """A division by zero, an endless wait, or a table of nothing that looks like a success."""
    monkeypatch.chdir(ROOT)
    shape = ["--shape", "tiny"] * (not words.startswith("serve"))
    assert bench.main([*words.split(), *shape]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("bench.py: error: ") and REFUSED[words] in err
    assert out == "" and err.count("\n") == 1


@pytest.mark.slow
def test_ranks():
    """One rank's rows counted twice; a rank that waits for a barrier that the other has passed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [ROOT / "tools" / "bench.py", "latency", "--checkpoint", SHAKESPEARE, "--repeat", "2"]
    words += ["--dtype", "float32", "--prompt-tokens", "16", "--new-tokens", "8", "--json"]
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert [*result["runs"]] == ["batch 1, one rank", "batch 1"]
    assert result["runs"]["batch 1"]["collectives_ms"][0] > 0
    assert result["command"].startswith("torchrun --standalone --nproc-per-node 2 tools/bench.py ")


@pytest.mark.parametrize("changes", [{}, TIED, QWEN2])
def test_bytes_per_step(tmp_path, changes):
    """An embedding table that is counted though one row of it is read, or not though it is lm_head;
    quantised and packed weights counted as what they were, or not at all."""
    tiny_folder(tmp_path, **changes)
    kv = 2 * 2 * 2 * 16 * 10 * 4  # layers, k and v, heads, their size, positions, bytes
    for mode in (None, "int8", "int4"):
        model = load_model(tmp_path)
        model = quantize_model(model, mode, 32) if mode else model
        stored = sum(tensor.nbytes for _, tensor in named_tensors(model)) + model.inv_freq.nbytes
        weights = stored - (not model.tied) * model.embed_tokens.weight.nbytes
        assert bytes_per_step(model, 0) == weights
        assert bytes_per_step(model, 10) == weights + kv
        pack_linears(model)
        assert 0 <= bytes_per_step(model, 0) - weights < 1000  # the keys of the packed


def test_bytes_per_step_of_experts():
    """All experts counted, of which a step reads some; or k of them, however many sequences."""
    config = Config(64, 64, 96, 2, 4, 2, 16, num_experts=8, num_experts_per_tok=2)
    model = Transformer(replace(config, moe_intermediate_size=32, mlp_only_layers=[1]))
    model.requires_grad_(False)
    expert, rest = 3 * 64 * 32 * 4, bytes_per_step(model, 0) - 2 * 3 * 64 * 32 * 4
    for pack in (Transformer.eval, pack_linears):
        pack(model)
        for batch, chosen in ((1, 2), (2, 3.5), (1000, 8)):
            found = bytes_per_step(model, 0, batch)
            assert abs(found - rest - chosen * expert) < 1000


def test_latest_record(tmp_path, monkeypatch):
    """A variant's figures in the picture, or an older machine's."""
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    assert report.latest("a") is None
    for name in ("a-1b-eager-epyc", "a-1b-epyc", "a-1b-zen", "a-1b-zen-loud"):
        (tmp_path / f"{name}.json").write_text(json.dumps(name))
    assert report.latest("a-1b") == "a-1b-zen" and report.latest("a-1b-eager") == "a-1b-eager-epyc"
