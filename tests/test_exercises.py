"""The exercises: each test fails on the tree as it is, and passes with its reference solution.

Both are tried in copies of the tree, in processes of their own, two at a time. A solution must also
leave alone what the exercise is not about: a smoke test says the same tokens before and after.
Where an exercise has been solved, these tests fail: they are about the tree as it came.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from conftest import ROOT

FOLDER = ROOT / "exercises"
NAMES = sorted(page.stem for page in FOLDER.glob("[0-9]*.md"))
SECTIONS = ["# ", "## Why", "## Done when", "## Hint", "## Run", "## Further"]
SMOKE = """
import json

from common import ROOT, bundled, tiny_model, write

from quantize import quantize_model
from sampling import SamplingParams
from scheduler import Engine


def test_smoke() -> None:
    small = {"num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 40, "speculate": 2}
    engine = Engine(bundled(), max_seq_len=100, **small)
    wishes = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(seed=1, n=3, top_p=0.9, repetition_penalty=1.1, max_tokens=12),
        SamplingParams(seed=2, temperature=0.8, top_k=20, min_p=0.01, max_tokens=12),
    ]
    requests = [engine.add_request([*range(40, 80)], wish) for wish in wishes]
    while engine.has_work:
        engine.step()
        engine.check()
    said = [sequence.ids for request in requests for sequence in request.outputs]
    said.append(write(quantize_model(tiny_model(windows=(5, None)), "int8"), [1, 2, 3], 12).ids)
    said.append(write(tiny_model(), [1, 2, 3], 12, temperature=1.0, seed=3).ids)
    (ROOT / "said.json").write_text(json.dumps(said))
"""

# Importing torch takes longer than most of these tests: it is done once, and then forked.
RUNNER = """
import os
import sys

import pytest
import torch

with torch.device("meta"):
    torch.nn.Embedding(2, 2)  # imports another second's worth
waiting, running = sys.argv[1:], set()
while waiting or running:
    if waiting and len(running) < 2:
        tree = waiting.pop(0)
        pid = os.fork()
        if not pid:
            os.chdir(tree)
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path[0] = tree
            files = open("files.txt").read().split()
            code = pytest.main(["-q", "-p", "no:cacheprovider", "--junitxml=result.xml", *files])
            sys.stdout.flush()
            os._exit(code)
        running.add(pid)
    else:
        running.remove(os.wait()[0])
"""


class Run(NamedTuple):
    """What pytest said: of each file, by the exercise's name, how many tests passed, and what the
    failing ones say."""

    output: str
    passed: dict[str, int]
    failures: dict[str, list[str]]
    errors: list[str]
    said: str


def copy_tree(tree: Path, names: list[str]) -> Path:
    """The modules and the exercises, and which to run; the checkpoints are only linked to."""
    tree.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tree)
    shutil.copytree(FOLDER, tree / "exercises", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "checkpoints").symlink_to(ROOT / "checkpoints", target_is_directory=True)
    (tree / "exercises" / "test_smoke.py").write_text(SMOKE)
    files = [f"exercises/test_{name.replace('-', '_')}.py" for name in [*names, "smoke"]]
    (tree / "files.txt").write_text("\n".join(files))
    return tree


def result(tree: Path) -> Run:
    """Read what a run has left."""
    output, said = (tree / "output.txt").read_text(), tree / "said.json"
    assert (tree / "result.xml").is_file(), output
    run = Run(output, {}, {}, [], said.read_text() if said.is_file() else "")
    for case in ElementTree.parse(tree / "result.xml").iter("testcase"):
        name = case.get("classname", "").rpartition(".test_")[2].replace("_", "-")
        if (failure := case.find("failure")) is not None:
            run.failures.setdefault(name, []).append(failure.get("message", ""))
        elif case.find("error") is not None or case.find("skipped") is not None:
            run.errors.append(f"{name}: {case.get('name')}")
        else:
            run.passed[name] = run.passed.get(name, 0) + 1
    return run


def apply_patch(tree: Path, name: str) -> str:
    """Apply it as a learner would; return what is wrong. The copy is no repository of its own, and
    must not be taken for a part of one around it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    words = ["git", "apply", "--verbose", f"exercises/solutions/{name}.patch"]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode == 0 and "Skipped" not in done.stderr:
        return ""
    return f"{name}.patch does not fit: see exercises/solutions/README.md\n{done.stderr}"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """What came of the plain tree, as "", and of those with the solutions that are asked for."""
    here = [item for item in request.session.items if item.path == Path(__file__)]
    names = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    folder = tmp_path_factory.mktemp("exercises")
    trees = {"": copy_tree(folder / "plain", NAMES)}
    unfit = {}
    for name in sorted(names & {*NAMES}):
        tree = copy_tree(folder / name, [name])
        if problem := apply_patch(tree, name):
            unfit[name] = problem
        else:
            trees[name] = tree
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [sys.executable, "-c", RUNNER, *map(str, trees.values())]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr

    def of(name: str = "") -> Run:
        assert name not in unfit, unfit[name]
        return result(trees[name])

    return of


@pytest.mark.parametrize("name", NAMES)
def test_fails_as_it_is(name, runs):
    """Bug: a test that passes before anything is solved, or breaks instead of saying what to do."""
    plain = runs()
    assert not plain.errors, plain.output
    assert plain.passed["smoke"] == 1, plain.output
    assert plain.failures.get(name), "passes as it is"
    for message in plain.failures[name]:
        assert message.startswith(("AssertionError: ", "Failed: ")), message
        assert " " in message.partition(": ")[2], f"says nothing: {message}"


@pytest.mark.parametrize("name", NAMES)
def test_passes_when_solved(name, runs):
    plain, solved = runs(), runs(name)
    assert not solved.failures and not solved.errors, solved.output
    assert solved.passed[name] == plain.passed.get(name, 0) + len(plain.failures[name])
    assert solved.said == plain.said != "", "what the exercise is not about has changed"


@pytest.mark.parametrize("name", NAMES)
def test_page(name):
    """Every page has its parts, names files that exist, and tells how large the solution is."""
    page = (FOLDER / f"{name}.md").read_text()
    heads = [line for line in page.splitlines() if re.match("##? ", line)]
    assert len(heads) == len(SECTIONS)
    assert all(head.startswith(section) for head, section in zip(heads, SECTIONS, strict=True))
    assert heads[0].startswith(f"# {int(name[:2])}. ")
    assert f"python -m pytest exercises/test_{name.replace('-', '_')}.py" in page
    patch = (FOLDER / "solutions" / f"{name}.patch").read_text()
    new = set(re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", patch, re.MULTILINE))
    for module in {*re.findall(r"`(\w+\.py)\b", page)} - new:
        assert (ROOT / module).is_file(), f"{module} does not exist"
    (size,) = re.findall(r"The reference takes about (\d+) lines", page)
    added = len(re.findall(r"^\+(?!\+\+ )", patch, re.MULTILINE))
    assert abs(added - int(size)) <= max(3, added // 6), f"the reference takes {added} lines"
    assert added <= 100
    touched = re.findall(r"^\+\+\+ b/(.+)$", patch, re.MULTILINE)
    assert touched and all(re.fullmatch(r"\w+\.py", file) for file in touched), touched
    assert all(f"`{file}`" in page for file in touched), "the hint names the files to change"


def test_the_table_lists_all():
    rows = re.findall(
        r"^\| (\d+) \| \[(.+)\]\((.+)\.md\) \| (.+) \| (★{1,3}) \| .+ \|$",
        (FOLDER / "README.md").read_text(),
        re.MULTILINE,
    )
    assert [file for _, _, file, _, _ in rows] == NAMES
    assert [int(number) for number, *_ in rows] == [*range(1, len(NAMES) + 1)]
    assert len(NAMES) == 12
    for _, title, file, modules, _ in rows:
        page = (FOLDER / f"{file}.md").read_text()
        assert page.startswith(f"# {int(file[:2])}. {title}\n")
        assert all(f"`{module}`" in page for module in re.findall(r"`(.+?)`", modules))
    stars = [len(stars) for *_, stars in rows]
    assert stars == sorted(stars), "in rising difficulty"
    solutions = {file.stem for file in (FOLDER / "solutions").glob("*.patch")}
    tests = {file.stem.removeprefix("test_") for file in FOLDER.glob("test_*.py")}
    assert solutions == {*NAMES} and tests == {name.replace("-", "_") for name in NAMES}
