"""Many sequences at once: LLM, a class with the interface of vLLM's.

    llm = LLM(model="checkpoints/shakespeare")
    for output in llm.generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=20)):
        print(output.prompt, output.outputs[0].text)

Read: LLM.generate.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from around.folder import Ids, suggested_sampling
from around.machine import Ranks, pick_device, progress
from around.settings import BUNDLED, JSON, EngineArgs, SamplingParams, blame, check
from around.start import load_models, make_engine
from scheduler import Request


class LLM:
    """This engine with the interface of vLLM's LLM class: generate and chat.

    Attributes:
        requests: those of the last call. After Ctrl-C, the outputs so far are in them, with the
            finish_reason "abort" where they had not ended.
    """

    def __init__(self, model: Path | str = BUNDLED, **options: Any) -> None:
        """Load a model, plain or quantised.

        Args:
            model: a Hugging Face folder; `checkpoint` is its other name.
            options: settings.EngineArgs: device, dtype, quantize, compile, speculate, ...
        """
        args = EngineArgs(checkpoint=Path(options.pop("checkpoint", model)), **options)
        ranks = Ranks(pick_device(args.device))
        self.checkpoint = args.checkpoint
        self.engine = make_engine(args, ranks, *load_models(args, ranks))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's own settings. dataclasses.replace makes others of them."""
        return SamplingParams(**suggested_sampling(self.checkpoint))

    def generate(
        self,
        prompts: str | list | JSON,
        sampling_params: SamplingParams | list | None = None,
        use_tqdm: bool = True,
        **changes: Any,
    ) -> list[Request]:
        """Complete the prompts, all at once.

        Args:
            prompts: a prompt or a list of prompts. Each is a text or a list of token ids, or a dict
                with one of these as "prompt" or "prompt_token_ids".
            sampling_params: one SamplingParams for all prompts, or a list with one each; the
                checkpoint's defaults are then ignored.
            use_tqdm: count the finished prompts on stderr, where that is a terminal.
            changes: fields of SamplingParams by name, if there are no `sampling_params`. They
                replace the checkpoint's defaults, as on the command line and in the server.

        Returns:
            One finished request for each prompt, in order. If an output's finish_reason is "error",
            its grammar became too complex, or the model produced NaN or infinite logits.

        Raises:
            ValueError: one of the prompts, which the error names, cannot be run; then none of them
                is. Or there are both `sampling_params` and `changes`.
        """
        if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        params = self._params_of(len(prompts), sampling_params, changes)
        self.requests: list[Request] = []
        for prompt, wish in zip(prompts, params):
            with blame(f"prompts[{len(self.requests)}]"):
                self.requests.append(self.engine.prepare(prompt_of(prompt), wish))
        try:
            for request in self.requests:
                self.engine.submit(request)
            # The engine may run others, too.
            for request in progress(self.requests, "generating") if use_tqdm else self.requests:
                while not request.finished:
                    self.engine.step()
        except BaseException:  # Ctrl-C, at any line
            self.engine.reset()
            raise
        return self.requests

    def chat(
        self,
        messages: list,
        sampling_params: SamplingParams | list | None = None,
        use_tqdm: bool = True,
        **changes: Any,
    ) -> list[Request]:
        """Answer a chat, or several at once, with the checkpoint's chat template.

        Args:
            messages: [{"role": "user", "content": "Hi"}, ...], or a list of such lists.
            sampling_params, use_tqdm, changes: see generate.

        Returns:
            One finished request for each chat, in order.

        Raises:
            ValueError: the template refuses a chat, or see generate.
        """
        tokenizer = self.engine.tokenizer
        check("messages", messages, list)
        chats = messages if messages and isinstance(messages[0], list) else [messages]
        params = self._params_of(len(chats), sampling_params, changes)
        params = [each.with_stop(tokenizer.chat_stop) for each in params]
        texts = [tokenizer.render_chat(each) for each in chats]
        ids = [tokenizer.encode(text, tokenizer.is_bare) for text in texts]
        requests = self.generate(ids, params, use_tqdm)
        for request, text in zip(requests, texts):
            request.prompt = text
        return requests

    def _params_of(self, count: int, sampling_params: Any, changes: JSON) -> list[SamplingParams]:
        """Return a SamplingParams for each of `count` prompts; see generate."""
        if sampling_params is None:
            sampling_params = replace(self.get_default_sampling_params(), **changes)
        elif changes:
            raise ValueError(f"give sampling_params, or {', '.join(changes)}, not both")
        if not isinstance(sampling_params, list):
            return [sampling_params] * count
        if len(sampling_params) != count:
            raise ValueError(f"there are {len(sampling_params)} SamplingParams for {count} prompts")
        return sampling_params


def prompt_of(prompt: Any) -> str | Ids:
    """Return the text or the ids of one prompt of LLM.generate.

    Raises:
        SettingError: it is something else.
    """
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return check("prompt", prompt, str | list)
