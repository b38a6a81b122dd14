"""How programs start: a command line becomes a loaded model and an engine that fits the machine.

The door is what is imported here.
"""

from .begin import cache_size, launch, load_models, make_engine, open_engine
from .command import asked_of, parse_args, run_engine, stream
