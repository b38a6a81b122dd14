"""Structured output: whatever else runs, what is finished parses, and nothing else is changed.

Models are tiny and random, so that without the mask nothing would ever parse; the twin is the same
request alone, without guesses.
"""

import copy
import functools
import itertools
import json
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import llguidance
import pytest
import torch
from conftest import SHAKESPEARE
from test_scheduler import assert_same, drain
from test_tokenizer import NAMES, kinds, read, train_sentencepiece  # noqa: F401
from tiny import noisy, random_model

from around import structured
from around.folder import Tokenizer
from around.settings import SamplingParams, SettingError
from around.structured import SPACES, closed, make_matcher, structure
from llm import LLM
from sampling import Sequence, distribution
from scheduler import Engine
from speculative import DraftModel, NGram

TOKENIZER = Tokenizer(SHAKESPEARE)
V = TOKENIZER.vocab_size
MODEL = random_model(vocab_size=V, eos_ids=(TOKENIZER.eos_id,), max_position_embeddings=512)
DRAFT = noisy(MODEL, 0.1)


def engine(proposer=None, model=MODEL, **limits) -> Engine:
    small = {"num_blocks": 200, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32}

    def compiled(wish):
        return make_matcher(TOKENIZER, model.config, wish)

    return Engine(model, TOKENIZER, proposer, compiled, **small | limits)


def random_schema(draw: random.Random, depth: int = 2) -> dict:
    """Draw a schema whose texts are short, so that most are finished."""
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
    """Draw a request's structure, and what checks a finished text."""
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
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in (2, 3))])
def test_finished_answers_parse(guess, seed):
    """Run random structures beside plain requests, with and without guesses; parse what is
    finished, and compare with each alone. Catches: a mask of the row before, or of a step ago,
    after preemption, in a fork or behind a guess; a guess kept that breaks the grammar; a neighbour
    without a grammar masked, or drawn otherwise."""
    draw, proposers = random.Random(seed), {"n-gram": NGram(3), "draft": DraftModel(DRAFT, 3, V)}
    at = engine(proposers.get(guess), num_blocks=200 if guess else 50)
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
    assert not guess or at.proposer.accepted.total() > 0


def test_masks():
    """Compare the distribution of a masked and a free row with the plain softmax; then check which
    characters a regex's classes take. Catches: a bias that lifts what is masked; the rows beside it
    changed; the matcher moved by a look; digits of other scripts where vLLM means 0 to 9; a class
    begun by an escaped backslash."""
    wishes = ({"choice": ["a", "b"]}, None)
    params = [SamplingParams(structured_outputs=wish, logit_bias={5: 100}) for wish in wishes]
    rows = [Sequence([1], each, MODEL.config) for each in params]
    rows[0].matcher = make_matcher(TOKENIZER, MODEL.config, wishes[0])
    logits = torch.randn(1, V).expand(2, -1)
    p, free = distribution(logits, rows)
    may = [i for i in range(V) if TOKENIZER.bytes_of(i) in (b"a", b"b")]
    want = torch.zeros(V)
    want[may] = logits[0, may].softmax(-1)
    torch.testing.assert_close(p, want)
    assert torch.equal(free, distribution(logits[1:], rows[1:])[0]) and free[5] > 0.9
    ahead = rows[0].with_guesses([may[0]])
    assert distribution(logits[:1], [ahead])[0].argmax() == TOKENIZER.eos_id
    assert torch.equal(distribution(logits, rows)[0], p)
    for regex, text, is_allowed in (
        (r"\d{4}", "1234", True), (r"\d{4}", "\u0663", False), (r"[\d.]+", "1.5", True),
        (r"[\d.]+", "\u0663", False), (r"\w+", "a_1", True), (r"\w+", "\u00e9", False),
        (r"\W", "\u00e9", True), (r"\D", "\u0663", True), (r"a\s", "a\t", True),
        (r"a\s", "a\u2003", False), (r"[^\s]", "\u2003", True), (r"\\\\d", "\\\\d", True),
        (r"\\\\d", "1", False), (r"\S\.", "a.", True), (r"\S\.", " .", False),
    ):  # fmt: skip
        assert takes({"regex": regex}, text) == is_allowed, (regex, text)


def test_a_model_without_eos():
    """Force texts from a model that has no EOS, beside free ones. Catches: an id outside the
    vocabulary; a text that runs on after its last brace, until its length."""
    model = copy.copy(MODEL)
    model.config = random_model(vocab_size=V, eos_ids=()).config
    at = engine(model=model, num_blocks=50)
    free = [at.add_request("a", SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(2)]
    wishes = (({"regex": ""}, ""), ({"choice": ["yes"]}, "yes"), ({"regex": "ab{3}"}, "abbb"))
    for (wish, text), temperature in itertools.product(wishes, (0, 1)):
        params = SamplingParams(structured_outputs=wish, temperature=temperature, logprobs=1)
        (output,) = at.add_request("a", params).outputs
        drain(at)
        assert output.text == text
        assert output.finish_reason == "stop" or (output.finish_reason == "error" and not text)
    assert {other.outputs[0].finish_reason for other in free} == {"length"}


def test_tokens_and_their_bytes(kinds, tmp_path):  # noqa: F811
    """Compare the bytes of tokens with the text, for each kind of tokenizer, and follow grammars
    over them. Catches: a space lost; bytes of half a character given as those of its mark; a
    grammar's bytes taken for GPT-2's letters; <unk> within a string; characters that no word of the
    vocabulary can spell."""
    for kind, (ours, _) in kinds.items():
        for text in ("the cat", " the  cat\n\n", "café 😀 你好", "<s>", "a\u0301"):
            ids = ours.encode(text, add_special=False)
            # Unknown to those without byte fallback; one writes other spaces and characters.
            if "" not in map(ours.piece, ids) and kind != "squeezing":
                whole = b"".join(ours.bytes_of(i) for i in ids).decode()
                assert whole in (text, " " + text), kind
    ours, _ = kinds["gpt"]
    config = random_model(vocab_size=ours.vocab_size + 3, eos_ids=(ours.eos_id,)).config
    at = make_matcher(ours, config, {"choice": [" the", "é"]})
    for text in (" the", "é"):
        each = at.deep_copy()
        for i in ours.encode(text, add_special=False):
            assert each.compute_logit_bias()[i] and each.consume_token(i)
        assert each.is_stopped()
    at = make_matcher(TOKENIZER, MODEL.config, {"regex": "<unk>|a"})
    unknown = next(i for i in range(V) if TOKENIZER.piece(i) == "")
    assert not at.compute_logit_bias()[unknown]
    model = train_sentencepiece(model_type="unigram", byte_fallback=False)
    at = make_matcher(read(tmp_path, NAMES, tokenizer_model=model), config, {"regex": "a[{]b"})
    for _ in "ab":
        (only,) = (i for i, bias in enumerate(at.compute_logit_bias()) if bias)
        at.consume_token(only)
    assert at.is_error()  # no token has a {


NESTED = functools.reduce(lambda inner, _: {"not": inner}, range(9999), {})
BAD = [
    ({"json": {"type": "nonsense"}}, "nonsense"), ({"json": "{"}, "Expecting"),
    ({"json": {"properties": 5}}, "."),
    ({"json": {"properties": {"a": {}}, "required": [[1]]}}, "."),
    ({"regex": "(["}, "unclosed"), ({"regex": 5}, "regex must be str"),
    ({"choice": 5}, "."), ({"choice": []}, "the choice is empty"),
    ({"choice": ["a", ["b"]]}, "choice must be str"), ({"grammar": "rubbish !!"}, "rubbish"),
    *((wish, "supported: choice, grammar, json, regex")
      for wish in ({"json": {}, "regex": "a"}, {"xml": ""}, {})),
    ("a", "it must be dict"), (["json"], "it must be dict"),
    ({"json": {"enum": [{1}]}}, "."), ({5: "a"}, "."), ({"json": NESTED}, "."),
    ({"choice": [f"word {i}" for i in range(100_000)]}, "length must be int in"),
    ({"json": {"allOf": [{"pattern": f".*{i}.*"} for i in range(99)]}},
     "number of patterns .* is 99"),
    # The same, spelt otherwise.
    ({"json": json.dumps({"a\0": [{"p\0": f".*{i}.*"} for i in range(15)]}).replace(
        "a\\u0000", r"\u0061llOf").replace("p\\u0000", r"p\u0061ttern")},
     "number of patterns .* is 15"),
]  # fmt: skip


def test_what_does_not_compile_is_refused(capfd, monkeypatch):
    """Add each structure of BAD, one that is too large and one without llguidance, and check the
    error. Catches: a request that waits for a mask that never comes, or whose first mask fails, so
    that it ends with a 500; a traceback where one line names the package that is missing."""
    at = engine()
    for wish, message in BAD:
        with pytest.raises(SettingError, match=f"^structured_outputs (.|\n)*{message}") as caught:
            at.add_request("a", SamplingParams(structured_outputs=wish))
        assert caught.value.field == "structured_outputs" and not at.queue
        assert capfd.readouterr() == ("", "")  # no backtrace
    few = llguidance.LLParserLimits(max_lexer_states=3)
    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLParserLimits", lambda **_: few)
        with pytest.raises(SettingError, match="too many states"):
            make_matcher(TOKENIZER, MODEL.config, {"choice": [f"{i} words" for i in range(20)]})
    params = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(SettingError, match=r"^structured_outputs .*matcher"):
        Engine(MODEL, num_blocks=9).add_request([1], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SettingError, match=r"^structured_outputs .*llguidance"):
        at.add_request("a", params)


def test_large_structures():
    """Force one of 5,000 words by a choice, an enum and a grammar, and time a regex of nested
    counts. Catches: 2,000 words too many as a choice, where 5,000 worked as an enum;
    (a{1000}){1000}, which took a second and 200 MB while the neighbours waited."""
    draw, at = random.Random(0), engine()
    words = ["".join(draw.choices("abcdefgh \u00e9", k=draw.randint(4, 30))) for _ in range(5000)]
    lark = "start: " + " | ".join(map(json.dumps, words))
    for wish in ({"choice": words}, {"json": {"enum": words}}, {"grammar": lark}):
        params = SamplingParams(structured_outputs=wish, max_tokens=99, seed=1)
        (output,) = at.add_request("a", params).outputs
        drain(at)
        assert (json.loads(output.text) if "json" in wish else output.text) in words
    start = time.process_time()
    make_matcher(TOKENIZER, MODEL.config, {"regex": "(a{1000}){1000}"})
    assert time.process_time() - start < 0.5


def takes(wish, text):
    """Return whether a structure takes the tokens of a text."""
    ids = TOKENIZER.encode(f"\2{text}", False)[len(TOKENIZER.encode("\2", False)) :]
    return make_matcher(TOKENIZER, MODEL.config, wish).try_consume_tokens(ids) == len(ids)


A = {"properties": {"a": {"type": "null"}}}
FALSE = {"additionalProperties": False}
CLOSED_A = A | FALSE
OPEN_A = A | {"additionalProperties": True}
CLOSED = [  # a schema, and what becomes of it
    (A, CLOSED_A), (A | {"required": ["a"]}, CLOSED_A | {"required": ["a"]}),
    ({"properties": {"properties": A, "b": {}}},
     {"properties": {"properties": CLOSED_A, "b": {}} | FALSE} | FALSE),
    ({"items": A}, {"items": CLOSED_A}), ({"anyOf": [A, {}]}, {"anyOf": [CLOSED_A, {}]}),
    ({"$ref": "#/$defs/x", "$defs": {"x": A}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED_A}}),
    (OPEN_A | {"$defs": {"x": A}}, OPEN_A | {"$defs": {"x": CLOSED_A}}),
    # Some servers of tools write nulls, and names that are no addresses.
    ({"$schema": "odd", "$id": ":", "allOf": [{"properties": None}]}, {"allOf": [{}]}),
    ({"properties": {"a": {"$id": "a b"}}, "required": None},
     {"properties": {"a": {}}, "additionalProperties": False}),
    *((same, same) for same in (
        {}, {"type": "object"}, OPEN_A, {"const": A}, {"enum": [A]}, A | {"anyOf": [A]},
        A | {"$ref": "#/$defs/x"}, A | {"required": ["b"]}, {"allOf": [A, {}], "$defs": {"x": A}},
        {"properties": {}, "anyOf": [A]}, {"properties": {}, "required": ["b"]},
        {"properties": {"i": A | {"$ref": "#/$defs/x"}}, "$defs": {"x": A}}, A | {"then": A},
        {"required": ["k"], "anyOf": [A]}, {"properties": A, "required": 5}, True)),
]  # fmt: skip


def test_one_trie(monkeypatch):
    """Make matchers in four threads at once, and count the tries that are built. Catches: a trie of
    the vocabulary for each of the first requests: 16 of them took 22 s and 1.9 GB."""
    made, make = [], llguidance.LLTokenizer
    slow = lambda *args, **more: made.append(time.sleep(0.1)) or make(*args, **more)  # noqa: E731
    monkeypatch.setattr(llguidance, "LLTokenizer", slow)
    structured.vocabulary.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(lambda _: make_matcher(TOKENIZER, MODEL.config, {"regex": "a"}), range(4))]
    assert len(made) == 1


def test_forms():
    """Translate response_format, good and bad, and close schemas that leave properties open.
    Catches: an unknown form of OpenAI's that is ignored; properties that a weak model invents until
    max_tokens; a constant that becomes another."""
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
    for bad in ({}, {"type": "xml"}, {"type": "json_schema"}, {"type": ["text"]}):
        with pytest.raises(SettingError, match=r"^response_format"):
            structure(bad)
    for schema, expected in CLOSED:
        assert closed(schema) == expected
    assert takes({"json": A}, '{"a": null}') and not takes({"json": A}, '{"a": null, "b": 1}')


def test_a_structure_has_no_stops_of_the_template():
    """Force a text with an empty line through LLM.chat. Catches: a text cut at the plain template's
    stop string, which the structure asked for."""
    params = SamplingParams(structured_outputs={"regex": "yes\n\nno"}, max_tokens=20)
    llm = LLM(SHAKESPEARE, device="cpu", dtype="float32", num_blocks=20)
    (request,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    assert request.outputs[0].text == "yes\n\nno"
