"""What the bench asks. Four kinds, written for it: code, chat, long prompts, and prompts that share a long beginning; random tokens; a file's."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.replicas.errors import InvalidRequestError

# Ids below are marks of the format in most vocabularies.
_FIRST_RANDOM_ID = 256
# Every vocabulary that is served without being told has so many ids.
SAFE_VOCAB = 10_000


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt, as chat messages or as token ids, with its name in the report. Prompts of one kind are measured together."""

    name: str
    kind: str
    messages: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()


def _ask(name: str, kind: str, text: str) -> BenchPrompt:
    return BenchPrompt(name, kind, ({"role": "user", "content": text},))


_FUNCTIONS = (
    ("merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]", "Merge overlapping intervals."),
    ("top_words(text: str, count: int) -> list[str]", "The most frequent words, the most frequent first."),
    ("transpose(rows: list[list[float]]) -> list[list[float]]", "Columns become rows."),
    ("parse_duration(text: str) -> int", "Seconds of a duration such as 1h30m."),
)


def _code(number: int) -> BenchPrompt:
    signature, meaning = _FUNCTIONS[number % len(_FUNCTIONS)]
    text = f'Task {number}. Finish this Python function, then explain it in two sentences.\n\ndef {signature}:\n    """{meaning}"""\n'
    return _ask(f"code-{number}", "code", text)


_QUESTIONS = (
    "My tomato seedlings are tall, thin and pale. What went wrong, and what should I do this week?",
    "I slept badly before an exam. How do I spend the last two hours before it?",
    "Which three dishes can I cook from rice, eggs and half a cabbage?",
    "How do I tell a neighbour that his dog barks all night, and stay friends?",
)


def _chat(number: int) -> BenchPrompt:
    return _ask(f"chat-{number}", "chat", f"Letter {number}. {_QUESTIONS[number % len(_QUESTIONS)]}")


def _long(number: int) -> BenchPrompt:
    lines = [
        f"Day {day}: wind from the {wind}, {temperature} degrees at noon; {tree} pruned on the {wall} wall, {spurs} fruit spurs kept."
        for day, wind, temperature, tree, wall, spurs in (
            (
                day,
                ("north", "east", "south", "west")[(day + number) % 4],
                7 + (day * 5 + number * 3) % 16,
                ("pear", "apple", "plum", "fig", "apricot")[(day + number) % 5],
                ("north", "garden", "orchard")[day % 3],
                11 + (day * 7 + number) % 23,
            )
            for day in range(1, 25)
        )
    ]
    logbook = "\n".join(lines)
    text = f"Logbook {number} of a gardener:\n\n{logbook}\n\nSummarise the month in one short paragraph, then name the coldest day."
    return _ask(f"long-{number}", "long", text)


_RULES = """You answer for a small public library. Rules of the house:
1. Books are lent for four weeks and can be renewed twice, unless somebody waits for them.
2. Films and games are lent for one week and cannot be renewed.
3. A late book costs ten cents a day, a late film fifty cents; nobody pays more than five euros for one item.
4. Children under fourteen pay nothing, but cannot borrow while something of theirs is late.
5. The reading room opens at nine and closes at seven, on Saturdays at two; it stays closed on Sundays.
Answer in at most three sentences, and name the rule that you used."""

_DESK = (
    "My novel is {} days late. What do I owe?",
    "I have had a film for {} days. Can I keep it for another week?",
    "Is the reading room open on Saturday at {}?",
    "My daughter is {}. What does she pay for a late game?",
)


def _shared(number: int) -> BenchPrompt:
    question = _DESK[number % len(_DESK)].format(number + 2)
    system, user = {"role": "system", "content": _RULES}, {"role": "user", "content": question}
    return BenchPrompt(f"shared-{number}", "shared", (system, user))


_MAKERS: dict[str, Callable[[int], BenchPrompt]] = {"code": _code, "chat": _chat, "long": _long, "shared": _shared}
KINDS = tuple(_MAKERS)


def built_in(kind: str, count: int) -> tuple[BenchPrompt, ...]:
    """So many different prompts of one of KINDS."""
    return tuple(_MAKERS[kind](number) for number in range(count))


def random_prompts(count: int, lengths: Sequence[int], vocab_size: int, rng: random.Random) -> tuple[BenchPrompt, ...]:
    """Prompts of exactly so many random tokens, each length in turn, that share no beginning; for models that read no text."""
    return tuple(
        BenchPrompt(
            f"random-{number}", "random", token_ids=random_token_ids(lengths[number % len(lengths)], vocab_size, rng)
        )
        for number in range(count)
    )


def random_token_ids(count: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    """Ordinary tokens, as far as one can tell from their ids."""
    first = min(_FIRST_RANDOM_ID, vocab_size // 2)
    return tuple(rng.randrange(first, vocab_size) for _ in range(count))


def prompt_line(prompt: BenchPrompt, token_ids: Sequence[int]) -> str:
    """A line of a prompts file that holds the prompt as token ids."""
    return json.dumps({"name": prompt.name, "kind": prompt.kind, "token_ids": list(token_ids)}) + "\n"


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Prompts of a JSON-lines file: {"messages": [...]}, {"prompt": text} or {"token_ids": [...]}, each with an optional name and kind.

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
    if not isinstance(entry, dict) or set(entry) - {"name", "kind"} not in ({"messages"}, {"prompt"}, {"token_ids"}):
        raise refuse(
            'must be {"messages": [...]}, {"prompt": text} or {"token_ids": [...]}, with "name" and "kind" if you like'
        )
    name, kind = str(entry.get("name", where)), str(entry.get("kind", "file"))
    if "prompt" in entry:
        return _ask(name, kind, str(entry["prompt"]))
    if "token_ids" in entry:
        token_ids = entry["token_ids"]
        if not isinstance(token_ids, list) or not token_ids or not all(type(i) is int and i >= 0 for i in token_ids):
            raise refuse("token_ids must be a list of token ids")
        return BenchPrompt(name, kind, token_ids=tuple(token_ids))
    messages = entry["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise refuse("messages must be a list of objects")
    return BenchPrompt(name, kind, tuple(messages))
