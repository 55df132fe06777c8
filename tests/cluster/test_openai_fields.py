"""What each field of a body becomes in the call, and which values ask for nothing."""

import time
from typing import Any

import pytest

from espalier.cluster.call import GenerateCall
from espalier.cluster.ingress.chat_prompt import chat_token_ids
from espalier.cluster.ingress.openai_calls import chat_call, completion_calls, completion_prompts
from espalier.cluster.ingress.openai_models import ChatBody, CompletionBody, read_body
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import SamplingParams
from tests.support.fakes import FAKE_MODEL, FakeText, fake_model

HI = [{"role": "user", "content": "hi"}]


def _chat(defaults: dict[str, float | int] | None = None, **fields: Any) -> GenerateCall:
    body = read_body({"model": FAKE_MODEL, "messages": HI, **fields}, ChatBody)
    info = fake_model(defaults=defaults or {}, max_context=100)
    return chat_call(body, info, [1] * 10, call_id="c", session="from-header")


def _completions(prompt: Any, **fields: Any) -> list[GenerateCall]:
    body = read_body({"model": FAKE_MODEL, "prompt": prompt, **fields}, CompletionBody)
    info = fake_model(max_context=100)
    return completion_calls(body, info, completion_prompts(body, info, FakeText()), call_id="c", session=None)


def _rendered(messages: Any, **fields: Any) -> dict[str, Any]:
    text = FakeText()
    chat_token_ids(
        read_body({"model": FAKE_MODEL, "messages": messages, **fields}, ChatBody),
        fields.get("tools"),
        fake_model(),
        text,
    )
    return text.rendered[0]


def test_nothing_given_is_openais_defaults_and_a_drawn_seed() -> None:
    first, second = _chat(), _chat()
    assert first.params == SamplingParams(max_tokens=90, seed=first.params.seed)
    assert 0 <= first.params.seed < 2**53
    assert first.params.seed != second.params.seed
    assert (first.n, first.priority, first.deadline, first.session) == (1, 0, None, "from-header")


def test_the_models_defaults_come_before_openais_and_after_the_clients() -> None:
    defaults: dict[str, float | int] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    params = _chat(defaults, temperature=0, top_p=None).params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 0.95)


def test_every_field_arrives() -> None:
    given = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "seed": 2**64 - 1,
        "max_tokens": 20,
        "min_tokens": 3,
        "ignore_eos": True,
        "draft": False,
    }
    call = _chat(
        **given,
        logit_bias={"7": 1, "5": -2.5},
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        logprobs=True,
        top_logprobs=3,
        n=2,
        priority=-7,
        session_id="mine",
        timeout=30,
    )
    assert call.params == SamplingParams(
        **given, logit_bias=((5, -2.5), (7, 1.0)), stop=("a", "b"), stop_token_ids=(4, 5), logprobs=3
    )
    assert (call.n, call.priority, call.session, call.prompt_token_ids) == (2, -7, "mine", (1,) * 10)
    assert call.deadline is not None
    assert abs(call.deadline - time.time() - 30) < 5


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert _chat(**fields).params.logprobs == logprobs


def test_one_stop_string_is_a_list_of_one() -> None:
    assert _chat(stop="end").params.stop == ("end",)
    assert _chat(stop=[]).params.stop == ()


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}]
)
def test_both_names_of_max_tokens(fields: dict[str, int]) -> None:
    assert _chat(**fields).params.max_tokens == 7


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_up_to_the_context_and_not_beyond(field: str) -> None:
    assert _chat(**{field: 90}).params.max_tokens == 90
    with pytest.raises(InvalidRequestError) as caught:
        _chat(**{field: 91})
    assert caught.value.param == field


def test_completions_default_to_sixteen_tokens_or_what_is_left() -> None:
    assert _completions([1] * 10)[0].params.max_tokens == 16
    assert _completions([1] * 95)[0].params.max_tokens == 5


def test_a_prompt_must_leave_room_for_one_token() -> None:
    assert _completions([1] * 99)[0].params.max_tokens == 1
    with pytest.raises(InvalidRequestError) as caught:
        _completions([1] * 100)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(256, 97, 98)]),
        ([97, 98], [(97, 98)]),
        (["a", "b"], [(256, 97), (256, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, ids: list[tuple[int, ...]]) -> None:
    calls = _completions(prompt)
    assert [call.prompt_token_ids for call in calls] == ids
    assert len({call.call_id for call in calls}) == len(calls)


def test_prompts_of_a_batch_share_a_given_seed_and_draw_their_own_otherwise() -> None:
    assert [call.params.seed for call in _completions(["a", "b"], seed=5)] == [5, 5]
    assert len({call.params.seed for call in _completions(["a", "b"])}) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"store": False, "service_tier": "auto", "parallel_tool_calls": True, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "functions": [], "function_call": "none"},
        {"stream": False, "stream_options": None, "continue_final_message": False, "n": None, "stop": None},
        {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert _chat(**fields).params.max_tokens == 90


def test_completions_accept_what_asks_for_nothing() -> None:
    assert len(_completions("a", echo=False, suffix="", best_of=1, logprobs=None)) == 1


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert _rendered([{"role": "user", "content": parts}])["messages"] == [{"role": "user", "content": "a b"}]


def test_the_assistants_own_replies_can_be_sent_back() -> None:
    reply = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    assert _rendered([*HI, reply, *HI])["messages"][1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("arguments", ['{"b": 1, "a": "x"}', {"b": 1, "a": "x"}])
def test_tool_history_is_rendered_with_arguments_as_objects(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "42"}
    messages = _rendered([*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, answer])["messages"]
    function = {"name": "f", "arguments": {"b": 1, "a": "x"}}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    assert list(messages[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]
    assert messages[2] == answer


def test_tools_reach_the_template_as_they_came() -> None:
    tool = {"function": {"parameters": {"type": "object"}, "name": "f"}, "type": "function"}
    rendered = _rendered(HI, tools=[tool])["tools"]
    assert rendered == [tool]
    assert list(rendered[0]) == ["function", "type"]


def test_template_keywords_reach_the_template() -> None:
    assert _rendered(HI, chat_template_kwargs={"enable_thinking": False})["template_kwargs"] == {
        "enable_thinking": False
    }
