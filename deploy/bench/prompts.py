"""What the bench asks. Four kinds, written for it: code, chat, a long prompt, and prompts that share a long beginning."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.replicas.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt as chat messages, and the name it has in the report."""

    name: str
    messages: tuple[dict[str, Any], ...]


def _ask(name: str, text: str) -> BenchPrompt:
    return BenchPrompt(name, ({"role": "user", "content": text},))


_CODE = """Finish this Python function, then explain it in two sentences.

def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    \"\"\"Merge overlapping intervals; the result is sorted by start.\"\"\"
    merged = []
    for start, end in sorted(intervals):
"""

_CHAT = "My tomato seedlings are tall, thin and pale. What went wrong, and what should I do this week?"

_LOGBOOK = "\n".join(
    f"Day {day}: wind from the {wind}, {temperature} degrees at noon; {tree} pruned on the {wall} wall, {pears} fruit spurs kept."
    for day, wind, temperature, tree, wall, pears in (
        (
            day,
            ("north", "east", "south", "west")[day % 4],
            7 + day * 5 % 16,
            ("pear", "apple", "plum", "fig", "apricot")[day % 5],
            ("north", "garden", "orchard")[day % 3],
            11 + day * 7 % 23,
        )
        for day in range(1, 25)
    )
)
_LONG = f"A gardener's logbook:\n\n{_LOGBOOK}\n\nSummarise the month in one short paragraph, then name the coldest day."

_RULES = """You answer for a small public library. Rules of the house:
1. Books are lent for four weeks and can be renewed twice, unless somebody waits for them.
2. Films and games are lent for one week and cannot be renewed.
3. A late book costs ten cents a day, a late film fifty cents; nobody pays more than five euros for one item.
4. Children under fourteen pay nothing, but cannot borrow while something of theirs is late.
5. The reading room opens at nine and closes at seven, on Saturdays at two; it stays closed on Sundays.
Answer in at most three sentences, and name the rule that you used."""


def _desk(number: int, question: str) -> BenchPrompt:
    system, user = {"role": "system", "content": _RULES}, {"role": "user", "content": question}
    return BenchPrompt(f"shared-{number}", (system, user))


BUILT_IN: tuple[BenchPrompt, ...] = (
    _ask("code", _CODE),
    _ask("chat", _CHAT),
    _ask("long", _LONG),
    _desk(1, "My novel is six days late. What do I owe?"),
    _desk(2, "Can I keep this film for another week?"),
    _desk(3, "Is the reading room open on Saturday at three?"),
)


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Prompts of a JSON-lines file: {"name": ..., "messages": [...]} or {"name": ..., "prompt": text}; the name may be left out.

    Raises InvalidRequestError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--prompts {path}: {error}", param="prompts") from None
    prompts = tuple(_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise InvalidRequestError(f"--prompts {path}: holds no prompts", param="prompts")
    names = [prompt.name for prompt in prompts]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"--prompts {path}: each prompt needs a name of its own", param="prompts")
    return prompts


def _read_line(line: str, where: str) -> BenchPrompt:
    def refuse(message: str) -> InvalidRequestError:
        return InvalidRequestError(f"--prompts {where}: {message}", param="prompts")

    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise refuse(f"is not JSON: {error}") from None
    if not isinstance(entry, dict) or set(entry) - {"name"} not in ({"messages"}, {"prompt"}):
        raise refuse('must be {"name": ..., "messages": [...]} or {"name": ..., "prompt": text}')
    name = str(entry.get("name", where))
    if "prompt" in entry:
        return _ask(name, str(entry["prompt"]))
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise refuse("messages must be a list of objects")
    return BenchPrompt(name, tuple(messages))
