"""This engine beside others, on the same weights; `tools/bench.py versus` is its command line.

Each engine runs in a process of its own, so that memory, threads and versions of libraries are
apart, and does one thing: it completes prompts, given as ids, by a number of tokens each. All
figures follow from the seconds that this takes, in the same way for each engine. The processes do
not know of each other: each reads a JSON object a line, and answers with one.

    -> {"folder": DIR, "dtype": "float32", "device": "cpu", "threads": 2, "sequences": 32, ...}
    <- {"version": "5.23.0"}                       or {"missing": "vllm"}: it is not installed
    -> {"figure": "decode", "prompts": [[5, 9, 2]], "new_tokens": 32}
    <- {"tok_s": 27.1}                             or null, where the engine does not do this
    <- {"error": "RuntimeError: ..."}              instead of any answer

Read: compare, Child, speed, then the engines. At the top only the standard library is imported, as
an engine may live in another virtual environment, which has nothing of ours.
"""

import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ALONE, BATCH = 16, (16, 64)  # tokens of the prompts that are decoded from: one, or many
LONG, LONG_NEW = (400, 600), 128  # tokens of prompts as of chats, and of their replies

# --- The parent -----------------------------------------------------------------------------------


class Absent(Exception):
    """An engine is not installed, or cannot go on. The message is for the table."""


class Child:
    """An engine in its own process."""

    def __init__(self, name: str, setup: dict[str, Any], python: str) -> None:
        """Start it and let it load. Raises Absent."""
        self.name, self.timeout = name, setup["timeout"]
        env = os.environ | {"OMP_NUM_THREADS": str(setup["threads"]), "HF_HUB_OFFLINE": "1"}
        env |= {"TOKENIZERS_PARALLELISM": "false"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        # -P: names in the folder of this file, such as `load`, are others' modules as well.
        self.process = subprocess.Popen(
            [python, "-P", __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
            start_new_session=True,
        )
        try:
            self.version = self.ask(setup)["version"]
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line and wait for the answer. Raises Absent."""
        with contextlib.suppress(BrokenPipeError):  # it has died: the answer says so
            self.process.stdin.write(json.dumps(message, default=str) + "\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], self.timeout)[0]:
            raise Absent(f"{self.name}: no answer within {self.timeout:g} s")
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            last = [each.strip() for each in self.log if each.strip()] or ["no output"]
            raise Absent(f"{self.name}: ended with status {self.process.wait()}: {last[-1]}")
        answer = json.loads(line)
        if "missing" in answer:
            raise Absent(f"{self.name}: not installed")
        if "error" in answer:
            raise Absent(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it, and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            with contextlib.suppress(BrokenPipeError):  # it died before it read all
                pipe.close()


def compare(
    setup: dict[str, Any],
    peers: dict[str, str],
    rounds: Callable[[], Iterable[bool]],
    add: Callable[[str, dict[str, float]], None],
) -> tuple[dict[str, str], list[str]]:
    """Measure this engine and each peer in turn, figure by figure: ours, theirs, ours, theirs.

    No more than two engines are loaded at once. Ours is measured again beside each peer, and a
    ratio is always of two figures that were taken one right after the other.

    Args:
        setup: what an engine needs to load; see the header. Also `prompt_tokens` of the prompt
            whose prefill is measured, `new_tokens`, and the `timeout`, seconds that an engine may
            take for one answer.
        peers: name -> the interpreter that has it.
        rounds: gives False for a round that warms up, and True for one that counts.
        add: takes the name of a row and its figures, tokens per second and `NAME_times`, a multiple
            of ours.

    Returns:
        Each engine's version, and a line for each peer that was not measured.

    Raises:
        ValueError: this engine itself did not run.
    """
    rng = random.Random(0)
    rows = {"decode": "one sequence", "prefill": f"prefill of {setup['prompt_tokens']:,} tokens"}
    rows["batch"] = f"{setup['sequences']} sequences"
    rows["long"] = f"{setup['sequences']} sequences of {LONG[0]} to {LONG[1]} tokens"
    versions, notes = {}, []

    def ids(count: int) -> list[int]:
        return [rng.randrange(setup["vocab_size"]) for _ in range(count)]

    def measure(*children: Child) -> None:
        for counts in rounds():
            new = setup["new_tokens"]
            jobs = {"decode": ([ids(ALONE)], new), "prefill": ([ids(setup["prompt_tokens"])], new)}
            for figure, lengths, count in (("batch", BATCH, new), ("long", LONG, LONG_NEW)):
                prompts = [ids(rng.randint(*lengths)) for _ in range(setup["sequences"])]
                if lengths[1] + count < setup["length"]:  # else the model's context is too short
                    jobs[figure] = prompts, count
            for figure, (prompts, count) in jobs.items():
                message = {"figure": figure, "prompts": prompts, "new_tokens": count}
                speeds = {child.name: child.ask(message)["tok_s"] for child in children}
                # None: it does not do this
                found = {name: speed for name, speed in speeds.items() if speed is not None}
                ours, *others = found
                found |= {f"{name}_times": found[name] / found[ours] for name in others}
                if counts:
                    add(rows[figure], found)
        versions.update((child.name, child.version) for child in children)

    try:
        with contextlib.closing(Child("kilolm", setup, sys.executable)) as ours:
            for name, python in peers.items():
                try:
                    with contextlib.closing(Child(name, setup, python)) as theirs:
                        measure(ours, theirs)
                except Absent as why:
                    if str(why).startswith(f"{ours.name}:"):
                        raise
                    notes.append(str(why))
            if not versions:  # no peer was measured
                measure(ours)
    except Absent as why:
        raise ValueError(str(why)) from why
    return versions, notes


# --- The child ------------------------------------------------------------------------------------


def main(name: str) -> None:
    """Answer the parent until it has no more questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to stdout, too
    engine = None

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    for line in sys.stdin:
        message = json.loads(line)
        try:
            if engine is None:
                engine = ENGINES[name](message)
                answer(version=engine.version)
            else:
                answer(tok_s=engine.speed(**message))
        except ModuleNotFoundError as error:
            if error.name == ENGINES[name].module:
                answer(missing=error.name)
            else:
                answer(error=str(error))
        except Exception as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
            answer(error=f"{type(error).__name__}: {first}")


class Peer:
    """An engine as the child sees it. A subclass loads in its constructor, and sets `version`."""

    module, version = "", ""

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Make exactly `new_tokens` tokens after each prompt, all prompts at once, drawn with the
        setup's `sampling`, which has vLLM's names."""
        raise NotImplementedError

    def speed(self, figure: str, prompts: list[list[int]], new_tokens: int) -> float | None:
        """Return tokens per second: of a prompt, until the first new token; of the tokens after the
        first, without the prompt's time; or of a batch's new tokens, from its arrival to its end.
        """

        def seconds(count: int) -> float:
            start = time.perf_counter()
            self.complete(prompts, count)
            return time.perf_counter() - start

        if figure == "prefill":
            return len(prompts[0]) / seconds(1)
        if figure == "decode":
            first, whole = seconds(1), seconds(new_tokens)
            return (new_tokens - 1) / max(whole - first, 1e-9)
        return len(prompts) * new_tokens / seconds(new_tokens)


class Kilolm(Peer):
    """This engine: generate.py's loop for one sequence, the scheduler for a batch."""

    def __init__(self, setup: dict[str, Any]) -> None:
        sys.path.insert(0, str(ROOT))
        import torch

        from around.fast import make_fast
        from around.folder import load_model
        from around.settings import DTYPES
        from kv_cache import StaticCache
        from scheduler import Engine

        torch.set_num_threads(setup["threads"])

        def load(batch_size: int | None) -> Any:
            model = load_model(setup["folder"], setup["device"], DTYPES[setup["dtype"]])
            make_fast(model, not setup["eager"], batch_size)
            return model

        self.model = load(1)
        self.sampling, self.cache = setup["sampling"], StaticCache(self.model, 1, setup["length"])
        self.engine = Engine(
            load(None),
            max_seq_len=setup["length"],
            max_num_seqs=setup["sequences"],
            max_num_batched_tokens=max(512, setup["sequences"]),
        )
        self.version = f"{'eager' if setup['eager'] else 'compiled'}, torch {torch.__version__}"

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        from around.settings import SamplingParams
        from generate import generate
        from sampling import Sequence

        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **self.sampling)
        if len(prompts) == 1:
            sequence = Sequence(prompts[0], params, self.model.config)
            for _ in generate(self.model, sequence, self.cache):
                pass
            return
        self.engine.reset()  # no prompt is found in the prefix cache
        for prompt in prompts:
            self.engine.add_request(prompt, params)
        for _ in self.engine.run():
            pass


class Transformers(Peer):
    """`generate`, eager, with the cache that grows; a batch is padded on the left."""

    module = "transformers"

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(setup["threads"])
        self.torch, self.options = torch, {"do_sample": False}
        if setup["sampling"]["temperature"]:  # top_k: by default it would be 50
            self.options = {"do_sample": True, "top_k": 0} | setup["sampling"]
        auto = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(setup["folder"], dtype=getattr(torch, setup["dtype"]))
        self.model = self.model.to(setup["device"]).eval()
        self.model.generation_config.eos_token_id = None  # it makes as many tokens as are asked for
        self.version = f"{transformers.__version__}, torch {torch.__version__}"

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        width, device = max(map(len, prompts)), self.model.device
        ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        out = self.model.generate(
            self.torch.tensor(ids, device=device),
            attention_mask=self.torch.tensor(mask, device=device),
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **self.options,
        )
        out[:, -1].tolist()  # waits for a device that runs behind
        if out.shape[1] != width + new_tokens:
            raise RuntimeError(f"{out.shape[1] - width} tokens came, {new_tokens} were asked for")


class VLLM(Peer):
    """vLLM's LLM.generate in one process, without its prefix cache."""

    module = "vllm"

    def __init__(self, setup: dict[str, Any]) -> None:
        # Its own worker process would hide why it failed.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if setup["device"] == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # OMP_NUM_THREADS holds
        import vllm

        self.vllm, self.version, self.sampling = vllm, vllm.__version__, setup["sampling"]
        self.llm = vllm.LLM(
            model=setup["folder"],
            dtype=setup["dtype"],
            skip_tokenizer_init=True,
            max_model_len=setup["length"],
            max_num_seqs=setup["sequences"],
            enable_prefix_caching=False,
        )

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        params = self.vllm.SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, detokenize=False, **self.sampling
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(inputs, params, use_tqdm=False)


class LlamaCpp(Peer):
    """llama.cpp by its Python package, which runs one sequence at a time."""

    module = "llama_cpp"

    def __init__(self, setup: dict[str, Any]) -> None:
        import llama_cpp

        if not setup["gguf"]:
            raise ValueError("give --gguf FILE, the model in llama.cpp's format")
        self.version, threads = llama_cpp.__version__, setup["threads"]
        self.sampling = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        self.sampling |= setup["sampling"]
        self.sampling["temp"] = self.sampling.pop("temperature")
        self.llama = llama_cpp.Llama(
            setup["gguf"],
            n_ctx=setup["length"],
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        self.llama.reset()  # or it would go on where the prompt is the same
        tokens = self.llama.generate(prompts[0], **self.sampling)
        if sum(1 for _ in itertools.islice(tokens, new_tokens)) < new_tokens:
            raise RuntimeError("it ended early")

    def speed(self, figure: str, prompts: list[list[int]], new_tokens: int) -> float | None:
        return super().speed(figure, prompts, new_tokens) if len(prompts) == 1 else None


ENGINES: dict[str, type[Peer]] = {
    "kilolm": Kilolm,
    "transformers": Transformers,
    "vllm": VLLM,
    "llama_cpp": LlamaCpp,
}

if __name__ == "__main__":
    main(sys.argv[1])
