"""Replicas of server.py under Ray Serve, which starts, watches, scales and ends them.

    pip install -e ".[ray]"
    serve run --app-dir deploy ray_serve:build
    serve run --app-dir deploy ray_serve:build max_replicas=8 ranks=2 options="--compile"

Each replica is an actor that runs server.py, as one process or as several ranks on one machine, and
passes requests on to it: the API is the server's own. Requests with the same X-Session-Id go to the
same replica, whose prefix cache knows their beginning. Read: build, Replica.
"""

import asyncio
import ctypes
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from ray import cloudpickle, serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import StreamingResponse

SERVER = Path(__file__).resolve().parents[1] / "server.py"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
PASSED_ON = "authorization", "content-type", "x-request-id"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors need not find this file
DIE_WITH_PARENT = 1, signal.SIGKILL  # PR_SET_PDEATHSIG: the end of an actor that is killed


class Replica:
    """A server of its own, on a port that only this actor talks to."""

    def __init__(self, options: str = "", ranks: int = 1) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [sys.executable, *(launcher if ranks > 1 else []), str(SERVER), "--port", "0"]
        self.child = subprocess.Popen([*words, *shlex.split(options)], stderr=subprocess.PIPE,
            text=True, preexec_fn=lambda: ctypes.CDLL(None).prctl(*DIE_WITH_PARENT))  # fmt: skip
        said = []
        for line in self.child.stderr:
            said.append(line)
            if served := re.search(r"serving \S+ on http://127.0.0.1:(\d+)", line):
                break
        else:
            raise RuntimeError(f"server.py {options} has ended: {''.join(said)[-2000:]}")
        self.port = int(served[1])
        log = self.child.stderr  # somebody has to read on, or the pipe fills up
        threading.Thread(target=lambda: sys.stderr.writelines(log), daemon=True).start()

    def check_health(self) -> None:
        """Raise an error where the server has ended: Ray then starts another replica."""
        if self.child.poll() is not None:
            raise RuntimeError(f"server.py has ended with status {self.child.returncode}")

    def __del__(self) -> None:  # when no request is left, or graceful_shutdown_timeout_s is over
        self.child.terminate()
        self.child.wait()

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and the answer back as it comes."""
        body = await request.body()
        head = f"{request.method} {request.url.path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n"
        given = ((name, request.headers.get(name)) for name in PASSED_ON)
        head += "".join(f"{name}: {value}\r\n" for name, value in given if value)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        writer.write(f"{head}\r\n".encode("latin-1") + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        headers.pop("Connection")

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while data := await reader.read(2**16):
                    yield data
            finally:  # also when the client has gone: the server then ends its request
                writer.close()

        return StreamingResponse(pieces(), int(status.split()[1]), headers)


def build(args: dict[str, str]) -> serve.Application:
    """The application, from the words behind its name on `serve run`'s command line."""
    ranks, least = int(args.get("ranks", 1)), int(args.get("min_replicas", 1))
    most, busy = int(args.get("max_replicas", 2)), float(args.get("target_ongoing_requests", 16))
    scaling = AutoscalingConfig(min_replicas=least, max_replicas=most, initial_replicas=least,
                                target_ongoing_requests=busy)  # fmt: skip
    each = {"num_cpus": ranks, "num_gpus": ranks * int(args.get("gpus", 0))}
    bundle = {"CPU": ranks} | ({"GPU": each["num_gpus"]} if each["num_gpus"] else {})
    return serve.deployment(
        Replica, name="kilolm", autoscaling_config=scaling, ray_actor_options=each,
        placement_group_bundles=[bundle], placement_group_strategy="STRICT_PACK",  # one machine
        max_ongoing_requests=int(4 * busy), health_check_period_s=2, health_check_timeout_s=10,
        graceful_shutdown_timeout_s=60, graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    ).bind(args.get("options", ""), ranks)  # fmt: skip
