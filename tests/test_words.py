"""The kinds of tokenizer that checkpoints bring, each through the engine and the server. The models
are random, so that they say anything."""

import json
import re

import jsonschema
import llguidance
import pytest
from serving import CHAT, COMPLETIONS, Local
from test_tokenizer import FILES, NAMES, write
from tiny import random_model

from around.folder import Tokenizer
from around.settings import SamplingParams
from around.structured import vocabulary
from generate import generate
from kv_cache import StaticCache
from sampling import Sequence

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", params=FILES)
def served(request, tmp_path_factory):
    """Start a server over a tokenizer, and a random model of as many words."""
    config = NAMES | {"chat_template": TEMPLATE, "add_bos_token": True}
    folder = write(tmp_path_factory.mktemp("words") / "words", config, **FILES[request.param])
    words = Tokenizer(folder)
    sizes = {"vocab_size": words.vocab_size, "eos_ids": (words.eos_id,)}
    sizes["max_position_embeddings"] = 300
    local = Local("--checkpoint", str(folder), model=lambda: random_model(**sizes).float())
    local.words, local.kind = words, request.param
    yield local
    local.close()


OBJECT = {
    "type": "object", "required": ["a", "ok"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
}  # fmt: skip
CHOICE, ACCENTS = ["the cat ", "to be", "  two", "</s>"], ["café ", "你好", "😀"]
WISHES = [  # and whether a text is right
    ({"json": OBJECT}, lambda text: not jsonschema.validate(json.loads(text), OBJECT)),
    ({"json": {"enum": ["the end", " a dog", 7]}},
     lambda text: json.loads(text) in ("the end", " a dog", 7)),
    ({"json": {"const": "the cat sat "}}, lambda text: json.loads(text) == "the cat sat "),
    ({"regex": "the (cat|dog) [0-9]{2} "},
     lambda text: re.fullmatch("the (cat|dog) [0-9]{2} ", text)),
    ({"choice": CHOICE}, CHOICE.__contains__), ({"choice": ["</s>"]}, CHOICE.__contains__),
    ({"choice": ACCENTS}, ACCENTS.__contains__),
    ({"grammar": 'start: "the " /[a-c]{2,4}/ " end"'},
     lambda text: re.fullmatch("the [a-c]{2,4} end", text)),
]  # fmt: skip


def test_structures(served, monkeypatch):
    """Force a text by each structure of WISHES, and check that it is right and how it is spelt.
    Catches: a space in front of a forced text, or none at its end, so that every schema got a 500;
    half an answer that says "stop"; the longest pieces where the tokenizer has other words."""
    for wish, is_right in WISHES:
        body = {"prompt": "a dog", "structured_outputs": wish, "temperature": 1.5, "n": 4,
                "max_tokens": 60, "seed": 1}  # fmt: skip
        choices = served.post(COMPLETIONS, body).json["choices"]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
        assert all(is_right(choice["text"]) for choice in choices), choices
    little = llguidance.LLParserLimits(step_lexer_fuel=1)
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **_: little)
    body = {"prompt": "a", "structured_outputs": {"regex": "(x[a-z]{3}|y[a-z]+)+"}}
    for stream in (False, True):
        assert "lexer error" in served.post(COMPLETIONS, body | {"stream": stream}).fails(400)
    words, config = served.words, served.engine.config
    trie = vocabulary(words, config.vocab_size, config.eos_ids)
    for text in ("the cat", " the end of", "cat and dog"):
        first, whole = (words.encode(each, add_special=False) for each in ("\n", f"\n{text}"))
        spelt = trie.tokenize_str(text)
        assert trie.decode_bytes(spelt) == text.encode()
        assert spelt == whole[len(first) :] or served.kind == "squeezing"


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers(served, temperature):
    """Ask for texts whole, streamed, echoed and as a chat, and compare with the plain loop.
    Catches: a stream that is another text; texts of tokens that do not join to the echo; a chat
    template's special tokens spelt as text, or a BOS too many."""
    words, model = served.words, served.engine.model
    fields = {"temperature": temperature, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    for prompt in ("the cat", "   "):
        body = {"prompt": prompt, **fields}
        whole = served.post(COMPLETIONS, body).json["choices"][0]["text"]
        events = served.post(COMPLETIONS, body | {"stream": True}).events[:-1]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
        sequence = Sequence(words.encode(prompt), SamplingParams(**fields), model.config, words)
        list(generate(model, sequence, StaticCache(model, 1, sequence.max_len)))
        assert sequence.text == whole
        echo = served.post(COMPLETIONS, body | {"echo": True, "logprobs": 2}).json["choices"][0]
        assert echo["text"] == "".join(echo["logprobs"]["tokens"])
        assert echo["text"].endswith(whole) and prompt.strip() in echo["text"]
    messages = [{"role": "user", "content": "the cat\u00e9"}]
    turn = words.encode("<|turn|>", add_special=False)
    assert (len(turn) == 1) == (served.kind in ("gpt", "metaspace"))
    reply = served.post(CHAT, {"messages": messages, **fields}).json["choices"][0]
    body = {"prompt": words.encode_chat(messages), **fields}
    same = served.post(COMPLETIONS, body).json["choices"][0]
    assert same["text"] == reply["message"]["content"]
