"""OpenAI's API over HTTP, but for the engine's thread, which is in server.py.

The door is what is imported here.
"""

from .front import Handler, ServerArgs, serve, server_args
from .http1 import listen_at
from .metrics import Metrics
from .requests import API
