"""From a checked conversation to prompt token ids: messages as chat templates expect them, rendered and encoded. Knows neither wire.

Both fronts come through here. It is CPU work: call it in a thread.
"""

from collections.abc import Sequence
from typing import Any

import pydantic_core

from espalier.cluster.call import ModelInfo, ModelText
from espalier.cluster.ingress.openai_models import ChatInput, Message, ToolCall
from espalier.cluster.ingress.prompt_text import encode_prompt
from espalier.replicas.errors import InvalidRequestError

# What render_chat itself hands to the template; chat_template_kwargs cannot replace them.
_RESERVED_KWARGS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


def chat_token_ids(
    chat: ChatInput, tools: Sequence[dict[str, Any]] | None, info: ModelInfo, text: ModelText
) -> list[int]:
    """The prompt of a conversation, template applied.

    tools: the tools of `chat` as they came, so that the template prints them with the client's key order; None renders none.
    Raises InvalidRequestError naming the message, argument or keyword at fault.
    """
    kwargs = chat.chat_template_kwargs or {}
    for name in kwargs:
        if name in _RESERVED_KWARGS or not name.isidentifier():
            raise InvalidRequestError(
                f"chat_template_kwargs: {name[:64]!r} is not a keyword that a template can be given",
                param="chat_template_kwargs",
            )
    rendered = text.render_chat(
        [template_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)],
        tools=tools or None,
        add_generation_prompt=chat.add_generation_prompt is not False,
        template_kwargs=kwargs or None,
    )
    return encode_prompt(rendered, info, text, param="messages", add_special_tokens=False)


def template_message(message: Message, param: str) -> dict[str, Any]:
    """One message as chat templates expect it: content as one text, arguments of tool calls as objects, nothing that is None.

    Text parts are joined without anything between them, as templates that know parts do; templates that do not would print the list.
    """
    if message.content is None and not message.tool_calls:
        raise InvalidRequestError(f"{param}.content: required unless tool_calls are given", param=f"{param}.content")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequestError(f"{param}.tool_calls: only of assistant messages", param=f"{param}.tool_calls")
    result: dict[str, Any] = {"role": message.role, "content": _joined(message)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [
            _template_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return result


def _joined(message: Message) -> str:
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content)
    return message.content or ""


def _template_call(call: ToolCall, param: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = _parsed_arguments(arguments, f"{param}.function.arguments")
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
    return result if call.id is None else {"id": call.id, **result}


def _parsed_arguments(arguments: str, param: str) -> dict[str, Any]:
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{param}: must be a JSON object", param=param)
    return value
