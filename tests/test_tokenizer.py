"""Tokenizers against the reference implementations, chat templates against Hugging Face, and the
streamed text against plain decoding. Every tokenizer here is built on the spot, in milliseconds."""

import io
import json
import re
import sys
import time
from contextlib import suppress
from itertools import product

import pytest
import sentencepiece
import tokenizers
from conftest import SHAKESPEARE
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from around.folder import PLAIN_TEMPLATE, Detokenizer, Tokenizer
from around.folder.chat import compile_template
from around.settings import InputError

few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CORPUS = ["the cat sat on the mat", "a dog and a cat", "the end of the day", "to be or not"] * 5
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXTS = [
    "", "the cat", " the cat", "  two  spaces ", "the\ncat\n\nsat\t.", "caf\u00e9 \u20ac 5",
    "\U0001f600\U0001f600", "\u4f60\u597d, the cat", "e\u0301 combining", "\ufffd", "the\ufffd",
    "a" * 50, "<", "< s >", "\u2581", "\r\n", "\x00",
]  # fmt: skip
pieces = st.sampled_from(["the", " cat", " ", "  ", "\n", "a", "é", "€", "😀", "👩‍👩‍👧", "你好"])
letters = st.characters(exclude_categories=["Cs"], exclude_characters="▁\ufffd")
any_text = st.lists(pieces | letters, max_size=8).map("".join)


def write(folder, config=None, **files):
    """Make a checkpoint folder's tokenizer files; `tokenizer_model=` is tokenizer.model."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        files["tokenizer_config.json"] = config
    for name, content in files.items():
        content = json.dumps(content) if isinstance(content, dict) else content
        content = content.encode() if isinstance(content, str) else content
        (folder / name.replace("_model", ".model").replace("_json", ".json")).write_bytes(content)
    return folder


def read(folder, config=None, **files):
    return Tokenizer(write(folder, config, **files))


def train_sentencepiece(**options):
    """Train a tiny model; the options are those of a Llama unless told otherwise."""
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
LLAMA_SIZE = sentencepiece.SentencePieceProcessor(model_proto=LLAMA).vocab_size()


def byte_level(*special, plain=(), bos=""):
    """Build a tiny tokenizer.json as GPT-2, Llama 3 and Qwen have it."""
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


GPT = byte_level("<s>", "</s>").to_str()
BARE = {"llama": {"tokenizer_model": LLAMA}, "gpt": {"tokenizer_json": GPT}}


def metaspace():
    """Build a tiny tokenizer.json as Llama 2 and Mistral have it, with LLAMA's vocabulary."""
    sp = sentencepiece.SentencePieceProcessor(model_proto=LLAMA)
    vocab = {sp.id_to_piece(i): i for i in range(sp.vocab_size())}
    # A higher score is an earlier merge, and sentencepiece numbers its pieces in that order.
    merges = [
        (piece[:n], piece[n:])
        for piece in vocab
        for n in range(1, len(piece))
        if piece[0] != "<" and piece[:n] in vocab and piece[n:] in vocab
    ]
    backend = LlamaTokenizer(vocab=vocab, merges=merges).backend_tokenizer
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(marks), None
    backend.add_special_tokens([AddedToken("<|turn|>", normalized=False)])
    return backend


def fast_twin(folder, **names):
    """Return Hugging Face's reader of a folder's tokenizer.json."""
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **NAMES | names)


SLOW, FAST = ["llama", "plain", "squeezing", "unigram", "shakespeare"], ["gpt", "metaspace"]
SQUEEZE = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
STORED = byte_level("<s>", "</s>", "<|turn|>", "<|tu")
# A training script may leave these on, and every prompt is quietly cut or padded.
STORED.enable_truncation(4)
STORED.enable_padding(length=64, pad_id=0, pad_token="!")
FILES = {  # of each kind but the bundled one
    "gpt": {"tokenizer_json": STORED.to_str()},
    "metaspace": {"tokenizer_json": metaspace().to_str()},
    "llama": {"tokenizer_model": LLAMA},
    "plain": {"tokenizer_model": train_sentencepiece(add_dummy_prefix=False)},
    "squeezing": {"tokenizer_model": train_sentencepiece(**SQUEEZE)},
    "unigram": {"tokenizer_model": train_sentencepiece(model_type="unigram")},
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Read a tokenizer of each kind; return it with its folder, by kind."""
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {name: write(root / name, NAMES, **each) for name, each in FILES.items()}
    folders["shakespeare"] = SHAKESPEARE
    return {name: (Tokenizer(folder), folder) for name, folder in folders.items()}


@pytest.mark.parametrize("kind", [*SLOW, *FAST])
def test_the_reference(kind, kinds):
    """Encode and decode many texts, and compare with the library that trained the model. Catches: a
    text encoded or decoded otherwise; the normaliser, merges or decoder of tokenizer.json not
    followed; "<s>" in a prompt spelled out as three characters, or shown in the output."""
    ours, folder = kinds[kind]
    if kind in SLOW:
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        prefix, size, options, texts = [theirs.bos_id()], theirs.vocab_size(), {}, TEXTS
        assert (ours.bos_id, ours.eos_id) == (theirs.bos_id(), theirs.eos_id())
    else:
        theirs = fast_twin(folder, unk_token=None)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        prefix, size, texts = [], len(theirs), [*TEXTS, "the</s> cat <s>"]
    assert ours.vocab_size == size
    for text in texts:
        ids = ours.encode(text)
        assert ids == [*prefix, *theirs.encode(text)], text
        assert ours.encode(text, add_special=False) == ids[len(prefix) :]
        assert ours.decode(ids) == theirs.decode(ids, **options)
    the, cat = (ours.encode(part, add_special=False) for part in ("the", "cat"))
    ids = ours.encode("the</s>cat<s>", add_special=False)
    assert ids == [*the, ours.eos_id, *cat, ours.bos_id] and "s>" not in ours.decode(ids)
    assert ours.special["</s>"] == ours.eos_id


def added(first, *tokens):
    """Return a tokenizer_config.json with tokens added from an id on."""
    tokens = [{"content": each} if isinstance(each, str) else each for each in tokens]
    tokens = {str(first + i): {"special": True} | each for i, each in enumerate(tokens)}
    return NAMES | {"added_tokens_decoder": tokens}


def test_added_tokens(tmp_path):
    """Encode and decode texts with added tokens of several kinds. Catches: "<|im" found inside
    "<|im_start|>"; ids beyond tokenizer.model that crash decoding; an ordinary piece of it shown
    though it is special; "<|a|>" as a regular expression; an added word not recognised; a mark of
    calls or of a thought without text; a token with a space taken for one without; a time that
    grows with the square of the spaces."""
    tokens = ("<|im", "<|im_start|>", "<|im_st")
    llama = read(tmp_path / "a", added(LLAMA_SIZE, *tokens), **BARE["llama"])
    for ours in (llama, read(tmp_path / "b", {}, tokenizer_json=byte_level(*tokens).to_str())):
        short, long, middle = (ours.special[text] for text in tokens)
        assert ours.encode("<|im_start|>", add_special=False) == [long]
        assert ours.encode("<|im_st<|im", add_special=False) == [middle, short]
    shown = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]")
    config = added(LLAMA_SIZE, "<|a|>", "[x]", *shown)
    ours = read(tmp_path, config | {"eos_token": "[x]"}, **BARE["llama"])
    assert ours.eos_id == LLAMA_SIZE + 1
    ids = ours.encode(f"<|a|>the {''.join(shown)}[x]", add_special=False)
    assert (ids[0], *ids[-7:]) == (LLAMA_SIZE, *range(LLAMA_SIZE + 2, LLAMA_SIZE + 8), ours.eos_id)
    assert ours.decode(ids) == f"the {''.join(shown)}"
    assert max(ours.encode("< a x | [ >")) < LLAMA_SIZE
    model = train_sentencepiece(user_defined_symbols=["<|im_end|>"])
    i = sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id("<|im_end|>")
    ours = read(tmp_path, added(i, "<|im_end|>"), tokenizer_model=model)
    ids = ours.encode("the cat<|im_end|>")
    assert ids[-1] == i and ours.decode(ids) == "the cat"
    tokens = dict(content="<|l|>", lstrip=True), " <|l|>"  # the first takes in the spaces
    ours = read(tmp_path, added(LLAMA_SIZE, *tokens), **BARE["llama"])
    assert ours.encode("  <|l|>", add_special=False) == [LLAMA_SIZE]
    # Of the spaces in front of a token, one search is enough: 40,000 took a second.
    start = time.thread_time()
    ours.encode(" " * 40_000)
    assert time.thread_time() - start < 0.3


def test_bos_and_eos(tmp_path):
    """Encode with each way to ask for BOS and EOS, and check the ids. Catches: BOS twice or not at
    all, or only as a string; a config that overrules tokenizer.json, which adds Llama 3's BOS
    itself; `null` (Qwen) read as the id None or the text "None"; a folder of llama2.c, without a
    config, that gets no BOS."""
    forms = (str, lambda token: {"content": token, "lstrip": False})
    for row in product(BARE, (True, False, None), (True, False, None), forms):
        kind, add_bos, add_eos, form = row
        config = {name: form(token) for name, token in NAMES.items()}
        adds = {"add_bos_token": add_bos, "add_eos_token": add_eos}
        config |= {name: value for name, value in adds.items() if value is not None}
        ours = read(tmp_path / kind, config, **BARE[kind])
        bare = ours.encode("the cat", add_special=False)
        # Absent: sentencepiece adds BOS. A tokenizer.json whose post-processor adds none does not.
        bos = [ours.bos_id] * (kind == "llama" and add_bos is not False)
        eos = [ours.eos_id] * (kind == "llama" and bool(add_eos))
        assert None not in (ours.bos_id, ours.eos_id), row
        assert ours.encode("the cat") == bos + bare + eos and ours.encode("") == bos + eos, row
    for kind, names in product(BARE, ({}, {"bos_token": None}, {"bos_token": "<never>"})):
        config = names | {"add_bos_token": True, "add_eos_token": True}
        ours = read(tmp_path / kind, config, **BARE[kind])
        the = ours.encode("the", add_special=False)
        assert (ours.bos_id, ours.eos_id, ours.encode("the")) == (None, None, the), names
        ours.template = "{{ bos_token }}the"
        assert (ours.encode_chat([]) == the) != ("<never>" in names.values())
    ours = read(tmp_path / "bare", tokenizer_model=LLAMA)
    assert (ours.bos_id, ours.eos_id, ours.encode("")) == (1, 2, [1])
    for bos in ("", "<s>"):
        stored = byte_level("<s>", "</s>", bos=bos).to_str()
        ours = read(tmp_path / "json", NAMES, tokenizer_json=stored)
        ids = ours.encode("the cat")
        assert ids == [ours.bos_id] * bool(bos) + ours.encode("the cat", add_special=False)
        assert ids == fast_twin(tmp_path / "json").encode("the cat")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1234\n"
DAMAGED = {
    "tokenizer_json": (
        b"", b"{", GPT[: len(GPT) // 2], "[]", {}, "null", {"model": 5}, b"\xff\xfe\x00", LLAMA,
        POINTER,
    ),
    "tokenizer_model": (b"", LLAMA[: len(LLAMA) // 2], b"\xff" * 64, {}, GPT, POINTER),
    "tokenizer_config.json": (
        b"", b"{", b"[]", b"\xff", POINTER, {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"9": {}}}, {"added_tokens_decoder": {"9": {"content": 5}}},
        {"added_tokens_decoder": ["a"]}, {"bos_token": ["<s>"]},
        {"chat_template": [{"name": "default"}]}, {"chat_template": ["{{ messages }}"]},
    ),
    "chat_template.jinja": (b"\xff\xfe",),
}  # fmt: skip


def test_which_file_and_damaged_ones(kinds, tmp_path, monkeypatch):
    """Read damaged, doubled and missing tokenizer files. Catches: a half-downloaded file, a value
    of the wrong type, or no file at all, that ends in a traceback; of two files the poorer one,
    which lacks the chat tokens; an ImportError without the extra, or other ids from
    tokenizer.model; a decoder that does more than join bytes, taken for one that does not."""
    cases = [(file, content) for file, contents in DAMAGED.items() for content in contents]
    for i, (file, content) in enumerate(cases):
        others = {} if file.startswith("tokenizer_json") else BARE["llama"]
        with pytest.raises(InputError, match=f"folder{i}") as caught:
            read(tmp_path / f"folder{i}", **(others | {file: content}))
        assert "\n" not in str(caught.value)
        if content is POINTER:  # of Git LFS, in place of the file
            name = file.replace("_json", ".json").replace("_model", ".model")
            assert re.search(rf"{name}.* \(.*git lfs pull\): ", str(caught.value))
    for folder in (tmp_path / "nothing here", write(tmp_path / "config", NAMES)):
        with pytest.raises(
            InputError, match=r"no tokenizer\.json, and no tokenizer\.model.*transf"
        ):
            Tokenizer(folder)
    pieces = byte_level()
    pieces.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match=r"tokenizer\.json's decoder"):
        read(tmp_path / "pieces", tokenizer_json=pieces.to_str())
    with pytest.raises(InputError, match="the id of  300"):  # of a token without a text
        read(tmp_path / "empty", added(300, ""), tokenizer_json=GPT)
    both = write(tmp_path, NAMES, tokenizer_json=GPT, tokenizer_model=LLAMA)
    gpt, folder = kinds["gpt"]
    assert Tokenizer(both).encode("the cat") == gpt.encode("the cat")
    (both / "tokenizer.json").rename(tmp_path / "tokenizer.json.0")
    (both / "tokenizer.json").symlink_to("lost")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer(both)
    (tmp_path / "tokenizer.json.0").rename(both / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for each in (folder, both):
        with pytest.raises(InputError, match="pip install"):
            Tokenizer(each)


# --- Ids to text, one at a time -------------------------------------------------------------------


def stream(tokenizer, prompt, ids):
    """Return what each push gives out, and at the end the flush."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, ids), detokenizer.push(None, last=True)]


def check_stream(tokenizer, prompt, ids, marks=False):
    """Check that streamed text is the plain text of all ids, less that of the prompt; that whole
    characters leave no marks, and nothing to flush."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert whole.startswith(before)  # else this test asks for the impossible
    parts = stream(tokenizer, prompt, ids)
    text = "".join(parts)
    assert text == whole[len(before) :]
    assert marks or ("\ufffd" not in text and parts[-1] == "")
    return text


@pytest.mark.parametrize("kind", [*SLOW, "gpt"])
@settings(few, max_examples=60)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(kind, data, kinds):
    """Stream random ids (bytes, valid UTF-8 or not, special ones, some beyond the vocabulary), and
    compare with plain decoding. Catches: a space, half a character, or a mark of invalid bytes that
    is lost, doubled or early."""
    ours, _ = kinds[kind]
    n, usual = ours.vocab_size, ours.encode("é😀 the cat on the mat", add_special=False)
    others = st.sampled_from([*ours.special.values(), n, n + 70, *usual])
    byte_tokens = st.integers(3, 258)  # of a sentencepiece model
    ids = st.lists(st.integers(0, n - 1) | others | byte_tokens, max_size=12)
    check_stream(ours, ours.encode(data.draw(any_text)), data.draw(ids), marks=True)


@pytest.mark.parametrize("kind", [*SLOW, *FAST])
@few
@given(prompt=any_text, text=any_text, special=st.booleans())
@example(prompt="the", text="é😀", special=False)
@example(prompt="😀😀", text="é", special=False)
@example(prompt="你好你好", text="é", special=False)
@example(prompt="", text="a😀", special=False)
@example(prompt="", text=" cat", special=False)
@example(prompt="the", text=" cat", special=True)
@example(prompt="a\ufffd", text="a", special=False)
def test_valid_text_streams_without_marks(kind, prompt, text, special, kinds):
    """Encode random texts, stream them, and compare. Catches: white space or a rare character lost
    on the way to ids and back; a character of several byte tokens shown as U+FFFD, or lost; the
    prompt's end shown again; a window that begins inside a character, so that all bytes up to the
    next ordinary token become marks."""
    ours, _ = kinds[kind]
    if kind in ("llama", *FAST):
        assert ours.decode(ours.encode(text)) == text
    prompt, ids = ours.encode(prompt), ours.encode(text, add_special=False)
    check_stream(ours, prompt, [ours.eos_id] * special + ids)
    if kind != "gpt":  # each byte as a token of its own
        first = ours.encode("é", add_special=False)[-2] - "é".encode()[0]
        check_stream(ours, prompt, [first + byte for byte in text.encode()])


@pytest.mark.parametrize("kind", [*SLOW, *FAST])
def test_what_a_decoder_drops_or_marks(kind, kinds):
    """Stream a text cut at each token, after EOS, after spaces and within a character. Catches: the
    space that a decoder drops in front of its first word ("To beor"), also behind EOS or spaces;
    the first of four byte tokens shown as a mark, or the last not shown; a user's U+FFFD shown
    again; a TypeError for surrogates."""
    ours, _ = kinds[kind]
    whole, the = ours.encode("the cat on the mat"), ours.encode("the")
    for cut in range(1, len(whole)):
        text = check_stream(ours, whole[:cut], whole[cut:])
        assert ours.decode(whole[:cut]) + text == "the cat on the mat"
    for hidden, times in product((ours.eos_id, ours.vocab_size + 3), (1, 7)):
        ids = [hidden] * times + ours.encode("the cat")[len(the) :]
        assert check_stream(ours, the, ids) == " cat"
    assert check_stream(ours, [ours.bos_id], ours.encode("the cat", False)) == "the cat"
    known = {ours.piece(i): i for i in range(ours.vocab_size)}
    space = known.get("\u2581", known.get("\u0120"))
    word = next(i for piece, i in known.items() if piece[:1] == ours.piece(space) != piece)
    for prompt, last in product(("", "the cat", "   "), ([space, word], [space, space, word])):
        for ids in (last, [*last, *last], [word, *last]):
            check_stream(ours, ours.encode(prompt), ids)
    if kind != "metaspace":
        ids = ours.encode("\U0001f600", False)[-4:]
        assert stream(ours, the, ids) == ["", "", "", "\U0001f600", ""]
        *first, last = stream(ours, the, ids[:3])
        assert first == ["", "", ""] and {*last} == {"\ufffd"}  # at the end it shows what it is
        parts = stream(ours, the, [*ids[:3], ours.encode("a", False)[-1]])
        assert "".join(parts).lstrip("\ufffd").strip() == "a" and parts[:3] == ["", "", ""]
    if kind in ("llama", "gpt"):
        bad = stream(ours, ours.encode("bad \ufffd"), ours.encode("\n", False)[-1:])
        assert "".join(bad) == "\n" and ours.decode(ours.encode("the \udcff cat")) == "the ? cat"


def test_long_streams_stay_fast(kinds, monkeypatch):
    """Stream long texts, and note which ids are looked up. Catches: a push that decodes the whole
    text again, so that a long answer takes quadratic time; a prompt that each request decodes."""
    ours, _ = kinds["llama"]
    bytes_of, asked = ours.bytes_of, []
    monkeypatch.setattr(ours, "bytes_of", lambda i: asked.append(i) or bytes_of(i))
    ids = ours.encode("the cat \u00e9 sat \U0001f600 on the mat " * 10, add_special=False)
    stream(ours, ours.encode("the"), ids)
    assert asked == ids
    # A long prompt, with its end in the middle of a character; and what shows nothing, or is none.
    spaces, mark = ours.encode("\n" * 400, add_special=False)[1:], ours.encode("\u00e9")[-2]
    prompt = [*ours.encode("\u4f60\u597d" * 2000), mark]
    text = "".join(stream(ours, prompt, spaces + [mark] * 300))
    assert text == "\n" * 400 + "\ufffd" * 300


def test_many_added_tokens_are_read_at_once(tmp_path):
    """Read a tokenizer of which two files add 6,000 tokens, as Gemma 3's do. Catches: a call for
    each of them, which took quadratic time: 14 seconds."""
    backend = byte_level("<s>")
    size, texts = backend.get_vocab_size(), [f"<unused{i}>" for i in range(6000)]
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts[:3000]])
    config = NAMES | {
        "added_tokens_decoder": {size + i: {"content": t} for i, t in enumerate(texts)}
    }
    start = time.process_time()
    ours = read(tmp_path, config, tokenizer_json=backend.to_str())
    assert time.process_time() - start < 3
    assert ours.encode("a<unused5999>a<unused1>")[1::2] == [size + 5999, size + 1]


def test_settings_of_added_tokens(tmp_path):
    """Encode around added tokens with settings, and compare with transformers, or with what the
    setting says. Catches: settings that are lost when the config names the token; an empty token,
    found in front of each letter; single_word ignored in a tokenizer.model."""
    backend = byte_level("<s>")
    backend.add_tokens([AddedToken("<w>", rstrip=True, normalized=False)])
    ours = read(tmp_path / "json", {"eos_token": "<w>"}, tokenizer_json=backend.to_str())
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "json" / "tokenizer.json"), eos_token="<w>"
    )
    text = "a <w> a"
    assert ours.encode(text) == theirs(text)["input_ids"] and ours.eos_id in ours.encode(text)
    # A token is text if one of its characters stands for no byte, and else is bytes.
    odd = [
        "na\u00efve\n",
        "\u2039d\u00e9but fin\u203a",
        "<tool\u2581calls>",
        "\u00c3\u00a9",
        "\u00e9",
    ]
    backend.add_tokens([AddedToken(text, normalized=False) for text in odd])
    ours = read(tmp_path / "odd", {}, tokenizer_json=backend.to_str())
    for text in odd:
        i = backend.token_to_id(text)
        assert ours.decode([i]) == backend.decode([i], skip_special_tokens=False), text
    tokens = {"": {}, "<w>": {"single_word": True}}
    added = {LLAMA_SIZE + i: {"content": c} | tokens[c] for i, c in enumerate(tokens)}
    ours = read(tmp_path / "model", {"added_tokens_decoder": added}, tokenizer_model=LLAMA)
    for text, found in (("ab", []), ("a\\<w>b", []), ("a <w> b", [LLAMA_SIZE + 1])):
        assert [i for i in ours.encode(text) if i >= LLAMA_SIZE] == found, text


# --- Chat templates -------------------------------------------------------------------------------

MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set told = messages[0]['content'] %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for turn in turns %}"
    "{%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{{- '[INST] ' }}{%- if loop.first and told is defined %}{{- told + '\n\n' }}{%- endif %}"
    "{{- turn['content'] + '[/INST]' }}{%- endfor %}"
)
TEMPLATES = [
    MISTRAL, "{{ messages[0].content }}", "  {% if true %}\n  x\n  {% endif %}\n\n y \n",
    "{% for m in messages %}\n    {% if m['role'] == 'system' %}\n<<{{ m['content'] | trim }}>>\n"
    "    {% else %}\n{{ m.role | title }}: {{ m.content }}{{ eos_token }}\n    {% endif %}\n"
    "{% endfor %}\n{% if add_generation_prompt %}Assistant:{% endif %}",
    "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ '<é&>' | tojson }}",
    "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{{ strftime_now('%Y-%m') }} {{ bos_token }}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}"
    "{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% continue %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{{ m.content }}{% endfor %}{{ ns.n }}.",
    "{% if tools is not none %}tools{% endif %}{% if documents %}d{% endif %}.",
    "{% for m in messages %}\n{% generation %}\n {{ m.content }} "
    "{% endgeneration %}\n{% endfor %}{{ unk_token | length }}|{{ pad_token }}|{{ mask_token }}.",
]  # fmt: skip
CHATS = [
    [{"role": role, "content": text} for role, text in chat]
    for chat in (
        [("user", " Hello, caf\u00e9 \U0001f600! ")], [("user", "{{ 1 + 1 }}{% break %}{# #}")],
        [("user", "the cat"), ("assistant", "<sat>\n"), ("user", 'on {{ the }} "mat"\'s')],
        [("system", " Be brief. "), ("user", "the cat"), ("assistant", "sat"), ("user", "")],
    )
]  # fmt: skip


def chatter(folder, template=None, **files):
    config = NAMES | {"chat_template": template, "add_bos_token": True}
    stored = byte_level("<s>", "</s>", "[INST]", "[/INST]", bos="<s>").to_str()
    return read(folder, config, tokenizer_json=stored, **files)


REFUSED = [
    # does not compile, or fails: a traceback
    "{{ messages", "{% nope %}", "{{ 1 / 0 }}", "{{ missing.x }}", "{% include 'x' %}",
    *("{% set x = " + expression + " %}" for expression in (  # out of the sandbox (CVE-2024-34359)
        "''.__class__.__mro__", "cycler.__init__.__globals__.os.system('touch MARK')",
        "lipsum.__globals__['os'].system('touch MARK')",
        "self.__init__.__globals__.__builtins__.open('MARK', 'w')",
        "raise_exception.__globals__['Path']('MARK').touch()", "strftime_now.__code__.co_code",
        "(messages | attr('__class__')).__mro__", "messages.__class__.__base__.__subclasses__()",
        "messages.append({})", "messages.pop()", "messages[0].update({'content': 'x'})",
        "messages[0].__setitem__('content', 'x')", "range(10**9) | list",
    )),
]  # fmt: skip


def test_template_is_sandboxed(tmp_path, monkeypatch):
    """Render each template of REFUSED, which must fail and change nothing, and two that use
    str.format. Catches: a checkpoint's template that runs any Python, changes the conversation,
    never ends, or ends in a traceback; str.format that reaches attributes which the sandbox forbids
    elsewhere."""
    monkeypatch.chdir(tmp_path)
    ours, chat = chatter(tmp_path / "model"), [dict(message) for message in CHATS[2]]
    for template in REFUSED:
        ours.template = template
        with pytest.raises(ValueError, match="chat template"):
            ours.encode_chat(chat)
        assert chat == CHATS[2]
    assert not (tmp_path / "MARK").exists()
    for expression in ("'{0.__class__.__mro__}'.format(1)", "'{x.__class__}'.format_map({'x': 1})"):
        ours.template = "{{ " + expression + " }}."
        with suppress(ValueError):
            assert "class" not in ours.decode(ours.encode_chat([]))
    ours.template = MISTRAL
    with pytest.raises(ValueError, match="roles must alternate user/assistant"):
        ours.encode_chat(CHATS[0] * 2)


def test_chat_templates(tmp_path):
    """Render chats by many templates, and compare the ids with Hugging Face's. Catches: the newer
    chat_template.jinja ignored; the first of several taken for the default; a base model without
    BOS, a turn to fill or a stop; a missing filter or white-space rule; BOS added to a template's
    own; a user's words rendered as a template."""
    ours = chatter(tmp_path / "file", "old", **{"chat_template.jinja": "n\u00e9w"})
    assert ours.decode(ours.encode_chat(CHATS[0])) == "n\u00e9w"
    file = tmp_path / "file" / "chat_template.jinja"
    file.unlink()
    file.symlink_to("lost")
    with pytest.raises(InputError, match="No such file"):
        Tokenizer(tmp_path / "file")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert chatter(tmp_path / "two", named).template == "d"
    for lacking in ([], "", None):
        ours = chatter(tmp_path / "none", lacking)
        assert ours.template == PLAIN_TEMPLATE and ours.chat_stop == ("\n\n",)
    want = "SYSTEM:\nBe brief.\n\nUSER:\nthe cat\n\nASSISTANT:\nsat\n\nUSER:\n\n\nASSISTANT:\n"
    ids = ours.encode_chat(CHATS[3])
    assert ids[0] == ours.bos_id and ours.decode(ids) == want and ids == ours.encode(want)
    for template, chat in product(TEMPLATES, CHATS):
        ours = chatter(tmp_path, template)
        options = {"chat_template": template, "return_dict": False, "add_generation_prompt": True}
        want = fast_twin(tmp_path).apply_chat_template(chat, **options)
        assert ours.encode_chat(chat) == want, template
        assert ours.chat_stop == ()
        text = ours.template  # which is compiled once, not for each chat
        assert compile_template(text) is compile_template(text)
    parts = [{"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}]
    ours.config |= {"legacy": False, "add_bos_token": True, "model_max_length": 9}
    ours.template = "{{ [legacy, add_bos_token, model_max_length] | select('defined') | list }}"
    assert ours.render_chat(parts) == "[]"  # a template sees special tokens alone
    ours.template = "{{ messages[0].content | upper }}"
    assert ours.render_chat(parts) == "A\nB"
