"""Text to token ids and back, as the checkpoint's own files say.

`tokenizer.json` is read by the package `tokenizers` (an extra), and `tokenizer.model` by
sentencepiece; both are the reference implementations of their formats (Kudo & Richardson 2018,
arXiv:1808.06226). This file does not know the model. Read: Tokenizer, then Detokenizer, which turns
a stream of ids into a stream of text and never shows half a character, and TextStream, which ends
the text at a stop string.
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

# For checkpoints without a chat template. It writes the turns as a play, which any base model can
# continue, and which the bundled model was trained on.
PLAIN_TEMPLATE = (
    "{% for turn in messages %}"
    "{{ turn.role | upper }}:\n{{ (turn.content or '') | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)

Ids = list[int]  # token ids


def refuse(message: str) -> None:
    """Raise an error, for templates that reject a conversation."""
    raise ValueError(message)


# A chat template comes with the checkpoint, so it is untrusted code. It runs in a sandbox, where it
# can neither reach Python's internals nor change its inputs. It gets the functions, filters and
# variables that Hugging Face gives it.
CHAT = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
CHAT.globals.update(raise_exception=refuse, strftime_now=time.strftime, tools=None, documents=None)
CHAT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)


class Tokenizer:
    """The tokenizer of one checkpoint folder.

    Attributes:
        vocab_size: the number of ids that can be decoded; the model's V may be larger.
        bos_id, eos_id: None if the checkpoint has none.
        special: the text of each special token -> its id. Encoding recognises these texts, as
            Hugging Face does, and decoding leaves special tokens out.
        piece: a function from an id to its entry in the vocabulary.
        byte_level: whether these entries spell bytes as GPT-2 does.
        template: the chat template.
        chat_stop: stop strings that chats need.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the tokenizer files.

        Raises:
            CheckpointError: there is no tokenizer file, or it is damaged, or a package is missing.
        """
        path = Path(path)
        # Without a config, sentencepiece's names hold, as in llama2.c and llama.cpp.
        self.config = config = read_optional(path / "tokenizer_config.json") or dict(
            bos_token="<s>", eos_token="</s>"
        )
        with blame(path):
            for name, token in config.items():  # "<s>" is also written as {"content": "<s>", ...}
                if isinstance(token, dict):
                    config[name] = token.get("content", token)
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
            template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
            if isinstance(template, list):  # several templates with names
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            # {% generation %} marks replies for training. Jinja lacks it, so it becomes {% with %}.
            template = re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", template or "")
        self._prefix = [bos] if config.get("add_bos_token", bos in ends) and bos is not None else []
        self._suffix = [eos] if config.get("add_eos_token") and eos is not None else []
        self.template = template or PLAIN_TEMPLATE
        # With the plain template a model would go on and write the user's next turn.
        self.chat_stop = () if template else ("\n\n",)

    def encode(self, text: str, add_special: bool = True) -> Ids:
        """Turn text into ids, with BOS and EOS if the checkpoint asks for them.

        Args:
            text: any text; the text of a special token becomes its id.
            add_special: False for text that contains BOS and EOS, such as a rendered chat.
        """
        # Lone surrogates, which a terminal can pass, become question marks.
        ids = self._encode(text.encode(errors="replace").decode())
        return self._prefix + ids + self._suffix if add_special else ids

    def decode(self, ids: Ids) -> str:
        """Turn ids into text, and leave out those that are not text."""
        return self._decode(list(filter(self.is_text, ids)))

    def is_text(self, token_id: int) -> bool:
        """Whether an id is text, and neither a special token nor padding of the vocabulary."""
        return token_id < self.vocab_size and token_id not in self._hidden

    def encode_chat(self, messages: list, goes_on: bool = False, /, **options: object) -> Ids:
        """Render a conversation with the checkpoint's chat template, ready for the reply.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            goes_on: continue the last message instead of answering it.
            options: variables for the template, such as Qwen3's enable_thinking.

        Raises:
            ValueError: the template does not compile or refuses these messages.
        """
        given = {"add_generation_prompt": not goes_on, **self.config, **options}
        with blame("chat template"):  # it can raise any exception
            text = CHAT.from_string(self.template).render(given, messages=messages)
            if goes_on:
                last = messages[-1]["content"].strip()
                text = text[: text.rindex(last)] + last
        return self.encode(text, add_special=self.template is PLAIN_TEMPLATE)

    # --- How the files are read -------------------------------------------------------------------

    def _open_fast(self, path: Path) -> Ids:
        """Read tokenizer.json, and return the ids that it adds to a text by default."""
        import tokenizers  # an extra, kilolm[hf]

        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.no_truncation()  # training scripts may leave it on, which would cut prompts
        backend.no_padding()
        self._encode = lambda text: backend.encode(text, add_special_tokens=False).ids
        self._decode = backend.decode
        self.piece = backend.id_to_token
        self.byte_level = "ByteLevel" in str(backend.decoder)
        self.vocab_size = max(backend.get_vocab().values()) + 1
        self.special = {
            token.content: i
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        return backend.encode("").ids  # its post-processor adds them

    def _open_slow(self, path: Path) -> Ids:
        """Read tokenizer.model, and return all special tokens. So BOS is among the ids that are
        added by default: with this file, a text begins with BOS unless the config says no."""
        sp = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
        self._decode = sp.decode
        self.piece = lambda i: "" if sp.is_unknown(i) else sp.id_to_piece(i)
        self.byte_level = False
        self.vocab_size = sp.vocab_size()
        self.special = {sp.id_to_piece(i): i for i in range(self.vocab_size) if sp.is_control(i)}
        for i, token in self.config.get("added_tokens_decoder", {}).items():
            self.special[token["content"]] = int(i)
        # sentencepiece would encode the text "<s>" as three characters, so special tokens are split
        # off first. In reverse order "<|im_start|>" is tried before "<|im". (?!) matches nothing.
        pattern = f"({'|'.join(map(re.escape, sorted(self.special, reverse=True))) or '(?!)'})"
        # Because of the parentheses, re.split also returns what the pattern matched.
        self._encode = lambda text: [
            i
            for part in re.split(pattern, text)
            for i in ([self.special[part]] if part in self.special else sp.encode(part))
        ]
        return [*self.special.values()]


# --- Ids to text, one at a time -------------------------------------------------------------------


class Detokenizer:
    """Decode a growing list of ids, and return each character once, when it is complete.

    It would be wrong to decode each id alone, for two reasons: a character can span several tokens,
    and decoders drop the space in front of the first word. So new ids are decoded together with
    some ids before them (the context), and the text that they add is returned when it cannot end in
    half a character.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Ids) -> None:
        """Take the end of the prompt as the first context.

        Args:
            tokenizer: None: all text is empty.
        """
        self._decode = tokenizer.decode if tokenizer else lambda ids: ""
        self._new = []
        # A context should begin with a whole character. A character has at most four bytes, so of
        # the contexts of 8, 7, 6 and 5 ids, one begins with a whole character. If none of them has
        # any text, a long one may.
        for length in (8, 7, 6, 5, 128):
            self._context = prompt_ids[-length:]
            text = self._decode(self._context)
            if text.strip() and not text.startswith("\ufffd"):
                break

    def push(self, token_id: int | None, last: bool = False) -> str:
        """Add one id, or none, and return the text that is now complete, which may be "".

        Args:
            last: also return what has been held back, an incomplete character as "\ufffd".

        Example: ids of "a", 0xC3, 0xA9 (two bytes of one character) -> "a", "", "\u00e9"
        """
        if token_id is not None:
            self._new.append(token_id)
        text = self._decode(self._context + self._new)[len(self._decode(self._context)) :]
        # An incomplete character decodes to U+FFFD, and may spoil complete ones beside it: wait for
        # more. Bytes that are really invalid are returned as soon as other text follows.
        if text.endswith("\ufffd") and len(self._new) < 32 and not last:
            return ""
        # The ids of this text are the next context. If they are only spaces, or have no text, the
        # old context stays, and they join it if it has fewer than 8 ids.
        if text.strip():
            self._context = []
        if len(self._context) < 8:
            self._context += self._new
        self._new = []
        return text


class TextStream:
    """The text of a sequence as it grows, up to the first of its stop strings.

    Attributes:
        text: what may be shown. Its end is held back while it may be part of a stop string or half
            a character, so `text` never shrinks.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Ids, stops: tuple) -> None:
        self.text = ""
        self._held = ""  # decoded text that may be the beginning of a stop string
        self._stops = stops
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)

    def push(self, token_id: int | None, last: bool = False) -> tuple[str, bool]:
        """Add one id, or none.

        Args:
            last: show also what has been held back, but nothing from a stop string on.

        Returns:
            The text of this id, and whether a stop string was found.

        Example: the stop string is "ab". After "xa" the text is "x", and "a" is held back. If "c"
            follows, the text is "xac"; if "ab" follows, it ends with "xa", before the stop string.
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
