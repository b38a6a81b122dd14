"""Many sequences at once: LLM, a class with the interface of vLLM's.

    llm = LLM("checkpoints/shakespeare")
    for request in llm.generate(["ROMEO:", "JULIET:"], max_tokens=20):
        print(request.outputs[0].text)

Read: LLM.generate.
"""

import os
from pathlib import Path
from typing import Any

from around.folder import Ids, suggested
from around.machine import Ranks, pick_device, progress
from around.settings import JSON, EngineArgs, SamplingParams, check
from around.start import load_models, make_engine
from scheduler import Request


class LLM:
    """This engine with the interface of vLLM's LLM class: generate and chat."""

    def __init__(self, checkpoint: Path | str, **options: Any) -> None:
        """Load a checkpoint, plain or quantised.

        Args:
            options: settings.EngineArgs: device, dtype, quantize, compile, speculate, ...
        """
        if os.getenv("WORLD_SIZE", "1") != "1":
            raise ValueError("LLM is one process: under torchrun, use generate.py or server.py")
        args = EngineArgs(checkpoint=Path(checkpoint), **options)
        ranks = Ranks(pick_device(args.device))
        self.checkpoint = args.checkpoint
        self.engine = make_engine(args, ranks, *load_models(args, ranks))

    def generate(
        self,
        prompts: str | list | JSON,
        params: SamplingParams | list | None = None,
        **changes: Any,
    ) -> list[Request]:
        """Complete the prompts, all at once, and count them on a terminal.

        Args:
            prompts: a prompt or a list of prompts. Each is a text or a list of token ids, or a dict
                with one of these as "prompt" or "prompt_token_ids".
            params: one SamplingParams for all prompts, or a list with one each; the checkpoint's
                defaults are then ignored.
            changes: fields of SamplingParams by name, if there are no `params`. They replace the
                checkpoint's defaults, as on the command line and in the server.

        Returns:
            One finished request for each prompt, in order. If an output's finish_reason is "error",
            its grammar became too complex, or the model produced NaN or infinite logits.

        Raises:
            ValueError: one of the prompts cannot be run; then none of them is. Or there are both
                `params` and `changes`.
        """
        if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        prompts = [prompt_of(each) for each in prompts]
        if params is not None and changes:
            raise ValueError(f"give params, or {', '.join(changes)}, not both")
        if params is None:
            params = SamplingParams(**suggested(self.checkpoint) | changes)
        params = params if isinstance(params, list) else [params] * len(prompts)
        requests = [self.engine.prepare(*each) for each in zip(prompts, params, strict=True)]
        try:
            for request in requests:
                self.engine.submit(request)
            for request in progress(requests, "generating"):  # the engine may run others too
                while not request.finished:
                    self.engine.step()
        except BaseException:  # Ctrl-C, at any line
            self.engine.reset()
            raise
        return requests

    def chat(self, messages: list, **changes: Any) -> list[Request]:
        """Answer a chat, or several at once, with the checkpoint's chat template.

        Args:
            messages: [{"role": "user", "content": "Hi"}, ...], or a list of such lists.
            changes: see generate.

        Returns:
            One finished request for each chat, in order.

        Raises:
            ValueError: the template refuses a chat, or see generate.
        """
        tokenizer = self.engine.tokenizer
        assert tokenizer
        chats = messages if messages and isinstance(messages[0], list) else [messages]
        params = SamplingParams(**suggested(self.checkpoint) | changes)
        params = params.with_stop(tokenizer.chat_stop)
        return self.generate([tokenizer.encode_chat(each) for each in chats], params)


def prompt_of(prompt: Any) -> str | Ids:
    """Return the text or the ids of one prompt of LLM.generate.

    Raises:
        SettingError: it is something else.
    """
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return check("prompt", prompt, str | list)
