"""Structured output: whatever else runs, what is finished parses, and nothing else is changed.

Models are tiny and random, so that without the mask nothing would ever parse; the twin is the same
request alone, without guesses.
"""

import copy
import functools
import json
import random
import re
import sys
import time

import jsonschema
import llguidance
import pytest
import torch
from conftest import SHAKESPEARE
from test_scheduler import assert_same, drain, noisy
from test_tokenizer import byte_level, kinds, read  # noqa: F401 (kinds: a fixture)
from tiny import random_model

from around.folder.tokenizer import Tokenizer
from around.settings import SamplingParams, SettingError
from around.structured import SPACES, closed, make_matcher, structure, token_bytes
from sampling import Sequence, distribution
from scheduler import Engine
from speculative import DraftModel, NGram

TOKENIZER = Tokenizer(SHAKESPEARE)
V = TOKENIZER.vocab_size
MODEL = random_model(vocab_size=V, eos_ids=(TOKENIZER.eos_id,), max_position_embeddings=512)
DRAFT = noisy(MODEL, 0.1)
pytestmark = pytest.mark.usefixtures("one_thread")


def engine(proposer=None, model=MODEL, **limits) -> Engine:
    small = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32}

    def compiled(wish):
        return make_matcher(TOKENIZER, model.config, wish)

    return Engine(model, TOKENIZER, proposer, compiled, **small | limits)


def random_schema(draw: random.Random, depth: int = 2) -> dict:
    """A schema whose texts are short, so that most are finished."""
    leaves = [
        {"type": "integer", "minimum": -5, "maximum": draw.randint(0, 300)},
        {"type": "boolean"}, {"type": "null"}, {"const": "a b"}, {"enum": ["x", "x y", 7, None]},
        {"type": "string", "maxLength": draw.randint(0, 6)},
    ]  # fmt: skip
    if depth == 0 or draw.random() < 0.4:
        return draw.choice(leaves)
    if draw.random() < 0.4:
        return {"type": "array", "items": random_schema(draw, depth - 1), "maxItems": 3}
    names = draw.sample(["a", "bc", "d e", "é"], draw.randint(1, 3))
    parts = {name: random_schema(draw, depth - 1) for name in names}
    return {"type": "object", "properties": parts, "required": names[:1],
            "additionalProperties": False}  # fmt: skip


def random_wish(draw: random.Random):
    """A request's structure, and what checks a finished text."""
    kind = draw.choice(["json", "json", "json", "regex", "choice", "grammar"])
    if kind == "json":
        schema = random_schema(draw)
        given = draw.choice([schema, json.dumps(schema)])
        return {"json": given}, lambda text: jsonschema.validate(json.loads(text), schema)
    regex, words = r"[a-c]{2,5}(, [0-9]+é)?", ["yes", "no", "to be\nor not"]

    def check(text):
        assert re.fullmatch(regex, text) if kind != "choice" else text in words

    lark = 'start: /[a-c]{2,5}/ (", " /[0-9]+/ "é")?'
    gbnf = 'root ::= [a-c] [a-c] [a-c]? (", " [0-9]+ "é")?'
    return {kind: {"regex": regex, "choice": words}.get(kind, draw.choice([lark, gbnf]))}, check


@pytest.mark.parametrize("guess", [None, "n-gram", "draft"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_finished_answers_parse(guess, seed):
    """A mask of the row before, or of a step ago, after preemption, in a fork, behind a guess; a
    guess that breaks the grammar kept; a neighbour without a grammar masked, or drawn otherwise."""
    draw, guessers = random.Random(seed), {"n-gram": NGram(3), "draft": DraftModel(DRAFT, 3, V)}
    at = engine(guessers.get(guess), num_blocks=200 if guess else 50)
    jobs = {}
    for i in range(12):
        wish, check = random_wish(draw) if i % 4 else (None, lambda text: None)
        params = SamplingParams(
            temperature=draw.choice([0, 0.7, 1, 3]), seed=i, n=draw.choice([1, 1, 3]), logprobs=2,
            max_tokens=60, structured_outputs=wish,
            presence_penalty=draw.choice([0, 0, 1]), ignore_eos=draw.random() < 0.3,
        )  # fmt: skip
        prompt = draw.choice(["ROMEO:\n", "[1, 2, [1, 2, [1, 2,", ""])
        jobs[at.add_request(prompt, params)] = prompt, params, check
    drain(at)
    finished = 0
    for request, (prompt, params, check) in jobs.items():
        for sequence in request.outputs:
            assert sequence.finish_reason in ("stop", "length")
            if sequence.finish_reason == "stop" and params.structured_outputs:
                check(sequence.text)
                finished += 1
        if params.temperature == 0 or not guess:
            alone = engine()
            (twin,) = {alone.add_request(prompt, params)}
            drain(alone)
            assert_same(request, twin.outputs)
    assert finished >= 8 and (guess or at.stats["num_preemptions"] > 0)
    assert not guess or sum(at.proposer.accepted) > 0


def test_the_mask_is_the_first_step():
    """A bias that lifts what is masked; the rows beside it changed; the matcher moved by a look."""
    rows = [
        Sequence([1], SamplingParams(structured_outputs=wish, logit_bias={5: 100}), MODEL.config)
        for wish in ({"choice": ["a", "b"]}, None)
    ]
    rows[0].matcher = make_matcher(TOKENIZER, MODEL.config, rows[0].params.structured_outputs)
    logits = torch.randn(1, V).expand(2, -1)
    p, free = distribution(logits, rows)
    may = [i for i in range(V) if token_bytes(TOKENIZER)[i] in (b"a", b"b")]
    want = torch.zeros(V)
    want[may] = logits[0, may].softmax(-1)
    torch.testing.assert_close(p, want)
    assert torch.equal(free, distribution(logits[1:], rows[1:])[0]) and free[5] > 0.9
    ahead = rows[0].ahead([may[0]])
    assert distribution(logits[:1], [ahead])[0].argmax() == TOKENIZER.eos_id
    assert torch.equal(distribution(logits, rows)[0], p)


def test_a_structure_that_becomes_too_complex(monkeypatch):
    """Half an answer that says "stop": where the parser gives up, only EOS is left."""
    made = llguidance.LLMatcher
    limits = llguidance.LLParserLimits(step_lexer_fuel=1)

    class Limited:
        def __new__(cls, *args, **options):
            return made(*args, **options | {"limits": limits})

        grammar_from_json_schema = made.grammar_from_json_schema

    monkeypatch.setattr(llguidance, "LLMatcher", Limited)
    at = engine()
    text = {"type": "string", "pattern": "(a|b|cd){3,9}"}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    request = at.add_request("a", SamplingParams(structured_outputs={"json": schema}, n=2))
    drain(at)
    assert {sequence.finish_reason for sequence in request.outputs} == {"error"}


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_may_come(temperature):
    """Of a model without EOS no token is allowed after nothing: an id outside the vocabulary."""
    model = copy.copy(MODEL)
    model.config = random_model(vocab_size=V, eos_ids=()).config
    at = engine(model=model, num_blocks=50)
    wish = {"structured_outputs": {"regex": ""}, "temperature": temperature, "logprobs": 1}
    others = [at.add_request("a", SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(2)]
    request = at.add_request("a", SamplingParams(**wish))
    drain(at)
    assert request.outputs[0].finish_reason in ("stop", "error") and request.outputs[0].text == ""
    assert {other.outputs[0].finish_reason for other in others} == {"length"}


def test_an_unknown_piece_is_no_text():
    """<unk>, which decodes to another text than it is spelt, within a string."""
    at = make_matcher(TOKENIZER, MODEL.config, {"regex": "<unk>|a"})
    unknown = next(i for i in range(V) if TOKENIZER.piece(i) == "")
    assert not at.compute_logit_bias()[unknown]


def test_a_model_without_eos_ends_with_its_grammar():
    """A text that runs on after its last brace, until its length."""
    model = copy.copy(MODEL)
    model.config = random_model(vocab_size=V, eos_ids=()).config
    at = engine(model=model, num_blocks=50)
    for wish, text in (({"choice": ["yes"]}, "yes"), ({"regex": "ab{3}"}, "abbb")):
        request = at.add_request("ROMEO:", SamplingParams(structured_outputs=wish))
        drain(at)
        assert (request.outputs[0].text, request.outputs[0].finish_reason) == (text, "stop")


@pytest.mark.parametrize("kind", ["gpt", "llama", "metaspace", "shakespeare", "unigram", "plain"])
def test_pieces_are_the_tokens_bytes(kind, kinds):  # noqa: F811
    """A space lost, bytes of half a character given as those of its mark."""
    ours, _ = kinds[kind]
    for text in ("the cat", " the  cat\n\n", "café 😀 你好", "<s>", "a\u0301"):
        ids = ours.encode(text, add_special=False)
        if "" not in map(ours.piece, ids):  # unknown to those without byte fallback
            whole = b"".join(token_bytes(ours)[i] for i in ids).decode()
            assert whole in (text, " " + text)


def test_byte_level_tokenizers(tmp_path):
    """Masks for tokenizer.json: a grammar's bytes taken for GPT-2's letters."""
    ours = read(tmp_path, {"eos_token": "</s>"}, tokenizer_json=byte_level("</s>").to_str())
    config = random_model(vocab_size=ours.vocab_size + 3, eos_ids=(ours.eos_id,)).config
    at = make_matcher(ours, config, {"choice": [" the", "é"]})
    for text in (" the", "é"):
        each = at.deep_copy()
        for i in ours.encode(text, add_special=False):
            assert each.compute_logit_bias()[i] and each.consume_token(i)
        assert each.is_stopped()


NESTED = functools.reduce(lambda inner, _: {"not": inner}, range(9999), {})
BAD = {
    "unknown type": ({"json": {"type": "nonsense"}}, "nonsense"),
    "not JSON": ({"json": "{"}, "Expecting"),
    "no properties": ({"json": {"properties": 5}}, "."),
    "no names": ({"json": {"properties": {"a": {}}, "required": [[1]]}}, "."),
    "regex": ({"regex": "(["}, "unclosed"),
    "not a regex": ({"regex": 5}, "regex must be str"),
    "not a choice": ({"choice": 5}, "."),
    "no choice": ({"choice": []}, "the choice is empty"),
    "not a text": ({"choice": ["a", ["b"]]}, "choice must be str"),
    "grammar": ({"grammar": "rubbish !!"}, "rubbish"),
    "two": ({"json": {}, "regex": "a"}, "supported: choice, grammar, json, regex"),
    "another": ({"xml": ""}, "supported: choice, grammar, json, regex"),
    "none": ({}, "supported: choice, grammar, json, regex"),
    "text": ("a", "it must be dict"),
    "list": (["json"], "it must be dict"),
    "no JSON in Python": ({"json": {"enum": [{1}]}}, "."),
    "no text for a name": ({5: "a"}, "."),
    "nested too deeply": ({"json": NESTED}, "."),
    "too many words": ({"choice": [f"word {i}" for i in range(100_000)]}, "length must be int in"),
    "too many at once": ({"json": {"allOf": [{"pattern": f".*{i}.*"} for i in range(99)]}},
                         "number of patterns .* is 99"),
    "too many at once, spelt otherwise": (
        {"json": json.dumps({"a\0": [{"p\0": f".*{i}.*"} for i in range(15)]}).replace(
            "a\\u0000", r"\u0061llOf").replace("p\\u0000", r"p\u0061ttern")},
        "number of patterns .* is 15"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["enum", "choice", "grammar"])
def test_large_structures_work(kind):
    """2,000 words were too many as a choice, where 5,000 worked as an enum."""
    draw = random.Random(kind)
    words = ["".join(draw.choices("abcdefgh \u00e9", k=draw.randint(4, 30))) for _ in range(5000)]
    wish = {"choice": words}
    if kind == "enum":
        wish = {"json": {"enum": words}}
    elif kind == "grammar":
        wish = {"grammar": "start: " + " | ".join(map(json.dumps, words))}
    at = engine()
    request = at.add_request("a", SamplingParams(structured_outputs=wish, max_tokens=99, seed=1))
    drain(at)
    text = request.outputs[0].text
    assert (json.loads(text) if kind == "enum" else text) in words


def test_what_cannot_begin_is_refused(monkeypatch):
    """A request whose first mask fails ran, and ended with a 500."""
    few = llguidance.LLParserLimits(max_lexer_states=3)
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **_: few)
    with pytest.raises(SettingError, match="too many states"):
        make_matcher(TOKENIZER, MODEL.config, {"choice": [f"{i} words" for i in range(20)]})


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_compile_is_refused(name, capfd):
    """A request that waits for a mask that never comes."""
    wish, message = BAD[name]
    at = engine()
    with pytest.raises(SettingError, match=f"^structured_outputs (.|\n)*{message}") as caught:
        at.add_request("a", SamplingParams(structured_outputs=wish))
    assert caught.value.field == "structured_outputs" and not at.queue
    assert capfd.readouterr() == ("", "")  # no backtrace


@pytest.mark.parametrize(
    ("regex", "text", "is_allowed"),
    [
        (r"\d{4}", "1234", True), (r"\d{4}", "\u0663", False), (r"[\d.]+", "1.5", True),
        (r"[\d.]+", "\u0663", False), (r"\w+", "a_1", True), (r"\w+", "\u00e9", False),
        (r"\W", "\u00e9", True), (r"\D", "\u0663", True), (r"a\s", "a\t", True),
        (r"a\s", "a\u2003", False), (r"[^\s]", "\u2003", True), (r"\\\\d", "\\\\d", True),
        (r"\\\\d", "1", False), (r"\S\.", "a.", True), (r"\S\.", " .", False),
    ],
)  # fmt: skip
def test_classes_of_a_regex_are_ascii(regex, text, is_allowed):
    """Digits of other scripts where vLLM and a schema's pattern mean 0 to 9; an escaped backslash
    taken for the beginning of a class."""
    (job,) = engine().add_request("a", SamplingParams(structured_outputs={"regex": regex})).outputs
    ids = TOKENIZER.encode(f"\2{text}", False)[len(TOKENIZER.encode("\2", False)) :]
    assert (job.matcher.try_consume_tokens(ids) == len(ids)) == is_allowed


def test_a_regex_that_explodes():
    """(a{1000}){1000} took a second and 200 MB, while the neighbours waited."""
    engine().add_request("a", SamplingParams(structured_outputs={"regex": "a"}))
    start = time.process_time()
    engine().add_request("a", SamplingParams(structured_outputs={"regex": "(a{1000}){1000}"}))
    assert time.process_time() - start < 0.5


def test_without_the_extra_or_a_matcher(monkeypatch):
    """A traceback where one line names what is missing."""
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(SettingError, match=r"^structured_outputs .*matcher"):
        Engine(MODEL, num_blocks=9).add_request([1], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SettingError, match=r"^structured_outputs .*llguidance"):
        engine().add_request("a", params)


A = {"properties": {"a": {"type": "null"}}}
FALSE = {"additionalProperties": False}
CLOSED_A = A | FALSE
OPEN_A = A | {"additionalProperties": True}


@pytest.mark.parametrize(("schema", "expected"), [
    (A, CLOSED_A), (A | {"required": ["a"]}, CLOSED_A | {"required": ["a"]}),
    ({"properties": {"properties": A, "b": {}}},
     {"properties": {"properties": CLOSED_A, "b": {}} | FALSE} | FALSE),
    ({"items": A}, {"items": CLOSED_A}), ({"anyOf": [A, {}]}, {"anyOf": [CLOSED_A, {}]}),
    ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED_A}}),
    (OPEN_A | {"$defs": {"x": A}}, OPEN_A | {"$defs": {"x": CLOSED_A}}),
    *((same, same) for same in (
        {}, {"type": "object"}, OPEN_A, {"const": A}, {"enum": [A]}, A | {"anyOf": [A]},
        A | {"$ref": "#/$defs/x"}, A | {"required": ["b"]}, {"allOf": [A, {}], "$defs": {"x": A}},
        {"properties": {}, "anyOf": [A]}, {"properties": {}, "required": ["b"]},
        {"properties": {"i": A | {"$ref": "#/$defs/x"}}, "$defs": {"x": A}}, A | {"then": A},
        {"required": ["k"], "anyOf": [A]}, {"properties": A, "required": 5}, True)),
])  # fmt: skip
def test_objects_are_closed(schema, expected):
    """A weak model invented properties until max_tokens; parts of a schema that exclude each other;
    a constant that became another."""
    assert closed(schema) == expected


def test_a_closed_object_ends():
    matcher = make_matcher(TOKENIZER, MODEL.config, {"json": A})
    for text, is_allowed in (('{"a": null}', True), ('{"a": null, "b": 1}', False)):
        ids = TOKENIZER.encode(text, add_special=False)
        assert (matcher.deep_copy().try_consume_tokens(ids) == len(ids)) == is_allowed


def test_response_format():
    """OpenAI's forms, of which the unknown were ignored."""
    schema = {"type": "object"}
    lenient = {"json": schema | {"x-guidance": SPACES | {"lenient": True}}}
    assert structure({"type": "text"}) == {}
    assert structure({"type": "json_object"}) == lenient
    assert structure({"type": "json_object", "schema": None}) == lenient  # left out
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert structure(form) == lenient
    schema["uniqueItems"] = True  # which llguidance lacks
    make_matcher(TOKENIZER, MODEL.config, structure(form))
    form["json_schema"]["strict"] = True
    with pytest.raises(SettingError, match="uniqueItems"):
        make_matcher(TOKENIZER, MODEL.config, structure(form))
    for bad in ({}, {"type": "xml"}, "json", {"type": "json_schema"}, {"type": ["text"]}):
        with pytest.raises(SettingError, match=r"^response_format"):
            structure(bad)
