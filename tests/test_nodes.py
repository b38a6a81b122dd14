"""One model over two machines: two torchrun agents with one rendezvous.

The machines are network namespaces joined by a cable (ip netns, which root may make); elsewhere,
they are two addresses of this one. Their names lead nowhere, so all that tp.py says is needed.
"""

import ctypes.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tp_worker
from conftest import SHAKESPEARE
from test_tp import LONG, PROGRAM, SOME, Ranks

pytestmark = pytest.mark.nightly


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


class Machines(Ranks):
    """Two of them."""

    def __init__(self, folder):
        super().__init__(folder)
        self.names = [f"nodes-{os.getpid()}-{end}" for end in "ab"]
        self.port, self.addresses, self.links = 29400, ["10.99.0.1", "10.99.0.2"], ["va", "vb"]
        if not ip("netns", "add", self.names[0]).returncode:
            ip("netns", "add", self.names[1])
            a, b = self.names
            ip(*f"link add va netns {a} type veth peer name vb netns {b}".split())
            for name, address, link in zip(self.names, self.addresses, self.links):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                for each in ("lo", link):
                    assert not ip("-n", name, "link", "set", each, "up").returncode
        else:
            self.names, self.links = [], ["lo", "lo"]
            self.addresses = ["127.0.0.1", "127.0.0.2"]
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self.port = s.getsockname()[1]

    def inside(self, i):
        return ["ip", "netns", "exec", self.names[i]] if self.names else []

    def begin(self, *argv, **env):
        """Start torchrun and its one rank on the next machine."""
        i = len(self.started)
        self.start(
            *self.inside(i), sys.executable, "-m", "torch.distributed.run", "--nnodes", 2,
            "--nproc-per-node", 1, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{self.addresses[0]}:{self.port}",
            "--rdzv-conf", f"is_host={1 - i}", "--local-addr", self.addresses[i], PROGRAM, *argv,
            GLOO_SOCKET_IFNAME=self.links[i], **env,
        )  # fmt: skip

    def errors(self, i):
        """Lines of ours; torchrun has many of its own."""
        return re.findall(r"^\w+\.py: error: .*$", self.said[i][1], re.M)


@pytest.fixture
def machines(tmp_path):
    if not Path("/proc/self/task").exists():
        pytest.skip("reads /proc")
    made = Machines(tmp_path)
    yield made
    made.kill()
    for name in made.names:
        ip("netns", "del", name)


def test_same_text(machines, tmp_path):
    """Another text than one process has, or on both machines; or the first gives up on a second
    that comes 10 s late, or refuses it, as its checkpoint lies elsewhere."""
    machines.begin(*SOME)
    time.sleep(10)
    machines.begin(*SOME, "--checkpoint", shutil.copytree(SHAKESPEARE, tmp_path / "copy"))
    assert machines.end() == [0, 0], machines.said
    assert [out for out, _ in machines.said] == [tp_worker.captured(SOME)[1], ""]
    assert [err.count("new tokens") for _, err in machines.said] == [1, 0]


@pytest.mark.parametrize("who", [0, 1])
def test_a_machine_dies(machines, who):
    """The other one waited for it for ever; or ended without a word of ours."""
    for _ in range(2):
        machines.begin(*LONG)
    for pid in machines.speak()[who]:
        os.kill(pid, signal.SIGKILL)
    assert all(machines.end())  # 1 s on a quiet machine, 4 beside eight busy processes
    (line,) = machines.errors(1 - who)
    assert f"rank {1 - who}" in line and not machines.errors(who)


def test_a_cable_is_pulled(machines):
    """Ranks that wait for ever, since no connection is closed: what docs/many-machines.md says
    against that did nothing for the ranks, or for torchrun."""
    if not (machines.names and ctypes.util.find_library("keepalive")):
        pytest.skip("needs two networks, and libkeepalive")
    alive = {"LD_PRELOAD": "libkeepalive.so", "KEEPIDLE": "5", "KEEPINTVL": "5", "KEEPCNT": "2"}
    for i in range(2):
        setting = "echo 5 > /proc/sys/net/ipv4/tcp_retries2"
        subprocess.run([*machines.inside(i), "sh", "-c", setting], check=True)
        machines.begin(*LONG, **alive)
    machines.speak()
    ip("-n", machines.names[0], "link", "set", machines.links[0], "down")
    assert all(machines.end())
    (line,) = machines.errors(0)
    # On the other machine torchrun may notice first, and end its rank before that has spoken.
    assert "rank 0 cannot go on" in line and len(machines.errors(1)) <= 1
