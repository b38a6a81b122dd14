"""Structured output: only tokens that keep the text within a schema, a regex or a grammar.

A grammar is about bytes, and a model draws tokens, of which each is several bytes and may span the
border between two words of the grammar. llguidance (an extra, kilolm[structured]) walks the trie of
the vocabulary's bytes along what its parser would accept next, which gives a mask over V in tens of
microseconds; the sampler gives what is masked no chance, before any other setting (sampling.py).

    schema   {"enum": ["on", "off"]}      text so far: "o          allowed: n  n"  f  ff  ff"

Knows the tokenizer, not who samples. Papers: Willard and Louf 2023 (arXiv:2307.09702), Koo et al.
2024 (arXiv:2407.08103). Read: matcher, pieces. Next: tp.py.
"""

import json
import re
from functools import cache
from typing import Any

from model import Config
from settings import JSON, SettingError, check, supported
from tokenizer import Ids, Tokenizer

# Between the parts of JSON: indented lines at most, or a weak model writes spaces until its length.
SPACES = {"whitespace_pattern": "( |\n {0,20})?"}
# Characters of a schema, a regex, ...: 10,000 words, which compile in a tenth of a second.
MAX_LENGTH = 2**18
# Patterns beside an allOf must hold together. Whether any text can fulfil 16 of them takes a second
# to find out, and three times as long for each further one.
MAX_PATTERNS = 14
# GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100.
BYTE_LEVEL = dict(enumerate([*range(33), *range(127, 161), 173], 256))


def matcher(tokenizer: Tokenizer, config: Config, wish: JSON) -> Any:
    """Compile a SamplingParams.structured_outputs to a llguidance.LLMatcher at its beginning.

    It is told each token that was drawn (consume_token), says which may come next
    (compute_logit_bias), and when nothing more may (is_stopped); deep_copy serves guesses.

    Args:
        config: gives V, and the EOS ids: what may come where the text may end.

    Raises:
        SettingError: it does not compile, or there is no llguidance, or no tokenizer.
    """
    try:
        import llguidance  # here: the package is an extra

        kinds = dict(json=dict | str, regex=str, choice=list, grammar=str)
        kind = supported("it", " and ".join(check("it", wish, dict)), *kinds)
        text = check(kind, wish[kind], kinds[kind])
        # As a text: of objects that are nested too deeply llguidance would crash.
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        check("its length", len(text), int, 0, MAX_LENGTH)
        patterns = text.count('"pattern"') if "allOf" in text else 0
        check("the number of patterns beside an allOf", patterns, int, 0, MAX_PATTERNS)
        grammar = llguidance.grammar_from(kind, text)
        if kind == "json":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, SPACES)
        words = vocabulary(tokenizer, config.vocab_size, config.eos_ids)
        if words.decode_bytes(words.tokenize_str(text)) != text.encode():
            raise ValueError("the tokenizer lacks some of its characters, and cannot spell it")
        limits = llguidance.LLParserLimits(max_items_in_row=MAX_LENGTH)  # else 2,000 words at most
        made = llguidance.LLMatcher(words, grammar, log_level=0, limits=limits)
        made.compute_logit_bias()  # what cannot even begin is known here
        if made.is_error():
            raise ValueError(made.get_error())
    except Exception as error:  # compilers raise anything for a bad schema
        raise SettingError("structured_outputs", f"cannot be used: {error}") from error
    return made


@cache
def vocabulary(tokenizer: Tokenizer, V: int, eos_ids: tuple[int, ...]) -> Any:
    """The trie of a model's tokens. One more than V: in case it has no EOS."""
    import llguidance

    spelt = pieces(tokenizer)

    def spell(text: str) -> Ids:
        """The ids of a text that must come next. Many tokenizers put a space in front of what they
        take for a beginning, so something stands before it. Some drop spaces, or have a special
        token of this name: then it is spelt by the longest pieces."""
        first = tokenizer.encode("\2", add_special=False)
        ids = tokenizer.encode(f"\2{text}", add_special=False)[len(first) :]
        plain = b"".join(spelt[i] for i in ids if tokenizer.is_text(i))
        return ids if plain == text.encode() else trie.greedy_tokenize(text)

    # With what else llguidance asks of a tokenizer.
    vars(spell).update(
        tokens=(spelt + [b""] * (V + 1))[: V + 1],
        special_token_ids=[i for i in range(V + 1) if not tokenizer.is_text(i)],
        is_tokenizer_wrapper=True, eos_token_id=V, bos_token_id=None,
    )  # fmt: skip
    trie = llguidance.LLTokenizer(spell, eos_token=[*eos_ids] or [V])
    return trie


@cache
def pieces(tokenizer: Tokenizer) -> list[bytes]:
    """Each id's own bytes; a special token's are its name.

    Example: byte-level BPE's "\u0120the" and sentencepiece's "\u2581the" are b" the", and "<0xC3>"
        is one byte
    """

    def bytes_of(piece: str) -> bytes:
        letters = piece.translate(BYTE_LEVEL)
        if tokenizer.byte_level and not re.search("[^\0-\xff]", letters):  # else it was added
            return letters.encode("latin-1")
        byte = re.fullmatch("<0x(..)>", piece)  # byte fallback
        return bytes.fromhex(byte[1]) if byte else piece.replace("\u2581", " ").encode()

    return [bytes_of(tokenizer.piece(i) or "") for i in range(tokenizer.vocab_size)]


def structure(form: Any) -> JSON:
    """OpenAI's response_format as SamplingParams.structured_outputs, {} for none.

    Raises:
        SettingError: an unknown type, or no schema where there must be one.
    """
    name = "response_format"
    kind = check(name, form, dict).get("type")
    if supported(name, kind, "text", "json_object", "json_schema") == "text":
        return {}
    if kind == "json_schema":
        form = check(name, form.get(kind), dict)
    else:
        form = {"schema": {"type": "object"}} | form  # llama.cpp's, which may have one too
    return dict(json=check(name, form.get("schema"), dict))
