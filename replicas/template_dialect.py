"""What form of messages a chat template understands, found by trying it, and messages brought into that form.

Clients send content as a text or as a list of text parts, and arguments of tool calls as JSON text or as an object. Some templates know one
form and print the other as garbage or fail, some know both. A form that a template knows reaches it unchanged.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from espalier.replicas.errors import InvalidRequestError

Message = dict[str, Any]
ContentForm = Literal["text", "parts", "either"]
ArgumentsForm = Literal["text", "object", "either"]

# Nothing that a template could strip, escape or contain.
_MARK = "espalierprobe"
_CALL_ID = "espalier0"
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TemplateDialect:
    """content: the form of content by role; roles that are not in it take text. arguments: the form of a tool call's arguments."""

    content: Mapping[str, ContentForm]
    arguments: ArgumentsForm

    @classmethod
    def probe(cls, render: Callable[[Sequence[Message]], str]) -> "TemplateDialect":
        """Tries the template. render: messages -> text; whatever it raises means that the template does not take these messages."""

        def attempt(messages: Sequence[Message]) -> str:
            try:
                return render(messages)
            except Exception:  # a template fails in any way it likes
                return ""

        arguments = _arguments_form(attempt)
        no_arguments: Any = {} if arguments == "object" else "{}"
        return cls({role: _content_form(attempt, role, no_arguments) for role in _ROLES}, arguments)

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Copies of the messages in a form that the template takes. Raises InvalidRequestError for parts that are not text, or broken JSON."""
        return [self._adapt(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _adapt(self, message: Message, where: str) -> Message:
        adapted = dict(message)
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidRequestError(f"{where}.role: must be a text", param="messages")
        if "content" in message:
            adapted["content"] = _adapt_content(message["content"], self.content.get(role, "text"), where)
        if isinstance(message.get("tool_calls"), list):
            adapted["tool_calls"] = [self._adapt_call(call, where) for call in message["tool_calls"]]
        return adapted

    def _adapt_call(self, call: Any, where: str) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if self.arguments == "object" and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise InvalidRequestError(
                    f"{where}.tool_calls: arguments are not JSON: {error}", param="messages"
                ) from error
        elif self.arguments == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def _adapt_content(content: Any, form: ContentForm, where: str) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form == "parts" else content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content: must be a text or a list of parts", param="messages")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.content: only text parts are understood", param="messages")
    return "".join(part["text"] for part in content) if form == "text" else content


def _content_form(attempt: Callable[[Sequence[Message]], str], role: str, arguments: Any) -> ContentForm:
    """A template knows parts if it prints a text part as it prints the text, or if it prints the part only."""
    as_text = attempt(_conversation(role, _MARK, arguments))
    as_parts = attempt(_conversation(role, [{"type": "text", "text": _MARK}], arguments))
    if _MARK in as_parts and as_parts == as_text:
        return "either"
    return "parts" if _MARK in as_parts and _MARK not in as_text else "text"


def _arguments_form(attempt: Callable[[Sequence[Message]], str]) -> ArgumentsForm:
    """A template knows arguments as JSON text if it prints that text as it is, and as an object if it prints its keys, but not Python's dict."""
    text = json.dumps({_MARK: 1})
    knows_text = text in attempt(_conversation("tool", "done", text))
    from_object = attempt(_conversation("tool", "done", {_MARK: 1}))
    knows_object = _MARK in from_object and str({_MARK: 1}) not in from_object
    if knows_text == knows_object:
        return "either"
    return "text" if knows_text else "object"


def _conversation(role: str, content: Any, arguments: Any) -> list[Message]:
    """A conversation that templates accept, whose message of `role` has that content."""
    message = {"role": role, "content": content}
    if role in ("system", "developer"):
        return [message, {"role": "user", "content": "hello"}]
    if role == "user":
        return [message]
    if role == "assistant":
        return [{"role": "user", "content": "hello"}, message]
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    return [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**message, "tool_call_id": _CALL_ID, "name": "lookup"},
    ]
