"""How small it is, and what needs what. A fork that means to grow deletes this file: that is all.

Small is a feature, so it is tested; and so is that each technique is a file which can be left out.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

import pytest
from conftest import DRAFT, ROOT

from tools.report import ENGINE, MODULES, TECHNIQUES, code_lines, code_nodes

# --- How large ------------------------------------------------------------------------------------


def test_counts_code_only():
    """A comment that costs, or a statement that is free."""
    source = (
        '"""Doc\n\nstring."""\n\n# comment\nx = [  # trailing\n    1,\n]\n\n\n'
        'async def f():\n    """Doc."""\n    return """a\nb"""\n'
    )
    assert code_lines(source) == 3 + 3  # the list; a head, and a string of two lines
    assert code_nodes(source) == 4 + 3  # =, x, the list, 1; def, return, the string


# Nodes bound what there is to understand, and the density bounds folding. Lines cost little; they
# are bounded so that the files stay an evening's reading. What does not fit is made simpler.
@pytest.mark.parametrize(
    ("names", "most_lines", "most_nodes", "most_in_a_line"),
    [(ENGINE, 1232, 7950, 6.7), (("server",), 300, 1700, 6.4), (MODULES, 4530, 27885, 6.9)],
    ids=["the engine", "the server", "all"],
)
def test_budget(names, most_lines, most_nodes, most_in_a_line):
    """A feature is added without weighing what it costs, or is folded into few lines that nobody
    can read. See report.py for what is counted."""
    sources = {name: (ROOT / f"{name}.py").read_text() for name in names}
    sizes = {name: (code_lines(text), code_nodes(text)) for name, text in sources.items()}
    lines, nodes = map(sum, zip(*sizes.values()))
    assert lines <= most_lines, sizes
    assert nodes <= most_nodes, sizes
    assert nodes / lines <= most_in_a_line, sizes


def test_tools_budget():
    """The tools beside the engine grow larger than what they measure. plan.py is not counted."""
    tools = set(ROOT.glob("tools/*.py")) - {ROOT / "tools/plan.py"}
    sizes = {file.name: code_lines(file.read_text()) for file in tools}
    assert sum(sizes.values()) <= 2300, sizes


def test_only_tables_keep_a_layout_of_their_own():
    """Code is folded past the formatter. A table of data is a statement outside all functions that
    assigns a dict, list, set or tuple, or what is made of one."""
    displays = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.Call, ast.BinOp)
    for file in (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")):
        source = file.read_text()
        tables = {
            node.end_lineno
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, displays)
        }
        for number, line in enumerate(source.splitlines(), 1):
            skips = "# fmt: " in line and '"# fmt: ' not in line
            assert not skips or number in tables, f"{file.name}:{number}"


def test_every_module_is_counted_and_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {file.stem for file in ROOT.glob("*.py")} == {*MODULES}
    assert sorted(project["tool"]["setuptools"]["py-modules"]) == sorted(MODULES)


def test_no_line_is_longer_than_100():
    for file in (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{file.name}:{number}"


# --- What needs what ------------------------------------------------------------------------------


def imports(name):
    """What a module imports anywhere in it, by the first part of its name."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {each.partition(".")[0] for each in found}


def test_doors():
    """A model that knows of files, a scheduler that knows a technique, an engine that needs a tool;
    two files that import each other, and so cannot be read one after the other."""
    doors = {name: imports(name) for name in MODULES}
    assert doors["model"] - sys.stdlib_module_names == {"torch"}
    assert doors["scheduler"].isdisjoint((*TECHNIQUES, "packed", "compiling", "generate"))
    assert "tools" not in set.union(*doors.values())
    TopologicalSorter({name: found & {*MODULES} for name, found in doors.items()}).prepare()


OPTIONAL = (*TECHNIQUES, "packed", "compiling")
NEEDED_BY = {  # a command line -> what it needs, and says so where that is not there
    "--quantize int8": {"quantize"}, "--dtype bfloat16": {"packed"},
    "--compile": {"compiling", "packed"},
    "--attention flex --n 2": {"flex"},
    "--speculate 2": {"speculative"}, f"--draft-checkpoint {DRAFT}": {"speculative"},
}  # fmt: skip
# Argument: a JSON list of trees, each with command lines. Prints what came of each, a line each.
PROGRAM = """
import contextlib, io, json, os, sys
import torch._dynamo  # once, as it takes seconds: the trees' processes are forked from here

def run(folder, commands):
    sys.path[0] = folder
    # Where this project is installed, what is not in the tree would still be found.
    sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
    torch.set_num_threads(1)
    from generate import SamplingParams, main
    from llm import LLM

    def say(command):
        out, err = io.StringIO(), io.StringIO()
        words = "--device cpu --prompt ROMEO: --temperature 0 --max-tokens 12 " + command
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words.split())
        return status, out.getvalue(), err.getvalue()

    llm = LLM(folder + "/checkpoints/shakespeare", device="cpu", num_blocks=16)
    params = SamplingParams(temperature=0, max_tokens=12)
    requests = llm.generate(["ROMEO:", "First Citizen:"], params)
    texts = [say("")[:2], *(request.outputs[0].text for request in requests)]
    refused = {command: say(command) for command in commands}
    try:
        import server
    except ImportError:
        server = None
    return texts, refused, server is not None, [*sys.modules]

for tree in json.loads(sys.argv[1]):
    if not os.fork():
        print(json.dumps(run(*tree)), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"this tree failed: {tree}")
"""


def test_techniques_can_be_left_out(tmp_path):
    """A technique that the plain loop or the scheduler cannot run without; another text without it;
    a traceback where it is asked for."""
    left_out = [(), *((name,) for name in OPTIONAL), OPTIONAL]
    trees = []
    shutil.copytree(ROOT / "checkpoints", tmp_path / "checkpoints")
    for i, names in enumerate(left_out):
        tree = tmp_path / str(i)
        tree.mkdir()
        (tree / "checkpoints").symlink_to(tmp_path / "checkpoints")
        for name in {*MODULES} - {*names}:
            shutil.copy(ROOT / f"{name}.py", tree)
        trees.append((str(tree), [words for words, need in NEEDED_BY.items() if need & {*names}]))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", PROGRAM, json.dumps(trees)]
    run = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    for names, (texts, refused, serves, loaded) in zip(left_out, found, strict=True):
        (status, text), romeo, citizen = texts
        assert (status, text) == (0, f"{romeo}\n") and romeo and citizen
        assert texts == found[0][0], names
        assert {*names}.isdisjoint(loaded)
        assert serves == {*names}.isdisjoint(("server", "openai_api", "structured"))
        for command, (status, out, err) in refused.items():
            (line,) = err.splitlines()
            assert (status, out) == (2, "") and line.startswith("generate.py: error: "), err
            assert any(f"'{name}'" in line for name in NEEDED_BY[command] & {*names}), err
