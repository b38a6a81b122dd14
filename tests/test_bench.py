"""What bench.py measures and refuses, and the pages and pictures that report.py makes."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT, SHAKESPEARE
from test_quantize import QWEN2, TIED
from tiny import tiny_folder

import tp
from around.fast import packed
from around.fast.packed import Int8Linear, LoopedLinear, WidenedLinear, form_of, pack_linears
from around.folder.weights import build, is_tied, load_model, named_tensors
from around.machine import Ranks
from model import Config, Transformer
from quantize import QuantLinear, quantize_model
from tools import bench, pictures, report, versus
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
        words = [*words.split(), *map(str, more), "--record", "r", "--json"]
        words += [] if words[0] == "sample" else ["--dtype", "float32"]
        assert bench.main(words) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["command"] == "python tools/bench.py " + " ".join(words)
        assert json.loads((tmp_path / "r.json").read_text()) == result
        for row in result["runs"].values():
            assert all(low <= median <= high for median, low, high in row.values())
        page = report.speed_tables().partition("<!-- r -->")[2]  # the last part: it had none
        assert result["command"] in page and all(f"\n| {row} |" in page for row in result["runs"])
        return {
            name: {key: value[0] for key, value in row.items()}
            for name, row in result["runs"].items()
        }, page

    return run


def names_in(svg, kind):
    """Return the names of the bars, or lines, of a picture, in the order of drawing."""
    ids = [each.get("id", "") for each in ElementTree.fromstring(svg).iter()]
    return [name.removeprefix(f"{kind}: ") for name in ids if name.startswith(f"{kind}: ")]


LATENCY = "latency --shape tiny --prompt-tokens 20 --new-tokens 8 --repeat 1 "
THROUGHPUT = "throughput --shape tiny --prompt-tokens 4 40 --new-tokens 2 9 --requests 5 "


@pytest.mark.parametrize(
    "compiled", [(), pytest.param(("--compile",), marks=pytest.mark.slow)], ids=["eager", "compile"]
)
class TestCommands:
    def test_latency(self, measure, compiled):
        """A form, batch or capacity without a row; a cache of another size than its row names."""
        modes = ("none", "int8") if compiled else ("none",)
        rows, page = measure(
            LATENCY + "--batch 3 1 --max-seq-len 28 200 --quantize", *modes, *compiled
        )
        assert len(rows) == 4 * len(modes)
        assert next(iter(rows)) == "batch 3, capacity 28"
        assert ("int8, batch 1, capacity 200" in rows) == bool(compiled)
        assert all(row["decode_tok_s"] > 0 and row["of_gemm_peak"] > 0 for row in rows.values())
        assert rows["batch 3, capacity 28"]["times_first_row"] == 1
        assert "decode, tok/s | of the read limit" in page and "| prefill MFU |" in page
        result = json.loads((report.RECORDS / "r.json").read_text())
        assert "of_gemm_peak (prefill MFU)" in bench.table(result)

    @pytest.mark.parametrize("noise", [0, 3])
    def test_speculation_with_a_draft(self, measure, compiled, noise):
        """The draft of the first layers disagrees with the model; noise has no effect; a run shows
        the figures of the run before."""
        words = f"--new-tokens 31 --draft-noise {noise} --speculate 3"
        rows, page = measure(LATENCY + words, *compiled)
        assert [*rows] == ["plain", "3 guesses"]
        assert rows["3 guesses"]["same_tokens"] == 1
        # 30 tokens after the first, of which each step makes four, and the last perhaps fewer
        assert (rows["3 guesses"]["accepted"] >= 22 / 8) == (noise == 0)
        assert (rows["3 guesses"]["accepted_1"] == 1) == (noise == 0)
        assert rows["3 guesses"]["draft_cost"] > 0 and "times plain" in page

    def test_speculation_from_the_text(self, measure, compiled):
        """The text's guesses are replaced by those of a draft."""
        rows, _ = measure(LATENCY + "--new-tokens 40 --speculate-ngram 4", *compiled)
        guessed = rows["4 guesses"]
        assert guessed["same_tokens"] == 1 and guessed["draft_cost"] == 0
        assert guessed["theory"] == pytest.approx(1 + guessed["accepted"])

    def test_throughput(self, measure, compiled):
        """Requests are lost, or run twice; the forward's time includes other work; first tokens are
        counted from when a batch starts; rows of a static batch leave when they end."""
        rows, page = measure(THROUGHPUT + "--max-num-seqs 2 --baseline-requests 1", *compiled)
        assert [*rows] == ["continuous batching", "static batches", "one at a time"]
        static, continuous = rows["static batches"], rows["continuous batching"]
        assert static["steps"] > continuous["steps"]
        assert static["computed_tokens"] > continuous["computed_tokens"]
        assert static["last_first_token_s"] > static["steps"] * static["step_ms"] / 1e3 / 2
        assert static["times_static"] == 1 and "first_token_s" not in rows["one at a time"]
        assert rows["one at a time"]["mean_batch"] == rows["one at a time"]["times_one"] == 1
        assert 1 < rows["static batches"]["mean_batch"] <= rows["continuous batching"]["mean_batch"]
        for row in rows.values():
            assert row["total_tok_s"] > row["output_tok_s"] > 0 and 0 <= row["kv_waste"] < 1
            assert 0 < row["outside_ms"] < row["step_ms"] and row["cached_share"] == 0
        assert "outside the forward" in page
        rows, page = measure(THROUGHPUT + "--sampling greedy llama --price-per-hour 7.2")
        ours, sampled, alone = rows.values()  # all fit into one batch
        assert [*rows][1] == "continuous batching, llama"
        assert (ours["times_greedy"], ours["steps"]) == (1, sampled["steps"])
        assert sampled["times_greedy"] > 0 and alone["mean_batch"] == 1
        for row in rows.values():  # 0.2 cents a second, a million times
            assert row["usd_per_million_in_and_out"] == pytest.approx(2000 / row["total_tok_s"])
            assert row["usd_per_million_out"] == pytest.approx(2000 / row["output_tok_s"])
        assert "dollars a million tokens, in and out | ... out, in for free" in page

    def test_growth(self, measure, compiled):
        """The bytes of one sequence are counted for all; a point runs twice, or in one cache."""
        words = "--lengths 20 70 --sequences 1 3 --sequence-tokens 20 --new-tokens 3 --repeat 2"
        rows, _ = measure(f"growth --shape tiny {words}", *compiled)
        kinds = [f"{kind} cache" for kind in ("static", "paged")]
        points = ["1 x 20 tokens", "1 x 70 tokens", "3 x 20 tokens"]
        assert [*rows] == [f"{point}, {kind}" for point in points for kind in kinds]
        short, _, long, _, three, _ = rows.values()
        kv = 2 * 4 * 2 * 16 * 4 / 30e6  # k and v, layers, heads, their size, bytes: ms a token
        assert long["read_ms"] - short["read_ms"] == pytest.approx(50 * kv)
        assert three["read_ms"] - short["read_ms"] == pytest.approx(2 * 21 * kv)
        assert three["token_ms"] == pytest.approx(three["step_ms"] / 3)

    def test_sample(self, measure, compiled):
        """A setting has no effect: all rows run with temperature alone, or greedily."""
        rows, page = measure("sample --rows 1 8 --vocab-sizes 20000 --repeat 3 --context 50")
        assert len(rows) == 2 * len(bench.SETTINGS) and "milliseconds" in page
        ms = {name: row["ms"] for name, row in rows.items()}
        assert 0 < ms["8 rows of 20000, greedy"] < ms["8 rows of 20000, qwen"]
        assert ms["8 rows of 20000, qwen"] < ms["8 rows of 20000, flat"]  # which is sorted

    def test_prefix(self, measure, compiled):
        """A prefix is not found, or the cold prompt is cached."""
        rows, _ = measure("prefix --shape tiny --prompt-tokens 128 --repeat 2", *compiled)
        assert [*rows] == ["cold", "cached", "floor"]
        assert [row["cached_tokens"] for row in rows.values()] == [0, 112, 0]
        assert rows["cold"]["of_cold"] == rows["floor"]["times_floor"] == 1


VERSUS = "versus --shape tiny --prompt-tokens 20 --new-tokens 8 --sequences 3 --threads 1 "


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a module in the place of another engine's, for child processes."""

    def write(name, source):
        folder = tmp_path / "fakes"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return write


BREAKS = "class LLM:\n    def __init__(self, **_): raise OSError('\\nno such weights\\nor so')\n"


def test_versus(measure, fake, tmp_path, monkeypatch):
    """An engine that is not installed, or fails, ends the others too; weights are left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fake("vllm", "__version__ = '1'\n" + BREAKS)
    fake("llama_cpp", "raise ModuleNotFoundError('No module', name='llama_cpp')")
    picture = tmp_path / "picture.svg"
    peers = ("--peers", "vllm", "llama_cpp", "transformers", "--plot", picture)
    rows, page = measure(VERSUS + "--eager --repeat 2 --sampling qwen", *peers)
    assert [*rows] == ["one sequence", "prefill of 20 tokens", "3 sequences"]
    for row in rows.values():
        assert [*row] == ["kilolm", "transformers", "transformers_times"]
        assert min(row.values()) > 0
    assert "\nllama_cpp: not installed" in page
    assert "\nvllm: OSError: no such weights  \n" in page and "times ours" in page
    assert names_in(picture.read_text(), "bar") == ["kilolm", "transformers"] * 3
    assert not [*tmp_path.glob("tmp*")]


def test_busy(measure, monkeypatch, capsys):
    """Nothing ran beside the engines, or it ran on after them."""
    made, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args: made.append(popen(*args)) or made[-1])

    def compare(*_):
        raise ValueError(f"{sum(process.poll() is None for process in made)} run")

    monkeypatch.setattr(versus, "compare", compare)
    assert bench.main([*VERSUS.split(), "--busy", "2"]) == 2
    assert "error: 2 run" in capsys.readouterr().err
    assert [process.wait(5) for process in made] == [-signal.SIGKILL] * 2


# The clock of the fake engines below. On a real one their figures would depend on what else runs.
CLOCK = """
import time

now = 0.0
time.perf_counter = lambda: now

def work(seconds):
    global now
    now += seconds

"""
VLLM = """
__version__ = "1.2"
print("a banner, on stdout")

class SamplingParams:
    def __init__(self, temperature, top_p, max_tokens, ignore_eos, detokenize):
        assert (temperature, top_p, ignore_eos, detokenize) == (0.6, 0.9, True, False)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, dtype, skip_tokenizer_init, max_model_len, max_num_seqs,
                 enable_prefix_caching):
        assert skip_tokenizer_init and not enable_prefix_caching and max_num_seqs == 2

    def generate(self, prompts, params, use_tqdm):
        work(0.3 + 0.01 * params.max_tokens * len(prompts))
        assert all(isinstance(prompt["prompt_token_ids"], list) for prompt in prompts)
"""
LLAMA = """
__version__ = "0.3"

class Llama:
    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, verbose):
        assert model_path == "model.gguf"

    def reset(self):
        pass

    def generate(self, tokens, temp, top_k, top_p, min_p, repeat_penalty):
        assert (temp, top_k, top_p, min_p, repeat_penalty) == (0.6, 0, 0.9, 0, 1)
        work(0.3)
        while True:
            work(0.01)
            yield 1
"""
SETUP = {"threads": 1, "folder": "x", "dtype": "float32", "device": "cpu", "length": 64,
         "sequences": 2, "gguf": "model.gguf", "checkpoint": "x", "eager": True,
         "sampling": bench.SAMPLING["llama"]}  # fmt: skip
ONE = {"prompts": [[5, 9, 2, 7] * 5], "new_tokens": 11}
TWO = {"figure": "batch", "prompts": [[5], [9, 2]], "new_tokens": 20}


@pytest.mark.parametrize("name", ["vllm", "llama_cpp"])
def test_peers(fake, name):
    """The time includes the prompt's where it should not, or leaves it out; one row of a batch is
    counted; a library's own output garbles an answer."""
    fake("vllm", CLOCK + VLLM)
    fake("llama_cpp", CLOCK + LLAMA)
    child = versus.Child(name, SETUP, sys.executable, 60)
    try:
        assert child.version in ("1.2", "0.3")
        decode, prefill = (child.ask(ONE | {"figure": f})["tok_s"] for f in ("decode", "prefill"))
        assert (decode, prefill) == pytest.approx((1 / 0.01, 20 / 0.31))
        batch = child.ask(TWO)["tok_s"]
        assert batch == (None if name == "llama_cpp" else pytest.approx(40 / 0.7))
    finally:
        child.close()


def test_interleaved():
    """Rows whose channels rope does not rotate together: i and i + H / 2 become 2i and 2i + 1."""
    rows = torch.arange(8)[:, None]  # two heads of four
    assert versus.interleaved(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    "source, message",
    [
        ("import os, sys; sys.stderr.write('oh\\n\\n'); sys.stderr.flush(); os.kill(0, 9)", "x"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
    ],
    ids=["dies", "hangs", "misses a part"],
)
def test_peer_that_fails(fake, source, message):
    """The parent waits for ever; a broken engine is called "not installed"."""
    fake("vllm", source.replace("os.kill(0, 9)", f"os.kill(os.getpid(), {signal.SIGKILL:d})"))
    message = "ended with status -9: oh" if message == "x" else message
    timeout = 1 if "hangs" in message or "within" in message else 60
    with pytest.raises(versus.Absent, match=f"^vllm: {message}$"):
        versus.Child("vllm", SETUP, sys.executable, timeout)


def test_random_folder(tmp_path):
    """The config has another rope, norm or head than the weights: the engines would run different
    models."""
    transformers = pytest.importorskip("transformers")
    config = Config(64, 64, 96, 2, 4, 2, 32, rope_theta=500.0, rms_norm_eps=0.01)
    bench.write_random(config, torch.float32, tmp_path)
    ours, theirs = load_model(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    read = ours.config
    assert (read.head_dim, read.rope_theta, read.rms_norm_eps) == (32, 500.0, 0.01)
    assert read.dtype == theirs.dtype == torch.float32


def test_quality(measure, tmp_path, monkeypatch):
    """The calibration text is scored too; the plain model is scored in place of a quantised one."""

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
    "throughput --repeat 0": "--repeat",
    "throughput --price-per-hour 0": "--price-per-hour",
    "throughput --baseline-requests 0": "--baseline-requests",
    "growth --lengths 0 20": "--lengths",
    "growth --sequences -1": "--sequences",
    "growth --sequence-tokens 0": "--sequence-tokens",
    "growth --repeat 0": "--repeat",
    "versus --sequences 0": "--sequences",
    "versus --new-tokens 1": "--new-tokens",
    "versus --prompt-tokens 5000": "--prompt-tokens",
    "versus --threads 0": "--threads",
    "versus --timeout nan": "--timeout",
    "versus --gguf no-such-file": "--gguf",
    "versus --vllm-python no-such-file": "--vllm-python",
    "prefix --prompt-tokens 16": "--new-prefix-tokens",
    "quality --text README.md": "--checkpoint",
    "serve --rate 0": "--rate",
    "serve --rate nan": "--rate",
    "serve --rate -2": "--rate",
    "serve --requests 0": "--requests",
    "serve --ttft-limit 0": "--ttft-limit",
    "serve --vocab-size 3": "--vocab-size",
    "serve --url 127.0.0.1:8000": "--url",
    "serve --url http:///v1": "--url",
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(measure, capsys, monkeypatch, words):
    """A division by zero, an endless wait, or an empty table that looks like a success."""
    monkeypatch.chdir(ROOT)
    shape = ["--shape", "tiny"] * (not words.startswith("serve") and "--checkpoint" not in words)
    assert bench.main([*words.split(), *shape]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("bench.py: error: ") and REFUSED[words] in err
    assert out == "" and err.count("\n") == 1


UNWRITABLE = {
    "latency --shape tiny --record {}": "--record ''",
    "latency --shape tiny --record a/b": "--record 'a/b'",
    "latency --shape tiny --record ..": "--record '..'",
    "latency --shape tiny --record taken": "--record: ",
    "latency --shape tiny --profile no/x.json": "--profile: no/x.json",
    "serve --rate inf --url http://127.0.0.1:1 --plot no/x.svg": "--plot: no/x.svg",
}


@pytest.mark.parametrize("words", UNWRITABLE)
def test_unwritable(measure, capsys, monkeypatch, tmp_path, words):
    """Figures are lost after minutes of measuring; a record is written outside of its folder."""
    monkeypatch.setattr(bench, "prepare", lambda *_: pytest.fail("it has begun to work"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").mkdir()
    assert bench.main([word.replace("{}", "") for word in words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"bench.py: error: {UNWRITABLE[words]}")
    assert [file.name for file in tmp_path.iterdir()] == ["taken.json"]


def test_outputs_are_tried_and_left(measure, capsys, monkeypatch, tmp_path):
    """The trial empties a record, or leaves one behind; a full disk loses the figures with the
    record."""
    (tmp_path / "old.json").write_text("kept")
    monkeypatch.setattr(bench, "prepare", lambda *_: 1 / 0)
    for name in ("old", "new"):
        with pytest.raises(ZeroDivisionError):
            bench.main(["latency", "--shape", "tiny", "--record", name])
    assert [file.name for file in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "kept"
    monkeypatch.undo()
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    (tmp_path / "full.json").symlink_to("/dev/full")
    words = ["sample", "--rows", "1", "--vocab-sizes", "9", "--repeat", "1", "--record", "full"]
    assert bench.main(words) == 2
    out, err = capsys.readouterr()
    assert "1 rows of 9, greedy" in out and "No space left" in err and err.count("\n") == 1


def test_profile(measure, tmp_path):
    """The trace is not written, or is no JSON."""
    measure(LATENCY + "--profile", tmp_path / "trace")
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]


@pytest.mark.parametrize("words", [
    "--checkpoint checkpoints/shakespeare --shape 1b", "--speculate 2 --speculate-ngram 2",
    "--profile trace --speculate 2", "--profile trace --speculate-ngram 2",
])  # fmt: skip
def test_options_that_exclude_each_other(capsys, words):
    """--profile had no effect with guesses; a checkpoint hides a shape."""
    with pytest.raises(SystemExit, match="2"):
        bench.main(["latency", *words.split()])
    assert re.search(r"error: give --\S+ or --\S+, not both", capsys.readouterr().err)


@pytest.mark.slow
def test_ranks():
    """One rank's rows are counted twice; a rank waits at a barrier that the other has passed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [ROOT / "tools" / "bench.py", "latency", "--checkpoint", SHAKESPEARE, "--repeat", "2"]
    words += ["--dtype", "float32", "--prompt-tokens", "16", "--new-tokens", "8", "--json"]
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert [*result["runs"]] == ["batch 1, one rank", "batch 1"]
    assert result["runs"]["batch 1"]["collectives_ms"][0] > 0
    assert result["command"].startswith("torchrun --standalone --nproc-per-node 2 tools/bench.py ")


def test_keys_are_not_recorded():
    """A server's key in a file that is committed."""
    for key in (["--api-key", "SECRET"], ["--api-key=SECRET"]):
        words = ["serve", *key, "--record", "x"]
        args = Namespace(words=words, checkpoint=None, shape="1b")
        command = bench.provenance(torch.device("cpu"), args)["command"]
        assert "SECRET" not in command and command.endswith("... --record x")


def test_a_rank_of_a_tied_shape():
    """KeyError: there is no file to take lm_head from."""
    config = Config(128, 64, 96, 2, 4, 2, 16, tie_word_embeddings=True)
    ranks = Ranks(torch.device("cpu"), 1, 2, partial(tp.shard, rank=1, world_size=2))
    model = bench.random_model(config, torch.float32, ranks)
    assert (len(model.lm_head.weight), len(model.embed_tokens.weight)) == (64, 128)


@pytest.mark.parametrize("changes", [{}, TIED, QWEN2])
def test_bytes_per_step(tmp_path, monkeypatch, changes):
    """The embedding table is counted though one row of it is read, or not counted though it is
    lm_head; quantised and packed weights are counted as plain ones, or not at all."""
    tiny_folder(tmp_path, **changes)
    kv = 2 * 2 * 2 * 16 * 10 * 4  # layers, k and v, heads, their size, positions, bytes
    for mode in (None, "int8", "int4"):
        model = load_model(tmp_path)
        model = quantize_model(model, mode, 32) if mode else model
        stored = sum(tensor.nbytes for _, tensor in named_tensors(model)) + model.inv_freq.nbytes
        weights = stored - (not is_tied(model)) * model.embed_tokens.weight.nbytes
        assert bytes_per_step(model, 0) == weights
        assert bytes_per_step(model, 10) == weights + kv
        for linear in model.modules():
            if isinstance(linear, QuantLinear) and issubclass(
                form_of(linear), Int8Linear
            ):  # of 8 bits
                stored = sum(tensor.nbytes for tensor in linear.buffers())
                weights += linear.out_features * (linear.in_features + 4) - stored
        pack_linears(model)
        assert 0 <= bytes_per_step(model, 0) - weights < 1000  # the keys of the packed
    for form in (LoopedLinear, WidenedLinear):  # their weights stay parameters
        model = load_model(tmp_path)
        before = bytes_per_step(model, 0)
        form_of_all = lambda linear, *_, form=form: isinstance(linear, torch.nn.Linear) and form  # noqa: E731
        monkeypatch.setattr(packed, "form_of", form_of_all)
        pack_linears(model)
        assert type(model.layers[0].mlp.down_proj) is form
        assert 0 <= bytes_per_step(model, 0) - before < 1000


def test_first_layers_of_experts():
    """A traceback; the later layers' experts still add something."""
    config = Config(64, 64, 96, 3, 4, 2, 16, num_experts=4, num_experts_per_tok=2)
    model, tokens = build(config), torch.arange(20)[None]
    draft = bench.first_layers(model, 2, 0.0)
    assert len(draft.layers) == 2 and torch.equal(draft(tokens, tokens), model(tokens, tokens))


def test_bytes_per_step_of_experts():
    """All experts are counted though a step reads a part; or k, for any number of sequences."""
    config = Config(64, 64, 96, 2, 4, 2, 16, num_experts=8, num_experts_per_tok=2)
    model = build(replace(config, moe_intermediate_size=32, mlp_only_layers=[1]))
    expert, rest = 3 * 64 * 32 * 4, bytes_per_step(model, 0) - 2 * 3 * 64 * 32 * 4
    for pack in (Transformer.eval, pack_linears):
        pack(model)
        for batch, chosen in ((1, 2), (2, 3.5), (1000, 8)):
            found = bytes_per_step(model, 0, batch)
            assert abs(found - rest - chosen * expert) < 1000


@pytest.mark.parametrize(
    "value, text",
    [
        (2563.4, "2,560"), (1008, "1,008"), (999.6, "1,000"), (47.853, "47.9"), (9.996, "10"),
        (1.5881e-05, "0.0000159"), (0.1, "0.1"), (0.0, "0"), (-0.02347, "-0.0235"),
    ],
)  # fmt: skip
def test_number(value, text):
    """A table shows 2.56e+03; a count of 1,008 is rounded to 1,010."""
    assert report.number(value) == text


def test_no_exponents():
    """The same in any page that is made of the records."""
    for page in map(report.page, report.PARTS):
        assert not re.search(r"\de[+-]\d", page)


BARS = pictures.Bars("Speeds", {"one & two": 3.0, "three": 0}, "note", {"three": 4.0})
CURVES = pictures.Curves("T", {"ideal": [(1, 0), (2, 3)]}, "x", log="y")


def test_pictures(monkeypatch):
    """A picture differs each time it is drawn, or by the user's own style; a bar of value 0 is
    lost."""
    import matplotlib

    svg = pictures.draw([[BARS, CURVES], [BARS]])
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "red")
    assert pictures.draw([[BARS, CURVES], [BARS]]) == svg
    assert names_in(svg, "bar") == ["one & two", "three"] * 2
    assert names_in(svg, "line") == ["ideal"] and ">note<" in svg
