"""The exercises: each test fails on the tree as it is, and passes with its reference solution.

Both are tried in copies of the tree, in processes of their own. A solution must also leave alone
what the exercise is not about: a smoke test says the same tokens before and after.
Where an exercise has been solved, these tests fail: they are about the tree as it came.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

EXERCISES = "course/exercises"
FOLDER = ROOT / EXERCISES
NAMES = sorted(page.stem for page in FOLDER.glob("[0-9]*.md"))
KINDS = {"05-lfu-eviction": pytest.mark.slow}  # the one that a change of the engine tries
TRIED = [pytest.param(name, marks=KINDS.get(name, pytest.mark.nightly)) for name in NAMES]
SECTIONS = ["# ", "## Why", "## Done when", "## Hint", "## Run", "## Further"]
SMOKE = """
import json

from common import ROOT, bundled, serve, tiny_model, write

from around.settings import SamplingParams
from quantize import quantize_model
from scheduler import Engine
from speculative import NGram


def test_smoke() -> None:
    small = {"num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    engine = Engine(bundled(), proposer=NGram(2), max_seq_len=100, **small)
    wishes = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(seed=1, n=3, top_p=0.9, repetition_penalty=1.1, max_tokens=12),
        SamplingParams(seed=2, temperature=0.8, top_k=20, min_p=0.01, max_tokens=12),
    ]
    requests = serve(engine, *(([*range(40, 80)], wish) for wish in wishes))
    said = [sequence.ids for request in requests for sequence in request.outputs]
    said.append(write(quantize_model(tiny_model(windows=(5, None)), "int8"), [1, 2, 3], 12).ids)
    said.append(write(tiny_model(), [1, 2, 3], 12, temperature=1.0, seed=3).ids)
    (ROOT / "said.json").write_text(json.dumps(said))
"""


def copy_tree(tree: Path) -> Path:
    """The modules, the tools and the exercises; the checkpoints are only linked to."""
    tree.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tree)
    for folder in ("around", "tools", EXERCISES):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "checkpoints").symlink_to(ROOT / "checkpoints", target_is_directory=True)
    (tree / EXERCISES / "test_smoke.py").write_text(SMOKE)
    return tree


def apply_patch(tree: Path, name: str, *options: str) -> str:
    """Apply it as a learner would; return what is wrong. The copy is no repository of its own, and
    must not be taken for a part of one around it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    words = ["git", "apply", "--verbose", *options, f"{EXERCISES}/solutions/{name}.patch"]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode == 0 and "Skipped" not in done.stderr:
        return ""
    return f"{name}.patch does not fit: see {EXERCISES}/solutions/README.md\n{done.stderr}"


def run(tree: Path, name: str) -> tuple[str, list[str], list[str]]:
    """Run an exercise's tests, and the smoke test. Returns what the latter said, and the lines that
    say PASSED and FAILED of the exercise's."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "1000"}  # else messages are cut short
    files = [f"{EXERCISES}/test_{each}.py" for each in (name.replace("-", "_"), "smoke")]
    words = [sys.executable, "-m", "pytest", "-q", "-rfEsp", *files]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    said, output = tree / "said.json", done.stdout + done.stderr
    assert said.is_file() and not re.search("^(ERROR|SKIPPED) ", output, re.MULTILINE), output
    lines = [line for line in output.splitlines() if f" {files[0]}::" in line]
    passed, failed = ([x for x in lines if x.startswith(word)] for word in ("PASSED", "FAILED"))
    return said.read_text(), passed, failed


@pytest.mark.parametrize("name", TRIED)
def test_fails_as_it_is_and_passes_when_solved(name, tmp_path):
    """Bug: a test that passes before anything is solved, or breaks instead of saying what to do."""
    trees = copy_tree(tmp_path / "plain"), copy_tree(tmp_path / "solved")
    problem = apply_patch(trees[1], name)
    assert not problem, problem
    with ThreadPoolExecutor(2) as pool:
        plain, solved = pool.map(run, trees, [name] * 2)
    assert plain[2], "passes as it is"
    for line in plain[2]:
        assert re.search(r" - (AssertionError|Failed): .+ .", line), f"says nothing: {line}"
    assert not solved[2]
    assert len(solved[1]) == len(plain[1] + plain[2])
    assert solved[0] == plain[0], "what the exercise is not about has changed"


def test_all_solutions_fit(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    unfit = [problem for name in NAMES if (problem := apply_patch(tree, name, "--check"))]
    assert not unfit, "\n".join(unfit)


@pytest.mark.parametrize("name", NAMES)
def test_page(name):
    """Every page has its parts, names files that exist, and tells how large the solution is."""
    page = (FOLDER / f"{name}.md").read_text()
    heads = [line for line in page.splitlines() if re.match("##? ", line)]
    assert len(heads) == len(SECTIONS)
    assert all(head.startswith(section) for head, section in zip(heads, SECTIONS, strict=True))
    assert heads[0].startswith(f"# {int(name[:2])}. ")
    assert f"python -m pytest {EXERCISES}/test_{name.replace('-', '_')}.py" in page
    patch = (FOLDER / "solutions" / f"{name}.patch").read_text()
    new = set(re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)$", patch, re.MULTILINE))
    for file in {*re.findall(r"`(?:python )?([\w/]+\.py)\b", page)} - new:
        assert (ROOT / file).is_file(), f"{file} does not exist"
    (size,) = re.findall(r"The reference takes about (\d+) lines", page)
    added = len(re.findall(r"^\+(?!\+\+ )", patch, re.MULTILINE))
    assert abs(added - int(size)) <= max(3, added // 6), f"the reference takes {added} lines"
    assert added <= 100
    touched = re.findall(r"^\+\+\+ b/(.+)$", patch, re.MULTILINE)
    assert touched and all(
        re.fullmatch(r"(tools/|around/(\w+/)?)?\w+\.py", file) for file in touched
    ), touched
    assert all(f"`{file}" in page for file in touched), "the hint names the files to change"


def test_the_tables_list_all():
    """An exercise that nobody finds; a group that begins with the hardest."""
    text = (FOLDER / "README.md").read_text()
    row = r"^\| (\d+) \| \[(.+)\]\((.+)\.md\) \| (.+) \| (★{1,3}) \| .+ \|$"
    groups = [re.findall(row, part, re.MULTILINE) for part in text.split("\n**")]
    rows = [row for group in groups for row in group]
    assert sorted(file for _, _, file, _, _ in rows) == NAMES
    assert sorted(int(number) for number, *_ in rows) == [*range(1, len(NAMES) + 1)]
    for number, title, file, modules, _ in rows:
        page = (FOLDER / f"{file}.md").read_text()
        assert page.startswith(f"# {number}. {title}\n") and int(file[:2]) == int(number)
        assert all(f"`{module}`" in page for module in re.findall(r"`(.+?)`", modules))
    for group in groups:
        order = [(len(stars), int(number)) for number, *_, stars in group]
        assert order == sorted(order), "in rising difficulty"
    solutions = {file.stem for file in (FOLDER / "solutions").glob("*.patch")}
    tests = {file.stem.removeprefix("test_") for file in FOLDER.glob("test_*.py")}
    assert solutions == {*NAMES} and tests == {name.replace("-", "_") for name in NAMES}
