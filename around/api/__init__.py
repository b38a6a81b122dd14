"""OpenAI's API over HTTP, but for the engine's thread, which is in server.py.

The door is what is imported here.
"""

from .answers import demand
from .front import Front, Listener, ServerArgs, serve, server_args
from .http1 import EVENTS, JSON_TYPE, listen_at
from .metrics import Metrics
from .requests import API

__all__ = [
    "API", "EVENTS", "JSON_TYPE", "Front", "Listener", "Metrics", "ServerArgs", "demand", "listen_at",
    "serve", "server_args",
]  # fmt: skip
