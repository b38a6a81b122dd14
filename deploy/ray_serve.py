"""Replicas of server.py under Ray Serve, which starts, watches, scales and ends them.

    serve run --app-dir deploy ray_serve:build max_replicas=8 ranks=2 options="--compile"

Each replica is an actor that runs server.py and passes requests on to it. Read: build, Replica.
"""

import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Thread

import aiohttp
from ray import cloudpickle, serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

SERVER = Path(__file__).resolve().parents[1] / "server.py"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
PASSED_ON = ("authorization", "content-type")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors need not find this file


class Settings(serve.config.AutoscalingConfig, extra="forbid"):
    """Ray's own settings of scaling, and what a replica is."""

    target_ongoing_requests: float = 16  # per replica, including those that wait for it
    options: str = ""  # of server.py
    ranks: int = 1  # processes that share the model, each with a core
    gpus: int = 0  # of each rank


@serve.deployment(health_check_period_s=2, graceful_shutdown_timeout_s=60)
class Replica:
    """A server of its own, on a port that only this actor talks to."""

    def __init__(self, options: str, ranks: int) -> None:
        # Each process ends with its parent, even a killed one. Ray would give each rank all cores.
        python = f"env OMP_NUM_THREADS=1 setpriv --pdeathsig TERM '{sys.executable}'"
        run = f"{python} -m torch.distributed.run --standalone --no-python --nproc-per-node {ranks}"
        command = f"{run if ranks > 1 else ''} {python} '{SERVER}' --port 0 {options}"
        self.server = subprocess.Popen(shlex.split(command), stderr=subprocess.PIPE, text=True)
        for line in self.server.stderr:
            print(line, end="", file=sys.stderr)
            if line.startswith("serving "):
                break
        else:
            raise RuntimeError(f"server.py {options} has ended: the lines above say why")
        Thread(target=sys.stderr.writelines, args=[self.server.stderr]).start()  # or the pipe fills
        no_limits = {"timeout": aiohttp.ClientTimeout(), "connector": aiohttp.TCPConnector(limit=0)}
        self.http = aiohttp.ClientSession(line.split()[-1], **no_limits)  # Ray has its own limits

    async def check_health(self) -> None:
        """Raise an error where the server does not answer: Ray then starts another replica."""
        (await self.http.get("/health")).raise_for_status()

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and the answer back as it comes."""
        given = {name: request.headers.get(name, "") for name in PASSED_ON}
        body = await request.body()
        path = "/" + request.url.path.lstrip("/")  # aiohttp takes //host/path for another host
        reply = await self.http.request(request.method, path, headers=given, data=body)

        async def pieces() -> AsyncIterator[bytes]:
            async with reply:  # where the client has gone, the server's request ends, too
                async for piece in reply.content.iter_any():
                    yield piece

        return StreamingResponse(pieces(), reply.status, reply.headers)


def build(settings: Settings) -> serve.Application:
    """Build the application from the arguments that follow its name in the `serve run` command."""
    return Replica.options(
        autoscaling_config=settings.model_dump(exclude={"options", "ranks", "gpus"}),
        ray_actor_options={"num_cpus": settings.ranks, "num_gpus": settings.ranks * settings.gpus},
        max_ongoing_requests=int(4 * settings.target_ongoing_requests),
        request_router_config={"request_router_class": ROUTER},
    ).bind(settings.options, settings.ranks)
