"""How a conversation becomes text: the checkpoint's template, in a sandbox. Read: plain_turn."""

import json
import time
from functools import lru_cache, partial
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

from around.settings import JSON, without_nulls

# For checkpoints without a chat template. It writes the turns as a play, which any base model can
# continue, and which the bundled model was trained on.
PLAIN_TEMPLATE = (
    "{% for turn in messages %}"
    "{{ turn.role | upper }}:\n{{ (turn.content or '') | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)

# For checkpoints that have several chat templates with names, and none named "default".
NO_DEFAULT = "{{ raise_exception('the templates have names, and none is named \"default\"') }}"

# END is put behind a last message that is to be continued, and the rendered text is cut there. It
# has two characters for private use, which templates do not change, as they are no letters or
# spaces.
END = "\U000f5ec3\U000f5ec4"


def plain_turn(message: JSON) -> JSON:
    """Return a message of OpenAI's API as chat templates expect it: without nulls, except that a
    content that is null or left out becomes the refusal, if there is one, or Null(), and parts of
    text become one text; without an empty list of calls; and with calls' arguments as objects."""
    turn = without_nulls(message)
    turn.setdefault("content", turn.get("refusal", Null()))
    if isinstance(turn["content"], list):
        turn["content"] = "\n".join(part["text"] for part in turn["content"])
    if "reasoning" in turn:  # vLLM's name of a thought; most templates know the other
        turn.setdefault("reasoning_content", turn["reasoning"])
    calls = [without_nulls(call) for call in turn.pop("tool_calls", [])]
    for call in calls:
        function = without_nulls(call["function"])
        call["function"] = function | {"arguments": read_arguments(function.get("arguments"))}
    if calls:
        turn["tool_calls"] = calls
    return turn


def read_arguments(arguments: Any) -> "Arguments":
    """Read a call's arguments as clients and models write them: an object, a text of JSON, or such
    a text as a string of JSON. Null, "" and whatever else is empty mean that there are none.

    Raises:
        ValueError, TypeError: it is no JSON, or no object.
    """
    while isinstance(arguments, str):
        arguments = json.loads(arguments.strip() or "null", strict=False)
    return Arguments(**(arguments or {}))  # ** refuses a list, which dict() takes for pairs


class Null(str):
    """A content that is null or left out. A template's `is none` holds for it (see CHAT.tests
    below), and where it is printed or added to a text, it is empty."""


class Arguments(dict):
    """The arguments of a function call in a history: an object, as most templates expect, but where
    a template prints it or adds it to a text, it is a string of JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def refuse(message: str) -> None:
    """Raise an error, for templates that reject a conversation."""
    raise ValueError(message)


# A chat template comes with the checkpoint, so it is untrusted code. It runs in a sandbox, where it
# can neither reach Python's internals nor change its inputs. It gets the functions, filters and
# variables that Hugging Face gives it.
CHAT = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
CHAT.globals.update(raise_exception=refuse, strftime_now=time.strftime, tools=None, documents=None)
CHAT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
CHAT.tests["none"] = lambda value: value is None or isinstance(value, Null)
compile_template = lru_cache(16)(CHAT.from_string)  # for Mistral's it takes 13 ms
