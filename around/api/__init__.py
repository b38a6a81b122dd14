"""OpenAI's API over HTTP, but for the engine's thread, which is in server.py.

The door is what is imported here.
"""

from .answers import demand
from .front import Front, Listener, ServerArgs, serve, server_args
from .http1 import listen_at
