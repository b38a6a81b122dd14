"""Text to token ids and back, as the checkpoint's own files say.

`tokenizer.json` goes through the `tokenizers` package (an extra), `tokenizer.model` through
sentencepiece; both are the reference implementations of their formats (Kudo & Richardson 2018,
arXiv:1808.06226). Knows no model. Read: Tokenizer, then Detokenizer, which turns a stream of ids
into a stream of text without ever showing half a character, and TextStream, which ends that at a
stop string.
"""

import json
import re
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sentencepiece
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

from checkpoint import blame, read_json

# For checkpoints that bring no chat template: turns in the form of a play, which any base model
# continues sensibly, and the bundled one is at home in.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | upper }}:\n"
    "{{ (message.content or '') | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)


def refuse(message: str) -> None:
    raise ValueError(message)


class Generation(Extension):
    """{% generation %}...{% endgeneration %}, which marks replies for training: only its inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


# What Hugging Face gives to a template, which comes with the checkpoint, so it is code from a
# stranger: the sandbox reaches no attribute outside its inputs and changes none of them.
CHAT = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
CHAT.globals["raise_exception"] = refuse
CHAT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
CHAT.filters["tojson"] = lambda x, **kw: json.dumps(x, **{"ensure_ascii": False} | kw)


class Tokenizer:
    """The tokenizer of one checkpoint folder.

    Attributes:
        vocab_size: ids of text are below it; the model's V may be padded beyond it.
        bos_id, eos_id: None where the checkpoint names none.
        special: text of each special token -> its id. They are recognised in the text to encode,
            as Hugging Face does, and left out of decoded text.
        piece: id -> its entry in the vocabulary; byte_level: whether that spells bytes as GPT-2.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the tokenizer files.

        Raises:
            CheckpointError: no tokenizer file, a damaged one, or the extra it needs is missing.
        """
        path = Path(path)
        with blame(path):
            self.config = read_json(path / "tokenizer_config.json", optional=True)
            fast, slow = path / "tokenizer.json", path / "tokenizer.model"
            if fast.is_file() and find_spec("tokenizers"):
                adds_bos = self._open_fast(fast)
            elif slow.is_file():
                adds_bos = self._open_sentencepiece(slow)
            else:
                raise ValueError("no tokenizer.model; tokenizer.json needs: pip install tokenizers")
            self._hidden = set(self.special.values())
            self.bos_id, self.eos_id, *_ = map(self.special.get, self._names().values())
            adds_bos = self.config.get("add_bos_token", adds_bos) and self.bos_id is not None
            adds_eos = self.config.get("add_eos_token", False) and self.eos_id is not None
            self._prefix = [self.bos_id] if adds_bos else []
            self._suffix = [self.eos_id] if adds_eos else []
            file, template = path / "chat_template.jinja", self.config.get("chat_template")
            if isinstance(template, list):  # several, by name
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            template = file.read_text(encoding="utf-8") if file.is_file() else template
            self.template = template or PLAIN_TEMPLATE
        # A base model under the plain template would go on to write the user's turn too.
        self.chat_stop = ("\n\n",) if self.template is PLAIN_TEMPLATE else ()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Turn text into ids, with the BOS (and EOS) that the checkpoint asks for.

        Args:
            text: any text; special tokens written out in it become their ids.
            add_special: False for text that already carries them, such as a rendered chat.
        """
        # A terminal can pass lone surrogates.
        ids = self._encode(text.encode("utf-8", "replace").decode())
        return self._prefix + ids + self._suffix if add_special else ids

    def decode(self, ids: list[int]) -> str:
        """Turn ids into text, leaving out those that are not text."""
        return self._decode([i for i in ids if self.is_text(i)])

    def is_text(self, token_id: int) -> bool:
        """Whether an id stands for text: not a special token, nor padding of the vocabulary."""
        return token_id < self.vocab_size and token_id not in self._hidden

    def encode_chat(
        self, messages: list[dict[str, Any]], goes_on: bool = False, /, **options: Any
    ) -> list[int]:
        """Render a conversation with the checkpoint's chat template, ready for the reply.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            goes_on: the last message is to be continued, not answered.
            options: for the template, such as Qwen3's enable_thinking.

        Raises:
            ValueError: the template does not compile or refuses these messages.
        """
        given = {"add_generation_prompt": not goes_on, "tools": None, "documents": None}
        given |= self._names() | options | {"messages": messages}
        with blame("chat template"):  # it can raise anything that Python can
            text = CHAT.from_string(self.template).render(given)
            if goes_on:
                last = messages[-1]["content"].strip()
                text = text[: text.rindex(last) + len(last)]
        return self.encode(text, add_special=self.template is PLAIN_TEMPLATE)

    # --- How the files are read -------------------------------------------------------------------

    def _open_fast(self, file: Path) -> bool:
        """Return whether the file adds a BOS by itself."""
        import tokenizers  # here: the package is an extra, kilolm[hf]

        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()  # a training script may have left them on: prompts would be cut
        backend.no_padding()
        self._encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        self._decode = lambda ids: backend.decode(ids, skip_special_tokens=True)
        self.piece = backend.id_to_token
        self.byte_level = bool(backend.decoder) and b"ByteLevel" in backend.decoder.__getstate__()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        bos = self.special.get(self._names()["bos_token"])
        return bos in backend.encode("", add_special_tokens=True).ids[:1]  # by its post-processor

    def _open_sentencepiece(self, file: Path) -> bool:
        """As above: this format's own encoder adds one."""
        backend = sentencepiece.SentencePieceProcessor(model_file=str(file))
        self._decode, self.vocab_size = backend.decode, backend.vocab_size()
        self.piece = lambda i: "" if backend.is_unknown(i) else backend.id_to_piece(i)
        self.byte_level = False
        if not self.config:  # the file's own names, as llama2.c and llama.cpp have it
            for name, i in (("bos_token", backend.bos_id()), ("eos_token", backend.eos_id())):
                self.config[name] = backend.id_to_piece(i) if i >= 0 else None
        ids = range(self.vocab_size)
        self.special = {backend.id_to_piece(i): i for i in ids if backend.is_control(i)}
        for i, token in self.config.get("added_tokens_decoder", {}).items():
            self.special[token["content"]] = int(i)
        by_length = sorted(self.special, key=len, reverse=True)  # "<|im_start|>" before "<|im"
        split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")").split

        def encode(text: str) -> list[int]:
            """sentencepiece itself would spell a written-out "<s>" as three characters."""
            parts = split(text) if by_length else [text]
            ids = ([self.special[p]] if p in self.special else backend.encode(p) for p in parts)
            return [i for part in ids for i in part]

        self._encode = encode
        return True

    def _names(self) -> dict[str, str]:
        """Texts of BOS, EOS and so on, written as "<s>", as {"content": "<s>", ...}, or null."""
        names = (f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
        tokens = {name: self.config.get(name) or "" for name in names}
        return {name: t["content"] if isinstance(t, dict) else t for name, t in tokens.items()}


# --- Ids to text, one at a time -------------------------------------------------------------------


class Detokenizer:
    """Decode a growing list of ids, giving out each character once and whole.

    Decoding an id alone is wrong twice: a character can span several byte tokens, and a decoder
    drops the space in front of the first word it sees. So new ids are decoded together with the
    few before them, and what they add is given out once it cannot be half a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        """Start behind a prompt, whose end says whether the next word needs its space."""
        self._decode, self._is_text = tokenizer.decode, tokenizer.is_text
        ids = [i for i in prompt_ids[-128:] if self._is_text(i)]
        # Of four places side by side one is not inside a character, which has four bytes at most.
        for length in (8, 7, 6, 5, 128):
            self._context = ids[-length:]
            text = self._decode(self._context)
            if text.strip() and not text.startswith("\ufffd"):
                break
        self._shown, self._new = len(text), []  # characters of the context; ids after it

    def push(self, token_id: int) -> str:
        """Add one id and return the text that is now certain, often one word, sometimes "".

        Example: ids of "a", 0xC3, 0xA9 (two bytes of one character) -> "a", "", "\u00e9"
        """
        if self._is_text(token_id):  # others, as context, would hide that a word came before
            self._new.append(token_id)
        text = self.flush()
        # Unfinished bytes decode to U+FFFD, and may spoil finished ones beside them: wait. Bytes
        # that really are invalid are shown as marks as soon as anything else follows them.
        if text.endswith("\ufffd") and len(self._new) < 32:
            return ""
        if text.strip():  # what was just shown is the next context; spaces alone would not do
            self._context = self._new
        elif len(self._context) < 8:  # unless there is nothing else yet
            self._context = self._context + self._new
        self._shown, self._new = len(self._decode(self._context)), []
        return text

    def flush(self) -> str:
        """Return what was held back: the marks of a character that never got its last byte."""
        return self._decode(self._context + self._new)[self._shown :]


class TextStream:
    """The text of a sequence as it grows, up to the first of its stop strings.

    Attributes:
        text: what may be shown. A tail that could still turn out to be part of a stop string, or
            half a character, is held back, so `text` only ever grows.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: list[int], stops: tuple[str, ...]
    ) -> None:
        """Without a tokenizer there is never any text."""
        self.text = ""
        self._held = ""  # decoded, but perhaps the start of a stop string
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer, prompt_ids) if tokenizer else None

    def push(self, token_id: int | None, last: bool = False) -> tuple[str, bool]:
        """Add one id, or none, and where it is the last, what was held back.

        Returns:
            What it added, and whether a stop string was found in it.

        Example: stop "ab". After "xa" the text is "x", and "a" is held. Then "c" shows "xac",
            while "ab" shows "xa" and ends: the stop string began at the second "a".
        """
        new = ""
        if self._detokenizer:
            new = self._detokenizer.push(token_id) if token_id is not None else ""
            new += self._detokenizer.flush() if last else ""
        held = self._held + new
        found = [held.find(stop) for stop in self._stops if stop in held]
        cut = min(found, default=len(held))
        if not found and not last:  # hold back the longest tail that begins a stop string
            for stop in self._stops:
                tails = (n for n in range(len(stop) - 1, 0, -1) if held.endswith(stop[:n]))
                cut = min(cut, len(held) - next(tails, 0))
        self.text += held[:cut]
        self._held = held[cut:]
        return new, bool(found)
