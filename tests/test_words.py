"""The kinds of tokenizer that checkpoints bring, each through the engine and the server: structured
output, chats, streams, echo, log-probabilities and stop strings. Every one is trained on the spot,
and the models are random, so that they say anything."""

import json
import re

import jsonschema
import llguidance
import pytest
from serving import CHAT, COMPLETIONS, Local
from test_tokenizer import CORPUS, metaspace, train_sentencepiece, write
from tiny import random_model
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from around.folder.text import Detokenizer
from around.folder.tokenizer import Tokenizer
from around.settings import SamplingParams
from around.structured import vocabulary
from generate import generate
from kv_cache import StaticCache
from sampling import Sequence

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TEXTS = [
    "the cat", " the", "  two  spaces ", "   ", "\n\n the", "caf\u00e9 na\u00efve", "\u4f60\u597d",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467", '{"a": [1, 2]}', "a<|turn|> the",
]  # fmt: skip
# The split of Llama 3 and Qwen: words with a space before them, digits, marks, runs of spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_split() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([*NAMES.values(), "<|turn|>"])
    return backend.to_str()


def metaspace_with_turns() -> str:
    backend = metaspace()
    backend.add_special_tokens([AddedToken("<|turn|>", normalized=False)])
    return backend.to_str()


TURN = {"user_defined_symbols": ["<|turn|>"]}
FILES = {
    "sentencepiece BPE, space in front, bytes": {"tokenizer_model": train_sentencepiece(**TURN)},
    "sentencepiece unigram": {
        "tokenizer_model": train_sentencepiece(
            model_type="unigram", add_dummy_prefix=False, byte_fallback=False, **TURN
        )
    },
    "sentencepiece that squeezes spaces": {
        "tokenizer_model": train_sentencepiece(
            normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, **TURN
        )
    },
    "byte-level BPE, split as Llama 3": {"tokenizer_json": byte_level_split()},
    "Metaspace, space in front, bytes": {"tokenizer_json": metaspace_with_turns()},
}


@pytest.fixture(scope="module", params=FILES)
def served(request, tmp_path_factory):
    """A server over a tokenizer, and a random model of as many words."""
    config = NAMES | {"chat_template": TEMPLATE, "add_bos_token": True}
    folder = write(tmp_path_factory.mktemp("words") / "words", config, **FILES[request.param])
    words = Tokenizer(folder)
    sizes = {"vocab_size": words.vocab_size, "eos_ids": (words.eos_id,)}
    sizes["max_position_embeddings"] = 200
    local = Local("--checkpoint", str(folder), model=lambda: random_model(**sizes).float())
    local.words, local.kind = words, request.param
    yield local
    local.close()


OBJECT = {
    "type": "object", "required": ["a", "ok"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
}  # fmt: skip
WISHES = {
    "object": {"json": OBJECT},
    "enum": {"json": {"enum": ["the end", " a dog", 7]}},
    "const": {"json": {"const": "the cat sat "}},
    "regex": {"regex": "the (cat|dog) [0-9]{2} "},
    "choice": {"choice": ["the cat ", "to be", "  two", "</s>"]},
    "special": {"choice": ["</s>"]},
    "accents": {"choice": ["caf\u00e9 ", "\u4f60\u597d", "\U0001f600"]},
    "grammar": {"grammar": 'start: "the " /[a-c]{2,4}/ " end"'},
}
CHECKS = {
    "object": lambda text: jsonschema.validate(json.loads(text), OBJECT),
    "enum": lambda text: json.loads(text) in ("the end", " a dog", 7) or 1 / 0,
    "const": lambda text: json.loads(text) == "the cat sat " or 1 / 0,
    "regex": lambda text: re.fullmatch("the (cat|dog) [0-9]{2} ", text).span(),
    "choice": lambda text: WISHES["choice"]["choice"].index(text),
    "special": lambda text: WISHES["special"]["choice"].index(text),
    "accents": lambda text: WISHES["accents"]["choice"].index(text),
    "grammar": lambda text: re.fullmatch("the [a-c]{2,4} end", text).span(),
}


@pytest.mark.parametrize("name", WISHES)
def test_structures(served, name):
    """A forced text was spelt with a space in front, or without the one at its end: 500 for every
    schema. What the words cannot spell at all is refused."""
    body = {"prompt": "a dog", "structured_outputs": WISHES[name], "temperature": 1.5, "n": 4,
            "max_tokens": 60, "seed": 1}  # fmt: skip
    reply = served.post(COMPLETIONS, body)
    if served.kind == "sentencepiece unigram":  # its words have no quotes, digits or brackets
        assert "no tokens for some" in reply.fails(400, "structured_outputs")
        return
    choices = reply.json["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    for choice in choices:
        CHECKS[name](choice["text"])


@pytest.mark.parametrize("stream", [False, True])
def test_what_becomes_too_complex_is_no_fault_of_ours(served, monkeypatch, stream):
    """A 500, for a pattern that only turns out to be too much on the way."""
    little = llguidance.LLParserLimits(step_lexer_fuel=1)
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **_: little)
    body = {
        "prompt": "a",
        "structured_outputs": {"regex": "(x[a-z]{3}|y[a-z]+)+"},
        "stream": stream,
    }
    reply = served.post(COMPLETIONS, body)
    if served.kind != "sentencepiece unigram":
        assert "lexer error" in reply.fails(400)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_decoded_text(served, text):
    """Spaces alone at the start, of which the next decoding drops one; half a character; a special
    token in the middle."""
    words = served.words
    for prompt in ("", "the cat", "   "):
        ids, before = words.encode(text, add_special=False), words.encode(prompt)
        stream = Detokenizer(words, before)
        shown = "".join(map(stream.push, ids)) + stream.push(None, last=True)
        assert shown == words.decode(before + ids)[len(words.decode(before)) :]


def test_spaces_alone(served):
    """Where what was shown last is only spaces, a decoder that drops those at the beginning would
    drop the next one, too."""
    words = served.words
    known = [words.piece(i) for i in range(words.vocab_size)]
    space = next(i for i, piece in enumerate(known) if piece in ("\u2581", "\u0120"))
    the = next(i for i, piece in enumerate(known) if piece[:1] == known[space] != piece)
    for prompt in ("", "the cat", "   "):
        before = words.encode(prompt)
        for ids in ([space, the], [space, space, the, space, the], [the, space, space, the]):
            stream = Detokenizer(words, before)
            shown = "".join(map(stream.push, ids)) + stream.push(None, last=True)
            assert shown == words.decode(before + ids)[len(words.decode(before)) :]


def test_forced_texts_are_spelt_as_in_a_text(served):
    """A space in front, or the longest pieces where the tokenizer has other words for it."""
    words, config = served.words, served.engine.config
    trie = vocabulary(words, config.vocab_size, config.eos_ids)
    for text in ("the cat", " the end of", "cat and dog"):
        first, whole = (words.encode(each, add_special=False) for each in ("\n", f"\n{text}"))
        spelt = trie.tokenize_str(text)
        assert trie.decode_bytes(spelt) == text.encode()
        assert spelt == whole[len(first) :] or "squeezes" in served.kind


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_answers(served, temperature):
    """The same text whole and streamed, and as the plain loop makes it; echo, with the texts of the
    tokens, which join to it; a stop string that spans tokens."""
    words = served.words
    fields = {"temperature": temperature, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    for prompt in ("the cat", "   "):
        body = {"prompt": prompt, **fields}
        whole = served.post(COMPLETIONS, body).json["choices"][0]["text"]
        events = served.post(COMPLETIONS, body | {"stream": True}).events[:-1]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
        model = served.engine.model
        sequence = Sequence(words.encode(prompt), SamplingParams(**fields), model.config, words)
        for _ in generate(model, sequence, StaticCache(model, 1, sequence.max_len)):
            pass
        assert sequence.text == whole
        echo = served.post(COMPLETIONS, body | {"echo": True, "logprobs": 2}).json["choices"][0]
        assert echo["text"] == "".join(echo["logprobs"]["tokens"])
        assert echo["text"].endswith(whole) and prompt.strip() in echo["text"]
        if len(whole.strip()) > 8:
            stop = whole[4:8]
            cut = served.post(COMPLETIONS, body | {"stop": stop}).json["choices"][0]
            assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"


def test_chat(served):
    """A template's special tokens spelt as text, or a BOS too many."""
    messages = [{"role": "user", "content": "the cat\u00e9"}]
    ids = served.words.encode_chat(messages)
    turn = served.words.encode("<|turn|>", add_special=False)
    assert len(turn) == 1 or served.kind.startswith("sentencepiece")
    body = {"messages": messages, "max_tokens": 5, "seed": 1, "ignore_eos": True}
    reply = served.post(CHAT, body).json
    assert reply["usage"]["prompt_tokens"] == len(ids)
    request = served.post(COMPLETIONS, {"prompt": ids, **body, "messages": None}).json
    assert request["choices"][0]["text"] == reply["choices"][0]["message"]["content"]
