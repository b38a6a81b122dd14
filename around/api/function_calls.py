"""Function calls: the tools that a chat may use, and the calls in what a model writes.

A chat template tells the model which functions there are, and the model was trained to answer with
calls in the form that its template shows. A call is text like any other. So this file reads a
reply as it grows, and splits it into text and calls; whatever is no valid call stays text. Where a
call is required, a grammar allows nothing else (structured.py). This file knows neither the engine
nor HTTP. Papers: Schick et al. 2023 (Toolformer, arXiv:2302.04761), Patil et al. 2023 (Gorilla,
arXiv:2305.15334). Read: FORMS, Reader, restrict.

    hermes   I look. <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>
    llama3   {"name": "weather", "parameters": {"city": "Rome"}}
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from around.folder import read_arguments
from around.settings import JSON, SettingError, check, choose, supported
from around.structured import PARTS, closed


class Form(NamedTuple):
    """How a model writes its calls.

    Attributes:
        arguments: the key under which a call has its arguments.
        begin, end: what it writes around a call.
        shown: a regular expression for the chat templates that show it, and no other.
        find: finds what stands before a call, in a text from a position on. At the end of the text
            it also finds what may become that. None: no call can follow.
        close: matches what stands after a call.
    """

    arguments: str
    begin: str
    end: str
    shown: str
    find: Callable
    close: re.Pattern


FORMS = dict(
    # Qwen, Hermes and SmolLM3.
    hermes=Form(
        arguments="arguments",
        begin="<tool_call>\n",
        end="\n</tool_call>",
        # Qwen3-Coder and GLM have the same marks, but no JSON between them.
        shown=r'(?s)<tool_call>.*"arguments\\?":',
        # White space, if any, and the mark before a brace; or, at the end of the text, white space,
        # if any, and perhaps a part of the mark. So there is always a match. The lookbehind lets
        # white space begin only at its first space: if the search tried each of 4,000 spaces, it
        # would take 0.3 s.
        find=re.compile(r"(?:(?<!\s)\s+)?(?:<tool_call>\s*(?=\{|\Z)|(?:<[a-z_]{0,9})?\Z)").search,
        close=re.compile(r"\s*(?:</tool_call>|(?=<tool_call>))"),
    ),
    # Llama 3. A call is an object with no mark around it. The reply is nothing but calls: the first
    # stands at the beginning of the text, and each other one behind the one before.
    llama3=Form(
        arguments="parameters",
        begin="",
        end="",
        # Others have such an object in a list or behind a mark, or with more between the two keys.
        shown=r'(?<![>\[])\{\\?"name\\?": [^,{}]*, \\?"parameters\\?":',
        find=re.compile(r"[\s;,]*(?=\{|\Z)").match,
        close=re.compile(""),
    ),
)
CUT_OFF = re.compile(r"\s*(?:</?[a-z_]*)?\Z")  # how a reply may end after a call: within a mark
DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
# How a required call is written. Without limits, a weak model writes white space for ever. Keywords
# that llguidance lacks have no effect.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
           "lenient": True}  # fmt: skip


def form_in(template: str) -> Form | None:
    """Return the form that a chat template shows its model; None if it shows none."""
    return next((form for form in FORMS.values() if re.search(form.shown, template)), None)


# --- What a request may call ----------------------------------------------------------------------


class Tools(NamedTuple):
    """What a reply may call. Without schemas, it may call nothing, and its form is not used.

    Attributes:
        form: how the calls are written.
        schemas: each function's name -> the JSON schema of its arguments.
        is_parallel: whether there may be several calls in a reply. If not, the first one counts.
    """

    form: Form
    schemas: dict[str, JSON]
    is_parallel: bool


NO_TOOLS = Tools(FORMS["hermes"], {}, True)


def tools_of(fields: JSON, form: Form | None) -> Tools:
    """Return what a reply may call, by a chat's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        SettingError: `tools` has another form than OpenAI's, or the model has no form for calls.
    """
    schemas = {}
    for i, tool in enumerate(fields["tools"]):
        at = f"tools[{i}].function"
        function = check(at, check(at, tool, dict).get("function"), dict)
        name = check(f"{at}.name", function.get("name"), str)
        schemas[name] = check(f"{at}.parameters", function.get("parameters") or {}, dict)
    if not schemas or fields.get("tool_choice") == "none":
        return NO_TOOLS
    if not form:
        raise SettingError("tools", "need a template whose calls can be read: see --tool-format")
    return Tools(form, schemas, fields["parallel_tool_calls"])


def restrict(fields: JSON, tools: Tools) -> None:
    """If `tool_choice` requires a call, set `structured_outputs` in `fields` to a grammar that
    allows nothing but calls, whatever structure is asked for. If it does not, a structure decides
    what can be written. vLLM does the same.

    Raises:
        SettingError: the choice is unknown, or names a function that is not in `tools`.
    """
    choice = fields.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return
    if not tools.schemas:
        raise SettingError("tool_choice", "needs tools")
    if isinstance(choice, dict):  # one function by name
        name = check("tool_choice[function]", choice.get("function"), dict).get("name")
        tools = Tools(tools.form, {name: choose("tool_choice", name, tools.schemas)}, False)
    else:
        supported("tool_choice", choice, "auto", "none", "required")
    fields["structured_outputs"] = {"grammar": grammar_of(tools)}


def grammar_of(tools: Tools) -> str:
    """Return a grammar that allows nothing but calls."""
    form = tools.form
    calls = []
    for name, schema in tools.schemas.items():
        call = f'{form.begin}{{"name": {json.dumps(name)}, "{form.arguments}": '
        if not PARTS & schema.keys():  # else its properties stand elsewhere
            schema = {"properties": {}} | schema  # OpenAI: a function that lists none has none
        arguments = closed(schema) | {"type": "object", "x-guidance": WRITTEN}
        calls.append(f"{json.dumps(call)} %json {json.dumps(arguments)}")
    # Without a limit, a weak model writes one call again and again.
    more = '("\\n" call){0,7}' if tools.is_parallel else ""
    return f"start: call {more}\ncall: ({' | '.join(calls)}) {json.dumps('}' + form.end)}\n"


# --- What a reply calls ---------------------------------------------------------------------------


@dataclass
class Reader:
    """Splits a reply, as it grows, into its text and its calls.

    Attributes:
        tools: the functions that it may call. A call of another one is text.
        start: what stands before it has been read.
        calls: the name and the arguments, as JSON, of each call so far; without is_parallel, of the
            first.
    """

    tools: Tools
    start: int = 0
    calls: list = field(default_factory=list)

    def read(self, text: str, ended: bool) -> str:
        """Read what is new, and return it without its calls, which join `calls`.

        Until the reply has ended, this waits at text that may still become a call, and at white
        space that may stand before a call. If text begins like a call but cannot be read as one, it
        may be incomplete or wrong, and only the end of the reply tells which. Until then, this text
        and all that follows it wait. So nothing that has been returned changes as the reply grows.

        Args:
            text: the reply so far, from its beginning.
            ended: whether it is complete.

        Returns:
            The text, less the white space directly before a call and, if there are calls, at the
            end.

        Example:
            'Look: <tool_call>{"name": "f", "arguments": {}}</tool_call>' -> "Look:" and a call
            'Look: <tool_call>{"name": "f",' -> "Look:"; if it has ended, the whole text
        """
        shown = ""
        find = self.tools.form.find
        tag = self.tools.schemas and find(text, self.start)
        while tag and tag.end() < len(text):
            call, end = read_call(text, tag.end(), self.tools, ended)
            if not (call or ended):
                break  # no call yet, or never one: only the end of the reply will tell
            shown += text[self.start : tag.start() if call else end]
            if call and (self.tools.is_parallel or not self.calls):
                self.calls.append(call)
            self.start = end
            # llama3's mark can be empty. From its own place it would be found again, for ever.
            tag = find(text, max(end, tag.start() + 1))
        if not tag:
            self.tools = NO_TOOLS
        stop = len(text) if ended or not tag else tag.start()
        shown += text[self.start : stop]
        self.start = stop
        return shown.rstrip() if ended and self.calls else shown


def read_call(text: str, start: int, tools: Tools, ended: bool) -> tuple:
    """Read the call that begins at `start`. At the end of a reply its closing mark may be missing
    or cut: small models leave it out, and a stop string or max_tokens cuts it.

    Returns:
        Its name and arguments, or None if there is no valid call; and where the call ends, or,
        without one, where its JSON does.
    """
    end = start
    try:
        call, end = DECODER.raw_decode(text, start)
        close = tools.form.close.match(text, end) or (ended and CUT_OFF.match(text, end))
        if close and call["name"] in tools.schemas:
            # Models write the key of another form, too. JSON has no NaN, and no Infinity, which a
            # number that is too large has become.
            arguments = json.dumps(
                read_arguments(call.get("arguments") or call.get("parameters")),
                ensure_ascii=False,
                allow_nan=False,
            )
            return dict(name=call["name"], arguments=arguments), close.end()
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None, end
