"""Complete the prompts of a JSONL file. Stopped at any time, it goes on when it is started again.

    python deploy/batch.py path/to/model prompts.jsonl results.jsonl

A line of prompts.jsonl is {"prompt": "ROMEO:"}, or for a chat {"messages": [...]}. A line of
results.jsonl has the index of its prompt: {"index": 0, "text": "...", "finish_reason": "stop"}. It
is written as soon as the text ends, so the lines are in any order.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from llm import LLM

model, prompts, answers = sys.argv[1:]
with open(answers, "ab+") as out:
    out.seek(0)
    lines = out.read().rpartition(b"\n")[0].splitlines()
    out.truncate(sum(len(line) + 1 for line in lines))  # half a line may follow: it is done again
    done = {json.loads(line)["index"] for line in lines}
    llm = LLM(model)
    tokenizer = llm.engine.tokenizer
    params = replace(llm.get_default_sampling_params(), max_tokens=200)
    for index, line in enumerate(Path(prompts).read_bytes().splitlines()):
        if index not in done:
            asked = json.loads(line)
            chat = asked.get("messages")
            prompt = tokenizer.encode_chat(chat) if chat else asked["prompt"]
            its_params = params.with_stop(tokenizer.chat_stop) if chat else params
            llm.engine.add_request(prompt, its_params, request_id=str(index))
    for request in llm.engine.run():
        if request.finished:
            (choice,) = request.outputs
            answer = {"text": choice.text, "finish_reason": choice.finish_reason}
            line = json.dumps({"index": int(request.request_id), **answer})
            out.write(line.encode() + b"\n")
            out.flush()
