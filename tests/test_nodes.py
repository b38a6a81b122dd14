"""One model over two machines: two torchrun agents with one rendezvous.

The machines are network namespaces joined by a cable (ip netns, which root may make); elsewhere,
they are two addresses of this one. Their names lead nowhere, so all that tp.py says is needed.
"""

import contextlib
import ctypes.util
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tp_worker
from conftest import ROOT, SHAKESPEARE
from test_tp import LONG, PROGRAM, SOME, WORKER

from around.start import ranks as meeting
from llm import LLM

CLIENT = """
import sys, urllib.request as u
head = {"Content-Type": "application/json"}
print(u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), head)).read().decode())
"""

# --- What must be the same ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A copy, elsewhere on the machine."""
    return shutil.copytree(SHAKESPEARE, tmp_path / "copy")


def change(path, old, new):
    data = path.read_bytes()
    assert data.count(old) >= 1
    path.write_bytes(data.replace(old, new, 1))


DIFFERENCES = {
    "none": (lambda args, folder, patch: None, None),
    "version": (lambda args, folder, patch: patch.setattr(meeting, "VERSION", "0.0.9"),
                r"rank 1 has \{'kilolm': '0.0.9'\}, rank 0 \{'kilolm': '\d\S+'\}$"),
    "torch": (lambda args, folder, patch: patch.setattr(torch, "__version__", "1.0"),
              "rank 1 has {'torch': '1.0'}"),
    "option": (lambda args, folder, patch: vars(args).update(dtype="bfloat16"),
               r"rank 1 has \{'dtype': 'bfloat16'\}, rank 0 \{'dtype': 'float32'\}$"),
    "config": (lambda args, folder, patch: change(folder / "config.json", b"1e-0", b"2e-0"),
               r"rank 1 has \{'config.json': \d+\}, rank 0 \{'config.json': \d+\}$"),
    "weights": (lambda args, folder, patch: change(folder / "model.safetensors", b"?", b"!"),
                "rank 1 has {'model.safetensors': "),
    "a file less": (lambda args, folder, patch: (folder / "config.json").unlink(),
                    r"rank 1 has \{\}, rank 0 \{'config.json': \d+\}$"),
    "own": (lambda args, folder, patch: vars(args).update(prompt="b", draft_checkpoint="d"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_must_be_the_same(folder, monkeypatch, name):
    """Two machines with weights of two models, or in two dtypes, made up a text. And a path
    or a prompt, which may differ, was held against them."""
    act, message = DIFFERENCES[name]
    sent = []

    def broadcast(facts, source=0):
        if source == len(sent):
            sent.append(json.loads(json.dumps(facts)))
        return sent[min(source, len(sent) - 1)]

    monkeypatch.setattr(meeting, "broadcast", broadcast)
    monkeypatch.setattr(meeting.dist, "get_world_size", lambda: 1)
    meeting.agree(SimpleNamespace(dtype="float32", checkpoint=SHAKESPEARE, prompt="a"))
    args = SimpleNamespace(dtype="float32", checkpoint=folder, prompt="a")
    act(args, folder, monkeypatch)
    monkeypatch.setattr(meeting.dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        meeting.agree(args)


# --- Two machines ---------------------------------------------------------------------------------


def ip(*words):
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)


class Machines:
    """Two of them."""

    numbers = itertools.count()

    def __init__(self, folder, apart):
        self.folder, self.started, self.names = folder, {}, []
        self.port, self.addresses, self.links = 29400, ["10.99.0.1", "10.99.0.2"], ["va", "vb"]
        names = [f"nodes-{os.getpid()}-{next(self.numbers)}" for _ in range(2)]
        if apart and not ip("netns", "add", names[0]).returncode:
            self.names = names
            ip("netns", "add", names[1])
            a, b = self.links
            ip(*f"link add {a} netns {names[0]} type veth peer name {b} netns {names[1]}".split())
            for name, address, link in zip(names, self.addresses, self.links):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                for each in ("lo", link):
                    assert not ip("-n", name, "link", "set", each, "up").returncode
        else:
            self.addresses, self.links = ["127.0.0.1", "127.0.0.2"], ["lo", "lo"]
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self.port = s.getsockname()[1]

    def inside(self, i, *command):
        return [*(["ip", "netns", "exec", self.names[i]] if self.names else []), *map(str, command)]

    def start(self, i, *argv, conf="", link=None, **env):
        """Start torchrun and its one rank on a machine."""
        command = self.inside(
            i, sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:{self.port}",
            "--rdzv-conf", f"is_host={1 - i}{conf}", "--local-addr", self.addresses[i], *argv,
        )  # fmt: skip
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env["GLOO_SOCKET_IFNAME"] = link or self.links[i]
        out, err = (self.folder / f"{kind}.{i}" for kind in ("out", "err"))
        self.started[i] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out.open("wb"), stderr=err.open("wb"),
            env=os.environ | env, cwd=ROOT,
        )  # fmt: skip

    def said(self, i, kind="err"):
        return (self.folder / f"{kind}.{i}").read_text()

    def errors(self, i):
        """Lines of ours; torchrun has many of its own."""
        return re.findall(r"^\w+\.py: error: .*$", self.said(i), re.M)

    def until(self, find, seconds=120):
        end = time.monotonic() + seconds
        while not (found := find()):
            assert time.monotonic() < end, [self.said(i) for i in self.started]
            time.sleep(0.05)
        return found

    def pids(self, i):
        """Of torchrun, and of its rank."""
        pid = self.started[i].pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def end(self, seconds=120):
        """Wait for all. Returns their statuses."""
        end = time.monotonic() + seconds
        return [each.wait(max(0.1, end - time.monotonic())) for each in self.started.values()]

    def close(self):
        for i, each in self.started.items():
            for pid in self.pids(i) if each.poll() is None else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            each.wait()
        for name in self.names:
            ip("netns", "del", name)


@pytest.fixture
def machines(request, tmp_path):
    if not Path("/proc/self/task").exists():
        pytest.skip("reads /proc")
    made = Machines(tmp_path, getattr(request, "param", "apart") == "apart")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["apart", "together"], indirect=True)
def test_same_text(machines, folder):
    """Another text than one process has, or on both machines; or the first gives up on a second
    that comes 10 s late, or refuses it, as its checkpoint lies elsewhere."""
    machines.start(0, PROGRAM, *SOME)
    time.sleep(10)
    machines.start(1, PROGRAM, *SOME, "--checkpoint", folder)
    assert machines.end() == [0, 0], machines.said(0)
    assert [machines.said(i, "out") for i in range(2)] == [tp_worker.captured(SOME)[1], ""]
    assert [machines.said(i).count("new tokens") for i in range(2)] == [1, 0]


@pytest.mark.slow
def test_server(machines):
    """Two servers in place of one, or one whose other half lives on."""
    host = machines.addresses[0]
    for i in range(2):
        options = ("--host", host, "--port", 0, "--device", "cpu", "--dtype", "float32")
        machines.start(i, ROOT / "server.py", *options)
    url = machines.until(lambda: re.search(r"http://\S+", machines.said(0)))[0]
    body = {"prompt": "ROMEO:\n", "max_tokens": 12, "temperature": 0}
    client = machines.inside(
        0, sys.executable, "-c", CLIENT, f"{url}/v1/completions", json.dumps(body)
    )
    answer = json.loads(subprocess.run(client, capture_output=True, timeout=120).stdout)
    llm = LLM(SHAKESPEARE, device="cpu", dtype="float32")
    (request,) = llm.generate("ROMEO:\n", max_tokens=12, temperature=0)
    assert answer["choices"][0]["text"] == request.outputs[0].text
    os.kill(machines.pids(0)[1], signal.SIGTERM)
    assert machines.end() == [0, 0]
    assert not machines.errors(0) and "serving" not in machines.said(1)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_machine_dies(machines, who):
    """The other one waited for it for ever; or ended without a word of ours, as was so where rank 0
    had died with its machine."""
    for i in range(2):
        machines.start(i, PROGRAM, *LONG)
    machines.until(lambda: len(machines.said(0, "out")) > 2)
    for pid in machines.pids(who):
        os.kill(pid, signal.SIGKILL)
    assert all(machines.end())  # 1 s on a quiet machine, 4 beside eight busy processes
    (line,) = machines.errors(1 - who)
    assert f"rank {1 - who}" in line and not machines.errors(who)


@pytest.mark.slow
def test_a_cable_is_pulled(machines):
    """Ranks that wait for ever, since no connection is closed: what docs/many-machines.md says
    against that did nothing for the ranks, or for torchrun."""
    if not (machines.names and ctypes.util.find_library("keepalive")):
        pytest.skip("needs two networks, and libkeepalive")
    alive = {"LD_PRELOAD": "libkeepalive.so", "KEEPIDLE": "5", "KEEPINTVL": "5", "KEEPCNT": "2"}
    for i in range(2):
        setting = "echo 5 > /proc/sys/net/ipv4/tcp_retries2"
        subprocess.run(machines.inside(i, "sh", "-c", setting), check=True)
        machines.start(i, PROGRAM, *LONG, **alive)
    machines.until(lambda: len(machines.said(0, "out")) > 2)
    ip("-n", machines.names[0], "link", "set", machines.links[0], "down")
    assert all(machines.end())
    (line,) = machines.errors(0)
    # On the other machine torchrun may notice first, and end its rank before that has spoken.
    assert "rank 0 cannot go on" in line and len(machines.errors(1)) <= 1


@pytest.mark.slow
def test_machines_that_differ(machines):
    """A difference was not noticed, or told by each rank in its own words. The second machine's
    rank may be ended before it has spoken."""
    machines.start(0, PROGRAM, *SOME)
    machines.start(1, PROGRAM, *SOME, "--dtype", "bfloat16")
    assert all(machines.end())
    (line,) = machines.errors(0)
    assert "rank 1 has {'dtype': 'bfloat16'}, rank 0 {'dtype': 'float32'}" in line
    assert machines.errors(1) in ([], [line])


@pytest.mark.slow
def test_ranks_that_cannot_reach_each_other(machines):
    """A rank that gave an address of its own machine alone: it ended without a word, and the other
    waited for a year. Here minutes are seconds."""
    if not machines.names:
        pytest.skip("needs two networks")
    for i in range(2):
        machines.start(i, WORKER, "impatient", *SOME, link="lo")
    assert all(machines.end())
    lines = [machines.errors(i) for i in range(2)]
    # Where torchrun ends first on one machine, it may end the other's rank before that has spoken.
    assert any(lines) and all(len(each) <= 1 for each in lines), machines.said(0)
    assert all("GLOO_SOCKET_IFNAME" in line for each in lines for line in each)


@pytest.mark.slow
@pytest.mark.parametrize(("who", "conf"), [(0, "join_timeout=3"), (1, "read_timeout=3")])
def test_a_machine_that_never_comes(machines, who, conf):
    """The options that docs/many-machines.md names bound how long torchrun waits."""
    machines.start(who, PROGRAM, *SOME, conf=f",{conf}")
    assert all(machines.end())
    assert not machines.said(who, "out") and "Timeout" in machines.said(who)
