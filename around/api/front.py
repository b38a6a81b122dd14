"""What stands between a socket and the engine: who is let in, what is asked for, the threads, and
the signals.

In this file `server` is a server.Server, the engine's thread and what all connections share. How a
request is read and an answer sent is in http1.py, what a body means in requests.py, and what is
answered in answers.py. Read: serve, listen, Handler.route, Handler.complete.
"""

import json
import os
import re
import secrets
import select
import signal
import socket
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread, active_count, stack_size
from typing import Any
from urllib.parse import unquote

from around import settings
from around.api.answers import Problem, demand
from around.api.function_calls import FORMS
from around.api.http1 import HEAD_SECONDS, Exchange
from around.machine import Ranks, say
from around.settings import JSON, EngineArgs, SamplingParams, setting

MAX_THREADS = 1028  # 1,024 connections, and main, listen, watch and threads.keep_pool
MAX_BUSY = 960  # connections with a completion; the others are for /health and the like
PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class ServerArgs(EngineArgs):
    """What to serve, and to whom."""

    host: str = setting("localhost", "0.0.0.0: listen on all networks, accept any Host header")
    port: int = setting(8000, "0: any free port", 0, 65535)
    served_model_name: str | None = setting(None, "in the API (default: the folder's name)")
    max_queue: int = setting(512, "connections that wait before a 429", 0)
    max_body: int = setting(2**22, "bytes of a request's body", 1)
    shutdown_timeout: float = setting(30.0, "seconds for running requests to finish", 0, 1e6)
    api_key: str | None = setting(None, "clients must send it (default: $KILOLM_API_KEY)")
    system: str | None = setting(None, "system prompt of chats that have none")
    sampling: JSON = field(default_factory=dict)  # of requests that set none
    tool_format: str = setting(
        "auto", "how function calls are written; auto: as in the template", choices=("auto", *FORMS)
    )


def server_args(flags: Namespace, ranks: Ranks) -> ServerArgs:
    """Check a command line. Raises ValueError."""
    # On a CPU, sequences that decode wait less for a step that has few prompt tokens: the 99th
    # percentile of the time between their tokens is half as long with 32 as with 512.
    defaults: JSON = dict(
        api_key=os.getenv("KILOLM_API_KEY"),
        small_chunk=32 if ranks.device.type == "cpu" else None,
        sampling=settings.given(SamplingParams, flags),
    )
    args = ServerArgs(**defaults | settings.given(ServerArgs, flags))
    SamplingParams(**args.sampling)  # this checks them
    if "" in (args.host, args.api_key):
        raise ValueError("--host and --api-key (or $KILOLM_API_KEY) must not be empty")
    return args


# --- Threads and signals --------------------------------------------------------------------------


def listen(server: Any) -> None:
    """Accept connections until a signal arrives, then let the running completions finish within
    --shutdown-timeout, and end the server's drive()."""
    host, port = server.listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host  # IPv6
    say(f"sampling settings in place of the defaults: {server.api.defaults}")
    say(f"serving {server.api.name} on http://{host}:{port}")
    while not server.stopping:
        # While no thread is free, new clients wait in the listening socket.
        open_to = [server.listener] if active_count() < MAX_THREADS else []
        for listener in select.select(open_to, [], [], 0.1)[0]:
            try:
                # The constructor answers: http.server calls handle() in it. In one statement: where
                # no thread starts, nothing keeps the client's socket.
                Thread(target=Handler, args=(*listener.accept(), server), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
                say(str(error))
                time.sleep(1)
    server.listener.close()
    for seconds in (server.args.shutdown_timeout, 1.0):
        end = time.monotonic() + seconds
        while server.busy and time.monotonic() < end:
            time.sleep(0.05)
        server.over = True  # those that are left have a second to send an error
    server.inbox.put(None)


def serve(server: Any) -> None:
    """Serve until SIGTERM or SIGINT, then finish running requests within --shutdown-timeout.

    The model runs in this thread, where it was loaded, and the connections in others. PyTorch's
    pool of threads belongs to the thread that first used it. In another thread the model would get
    a second pool, and OpenMP, which would see more threads than cores, would put them to sleep
    after each operation: on two cores the bundled model was slower by half.
    """
    # A connection's thread compiles its grammar. llguidance's compiler recurses along references:
    # the longest structure that is allowed needs up to 100 MB of stack. Stack that is not used
    # takes no memory.
    stack_size(2**27)
    watch_signals(server)
    listening = Thread(target=listen, args=(server,))
    listening.start()
    try:
        server.drive()
    finally:
        server.stopping = True  # also after an error, or clients would wait for ever
        listening.join()


def watch_signals(server: Any) -> None:
    """Stop the server at the first signal, and exit at once at the second.

    Python calls a signal's handler in the main thread, between two instructions. So it calls none
    while that thread waits in a collective for a rank that hangs, nor for a signal that came just
    before the thread began to wait for its inbox. The handlers here do nothing. They are there
    because Python, as soon as a signal with a handler arrives, also writes a byte into the pipe of
    set_wakeup_fd, and another thread reads it.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        while os.read(reading, 1):
            if server.stopping:
                os._exit(1)
            server.stopping = True
            say(f"stopping: {len(server.busy)} still running; a second Ctrl-C or SIGTERM ends them")

    Thread(target=watch, daemon=True).start()


# --- A connection ---------------------------------------------------------------------------------

# All names that end in .localhost mean this host (RFC 6761), with or without a final dot.
LOOPBACK = r"(?i:([\w-]+\.)*localhost\.?|127[.0-9]+|::1|\[::1\])"
# What clients on this host send: 0.0.0.0 and [::] reach it, too. There may be spaces at the end.
LOCAL = rf"({LOOPBACK}|0\.0\.0\.0|\[::\])(:[0-9]*)? *"


class Handler(Exchange):
    """A connection to one client, in a thread of its own: answers its request."""

    summary: Callable = dict  # of a completion, for the log

    def handle(self) -> None:
        """Answer, then wait until the client closes: if this side closed first while the client
        still sends, the answer would be lost."""
        # An OSError means that the client has left, or was silent for too long.
        with self.connection, suppress(OSError):
            self.answer()
            self.connection.shutdown(socket.SHUT_WR)
            self.timed.deadline = time.monotonic() + HEAD_SECONDS
            while self.timed.read(2**16):
                pass

    def answer(self) -> None:
        """Read the request, answer it, with an error if need be, and log it."""
        start = time.monotonic()
        error = ""
        try:
            self.read_head()
            self.route()
        except Problem as problem:
            # Behind one of these may stand the value of a field, such as a prompt.
            error = re.split(""" ['"[{]|:""", problem.json["error"]["message"])[0]
            self.send(problem.json, problem.status)
        except (ConnectionError, TimeoutError) as gone:  # or silent for too long
            error = str(gone)
            raise
        except Exception:  # a bug in the server, whose details are not for the client
            traceback.print_exc()
            error = "internal error"
            self.send(Problem(500, error).json, 500)
        finally:
            line = self.summary(
                time=time.strftime("%FT%TZ", time.gmtime()),
                # A proxy says for whom it asks.
                client=self.headers.get("X-Forwarded-For", self.client_address[0])[:200],
                request=self.asked[:200],
                status=self.status,
                error=error,
                seconds=round(time.monotonic() - start, 3),
            )
            # Pages and proxies ask for these all the time; and many a client leaves at once.
            if (self.asked or self.status) and (
                error or self.asked not in ("GET /engine", "GET /health")
            ):
                # If it cannot be written, or stderr is closed, the next answer is still sent.
                with suppress(OSError, ValueError):
                    say(json.dumps(line))
            self.server.busy.discard(self)

    def route(self) -> None:
        """Check the head of the request, and call the function that answers it."""
        self.check_host()
        model = f"GET /v1/models/{self.server.api.name}"
        asked = THE_MODEL if unquote(self.asked) == model else self.asked
        demand(
            asked in ROUTES,
            404,
            f"there is no {asked:.100}: there are {', '.join(ROUTES)}; docs/serving.md says how "
            "clients of /v1/responses use chats",
        )
        if asked not in ("GET /", "GET /health"):
            self.check_key()
        ROUTES[asked](self)

    # --- What is answered -------------------------------------------------------------------------

    def send_snapshot(self) -> None:
        """Answer with a snapshot of the engine, which its own thread takes. Pages ask for it again
        and again. They wait a tenth of a second, and get the one before if a step lasts longer."""
        self.server.inbox.put(self.server.metrics.take_snapshot)
        time.sleep(0.1)
        self.send(self.server.metrics.snapshot)

    def send_health(self) -> None:
        """Of this, the health checks of proxies read only the status, 200 or 503."""
        demand(not self.server.stopping, 503, "the server is stopping")
        self.send({"status": "ok", "version": settings.VERSION})

    def complete(self, chat: bool) -> None:
        """Answer a completion, whole or streamed."""
        server = self.server
        # This check comes before joining `busy`, so a refused connection is never counted, and two
        # that arrive together for the last place do not refuse each other. As nothing locks the
        # check and the joining together, both may get in: the queue is then too long by those that
        # came within some microseconds.
        self.check_queue()
        # Join `busy` before the next check. In the other order, a server that stops could find
        # nobody busy between the two, and end without waiting for this completion.
        server.busy.add(self)
        demand(not server.stopping, 503, "the server is stopping")
        completion = server.api.prepare(self.read_json(), chat)
        self.summary = completion.summary
        self.stream = completion.stream
        self.news = Event()  # set when there may be something to send; see Server.wake
        server.inbox.put(lambda: server.submit(completion.requests, self))
        for part in completion.parts(self.wait_for_news):
            if part:
                self.send(part)
            else:
                # A request in the queue has no news, and one that writes a function call has news
                # but nothing to send. No failing send tells that the client has left, so look.
                self.check_client()
        if self.stream:
            self.send("[DONE]")

    def wait_for_news(self) -> None:
        """Wait until the engine has made progress, but not for long.

        Raises:
            Problem: the server is stopping, and the grace period is over. The text so far is not
                sent, as a proxy can ask another replica for all of it.
        """
        self.news.wait(0.3)
        self.news.clear()
        demand(not self.server.over, 503, "the server is stopping")

    # --- Checks -----------------------------------------------------------------------------------

    def check_host(self) -> None:
        """Refuse a page of another site, which may reach this address by that site's own name (DNS
        rebinding): a server on loopback answers only to names of this host."""
        host = self.headers.get("Host", "localhost")
        if re.fullmatch(LOOPBACK, self.server.args.host):
            demand(
                re.fullmatch(LOCAL, host),
                403,
                f"the Host is {host!r:.100}, and this server answers to localhost: let the proxy "
                "in front send `Host: localhost`, or start the server with --host 0.0.0.0",
            )

    def check_key(self) -> None:
        """Raise a Problem if the server has a key and the client has sent another one, or none."""
        key = self.server.args.api_key
        if key:
            # What follows "Bearer ". Header values are bytes, one for each character.
            sent = self.headers.get("Authorization", "")[7:].encode("latin-1")
            is_right = secrets.compare_digest(sent, key.encode())
            demand(is_right, 401, "the API key is missing or wrong", None, "invalid_api_key")

    def check_queue(self) -> None:
        """Raise a Problem if this would be one connection too many that reads or answers a
        completion: beside max_num_seqs, as many as can run at once, --max-queue may wait."""
        num_busy = len(self.server.busy) + 1
        most = min(self.server.engine.max_num_seqs + self.server.args.max_queue, MAX_BUSY)
        demand(
            num_busy <= most,
            429,
            f"the server is busy: {num_busy} requests would run or wait, and {most} may: try again "
            "in a moment",
        )


THE_MODEL = "GET /v1/models/THE NAME"  # no client can ask for a path with a space
ROUTES = {
    "GET /": lambda c: c.send(PAGE.read_text("utf-8"), content_type="text/html"),
    "GET /version": Handler.send_health,
    "GET /health": Handler.send_health,
    "GET /metrics": lambda c: c.send(
        c.server.metrics.text(), content_type="text/plain; version=0.0.4"
    ),
    "GET /engine": Handler.send_snapshot,
    "GET /v1/models": lambda c: c.send({"object": "list", "data": [c.server.api.model]}),
    THE_MODEL: lambda c: c.send(c.server.api.model),
    "POST /v1/completions": lambda c: c.complete(chat=False),
    "POST /v1/chat/completions": lambda c: c.complete(chat=True),
}
