"""Text to token ids and back, as the checkpoint's own files say.

`tokenizer.json` is read by the package `tokenizers` (an extra), and `tokenizer.model` by
sentencepiece; both are the reference implementations of their formats (Kudo & Richardson 2018,
arXiv:1808.06226). Of the model, this file knows only the config. Read: Tokenizer.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece

from around.folder.chat import END, NO_DEFAULT, PLAIN_TEMPLATE, compile_template, plain_turn
from around.folder.text import Detokenizer, Ids
from around.settings import AGAIN, JSON, blame, read_optional, supported
from model import Config


class Tokenizer:
    """The tokenizer of one checkpoint folder. Its files mean what they mean to transformers, which
    converts a tokenizer.model to its own format; here sentencepiece reads the file.

    Attributes:
        vocab_size: the highest id + 1; the model's V may be larger.
        special: the text of each special token -> its id. Encoding recognises these texts, as
            Hugging Face does, and decoding leaves special tokens out, except the marks of calls and
            thoughts.
        piece: a function from an id to its entry in the vocabulary.
        byte_level: whether these entries spell bytes as GPT-2 does.
        dropped: what is left out at the beginning of a text: the space that encoding puts there, or
            nothing.
        template, tool_template: the chat template, and the one for chats with tools; in most
            folders these are one.
        chat_stop: stop strings that chats need.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the tokenizer files.

        Raises:
            InputError: there is no tokenizer file, or it is damaged, or a package is missing.
        """
        path = Path(path)
        self.dropped = ""
        config = read_optional(path / "tokenizer_config.json")
        raw = config.get("added_tokens_decoder")
        if raw is None:  # older folders have two more files
            config |= read_optional(path / "special_tokens_map.json")
            id_of = read_optional(path / "added_tokens.json")
            raw = {i: {"content": text} for text, i in id_of.items()}
        with blame(path):
            # Without a config, BOS and EOS are sentencepiece's, as in llama2.c and llama.cpp.
            config = config or dict(bos_token="<s>", eos_token="</s>")
            # Models with images have their template here.
            config = read_optional(path / "chat_template.json") | config
            self.config = config = {name: text_of(value) for name, value in config.items()}
            named = special_texts(config)
            added = {int(i): token for i, token in raw.items()}
            # A link to nowhere is an error, as in read_optional.
            is_fast = os.path.lexists(path / "tokenizer.json")
            read = self._read_fast if is_fast else self._read_slow
            read(path, added, named)
            # The marks of function calls and thoughts are shown, as both are found in the text.
            marks = r"tool_call>|think>|THINK\]"
            self._hidden = {i for text, i in self.special.items() if not re.search(marks, text)}
            templates = self._read_templates(path)
        self.template = templates.get("default", NO_DEFAULT) if templates else PLAIN_TEMPLATE
        self.tool_template = templates.get("tool_use", self.template)
        # With the plain template a model would go on and write the user's next turn.
        self.chat_stop = () if templates else ("\n\n",)

    @property
    def bos_id(self) -> int | None:
        """BOS, if the checkpoint has one."""
        return self.special.get(self.config.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """EOS, if the checkpoint has one."""
        return self.special.get(self.config.get("eos_token", ""))

    @property
    def is_bare(self) -> bool:
        """Whether a rendered chat still needs BOS and EOS, which other templates write."""
        return self.template is PLAIN_TEMPLATE

    def encode(self, text: str, add_special: bool = True) -> Ids:
        """Turn text into ids, with BOS and EOS if the checkpoint asks for them.

        Args:
            text: any text; the text of a special token becomes its id.
            add_special: False for text that contains BOS and EOS, such as a rendered chat.
        """
        # Lone surrogates, which a terminal can pass, become question marks.
        return self._encode(text.encode(errors="replace").decode(), add_special)

    def decode(self, ids: Ids, show_special: bool = False) -> str:
        """Turn ids into text, and leave out those that are not text: padding of the vocabulary and,
        unless they are to be shown, special tokens."""
        stream = Detokenizer(self, [], show_special)
        return "".join(map(stream.push, ids)) + stream.push(None, last=True)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for; b"" for padding. Those of a special token are its
        name, with a space for each \u2581.

        Example: byte-level BPE's "\u0120the" and sentencepiece's "\u2581the" are b" the"; "<0xC3>"
            is one byte
        """
        piece = self.piece(token_id) or ""
        if self.byte_level:
            # A piece with a character that stands for no byte is text, as in tokenizers.
            is_bytes = re.fullmatch("[!-~\xa1-\xac\xae-\u0143]*", piece)
            return piece.translate(BYTE_LEVEL).encode("latin-1") if is_bytes else piece.encode()
        byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)  # sentencepiece's byte fallback
        if byte:
            return bytes.fromhex(byte[1])
        return piece.replace("\u2581", " ").encode()  # sentencepiece's space

    def is_text(self, token_id: int) -> bool:
        """Whether decode() shows an id, which is then neither padding nor hidden."""
        return token_id < self.vocab_size and token_id not in self._hidden

    def eos_ids(self, config: Config) -> set[int]:
        """The ids that end a text: the model's, and this tokenizer's own."""
        return {i for i in (*config.eos_ids, self.eos_id) if i is not None}

    def encode_chat(self, *args: Any, **options: object) -> Ids:
        """Do what render_chat does, and encode the text."""
        return self.encode(self.render_chat(*args, **options), self.is_bare)

    def render_chat(self, messages: list, goes_on: bool = False, /, **options: object) -> str:
        """Render a conversation with the checkpoint's chat template, ready for the reply.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            goes_on: continue the last message instead of answering it.
            options: variables for the template, such as Qwen3's enable_thinking. They may have any
                names, also those of the other arguments.

        Raises:
            ValueError: the template does not compile or refuses these messages.
        """
        # Templates use bos_token and other special tokens, and see nothing else of the config.
        tokens = {
            name: value
            for name, value in self.config.items()
            if re.fullmatch("(?!add_).*_token", name)
        }
        variables = {"add_generation_prompt": not goes_on, **tokens, **options}
        template = self.tool_template if options.get("tools") else self.template
        with blame("chat template"):  # it can raise any exception
            turns = [plain_turn(message) for message in messages]
            for turn in turns:
                # "developer" is OpenAI's newer name of the role "system".
                if turn.get("role") == "developer" and "developer" not in template:
                    turn["role"] = "system"
            if goes_on:
                turns[-1]["content"] += END
            text = compile_template(template).render(variables, messages=turns)
            return text[: text.index(END)] if goes_on else text

    # --- How the files are read -------------------------------------------------------------------

    def _read_fast(self, path: Path, added: dict[int, JSON], named: set) -> None:
        """Read tokenizer.json.

        Args:
            added: id -> a token that the other files add: its content, and perhaps whether it is
                special, and takes in the spaces before it (lstrip) or after it (rstrip).
            named: texts of special tokens, not all of which exist.
        """
        try:
            import tokenizers  # an extra, kilolm[hf]
        except ImportError as error:
            raise ValueError("tokenizer.json needs: pip install tokenizers") from error
        with blame(f"tokenizer.json{AGAIN}"):
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.no_truncation()  # training scripts may leave it on, which would cut prompts
        backend.no_padding()
        # What the other files leave out of a token, this one says.
        known = {
            token.content: token.__getstate__()
            for token in backend.get_added_tokens_decoder().values()
        }
        for _, token in sorted(added.items()):  # each new token gets the next id
            known[token["content"]] = known.get(token["content"], {}) | token
        for text in named & (known | backend.get_vocab()).keys():
            known[text] = {"content": text} | known.get(text, {}) | {"special": True}
        # All at once, as each call takes long.
        backend.add_tokens([tokenizers.AddedToken(**token) for token in known.values()])
        vocab = backend.get_vocab()
        for i, token in added.items():  # the files must agree on its id
            supported(f"the id of {token['content']}", i, vocab.get(token["content"]))
        self.special = {
            token.content: i
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        # Without offsets it takes half as long. In the meantime other threads can run.
        self._encode = lambda text, add_special: (
            backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        )
        self.piece: Callable[[int], str | None] = backend.id_to_token
        self.byte_level = "ByteLevel" in str(backend.decoder)
        self.vocab_size = max(vocab.values()) + 1
        # The bytes of all ids are the text, less what the decoder drops in front of it.
        ids = self._encode("a b", False)
        text = self.decode(ids, show_special=True)
        shown = backend.decode(ids, skip_special_tokens=False)
        if not text.endswith(shown):
            raise ValueError(
                f"tokenizer.json's decoder is not supported: {text!r} becomes {shown!r}"
            )
        self.dropped = text.removesuffix(shown)

    def _read_slow(self, path: Path, added: dict[int, JSON], named: set) -> None:
        """Read tokenizer.model. The arguments are those of _read_fast."""
        file = path / "tokenizer.model"
        if not file.is_file():
            raise ValueError(
                "there is no tokenizer.json, and no tokenizer.model: download one, or let "
                "transformers make one (AutoTokenizer.from_pretrained, then save_pretrained)"
            )
        # 1) sentencepiece. Most models put a space in front of what they encode.
        #   bare    puts none
        #   first   encodes the beginning of a text. It does what the model says, but it is `bare`
        #           if add_prefix_space is off
        #   later   encodes what follows an added token. It is `first` if `legacy` is on, and `bare`
        #           if not. By default, legacy is off in a LlamaTokenizer and on in all others
        config = self.config
        with blame(f"tokenizer.model must be sentencepiece's{AGAIN}"):
            sp = sentencepiece.SentencePieceProcessor(model_file=str(file))
        # These four bytes set normalizer_spec.add_dummy_prefix to False: in a protocol buffer the
        # last value wins.
        no_space = file.read_bytes() + b"\x1a\x02\x18\x00"
        bare = sentencepiece.SentencePieceProcessor(model_proto=no_space)
        first = sp if config.get("add_prefix_space", True) else bare
        is_llama = config.get("tokenizer_class", "").startswith("LlamaTokenizer")
        later = first if config.get("legacy", not is_llama) else bare
        # 2) The vocabulary: sentencepiece's pieces and the added tokens. From here on, control
        # pieces such as <s>, and pieces that the config calls special, count as added.
        pieces = {i: sp.id_to_piece(i) for i in range(sp.vocab_size())}
        for i, piece in pieces.items():
            if sp.is_control(i) or piece in named:
                added.setdefault(i, dict(content=piece, special=True))
        id_of = {token["content"]: i for i, token in added.items()}
        # A token may say itself whether it is special.
        self.special = {
            text: i for text, i in id_of.items() if added[i].get("special", text in named)
        }
        # An added token is spelt as its text, and the unknown token as nothing.
        pieces |= {i: text for text, i in id_of.items()}
        pieces[sp.unk_id()] = ""
        self.piece = pieces.get
        self.vocab_size = max(pieces) + 1
        self.byte_level = False
        # What `first` puts in front of a text, decoding drops.
        self.dropped = " " if first.normalize("a") != "a" else ""
        # 3) A text begins with BOS unless the config says no.
        bos = self.bos_id if config.get("add_bos_token", True) else None
        eos = self.eos_id if config.get("add_eos_token") else None
        # 4) sentencepiece would encode the text "<s>" as three characters, so the added tokens are
        # found first. In reverse order "<|im_start|>" is tried before "<|im".
        found = {text.strip(): i for text, i in id_of.items()} | id_of
        texts = sorted(filter(None, id_of), reverse=True)
        patterns = [pattern_of(added[id_of[text]]) for text in texts]
        pattern = re.compile(f"({'|'.join(patterns) or '(?!)'})")  # (?!) matches nothing

        def encode(text: str, add_special: bool) -> Ids:
            # Because of the parentheses, every second part is what the pattern matched.
            start, *parts = pattern.split(text)
            result = first.encode(start)
            for token, after in zip(parts[::2], parts[1::2]):
                # The match may have spaces that a token with lstrip or rstrip takes in.
                result.append(found.get(token, found[token.strip()]))
                result += later.encode(after)
            return [i for i in (bos, *result, eos) if i is not None] if add_special else result

        self._encode = encode

    def _read_templates(self, path: Path) -> dict[str, str]:
        """Return the chat templates by their names. A single one is named "default"."""
        file = path / "chat_template.jinja"
        is_there = os.path.lexists(file)
        found = file.read_text("utf-8") if is_there else self.config.get("chat_template", [])
        if isinstance(found, str) and found:
            found = [{"name": "default", "template": found}]
        templates = {entry["name"]: entry["template"] for entry in found}
        for other in path.glob("additional_chat_templates/*.jinja"):
            templates[other.stem] = other.read_text("utf-8")
        # {% generation %} marks replies for training. Jinja lacks it, so it becomes {% with %}.
        mark = re.compile(r"({%[-+]?\s*(?:end)?)generation\b")
        return {name: mark.sub(r"\1with", text) for name, text in templates.items()}


# GPT-2 spells printable bytes as themselves, and the others as the characters from 256 on. This
# turns the latter back.
BYTE_LEVEL = dict(enumerate([*range(33), *range(127, 161), 173], 256))


def special_texts(config: JSON) -> set:
    """Return the texts of special tokens that a config names. Not all of these tokens exist, and
    some values, such as add_bos_token's, are no texts."""
    # The second name is older.
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens", [])
    if isinstance(extra, dict):  # tokens with names
        extra = extra.values()
    named = {text for name, text in config.items() if name.endswith("_token")}
    return named | {text_of(token) for token in extra}


def text_of(value: Any) -> Any:
    """Return the text of a special token that is written as {"content": text, ...}, and any other
    value of a config as it is."""
    return value.get("content", value) if isinstance(value, dict) else value


def pattern_of(token: JSON) -> str:
    """Return the regular expression that finds an added token in a text."""
    # Spaces are matched from the first one on only: from each of 40,000, it would take a second.
    before = r"(?:(?<!\s)\s+)?" if token.get("lstrip") else ""
    after = r"\s*" if token.get("rstrip") else ""
    text = re.escape(token["content"])
    if token.get("single_word"):
        text = rf"(?<!\w){text}(?!\w)"
    return before + text + after
