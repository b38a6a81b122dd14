"""What may import what, and what can be left out: a fork keeps this file.

The root is the engine; each folder of around/ is one room with one door, its __init__.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize

from conftest import DRAFT, ROOT

from around.fast.attending import FastLayerCache, StepLayerCache
from kv_cache import StaticLayerCache
from paged import PagedLayerCache

# Each room imports those before it alone, also inside functions.
ORDER = [
    "model", "settings", "machine", "experts", "kv_cache", "quantize", "paged", "folder", "fast",
    "sampling", "tp", "structured", "scheduler", "speculative", "api", "start", "llm", "server",
    "generate",
]  # fmt: skip
FOLDERS = ("folder", "fast", "api", "start")
FILES = [*ROOT.glob("*.py"), *ROOT.glob("around/**/*.py")]


def name_of(file):
    """Return a file's name as modules give it. Example: around/folder/config.py -> folder.config;
    around/fast/__init__.py -> fast."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("around", "__init__"))


NAMES = {name_of(file) for file in FILES}


def imports(file):
    """Return the modules of the project, and of others, that a file imports anywhere in it."""
    package = file.parent.relative_to(ROOT).parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package * bool(node.level), *filter(None, [node.module])])
            for alias in node.names:  # a module of a package, or a name in a module
                whole = f"{base}.{alias.name}"
                found.add(whole if whole.removeprefix("around.") in NAMES else base)
    return {name.removeprefix("around.") for name in found} - {"around"}


def test_each_room_is_in_the_order():
    """Compare the rooms of the tree with ORDER. Catches: a new file or folder that the order leaves
    out."""
    rooms = {name_of(file).partition(".")[0] for file in FILES} - {""}
    assert rooms == {*ORDER} and len(ORDER) == len({*ORDER})
    assert {file.stem for file in ROOT.glob("*.py")} == {*ORDER} - {*FOLDERS} - {
        "settings", "machine", "structured",
    }  # fmt: skip


def test_doors_and_order():
    """Check what each file imports. Catches: a room that reaches past another's door, so that
    neither can be replaced; two rooms that need each other, so that neither can be read first; an
    engine that needs a tool."""
    for file in FILES:
        name = name_of(file)
        own = name.partition(".")[0]
        for other in imports(file):
            room, _, inside = other.partition(".")
            assert room not in ("tools", "tests", "course"), f"{name} imports {other}"
            if other in NAMES and room != own:
                assert not inside, f"{name} reaches past the door of {room}: {other}"
                assert ORDER.index(room) < ORDER.index(own), f"{name} imports {other}"


def test_what_the_first_files_need():
    """Check what model.py, kv_cache.py and paged.py import. Catches: a model that knows of files; a
    cache that knows the machine."""
    for name, needs in dict(model=[], kv_cache=["model"], paged=["kv_cache", "model"]).items():
        found = {each.partition(".")[0] for each in imports(ROOT / f"{name}.py")}
        assert found - sys.stdlib_module_names == {"torch", *needs}, name


def test_fast_paths_override_two_methods():
    """Look for what each fast class overrides of the root's. Catches: a fast class that also
    changes what a class of the root plans or keeps: who edits the root would see no effect, and
    could not know why."""
    found = [kind for base in (StaticLayerCache, PagedLayerCache) for kind in derived(base)]
    assert {FastLayerCache, StepLayerCache} <= {*found}
    for kind in found:
        of_root = {
            name
            for base in (StaticLayerCache, PagedLayerCache)
            if issubclass(kind, base)
            for name in dir(base)
        }
        made = {name for name in vars(kind) if not name.startswith("__")}
        assert made & of_root <= {"attend", "attend_row"}, kind


def derived(kind):
    return [each for sub in kind.__subclasses__() for each in (sub, *derived(sub))]


# --- Every wing can go ----------------------------------------------------------------------------

TECHNIQUES = ("quantize", "speculative", "tp", "experts", "llm", "server")
WINGS = ("around/fast", "around/api", "around/structured.py")
LEFT_OUT = (*(f"{name}.py" for name in TECHNIQUES), *WINGS)
NEEDED_BY = {  # a command line -> what it needs, and says so where that is not there
    "--quantize int8": "quantize", "--speculate 2": "speculative",
    f"--draft-checkpoint {DRAFT}": "speculative", "": "fast",
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
    from generate import main

    def say(command):
        out, err = io.StringIO(), io.StringIO()
        words = "--device cpu --prompt ROMEO: --temperature 0 --max-tokens 12 " + command
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words.split())
        return status, out.getvalue(), err.getvalue()

    texts = [say(f"--plain {more}")[:2] for more in ("", "--n 2 --num-blocks 16")]
    refused = {command: say(command) for command in commands}
    return texts, refused, [*sys.modules]

for tree in json.loads(sys.argv[1]):
    if not os.fork():
        print(json.dumps(run(*tree)), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"this tree failed: {tree}")
"""


def test_every_wing_can_go(tmp_path):
    """Generate in copies of the tree that each lack one technique, or all, and compare the texts.
    Catches: an engine that cannot run without a technique, its server or its fast paths; another
    text without them; a traceback where one is asked for."""
    trees = []
    cases = [(), *((name,) for name in LEFT_OUT), LEFT_OUT]
    for i, names in enumerate(cases):
        tree = tmp_path / str(i)
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "around", tree / "around", ignore=leave)
        for file in ROOT.glob("*.py"):
            shutil.copy(file, tree)
        (tree / "checkpoints").symlink_to(ROOT / "checkpoints")
        for name in names:
            path = tree / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        asked = [words for words, need in NEEDED_BY.items() if any(need in name for name in names)]
        trees.append((str(tree), asked))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", PROGRAM, json.dumps(trees)]
    run = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    for names, (texts, refused, loaded) in zip(cases, found, strict=True):
        assert texts == found[0][0] and all(status == 0 and text for status, text in texts), names
        gone = {name.removesuffix(".py").replace("/", ".") for name in names}
        assert gone.isdisjoint(loaded)
        for command, (status, out, err) in refused.items():
            (line,) = err.splitlines()
            assert (status, out) == (2, "") and line.startswith("generate.py: error: "), err
            assert NEEDED_BY[command] in line, err


def names_in(tree):
    """Yield whatever a file defines, assigns or imports, also in classes and functions."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                yield getattr(node, "id", None) or node.attr
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)


def told(file):
    """Return what a file says to its reader: Markdown whole, and of Python comments and strings."""
    if file.suffix == ".md":
        return file.read_text()
    with file.open("rb") as source:
        kinds = tokenize.COMMENT, tokenize.STRING
        return "\n".join(each.string for each in tokenize.tokenize(source.readline)
                         if each.type in kinds)  # fmt: skip


def test_pointers():
    """Look for each name that a comment or a page points to. Catches: a comment that sends the
    reader to a function that has moved, or has gone."""
    python = [*FILES, *ROOT.glob("tools/*.py")]
    names = {file.stem: {*names_in(ast.parse(file.read_text()))} for file in python}
    # A name of a file, a dot, a name in it; no path, and no code that calls or assigns it.
    pointer = re.compile(rf"(?<![\w./'{{-])({'|'.join(names)})\.([A-Za-z]\w*)(?![\w(.]*[(=\"])")
    names["model"] |= {"safetensors", "named_parameters"}  # a file; a method of modules
    names["memory"] |= {"high", "max"}  # Linux's names of limits
    names["tokenizer"] |= {"model"}  # a file
    texts = [*python, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("course/*.md"),
             *ROOT.glob("tests/*.py")]  # fmt: skip
    wrong = [(file.name, found[0]) for file in texts for found in pointer.finditer(told(file))
             if found[2] not in names[found[1]] | {"py", "json", "md", "toml"}]  # fmt: skip
    assert not wrong
