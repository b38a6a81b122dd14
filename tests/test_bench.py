"""Each command of bench.py on a tiny model: what it measures, records and shows."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import tiny_folder

from around.folder import load_model
from model import Config
from tools import bench, load, report

pytest_plugins = ["serving"]


@pytest.fixture
def measure(monkeypatch, capsys, tmp_path):
    """Run bench.py on a tiny shape; return the medians, and the page that is made of the record."""
    monkeypatch.setitem(bench.SHAPES, "110m", Config(64, 64, 96, 4, 4, 2, 16))
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
        page = report.speed_tables().partition("<!-- r -->")[2]  # the last part: it had none
        assert result["command"] in page
        for name, row in result["runs"].items():
            assert all(low <= median <= high for median, low, high in row.values())
            assert f"\n| {name} |" in page and f"\n{name}\n" in bench.table(result)
        rows = result["runs"].items()
        return {name: {key: each[0] for key, each in row.items()} for name, row in rows}, page

    return run


LATENCY = "latency --prompt-tokens 20 --new-tokens 8 --repeat 1 "
THROUGHPUT = "throughput --prompt-tokens 4 40 --new-tokens 2 9 --requests 5 "


def test_latency(measure, tmp_path):
    """Measure `bench.py latency` with a draft that is always right and one that is not, with
    n-grams, and in batches and in int8. Catches: guesses of the draft that are not used; a run that
    shows the figures of the run before; a form or a batch without a row, or ratios of another
    row."""
    same, other = (tiny_folder(tmp_path / name, vocab_size=64) for name in ("same", "other"))
    bench.write_random(replace(load_model(other).config, rope_theta=7.0), torch.float32, other)
    for draft, agrees in ((same, True), (other, False)):
        words = ("--checkpoint", same, "--draft-checkpoint", draft)
        rows, page = measure(LATENCY + "--new-tokens 31 --speculate 3", *words)
        plain, guessed = rows.values()
        assert [*rows] == ["plain", "3 guesses"] and plain["times_plain"] == 1
        assert guessed["same_tokens"] == 1 and guessed["draft_cost"] > 0 and "times plain" in page
        # 30 tokens after the first; each step makes four, the last perhaps fewer
        assert (guessed["accepted"] >= 22 / 8) == (guessed["accepted_1"] == 1) == agrees
    guessed = measure(LATENCY + "--new-tokens 40 --speculate-ngram 4")[0]["4 guesses"]
    assert guessed["same_tokens"] == 1 and guessed["draft_cost"] == 0
    assert guessed["theory"] == pytest.approx(1 + guessed["accepted"])
    rows, page = measure(LATENCY + "--batch 3 1 --quantize none int8")
    assert [*rows] == ["batch 3", "batch 1", "int8, batch 3", "int8, batch 1"]
    assert all(row["decode_tok_s"] > 0 and row["of_gemm_peak"] > 0 for row in rows.values())
    assert rows["batch 3"]["times_first_row"] == 1 and "| prefill MFU |" in page


def test_throughput_and_others(measure):
    """Run `bench.py throughput`, `sample` and `prefix`, and check the figures against each other.
    Catches: requests lost, or run twice; other work in a forward's time; first tokens counted from
    the start of a batch; rows of a static batch that leave at their ends; a prefix that is not
    found, or a cold prompt that is cached."""
    words = "--max-num-seqs 2 --baseline-requests 1 --sampling greedy llama"
    rows, _ = measure(THROUGHPUT + words)
    assert [*rows][1:] == ["continuous batching, llama", "static batches", "one at a time"]
    continuous, sampled, static, alone = rows.values()
    assert (continuous["times_greedy"], continuous["steps"]) == (1, sampled["steps"])
    assert static["steps"] > continuous["steps"]
    assert static["computed_tokens"] > continuous["computed_tokens"]
    assert static["last_first_token_s"] > static["steps"] * static["step_ms"] / 1e3 / 2
    assert static["times_static"] == 1 and "first_token_s" not in alone
    assert alone["mean_batch"] == alone["times_one"] == 1
    assert 1 < static["mean_batch"] <= continuous["mean_batch"]
    for row in rows.values():
        assert row["total_tok_s"] > row["output_tok_s"] > 0 and 0 <= row["kv_waste"] < 1
        assert 0 < row["outside_ms"] < row["step_ms"] and row["cached_share"] == 0
    rows, page = measure("sample --rows 1 8 --vocab-sizes 2000 --repeat 1")
    assert len(rows) == 2 * len(bench.SETTINGS) and "milliseconds" in page
    rows, _ = measure("prefix --prompt-tokens 128 --repeat 2")
    assert [row["cached_tokens"] for row in rows.values()] == [0, 112, 0]
    assert rows["cold"]["of_cold"] == rows["floor"]["times_floor"] == 1


def test_serve(local, capsys):
    """Measure a server by `bench.py serve`, and requests that it refuses; then sum up three
    outcomes. Catches: a wrong count of tokens; an address with /v1 that found nothing; a server
    that refuses everything and looks fast; a key in a committed file; percentiles of one request's
    gaps alone; a failed request that counts as good."""
    few = "--requests 6 --prompt-tokens 4 16 --prefixes 2 --prefix-tokens 4 --json --url"
    for path in ("", "/v1/"):
        words = f"serve --rate 100 inf --new-tokens 3 {few} http://127.0.0.1:{local.port}{path}"
        assert bench.main(f"{words} --api-key{'=' if path else ' '}SECRET".split()) == 0
        out = capsys.readouterr().out
        runs = json.loads(out)["runs"]
        assert "SECRET" not in out and "--api-key" in out
        assert [*runs] == ["100 requests/s", "all at once"]
        for figures in runs.values():
            assert figures["errors"][0] == 0 and figures["requests"][0] == 6
            assert figures["output_tok_s"][0] == pytest.approx(3 * figures["request_s"][0])
            assert 0 < figures["ttft_p50_ms"][0] <= figures["ttft_p99_ms"][0]
    words = f"serve --rate 100 --new-tokens 5000 {few} http://127.0.0.1:{local.port}"
    assert bench.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"]["100 requests/s"]["errors"][0] == 6
    assert "400" in err and "context" in err
    quick = load.Outcome(0.0, [0.1, 0.2, 0.3], 3)
    slow = load.Outcome(1.0, [3.0, 3.5], 2)
    lost = load.Outcome(1.0, error="RuntimeError: 500")
    figures = load.summary([quick, slow, lost], load.Limits(ttft_s=1, tpot_s=0.2))
    names = "errors output_tok_s goodput_s within_limits itl_p50_ms ttft_p50_ms tpot_p99_ms"
    found = [figures[name] for name in names.split()]
    assert found == pytest.approx([1, 5 / 3.5, 1 / 3.5, 1 / 3, 100, 1050, 496])
