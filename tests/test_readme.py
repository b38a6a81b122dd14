"""The README: every command of its shell blocks runs, and its tables match their records."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, SHAKESPEARE

import generate
from tools import bench, pictures, report

README = (ROOT / "README.md").read_text()
FOLDERS = (".", "docs", "benchmarks", "checkpoints", "course/exercises")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
QUANTISATION = (ROOT / "docs" / "quantisation.md").read_text()


def shell_lines(text):
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


LINES = shell_lines(README)
INSTALL = "pip install -e . && python generate.py --seed 1"
REAL = [  # a real model; the tests have one that needs no hub, see test_real_model.py
    'pip install -e ".[hf]" huggingface_hub && '
    "hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir path/to/SmolLM2"
]
TEST = 'pip install -e ".[test]" && python -m pytest'
COMMANDS = [line for line in LINES if line.startswith(("python ", "torchrun "))]
ALSO_RUN = [
    line
    for name in ("quantisation", "machines")
    for line in shell_lines((ROOT / "docs" / f"{name}.md").read_text())
]
ON_A_GPU = shell_lines((ROOT / "docs" / "gpu.md").read_text())
SLOW, RAY = "python -m pytest -m slow", "tests/test_ray_serve.py"


def test_the_first_commands_are_what_ci_runs():
    """A missing install step shows only on a new machine, so CI starts from one."""
    others = [line for line in LINES if line not in COMMANDS]
    assert others[0].startswith("git clone ") and others[1].startswith('pip install "torch')
    assert others[2:] == [INSTALL, *REAL, TEST]
    (needed,) = re.findall(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text())[:1]
    assert f'"{needed}"' in others[1]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {INSTALL, TEST} <= {*ci} and SLOW in README
    # In two parts, as one part runs alone.
    assert f"{SLOW} --ignore {RAY}" in ci and any(f"{SLOW} -n 0 {RAY}" in line for line in ci)


def test_the_text_is_that_of_the_command(capfd):
    """The text is another command's, or an older sampler's."""
    assert generate.main(["--seed", "1", "--device", "cpu"]) == 0
    shown = README.partition("```\nsampling: ")[2].partition("\n...")[0]
    told, _, text = shown.partition("\n")
    out, err = capfd.readouterr()
    assert text and out.startswith(text + "\n") and err.startswith(f"sampling: {told}\n")


@pytest.mark.parametrize("command", [*COMMANDS, *ALSO_RUN, *ON_A_GPU])
def test_command_is_understood(command):
    """An option is gone, or a file has moved; the slow tests also run the commands."""
    launcher, *words = shlex.split(command)
    assert launcher in ("python", "torchrun")
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    assert (ROOT / words[at]).is_file()
    for name, module in {"generate.py": generate, "tools/bench.py": bench}.items():
        if words[at] == name:
            module.parse_args(words[at + 1 :])


@contextlib.contextmanager
def serving(words):
    """Run a server until it serves, and end it as a user would."""
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any("serving" in line for line in process.stderr), "it never served"
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
        assert process.wait(timeout=120) == 0


def succeeds(words, **options):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300, **options}
    run = subprocess.run(words, **options)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    return run.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, *ALSO_RUN])
def test_command_runs(command, tmp_path):
    """Every other command works as it stands, with the bundled model in place of the reader's."""
    command = command.replace("path/to/text.txt", str(ROOT / "course" / "README.md"))
    command = re.sub(r"path/to/new-\S+", str(tmp_path / "new"), command)
    words = shlex.split(re.sub(r"path/to/\S+", str(SHAKESPEARE), command))
    launchers = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    words = [sys.executable, *launchers[words[0]], *words[1:]]
    if "server.py" in words:
        with serving(words):
            return
    assert succeeds(words, input="Who goes there?\n") or (tmp_path / "new").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_runs(code):
    """An example is out of date."""
    server = contextlib.nullcontext()
    if "127.0.0.1:8000" in code:
        server = serving([sys.executable, "server.py", "--port", "8000"])
    with server:
        assert succeeds([sys.executable, "-c", code])


# Arguments: scripts, which are started in turn with --help.
START = """
import os, runpy, sys
# Once, as they take seconds: the scripts run in forks of this process.
import safetensors.torch, sentencepiece, torch._dynamo, torch.distributed.nn

for script in sys.argv[1:]:
    if not os.fork():
        sys.path[0], sys.argv = os.path.dirname(script), [script, "--help"]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(bool(end.code))  # the usual end takes a second
    if os.wait()[1]:
        sys.exit(f"this one failed: {script}")
"""


def test_scripts_act_on_their_own_checkout(tmp_path):
    """A script measures another, installed checkout instead of its own; an error where none is
    installed."""
    copy, other = tmp_path / "copy", tmp_path / "other"
    for folder in ("tools", "course", "checkpoints"):
        shutil.copytree(ROOT / folder, copy / folder)
    (other / "tools").mkdir(parents=True)
    for name in (*report.MODULES, "tools/__init__"):
        if name in report.MODULES:
            shutil.copy(ROOT / f"{name}.py", copy)
        (other / f"{name}.py").write_text(f"raise ImportError('{name} of another checkout')")
    scripts = [copy / f"tools/{name}.py" for name in ("bench", "convert", "gpu_check")]
    scripts += [copy / "checkpoints/train.py", *sorted(copy.glob("course/[0-9]*.py"))]
    words = [sys.executable, "-c", START, *scripts]
    said = succeeds(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(other)})
    assert said.count("usage: ") == len(scripts) == 15


def test_only_an_editable_install():
    """A wheel installs modules such as `model` without the page and the bundled model."""
    pytest.importorskip("setuptools")
    words = [sys.executable, "-c", "import backend; backend.build_wheel('.')"]
    run = subprocess.run(words, cwd=ROOT / "tools", capture_output=True, text=True)
    assert run.returncode == 1 and "pip install -e" in run.stderr


def test_generated_pages_are_up_to_date():
    """A number was typed by hand, a record was not reported, or its table stays when it is gone;
    the counts of lines are old. `python tools/bench.py report` writes them."""
    for name, parts in report.PARTS.items():
        text = (ROOT / name).read_text()
        assert text == report.page(name), name
        records = [*report.RECORDS.glob("*.json")] if "benchmarks" in name else []
        assert len(re.findall("^<!-- /", text, re.MULTILINE)) == len(parts) + len(records), (
            "a part that nothing fills"
        )
    assert len(records) > 10


def test_pictures_are_up_to_date():
    """A picture shows older figures, or no page shows it. The bytes are not compared, as each
    version of matplotlib makes its own."""
    for name, (rows, notes) in report.drawings().items():
        svg = (ROOT / name).read_text()
        assert pictures.drawn(svg) == pictures.drawn(pictures.draw(rows, notes)), name
        page = (ROOT / "benchmarks" / "README.md").read_text()
        assert f"{name.removeprefix('benchmarks/')})" in page, name


def test_each_figure_has_one_value():
    """Rows did not name their model; one sequence had 20.2 and 14.2 tokens/s without a reason; a
    share of vLLM's lead mixed two kinds of ratio."""
    speed = " ".join((ROOT / "benchmarks/README.md").read_text().split())
    for line, about in zip(report.summary().splitlines()[3:], report.PAGE["summary"]):
        run, row = report.latest(about["record"]), about["row"]
        assert run["hardware"] == "AMD EPYC (AVX512), 2 threads"
        assert line.startswith(f"| {run['model'].replace('shakespeare', 'bundled')}, "), line
        form = row[:4] if row.startswith("int") else "bfloat16"
        assert line.split(" |")[0].endswith(f", {form}") and "--dtype" not in run["command"]
    files = [*report.RECORDS.glob("versus-1*.json")]  # 110m and 1b: of random weights
    records = [json.loads(file.read_text()) for file in files]
    rows = [(label, row) for run in records for label, row in run["runs"].items()]

    def ahead(engine: str, part: str) -> list[float]:
        """Return an engine's speeds over ours in such rows, the least first."""
        return sorted(row[engine][0] / row["kilolm"][0] for label, row in rows
                      if part in label and engine in row)  # fmt: skip

    def one_sequence(record: str) -> float:
        """vLLM's speed over ours."""
        row = report.latest(record)["runs"]["one sequence"]
        return row["vllm"][0] / row["kilolm"][0]

    ratios = sorted(row["vllm"][0] / row["kilolm"][0] for _, row in rows)
    behind = sorted(map(one_sequence, ("versus-110m-zen4", "versus-1b-zen4")))
    assert [*behind, one_sequence("versus-110m-spr")] == ratios[:3]
    low, high = sorted(round(100 * (1 / ratio - 1)) for ratio in behind)
    assert (
        f"For one sequence, this engine is ahead of vLLM by {low} to {high} % on the Zen 4" in speed
    )
    assert ratios[2] == pytest.approx(1, abs=0.02)
    low, high = (f"{100 * (ratio - 1):.0f}" for ratio in (ratios[3], ratios[-1]))
    assert f"vLLM is ahead by {low} to {high} %" in speed
    level, *others = ahead("llama_cpp", "one sequence")
    assert level == pytest.approx(1, abs=0.03)
    low, high = (f"{100 * (ratio - 1):.0f}" for ratio in (others[0], others[-1]))
    assert f"and otherwise ahead by {low} to {high} %" in speed
    slow = ahead("llama_cpp", "prefill")
    high, low = (f"{1 / ratio:.1f}" for ratio in (slow[0], slow[-1]))
    assert f"it takes {low} to {high} times as long" in speed
    beside = report.latest("versus-1b-zen5")
    figures = (
        report.latest("latency-1b-prompt512")["runs"]["batch 1"]["decode_tok_s"],
        beside["runs"]["one sequence"]["kilolm"],
    )
    here, there = (report.number(figure[0]) for figure in figures)
    assert f"makes {here} tok/s here, and {there} in the table" in speed
    assert figures[0][1] < figures[1][2], "their spreads overlap"


def test_the_first_page_stops():
    """The page grows until nobody reads it; it counts a file too few, or names one that is gone."""
    assert len(README.splitlines()) <= 110 and len(README.split()) <= 1300
    assert max(map(len, README.splitlines())) <= 120
    code = "import sys, generate; generate.main(sys.argv[1:]); print('|', *sys.modules)"
    loaded = succeeds([sys.executable, "-c", code, "--max-tokens", "3", "--device", "cpu"])
    names = {*loaded.rpartition("|")[2].split()}
    assert names & {*report.MODULES} == {*report.NEEDED}
    tree = README.partition("## Its files")[2]
    assert {*re.findall(r"(\w+)\.py", tree.split("```")[1])} == {
        *report.MODULES,
        "bench",
        "convert",
    }
    folders = {file.name for file in ROOT.iterdir() if file.is_dir() and file.name[0] not in "._"}
    assert {*re.findall(r"(\w+)/ ", tree.split("```")[1])} == folders - {"kilolm.egg-info"}


def test_the_chinese_page():
    """It has another command, link, table, file or figure than README."""

    def shared(page):
        """Return the code without its remarks; then links, tables, marks and figures."""
        page = re.sub(r"\[\S+\]\(README\S*\)", "", page)  # each links to the other
        code = re.sub(r"(?<=\S) {3,}\S.*", "", "".join(page.split("```")[1::2]))
        patterns = r"\]\(([^)]+)\)", r"^\|.*", r"^<!-- .*", r"\d[\d,.]+\d"
        return code, *(sorted(re.findall(each, page, re.MULTILINE)) for each in patterns)

    assert shared((ROOT / "README.zh-CN.md").read_text()) == shared(README)


def test_papers():
    """The table of files leaves out a paper that a header names."""
    table = report.file_table()
    for name in report.MODULES:
        header = (ROOT / f"{name}.py").read_text().split('"""')[1]
        for paper in re.findall(r"arXiv:(\d{4}\.\d{5})", header):
            assert f"abs/{paper})" in table, f"{name}.py: {paper}"


def test_links_point_to_their_lines():
    """A link to a line of a file that does not define its name."""
    with pytest.raises(ValueError, match=r"Engine.nothing, which scheduler.py does not define"):
        report.line_links("[`Engine.nothing`](scheduler.py#L1)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """A page or a heading has another name now, or a file that a page names has moved."""
    text = page.read_text()
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), link
    for file in re.findall(r"`((?:tools|tests|docs)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / file).exists(), file


def anchors(text):
    """The anchors that GitHub gives a page's headings: `## What it does` has what-it-does."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_figures_about_fewer_bits():
    """docs/quantisation.md has a figure that no record has, or that was measured anew."""
    paragraphs, named, figures = QUANTISATION.split("\n\n"), [], []
    for text in paragraphs:
        records = re.findall(r"`(\w[\w.]*-[\w.-]+)`", text)
        records = [name for name in records if (report.RECORDS / f"{name}.json").exists()]
        named += records
        if records:
            runs = [json.loads((report.RECORDS / f"{name}.json").read_text()) for name in records]
            figures = [value for run in runs for row in report.medians(run).values()
                       for value in row.values()]  # fmt: skip
        shown = {report.number(value) for value in figures}
        if text.startswith("|"):
            cells = [cell for line in text.splitlines()[2:] for cell in line.split(" | ")[1:]]
            assert {cell.rstrip(" |") for cell in cells} <= shown, text
        elif records:  # without names, and what is in parentheses
            words = re.sub(r"`[^`]*`|\([^)]*\)", "", text)
            assert {*re.findall(r"(?<![\w-])\d+(?:\.\d+)?(?![\w-])", words)} <= shown, text
    assert len(named) == 8 and "quality-smollm2-135m" in named
