"""deploy/ray_serve.py, in a Ray of this machine. Where Ray is not installed this skips; where
KILOLM_NEEDS_ALL is set, as in CI, it fails."""

import importlib.util
import os
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import openai
import pytest
from conftest import ROOT
from serving import SHORT, alone, until

from tools import report

DEPLOY = ROOT / "deploy"


def test_it_is_small():
    """A deployment that grows into a second server."""
    assert report.code_lines((DEPLOY / "ray_serve.py").read_text()) <= 80


@pytest.fixture(scope="module")
def client():
    """A client of two replicas."""
    if not importlib.util.find_spec("ray"):
        assert "KILOLM_NEEDS_ALL" not in os.environ, "KILOLM_NEEDS_ALL is set, without ray"
        pytest.skip("needs ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    sys.path.insert(0, str(DEPLOY))
    import ray_serve

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    # No path to `deploy` is handed to the actors: they failed for want of it under `serve run`.
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(ray_serve.build({"min_replicas": "2", "options": "--dtype float32"}))
        url = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=4, timeout=60)
    finally:
        serve.shutdown()
        ray.shutdown()
        sys.path.remove(str(DEPLOY))


def replicas():
    """The processes of the servers that Ray's replicas have started."""
    found = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{each}/cmdline").read_text().split("\0")
            parent = int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        if str(ROOT / "server.py") in words:
            found.append((int(each), parent))
    return found


@pytest.mark.slow
def test_two_replicas(client):
    """Another text than the server's; a stream that comes at once; a replica that is killed, and
    all requests with it, or with its server left behind."""
    (expected,) = alone(**SHORT)

    def whole(**headers):
        return client.completions.create(model="shakespeare", prompt=SHORT["prompt"], max_tokens=6,
            temperature=0, extra_body={"ignore_eos": True}, extra_headers=headers)  # fmt: skip

    assert whole().choices[0].text == expected.text
    events, times = [], []
    for event in client.completions.create(
        model="shakespeare", prompt=SHORT["prompt"], max_tokens=200, stream=True,
        extra_body={"ignore_eos": True},
    ):  # fmt: skip
        events.append(event)
        times.append(time.monotonic())
    assert len(events) > 100 and events[-1].choices[0].finish_reason == "length"
    assert max(b - a for a, b in pairwise(times)) < 0.5 * (times[-1] - times[0])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="shakespeare", prompt="a", temperature=-1)
    before = replicas()
    assert len(before) == 2
    # Who is killed here is the actor, whose server must not outlive it.
    child, actor = before[0]
    os.kill(actor, 9)
    assert [whole(**{"X-Session-Id": str(i)}).choices[0].text for i in range(8)] == [
        expected.text
    ] * 8
    until(lambda: child not in dict(replicas()), 10)
    until(lambda: len(replicas()) == 2, 60)
    # And here it is the server, whose actor says so when it is asked for its health.
    child, actor = replicas()[0]
    os.kill(child, 9)
    until(lambda: len(replicas()) == 2 and child not in dict(replicas()), 60)
    until(lambda: whole().choices[0].text == expected.text, 30)
