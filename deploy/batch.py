"""Complete the prompts of a JSONL file. Stopped at any time, it goes on when it is started again.

    python deploy/batch.py path/to/model prompts.jsonl results.jsonl [max_tokens]

A line of prompts.jsonl is {"prompt": "ROMEO:"}, or for a chat {"messages": [...]}. A line of
results.jsonl has the index of its prompt: {"index": 0, "text": "...", "finish_reason": "stop"}. It
is written as soon as the text ends, so the lines are in any order. Of a prompt that cannot be run
it has {"index": 0, "error": "..."}.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from llm import LLM

if len(sys.argv) not in (4, 5):
    sys.exit(__doc__)
model, prompts, answers, *most = sys.argv[1:]
with open(answers, "ab+") as out:
    out.seek(0)
    written = out.read()
    if not all(b'{"index": '.startswith(line[:10]) for line in written.splitlines()):
        sys.exit(f"{answers} has lines that are no results, and is left as it is")
    whole = written.rfind(b"\n") + 1  # half a line may follow: it is done again
    out.truncate(whole)
    done = {json.loads(line)["index"] for line in written[:whole].splitlines()}
    llm = LLM(model)
    tokenizer = llm.engine.tokenizer
    params = replace(llm.get_default_sampling_params(), max_tokens=int(most[0]) if most else 200)

    def write(index: int, **answer: str | None) -> None:
        out.write(json.dumps({"index": index, **answer}).encode() + b"\n")
        out.flush()

    for index, line in enumerate(Path(prompts).read_bytes().splitlines()):
        if index in done or not line.strip():
            continue
        try:
            asked = json.loads(line)
            chat = asked.get("messages")
            prompt = tokenizer.encode_chat(chat) if chat else asked["prompt"]
            its_params = params.with_stop(tokenizer.chat_stop) if chat else params
            llm.engine.add_request(prompt, its_params, request_id=str(index))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            write(index, error=f"{type(error).__name__}: {error}")
    for request in llm.engine.run():
        if request.finished:
            (choice,) = request.outputs
            write(int(request.request_id), text=choice.text, finish_reason=choice.finish_reason)
