"""An HTTP server that OpenAI's clients can talk to, in front of the scheduler.

    python server.py                            the bundled model, on http://127.0.0.1:8000
    python server.py --checkpoint DIR --compile --api-key SECRET

These threads run:

    - The engine's thread, the main one, runs the engine, and after each step wakes the connections
      whose requests have made progress.
    - Each connection has a thread. It reads a request, puts it into the inbox of the engine's
      thread, and waits for news. It reads the state of its sequences only when the client has taken
      the previous part. So there is no queue of tokens, and a slow client delays nobody.
    - One thread accepts clients, and one watches for signals.

    client --> Handler.complete --> API.prepare --> inbox --> Server.drive: submit, step, step
    client <-- Handler.send <-- Completion.parts <-- news <--- Server.wake <----+

around/api has the rest: the connections, HTTP, what bodies mean, who is let in, metrics, and the
page. Read: Server, command.
"""

import traceback
from argparse import ArgumentParser, Namespace
from queue import SimpleQueue
from typing import Any

from around import settings
from around.api import API, Handler, Metrics, ServerArgs, listen_at, serve, server_args
from around.folder import first_sampling
from around.machine import Ranks, say
from around.settings import SamplingParams
from around.start import cache_size, launch, open_engine
from scheduler import Engine, Request


class Server:
    """The engine, and the connections that wait for it. Only drive() changes the engine's state.

    Attributes:
        listener: the socket in which clients queue until front.listen accepts them.
        busy: the connections that read or answer a completion. A connection leaves this set when it
            has answered, and when its client has left. After a signal, listen() waits for those in
            it.
        inbox: what drive() calls next, functions without arguments; None ends it.
        owners: each request in the engine -> the connection that answers it. Only drive() changes
            this and `metrics`.
        stopping: a signal has arrived, or the engine has died.
        over: the wait for running completions has ended. Those that are left get an error.
    """

    stopping = over = False

    def __init__(self, engine: Engine, args: ServerArgs, listener: Any) -> None:
        self.engine = engine
        self.args = args
        self.listener = listener
        self.api = API(engine, args)
        on_page = first_sampling(args.checkpoint) | args.sampling
        self.metrics = Metrics(engine, self.api.name, on_page)
        self.busy: set[Handler] = set()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.owners: dict[Request, Handler] = {}

    def drive(self) -> None:
        """Call what is in the inbox, until None comes. A step is put there whenever the inbox is
        empty and requests are left in the engine.

        An error ends all requests, so that the engine can go on with the next ones. If a rank is
        lost, it cannot go on: then the error is raised again.
        """
        for task in iter(self.inbox.get, None):
            try:
                task()
                if self.engine.queue and self.inbox.empty():
                    self.inbox.put(self.step)
            except Exception as error:
                self.engine.reset()
                self.wake([*self.owners])
                if isinstance(error, ConnectionError):  # to a rank
                    raise
                traceback.print_exc()

    def step(self) -> None:
        """Run a step, but first end the requests whose connections no longer wait for them. wake()
        drops these, and those that the step finishes."""
        unwanted = [request for request, owner in self.owners.items() if owner not in self.busy]
        for request in unwanted:
            self.engine.abort(request)
        self.wake(unwanted + self.engine.step())

    def submit(self, requests: list[Request], connection: Handler) -> None:
        """Put the requests of a connection into the engine's queue."""
        for request in requests:
            self.owners[request] = connection
            self.engine.submit(request)

    def wake(self, requests: list[Request]) -> None:
        """Wake the connections whose requests have made progress. A connection that streams is
        woken after each step, and any other only when one of its requests has finished."""
        for request in requests:
            connection = self.owners[request]
            finished = request.finished
            if finished:
                self.metrics.count(request)
                # This breaks a cycle, so that memory is free at once. A request without outputs
                # counts as finished.
                request.outputs.clear()
                del self.owners[request]
            if finished or connection.stream:
                connection.news.set()


def command(flags: Namespace, ranks: Ranks) -> int:
    """Load the model and serve it."""
    args = server_args(flags, ranks)
    # Loading takes long, and the port may be taken. Only rank 0 serves. Clients are let in when the
    # model is ready, so that a proxy sends them to other replicas until then.
    if not ranks.rank:
        listen_at(args.host, args.port).close()
    engine = open_engine(args, ranks)
    if engine:  # None: this is another rank, and has followed the first one until its end
        say(cache_size(engine))
        serve(Server(engine, args, listen_at(args.host, args.port)))
    return 0


def parse_args(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="server.py", description="Serve a model over HTTP.")
    settings.add_flags(parser, ServerArgs, speculate="--speculate-ngram", checkpoint="--model")
    group = parser.add_argument_group("sampling", "of requests that set none")
    settings.add_flags(group, SamplingParams, max_tokens="--max-new-tokens")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run until a signal arrives, and return the exit status."""
    return launch("server.py", argv, parse_args, command)


if __name__ == "__main__":
    raise SystemExit(main())
