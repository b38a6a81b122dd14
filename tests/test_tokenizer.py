"""Tokenizers against the reference implementations, chat templates against Hugging Face, and the
streamed text against plain decoding. Every tokenizer here is built on the spot, in milliseconds."""

import contextlib
import io
import json
import sys
from datetime import datetime
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from conftest import SHAKESPEARE
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from model import CheckpointError
from tokenizer import PLAIN_TEMPLATE, Detokenizer, Tokenizer

few = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CORPUS = ["the cat sat on the mat", "a dog and a cat", "the end of the day", "to be or not"] * 5
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXTS = [
    "", "the cat", " the cat", "  two  spaces ", "the\ncat\n\nsat\t.", "caf\u00e9 \u20ac 5",
    "\U0001f600\U0001f600", "\u4f60\u597d, the cat", "e\u0301 combining", "\ufffd", "the\ufffd",
    "a" * 50, "<", "< s >", "\u2581", "\r\n", "\x00",
]  # fmt: skip
any_text = st.lists(
    st.one_of(
        st.sampled_from(["the", " cat", " ", "  ", "\n", "a", "é", "€", "😀", "👩‍👩‍👧", "你好"]),
        st.characters(exclude_categories=["Cs"], exclude_characters="▁"),
    ),
    max_size=8,
).map("".join)


# --- Folders to read ------------------------------------------------------------------------------


def write(folder: Path, config: dict | None = None, **files: bytes | str | dict) -> Path:
    """Make a checkpoint folder's tokenizer files; `tokenizer_model=` is tokenizer.model."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        files["tokenizer_config.json"] = config
    for name, content in files.items():
        content = json.dumps(content) if isinstance(content, dict) else content
        content = content.encode() if isinstance(content, str) else content
        (folder / name.replace("_model", ".model").replace("_json", ".json")).write_bytes(content)
    return folder


def train_sentencepiece(**options) -> bytes:
    """A tiny model; the options are those of a Llama unless told otherwise."""
    model = io.BytesIO()
    llama = {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "add_dummy_prefix": True, "remove_extra_whitespaces": False,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=330, hard_vocab_limit=False,
        minloglevel=2, **(llama | options),
    )  # fmt: skip
    return model.getvalue()


LLAMA = train_sentencepiece()


def byte_level(*special: str, plain: tuple[str, ...] = (), bos: str = "") -> tokenizers.Tokenizer:
    """A tiny tokenizer.json as GPT-2, Llama 3 and Qwen have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "c"), ("a", "t"), ("Ġc", "at")]
    vocab = {piece: i for i, piece in enumerate(alphabet + [a + b for a, b in merges])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    if bos:
        parts = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, parts)
    return backend


def llama_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary of LLAMA and its merges, as Hugging Face converts them: by score."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=LLAMA)
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    splits = [
        (vocab[piece], (piece[:n], piece[n:]))
        for piece in vocab
        if not piece.startswith("<")
        for n in range(1, len(piece))
        if piece[:n] in vocab and piece[n:] in vocab
    ]
    # A higher score is an earlier merge, and sentencepiece numbers its pieces in that order.
    return vocab, [pair for _, pair in sorted(splits, key=lambda s: s[0])]


def metaspace() -> tokenizers.Tokenizer:
    """A tiny tokenizer.json as Llama 2 and Mistral have it: spaces marked, bytes as a fallback."""
    vocab, merges = llama_pieces()
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    return backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    fast = {name: byte_level("<s>", "</s>", "<|im_start|>", "<|im") for name in ("gpt",)}
    fast["metaspace"] = metaspace()
    plain = train_sentencepiece(add_dummy_prefix=False)
    squeezing = train_sentencepiece(
        normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True
    )
    unigram = train_sentencepiece(model_type="unigram", byte_fallback=True)
    slow = {"llama": LLAMA, "plain": plain, "squeezing": squeezing, "unigram": unigram}
    made = {n: write(root / n, NAMES, tokenizer_json=b.to_str()) for n, b in fast.items()}
    made |= {n: write(root / n, NAMES, tokenizer_model=m) for n, m in slow.items()}
    return made | {"shakespeare": SHAKESPEARE}


SLOW = ["llama", "plain", "squeezing", "unigram", "shakespeare"]
FAST = ["gpt", "metaspace"]


# --- sentencepiece --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SLOW)
def test_sentencepiece_is_the_reference(kind, folders):
    """Bug: a text is encoded or decoded otherwise than the library that trained the model does."""
    file = folders[kind] / "tokenizer.model"
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ours = Tokenizer(folders[kind])
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id(), theirs.eos_id())
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [theirs.bos_id(), *theirs.encode(text)], text
        assert ours.encode(text, add_special=False) == ids[1:]
        assert ours.decode(ids) == theirs.decode(ids)


@few
@given(text=any_text)
def test_sentencepiece_round_trip(text, folders):
    """Bug: white space or a rare character is lost on the way to ids and back."""
    ours = Tokenizer(folders["llama"])
    assert ours.decode(ours.encode(text)) == text


@few
@given(text=any_text)
def test_transformers_encodes_alike(text, folders):
    """Bug: our sentencepiece and Hugging Face's version of it disagree."""
    vocab, merges = llama_pieces()
    theirs = LlamaTokenizer(vocab=vocab, merges=merges)
    text = "the" + text  # in front of a space Hugging Face's adds no other
    ids = theirs.encode(text, add_special_tokens=False)
    for kind in ("llama", "metaspace"):
        ours = Tokenizer(folders[kind])
        assert ours.encode(text, add_special=False) == ids, kind
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_written_in_text(folders):
    """Bug: "<s>" in a prompt is spelled out as three characters; or it shows in the output."""
    for kind in (*SLOW, *FAST):
        ours = Tokenizer(folders[kind])
        ids = ours.encode("the</s>cat<s>", add_special=False)
        assert ids.count(ours.eos_id) == 1
        assert ids[-1] == ours.bos_id
        pieces = [ours.encode(part, add_special=False) for part in ("the", "cat")]
        assert ids == [*pieces[0], ours.eos_id, *pieces[1], ours.bos_id]
        assert "s>" not in ours.decode(ids)
        assert ours.special["</s>"] == ours.eos_id


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_longest_special_token_wins(kind, tmp_path):
    """Bug: "<|im" is found inside "<|im_start|>"."""
    if kind == "gpt":
        # The shorter one is added first; the order must not matter.
        backend = byte_level("<|im", "<|im_start|>", "<|im_st")
        ours = Tokenizer(write(tmp_path, {}, tokenizer_json=backend.to_str()))
    else:
        added = {str(330 + i): {"content": text, "special": True}
                 for i, text in enumerate(["<|im", "<|im_start|>", "<|im_st"])}  # fmt: skip
        config = NAMES | {"added_tokens_decoder": added}
        ours = Tokenizer(write(tmp_path, config, tokenizer_model=LLAMA))
    short, long, middle = (ours.special[text] for text in ("<|im", "<|im_start|>", "<|im_st"))
    ids = ours.encode("<|im_start|>", add_special=False)
    assert ids == [long]
    assert ours.encode("<|im_st<|im", add_special=False) == [middle, short]


def test_special_tokens_are_no_regular_expressions(tmp_path):
    """Bug: "<|a|>" as a pattern matches "<" or nothing; an empty one matches everywhere."""
    added = {"340": {"content": "<|a|>", "special": True}, "341": {"content": "[x]"}}
    config = NAMES | {"added_tokens_decoder": added}
    ours = Tokenizer(write(tmp_path, config, tokenizer_model=LLAMA))
    assert ours.encode("<|a|>", add_special=False) == [340]
    assert not {340, 341} & set(ours.encode("< a x | [ >"))


def test_added_tokens_decoder(tmp_path):
    """Bug: a chat model's added ids lie beyond tokenizer.model, and decoding them crashes."""
    size = sentencepiece.SentencePieceProcessor(model_proto=LLAMA).vocab_size()
    added = {
        "1": {"content": "<s>", "special": True, "lstrip": False},
        str(size): {"content": "<|im_start|>", "special": True},
        str(size + 1): {"content": "<|im_end|>", "special": True},
    }
    config = {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "added_tokens_decoder": added
    }  # fmt: skip
    ours = Tokenizer(write(tmp_path, config, tokenizer_model=LLAMA))
    assert ours.eos_id == size + 1
    ids = ours.encode("<|im_start|>the cat<|im_end|>", add_special=False)
    assert (ids[0], ids[-1]) == (size, size + 1)
    assert ours.decode(ids) == "the cat"


def test_special_tokens_inside_the_vocabulary(tmp_path):
    """Bug: a chat token that tokenizer.model holds as an ordinary piece shows in the output."""
    model = train_sentencepiece(user_defined_symbols=["<|im_end|>"])
    i = sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id("<|im_end|>")
    added = {str(i): {"content": "<|im_end|>", "special": True}}
    config = NAMES | {"added_tokens_decoder": added}
    ours = Tokenizer(write(tmp_path, config, tokenizer_model=model))
    ids = ours.encode("the cat<|im_end|>")
    assert ids[-1] == i
    assert ours.decode(ids) == "the cat"


def test_added_tokens_that_are_not_special(tmp_path):
    """Bug: an ordinary added word ("special": false) is not recognised, or decoding it crashes.
    (Beside tokenizer.model its text is hidden, where tokenizer.json shows it.)"""
    size = sentencepiece.SentencePieceProcessor(model_proto=LLAMA).vocab_size()
    added = {str(size): {"content": "wombat", "special": False}}
    config = NAMES | {"added_tokens_decoder": added}
    slow = Tokenizer(write(tmp_path / "slow", config, tokenizer_model=LLAMA))
    backend = byte_level("<s>", "</s>", plain=("wombat",))
    fast = Tokenizer(write(tmp_path / "fast", NAMES, tokenizer_json=backend.to_str()))
    assert slow.encode("the wombat")[-1] == size
    assert slow.decode(slow.encode("the wombat")).startswith("the")
    assert fast.decode(fast.encode("the wombat")) == "the wombat"


# --- BOS and EOS ----------------------------------------------------------------------------------


def spell(token: str | None, form: str):
    return {"content": token, "lstrip": False} if form == "dict" else token


@pytest.mark.parametrize("form", ["str", "dict"])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_bos_and_eos_as_configured(kind, add_bos, add_eos, form, tmp_path):
    """Bug: BOS is added twice or not at all, or only where bos_token is written as a string."""
    config = {name: spell(token, form) for name, token in NAMES.items()}
    config |= {} if add_bos is None else {"add_bos_token": add_bos}
    config |= {} if add_eos is None else {"add_eos_token": add_eos}
    files = {
        "llama": {"tokenizer_model": LLAMA},
        "gpt": {"tokenizer_json": byte_level("<s>", "</s>").to_str()},
    }
    ours = Tokenizer(write(tmp_path, config, **files[kind]))
    bare = ours.encode("the cat", add_special=False)
    # Absent: sentencepiece adds BOS, a tokenizer.json whose post-processor adds none does not.
    has_bos = kind == "llama" if add_bos is None else add_bos
    want = [ours.bos_id] * has_bos + bare + [ours.eos_id] * bool(add_eos)
    assert ours.encode("the cat") == want
    assert None not in want
    assert ours.encode("") == [i for i in want if i not in bare]


@pytest.mark.parametrize("config", [{}, {"bos_token": None}, {"bos_token": "<never>"}, None])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_no_bos_named(kind, config, tmp_path):
    """Bug: `null` for bos_token (Qwen) becomes the id None, or the text "None"."""
    config = config and config | {"add_bos_token": True, "add_eos_token": True}
    files = {
        "llama": {"tokenizer_model": LLAMA},
        "gpt": {"tokenizer_json": byte_level("<s>", "</s>").to_str()},
    }
    ours = Tokenizer(write(tmp_path, config, **files[kind]))
    assert (ours.bos_id, ours.eos_id) == (None, None)
    assert ours.encode("the") == ours.encode("the", add_special=False)
    ours.template = "{{ bos_token }}the"
    if not (config or {}).get("bos_token"):
        assert ours.encode_chat([]) == ours.encode("the", add_special=False)


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("bos", ["", "<s>"])
def test_post_processor_says_whether_bos(bos, given, tmp_path):
    """Bug: Llama 3's files say nothing in tokenizer_config.json: tokenizer.json itself adds BOS."""
    backend = byte_level("<s>", "</s>", bos=bos)
    config = NAMES | ({} if given is None else {"add_bos_token": given})
    ours = Tokenizer(write(tmp_path, config, tokenizer_json=backend.to_str()))
    has_bos = bool(bos) if given is None else given
    ids = ours.encode("the cat")
    assert ids == [ours.bos_id] * has_bos + ours.encode("the cat", add_special=False)
    if given is None:
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **NAMES)
        assert ids == theirs.encode("the cat")


# --- tokenizer.json -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAST)
def test_tokenizer_json_is_the_reference(kind, folders):
    """Bug: tokenizer.json is read, but its normaliser, merges or decoder are not followed."""
    file = folders[kind] / "tokenizer.json"
    names = {name: NAMES[name] for name in ("bos_token", "eos_token")}
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), **names)
    ours = Tokenizer(folders[kind])
    assert ours.vocab_size == len(theirs)
    for text in [*TEXTS, "the</s> cat <s>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@few
@given(text=any_text)
@pytest.mark.parametrize("kind", FAST)
def test_tokenizer_json_round_trip(kind, text, folders):
    """Bug: white space or a rare character is lost on the way to ids and back."""
    ours = Tokenizer(folders[kind])
    assert ours.decode(ours.encode(text)) == text


def test_tokenizer_json_comes_first(folders, tmp_path):
    """Bug: of two files the poorer one is read, which lacks the chat tokens."""
    both = write(
        tmp_path, NAMES, tokenizer_json=byte_level("<s>", "</s>").to_str(), tokenizer_model=LLAMA
    )
    text = "the cat"
    assert Tokenizer(both).encode(text) == Tokenizer(folders["gpt"]).encode(text)


def test_tokenizers_package_is_missing(folders, tmp_path, monkeypatch):
    """Bug: without the extra an ImportError's traceback in place of what to install; or a folder
    that has tokenizer.model as well is refused."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointError, match=r"`tokenizers` package.*pip install"):
        Tokenizer(folders["gpt"])
    both = write(
        tmp_path, NAMES, tokenizer_json=byte_level("<s>", "</s>").to_str(), tokenizer_model=LLAMA
    )
    assert Tokenizer(both).encode("the cat") == Tokenizer(folders["llama"]).encode("the cat")


# --- Damaged files --------------------------------------------------------------------------------


def test_no_tokenizer_files(tmp_path):
    """Bug: a folder of weights alone ends in a traceback, or the message names no file."""
    for folder in (tmp_path, tmp_path / "nothing here", write(tmp_path / "config", NAMES)):
        with pytest.raises(CheckpointError, match=r"tokenizer\.json.*tokenizer\.model"):
            Tokenizer(folder)


GPT = byte_level("<s>", "</s>").to_str()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", GPT[: len(GPT) // 2], "[]", "{}", "null", '{"model": 5}', b"\xff\xfe\x00", LLAMA],
    ids=["empty", "brace", "half", "list", "object", "null", "model", "binary", "other format"],
)
def test_damaged_tokenizer_json(content, tmp_path):
    """Bug: a half-downloaded file ends in the library's bare Exception, so in a traceback."""
    with pytest.raises(CheckpointError, match=tmp_path.name):
        Tokenizer(write(tmp_path, NAMES, tokenizer_json=content))


@pytest.mark.parametrize(
    "content",
    [b"", LLAMA[: len(LLAMA) // 2], b"\xff" * 64, b"{}", GPT, "version https://git-lfs..."],
    ids=["empty", "half", "noise", "object", "other format", "git lfs pointer"],
)
def test_damaged_tokenizer_model(content, tmp_path):
    """Bug: a half-downloaded file, or a pointer of git lfs, ends in a traceback."""
    with pytest.raises(CheckpointError, match=tmp_path.name):
        Tokenizer(write(tmp_path, NAMES, tokenizer_model=content))


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"9": {}}},
        {"added_tokens_decoder": {"9": {"content": 5}}},
        {"added_tokens_decoder": ["a"]},
        {"bos_token": ["<s>"]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": ["{{ messages }}"]},
    ],
    ids=str,
)
def test_damaged_tokenizer_config(config, tmp_path):
    """Bug: a value of the wrong type ends in KeyError or TypeError, which main does not catch."""
    with pytest.raises(CheckpointError):
        Tokenizer(write(tmp_path, config, tokenizer_model=LLAMA))


def test_damaged_chat_template(tmp_path):
    """Bug: a template file that is not UTF-8 is no CheckpointError."""
    with pytest.raises(CheckpointError):
        Tokenizer(
            write(tmp_path, NAMES, tokenizer_model=LLAMA, **{"chat_template.jinja": b"\xff\xfe"})
        )


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_lone_surrogates(kind, folders):
    """Bug: bytes of the command line that are not UTF-8 reach Python as lone surrogates, and the
    libraries answer with TypeError or RuntimeError, which main does not catch."""
    with contextlib.suppress(ValueError):  # refused with a message, or replaced: both are fine
        Tokenizer(folders[kind]).encode("the \udcff cat")


# --- Ids to text, one at a time -------------------------------------------------------------------


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """What each push gives out, and at the end the flush."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def check_stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    """Streamed text is the plain text of all ids, less that of the prompt."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert whole.startswith(before)  # else this test asks for the impossible
    parts = stream(tokenizer, prompt, ids)
    assert "".join(parts) == whole[len(before) :]
    return parts


def some_ids(tokenizer: Tokenizer):
    """Any ids: bytes (valid UTF-8 or not), special ones, and some beyond the vocabulary."""
    n = tokenizer.vocab_size
    usual = tokenizer.encode("é😀 the cat on the mat", add_special=False)
    return st.lists(
        st.one_of(
            st.integers(0, n - 1),
            st.sampled_from([*tokenizer.special.values(), n, n + 70, *usual]),
            st.integers(3, 258),  # the byte tokens of a sentencepiece model
        ),
        max_size=12,
    )


@pytest.mark.parametrize("kind", [*SLOW, "gpt"])
@settings(few, max_examples=200)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(kind, data, folders):
    """Bug: a space, half a character, or a mark of invalid bytes is lost, doubled or early."""
    tokenizer = Tokenizer(folders[kind])
    prompt = tokenizer.encode(data.draw(any_text.filter(lambda text: "\ufffd" not in text)))
    check_stream(tokenizer, prompt, data.draw(some_ids(tokenizer)))


@pytest.mark.parametrize("kind", [*SLOW, *FAST])
@settings(few, max_examples=150)
@given(prompt=any_text, text=any_text, special=st.booleans())
@example(prompt="the", text="é😀", special=False)
@example(prompt="😀😀", text="a", special=False)
@example(prompt="你好你好", text="é", special=False)
@example(prompt="the", text=" cat", special=True)
@example(prompt="a\ufffd", text="a", special=False)
def test_valid_text_streams_without_marks(kind, prompt, text, special, folders):
    """Bug: a character of several byte tokens is shown as U+FFFD, or is lost; the end of the
    prompt is shown again. (With a byte-fallback decoder one half character spoils its whole run
    of bytes: "é" and half of "😀" decode to five marks.)"""
    tokenizer = Tokenizer(folders[kind])
    text = text.replace("\ufffd", "")
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special=False)
    ids = [tokenizer.eos_id] * special + ids
    parts = check_stream(tokenizer, prompt_ids, ids)
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == ""  # nothing is left to flush


@pytest.mark.parametrize("kind", [*SLOW, "metaspace"])
@few
@given(prompt=any_text, text=any_text)
@example(prompt="😀😀", text="é")
@example(prompt="", text="a😀")
@example(prompt="你好", text="😀")
def test_byte_tokens_stream_without_marks(kind, prompt, text, folders):
    """Bug: the window begins inside a character of the prompt, and a byte-fallback decoder marks
    all bytes up to the next ordinary token: after "😀😀" the third one comes as four marks."""
    tokenizer = Tokenizer(folders[kind])
    text = text.replace("\ufffd", "")
    ids = [tokenizer.encode(c, add_special=False)[-len(c.encode()) :] for c in "é😀"]
    first = ids[0][0] - "é".encode()[0]  # id of the byte 0
    assert ids[1] == [first + byte for byte in "😀".encode()]
    parts = check_stream(tokenizer, tokenizer.encode(prompt), [first + b for b in text.encode()])
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == ""


@pytest.mark.parametrize("kind", [*SLOW, "gpt"])
def test_half_a_character_waits(kind, folders):
    """Bug: the first of four byte tokens is shown as a mark, or the last one is not shown."""
    tokenizer = Tokenizer(folders[kind])
    ids = tokenizer.encode("😀", add_special=False)
    ids = ids[-4:]
    prompt = tokenizer.encode("the")
    assert stream(tokenizer, prompt, ids) == ["", "", "", "😀", ""]
    parts = stream(tokenizer, prompt, ids[:3])
    assert parts[:3] == ["", "", ""]
    assert set(parts[3]) == {"\ufffd"}  # at the end it is shown as what it is
    letter = tokenizer.encode("a", add_special=False)[-1]
    parts = stream(tokenizer, prompt, [*ids[:3], letter])
    assert "".join(parts).lstrip("\ufffd").strip() == "a"
    assert parts[:3] == ["", "", ""]


@pytest.mark.parametrize("kind", [*SLOW, *FAST])
def test_space_after_the_prompt_is_kept(kind, folders):
    """Bug: a decoder drops the space in front of its first word: "To be" + "or" is "To beor"."""
    tokenizer = Tokenizer(folders[kind])
    whole = tokenizer.encode("the cat on the mat")
    for cut in range(1, len(whole)):
        parts = check_stream(tokenizer, whole[:cut], whole[cut:])
        assert tokenizer.decode(whole[:cut]) + "".join(parts) == "the cat on the mat"


@pytest.mark.parametrize("kind", [*SLOW, *FAST])
@pytest.mark.parametrize("times", [1, 2, 7])
def test_hidden_ids_do_not_swallow_a_space(kind, times, folders):
    """Bug: under --ignore-eos the EOS is the only context of the next word, which loses its
    space; so do ids of the model's padding, beyond the tokenizer's vocabulary."""
    tokenizer = Tokenizer(folders[kind])
    the, space_cat = (
        tokenizer.encode("the"),
        tokenizer.encode("the cat")[len(tokenizer.encode("the")) :],
    )
    for hidden in (tokenizer.eos_id, tokenizer.vocab_size + 3):
        assert "".join(check_stream(tokenizer, the, [hidden] * times + space_cat)) == " cat"


def test_prompt_of_bos_alone(folders):
    """Bug: an empty prompt gives a text that begins with a space, or without its first letter."""
    for kind in (*SLOW, *FAST):
        tokenizer = Tokenizer(folders[kind])
        ids = tokenizer.encode("the cat", add_special=False)
        assert "".join(check_stream(tokenizer, [tokenizer.bos_id], ids)) == "the cat"


def test_prompt_that_ends_in_a_replacement_character(folders):
    """Bug: a U+FFFD the user typed is taken for half a character and shown again."""
    for kind in ("llama", "gpt"):
        tokenizer = Tokenizer(folders[kind])
        prompt = tokenizer.encode("bad \ufffd")
        assert "".join(stream(tokenizer, prompt, tokenizer.encode("\n", False)[-1:])) == "\n"


def test_long_streams_stay_fast(folders):
    """Bug: each push decodes the whole text again, so a long answer takes quadratic time."""
    tokenizer = Tokenizer(folders["llama"])
    detokenizer, longest = Detokenizer(tokenizer, tokenizer.encode("the")), 0
    decode = detokenizer._decode

    def counting(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    detokenizer._decode = counting
    for i in tokenizer.encode("the cat é sat 😀 on the mat " * 10, add_special=False):
        detokenizer.push(i)
    assert longest <= 16


# --- Chat templates -------------------------------------------------------------------------------

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
)  # fmt: skip
LOOP = """{% for message in messages %}
    {% if message['role'] == 'system' %}
<<{{ message['content'] | trim }}>>
    {% else %}
{{ message.role | title }}: {{ message.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}Assistant:{% endif %}"""
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
    "{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}"
    "{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
TEMPLATES = {
    "loop": LOOP,
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "mistral": MISTRAL,
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ '<é&>' | tojson }}",
    "tojson options": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "strftime_now": "{{ strftime_now('%Y-%m') }} {{ bos_token }}{{ eos_token }}",
    "break": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}"
    "{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{{ m.content }}{% endfor %}.",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "no tools": "{% if tools is not none %}tools{% endif %}{% if documents %}d{% endif %}.",
    "white space": "  {% if true %}\n  x\n  {% endif %}\n\n y \n",
}
CHATS = {
    "one": [{"role": "user", "content": " Hello, caf\u00e9 \U0001f600! "}],
    "three": [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "<sat>\n"},
        {"role": "user", "content": 'on {{ the }} "mat"\'s'},
    ],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "sat"},
        {"role": "user", "content": ""},
    ],
}


def chatter(folder: Path, template=None, **files) -> Tokenizer:
    config = NAMES | {"chat_template": template, "add_bos_token": True}
    return Tokenizer(write(folder, config, tokenizer_json=byte_level(*SPECIAL).to_str(), **files))


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template_renders_as_in_transformers(name, tmp_path):
    """Bug: a filter, function or white-space rule of Hugging Face's environment is missing; or
    BOS is added to a template that writes its own."""
    ours = chatter(tmp_path, TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **NAMES)
    for chat in CHATS.values():
        want = theirs.apply_chat_template(
            chat, chat_template=TEMPLATES[name], add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_chat(chat) == want
    assert ours.chat_stop == ()


def test_template_may_refuse(tmp_path):
    """Bug: raise_exception is missing, and its message with it."""
    ours = chatter(tmp_path, MISTRAL)
    chat = [{"role": "user", "content": "a"}] * 2
    with pytest.raises(ValueError, match="roles must alternate user/assistant"):
        ours.encode_chat(chat)


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ messages", "{% for %}", "{% nope %}", "{{ 1 / 0 }}", "{{ missing.x }}",
     "{{ messages | nope }}", "{{ messages[0].content.x.y }}", "{% include 'x' %}"],
)  # fmt: skip
def test_broken_template(template, tmp_path):
    """Bug: a template that does not compile, or fails, ends in a traceback."""
    ours = chatter(tmp_path, template)
    with pytest.raises(ValueError, match="chat template"):
        ours.encode_chat(CHATS["one"])


ESCAPES = [
    "''.__class__.__mro__",
    "''.__class__.__mro__[1].__subclasses__()",
    "cycler.__init__.__globals__.os.system('touch MARK')",
    "lipsum.__globals__['os'].system('touch MARK')",
    "self.__init__.__globals__.__builtins__.open('MARK', 'w')",
    "raise_exception.__globals__['Path']('MARK').touch()",
    "strftime_now.__globals__['Path']('MARK').touch()",
    "strftime_now.__code__.co_code",
    "namespace.__init__.__globals__.__builtins__.open('MARK', 'w')",
    "(messages | attr('__class__')).__mro__",
    "messages.__class__.__base__.__subclasses__()",
    "messages.append({})",
    "messages.pop()",
    "messages.clear()",
    "messages.sort()",
    "messages[0].update({'content': 'x'})",
    "messages[0].pop('content')",
    "messages[0].__setitem__('content', 'x')",
    "range(10**9) | list",
    "range(10**9) | sum",
]


@pytest.mark.parametrize("expression", ESCAPES)
def test_template_is_sandboxed(expression, tmp_path, monkeypatch):
    """Bug: a checkpoint's template runs any Python (CVE-2024-34359), changes the conversation, or
    never ends."""
    monkeypatch.chdir(tmp_path)
    ours = chatter(tmp_path / "model", "{% set x = " + expression + " %}")
    chat = [dict(message) for message in CHATS["three"]]
    with pytest.raises(ValueError, match="chat template"):
        ours.encode_chat(chat)
    assert chat == CHATS["three"]
    assert not (tmp_path / "MARK").exists()


def test_sandboxed_formatting(tmp_path):
    """Bug: str.format reaches attributes that the sandbox forbids elsewhere."""
    for expression in ("'{0.__class__.__mro__}'.format(1)", "'{x.__class__}'.format_map({'x': 1})"):
        ours = chatter(tmp_path, "{{ " + expression + " }}.")
        try:
            text = ours.decode(ours.encode_chat([]))
        except ValueError:
            continue
        assert "class" not in text


def test_chat_template_file_comes_first(tmp_path):
    """Bug: the newer chat_template.jinja is not read, or loses to tokenizer_config.json."""
    ours = chatter(tmp_path, "old", **{"chat_template.jinja": "n\u00e9w"})
    assert ours.decode(ours.encode_chat(CHATS["one"])) == "n\u00e9w"


def test_several_named_templates(tmp_path):
    """Bug: a list of templates is rendered as a list; the first is taken for the default."""
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    ours = chatter(tmp_path / "two", named)
    assert ours.decode(ours.encode_chat(CHATS["one"])) == "d"
    for lacking in ([], named[:1], None, ""):
        assert chatter(tmp_path / "none", lacking).template == PLAIN_TEMPLATE


def test_plain_template(tmp_path):
    """Bug: a base model gets no BOS, no turn to fill, or nothing to stop it at its turn's end."""
    ours = chatter(tmp_path)
    assert ours.chat_stop == ("\n\n",)
    want = "SYSTEM:\nBe brief.\n\nUSER:\nthe cat\n\nASSISTANT:\nsat\n\nUSER:\n\n\nASSISTANT:\n"
    ids = ours.encode_chat(CHATS["system"])
    assert ids[0] == ours.bos_id
    assert ours.decode(ids) == want
    assert ids == ours.encode(want)


def test_strftime_now_is_now(tmp_path):
    """Bug: the date is that of the import, or of another clock."""
    ours = chatter(tmp_path, "{{ strftime_now('%Y %H') }}")
    before = datetime.now().strftime("%Y %H")
    text = ours.decode(ours.encode_chat([]))
    assert text in (before, datetime.now().strftime("%Y %H"))


def test_chat_text_may_hold_template_code(tmp_path):
    """Bug: what the user writes is rendered as a template."""
    ours = chatter(tmp_path, "{{ messages[0].content }}")
    text = "{{ 1 + 1 }}{% break %}{# #}"
    assert ours.decode(ours.encode_chat([{"role": "user", "content": text}])) == text
