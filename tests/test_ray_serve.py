"""deploy/ray_serve.py, in a Ray of this machine. Without Ray they skip; in CI they fail."""

import importlib.util
import os
import re
import socket
import sys
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.request import Request, urlopen

import openai
import pytest
from conftest import ROOT
from serving import SHORT, alone
from serving import until as wait_until

pytestmark = pytest.mark.nightly
DEPLOY = ROOT / "deploy"
until = partial(wait_until, seconds=120)  # Ray starts and ends processes


@pytest.fixture(scope="module")
def module():
    """Import deploy/ray_serve.py. No actor is given a path to it: under `serve run` there is
    none."""
    if not importlib.util.find_spec("ray"):
        assert "KILOLM_NEEDS_ALL" not in os.environ, "KILOLM_NEEDS_ALL is set, without ray"
        pytest.skip("needs ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    sys.path.insert(0, str(DEPLOY))
    yield importlib.import_module("ray_serve")
    sys.path.remove(str(DEPLOY))


@pytest.fixture(scope="module")
def client(module):
    """Start Ray with four cores, or so it is told; return a client of it."""
    import ray

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False)
    try:
        module.serve.start(http_options={"host": "127.0.0.1", "port": port})
        url = f"http://127.0.0.1:{port}/v1"
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=4, timeout=60)
    finally:
        module.serve.shutdown()
        ray.shutdown()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes():
    """Find the processes that run server.py for this test's Ray, torchrun included, and their
    parents. Another worker of pytest may have servers, and a Ray of its own, whose raylet it has
    started."""
    found = {}
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{each}/cmdline").read_text().split("\0")
            settings = Path(f"/proc/{each}/environ").read_bytes()
            raylet = re.search(rb"RAY_RAYLET_PID=(\d+)", settings)
            ours = raylet and parent_of(int(raylet[1])) == os.getpid()
            if ours and str(ROOT / "server.py") in words:
                found[int(each)] = parent_of(each)
        except OSError:  # it has ended
            continue
    return found


def whole(client, **headers):
    body = {"model": "shakespeare", "prompt": SHORT["prompt"], "max_tokens": 6, "temperature": 0}
    more = {"extra_body": {"ignore_eos": True}, "extra_headers": headers}
    return client.completions.create(**body, **more).choices[0].text


def ended(client, reason, **headers):
    """Return how many texts have ended so, in the replica that answers."""
    request = Request(str(client.base_url).replace("/v1/", "/metrics"), headers=headers)
    text = urlopen(request, timeout=60).read().decode()
    return sum(map(int, re.findall(rf'finished_reason="{reason}"}} (\d+)', text)))


def stream(client, tokens, **body):
    return client.completions.create(
        model="shakespeare", prompt=SHORT["prompt"], max_tokens=tokens, stream=True,
        extra_body={"ignore_eos": True}, **body,
    )  # fmt: skip


def test_two_replicas(module, client):
    """Serve by two replicas: ask, stream, leave, stay in sessions, and kill an actor and a server.
    Catches: another text than the server's; a stream in one piece; a request that runs on without
    its client; a path with // passed to another host; a killed replica that takes all requests with
    it, or leaves its server behind."""
    words = {"options": "--device cpu --dtype float32", "min_replicas": "2", "max_replicas": "2"}
    module.serve.run(module.build(module.Settings.model_validate(words)))
    (expected,) = alone(**SHORT)
    assert whole(client) == expected.text
    events = stream(client, 900, n=8)
    next(events)
    events.close()
    until(lambda: ended(client, "abort") == 8 or ended(client, "abort") == 8)  # of either replica
    events = [*stream(client, 600)]
    assert len(events) > 300 and events[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="shakespeare", prompt="a", temperature=-1)
    # A path that begins with // made the replica ask another host, and pass on its answer.
    connection = HTTPConnection(client.base_url.host, client.base_url.port, timeout=60)
    connection.request("GET", "//127.0.0.1:9/v1/models")
    assert connection.getresponse().status == 404
    # All that a session asks goes to one replica, its question for the counts included.
    counts = []
    for i in range(12):
        session = {"X-Session-Id": str(i)}
        counts.append(ended(client, "length", **session))
        whole(client, **session)
        assert ended(client, "length", **session) == counts[-1] + 1
    assert counts != sorted(counts)  # they are of two replicas
    assert len(processes()) == 2
    # What is killed here is the actor, whose server must not outlive it.
    child, actor = processes().popitem()
    os.kill(actor, 9)
    assert [whole(client, **{"X-Session-Id": str(i)}) for i in range(8)] == [expected.text] * 8
    until(lambda: child not in processes() and len(processes()) == 2)
    # And here it is the server, whose actor says so when it is asked for its health.
    child, actor = processes().popitem()
    os.kill(child, 9)
    until(lambda: len(processes()) == 2 and child not in processes())
    until(lambda: whole(client) == expected.text)
