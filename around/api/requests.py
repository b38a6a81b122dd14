"""A body becomes requests: every field of OpenAI's API is checked before the engine gets anything.

Read: API.prepare, translate.
"""

import re
import time
from typing import Any

from around.api.answers import Completion, Problem, demand
from around.api.front import ServerArgs
from around.api.function_calls import FORMS, NO_TOOLS, Tools, form_in, restrict, tools_of
from around.folder import plain_turn, suggested_sampling
from around.settings import JSON, SamplingParams, SettingError, check, supported, without_nulls
from around.structured import structure
from scheduler import Engine, Request


class API:
    """What is served, and how a body becomes requests for it.

    Attributes:
        name: of the model, in the API.
        model: as /v1/models lists it.
        defaults: sampling settings for a body that leaves them out.
        system: a system prompt for a chat that has none.
        form: how the model writes function calls; None: its chat template shows none that is read.
    """

    def __init__(self, engine: Engine, args: ServerArgs) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.name = args.served_model_name or args.checkpoint.resolve().name
        self.model = dict(
            id=self.name,
            object="model",
            owned_by="kilolm",
            created=int(time.time()),
            max_model_len=engine.max_seq_len,
        )
        self.defaults = suggested_sampling(args.checkpoint) | args.sampling
        self.system = args.system
        self.form = FORMS.get(args.tool_format) or form_in(self.tokenizer.tool_template)

    def prepare(self, body: JSON, chat: bool) -> "Completion":
        """Check a body, and make a Request for each prompt. They are not submitted.

        Raises:
            Problem: 400 with the field that is wrong, or 404 for another model.
        """
        # A rendered chat has its special tokens already, unless the plain template rendered it.
        add_special = not chat or self.tokenizer.is_bare
        given = {"add_special_tokens": add_special} | without_nulls(body)
        if given.get("model", self.name) != self.name:
            raise Problem(404, f"the model here is {self.name!r}", "model", "model_not_found")
        source = "messages" if chat else "prompt"
        try:
            fields = translate(given, chat)
            tools = tools_of(fields, self.form) if chat else NO_TOOLS
            restrict(fields, tools)  # may set structured_outputs
            params = self.sampling_params(fields, chat)
            prompts = [self.chat_text(fields, tools)] if chat else split_prompts(fields)
            check("n", len(prompts) * params.n, int, 1, 2048)  # for all prompts together
            requests = [self.request(prompt, params, fields, source) for prompt in prompts]
            return Completion(self, fields, requests, tools, chat)
        except (ValueError, RecursionError) as error:
            # The field has the engine's name: max_completion_tokens is max_tokens there. An error
            # without a field is the template's.
            raise Problem(400, f"{error!s:.500}", getattr(error, "field", source)) from None

    def request(self, prompt: Any, params: SamplingParams, fields: JSON, source: str) -> Request:
        """Make a request for one prompt, a text or ids, if it and the output fit."""
        ids = check("prompt", prompt, str | list)
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, fields["add_special_tokens"])
        longest = self.engine.max_seq_len
        asked = len(ids) + fields.get("max_tokens", 1)  # at least one token has to fit
        demand(
            asked <= longest,
            400,
            # Clients search for this wording, which is OpenAI's.
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{asked} tokens, {len(ids)} of them in the prompt: ask for less.",
            source,
            "context_length_exceeded",
        )
        return self.engine.prepare(
            ids, params, priority=fields.get("priority", 0), cache_salt=fields.get("cache_salt")
        )

    def sampling_params(self, fields: JSON, chat: bool) -> SamplingParams:
        """Return the sampling settings of a request. Without max_tokens, a completion ends after 16
        tokens, and a chat where the defaults or the context end it."""
        given = {name: fields[name] for name in fields.keys() & SamplingParams.__annotations__}
        if not chat:
            return SamplingParams(**self.defaults | {"max_tokens": 16} | given)
        params = SamplingParams(**{"max_tokens": self.engine.max_seq_len} | self.defaults | given)
        return params.with_stop(self.tokenizer.chat_stop)

    def chat_text(self, fields: JSON, tools: Tools) -> str:
        """Render the messages of a chat."""
        messages = fields["messages"]
        demand(messages, 400, "messages is missing or empty: give at least one message", "messages")
        for i, message in enumerate(messages):
            check_message(message, f"messages[{i}]")
        if self.system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        goes_on = fields["continue_final_message"]
        options = dict(
            add_generation_prompt=fields["add_generation_prompt"] and not goes_on,
            tools=fields["tools"] if tools.schemas else None,
        )
        options |= fields["chat_template_kwargs"]
        return self.tokenizer.render_chat(messages, goes_on, **options)


# The fields' defaults; in a chat, add_special_tokens has another one. A value of another type is
# refused.
DEFAULTS: JSON = dict(
    messages=[], stream=False, stream_options={}, echo=False, logit_bias={},
    add_special_tokens=True, response_format={"type": "text"}, chat_template_kwargs={},
    continue_final_message=False, add_generation_prompt=True, tools=[],
    parallel_tool_calls=True)  # fmt: skip
# Fields that would change the answer, but are not supported. Those of REFUSED must be left out, and
# the others may have only the value that is given here. Fields that this file does not mention,
# such as `user` or `store`, are ignored, even if they would change the answer. So are those of
# chats in a completion, such as `tools`, as in vLLM; but `tool_choice` is checked there, too.
REFUSED = """audio grammar json_schema n_predict prompt_logprobs chat_template documents
    allowed_token_ids guided_json guided_regex guided_choice guided_grammar"""
UNSUPPORTED = dict.fromkeys(REFUSED.split()) | dict(
    functions=[], suffix="", bad_words=[], modalities=["text"], reasoning_format="auto", best_of=1,
    use_beam_search=False, skip_special_tokens=True, include_stop_str_in_output=False,
    return_token_ids=False, continuous_usage_stats=False)  # fmt: skip


def translate(given: JSON, chat: bool) -> JSON:
    """Return the fields of a body with their defaults, and add what the rest of this file reads:

        max_tokens, logprobs, structured_outputs   from fields that have other names in OpenAI's API
        include_usage                              out of stream_options
        prompt_logprobs                            with `echo`, as many as logprobs. A body that
                                                   has this field is refused

    Raises:
        SettingError: a field has the wrong type, or asks for what is not supported.
    """
    fields = DEFAULTS | given
    for name, default in DEFAULTS.items():
        check(name, fields[name], type(default))
    options = without_nulls(fields["stream_options"])
    for name, only in UNSUPPORTED.items():
        supported(name, (options | fields).get(name, only), only)
    # A whole answer always has the usage.
    wants_usage = options.get("include_usage") or not fields["stream"]
    fields["include_usage"] = check("stream_options[include_usage]", wants_usage, bool)
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    if chat:  # here `logprobs` is a bool, and `top_logprobs` the number
        supported("echo", fields["echo"], False)
        num_top = fields.get("top_logprobs", 0)
        is_scored = check("logprobs", fields.pop("logprobs", False), bool)
        if is_scored:
            fields["logprobs"] = num_top
        elif num_top:
            raise SettingError("top_logprobs", "needs logprobs: true")
    if fields["echo"]:
        fields["prompt_logprobs"] = fields.get("logprobs")
    # What is no id stays a text, which SamplingParams refuses.
    fields["logit_bias"] = {
        int(i) if re.fullmatch("0|[1-9][0-9]{,8}", i) else i: bias
        for i, bias in fields["logit_bias"].items()
    }
    schema = structure(fields["response_format"])
    if schema:
        if "structured_outputs" in fields:
            raise SettingError("structured_outputs", "excludes response_format")
        fields["structured_outputs"] = schema
    return fields


def split_prompts(fields: JSON) -> list:
    """Return the prompts of a completion: its field `prompt` is a single prompt (a text or a list
    of ids) or a list of prompts."""
    prompt = fields.get("prompt", "")
    if isinstance(prompt, list) and any(type(i) is not int for i in prompt):
        return prompt
    return [prompt]


def check_message(message: JSON, name: str) -> None:
    """Check a chat's message.

    Raises:
        Problem: the message has another form than OpenAI's.
    """
    try:
        check("role", message.get("role"), str)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                check("a part of content", part, dict)
                supported("content of type", part.get("type", "text"), "text")
                check("text", part["text"], str)
        # The text of a turn can be nothing but calls, a thought, a refusal or an empty result.
        check("content", content, str | list if message["role"] == "user" else str | list | None)
        plain_turn(message)  # render_chat does it too; here the error names the message
    except Exception as error:  # of any kind, as values have any type
        raise Problem(400, f"role, content or tool_calls are wrong: {error}", name) from None
