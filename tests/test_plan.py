"""How many machines: the engine on a clock that only a simulated step moves."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sampling
from around.folder.weights import load_model
from model import Config
from paged import Row
from around.folder.tokenizer import Tokenizer
from tools import load, plan, report
from tools.load import Arrival, Limits, Load

pytestmark = pytest.mark.usefixtures("one_thread")
# A step takes 1 s, and each of its tokens 0.1 s.
TIMES = plan.Times(
    seconds=[1.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0], inbound=0.0, outbound=0.0,
    vocab_size=100, max_seq_len=64,
    max_num_seqs=2, max_num_batched_tokens=6, num_blocks=20, block_size=4, most=100, max_queue=50,
)  # fmt: skip
LOAD = Load("", None, None, 40, (4, 20), (1, 9), 3, 8, 100, {})
FIGURES = Limits(5.0, 5.0)


def test_what_a_forward_has_to_do():
    """The docstring's example; rows that are padded, and a group of two blocks at least."""
    rows = [Row([0, 1], 5, [7]), Row([2], 3, [7]), Row([3, 4], 4, [7, 7])]
    assert plan.work_of(rows, 4, 100) == [1, 1, 3, 4, 2, 6, 8]
    wider = [Row([0, 1, 2], 9, [7]), *rows[:2], *rows[1:2], *rows[2:] * 2]
    # One group of four rows of three blocks, and one of two prompts; or each row alone.
    assert plan.work_of(wider, 4, 100) == [1, 2, 6, 8, math.sqrt(8), 16, 20]
    assert plan.work_of(wider, 4, 3) == [1, 2, 6, 8, math.sqrt(8), 13, 17]


def test_a_schedule_worked_out_by_hand():
    """A step's time that is counted twice, a token stamped at the start of its step, or what comes
    during a step joining it."""
    arrivals = [Arrival(0.0, [*range(4)], 3), Arrival(0.5, [*range(50, 57)], 2)]
    first, second = plan.simulate(TIMES, iter(arrivals)).outcomes
    # 0.0 .. 1.4: A's 4 tokens. 1.4 .. 3.0: 1 of A, 5 of B, which is the budget. 3.0 .. 4.3: 1 of
    # A, 2 of B. 4.3 .. 5.4: 1 of B.
    assert [*first.times] == pytest.approx([1.4, 4.3]) and first.tokens == 3
    assert [*second.times] == pytest.approx([4.3, 5.4]) and second.tokens == 2
    assert second.ttft == pytest.approx(3.8) and second.tpot == pytest.approx(1.1)
    late = replace(TIMES, inbound=0.75, outbound=0.25)
    again = plan.simulate(late, iter(arrivals)).outcomes
    # The first begins at 0.75, and the second joins at 1.25, again during its first step.
    assert again[1].ttft == pytest.approx(3.8 + 0.75 + 0.25) and again[1].tpot == pytest.approx(1.1)
    # One from 0.0 to 4.3, the other from 0.5 to 5.4: 9.2 s in 5.4 s.
    assert plan.simulate(TIMES, arrivals).figures["inside"] == pytest.approx(9.2 / 5.4)


def test_a_request_that_comes_in_holds_the_step_up():
    """Steps that took no longer while the server was reading requests: first tokens were predicted
    too early, or, with a delay that was fitted to make up for it, too late under a light load."""
    times = replace(TIMES, seconds=[*TIMES.seconds[:-1], 0.5])
    asked = [Arrival(0.0, [1] * 4, 3), Arrival(0.5, [2] * 4, 1), Arrival(0.6, [3] * 4, 1)]
    ends = [o.times[-1] for o in plan.simulate(times, asked).outcomes]
    # 0.0 .. 1.4, and 1 s for the two that came. The first of them joins: 2.4 .. 3.9, and has ended.
    # 3.9 .. 5.4: the third token of the first, and the other.
    assert ends == pytest.approx([5.4, 3.9, 5.4])


@pytest.mark.parametrize("policy", plan.POLICIES)
def test_nothing_is_lost_and_nothing_is_drawn(policy):
    """Requests that are lost between replicas; a real clock's time in the figures; a simulation
    that leaves its clock behind."""
    small = replace(TIMES, num_blocks=9, max_num_seqs=4)  # so that some are preempted
    runs = [plan.simulate(small, load.arrivals(LOAD, 2.0), 3, policy) for _ in range(2)]
    assert runs[0] == runs[1]
    asked = [*load.arrivals(LOAD, 2.0)]
    assert [o.arrived for o in runs[0].outcomes] == [each.at for each in asked]
    assert [o.tokens for o in runs[0].outcomes] == [each.new_tokens for each in asked]
    assert all(o.arrived + 1 < o.times[0] <= o.times[1] for o in runs[0].outcomes)
    figures = plan.figures_of(runs[0], FIGURES)
    assert figures["preemptions"] > 0 and 0 < figures["hits"] < 1
    assert 0 < figures["utilisation"] <= 1 and figures["errors"] == 0
    assert sampling.time is time


def test_who_gets_a_request():
    """A router that counts what has ended only when the step is over; one that spreads a document
    over all replicas."""
    texts = [[seed] * 32 for seed in range(3)]
    asked = [Arrival(40.0 * i, texts[i // 2 % 3] + [90, i], 2) for i in range(24)]
    hits = {
        policy: plan.simulate(TIMES, asked, 2, policy).figures["hits"] for policy in plan.POLICIES
    }
    assert hits["prefix"] > hits["round-robin"]
    # At 1.0 the first replica's step is under way, and its request ends with it, at 1.4.
    fleet_asked = [Arrival(0.0, [1] * 4, 1), Arrival(1.0, [2] * 4, 1), Arrival(1.1, [3] * 4, 1)]
    ends = [o.times[0] for o in plan.simulate(TIMES, fleet_asked, 2, "least-loaded").outcomes]
    assert ends == pytest.approx([1.4, 2.4, 2.8])
    # The same, where the second replica has computed more: it is free all the same.
    worked = [Arrival(0.0, [4] * 4, 1), Arrival(0.0, [5] * 20, 1)]
    later = [each._replace(at=20 + each.at) for each in fleet_asked[:2]]
    *_, last = plan.simulate(TIMES, worked + later, 2, "least-loaded").outcomes
    assert last.times[0] == pytest.approx(22.4)


def test_the_rule_of_exercise_19():
    """A document that is still being computed goes to a second replica, too; or one that all ask
    for, to a single one."""
    fleet = plan.Fleet(TIMES, 2, "prefix")
    homes = []
    for i in range(plan.BOUND + 2):
        request = fleet.prepare(Arrival(0.0, [7] * 16 + [i], 2))
        homes.append(fleet.choose(request))
        fleet.replicas[homes[-1]].engine.submit(request)
    assert homes == [0] * (plan.BOUND + 1) + [1]


def test_a_full_queue_refuses():
    """It grew without bound where the server answers 429."""
    result = plan.simulate(replace(TIMES, max_queue=2), [Arrival(0.0, [1], 5)] * 9)
    assert [o.error for o in result.outcomes] == [None] * 2 + ["429"] * 7


def test_the_load_is_that_of_bench_serve():
    """Its requests at a rate, and at once, were drawn in another order once they were shared."""
    asked = [*load.arrivals(LOAD, 10.0)]
    assert [each.prompt for each in asked] == [each.prompt for each in load.arrivals(LOAD, 99.0)]
    assert len({tuple(each.prompt[:8]) for each in asked}) == 3
    assert 0 < asked[0].at < asked[-1].at
    assert {each.at for each in load.arrivals(LOAD, math.inf)} == {0.0}


def test_times_are_found_again():
    """Negative seconds, with which a small step would take none; one slow step that bends all."""
    torch.manual_seed(0)
    works = [[1, 1, r, r + p, 2 * r, 2 * r + p] for r in range(1, 30) for p in (0, 8, 31)]
    true = [3e-3, 0.0, 2e-4, 8e-5, 1e-5, 0.0]
    times = [sum(a * b for a, b in zip(work, true)) for work in works]
    found = plan.fitted(works, times)
    assert min(found) >= 0
    for work, seconds in zip(works, times):
        assert sum(a * b for a, b in zip(work, found)) == pytest.approx(seconds, rel=1e-6)
    # What waited for another program is left out, and the rest keeps its proportions.
    waited = [9 * t if work[3] > 40 and i % 5 == 0 else t
              for i, (work, t) in enumerate(zip(works, times))]  # fmt: skip
    found = plan.fitted(works, waited)
    least, most = (sum(a * b for a, b in zip(work, found)) for work in (works[0], works[-1]))
    assert most / least == pytest.approx(times[-1] / times[0], rel=1e-4)
    stalled = [*times[:-1], 10 * times[-1]]
    found = plan.fitted(works, stalled)
    assert sum(sum(a * b for a, b in zip(w, found)) for w in works) == pytest.approx(sum(stalled))
    # A step has one group in all of these, so its time may be split between the two.
    assert sum(found[:2]) == pytest.approx(true[0] * sum(stalled) / sum(times), rel=0.05)
    with pytest.raises(ValueError, match="too few"):
        plan.fitted(works[:9], times[:9])


def test_a_machine_that_has_become_slower():
    """A step that waited for another program counted as if all had become slower; or a request's
    way to the engine became slower with the steps."""
    works = [[1, 0, r, r, 0, 0, 0, 0] for r in range(1, 20)]
    took = [1.25 * TIMES.step(work) for work in works]
    sample = plan.Sample([*works, works[0]], [*took, 100.0], [], [])
    now = replace(TIMES, inbound=0.5).scaled_to(sample)
    assert now.seconds == pytest.approx([1.25 * each for each in TIMES.seconds])
    assert now.inbound == 0.5


def test_steps_that_follow_each_other():
    """A pause between two requests taken for a step; what came before a step counted to it."""
    events = [
        ["came", 1, 0.5], ["step", 1.0, True, 7], ["came", 2, 1.1], ["came", 3, 1.2],
        ["step", 1.5, True, 8], ["first", 1, 1.9], ["step", 2.0, False, 9], ["came", 4, 8.0],
        ["step", 9.0, True, 6], ["step", 9.5, False, 5],
    ]  # fmt: skip
    assert plan.cycles(events) == ([[7, 2], [8, 0], [6, 0]], [0.5, 0.5, 0.5])


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells")
def test_what_other_programs_use():
    """The server's own time, or this program's, for which a load would always be sent again."""
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as ours, subprocess.Popen(spin) as other:
        alone = plan.OtherLoad(ours.pid)
        both = plan.OtherLoad(os.getpid())
        time.sleep(1)
        share, more = alone.share(), both.share()
        ours.kill()
        other.kill()
    assert share > 0.05  # of two processors, which others may use, too
    assert more > share + 0.05


def test_a_model_of_random_weights(tmp_path):
    """Tokens without text, which a server does not stream: the first one came with the last."""
    config = Config(600, 64, 64, 1, 2, 2, 32, 64)
    plan.write_shape(tmp_path / "m", config)
    tokenizer = Tokenizer(tmp_path / "m")
    assert [tokenizer.decode([i]).strip() for i in (0, 5, 599)] == ["0", "5", "599"]
    assert load_model(tmp_path / "m").config.vocab_size == 600


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 8, 9, 16])
def test_the_least_number_that_keeps_a_promise(needed):
    """One more than needed, or one less."""

    def figures_for(count):
        return {"errors": 0, "ttft_p99_ms": 1000.0 * needed / count}

    assert plan.least_replicas(figures_for, {"ttft_p99_ms": 1000.0}, 16) == needed
    with pytest.raises(ValueError, match="not kept with 16 replicas: ttft_p99_ms"):
        plan.least_replicas(figures_for, {"ttft_p99_ms": 50.0}, 16)


GOOD = '{"arrival": 1, "prompt": 5, "new_tokens": 3}'
BAD = {
    "": "is empty",
    "{": "line 2: ",
    "[]": "must be an object",
    '{"arrival": 2, "prompt": 5}': "lacks 'new_tokens'",
    '{"arrival": 2, "prompt": 5, "new_tokens": 3, "model": "x"}': "unknown field 'model'",
    '{"arrival": -1, "prompt": 5, "new_tokens": 3}': "arrival must be float in 0",
    '{"arrival": NaN, "prompt": 5, "new_tokens": 3}': "arrival must be float in 0",
    '{"arrival": 0.5, "prompt": 5, "new_tokens": 3}': "0.5 is before the previous one, 1",
    '{"arrival": 2, "prompt": 62, "new_tokens": 3}': "62 tokens and 3 new ones, context is 64",
    '{"arrival": 2, "prompt": 5, "new_tokens": 0}': "new_tokens must be int in 1",
    '{"arrival": 2, "prompt": [], "new_tokens": 1}': "prompt is empty",
    '{"arrival": 2, "prompt": [100], "new_tokens": 1}': "prompt must be int in 0..99",
    '{"arrival": 2, "prompt": 5, "shared": "a", "new_tokens": 1}': "both of shared and",
    '{"arrival": 2, "prompt": 5, "shared": "a", "shared_tokens": 6, "new_tokens": 1}': "0..5",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_trace(tmp_path, line):
    """A traceback, or a simulation that never ends."""
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{GOOD}\n{line}\n{GOOD.replace('1', '9', 1)}\n")
    with pytest.raises(ValueError) as caught:
        plan.read_trace(file, TIMES)
    text = str(caught.value)
    assert text.startswith(f"{file}, line 2: ") and BAD[line] in text and "\n" not in text


def test_a_trace_with_shared_beginnings(tmp_path):
    """Prompts of the same `shared` that do not begin alike; or that are alike to the end."""
    file = tmp_path / "trace.jsonl"
    wish = dict(arrival=0.5, prompt=20, shared="a", shared_tokens=12, new_tokens=2)
    other = wish | dict(arrival=0.5, shared="b")
    lines = [wish, wish, other, dict(arrival=7, prompt=[5, 9], new_tokens=1)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    a, b, c, d = plan.read_trace(file, TIMES)
    assert a.prompt[:12] == b.prompt[:12] != c.prompt[:12] and a.prompt[12:] != b.prompt[12:]
    assert len(a.prompt) == 20 and d == Arrival(7.0, [5, 9], 1)


@pytest.fixture
def fit_record(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    record = {"times": vars(TIMES), "hardware": "h", "versions": "v", "model": "m", "server": []}
    (tmp_path / "f.json").write_text(json.dumps(record))
    return tmp_path


def test_the_command_line(fit_record, capsys):
    """Figures of which a page cannot be made; a promise whose number is not the least."""
    words = "run --fit f --rate 1 --requests 30 --prompt-tokens 4 9 --new-tokens 2 5 --record r "
    words += "--vocab-size 100 --promise ttft_p50=3 --policy round-robin prefix --json"
    assert plan.main(words.split()) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((fit_record / "r.json").read_text()) == result
    least = int(result["notes"][0].split()[1])
    rows = {name: row["ttft_p50_ms"][0] for name, row in result["runs"].items()}
    assert rows[f"{least} replicas, round-robin"] <= 3000 < rows["1 replica"]
    (fit_record / "f.json").unlink()
    assert f"\n| {least} replicas, round-robin |" in report.speed_tables()


@pytest.mark.parametrize(
    "words, text",
    [
        ("--rate 1 --fit g", "is no record of `plan.py fit`"),
        ("--rate 0 --fit f", "--rate must be"),
        ("--rate nan --fit f", "--rate must be"),
        ("--rate 1 --fit f --prompt-tokens 60", "context is 64"),
        ("--rate 1 --fit f --promise ttft_p99=0", "must be like ttft_p99=2"),
        ("--rate 1 --fit f --promise speed=1", "must be like ttft_p99=2"),
        ("--rate 1 --fit f --replicas 0", "--replicas must be"),
        ("--trace none.jsonl --fit f", "none.jsonl"),
    ],
)
def test_errors_of_use(fit_record, capsys, words, text):
    """Each was a traceback, or ran for ever."""
    assert plan.main(["run", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("plan.py: error: ") and text in err


@pytest.mark.slow
def test_fit_and_check(tmp_path, monkeypatch, capsys):
    """The whole way, with real servers: figures that are not those of the same load."""
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    small = ["--requests", "12", "--prompt-tokens", "8", "64", "--new-tokens", "8", "24"]
    assert plan.main(["fit", *small, "--record", "f", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["times"]["small_chunk"] == 32
    assert plan.main(["check", *small, "--fit", "f", "--shares", "0.5", "--repeat", "1"]) == 0
    assert "ttft_p50_ms_predicted" in capsys.readouterr().out
    assert plan.main(["fit", *small, "--record", "f", "--", "--checkpoint", "none"]) == 2
    assert "the server has ended with 2: server.py: error: " in capsys.readouterr().err
