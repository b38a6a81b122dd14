"""Text to token ids and back, as the checkpoint's own files say.

`tokenizer.json` goes through the `tokenizers` package (an extra), `tokenizer.model` through
sentencepiece; both are the reference implementations of their formats (Kudo & Richardson 2018,
arXiv:1808.06226). Knows no model. Read: Tokenizer, then Detokenizer, which turns a stream of ids
into a stream of text without ever showing half a character, and TextStream, which ends that at a
stop string.
"""

import json
import re
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import sentencepiece
from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

from checkpoint import blame, read_optional

# For checkpoints that bring no chat template: turns in the form of a play, which any base model
# continues sensibly, and the bundled one is at home in.
PLAIN_TEMPLATE = (
    "{% for turn in messages %}"
    "{{ turn.role | upper }}:\n{{ (turn.content or '') | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)


Ids = list[int]  # of tokens


def refuse(message: str) -> None:
    raise ValueError(message)


# What Hugging Face gives to a template, which comes with the checkpoint, so it is code from a
# stranger: the sandbox reaches no attribute outside its inputs and changes none of them.
CHAT = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
CHAT.globals.update(raise_exception=refuse, strftime_now=time.strftime, tools=None, documents=None)
CHAT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)


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
        config = read_optional(path / "tokenizer_config.json")
        with blame(path):
            for name, token in config.items():  # "<s>" is also written as {"content": "<s>", ...}
                if isinstance(token, dict):
                    config[name] = token.get("content", token)
            # Without a config the names are sentencepiece's, as llama2.c and llama.cpp have it.
            self.config = config = config or dict(bos_token="<s>", eos_token="</s>")
            is_fast = (path / "tokenizer.json").is_file()
            if is_fast and find_spec("tokenizers"):
                ends = self._open_fast(path)
            elif (path / "tokenizer.model").is_file():
                ends = self._open_slow(path)
            else:
                raise ValueError(
                    "tokenizer.json "
                    + ("needs: pip install tokenizers" if is_fast else "is missing")
                    + ", and there is no tokenizer.model"
                )
            self._hidden = set(self.special.values())
            self.bos_id = bos = self.special.get(config.get("bos_token"))
            self.eos_id = eos = self.special.get(config.get("eos_token"))
            file = path / "chat_template.jinja"
            template = file.read_bytes().decode() if file.is_file() else config.get("chat_template")
            if isinstance(template, list):  # several, by name
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            # {% generation %} marks replies for training: for us, a block like any other.
            template = re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", template or "")
        self._prefix = [bos] if config.get("add_bos_token", bos in ends) and bos is not None else []
        self._suffix = [eos] if config.get("add_eos_token") and eos is not None else []
        self.template = template or PLAIN_TEMPLATE
        # A base model under the plain template would go on to write the user's turn too.
        self.chat_stop = () if template else ("\n\n",)

    def encode(self, text: str, add_special: bool = True) -> Ids:
        """Turn text into ids, with the BOS (and EOS) that the checkpoint asks for.

        Args:
            text: any text; special tokens written out in it become their ids.
            add_special: False for text that already carries them, such as a rendered chat.
        """
        # A terminal can pass lone surrogates.
        ids = self._encode(text.encode(errors="replace").decode())
        return self._prefix + ids + self._suffix if add_special else ids

    def decode(self, ids: Ids) -> str:
        """Turn ids into text, leaving out those that are not text."""
        return self._decode([i for i in ids if self.is_text(i)])

    def is_text(self, token_id: int) -> bool:
        """Whether an id stands for text: not a special token, nor padding of the vocabulary."""
        return token_id < self.vocab_size and token_id not in self._hidden

    def encode_chat(self, messages: list, goes_on: bool = False, /, **options: object) -> Ids:
        """Render a conversation with the checkpoint's chat template, ready for the reply.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            goes_on: the last message is to be continued, not answered.
            options: for the template, such as Qwen3's enable_thinking.

        Raises:
            ValueError: the template does not compile or refuses these messages.
        """
        given = dict(add_generation_prompt=not goes_on) | self.config | options
        with blame("chat template"):  # it can raise anything that Python can
            text = CHAT.from_string(self.template).render(given, messages=messages)
            if goes_on:
                last = messages[-1]["content"].strip()
                text = text[: text.rindex(last)] + last
        return self.encode(text, add_special=self.template is PLAIN_TEMPLATE)

    # --- How the files are read -------------------------------------------------------------------

    def _open_fast(self, path: Path) -> Ids:
        """Return the ids that the file puts around a text by itself."""
        import tokenizers  # here: the package is an extra, kilolm[hf]

        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.no_truncation()  # a training script may have left them on: prompts would be cut
        backend.no_padding()
        self._encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        self._decode = backend.decode
        self.piece = backend.id_to_token
        self.byte_level = "ByteLevel" in str(backend.decoder)
        self.vocab_size = max(backend.get_vocab().values()) + 1
        added = backend.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in added.items() if token.special}
        return backend.encode("").ids  # by its post-processor

    def _open_slow(self, path: Path) -> Ids:
        """As above: sentencepiece's own encoder adds a BOS, whichever that is."""
        sp = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
        self._decode = sp.decode
        self.piece = lambda i: "" if sp.is_unknown(i) else sp.id_to_piece(i)
        self.byte_level = False
        self.vocab_size = sp.vocab_size()
        self.special = {sp.id_to_piece(i): i for i in range(self.vocab_size) if sp.is_control(i)}
        for i, token in self.config.get("added_tokens_decoder", {}).items():
            self.special[token["content"]] = int(i)
        # sentencepiece itself would spell a written-out "<s>" as three characters.
        # "<|im_start|>" comes before "<|im"; and (?!) is found nowhere.
        pattern = f"({'|'.join(map(re.escape, sorted(self.special, reverse=True))) or '(?!)'})"
        # A pattern in brackets: split gives what it matched too, at every second place.
        self._encode = lambda text: [
            i
            for part in re.split(pattern, text)
            for i in ([self.special[part]] if part in self.special else sp.encode(part))
        ]
        return [*self.special.values()]


# --- Ids to text, one at a time -------------------------------------------------------------------


class Detokenizer:
    """Decode a growing list of ids, giving out each character once and whole.

    Decoding an id alone is wrong twice: a character can span several byte tokens, and a decoder
    drops the space in front of the first word it sees. So new ids are decoded together with the
    few before them, and what they add is given out once it cannot be half a character.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Ids) -> None:
        """Start behind a prompt, whose end says whether the next word needs its space. Without a
        tokenizer there is never any text."""
        self._decode = tokenizer.decode if tokenizer else lambda ids: ""
        self._new = []
        # Of four places side by side one is not inside a character, which has four bytes at most.
        for length in (8, 7, 6, 5, 128):
            self._context = prompt_ids[-length:]
            text = self._decode(self._context)
            if text.strip() and not text.startswith("\ufffd"):
                break

    def push(self, token_id: int | None, last: bool = False) -> str:
        """Add one id, or none, and return the text that is now certain, often one word, sometimes
        "". With the last one comes what was held back: the marks of a character that never got its
        last byte.

        Example: ids of "a", 0xC3, 0xA9 (two bytes of one character) -> "a", "", "\u00e9"
        """
        if token_id is not None:
            self._new.append(token_id)
        text = self._decode(self._context + self._new)[len(self._decode(self._context)) :]
        # Unfinished bytes decode to U+FFFD, and may spoil finished ones beside them: wait. Bytes
        # that really are invalid are shown as marks as soon as anything else follows them.
        if text.endswith("\ufffd") and len(self._new) < 32 and not last:
            return ""
        # What was just shown is the next context. Spaces alone would not do, nor ids without text.
        if text.strip():
            self._context = []
        if len(self._context) < 8:
            self._context += self._new
        self._new = []
        return text


class TextStream:
    """The text of a sequence as it grows, up to the first of its stop strings.

    Attributes:
        text: what may be shown. A tail that could still turn out to be part of a stop string, or
            half a character, is held back, so `text` only ever grows.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Ids, stops: tuple) -> None:
        self.text = ""
        self._held = ""  # decoded, but perhaps the start of a stop string
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)

    def push(self, token_id: int | None, last: bool = False) -> tuple[str, bool]:
        """Add one id, or none, and where it is the last, what was held back.

        Returns:
            What it added, and whether a stop string was found in it.

        Example: stop "ab". After "xa" the text is "x", and "a" is held. Then "c" shows "xac",
            while "ab" shows "xa" and ends: the stop string began at the second "a".
        """
        new = self._detokenizer.push(token_id, last)
        held = self._held + new
        places = range(len(held))
        found = [i for i in places if held.startswith(self._stops, i)]
        begun = [i for i in places if any(stop.startswith(held[i:]) for stop in self._stops)]
        cut = min(found if found or last else begun, default=len(held))
        self.text += held[:cut]
        self._held = held[cut:]
        return new, bool(found)
