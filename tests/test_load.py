"""The load generator, and bench.py's command line for it, against a server in this process."""

import json
import time

import pytest

from tools import bench, load

pytest_plugins = ["serving"]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_bench_serve(local, capsys):
    """Figures of another number of tokens than were streamed; an address as clients have it, /v1
    and all, at which nothing was found; a server that refuses everything looked like a fast one; a
    server's key in a file that is committed."""
    few = "--requests 6 --prompt-tokens 4 16 --prefixes 2 --prefix-tokens 4 --json --url"
    for path in ("", "/v1", "/v1/"):
        words = f"serve --rate 100 inf --new-tokens 3 {few} http://127.0.0.1:{local.port}{path}"
        key = f"--api-key{'=' if path else ' '}SECRET"
        assert bench.main(f"{words} {key}".split()) == 0
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


def test_bench_serve_says_that_nobody_listens(capsys):
    """It said so only when all requests would have come: at one a second, after a minute."""
    start = time.monotonic()
    words = ["serve", "--url", "http://127.0.0.1:1", "--rate", "1", "--requests", "60"]
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
    names = (
        "errors requests output_tok_s goodput_s within_limits itl_p50_ms ttft_p50_ms tpot_p99_ms"
    )
    found = [figures[name] for name in names.split()]
    assert found == pytest.approx([1, 3, 5 / 3.5, 1 / 3.5, 1 / 3, 100, 1050, 496])
