"""The course runs: each chapter's script gives the expected counts with --small, and the links and
excerpts on its page match the files."""

import io
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from around.folder import Tokenizer, build, load_config, load_model, suggested
from course import folders
from tools import report

COURSE = ROOT / "course"
SCRIPTS = sorted(COURSE.glob("[0-9]*.py"))
PAGES = {page.name: page.read_text() for page in sorted(COURSE.glob("*.md"))}
GLOSSARY = re.findall(r'<a id="([\w-]+)">', PAGES["README.md"])


@pytest.fixture
def counts(request, monkeypatch, tmp_path, capsys):
    """Run the script that the test is named after, with --small, as its command line does.

    Bug: chapter 10 printed the name of a temporary folder, so that its page could not match."""
    monkeypatch.syspath_prepend(COURSE)
    name, picture = request.node.name.removeprefix("test_"), tmp_path / "picture.svg"
    (script,) = COURSE.glob(f"*_{name}.py")
    module = runpy.run_path(str(script))
    result = module["run"](module["chapter"], ["--small", "--svg", str(picture)])
    printed = capsys.readouterr().out
    assert "█" in printed or "┤" in printed
    assert tempfile.gettempdir() not in printed, printed
    drawn = picture.read_text(encoding="utf-8")
    assert len(ElementTree.fromstring(drawn)) >= 1 and not re.search(r"\b(nan|inf)\b", drawn)
    return result


def test_loop(counts):
    """Bug: the loop already has a cache, which would make the second chapter pointless."""
    assert counts == {"made": 8, "forwards": 8, "tokens": sum(range(8, 16))}


def test_cache(counts):
    """Each token runs once, and the text is that of the loop without a cache.

    Bug: a mask that is off by one."""
    assert counts == {"recompute": sum(range(8, 16)), "cache": 8 + 7, "same": True}


def test_sampling(counts):
    """The ten lines agree with the engine's sampler, and a character is shown once its last byte
    has come."""
    assert counts["wrong"] == 0 and counts["whole"]
    assert counts["as it is"] == counts["temperature 0.5"] == counts["temperature 1.5"] == 1024
    assert counts["top_k 4"] == 4 and counts["top_p 0.7"] < counts["as it is"]
    assert counts["min_p 0.1"] < counts["as it is"]
    assert (counts["characters"], counts["tokens"], counts["broken"]) == (6, 9, 5)


def test_a_cut_that_is_off_cuts_nothing(monkeypatch):
    """Bug: top_p 1 dropped 467 tokens with two threads, because a rounded sum reached 1 early."""
    monkeypatch.syspath_prepend(COURSE)
    settle = runpy.run_path(str(COURSE / "03_sampling.py"))["settle"]
    assert (settle(torch.tensor([0.0, -30, -31])) > 0).tolist() == [True] * 3


def test_batching(counts):
    """A sequence writes the same in a batch as alone, and a free slot is filled."""
    assert counts["same"] and counts["one at a time"] == 140
    assert counts["static batches"] == 40 + 30
    assert counts["continuous"] == 40


def test_paging(counts):
    """Blocks hold more requests than slabs, and shared blocks hold more still, by the ten lines as
    in the engine. The trace shows every event that the page explains."""
    assert counts["fits"] == {"slabs": 4, "blocks": 7, "shared": 19}
    assert counts["most"]["slabs"] == 4 < counts["most"]["blocks"]
    assert counts["computed"]["slabs"] - counts["computed"]["shared"] == 7 * 96
    events = " ".join(counts["events"])
    for event in ("found 8 tokens", "copied a block", "preempted", "found 12 tokens", "forked A'"):
        assert event in events, events


def test_bits(counts):
    """Fewer bits give fewer levels, fewer bytes, and a higher perplexity."""
    assert all(1 < levels <= 2**bits - 1 for bits, levels in counts["levels"].items())
    held = counts["bytes"]
    assert held["float32"] > 3.5 * held["int8"] > 1.7 * 3.5 * held["int4"]
    two, four, eight = counts["perplexity"]
    assert two > four > eight > 0.99 * counts["plain"] and eight < 1.01 * counts["plain"]


def test_guessing(counts):
    """Right guesses save forwards, wrong guesses cost none, and neither changes the text."""
    assert counts["same"] and counts["no guesses"] == counts["0% right"] == 12
    assert counts["100% right"] == math.ceil(12 / 5)
    assert counts["50% right"] in range(4, 12)
    assert all(1 <= rate <= 5 for rate in counts["rates"].values())


def test_ranks(counts):
    """Two processes hold half of the model each, and sum twice in each layer."""
    assert counts["apart"] < 1e-5 and counts["sums"] == 2 * 2
    assert counts["sum_bytes"] == counts["sums"] * 64 * 4
    share, whole = counts["mb"].values()
    assert 0.5 * whole <= share < 0.53 * whole


def test_serving(counts):
    """Every request is answered, and a server that runs one at a time takes a step for each
    token."""
    assert counts["answered"] == 2 * 6 and counts["steps, 1"] == 6 * 4
    assert counts["steps, 32"] < counts["steps, 1"] / 2


def test_the_queue_of_one(monkeypatch):
    """Bugs: the prediction used other arrivals than the measurement, and gave a third of its tail,
    in another shape; the page's figures shrank where its text says that they grow."""
    monkeypatch.syspath_prepend(COURSE)
    waits = runpy.run_path(str(COURSE / "09_serving.py"))["waits"]
    assert waits(6, [0, 3, 10, 12, 15, 30]) == [0, 3, 2, 6, 9, 0]  # the picture of the page
    page = PAGES["09-serving.md"]
    tails = {
        name: [float(value) for value in line.split()]
        for name, line in re.findall(r"^  (.+), p90 +([\d ]+) ms$", page, re.MULTILINE)
    }
    measured, predicted = tails["1 at once"], tails["predicted"]
    assert sorted(measured) == measured and sorted(predicted) == predicted
    assert all(p <= m < 1.5 * p for m, p in zip(measured, predicted, strict=True)), tails
    low, *_, high = sorted(round(100 * (m / p - 1)) for m, p in zip(measured, predicted))
    assert f"Here it is {low} to {high} % higher" in " ".join(page.split())
    longer = float(re.search(r"\nTwice as many requests .* p90 (\d+) ms", page)[1])
    assert 1.7 < longer / measured[-1] < 2.5
    text = page.partition("## The idea")[0]
    for value in (measured[-1], longer, tails["32 at once"][-1]):
        assert f"{value:,.0f} ms" in text, value


def test_machines(counts):
    """Bugs: a home for each document finds no more than taking turns does; a request is lost or
    counted twice, so that Little's law does not hold."""
    assert counts["its home, all alike"]["found"] > 1.2 * counts["in turn, all alike"]["found"]
    for row in counts.values():
        assert row["came"] * row["stay"] == pytest.approx(row["inside"])
    assert counts["home, within 2, a rush"]["stay"] < counts["its home, a rush"]["stay"]


def test_a_home_has_a_bound(monkeypatch):
    """Bug: a document that everybody asks for stays at one machine, while the others idle."""
    monkeypatch.syspath_prepend(COURSE)
    home = runpy.run_path(str(COURSE / "11_machines.py"))["home"]
    first = home(b"a", [0, 0, 0], 2)
    assert {home(b"a", [i, i, i], 2) for i in range(9)} == {first}
    loads = [0, 0, 0]
    loads[first] = 4
    assert home(b"a", loads, 100) == first and home(b"a", loads, 2) == (first + 1) % 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_names_are_those_of_the_code(script):
    """Bug: chapter 1 explained `select`, but the code below it has `last`."""
    page = PAGES[script.stem.replace("_", "-") + ".md"].partition("## In the engine")[0]
    code = "".join(file.read_text() for file in (script, COURSE / "lesson.py", ROOT / "tp.py"))
    for word in re.findall(r"`([a-z_]+)`", page):
        assert re.search(rf"\b{word}\b", code), word


def test_checkpoints(counts):
    """The ten lines fill a model as the engine's loader does, with every stored tensor. A mistake
    that no check finds changes the next tokens."""
    assert counts["same"] == 2
    assert {*counts["refused"]} == {
        "tie_word_embeddings",
        "head_dim",
        "architectures",
        "hidden_act",
    }
    assert counts["differ"]["rope_theta"] > 128 < counts["differ"]["rope_scaling"]


def test_what_is_stored_and_has_no_place(monkeypatch, tmp_path):
    """Bug: a tensor is left out silently."""
    monkeypatch.syspath_prepend(COURSE)
    fill = runpy.run_path(str(COURSE / "10_checkpoints.py"))["fill"]
    path = folders.write(tmp_path / "folder", folders.FAMILIES["Qwen3"])
    stored, llama = load_file(path / "model.safetensors"), replace(load_config(path), qk_norm=False)
    norms = {name for name in stored if "q_norm" in name or "k_norm" in name}
    assert fill(build(llama), stored) == norms and len(norms) == 4


@pytest.mark.parametrize("name", folders.FAMILIES)
def test_folders_are_as_others_read_them(name, tmp_path):
    """Bug: a folder that only this engine reads in the intended way. transformers must give the
    same logits, ids and chat."""
    path = folders.write(tmp_path / "folder", folders.FAMILIES[name])
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(100)[None]
    with torch.no_grad():
        logits = load_model(path, dtype=torch.float32)(ids, ids)
        torch.testing.assert_close(logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    ours, text = Tokenizer(path), "The king,\ncafé <|eot_id|><|im_end|>"
    their = PreTrainedTokenizerFast.from_pretrained(path)
    messages = [{"role": "user", "content": "The king"}]
    assert ours.encode(text) == their(text).input_ids
    rendered = their.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.encode_chat(messages) == their(rendered, add_special_tokens=False).input_ids
    assert {*folders.byte_letters()} == {*ByteLevel.alphabet()}
    for ids in (ours.encode(text), ours.encode_chat(messages)):
        assert ids.count(ours.bos_id) == (ours.bos_id is not None)
    assert len(load_config(path).eos_ids) == 2 and {"temperature", "top_p"} <= {*suggested(path)}


def test_a_page_for_each_script():
    """Bugs: a chapter that nothing links to; a page or script that has grown too long; an excerpt
    of an older script."""
    names = [script.stem.replace("_", "-") + ".md" for script in SCRIPTS]
    assert len(names) == 11 and {*names, "README.md"} == {*PAGES}
    for script, name in zip(SCRIPTS, names):
        page, source = PAGES[name], script.read_text()
        assert f"python course/{script.name}" in page and f"]({script.name})" in page
        assert f"]({name})" in PAGES["README.md"]
        assert 60 <= len(page.splitlines()) <= 120, name
        assert "](exercises/" in page and "@@" not in page
        for link in re.findall(r"\]\(((?!http|#)[^)#]+)", page):
            assert (COURSE / link).exists(), f"{name}: {link}"
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            assert code in source, f"{name} shows code that {script.name} does not have:\n{code}"
        assert source.count("python course/") == 1 == source.count(f"python course/{script.name}")
        assert report.code_lines(source) <= 75, name


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    """Bugs: a link points into another function, after a line was added above; to a file that has
    moved; or to a word that the glossary does not have."""
    text, page = PAGES[name], COURSE / name
    assert report.line_links(text, page) == text, "run: python tools/bench.py report"
    assert name == "README.md" or text.count(".py#L") >= 3
    for link in re.findall(r"\]\(((?!http)[^)]+)", text):
        file, _, anchor = link.partition("#")
        assert not file or (COURSE / file).exists(), link
        if file in ("", "README.md") and anchor:
            assert anchor in GLOSSARY, link


def test_a_wrong_link_is_seen():
    with pytest.raises(ValueError, match=r"01-loop.md links to Engine.none, which ../scheduler.py"):
        report.line_links("[`Engine.none`](../scheduler.py#L1)", COURSE / "01-loop.md")


def test_glossary():
    """Bugs: a word that no chapter uses, or that two entries explain."""
    assert len({*GLOSSARY}) == len(GLOSSARY) > 20
    linked = {a for text in PAGES.values() for a in re.findall(r"\(README\.md#([\w-]+)\)", text)}
    assert linked == {*GLOSSARY}, linked ^ {*GLOSSARY}


@pytest.mark.parametrize("terminal", [True, False])
def test_one_thread_and_a_clock(terminal, monkeypatch):
    """Bugs: another text, and twice the time, on a machine with more cores; half a minute of
    silence; a clock printed into a file."""
    monkeypatch.syspath_prepend(COURSE)
    import lesson

    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert lesson.run(lambda _: time.sleep(1.3) or torch.get_num_threads(), []) == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert ("working,   1 s" in stderr.getvalue()) == terminal == bool(stderr.getvalue())


# --- At full size ---------------------------------------------------------------------------------

# What each page says in words of the counts that its script returns.
SAID = {
    "01_loop": ["{tokens} for {made} new ones"],
    "02_cache": ["runs {recompute} tokens without a cache, and {cache} with one"],
    "03_sampling": ["Without a cut all {as it is:,} tokens stay", "is written as its two bytes"],
    "04_batching": ["takes {static batches} forwards", "is free, and takes {continuous}."],
    "05_paging": ["hence {computed[blocks]:,} tokens"],
    "06_bits": [],
    "07_guessing": ["as 32 tokens take {100% right} forwards"],
    "08_ranks": ["some kilobytes in {sums} sums"],
}
TIMED = r"^(milliseconds|seconds|times as|.* over [\d.]+ s\n|On average a forward takes)"


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
def test_counts_are_those_of_the_page(name, monkeypatch, capsys):
    """Bug: with --small all was well, but at full size chapter 5's engine computed 1,730 tokens,
    and not 1,729 as on the page. The stopwatch stands still, as times are not compared. Chapters 10
    and 11 are left out: on another processor a tie between tokens may go otherwise."""
    if name == "06_bits" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("the page's bytes are those of a processor with AVX-512")
    monkeypatch.syspath_prepend(COURSE)
    import lesson

    monkeypatch.setattr(lesson, "seconds", lambda act, repeat=5: 1e-9)
    monkeypatch.setattr(lesson, "durations", lambda steps: [1.0, 1.0])
    monkeypatch.setattr(lesson.Lesson, "bandwidth", 1e10)
    module = runpy.run_path(str(COURSE / f"{name}.py"))
    counts = module["run"](module["chapter"], [])
    printed = without_times(capsys.readouterr().out)
    page = PAGES[name.replace("_", "-") + ".md"]
    for words in SAID[name]:
        assert words.format(**counts) in " ".join(page.split()), words
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = [text for kind, text in blocks if not kind and without_times(text)[0] in printed]
    assert len(shown) == 1 + (name == "05_paging")  # the trace; others are drawn by hand
    for part in "\n".join(shown).split("\n\n"):
        if not re.match(TIMED, part):
            missing = [line for line in without_times(part) if line not in printed]
            assert missing == [], part


def without_times(text):
    """The lines of a text, with a mark in place of each time and speed."""
    return [re.sub(r"[\d.,]+(?= (ms|s|GB/s)\b)", "?", line.rstrip()) for line in text.splitlines()]


# --- What can go wrong ----------------------------------------------------------------------------


def started(script, *words, **options):
    words = [sys.executable, str(script), *words]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **options)


def test_svg_into_no_folder(monkeypatch, capsys):
    """Bug: the chapter measures for a minute, and then finds that the folder does not exist."""
    monkeypatch.syspath_prepend(COURSE)
    module = runpy.run_path(str(SCRIPTS[0]))
    with pytest.raises(SystemExit, match="2"):
        module["run"](lambda lesson: pytest.fail("the chapter ran"), ["--svg", "none/x.svg"])
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "error: --svg: none/x.svg cannot be" in err


@pytest.mark.parametrize("full", ["--svg", "stdout"])
def test_full_disk(full):
    """Bug: a traceback for an error that the user can fix."""
    words = ["--svg", "/dev/full"] if full == "--svg" else []
    with open("/dev/full" if full == "stdout" else os.devnull, "w") as out:
        child = started(SCRIPTS[0], "--small", *words, stdout=out)
        err = child.communicate(timeout=120)[1]
    assert child.returncode == 2, err
    assert err == "01_loop.py: error: [Errno 28] No space left on device\n"


def test_nobody_reads():
    """Bug: an error message after `| head` has read enough."""
    child = started(SCRIPTS[0], "--small", stdout=subprocess.PIPE)
    child.stdout.close()
    child.stdout = None  # or communicate() would read it
    assert child.communicate(timeout=120)[1] == "" and child.returncode == 0


def test_ctrl_c_while_running():
    """Bug: a traceback through the model."""
    child = started(SCRIPTS[0], stdout=subprocess.PIPE)
    assert child.stdout.readline() == "ROMEO:\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=120)[1] == "" and child.returncode == 130
