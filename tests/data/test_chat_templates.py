"""Published chat templates give the tokens and the mask of assistant tokens that `transformers` gives."""

import importlib.util
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

import optimus
from helpers.sweep import in_turns
from optimus.data import chat
from optimus.data.chat import OURS, ChatTemplate, Conversation, special_texts
from optimus.data.fields import field_of
from optimus.data.loader import TokenLoader
from optimus.data.preparation import prepare
from optimus.data.shards import INSIDE, NOT_PREDICTED, Shards
from optimus.data.tokenizer import load
from optimus.data.training import DataPhase
from optimus.errors import UserError
from optimus.evaluation.text import read_rows

transformers = pytest.importorskip("transformers", reason="needs transformers (`make install-dev`)")

# Templates that trl lacks, copied from the tokenizer_config.json of the models.
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
INLINE = {"chatml": CHATML, "mistral": MISTRAL, "olmo2": OLMO2, "zephyr": ZEPHYR, "ours": OURS}
FILES = ["llama3", "llama3_1", "gemma", "deepseekv3", "qwen3", "gptoss", "phi3"]
MARKED = [
    "llama3_training",
    "gemma_training",
    "deepseekv3_training",
    "qwen3_training",
    "gptoss_training",
    "phi3_training",
]
WITHOUT_SYSTEM = ("mistral", "gemma")
# Templates that render an answer differently when the conversation continues; only the last answer can be located.
UNLIKE_LATER = ("qwen3", "gptoss")


def source_of(name: str) -> str:
    if name in INLINE:
        return INLINE[name]
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs trl (`make install-dev`)")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def folder_of(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that writes a tokenizer's folder, as published, with a template and its special tokens."""

    def made(source: str) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        named = {*re.findall(r"<[|｜][^<>]*?[|｜]>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn)>|\[/?INST\]", source)}
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in sorted(named | {"<s>", "</s>"})])
        tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
        config["eos_token"] = {"__type": "AddedToken", "content": "</s>", "special": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
        return folder

    return made


def theirs_of(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def conversations(name: str) -> list[list[dict[str, Any]]]:
    def turn(role: str, content: str, **more: str) -> dict[str, Any]:
        return {"role": role, "content": content, **more}

    asked, answered = turn("user", "what is 2+2?"), turn("assistant", "  four,\nor 4 \U0001f600 é")
    again, last = turn("user", "Sicher?\n\n"), turn("assistant", "<b>yes</b>")
    several = [asked, answered] if name in UNLIKE_LATER else [asked, answered, again, last]
    found = [[asked, last], several]
    if name.removesuffix("_training") not in WITHOUT_SYSTEM:
        found += [[turn("system", "be brief"), *each] for each in found]
    if name.startswith(("qwen3", "gptoss")):
        found += [[asked, turn("assistant", "4", reasoning_content="two and two\nare four")]]
        found += [[asked, turn("assistant", "4", thinking="easy")]]
    if name.endswith("_training"):
        found += [[asked, answered, again, turn("assistant", "4"), again, last]]
    return found


@pytest.fixture
def one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes the date that `transformers` writes into prompts."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Then":
            return cls(2024, 7, 26)

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Then)


@pytest.mark.usefixtures("one_day")
@pytest.mark.parametrize("name", [*INLINE, *FILES, *MARKED])
def test_tokens_and_mask_are_those_of_transformers(folder_of: Any, name: str) -> None:
    source = source_of(name)
    folder = folder_of(source)
    theirs, template = theirs_of(folder), ChatTemplate.beside(folder / "tokenizer.json", "</s>")
    assert template.source == source
    as_tokens, as_text = (load(folder / "tokenizer.json", parse_special=special) for special in (True, False))
    marked = "generation" in re.findall(r"\{%-?\s*(\w+)", source)
    assert marked == (name.endswith("_training") or name == "ours")
    for messages in conversations(name):
        own = template.conversation(messages, "here", special=special_texts(as_tokens))
        assert own.text == theirs.apply_chat_template(messages, tokenize=False)
        found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=marked)
        ids, predicted = own.encoded(as_tokens, as_text)
        assert ids == found["input_ids"]
        if marked:
            mask = found["assistant_masks"]
        else:  # renders the conversation up to each answer, and with the answer
            mask = [0] * len(ids)
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    begin = theirs.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
                    begin = begin.removesuffix("<think>\n")  # DeepSeek's generation prompt ends with this
                    end = theirs.apply_chat_template(messages[: number + 1], tokenize=False)
                    end = (
                        end if own.text.startswith(end) else end.removesuffix("</s>")
                    )  # Phi-3 ends only the last turn so
                    assert own.text.startswith(begin)
                    assert own.text.startswith(end)
                    encoding = theirs(own.text, add_special_tokens=False)
                    first, last = encoding.char_to_token(len(begin)), encoding.char_to_token(len(end) - 1)
                    mask[first : last + 1] = [1] * (last + 1 - first)
        assert predicted == [bool(each) for each in mask]
        assert 0 < sum(predicted) < len(ids)
        prompt = messages[:-1]
        asked = template.render(prompt, "here", answer=True)
        assert asked == theirs.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", UNLIKE_LATER)
def test_an_answer_that_is_written_otherwise_later_is_named(name: str) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    messages = [{"role": "user", "content": "2+2?"}, thought, {"role": "user", "content": "sure?"}, thought]
    with pytest.raises(
        UserError, match=r"data\.jsonl:3: the chat template renders turn 2 \(assistant\) .* \{% generation %\}"
    ):
        ChatTemplate(source_of(name)).conversation(messages, "data.jsonl:3")


def turn(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "ROME"}}}]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "</s>",
]


@pytest.mark.parametrize(
    ("name", "messages", "predicted"),
    [
        ("qwen2_5", [turn("user", "a or b?"), turn("assistant", "a")], ["a<|im_end|>\n"]),
        ("qwen2_5", [turn("user", "who?"), turn("assistant", "assistant")], ["assistant<|im_end|>\n"]),
        ("qwen2_5", [turn("assistant", "hello"), turn("user", "hi")], ["hello<|im_end|>\n"]),
        ("gptoss", [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")],
         ["<|channel|>final<|message|>b<|end|>", "<|channel|>final<|message|>d<|return|>"]),
        ("qwen2_5", [turn("user", "a"), turn("assistant", None, tool_calls=CALL), turn("tool", "S"),
          turn("assistant", "ok")],
         ['<tool_call>\n{"name": "weather", "arguments": {"city": "ROME"}}\n</tool_call><|im_end|>\n', "ok<|im_end|>\n"]),
    ],
)  # fmt: skip
def test_what_is_predicted_by_templates_without_marks(
    name: str, messages: list[dict[str, Any]], predicted: list[str]
) -> None:
    """The predicted text is the assistant's content with its end mark; headings of equal spelling and tools' results
    are not predicted."""
    own = ChatTemplate(source_of(name)).conversation(messages, "here", special=SPECIAL)
    assert [own.text[first:last] for first, last in own.predicted or ()] == predicted


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("gptoss", [turn("user", "a"), turn("assistant", None, tool_calls=CALL, reasoning_content="look"),
                    turn("tool", "SUN"), turn("assistant", "sunny", reasoning_content="so")]),
        ("qwen3", [turn("user", "a"), turn("assistant", "", tool_calls=CALL), turn("tool", "SUN"), turn("assistant", "b")]),
        ("qwen3", [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]),
    ],
)  # fmt: skip
def test_turns_that_cannot_be_told_apart(name: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(
        UserError,
        match=r"here: the chat template renders turn 2 \(assistant\) differently when the conversation continues",
    ):
        ChatTemplate(source_of(name)).conversation(messages, "here", special=SPECIAL)


def test_the_end_of_text_is_the_assistants_where_nothing_else_ends_its_turn() -> None:
    plain = ChatTemplate("{% for message in messages %}{{ message['role'] + ': ' + message['content'] }} {% endfor %}"
                         "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    own = plain.conversation([turn("user", "a"), turn("assistant", "b")], "here")
    assert own.is_open
    assert [own.text[first:last] for first, last in own.predicted or ()] == ["b "]
    assert not ChatTemplate(CHATML).conversation([turn("assistant", "b")], "here", special=SPECIAL).is_open


def test_the_end_of_text_is_the_assistants_after_a_generation() -> None:
    said = "{% generation %}{{ message['content'] }}{% endgeneration %}"
    one, special = "{% for message in messages %}" + said + "{% endfor %}", ["</s>"]
    for source, text, is_open in (
        (one, "b", True),
        (one + "\n", "b", True),
        (one, "b</s>", True),  # the spelling of a special token
        (one + "</s>", "b", False),
        (one.replace("] }}", "] + '</s>' }}"), "b", False),
        (one + "{{ messages[0]['role'] }}", "b", False),
    ):
        made = ChatTemplate(source).conversation([turn("assistant", text)], "here", special=special)
        assert made.is_open == is_open, (source, text)


@pytest.mark.parametrize(
    ("source", "message", "problem"),
    [
        ("ours", turn("user</s>", "a"), "the role of message 1 contains a special token"),
        (
            "smolvlm_training",
            turn("user", "a question"),
            "drops the text of the messages: it may need `content` as a list of parts",
        ),
        ("{{ '{0}'.format() }}", turn("user", "a"), "the chat template cannot render this conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", turn("user", "a"), "cannot render this conversation"),
        ("{{ 'a'.encode('nope') }}", turn("user", "a"), "cannot render this conversation"),
        ("{{ messages[1].content|upper }}", turn("user", "a"), r"changes the text of turn 2 \(assistant\)"),
    ],
)
def test_templates_and_messages_that_do_not_go_together(source: str, message: dict[str, Any], problem: str) -> None:
    template = ChatTemplate(source if "{" in source else source_of(source))
    with pytest.raises(UserError, match=f"here: .*{problem}"):
        template.conversation([message, turn("assistant", "an answer")], "here", special=SPECIAL)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"from": "human"}, "message 2 has `from` without `value`"),
        ({"from": 5, "value": "a"}, "message 2 has no `role`"),
        ({"content": "a"}, "message 2 has no `role`"),
        (turn("user", None), "message 2 has no `content`"),
        ({"role": "user", "content": 5}, "message 2 has a number as `content`"),
        ("hi", "message 2 is a text"),
        (turn("Assistant", "a"), r"no message has the role 'assistant' \(roles: user, Assistant\)"),
    ],
)
def test_messages_that_are_none(message: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        field_of("chat:messages").conversation({"messages": [turn("user", "a"), message]}, "here")


@pytest.mark.parametrize("source", [OURS, ZEPHYR])
def test_a_template_that_drops_tool_calls_is_refused(source: str) -> None:
    said = [turn("user", "a"), turn("assistant", "", tool_calls=CALL), turn("tool", "SUN"), turn("assistant", "b")]
    with pytest.raises(UserError, match="here: the chat template drops the tool calls: use a template that writes"):
        ChatTemplate(source, (("eos_token", "</s>"),)).conversation(said, "here")


def test_parts_of_text_are_one_text_in_the_default_template() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    own = ChatTemplate(OURS)
    for role in ("user", "assistant"):
        said = [turn("user", "x"), turn("assistant", "y")]
        listed = [{**each, "content": parts} if each["role"] == role else each for each in said]
        joined = [{**each, "content": "a b"} if each["role"] == role else each for each in said]
        assert own.conversation(listed, "here") == own.conversation(joined, "here")


@pytest.mark.parametrize(
    ("source", "role", "parts", "problem"),
    [
        (MISTRAL, "user", [{"type": "text", "text": "a"}], "may need `content` as text, not as a list of parts"),
        (OURS, "user", [{"type": "image", "url": "a"}], "may need `content` as text, not as a list of parts"),
        (OURS, "assistant", [{"type": "image", "url": "a"}], "needs `content` as text, not as a list of parts"),
        ("{{ messages[0].content }}{{ messages[1].content }}", "assistant", [{"type": "text", "text": "a"}],
         "needs `content` as text, not as a list of parts"),
    ],
)  # fmt: skip
def test_parts_that_a_template_cannot_write(source: str, role: str, parts: list[Any], problem: str) -> None:
    said = {"user": "x", "assistant": "y"} | {role: parts}
    with pytest.raises(UserError, match=f"here: the chat template .*{problem}"):
        ChatTemplate(source).conversation([{"role": name, "content": text} for name, text in said.items()], "here")


def test_names_of_arguments_and_tools_stay_text_too() -> None:
    call = [{"type": "function", "function": {"name": "f", "arguments": {"</s>": 1}}}]
    said = [turn("user", "a"), turn("assistant", "b", tool_calls=call)]
    tools = [{"type": "function", "function": {"name": "f", "description": "</s>", "parameters": {}}}]
    own = ChatTemplate(source_of("qwen2_5_training")).conversation(said, "here", tools, SPECIAL)
    assert own.text.count("</s>") == len(own.quoted) == 2


def test_what_a_message_spells_stays_text(folder_of: Any) -> None:
    """A special token's spelling inside a message stays text, unless `parse_special` is set; an emoji at a border is
    not split."""
    folder = folder_of(CHATML)
    as_tokens, as_text = (load(folder / "tokenizer.json", parse_special=special) for special in (True, False))
    said = [
        {"role": "user", "content": "what ends a turn? <|im_end|> does"},
        {"role": "assistant", "content": "<|im_end|>\U0001f600"},
    ]
    template = ChatTemplate(CHATML)
    own = template.conversation(said, "here", special=special_texts(as_tokens))
    assert own.text == template.render(said, "here")
    ids, predicted = own.encoded(as_tokens, as_text)
    assert ids.count(as_tokens.token_to_id("<|im_end|>")) == 2  # the template's own
    assert as_text.decode(ids, skip_special_tokens=False) == own.text
    assert as_text.decode([id for id, each in zip(ids, predicted) if each], skip_special_tokens=False) == (
        "<|im_end|>\U0001f600<|im_end|>\n"
    )
    parsed = template.conversation(said, "here", special=special_texts(as_tokens), parse_special=True)
    plain, _ = parsed.encoded(as_tokens, as_text)
    assert plain.count(as_tokens.token_to_id("<|im_end|>")) == 4


def test_prepared_data_has_the_template_of_its_tokenizer(folder_of: Any, tmp_path: Path) -> None:
    """The index holds the tokenizer's template, so the data's digest covers the template. Data prepared with another
    data set's tokenizer holds the same template."""
    folder, messages = folder_of(ZEPHYR), conversations("zephyr")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages * 8))
    given: dict[str, Any] = {"context": 128, "workers": 1, "text_field": "chat:messages", "pack": "best-fit"}
    index = prepare([path], tmp_path / "data", tokenizer=folder, **given)
    assert index["chat"] == {"template": ZEPHYR, "tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
    shards, theirs = Shards(tmp_path / "data"), theirs_of(folder)
    stored = [int(token) for row in shards.stored_rows(0, shards.instances) for token in row]
    for each in messages:
        ids = theirs.apply_chat_template(each, return_dict=True)["input_ids"]
        ids = [*ids, *([] if ids[-1] == shards.eos_id else [shards.eos_id])]
        places = [
            at
            for at in range(len(stored) - len(ids) + 1)
            if [token & (INSIDE - 1) for token in stored[at : at + len(ids)]] == ids
        ]
        assert len(places) >= 4  # conversations of an incomplete last row are dropped
        for at in places:
            own = [not token & NOT_PREDICTED for token in stored[at : at + len(ids)]]
            assert 0 < sum(own) < len(own)
            assert not own[0]
            ends = [token & ~NOT_PREDICTED == shards.eos_id for token in stored[at : at + len(ids)]]
            assert ends == [False] * (len(ids) - 1) + [True]  # turns end with the same token
    with TokenLoader([DataPhase.from_shards(shards, shards.instances)]) as loader:
        batch = next(loader)
    assert batch.tokens_BS.max() < shards.vocab_size
    assert batch.tokens_BS.tolist() == shards.rows(0, shards.instances).tolist()
    windows = [window for part in read_rows(shards, 10**9) for window in part.windows]
    assert max(max(window.continuation) for window in windows) < shards.vocab_size
    again = prepare([path], tmp_path / "again", tokenizer=tmp_path / "data", **given)
    assert again["chat"] == index["chat"]
    other = folder_of(CHATML)
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match=r"is the output of another run .*chat_template"):
        prepare([path], tmp_path / "data", tokenizer=other, **given)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config.json": '{"chat_template": "{% for %}"}'},
            "its chat_template is not a valid Jinja template",
        ),
        ({"chat_template.jinja": "{{ messages"}, "its chat_template is not a valid Jinja template"),
        ({"tokenizer_config.json": '{"chat_template": 5}'}, "its chat_template is a int: it must be a string"),
        (
            {"tokenizer_config.json": '{"chat_template": [{"name": "tool_use", "template": "a"}]}'},
            r"none of its chat templates \(tool_use\) is named default",
        ),
        ({"tokenizer_config.json": "[1]"}, r"tokenizer_config\.json cannot be read as a JSON object"),
    ],
)
def test_files_beside_a_tokenizer_that_are_none(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        ChatTemplate.beside(tmp_path / "tokenizer.json", "</s>")


def test_an_index_whose_chat_is_none(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"chat": {"template": "a", "tokens": []}}')
    assert ChatTemplate.beside(tmp_path / "tokenizer.json", "</s>").source == OURS


def test_which_of_several_templates(tmp_path: Path) -> None:
    """`ChatTemplate.beside` takes the template named default; a chat_template.jinja file has precedence."""
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several, "bos_token": None}))
    assert ChatTemplate.beside(tmp_path / "tokenizer.json", "</s>").source == "plain"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    assert ChatTemplate.beside(tmp_path / "tokenizer.json", "</s>").source == "of the file"
    assert ChatTemplate.beside(tmp_path / "other.json", "</s>").source == OURS


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[7].role.nothing }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_can_do_nothing_but_write(source: str) -> None:
    messages = [{"role": "assistant", "content": "hi"}]
    with pytest.raises(UserError, match="here: the chat template cannot render this conversation"):
        ChatTemplate(source + "{% generation %}{{ messages[0].content }}{% endgeneration %}").conversation(
            messages, "here"
        )


@pytest.mark.parametrize("cut", ["[:2]", "[1:]", "[:1]", "[-1:]"])
@pytest.mark.parametrize("around", ["CUT", "{% generation %}CUT{% endgeneration %}"])
def test_a_template_that_cuts_a_quoted_token(cut: str, around: str) -> None:
    """No part of a quoted special token enters the text: the conversation is refused."""
    source = "{% for m in messages %}" + around.replace("CUT", "{{ m.content" + cut + " }}") + " hello {% endfor %}"
    said = [{"role": "assistant", "content": "<x>"}]
    with pytest.raises(UserError, match="here: the chat template splits a text that spells a special token"):
        ChatTemplate(source).conversation(said, "here", special=["<x>"])


def test_characters_that_are_none() -> None:
    """Characters of the text are never used as internal marks; a text with all mark characters is refused."""
    said = "".join(chat._MARKS[:5])
    own = ChatTemplate().conversation([{"role": "assistant", "content": said}], "here", special=["<x>"])
    assert own == Conversation(f"<|assistant|>\n{said}", ((14, 19),), is_open=True)
    with pytest.raises(UserError, match="the text contains too many noncharacters"):
        ChatTemplate().conversation([{"role": "assistant", "content": chat._MARKS}], "here")


@pytest.mark.parametrize("name", in_turns(["ours", "chatml"], 2, always=1))
def test_from_conversations_to_an_answer(folder_of: Any, tmp_path: Path, name: str) -> None:
    """A run that overfits conversations answers as trained and ends its turns; its export has the chat template for
    `transformers`."""
    turns = [("what is it?", "it is so"), ("and that?", "that is not")]
    chats = tmp_path / "chats.jsonl"
    said = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}] for asked, answer in turns]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in [*said, said[0] + said[1]] * 8))
    data, folder = tmp_path / "data", folder_of(INLINE[name])
    if name == "ours":
        (folder / "tokenizer_config.json").unlink()
    prepare([chats], data, tokenizer=folder, context=64, workers=1, text_field="chat:messages", pack="best-fit")
    run = {
        "model": {"family": "llama", "hidden": 64, "layers": 2, "heads": 4, "intermediate": 128, "vocab": 640},
        "data": {"path": str(data)},
        "train": {
            "output": str(tmp_path / "run"),
            "steps": 60,
            "global_batch": 8,
            "micro_batch": 8,
            "sequence_length": 64,
        },
        "lr_schedule": {"lr": 1e-2, "warmup_steps": 5},
    }
    optimus.train(run)
    for asked, answer in turns:
        assert optimus.generate(tmp_path / "run", asked, max_tokens=30, chat=True) == answer
    optimus.export(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.chat_template == INLINE[name]
    template = ChatTemplate.read(Shards(data).index["chat"])
    assert theirs.apply_chat_template(said[1], tokenize=False) == template.render(said[1], "here")
    optimus.import_folder(tmp_path / "hf", tmp_path / "again")
    assert optimus.generate(tmp_path / "again", turns[0][0], max_tokens=30, chat=True) == turns[0][1]


def test_a_model_without_conversations_has_no_template(small_run: dict[str, Any], prepared: Path) -> None:
    small_run["data"]["path"] = str(prepared)
    small_run["train"] |= {"steps": 1, "output": small_run["train"]["output"]}
    small_run["model"]["vocab"] = 640
    optimus.train(small_run)
    with pytest.raises(UserError, match=r"has no chat template: it was not trained on conversations"):
        optimus.generate(small_run["train"]["output"], "hi", chat=True)


def test_data_that_does_not_go_together_is_refused_by_the_check(folder_of: Any, tmp_path: Path) -> None:
    """`check` refuses data sets with different templates, because a model has one, and validation data without
    predicted tokens."""
    one, other = folder_of(CHATML), folder_of(CHATML)
    (other / "chat_template.jinja").write_text(CHATML + " ")
    said = [turn("user", "a long question " * 100), turn("assistant", "b")]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(20)))
    for name, tokenizer in (("one", one), ("other", other)):
        prepare([chats], tmp_path / name, tokenizer=tokenizer, context=32, workers=1, text_field="chat:messages")
    sources = [{"path": str(tmp_path / "one")}, {"path": str(tmp_path / "other")}]
    run = {
        "model": {"family": "llama", "hidden": 32, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 640},
        "data": {"path": str(tmp_path / "one")},
        "train": {
            "output": str(tmp_path / "run"),
            "steps": 2,
            "global_batch": 1,
            "micro_batch": 1,
            "sequence_length": 32,
        },
    }
    with pytest.raises(UserError, match=r"other uses another chat template than .*one, but a run needs the same"):
        optimus.train(run | {"data": sources}, check=True)
    shards = Shards(tmp_path / "one")
    unpredicted = next(
        n
        for n in range(shards.instances + 1)
        if n == shards.instances or (shards.stored_rows(n, n + 1)[0, 1:] < NOT_PREDICTED).any()
    )
    assert 0 < unpredicted < shards.instances
    tokens = 32 * unpredicted
    validation = [{"name": "v", "path": str(tmp_path / "one"), "every": 1, "tokens": tokens}]
    with pytest.raises(UserError, match=rf"validation\.0\.path: none of the first {tokens} tokens of .* is predicted"):
        optimus.train(run | {"validation": validation}, check=True)
    assert optimus.train(run | {"validation": [validation[0] | {"tokens": 10_000}]}, check=True)["ok"]
