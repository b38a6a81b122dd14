"""The exercises: each test fails on the tree as it is, and passes with its reference solution. Both
are tried in copies of the tree, in processes of their own."""

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
KINDS = dict.fromkeys(("05-lfu-eviction", "27-sink"), pytest.mark.slow)  # what a change tries
TRIED = [pytest.param(name, marks=KINDS.get(name, pytest.mark.nightly)) for name in NAMES]


def copy_tree(tree: Path) -> Path:
    """Copy the modules, the tools and the exercises; the checkpoints are only linked to."""
    tree.mkdir()
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tree)
    for folder in ("around", "tools", EXERCISES):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "checkpoints").symlink_to(ROOT / "checkpoints", target_is_directory=True)
    return tree


def apply_patch(tree: Path, name: str, *options: str) -> str:
    """Apply a solution's patch as a learner would; return what is wrong. The copy is no repository
    of its own, and must not be taken for a part of one around it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    words = ["git", "apply", "--verbose", *options, f"{EXERCISES}/solutions/{name}.patch"]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode == 0 and "Skipped" not in done.stderr:
        return ""
    return f"{name}.patch does not fit: see {EXERCISES}/solutions/README.md\n{done.stderr}"


def run(tree: Path, name: str) -> tuple[list[str], list[str]]:
    """Run an exercise's tests. Returns the lines that say PASSED, and those that say FAILED."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "1000"}  # else messages are cut short
    file = f"{EXERCISES}/test_{name.replace('-', '_')}.py"
    words = [sys.executable, "-m", "pytest", "-q", "-rfEsp", file]
    done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert not re.search("^(ERROR|SKIPPED) ", output, re.MULTILINE), output
    lines = [line for line in output.splitlines() if f" {file}::" in line]
    passed, failed = ([x for x in lines if x.startswith(word)] for word in ("PASSED", "FAILED"))
    return passed, failed


@pytest.mark.parametrize("name", TRIED)
def test_fails_as_it_is_and_passes_when_solved(name, tmp_path):
    """Run an exercise's tests in the tree as it is, and in one with the solution. Catches: an
    exercise that passes before anything is solved, or breaks instead of saying what to do; a
    solution that does not pass."""
    trees = copy_tree(tmp_path / "plain"), copy_tree(tmp_path / "solved")
    problem = apply_patch(trees[1], name)
    assert not problem, problem
    with ThreadPoolExecutor(2) as pool:
        (passed, failed), (solved, broken) = pool.map(run, trees, [name] * 2)
    assert failed, "passes as it is"
    for line in failed:
        assert re.search(r" - (AssertionError|Failed): .+ .", line), f"says nothing: {line}"
    assert not broken and len(solved) == len(passed + failed)


def test_solutions_fit(tmp_path):
    """Check that the patch of each solution applies to the tree. Catches: a solution that no longer
    fits."""
    tree = copy_tree(tmp_path / "tree")
    for name in NAMES:
        problem = apply_patch(tree, name, "--check")
        assert not problem, problem
