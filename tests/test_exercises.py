"""The exercises: each test fails on the tree as it is, and passes with its reference solution.

Both are tried in copies of the tree, in processes of their own. A solution must also leave alone
what the exercise is not about: a smoke test says the same tokens before and after.
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


def test_pages_and_solutions(tmp_path):
    """A solution that no longer fits; a page that names a file which is gone, or another size than
    the solution's; an exercise that nobody finds; a group that begins with the hardest."""
    tree, table = copy_tree(tmp_path / "tree"), (FOLDER / "README.md").read_text()
    for name in NAMES:
        problem = apply_patch(tree, name, "--check")
        assert not problem, problem
        page = (FOLDER / f"{name}.md").read_text()
        patch = (FOLDER / "solutions" / f"{name}.patch").read_text()
        assert page.startswith(f"# {int(name[:2])}. ")
        assert f"python -m pytest {EXERCISES}/test_{name.replace('-', '_')}.py" in page
        touched = re.findall(r"^\+\+\+ b/(.+)$", patch, re.MULTILINE)
        assert touched and all(f"`{file}" in page for file in touched), f"{name}: {touched}"
        for file in {*re.findall(r"`(?:python )?([\w/]+\.py)\b", page)} - {*touched}:
            assert (ROOT / file).is_file(), f"{name}: {file} does not exist"
        (size,) = re.findall(r"The reference takes about (\d+) lines", page)
        added = len(re.findall(r"^\+(?!\+\+ )", patch, re.MULTILINE))
        assert abs(added - int(size)) <= max(3, added // 6) and added <= 100, f"{name}: {added}"
    row, listed = r"^\| (\d+) \| \[.+\]\((.+)\.md\) \| .+ \| (★{1,3}) \| .+ \|$", []
    for group in table.split("\n**"):
        rows = re.findall(row, group, re.MULTILINE)
        order = [(len(stars), int(number)) for number, _, stars in rows]
        assert order == sorted(order), "in rising difficulty"
        assert all(file.startswith(f"{int(number):02}-") for number, file, _ in rows)
        listed += [file for _, file, _ in rows]
    assert sorted(listed) == NAMES
