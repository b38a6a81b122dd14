"""Exercise 12: a reply that is always JSON, whatever the model prefers. See 12-json-mode.md."""

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from common import SHAKESPEARE, bundled, call, needs, serve, tiny_model
from torch import Tensor

from around.folder import Detokenizer, Tokenizer
from around.settings import SamplingParams
from generate import main
from sampling import Sequence, distribution
from scheduler import Engine
from speculative import NGram

TODO = "give SamplingParams the field logits_processors"
Processor = Callable[[list[int], Tensor], Tensor]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(SHAKESPEARE)


@cache
def texts() -> list[str]:
    """Return the text that each id adds; "" if it adds nothing readable."""
    start = tokenizer().encode("a", add_special=False)
    ids = range(tokenizer().vocab_size)
    return [Detokenizer(tokenizer(), start).push(i) for i in ids]


@cache
def id_of(text: str) -> int:
    return texts().index(text)


@cache
def json_mode() -> Processor:
    kind = needs(
        "json_mode", "JsonMode", "make the file in the root, with the class JsonMode(tokenizer)"
    )
    return kind(tokenizer())


def allowed(ids: list[int]) -> list[int]:
    """Return the ids that may come next."""
    scores = torch.linspace(-1, 1, tokenizer().vocab_size)
    result = json_mode()(ids, scores.clone())
    assert isinstance(result, Tensor), "a processor returns the scores"
    assert result.shape == scores.shape
    left = result > -torch.inf
    assert torch.equal(result[left], scores[left]), "an allowed token must keep its score"
    return left.nonzero()[:, 0].tolist()


# --- The hook -------------------------------------------------------------------------------------

MODEL = tiny_model()


def only(*ids: int) -> Processor:
    """Make a processor that allows only these ids."""

    def process(token_ids: list[int], scores: Tensor) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        kept[[*ids]] = scores[[*ids]]
        return kept

    return process


def row(output: tuple[int, ...] = (), *processors: Processor, **settings: Any) -> Sequence:
    settings |= {"logits_processors": processors}
    sequence = Sequence([1, 2], call(SamplingParams, todo=TODO, **settings), MODEL.config)
    sequence.ids += output
    return sequence


def test_a_processor_is_asked_for_each_token() -> None:
    seen = []

    def spy(token_ids: list[int], scores: Tensor) -> Tensor:
        seen.append((list(token_ids), tuple(scores.shape), scores.dtype))
        return scores

    logits = torch.randn(3, 32).bfloat16()
    plain = distribution(logits, [row((5, 6)), row(), row()])
    probs = distribution(logits, [row((5, 6), spy), row(), row((), spy, only(3, 4))])
    assert seen == [([5, 6], (32,), torch.float32), ([], (32,), torch.float32)], (
        "a processor gets the output's ids and that row's (V,) scores in float32"
    )
    assert torch.equal(probs[:2], plain[:2])
    assert probs[2].nonzero()[:, 0].tolist() == [3, 4]


def test_greedy_sampling_obeys_too() -> None:
    logits = torch.randn(1, 32)
    banned = int(logits.argmax())

    def ban(token_ids: list[int], scores: Tensor) -> Tensor:
        scores[banned] = -torch.inf
        return scores

    probs = distribution(logits, [row((), ban, temperature=0)])
    assert probs[0, banned] == 0, "a greedy row must obey its processors too"
    assert probs[0].max() == 1
    engine = Engine(MODEL, num_blocks=16, block_size=4, max_num_seqs=2)
    params = row((), only(7), temperature=0, max_tokens=4).params
    (request,) = serve(engine, ([1, 2], params))
    assert request.outputs[0].token_ids == [7] * 4


def test_only_functions_are_taken() -> None:
    """SamplingParams also come from the network, where a field may hold any JSON."""
    row()
    assert SamplingParams().logits_processors == ()
    for wrong in (["x"], "x", 3, [None], {"a": 1}):
        with pytest.raises(ValueError, match="logits_processors"):
            SamplingParams(logits_processors=wrong)


def test_the_command_line_still_runs() -> None:
    """Bug: a field made with setting() becomes an option, which takes text and not functions."""
    row()
    assert main(["--device", "cpu", "--prompt", "A", "--max-tokens", "1"]) == 0


# --- The grammar ----------------------------------------------------------------------------------

# (a text, characters that must be allowed after it, characters that must not). White space outside
# strings, exponents and \u are optional.
CASES = [
    ("", "{", '}["a1,:'),
    ("{", '"}', "{[]a1,:"),
    ('{"', 'a {}:,"\\', "\n\t"),
    ('{"a', 'a "\\', "\n"),
    ('{"a"', ":", '"a}],1'),
    ('{"a":', '"{[-07tfn', "}],:.aeu"),
    ('{"a":"', 'a" {\\', "\n"),
    ('{"a":"\\', '"\\/bfnrt', "ax1 "),
    ('{"a":"\\n', 'a"', "\n"),
    ('{"a":"x"', ",}", '":]a1'),
    ('{"a":t', "r", "tue}"),
    ('{"a":tru', "e", "r}"),
    ('{"a":true', ",}", "e]:"),
    ('{"a":nul', "l", "e}"),
    ('{"a":fals', "e", ",}"),
    ('{"a":-', "0123", "-.,}"),
    ('{"a":0', ".,}", "0123-]"),
    ('{"a":10', "0123.,}", "-]:"),
    ('{"a":1.', "0123", ".,}-"),
    ('{"a":1.5', "0123,}", ".-]"),
    ('{"a":[', '[]{"-1t', "},:"),
    ('{"a":[1', ",]2.", '}:["'),
    ('{"a":[1,', '1"[{n', "],}"),
    ('{"a":[1,2]', ",}", "]2:"),
    ('{"a":1,', '"', "}a1,]"),
    ('{"a":1,"b"', ":", ",}"),
    ('{"a":{', '"}', "{]a1"),
    ('{"a":{}', ",}", '"{]:'),
    ('{"a":{"b":[[', '[]1"', "},"),
    ('{"a":{"b":[[]', ",]", "}["),
    ('{"a":{"b":[[]]', ",}", "][:"),
    ('{"a":{"b":[[]]}}', "", ',}]{["1'),
    ("{}", "", '}{,["a'),
]


@pytest.mark.parametrize(("text", "must", "must_not"), CASES)
def test_what_may_follow(text: str, must: str, must_not: str) -> None:
    now = allowed([id_of(c) for c in text])
    missing = [c for c in must if id_of(c) not in now]
    wrong = [c for c in must_not if id_of(c) in now]
    assert not missing, f"after {text!r}, allow {missing}"
    assert not wrong, f"after {text!r}, do not allow {wrong}"
    try:
        complete = bool(json.loads(text)) or text == "{}"
    except json.JSONDecodeError:
        complete = False
    assert (tokenizer().eos_id in now) == complete, "allow EOS exactly if the object is complete"
    if complete:
        assert not [i for i in now if texts()[i].strip()], "allow no text after the object"


def test_a_token_of_several_characters_is_taken_as_a_whole() -> None:
    inside = [id_of(c) for c in '{"a']
    words = [i for i, text in enumerate(texts()) if len(text) > 3 and text.isalpha()]
    assert set(words) <= {*allowed(inside)}, "allow any word in a string"
    assert not {*words} & {*allowed([id_of("{")])}
    unreadable = [i for i, text in enumerate(texts()) if not text and i != tokenizer().eos_id]
    assert not {*unreadable} & {*allowed(inside)}, "do not allow special tokens or half characters"


def test_ids_that_the_tokenizer_does_not_know() -> None:
    """A model's V may be larger than its tokenizer's vocabulary."""
    kind = type(json_mode())
    more = kind(tokenizer())([], torch.zeros(tokenizer().vocab_size + 8))
    assert (more[-8:] == -torch.inf).all()


def test_after_a_wrong_guess_there_is_an_answer() -> None:
    """verify() asks what would follow each guess before it refuses the wrong ones."""
    now = allowed([id_of(c) for c in "{]a"])
    assert now, "allow something after a wrong guess: otherwise softmax returns NaN"


CLOSING = ['"', "}", "]", ":", "0", "n", *"aeflrstu"]


@pytest.mark.parametrize("seed", range(6))
def test_every_way_leads_to_json(seed: int) -> None:
    """Draw allowed tokens at random, and then close every bracket. There is never a dead end."""
    rng, ids = random.Random(seed), []
    for _ in range(40):
        now = allowed(ids)
        assert now, f"nothing is allowed after {''.join(texts()[i] for i in ids)!r}"
        short = [i for i in now if len(texts()[i]) == 1] or now  # brackets are one character
        ids.append(rng.choice(rng.choice([now, short])))
        if ids[-1] == tokenizer().eos_id:
            break
    while ids[-1] != tokenizer().eos_id:
        now = allowed(ids)
        closing = [tokenizer().eos_id, *map(id_of, CLOSING)]
        ids.append(next((i for i in closing if i in now), now[0]))
        assert len(ids) < 1000
    text = "".join(texts()[i] for i in ids)
    try:
        assert isinstance(json.loads(text), dict), text
    except json.JSONDecodeError as error:
        pytest.fail(f"{text!r}: {error}", pytrace=False)


@pytest.mark.parametrize("speculate", [0, 3])
def test_the_engine_writes_json(speculate: int) -> None:
    """Guesses are processed too, although wrong ones may not be JSON at all."""
    bias = {id_of(c): 7.0 for c in '"}]:,1'}  # without it, one string would fill the output
    common = {"temperature": 0.9, "max_tokens": 60, "n": 2, "seed": 1}
    params = call(
        SamplingParams, todo=TODO, logits_processors=[json_mode()], logit_bias=bias, **common
    )
    proposer = NGram(speculate)
    engine = Engine(
        bundled(), tokenizer(), proposer, max_num_seqs=4, num_blocks=60, max_seq_len=200
    )
    prompts = ['ROMEO:\n{"a":1,"a":1,"a":', "[1,1,1,1,1,1,1"]
    requests = serve(engine, *((prompt, params) for prompt in prompts))
    done = [s for request in requests for s in request.outputs if s.finish_reason == "stop"]
    assert len(done) >= 2
    for sequence in done:
        assert isinstance(json.loads(sequence.text), dict), sequence.text
