"""What a Hugging Face folder means: its config, weights, tokenizer and chat template.

The door is what is imported here. Every family has been compared with `transformers`, logit by
logit.
"""

from .chat import PLAIN_TEMPLATE, plain_turn, read_arguments
from .config import first_sampling, load_config, suggested_sampling
from .families import folded
from .text import Detokenizer, Ids, TextStream
from .tokenizer import Tokenizer
from .weights import Empty, Files, build, is_tied, load_model, named_tensors
