"""What an engine has done: as text for Prometheus, and as the JSON that page.html draws.

The names are vLLM's; engine_steps_total and computed_tokens_total are formed like them. This file
knows the engine and no HTTP. Read: Metrics.
"""

import json
from bisect import bisect
from collections import Counter, defaultdict
from itertools import pairwise

from around.settings import JSON
from scheduler import Engine, Request

# The last word of a metric's name -> its type, if it is no gauge.
KINDS = dict(total="counter", seconds="histogram")
# The upper ends of a histogram's buckets, in seconds, as they are written. A bucket also counts
# what is in those before it.
ENDS = """0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 1.5 2 2.5 5 7.5 10 20 30 40 60
    120 240 480 960 1920 +Inf"""


class Metrics:
    """The statistics of an engine and of the requests that it has finished.

    Attributes:
        head: how the labels of each sample begin: with the model's name.
        sampling: the settings that the page's user starts with.
        ended: metric -> sample -> value, for the requests that have ended. A sample is named as in
            Prometheus' format, by its labels: "{}", '{finished_reason="stop"}', or in a histogram
            '_bucket{le="0.1"}', "_sum{}" and "_count{}". text() puts `head` in the place of "{".
        snapshot: the engine's state for the page, as JSON.
    """

    def __init__(self, engine: Engine, model: str, sampling: JSON) -> None:
        self.engine = engine
        # The comma at its end may stand before "}" too. The format escapes quotes, backslashes and
        # newlines as JSON does.
        self.head = "{model_name=" + json.dumps(model, ensure_ascii=False) + ","
        self.sampling = sampling
        self.ended: dict[str, Counter] = defaultdict(Counter)
        self.take_snapshot()

    def count(self, request: Request) -> None:
        """Count a request that has ended."""
        self.ended["prompt_tokens_total"]["{}"] += request.outputs[0].prompt_len
        for seq in request.outputs:
            self.ended["request_success_total"][f'{{finished_reason="{seq.finish_reason}"}}'] += 1
            # seq.times begins with the time at which the sequence was made, so the first gap ends
            # with the first token.
            gaps = [after - before for before, after in pairwise(seq.times)]
            histograms = dict(
                time_to_first_token_seconds=gaps[:1],
                inter_token_latency_seconds=gaps[1:],
                e2e_request_latency_seconds=gaps and [sum(gaps)],
            )
            for name, values in histograms.items():
                values.sort()
                samples = Counter(
                    {f'_bucket{{le="{end}"}}': bisect(values, float(end)) for end in ENDS.split()}
                    | {"_sum{}": sum(values), "_count{}": len(values)}
                )
                samples.update(self.ended[name])
                self.ended[name] = samples  # all at once, as other threads read it

    def now(self) -> dict[str, float]:
        """Return the engine's counters and gauges."""
        engine = self.engine
        return {f"{name}_total": value for name, value in engine.stats.items()} | dict(
            num_requests_running=len(engine.running),
            num_requests_waiting=len(engine.waiting),
            kv_cache_usage_perc=1 - len(engine.pool.available) / engine.pool.num_blocks,
            spec_decode_num_draft_tokens_total=engine.proposer.offered.total(),
            spec_decode_num_accepted_tokens_total=engine.proposer.accepted.total(),
        )

    def text(self) -> str:
        """Return all statistics in Prometheus' text format. Any thread may call this."""
        now = {name: {"{}": value} for name, value in self.now().items()}
        text = ""
        for name, samples in (now | self.ended).items():
            text += f"# TYPE vllm:{name} {KINDS.get(name.rpartition('_')[2], 'gauge')}\n"
            for sample, value in samples.copy().items():  # a copy: the engine's thread adds others
                text += f"vllm:{name}{sample.replace('{', self.head)} {value}\n"
        return text

    def take_snapshot(self) -> None:
        """Put what the page shows into `snapshot`: which sequences run, which blocks they have,
        what sampling starts with, and whether the model has a chat template of its own. Only the
        engine's thread may call this. It takes some microseconds a sequence."""
        engine = self.engine
        running = [
            dict(
                name=f"{seq.request.request_id}.{seq.request.outputs.index(seq)}",
                text=(seq.stream.thought + seq.text)[-40:],
                prompt=seq.prompt_len,
                tokens=len(seq.ids),
                blocks=seq.table.blocks,
                length=seq.table.length,
                max=seq.max_len,
                ran=engine.last_step.get(seq, 0),
            )
            for seq in engine.running
        ]
        self.snapshot = json.dumps(
            self.now()
            | dict(
                blocks=engine.pool.num_blocks,
                block_size=engine.pool.block_size,
                cached=engine.pool.cached,
                running=running,
                sampling=self.sampling,
                has_chat_template=not engine.tokenizer.is_bare,
            )
        )
