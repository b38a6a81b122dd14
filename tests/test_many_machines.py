"""docs/many-machines.md is run: its HAProxy and nginx files, in the real programs, before three
servers."""

import contextlib
import http.client
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
from conftest import ROOT, program
from serving import COMPLETIONS, LONG, SHORT, Client, Process, until

CONFIGS = {"haproxy": ROOT / "docs" / "haproxy.cfg", "nginx": ROOT / "docs" / "nginx.conf"}
# What nginx needs around a file of conf.d. As another user than root it may not write elsewhere.
NGINX = """
daemon off; worker_processes 2; pid {0}/pid; error_log {0}/errors;
events {{ }}
http {{
    access_log off; client_body_temp_path {0}/body; proxy_temp_path {0}/proxy;
    fastcgi_temp_path {0}/fastcgi; uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;
    include {0}/config;
}}
"""


class Proxy(Client):
    """One of the two programs with its file from docs/, in front of these servers."""

    def __init__(self, kind, folder, replicas):
        self.kind, found = kind, program(kind)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        text = CONFIGS[kind].read_text()
        ports = [self.port, *(replica.port for replica in replicas)]
        for old, new in zip_longest((8080, 8001, 8002, 8003), ports):
            (line,) = re.findall(rf".*127\.0\.0\.1:{old}.*\n?", text)
            changed = line.replace(f":{old}", f":{new}") if new else ""  # fewer servers: no line
            text = text.replace(line, changed)
        (folder / "config").write_text(text)
        (folder / "nginx.conf").write_text(NGINX.format(folder))
        words = {"haproxy": ["-db", "-f", "config"], "nginx": ["-p", folder, "-c", "nginx.conf"]}
        self.log = folder / "proxy.log"
        with self.log.open("w") as log:
            command = [found, *words[kind]]
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def __enter__(self):
        def answers():
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.get("/health").status == 200

        until(answers)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


@pytest.fixture
def replicas(tmp_path):
    """Start three servers at once."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in "abc":
            (tmp_path / name).mkdir()
            made.append(Process(tmp_path / name, "--shutdown-timeout", 120))  # beside another test
        yield [stack.enter_context(each) for each in made]


@pytest.fixture(params=CONFIGS)
def proxy(request, tmp_path, replicas):
    with Proxy(request.param, tmp_path, replicas) as made:
        yield made


def beginning(i):
    return {"prompt": f"{i} of many texts, each of which begins in its own way. " * 8}


def inside(replicas):
    """Return how many requests each of the replicas has."""
    counts = [replica.metrics() for replica in replicas]
    return [int(each["num_requests_running"] + each["num_requests_waiting"]) for each in counts]


def place(replicas, ask, *args):
    """Return which of the replicas answers."""
    made = lambda: [each.metrics()["generation_tokens_total"] for each in replicas]  # noqa: E731
    before = made()
    assert ask(*args)
    (found,) = [i for i, (old, new) in enumerate(zip(before, made())) if new > old]
    return found


def stream_on_each(proxy, replicas):
    """Start a long stream on each of the replicas, for texts that begin in different ways. Returns
    the streams and these texts."""
    texts = {}
    for i in range(60):
        home = place(replicas, proxy.post, COMPLETIONS, {**SHORT, **beginning(i)})
        texts.setdefault(home, i)
        if len(texts) == 3:
            long = {**LONG, "max_tokens": 700}
            streams = [proxy.stream({**long, **beginning(texts[k])}) for k in range(3)]
            assert inside(replicas) == [1, 1, 1]
            return streams, [texts[k] for k in range(3)]
    raise AssertionError(f"60 texts went to {sorted(texts)} alone")


@pytest.mark.slow
def test_replicas_that_go(proxy, replicas):
    """Stop one of three servers behind a proxy, then kill another, while they stream and get
    requests. Catches: a stream cut short where a replica was to end; requests lost to a replica
    that takes none, or sent to nobody; texts of the other replicas that move; other streams that
    end with a killed replica."""
    streams, texts = stream_on_each(proxy, replicas)
    killed, stopped, home = replicas

    def all_are_answered():
        with ThreadPoolExecutor(8) as pool:
            bodies = [{**SHORT, **beginning(i)} for i in range(30)]
            statuses = list(pool.map(lambda body: proxy.post(COMPLETIONS, body).status, bodies))
        assert statuses == [200] * 30

    stopped.process.send_signal(signal.SIGTERM)
    all_are_answered()
    assert streams[1].read().endswith(b"data: [DONE]\n\n") and stopped.process.wait(60) == 0
    streams[0] = proxy.stream({**LONG, **beginning(texts[0]), "max_tokens": 700})
    killed.process.kill()
    all_are_answered()
    cut = b""
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):  # or it just ends
        for line in streams[0]:
            cut += line
    assert not cut.endswith(b"data: [DONE]\n\n")
    assert streams[2].read().endswith(b"data: [DONE]\n\n")
    assert place([home], proxy.post, COMPLETIONS, {**SHORT, **beginning(texts[2])}) == 0
