"""This engine beside others, on the same weights; `tools/bench.py versus` is its command line.

Each engine runs in a process of its own, so that memory, threads and versions of libraries are
apart, and does one thing: complete prompts, given as ids, by so many tokens each. Every
figure follows from the seconds that this takes, in the same way for all. The processes know nothing
of each other: they read a JSON object a line, and answer with one.

    -> {"folder": DIR, "dtype": "float32", "device": "cpu", "threads": 2, "sequences": 32, ...}
    <- {"version": "5.23.0"}                       or {"missing": "vllm"}: it is not installed
    -> {"figure": "decode", "prompts": [[5, 9, 2]], "new_tokens": 32}
    <- {"tok_s": 27.1}                             or null, where the engine does not do this
    <- {"error": "RuntimeError: ..."}              instead of any answer

Read: compare, Child, speed, then the engines. On top only the standard library is imported, as an
engine may live in another virtual environment, which has nothing of ours.
"""

import contextlib
import functools
import importlib
import inspect
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ALONE, BATCH = 16, (16, 64)  # tokens of the prompts that are decoded from: one, or many
FIGURES = ("decode", "prefill", "batch")
Figures = dict[str, list[float]]

# --- The parent -----------------------------------------------------------------------------------


class Absent(Exception):
    """An engine that is not there, or cannot go on. The message is for the table."""


class Child:
    """An engine in its own process."""

    def __init__(self, name: str, setup: dict[str, Any], python: str, timeout: float) -> None:
        """Start it and let it load. Raises Absent."""
        self.name, self.timeout = name, min(timeout, 1e6)  # select's own limit is near
        threads = str(setup["threads"])
        env = os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        env |= {"TOKENIZERS_PARALLELISM": "false"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)
        # -P: the folder of this file has names, such as `load`, that are others' modules as well.
        self.process = subprocess.Popen(
            [python, "-P", __file__, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True, env=env, start_new_session=True,
        )  # fmt: skip
        try:
            self.version = self.ask(setup)["version"]
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line and wait for the answer. Raises Absent."""
        with contextlib.suppress(BrokenPipeError):  # it has died: the answer says so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], self.timeout)[0]:
            raise Absent(f"{self.name}: no answer within {self.timeout:g} s")
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            said = [each.strip() for each in self.log if each.strip()]
            status = self.process.wait()
            raise Absent(f"{self.name}: ended with status {status}: {(said or ['no word'])[-1]}")
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
            with contextlib.suppress(BrokenPipeError):  # what it did not live to read
                pipe.close()


def compare(
    setup: dict[str, Any],
    peers: dict[str, str],
    sizes: tuple[int, int, int],
    repeat: int,
    timeout: float,
    watch: Callable[[range, str], Any],
) -> tuple[dict[str, Figures], dict[str, str], list[str]]:
    """Measure this engine and each peer in turn, figure by figure: ours, theirs, ours, theirs.

    No more than two engines are loaded at once. Ours is measured again beside each peer, and a
    ratio is always of two figures that were taken one right after the other.

    Args:
        setup: what an engine needs to load; see the header.
        peers: name -> the interpreter that has it.
        sizes: tokens of the long prompt, new tokens, sequences of the batch.
        repeat: rounds, after one that warms up.
        timeout: seconds that an engine may take for one answer.
        watch: wraps the rounds; settings.progress.

    Returns:
        For each row its figures in tokens per second, with `NAME_times` as a multiple of ours; each
        engine's version; and a line for each peer that was not measured.

    Raises:
        ValueError: this engine itself did not run.
    """
    long, new_tokens, sequences = sizes
    rows = dict(zip(FIGURES, row_names(*sizes)))
    figures: dict[str, Figures] = {row: {} for row in rows.values()}
    versions, notes = {}, []
    warm: set[tuple[str, str]] = set()
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(setup["vocab_size"]) for _ in range(count)]

    def jobs() -> dict[str, dict[str, Any]]:
        prompts = {
            "decode": [ids(ALONE)], "prefill": [ids(long)],
            "batch": [ids(rng.randint(*BATCH)) for _ in range(sequences)],
        }  # fmt: skip
        return {
            f: {"figure": f, "prompts": p, "new_tokens": new_tokens} for f, p in prompts.items()
        }

    def rounds(theirs: Child | None) -> None:
        for done in watch(range(repeat + 1), theirs.name if theirs else ours.name):
            for figure, job in jobs().items():
                speeds = {}
                for child in filter(None, (ours, theirs)):
                    if done or (child.name, figure) not in warm:  # the first round warms up
                        speeds[child.name] = child.ask(job)["tok_s"]
                        warm.add((child.name, figure))
                if not done:
                    continue
                row = figures[rows[figure]]
                for name, speed in speeds.items():
                    if speed is None:  # it does not do this
                        continue
                    row.setdefault(name, []).append(speed)
                    if name != ours.name:
                        times = speed / speeds[ours.name]
                        row.setdefault(f"{name}_times", []).append(times)

    with contextlib.ExitStack() as stack:
        try:
            ours = Child("kilolm", setup, sys.executable, timeout)
            stack.callback(ours.close)
            versions[ours.name] = ours.version
            for name, python in peers.items():
                theirs = None
                try:
                    theirs = Child(name, setup, python, timeout)
                    rounds(theirs)
                    versions[name] = theirs.version
                except Absent as why:
                    if str(why).startswith(f"{ours.name}:"):
                        raise
                    notes.append(str(why))
                finally:
                    if theirs:
                        theirs.close()
            if len(versions) == 1:  # nobody to be in turn with
                rounds(None)
        except Absent as why:
            raise ValueError(str(why)) from why
    return figures, versions, notes


def row_names(long: int, new_tokens: int, sequences: int) -> tuple[str, str, str]:
    """In the order of FIGURES."""
    return "one sequence", f"prefill of {long:,} tokens", f"{sequences} sequences"


# --- The child ------------------------------------------------------------------------------------


def main(name: str) -> None:
    """Answer the parent until it has no more questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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
        """Make exactly so many tokens after each prompt, all prompts at once, drawn as the setup's
        `sampling` says, in vLLM's names."""
        raise NotImplementedError

    def speed(self, figure: str, prompts: list[list[int]], new_tokens: int) -> float | None:
        """Tokens per second: of a prompt until its first token is there; of those after the first,
        without the prompt's time; of a batch, from its arrival to its end, prompts included."""

        def seconds(count: int) -> float:
            start = time.perf_counter()
            self.complete(prompts, count)
            return time.perf_counter() - start

        if figure == "prefill":
            return len(prompts[0]) / seconds(1)
        if figure == "decode":
            first, all_of_them = seconds(1), seconds(new_tokens)
            return (new_tokens - 1) / max(all_of_them - first, 1e-9)
        return len(prompts) * new_tokens / seconds(new_tokens)


class Kilolm(Peer):
    """This engine, compiled: generate.py's loop for one sequence, the scheduler for a batch."""

    def __init__(self, setup: dict[str, Any]) -> None:
        sys.path.insert(0, str(ROOT))
        import torch

        from checkpoint import load_model
        from kv_cache import StaticCache
        from packed import compile_model
        from scheduler import Engine
        from settings import DTYPES

        torch.set_num_threads(setup["threads"])
        self.model = load_model(setup["folder"], setup["device"], DTYPES[setup["dtype"]])
        if setup["compile"]:
            compile_model(self.model, 1)
        self.length, self.sampling = setup["length"], setup["sampling"]
        self.cache = StaticCache(self.model, 1, self.length)
        self.engine = Engine(
            self.model, max_seq_len=self.length, max_num_seqs=setup["sequences"],
            max_num_batched_tokens=max(512, setup["sequences"]),
        )  # fmt: skip
        self.version = f"{'compiled' if setup['compile'] else 'eager'}, torch {torch.__version__}"

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        from generate import generate
        from sampling import Sequence
        from settings import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **self.sampling)
        if len(prompts) == 1:
            sequence = Sequence(prompts[0], params, self.model.config, None, self.length)
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
        self.model.generation_config.eos_token_id = None  # as many tokens as were asked for
        self.version = f"{transformers.__version__}, torch {torch.__version__}"

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        width, device = max(map(len, prompts)), self.model.device
        ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        out = self.model.generate(
            self.torch.tensor(ids, device=device),
            attention_mask=self.torch.tensor(mask, device=device),
            max_new_tokens=new_tokens, pad_token_id=0, **self.options,
        )  # fmt: skip
        out[:, -1].tolist()  # waits for a device that runs behind
        if out.shape[1] != width + new_tokens:
            raise RuntimeError(f"{out.shape[1] - width} tokens came, {new_tokens} were asked for")


class TransformersCompiled(Transformers):
    """`generate` with its static cache and compiled steps of one token each, which is what it does
    by itself on a GPU; prompts run eagerly there too."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.options["cache_implementation"] = "static"
        eager = self.model.forward
        # Sizes as symbols: else each batch and length of the cache is compiled anew, in half a
        # minute or more.
        compiled = self.torch.compile(eager, dynamic=True)

        @functools.wraps(eager)  # generate looks at its signature
        def forward(input_ids: Any = None, **more: Any) -> Any:
            return (compiled if input_ids.shape[1] == 1 else eager)(input_ids=input_ids, **more)

        self.model.forward = forward


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
            model=setup["folder"], dtype=setup["dtype"], skip_tokenizer_init=True,
            max_model_len=setup["length"], max_num_seqs=setup["sequences"],
            enable_prefix_caching=False,
        )  # fmt: skip

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        params = self.vllm.SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, detokenize=False, **self.sampling
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(given, params, use_tqdm=False)


class LlamaCpp(Peer):
    """llama.cpp by its Python package, which runs one sequence at a time."""

    module = "llama_cpp"

    def __init__(self, setup: dict[str, Any]) -> None:
        import llama_cpp

        self.version, threads = llama_cpp.__version__, setup["threads"]
        settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        self.sampling = settings | setup["sampling"]
        self.sampling["temp"] = self.sampling.pop("temperature")
        self.llama = llama_cpp.Llama(
            gguf_of(setup), n_ctx=setup["length"], n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        self.llama.reset()  # or it would go on where the prompt is the same
        tokens = self.llama.generate(prompts[0], **self.sampling)
        if sum(1 for _ in itertools.islice(tokens, new_tokens)) < new_tokens:
            raise RuntimeError("it ended early")

    def speed(self, figure: str, prompts: list[list[int]], new_tokens: int) -> float | None:
        return None if figure == "batch" else super().speed(figure, prompts, new_tokens)


class LlamaBench(Peer):
    """llama.cpp's own program, which measures one sequence, without sampling any token; started
    anew for each figure."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.words = [setup["llama_bench"], "-m", gguf_of(setup), "-t", str(setup["threads"])]
        self.words += ["-r", "1", "-o", "json"]
        self.version = "build " + str(self.run("-p", "1", "-n", "0")["build_commit"])

    def run(self, *words: str) -> dict[str, Any]:
        done = subprocess.run([*self.words, *words], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no word"]
            raise RuntimeError(f"status {done.returncode}: {lines[-1]}")
        return json.loads(done.stdout)[0]

    def speed(self, figure: str, prompts: list[list[int]], new_tokens: int) -> float | None:
        if figure == "batch":
            return None
        words = ("-p", str(len(prompts[0])), "-n", "0")
        words = words if figure == "prefill" else ("-p", "0", "-n", str(new_tokens))
        return self.run(*words)["avg_ts"]


class GptFast(Peer):
    """gpt-fast's loop for one sequence, compiled as its generate.py does it; of a clone, as there
    is no package. Its `model` and `generate` are found before ours."""

    def __init__(self, setup: dict[str, Any]) -> None:
        sys.path.insert(0, setup["gpt_fast"])
        import torch
        from safetensors.torch import load_file

        theirs, loop = map(importlib.import_module, ("model", "generate"))
        folder = Path(setup["folder"])
        c = json.loads((folder / "config.json").read_text())
        if c["model_type"] != "llama":
            raise ValueError("gpt-fast runs Llama alone, of the families that are here")
        sizes = theirs.ModelArgs(
            block_size=setup["length"] + 8, vocab_size=c["vocab_size"],
            n_layer=c["num_hidden_layers"], n_head=c["num_attention_heads"], dim=c["hidden_size"],
            intermediate_size=c["intermediate_size"], n_local_heads=c["num_key_value_heads"],
            rope_base=c["rope_theta"], norm_eps=c["rms_norm_eps"],
        )  # fmt: skip
        with torch.device("meta"):
            self.model = theirs.Transformer(sizes)
        stored = gpt_fast_names(load_file(folder / "model.safetensors"), c)
        self.model.load_state_dict(stored, assign=True)
        dtype, device = getattr(torch, setup["dtype"]), setup["device"]
        self.model = self.model.to(device=device, dtype=dtype).eval()
        with torch.device(device):  # for the longest, or it would be compiled again
            self.model.setup_caches(max_batch_size=1, max_seq_length=setup["length"] + 8)
        if setup["compile"]:
            step = torch.compile(loop.decode_one_token, mode="reduce-overhead", fullgraph=True)
            loop.decode_one_token = step
        self.generate = loop.generate
        self.tensor = functools.partial(torch.tensor, dtype=torch.int, device=device)
        self.options = {"interactive": False, "draft_model": None}
        self.options |= {"temperature": setup["sampling"]["temperature"]}
        if "batch_size" in inspect.signature(loop.generate).parameters:  # newer ones
            self.options["batch_size"] = 1
        self.version = f"torch {torch.__version__}"

    def complete(self, prompts: list[list[int]], new_tokens: int) -> None:
        out, _ = self.generate(self.model, self.tensor(prompts[0]), new_tokens, **self.options)
        out.tolist()  # waits for a device that runs behind

    def speed(self, figure: str, prompts: list[list[int]], new_tokens: int) -> float | None:
        """It makes two tokens or more, so that what is subtracted are two."""
        if figure != "decode":
            return None
        times = []
        for count in (2, new_tokens + 1):
            start = time.perf_counter()
            self.complete(prompts, count)
            times.append(time.perf_counter() - start)
        return (new_tokens - 1) / max(times[1] - times[0], 1e-9)


def gpt_fast_names(stored: dict[str, Any], c: dict[str, Any]) -> dict[str, Any]:
    """A Llama's tensors by the names of gpt-fast, with q and k in its order."""
    changes = {
        "model.": "", "embed_tokens": "tok_embeddings", "lm_head": "output",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.": "attention.", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
        "mlp.": "feed_forward.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
    }  # fmt: skip
    found = {}
    for name, tensor in stored.items():
        if "q_proj" in name or "k_proj" in name:
            heads = c["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = turned(tensor, heads)
        for old, new in changes.items():
            name = name.replace(old, new)
        found[name] = tensor
    found.setdefault("output.weight", found["tok_embeddings.weight"])  # they are tied
    return found


def turned(tensor: Any, heads: int) -> Any:
    """A matrix of q or k for engines whose rope turns channels 2i and 2i + 1, not i and i + H/2."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gguf_of(setup: dict[str, Any]) -> str:
    """The file that llama.cpp reads: the one that was given, or else random weights converted, for
    which llama.cpp's own converter has no way, as there is no tokenizer.

    Raises:
        ValueError: it is neither.
    """
    if setup["gguf"] or not setup["random"]:
        if not setup["gguf"]:
            raise ValueError("give --gguf FILE, the checkpoint in llama.cpp's format")
        return setup["gguf"]
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError("install gguf, or give --gguf FILE, the same shape") from None
    from safetensors.torch import load_file

    folder = Path(setup["folder"])
    file, c = folder / "model.gguf", json.loads((folder / "config.json").read_text())
    if c["model_type"] != "llama":
        raise ValueError("give --gguf FILE: only a Llama of random weights can be converted here")
    if file.is_file():  # of the other of the two
        return str(file)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    kind = gguf.GGMLQuantizationType[{"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[
        setup["dtype"]
    ]]  # fmt: skip
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if kind.name == 'F32' else 'MOSTLY'}_{kind.name}"]
    )
    names = gguf.TensorNameMap(gguf.MODEL_ARCH.LLAMA, c["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        part = name.rpartition("_proj.")[0][-1:]
        if part in ("q", "k") and "self_attn" in name:
            heads = c["num_attention_heads" if part == "q" else "num_key_value_heads"]
            tensor = turned(tensor, heads)
        data, its = tensor.float().numpy(), kind if tensor.dim() > 1 else None
        data = data if its is None else gguf.quants.quantize(data, its)
        writer.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


ENGINES: dict[str, type[Peer]] = {
    "kilolm": Kilolm, "transformers": Transformers, "transformers_compiled": TransformersCompiled,
    "vllm": VLLM, "llama_cpp": LlamaCpp, "llama_bench": LlamaBench,
    "gpt_fast": GptFast,
}  # fmt: skip

if __name__ == "__main__":
    main(sys.argv[1])
