"""The load generator, and bench.py's command line for it, against a server in this process."""

import json
import sys
import time
from xml.etree import ElementTree

import pytest

from tools import bench, load

pytest_plugins = ["serving"]
pytestmark = pytest.mark.usefixtures("one_thread")


def bench_serve(monkeypatch, capsys, *arguments):
    """bench.py's rows and what it complains of."""
    monkeypatch.setattr(sys, "argv", ["bench.py", "serve", "--json", *map(str, arguments)])
    status = bench.main()
    out, err = capsys.readouterr()
    runs = json.loads(out)["runs"]
    assert status == (2 if any(r["errors"][0] == r["requests"][0] for r in runs.values()) else 0)
    return runs, err


@pytest.mark.parametrize("path", ["", "/v1", "/v1/"])
def test_bench_serve(local, tmp_path, monkeypatch, capsys, path):
    """Figures of another number of tokens than were streamed; a picture that no browser reads; an
    address as clients have it, /v1 and all, at which nothing was found."""
    plot = tmp_path / "plot.svg"
    runs, _ = bench_serve(
        monkeypatch, capsys, "--url", f"http://127.0.0.1:{local.port}{path}", "--rate", 100, "inf",
        "--requests", 6, "--prompt-tokens", 4, 16, "--new-tokens", 3, 3, "--prefixes", 2,
        "--prefix-tokens", 4, "--plot", plot,
    )  # fmt: skip
    assert [*runs] == ["100 requests/s", "all at once"]
    for figures in runs.values():
        assert figures["errors"][0] == 0 and figures["requests"][0] == 6
        assert figures["output_tok_s"][0] == pytest.approx(3 * figures["request_s"][0])
        assert 0 < figures["ttft_p50_ms"][0] <= figures["ttft_p99_ms"][0]
    names = [each.get("id", "") for each in ElementTree.parse(plot).iter()]
    assert sum(name.startswith("line: ") for name in names) == 4  # p50 and p99, of two times


def test_bench_serve_says_what_failed(local, monkeypatch, capsys):
    """A server that refuses everything looked like a fast one."""
    few = ("--rate", 100, "--requests", 3, "--new-tokens", 5000)
    url = f"http://127.0.0.1:{local.port}"
    runs, err = bench_serve(monkeypatch, capsys, "--url", url, *few)
    assert runs["100 requests/s"]["errors"][0] == 3 and "400" in err and "context" in err


def test_bench_serve_says_that_nobody_listens(capsys):
    """It said so only when all requests would have come: at one a second, after a minute."""
    words = ["serve", "--url", "http://127.0.0.1:1", "--rate", "1", "--requests", "60"]
    start = time.monotonic()
    assert bench.main(words) == 2
    assert time.monotonic() - start < 30
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("bench.py: error: nobody listens at --url http://127.0.0.1:1: ")


def test_summary_of_a_load():
    """Percentiles of one request's gaps instead of all; a request that failed counted as good."""
    quick = load.Outcome(0.0, [0.1, 0.2, 0.3], 3)
    slow = load.Outcome(1.0, [3.0, 3.5], 2)
    lost = load.Outcome(1.0, error="RuntimeError: 500")
    figures = load.summary([quick, slow, lost], load.Limits(ttft_s=1, tpot_s=0.2))
    assert (figures["errors"], figures["requests"]) == (1, 3)
    assert figures["output_tok_s"] == pytest.approx(5 / 3.5)
    assert figures["goodput_s"] == pytest.approx(1 / 3.5)
    assert figures["within_limits"] == pytest.approx(1 / 3)
    assert figures["itl_p50_ms"] == pytest.approx(100) and figures["ttft_p50_ms"] == 1050
    assert figures["tpot_p99_ms"] == pytest.approx(100 + 0.99 * 400)
