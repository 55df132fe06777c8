"""Chat templates against transformers' apply_chat_template: real templates, real histories, and the environment templates run in."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.replicas.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.tokenizer import Tokenizer, TokenizerFiles
from tests.support.tokenizers import CHATML, write_byte_level

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather now. Größe: <b>°C</b> & 'more'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Which city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "You are terse. Antworte höflich."}
USER = {"role": "user", "content": 'What\'s the weather in Zürich? <tag> & "quotes" 日本'}
ANSWER = {"role": "assistant", "content": "Sunny, 21 °C."}


def tool_turn(*cities: str, content: str | None = None) -> list[dict[str, Any]]:
    """An assistant message that calls a tool for each city, and the tool's answers."""
    calls = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": city, "unit": "celsius"}},
        }
        for i, city in enumerate(cities)
    ]
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": '{"temp": 21, "sky": "☀️"}'}
        for call in calls
    ]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *answers]


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system first": [SYSTEM, USER],
    "many turns": [SYSTEM, USER, ANSWER, USER, {"role": "assistant", "content": "  spaces\n\n"}, USER],
    "ends with assistant": [USER, ANSWER],
    "tool call": [SYSTEM, USER, *tool_turn("Zürich"), ANSWER, USER],
    "tool calls": [USER, *tool_turn("Zürich", "Oslo", content="Let me look."), ANSWER],
    "tool call open": [USER, *tool_turn("Zürich")],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "It is summer.\n"}, USER],
    "reasoning in content": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."}, USER],
    "reasoning, other name": [USER, {**ANSWER, "reasoning": "Summer."}],
    "system in the middle": [USER, ANSWER, SYSTEM, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "named": [{**USER, "name": "ann"}],
    "two users": [USER, USER],
    "think switch": [{"role": "system", "content": "Short answers. /no_think"}, USER],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": [WEATHER_TOOL, WEATHER_TOOL]},
    "no thinking": {"add_generation_prompt": True, "enable_thinking": False},
    "thinking": {"add_generation_prompt": True, "enable_thinking": True, "thinking": True},
    "documents": {
        "add_generation_prompt": True,
        "documents": [{"doc_id": 1, "title": "T", "text": "Zürich is sunny."}],
    },
}


class Judge:
    """transformers' tokenizer beside ours, from the same folder."""

    def __init__(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers")
        self.theirs = transformers.AutoTokenizer.from_pretrained(folder)
        self.files = TokenizerFiles.read(folder)

    def ours(self, template: str) -> Tokenizer:
        return Tokenizer(TokenizerFiles(self.files.tokenizer_json, self.files.config, {"default": template}))

    def expected(self, template: str, messages: list[dict[str, Any]], **kwargs: Any) -> list[int] | None:
        """Their ids, or None if the template refuses the messages."""
        try:
            return list(self.theirs.apply_chat_template(messages, chat_template=template, return_dict=False, **kwargs))
        except Exception:
            return None


def our_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> list[int] | None:
    tools, prompt = kwargs.pop("tools", None), kwargs.pop("add_generation_prompt")
    try:
        text = tokenizer.render_chat(messages, tools=tools, add_generation_prompt=prompt, template_kwargs=kwargs)
    except InvalidRequestError as error:
        assert error.param == "messages"
        return None
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def small_judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(write_byte_level(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def smollm2_judge(shared: Path) -> Judge:
    return Judge(shared / "models" / "smollm2-135m-instruct-exl3-4.0bpw")


def compare_everything(judge: Judge, template: str) -> int:
    """Compares ids of every conversation and variant; the number of conversations that both render."""
    tokenizer = judge.ours(template)
    num_rendered = 0
    for title, messages in CONVERSATIONS.items():
        for variant, kwargs in VARIANTS.items():
            expected = judge.expected(template, messages, **kwargs)
            found = our_ids(tokenizer, messages, **kwargs)
            assert found == expected, f"{title}, {variant}"
            num_rendered += expected is not None
    return num_rendered


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_those_of_transformers(small_judge: Judge, name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert compare_everything(small_judge, template) >= 30


@pytest.mark.parametrize("name", ["own", *NAMES])
def test_ids_equal_with_the_tokenizer_of_smollm2(smollm2_judge: Judge, name: str) -> None:
    own = smollm2_judge.files.chat_templates["default"]
    template = own if name == "own" else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert compare_everything(smollm2_judge, template) >= 30


# What each template makes of content given as parts, and of a tool call's arguments.
KNOWS_PARTS = {"qwen3.5-4b"}
NEEDS_OBJECTS = {"gpt-oss-120b", "mistral-nemo-instruct-2407", "qwen2.5-7b-instruct", "qwen2.5-training", "qwen3.5-4b"}


@pytest.mark.parametrize("name", NAMES)
def test_text_parts_reach_templates_in_the_form_they_know(small_judge: Judge, name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    in_parts = [{"role": "user", "content": parts}]
    theirs = in_parts if name in KNOWS_PARTS else [{"role": "user", "content": "one two"}]
    expected = small_judge.expected(template, theirs, add_generation_prompt=True)
    assert expected is not None
    assert our_ids(small_judge.ours(template), in_parts, add_generation_prompt=True) == expected


@pytest.mark.parametrize("name", NAMES)
def test_arguments_as_text_reach_templates_in_the_form_they_know(small_judge: Judge, name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    as_objects = [USER, *tool_turn("Zürich", content="x")]
    as_text = json.loads(json.dumps(as_objects))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    theirs = as_objects if name in NEEDS_OBJECTS else as_text
    expected = small_judge.expected(template, theirs, add_generation_prompt=True)
    assert our_ids(small_judge.ours(template), as_text, add_generation_prompt=True) == expected


def test_arguments_as_object_become_text_where_only_text_is_known() -> None:
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {}, name="t")
    assert render(template, [USER, *tool_turn("Zürich")]) == '<{"city": "Zürich", "unit": "celsius"}>'


def test_a_text_becomes_a_part_where_only_parts_are_known() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, {}, name="t")
    assert render(template, [{"role": "user", "content": "hi"}]) == "[hi]"


def render(template: ChatTemplate, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return template.render(messages, tools=None, add_generation_prompt=False, template_kwargs=kwargs)


ENVIRONMENT = {
    "blocks are trimmed": "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "tojson": "{{ {'b': '<é>&\\'', 'a': [1, 2.5, none, true]} | tojson }}|{{ [1] | tojson(indent=2) }}",
    "tojson, sorted": "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}{{ 'é' | tojson(ensure_ascii=true) }}",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation is a scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation in a loop": "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
    "generation trims": "a\n  {%- generation %}\n  b\n  {% endgeneration %}\nc",
    "namespace": "{% set ns = namespace(x=1) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "undefined is empty": "[{{ nothing }}]{{ nothing is defined }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
    "filters": "{{ ' x ' | trim }}{{ 'a,b'.split(',') | join('+') }}{{ messages | length }}{{ {'a': 1}.items() | list }}{{ dict(a=1) }}",
    "a year": "{{ strftime_now('%Y') }}",
    "macro": "{% macro f(x, y=2) %}{{ x }}-{{ y }}{% endmacro %}{{ f(1) }}",
    "keys that are None are gone": "{{ messages[0].gone is defined }}{{ messages[0].role is defined }}",
}


@pytest.mark.parametrize("title", ENVIRONMENT)
def test_the_environment_is_that_of_transformers(small_judge: Judge, title: str) -> None:
    messages = [{**USER, "gone": None}]
    template = ENVIRONMENT[title]
    expected = small_judge.expected(template, messages, add_generation_prompt=False)
    assert expected is not None
    assert our_ids(small_judge.ours(template), messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such thing') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(ChatTemplate(source, {}, name="t"), [USER])
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, name="t")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render(template, [USER])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["text"],
        [{"content": "no role"}],
        [{"role": 7, "content": "x"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_messages_of_no_known_form_are_refused(messages: list[Any]) -> None:
    template = ChatTemplate(CHATML, SPECIAL_TOKENS, name="t")
    with pytest.raises(InvalidRequestError) as caught:
        render(template, messages)
    assert caught.value.param == "messages"


def test_broken_arguments_are_refused_where_an_object_is_needed() -> None:
    template = ChatTemplate((TEMPLATES / "qwen2.5-7b-instruct.jinja").read_text(encoding="utf-8"), {}, name="t")
    messages: list[dict[str, Any]] = [USER, *tool_turn("Oslo")]
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{not json"
    with pytest.raises(InvalidRequestError, match="not JSON"):
        render(template, messages)


def test_keywords_cannot_replace_what_has_a_field() -> None:
    template = ChatTemplate(CHATML, {}, name="t")
    with pytest.raises(InvalidRequestError) as caught:
        template.render([USER], tools=None, add_generation_prompt=False, template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_messages_are_left_as_they_were() -> None:
    messages: list[dict[str, Any]] = [USER, *tool_turn("Oslo", content=""), {**ANSWER, "reasoning": "r"}]
    before = json.dumps(messages)
    render(ChatTemplate((TEMPLATES / "qwen3-0.6b.jinja").read_text(encoding="utf-8"), {}, name="t"), messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("source", ["{% if %}", "{% generation %}", "{{ x", "x" * (MAX_SOURCE_CHARS + 1)])
def test_a_broken_template_is_a_broken_checkpoint(source: str) -> None:
    with pytest.raises(CheckpointError, match="my template"):
        ChatTemplate(source, {}, name="my template")
