"""The table of folders: what lies on people's disks means what it means to `transformers`.

Each row is a folder made on the spot, which transformers (AutoTokenizer, AutoModelForCausalLM,
apply_chat_template) and this engine both read. Where they differ on purpose, the row says why.
"""

import json
import shutil

import pytest
import torch
from conftest import SHAKESPEARE
from safetensors.torch import load_file, save_file
from test_model import ATOL, build, hf_logits, same
from test_tokenizer import LLAMA, LLAMA_SIZE, NAMES, byte_level, metaspace, write
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from around.folder import Tokenizer, load_config, load_model
from around.settings import InputError, SamplingParams
from sampling import Sequence
from tools.convert import copy_rest

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def token(content, special=True, **more):
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return flags | {"content": content, "special": special} | more


def added(first, *tokens):
    return {"added_tokens_decoder": {str(first + i): each for i, each in enumerate(tokens)}}


GPT = byte_level("<s>", "</s>")
BEYOND = GPT.get_vocab_size()
FAST, SLOW = {"tokenizer_json": GPT.to_str()}, {"tokenizer_model": LLAMA}
WITH_BOS = {"tokenizer_json": byte_level("<s>", "</s>", bos="<s>").to_str()}
MAP = {"special_tokens_map.json": NAMES}
# Without add_bos_token, transformers 5 puts no BOS in front of a text of tokenizer.model; its
# earlier versions, sentencepiece's users and this engine do.
BOS = {"add_bos_token": True}
LLAMA_CONFIG = NAMES | BOS | {"tokenizer_class": "LlamaTokenizer"}
X, HIDDEN = token("<|x|>"), token("wombat", special=False)
R = token("<|r|>", rstrip=True)
WITH_X = LLAMA_CONFIG | added(LLAMA_SIZE, X)
TURN = {"eos_token": "<|im_end|>"}
FLAGGED = metaspace()
for each in (AddedToken("<|im_start|>", special=True, normalized=False),
             AddedToken("<|r|>", rstrip=True), AddedToken("<|w|>", single_word=True)):  # fmt: skip
    FLAGGED.add_tokens([each])
FLAGGED_IDS = {text: FLAGGED.token_to_id(text) for text in ("<|im_start|>", "<|r|>", "<|w|>")}
TOKENIZERS = {  # name -> tokenizer_config.json, other files, and the added texts
    "BOS named in special_tokens_map.json alone": ({"model_max_length": 99}, WITH_BOS | MAP),
    "the same, of tokenizer.model": (BOS | {"tokenizer_class": "LlamaTokenizer"}, SLOW | MAP),
    "BOS of the post-processor, no config": (None, WITH_BOS),
    "tokenizer.json knows better": (
        NAMES | {"add_bos_token": False, "add_eos_token": True}, WITH_BOS),
    "tokens that tokenizer.json lacks": (
        NAMES | added(BEYOND, X, HIDDEN), FAST, "<|x|>", "wombat"),
    "added_tokens.json beside tokenizer.json": (
        NAMES | TURN, FAST | {"added_tokens.json": {"<|im_end|>": BEYOND, "wombat": BEYOND + 1}},
        "<|im_end|>", "wombat"),
    "added_tokens.json repeats what tokenizer.json says better": (
        NAMES, {"tokenizer_json": FLAGGED.to_str(), "added_tokens.json": FLAGGED_IDS},
        "<|im_start|>", "<|r|>", "<|w|>"),
    "extra special tokens": (NAMES | {"extra_special_tokens": ["at"]}, FAST, "at"),
    "extra special tokens with names": (
        NAMES | {"extra_special_tokens": {"image_token": "at"}}, FAST, "at"),
    "a special token that is an ordinary entry": (NAMES | {"pad_token": "at"}, FAST, "at"),
    "tokenizer.model, added tokens shown and hidden": (
        LLAMA_CONFIG | added(LLAMA_SIZE, X, HIDDEN), SLOW, "<|x|>", "wombat"),
    "added_tokens.json beside tokenizer.model": (
        LLAMA_CONFIG, SLOW | {
            "added_tokens.json": {"<|im_end|>": LLAMA_SIZE, "wombat": LLAMA_SIZE + 1},
            "special_tokens_map.json": NAMES | TURN}, "<|im_end|>", "wombat"),
    "legacy": (WITH_X | {"legacy": True}, SLOW, "<|x|>"),
    "not legacy": (WITH_X | {"legacy": False}, SLOW, "<|x|>"),
    "legacy is not said": (WITH_X, SLOW, "<|x|>"),
    "legacy is not said, of another class": (
        NAMES | added(LLAMA_SIZE, X) | BOS, SLOW, "<|x|>"),
    "no space in front": (WITH_X | {"add_prefix_space": False}, SLOW, "<|x|>"),
    "tokens that take in spaces": (
        LLAMA_CONFIG | added(LLAMA_SIZE, token("<|l|>", lstrip=True), R,
            token("<|b|>", lstrip=True, rstrip=True), token(" <|e|>", lstrip=True, rstrip=True)),
        SLOW, "<|l|>", "<|r|>", "<|b|>", " <|e|>"),
    "a named token that takes in spaces": (
        NAMES | added(BEYOND, R) | {"pad_token": "<|r|>"}, FAST, "<|r|>"),
    "a named token that tokenizer.json adds as a word": (
        NAMES | {"pad_token": "wombat"},
        {"tokenizer_json": byte_level("<s>", "</s>", plain=("wombat",)).to_str()}, "wombat"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name, tmp_path):
    """Read each folder of TOKENIZERS, and compare the ids and the text of prompts with those of
    transformers. Catches: a prompt without its BOS; an added token spelt out in characters; a space
    too many after a special token, or in front; a word of the output that vanishes."""
    config, files, *texts = TOKENIZERS[name]
    folder = write(tmp_path, config, **files, **{"config.json": {"model_type": "llama"}})
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    forms = ["#", "the cat#the cat", "#the #", *(["a # b"] if "spaces" in name else [])]
    for text in ("the cat", "", *(f.replace("#", each) for f in forms for each in texts)):
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        want = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == want
    for special in ("bos_token", "eos_token"):
        if getattr(theirs, special) in ours.special:
            assert getattr(ours, f"{special[:3]}_id") == getattr(theirs, f"{special}_id")
            ours.template = "{{ " + special + " }}"
            want = theirs.apply_chat_template(
                [ASKED], chat_template=ours.template, return_dict=False, tokenize=False
            )
            assert ours.decode(ours.encode_chat([ASKED]), show_special=True) == want


def test_special_ids(tmp_path):
    """Load a tokenizer whose added token leaves a gap in the ids, which is refused; then gather the
    ids that end a text from three files. Catches: an added token that gets the next free id in
    place of its own, as in transformers; a chat that never stops, as its end of turn stands in
    tokenizer_config.json alone."""
    folder = write(tmp_path, NAMES | added(BEYOND + 5, X), **FAST)
    with pytest.raises(InputError, match=rf"<\|x\|> {BEYOND + 5} is not supported"):
        Tokenizer(folder)
    raw = json.loads((SHAKESPEARE / "config.json").read_text()) | {"eos_token_id": 5}
    files = {"config.json": raw, "generation_config.json": {"eos_token_id": [7, 5]}, **FAST}
    folder = write(tmp_path, {"eos_token": "</s>"}, **files)
    sequence = Sequence([1], SamplingParams(), load_config(folder), Tokenizer(folder))
    assert sequence.end_ids == {5, 7, GPT.token_to_id("</s>")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build("llama3.1", tmp_path_factory.mktemp("llama"))


def test_the_index_counts(llama, tmp_path):
    """Load three shards by their index, beside a shard of another version and old copies of one
    tensor, and compare the logits. Catches: another version's shards, or the old copy of a
    fine-tuned tensor, merged in; shards of other names not found. (Of two copies transformers takes
    what it reads last.)"""
    tensors, norm = load_file(llama.folder / WHOLE), "model.norm.weight"
    shards = ("model-00001-of-00002.safetensors", "weights-00002.safetensors", "new.safetensors")
    index = {name: shards[i % 2] for i, name in enumerate(sorted(tensors))} | {norm: shards[2]}
    for shard in shards:
        part = {name: each for name, each in tensors.items() if index[name] == shard}
        old = {} if shard == shards[2] else {norm: tensors[norm] + 1}
        save_file(old | part, tmp_path / shard, {"format": "pt"})
    other_version = {name: each + 1 for name, each in tensors.items()}
    save_file(other_version, tmp_path / "model-00001-of-00001.safetensors", {"format": "pt"})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    shutil.copy(llama.folder / "config.json", tmp_path)
    same(load_model(tmp_path), llama)
    (tmp_path / shards[1]).unlink()
    with pytest.raises(InputError, match=f"{shards[1]}: .*No such file"):
        load_model(tmp_path)


def test_a_tied_folder_that_stores_lm_head(tmp_path):
    """Load a tied folder that stores lm_head too, different or equal, or lm_head alone. Catches: a
    different lm_head dropped without a word; no word about one that is stored alone, as
    safetensors.torch.save_model keeps the first name."""
    built = build("llama-tied", tmp_path)
    tensors = load_file(tmp_path / WHOLE)
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    for head in (torch.randn_like(embedding), embedding.clone()):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / WHOLE, {"format": "pt"})
        theirs = hf_logits(AutoModelForCausalLM.from_pretrained(tmp_path), built.tokens)
        same(load_model(tmp_path), built._replace(logits=theirs))
        is_equal = torch.equal(head, embedding)
        assert torch.allclose(theirs, built.logits, atol=ATOL) == is_equal
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / WHOLE, {"format": "pt"})
    with pytest.raises(InputError, match=r"embed_tokens\.weight: missing"):
        load_model(tmp_path)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASKED = {"role": "user", "content": "the cat"}
OLD_CLIENT = {"refusal": None, "audio": None, "function_call": None, "name": None}
# What OpenAI's clients send back -> what each template is given, in transformers' words.
OBJECT = CALL | {"function": {"name": "f", "arguments": {"a": 1}}}
TEMPLATES = {
    "Llama 3.1": (
        "{%- for m in messages %}{%- if 'tool_calls' in m %}{%- if m.tool_calls|length != 1 %}"
        "{{- raise_exception('one call at a time') }}{%- endif %}"
        "{{- m.tool_calls[0].function.arguments | tojson }}{%- else %}"
        "{{- m.role + ': ' + m.content }}{%- endif %}{%- endfor %}", OBJECT, None),
    "prints": ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
        "{% if m.name is defined %}named{% endif %}{% endfor %}", OBJECT, ""),
    "DeepSeek R1": (
        "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
        "{% for c in m['tool_calls'] %}{{ '```json' + '\n' + c['function']['arguments'] + '```' }}"
        "{% endfor %}{% else %}{{ m['role'] + ': ' + m['content'] }}{% endif %}{% endfor %}",
        CALL, None),
}  # fmt: skip
HISTORIES = [
    {"content": "sat", "tool_calls": []} | OLD_CLIENT, {"content": "sat", "tool_calls": None},
    {"content": None, "tool_calls": [CALL]},
    {"content": None, "tool_calls": [CALL | {"index": None}]},  # a null in a call
    {"content": None, "tool_calls": [OBJECT]} | OLD_CLIENT,  # an object already
]  # fmt: skip


def chatter(folder, template):
    folder = write(folder, NAMES | {"chat_template": template}, **FAST)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_histories(name, tmp_path):
    """Render conversations with calls, as clients send them back, by three templates, and compare
    the text with that of transformers. Catches: a 400 for an empty list of calls; "None" in the
    prompt; an object added to a string."""
    template, call, null = TEMPLATES[name]
    ours, theirs = chatter(tmp_path, template)
    for answer in HISTORIES:
        answer = {"role": "assistant"} | answer
        ids = ours.encode_chat([ASKED, json.loads(json.dumps(answer))])
        clean = {key: value for key, value in answer.items() if value not in (None, [])}
        if "tool_calls" in clean:
            clean |= {"content": null, "tool_calls": [call]}
        want = 'user: the cat```json\n{"a": 1}```'
        if name != "DeepSeek R1" or "tool_calls" not in clean:
            # transformers drops a content of null, on which this template fails.
            want = theirs.apply_chat_template([ASKED, clean], tokenize=False)
        assert ours.decode(ids, show_special=True) == want, answer
    # A template that adds a text after the arguments of a call failed.
    ours, _ = chatter(tmp_path / "x", "{{ messages[0].tool_calls[0].function.arguments + '.' }}")
    ids = ours.encode_chat([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert ours.decode(ids) == '{"a": 1}.'


def test_templates(tmp_path):
    """Render chats by the template of each file that can hold one, with tools and without, and
    compare with transformers. Catches: a model with images whose chats were written as plays; in a
    chat with tools, the template for chats without; the plain template in place of named ones
    without a default; a role that templates refuse."""
    turns = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
    thought = [ASKED | {"reasoning": "hm"}]
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    named = [{"name": "default", "template": turns}, {"name": "tool_use", "template": "t" + turns}]
    beside = {"chat_template.json": {"chat_template": turns}}
    ours = Tokenizer(write(tmp_path / "beside", NAMES, **FAST, **beside))
    assert ours.decode(ours.encode_chat(thought)) == "the cathm"
    ours, theirs = chatter(tmp_path / "named", named)
    theirs.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").is_file()
    for each in (ours, Tokenizer(tmp_path / "saved")):
        for more in ({}, tools):
            want = theirs.apply_chat_template([ASKED], tokenize=False, **more)
            assert each.decode(each.encode_chat([ASKED], **more)) == want
        assert each.decode(each.encode_chat(thought, **tools)) == "tthe cathm"
    copy_rest(tmp_path / "saved", tmp_path)
    assert Tokenizer(tmp_path).tool_template == ours.tool_template
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    told = [{"role": "developer", "content": "Be brief"}, ASKED]
    ours, _ = chatter(tmp_path / "system", template)
    assert ours.decode(ours.encode_chat(told)).startswith("system: Be brief;")
    ours, _ = chatter(tmp_path / "developer", template + "{# developer #}")
    assert ours.decode(ours.encode_chat(told)).startswith("developer: Be brief;")
    ours, theirs = chatter(tmp_path / "named", [{"name": "rag", "template": "x"}])
    for refuses in (ours.encode_chat, theirs.apply_chat_template):
        with pytest.raises(ValueError, match="default"):
            refuses([ASKED])


def test_continuing_the_last_message(tmp_path):
    """Render chats that continue the assistant's last message, and compare the ids with those of
    the text. Catches: a search for the message: "<" was found in a mark, "" at the end, and spaces
    were lost. (transformers searches too: with "|" it ends at the last mark.)"""
    for trim in ("", " | trim"):
        template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content# }}<|end|>{% endfor %}"
        ours, theirs = chatter(tmp_path / f"x{trim}", template.replace("#", trim))
        for prefill in ("<", "|", "", "word ", "line\n", "<|im", "the cat", "</s>", " x"):
            chat = [ASKED, {"role": "assistant", "content": prefill}]
            ids = ours.encode_chat(chat, True)
            shown = prefill.lstrip() if trim else prefill
            want = "<|user|>the cat<|end|><|assistant|>" + shown
            assert ids == ours.encode(want, add_special=False), prefill
            if prefill == "the cat":
                options = {"continue_final_message": True, "return_dict": False}
                assert ids == theirs.apply_chat_template(chat, **options)
