"""Structured output: only tokens that keep the text within a schema, a regex or a grammar.

A grammar describes bytes. A model draws tokens, and a token is several bytes, which may cross the
border between two terminals of the grammar. llguidance (an extra, kilolm[structured]) keeps the
vocabulary's bytes in a trie. It walks the trie along the bytes that its parser would accept next,
and returns a mask over V in tens of microseconds. The sampler removes the masked tokens before it
applies any other setting (sampling.py).

    schema            {"enum": ["on", "off"]}
    text so far       "o                          (JSON's quote, then the first letter)
    tokens allowed    n   n"   f   ff   ff"

This file knows the tokenizer and does not know the sampler. Papers: Willard and Louf 2023
(arXiv:2307.09702), Koo et al. 2024 (arXiv:2407.08103). Read: make_matcher, vocabulary.
"""

import json
import re
from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any

from around.folder import Ids, Tokenizer
from around.settings import JSON, SettingError, check, check_items, supported, without_nulls
from model import Config


def make_matcher(tokenizer: Tokenizer, config: Config, constraint: JSON) -> Any:
    """Compile SamplingParams.structured_outputs into a llguidance.LLMatcher.

    The caller passes each drawn token to consume_token, gets the mask of the next token from
    compute_logit_bias, and asks is_stopped whether the text is complete. deep_copy makes a matcher
    that can run ahead over guesses.

    Args:
        config: gives V, and the EOS ids, which are allowed where the text may end.
        constraint: one key out of json, regex, choice and grammar, with its value.

    Raises:
        SettingError: the constraint does not compile, or llguidance is not installed.
    """
    try:
        import llguidance  # here: the package is an extra
    except ImportError as error:
        way_out = 'needs llguidance: pip install -e ".[structured]"'
        raise SettingError("structured_outputs", way_out) from error
    try:
        kind, text = read_constraint(constraint)
        if kind == "json":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, SPACES)
        else:
            grammar = llguidance.grammar_from(kind, text)
        # The tokenizer's own EOS may lie outside V.
        ends = tokenizer.eos_ids(config) & {*range(config.vocab_size)}
        with LOCK:
            trie = vocabulary(tokenizer, config.vocab_size, tuple(sorted(ends)))
        # By default llguidance allows 2,000 items (a choice has one for each word) and a million
        # units of fuel. MAX_LENGTH items are always enough, as no constraint has more items than
        # characters. With a million units, the regex (a{1000}){1000} takes a second and 200 MB to
        # compile; with a tenth of them, a twentieth of the time.
        limits = llguidance.LLParserLimits(max_items_in_row=MAX_LENGTH, initial_lexer_fuel=100_000)
        matcher = llguidance.LLMatcher(trie, grammar, log_level=0, limits=limits)
        matcher.compute_logit_bias()  # fails here if no token can come first
        if matcher.is_error():
            raise ValueError(matcher.get_error())
    except Exception as error:  # compilers raise anything for a bad schema
        raise SettingError("structured_outputs", f"cannot be used: {error}") from error
    return matcher


# --- The constraint -------------------------------------------------------------------------------

KINDS: JSON = dict(json=dict | str, regex=str, choice=list, grammar=str)  # key -> type of its value
# The white space allowed in JSON. Without a limit, a weak model writes spaces until max_tokens.
SPACES: Any = {"whitespace_pattern": "( |\n {0,20})?"}
# The longest schema, regex, choice or grammar, in characters. That is enough for a choice among
# 10,000 words, which compiles in a tenth of a second.
MAX_LENGTH = 2**18
# All patterns inside an allOf must hold at once. To find out whether any text can satisfy 16 of
# them takes a second, and each further pattern triples the time. To be on the safe side, all
# patterns of a schema that contains an allOf are counted, wherever they are.
MAX_PATTERNS = 14


def read_constraint(constraint: JSON) -> tuple[Any, str]:
    """Check a constraint, and return its key and its value as a text for the compiler.

    Raises:
        ValueError: it does not have exactly one of the keys, its value has another type, or it is
            too large.
    """
    import llguidance

    constraint = without_nulls(check("it", constraint, dict))
    keys = " and ".join(constraint)  # no key, or several, make a name that is not in KINDS
    kind = supported("the key", keys, *KINDS)
    value = check(kind, constraint[kind], KINDS[kind])
    if value == []:
        raise ValueError("the choice is empty")
    if kind == "choice":
        check_items(kind, value, list, str, max_len=MAX_LENGTH)
    if kind == "json":
        value = closed(value)
    if kind == "regex":
        # \d, \w, \s and their opposites mean ASCII, as in vLLM, and as in a schema.
        value = llguidance.regex_to_lark(value, "dws")
    # llguidance gets a text, as it would crash on a dict that is nested too deeply. json.dumps
    # refuses such a dict.
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    check("its length", len(text), int, 0, MAX_LENGTH)
    # A grammar may hold a schema, too. JSON may spell any letter as \u and four digits.
    spelt = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    patterns = spelt.count('"pattern"') if "allOf" in spelt else 0
    check("the number of patterns beside an allOf", patterns, int, 0, MAX_PATTERNS)
    return kind, text


# With one of these, an object may have properties that stand elsewhere.
PARTS = {"allOf", "anyOf", "oneOf", "$ref", "if", "then", "dependentSchemas",
         "unevaluatedProperties"}  # fmt: skip


def closed(schema: JSON | str) -> JSON:
    """Close the objects of a JSON schema, as vLLM and llama.cpp do: one that lists its properties
    has no others, unless it says so itself. If it were left open, a weak model would go on
    inventing properties until max_tokens. A schema in which the properties of one object stand in
    several places, as with an allOf, is left as it is: each place would rule out the others.

    Example: {"properties": {"a": {}}} becomes
        {"properties": {"a": {}}, "additionalProperties": False}
    """
    schema = json.loads(schema) if isinstance(schema, str) else schema
    with suppress(TypeError):  # there are such places, or it is no schema, as llguidance will tell
        return tidy(schema, closes=True)
    return tidy(schema, closes=False)


def tidy(schema: Any, closes: bool) -> Any:
    """Drop what llguidance refuses and what says nothing here, the names of schemas and some nulls;
    and close the objects, if asked. Do it for a schema and all schemas in it.

    A map of names to schemas is read as one more schema. At worst, as where a property is named
    "required", that leaves open what could be closed.

    Raises:
        TypeError: an object must be left open.
    """
    if isinstance(schema, list):
        return [tidy(each, closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        is_name = key in ("$schema", "$id") and isinstance(value, str)
        is_null = key in ("required", "properties") and value is None
        if not (is_name or is_null):
            made[key] = value if key in ("const", "enum") else tidy(value, closes)
    if not closes:
        return made
    parts = PARTS if "properties" in made else {"allOf"}
    if parts & made.keys() or {*made.get("required", [])} - {*made.get("properties", [])}:
        raise TypeError
    return {"additionalProperties": False} | made if "properties" in made else made


# --- The vocabulary -------------------------------------------------------------------------------


# The trie takes a second, and 100 MB that stay: of the first requests only one builds it.
LOCK = Lock()


@lru_cache(4)
def vocabulary(tokenizer: Tokenizer, V: int, eos_ids: tuple[int, ...]) -> Any:
    """Build the trie of a model's tokens.

    The trie has V + 1 tokens. llguidance needs an EOS, and the extra id V serves as one where the
    model has none.
    """
    import llguidance

    def spell(text: str) -> Ids:
        """Tokenize a text that stands in the middle of another.

        Many tokenizers put a space in front of what they take for the beginning of a text. So the
        control character STX goes in front, and STX's ids are cut off again. Some tokenizers drop
        spaces, or have a special token that is spelt like part of the text. Where the ids do not
        decode to the text, the longest pieces of `trie`, below, spell it.
        """
        first = tokenizer.encode("\2", add_special=False)
        ids = tokenizer.encode(f"\2{text}", add_special=False)[len(first) :]
        if trie.decode_bytes([i for i in ids if tokenizer.is_text(i)]) == text.encode():
            return ids
        return trie.greedy_tokenize(text)

    # llguidance takes a tokenizer that it can call, and that has these attributes. A function can
    # have them.
    vars(spell).update(
        is_tokenizer_wrapper=True,
        tokens=[*map(tokenizer.bytes_of, range(V)), b""],
        special_token_ids=[i for i in range(V) if not tokenizer.is_text(i)],
        eos_token_id=V,  # is needed, but eos_token, below, overrides it
        bos_token_id=None,
    )
    trie = llguidance.LLTokenizer(spell, eos_token=[*eos_ids] or [V])  # type: ignore
    return trie


# --- OpenAI's response_format ---------------------------------------------------------------------


def structure(response_format: JSON) -> JSON:
    """Translate OpenAI's response_format into SamplingParams.structured_outputs.

    Returns:
        The schema, in which keywords that llguidance lacks, such as uniqueItems, have no effect
        unless it is `strict`; {} where the format is plain text.

    Raises:
        SettingError: an unknown type, or no schema where there must be one.
    """
    name = "response_format"
    response_format = without_nulls(response_format)
    kind = response_format.get("type")
    if supported(name, kind, "text", "json_object", "json_schema") == "text":
        return {}
    if kind == "json_schema":
        holder = check(name, response_format.get("json_schema"), dict)
    else:
        # llama.cpp's json_object may bring a schema as well.
        holder = {"schema": {"type": "object"}, **response_format}
    schema = check(name, holder.get("schema"), dict)
    is_lenient = holder.get("strict") is not True
    return dict(json=schema | {"x-guidance": SPACES | {"lenient": is_lenient}})
