"""Chat templates of a checkpoint: Jinja that turns messages into the text of a prompt, as transformers' apply_chat_template renders it.

Templates come with a model and are not trusted with more than text: they run in Jinja's immutable sandbox, and within bounds of size and time.
Knows no tokenizer.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.template_dialect import TemplateDialect

MAX_SOURCE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 1 << 25
MAX_RENDER_S = 30.0

# Names under which clients send a message's reasoning, the standard one first.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """One template, compiled. Rendering is thread-safe.

    special_tokens: texts of bos_token, eos_token, ..., which templates refer to by these names. name: what error messages call the template.
    Raises CheckpointError if the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, name: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointError(f"{name}: {len(source)} characters; a chat template may have {MAX_SOURCE_CHARS}")
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{name}: line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._dialect = TemplateDialect.probe(lambda messages: self._render(messages, {}))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt. template_kwargs: further variables, such as enable_thinking or documents; they win over special tokens.

        Raises InvalidRequestError if the messages have a form that nothing can be made of, or if the template refuses them.
        """
        if not messages:
            raise InvalidRequestError("messages: at least one message is needed", param="messages")
        if taken := sorted(_RESERVED & template_kwargs.keys()):
            message = f"chat_template_kwargs: {taken[0]} has a field of its own"
            raise InvalidRequestError(message, param="chat_template_kwargs")
        adapted = self._dialect.adapt([_normalized(message) for message in messages])
        try:
            return self._render(
                adapted,
                {
                    "tools": None if tools is None else list(tools),
                    "add_generation_prompt": add_generation_prompt,
                    **template_kwargs,
                },
            )
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program: anything can go wrong in it, because of the messages
            reason = str(error) or type(error).__name__
            raise InvalidRequestError(
                f"messages: the chat template refuses them: {reason}", param="messages"
            ) from error

    def _render(self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        context = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **self._special_tokens,
            **variables,
            "messages": messages,
        }
        pieces: list[str] = []
        num_chars = 0
        deadline = time.monotonic() + MAX_RENDER_S
        for piece in self._template.generate(context):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                message = f"messages: the prompt is over {MAX_RENDERED_CHARS} characters, or takes too long to render"
                raise InvalidRequestError(message, param="messages")
        return "".join(pieces)


class ChatTemplates:
    """The templates of a checkpoint by name: "default", perhaps "tool_use" for calls with tools, perhaps others that nothing here selects."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = {
            name: ChatTemplate(
                source, special_tokens, name="chat template" if name == "default" else f"chat template {name}"
            )
            for name, source in sources.items()
        }

    def select(self, *, with_tools: bool) -> ChatTemplate:
        """The template for a call. Raises InvalidRequestError if the model has none."""
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise InvalidRequestError("messages: this model has no chat template; send it a prompt", param="messages")
        return self._templates["default"]


def _normalized(message: dict[str, Any]) -> dict[str, Any]:
    """A copy without keys that are None, and with the reasoning under both names that templates read."""
    if not isinstance(message, dict):
        raise InvalidRequestError("messages: each message must be an object", param="messages")
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


class _GenerationBlocks(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what the assistant wrote, for training; here it only makes a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
