"""The bench against scripted servers in this process: what it sends, what it counts, what it refuses to believe."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from espalier.deploy.bench.http_target import HttpTarget, state_of
from espalier.deploy.bench.load import run_bench
from espalier.deploy.bench.plan import BenchPlan
from espalier.deploy.bench.prompts import KINDS, BenchPrompt, built_in, read_prompts
from espalier.deploy.bench.report import COLUMNS, bench_json, tables
from espalier.deploy.bench.results import BenchResult
from espalier.deploy.bench.target import BenchError, TargetState
from espalier.deploy.cli import main
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.token_hash import token_sha256

PROMPTS = tuple(BenchPrompt(name, "talk", ({"role": "user", "content": name},)) for name in ("one", "two"))


@dataclass
class ScriptedCluster:
    """Answers each prompt with its own ids. `fault`: what to do to the n-th chat call (from 0). shift: added to every id.

    is_espalier: False serves as others do, without ids and hashes; knows_ignore_eos: what such a one thinks of that field.
    """

    models: tuple[str, ...] = ("scripted",)
    key: str | None = None
    tells_cpu: bool = True
    faults: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    shift: int = 0
    numerics_id: str = "cpu1"
    is_espalier: bool = True
    knows_ignore_eos: bool = True

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        own = {"vocab_size": 512, "quantization": "none", "numerics_id": self.numerics_id}
        more = {"owned_by": "espalier", "max_model_len": 4096, "espalier": own} if self.is_espalier else {}
        return web.json_response({"data": [{"id": name, **more} for name in self.models]})

    async def _metrics(self, _: web.Request) -> web.Response:
        spent = 0.5 * len(self.bodies)
        text = f"# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total {spent}\n" if self.tells_cpu else ""
        return web.Response(text=text)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(body)
        if fault == "full" or ("ignore_eos" in body and not self.knows_ignore_eos):
            return web.json_response({"error": {"message": "not taken"}}, status=429 if fault else 400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keepalive\n\n")
        ids = [len(body["messages"][0]["content"]) + i + self.shift for i in range(body["max_tokens"])]
        if fault == "other tokens":
            ids[-1] += 1
        for index, token_id in enumerate(ids):
            # Let the other streams of the level in before the first token is out.
            for _ in range(20):
                await asyncio.sleep(0)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": "x"}}
            chunk: dict[str, Any] = {"choices": [choice], "usage": None}
            if self.is_espalier:
                choice["token_ids"] = [token_id]
            if self.is_espalier and index == 0:
                chunk["prompt_token_ids"] = list(range(60_000))
            if index == len(ids) - 1:
                choice["finish_reason"] = "length"
            if self.is_espalier and index == len(ids) - 1:
                chunk["espalier"] = {"token_sha256": token_sha256(ids if fault != "wrong hash" else [0])}
            if fault == "error event" and index == 1:
                chunk = {"error": {"message": "replica lost"}}
            if fault == "cut" and index == 1:
                break
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.running -= 1
        if fault != "cut":
            details = {"cached_tokens": 4} if self.is_espalier else None
            usage = {"prompt_tokens": 9, "completion_tokens": 2 * len(ids), "prompt_tokens_details": details}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def plan(**changes: Any) -> BenchPlan:
    fields: dict[str, Any] = {
        "prompts": PROMPTS,
        "samplings": ("greedy",),
        "levels": (1, 3),
        "num_tokens": 4,
        "reps": 2,
    }
    return BenchPlan(**(fields | changes))


@contextmanager
def serving(cluster: ScriptedCluster) -> Iterator[str]:
    """The cluster on a free port, on a loop of its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(cluster.app())

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def target_of(cluster: ScriptedCluster, **options: Any) -> Iterator[HttpTarget]:
    with serving(cluster) as url:
        target = HttpTarget(url, **options)
        try:
            yield target
        finally:
            target.close()


def bench(cluster: ScriptedCluster, *, api_key: str | None = None, **changes: Any) -> BenchResult:
    with target_of(cluster, api_key=api_key) as target:
        return run_bench(plan(**changes), [target], lambda line: None)


def counts(result: BenchResult) -> dict[str, tuple[int, int, int]]:
    """Equal, unequal, failed of each row."""
    found = {row.streams: row.comparison for row in result.rows}
    return {streams: (row.equal, row.unequal, row.failed) for streams, row in found.items()}


def test_levels_compare_with_the_solo_runs() -> None:
    cluster = ScriptedCluster()
    result = bench(cluster)
    assert result.targets[0].model == "scripted"
    assert counts(result) == {"alone": (0, 0, 0), "1": (2, 0, 0), "3": (6, 0, 0)}
    assert [(row.speed.streams, row.speed.tokens) for row in result.rows] == [(2, 8), (2, 8), (6, 24)]
    assert result.rows[1].speed.cpu_s_per_token == pytest.approx(0.5 * 2 / 8)
    assert result.rows[1].speed.cached_share == pytest.approx(4 / 9)
    assert cluster.most_running == 3
    first = cluster.bodies[0]
    assert (first["temperature"], first["stream"], first["ignore_eos"], first["max_tokens"]) == (0.0, True, True, 4)
    assert {body["messages"][0]["content"] for body in cluster.bodies[2:4]} == {"one", "two"}
    assert result.is_clean


def test_a_prompt_has_one_seed_wherever_it_runs() -> None:
    cluster = ScriptedCluster()
    bench(cluster, samplings=("seeded",), serial=True)
    seeds = {(body["messages"][0]["content"], body["seed"]) for body in cluster.bodies}
    assert len(seeds) == len({seed for _, seed in seeds}) == 2
    assert cluster.bodies[0]["temperature"] > 0
    assert [body.get("draft", True) for body in cluster.bodies[:4]] == [True, True, False, False]


@pytest.mark.parametrize(
    ("fault", "expected", "said"),
    [
        ("other tokens", (5, 1, 0), "two: token 3 is 7, and 6 in 4 tokens alone"),
        ("full", (5, 0, 1), "status 429"),
        ("error event", (5, 0, 1), "replica lost"),
        ("cut", (5, 0, 1), "broke off"),
        ("wrong hash", (5, 0, 1), "its tokens hash to"),
    ],
)
def test_what_goes_wrong_in_one_stream(fault: str, expected: tuple[int, int, int], said: str) -> None:
    result = bench(ScriptedCluster(faults={3: fault}), levels=(3,))
    assert counts(result)["3"] == expected
    assert said in result.notes[0]
    assert not result.is_clean


def test_serial_runs_are_compared_too() -> None:
    result = bench(ScriptedCluster(faults={2: "other tokens"}), levels=(1,), serial=True)
    assert counts(result) == {"alone": (0, 0, 0), "serial": (1, 1, 0), "1": (2, 0, 0)}


def test_a_prompt_that_fails_alone_ends_the_bench() -> None:
    with pytest.raises(BenchError, match=r"prompt two fails when run alone: .*replica lost"):
        bench(ScriptedCluster(faults={1: "error event"}))


def test_cpu_is_absent_when_the_server_does_not_tell() -> None:
    assert bench(ScriptedCluster(tells_cpu=False), levels=(1,)).rows[1].speed.cpu_s_per_token is None


def test_without_solo_runs_nothing_counts_as_equal() -> None:
    result = bench(ScriptedCluster(), levels=(3,), alone=False)
    assert counts(result) == {"3": (0, 0, 0)}
    assert result.rows[0].comparison.uncompared == 6
    assert result.is_clean


def test_the_model_must_be_chosen_among_several_and_the_key_sent() -> None:
    with pytest.raises(InvalidRequestError, match="serves a, b; choose with --model"):
        bench(ScriptedCluster(models=("a", "b")))
    with pytest.raises(BenchError, match="answers 401"):
        bench(ScriptedCluster(key="secret"))
    assert counts(bench(ScriptedCluster(key="secret"), api_key="secret", levels=(1,)))["1"] == (2, 0, 0)


@pytest.mark.parametrize("knows_ignore_eos", [True, False])
def test_a_server_of_another_make_is_timed_and_nothing_of_it_counts_as_equal(knows_ignore_eos: bool) -> None:
    cluster = ScriptedCluster(is_espalier=False, knows_ignore_eos=knows_ignore_eos)
    result = bench(cluster, levels=(3,))
    row = result.rows[-1]
    assert counts(result)["3"] == (0, 0, 0)
    assert (row.comparison.uncompared, row.speed.tokens) == (6, 6 * 8)
    assert "no hash" in tables(result)
    own = {"return_token_ids", "draft", "top_k", "repetition_penalty"}
    assert not any(own & body.keys() for body in cluster.bodies)
    assert ("ignore_eos" in cluster.bodies[-1]) is knows_ignore_eos


@pytest.mark.parametrize("option", ["serial", "fresh"])
def test_what_needs_hashes_is_refused_by_name_where_there_are_none(option: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"--{option}: .* tells no hash"):
        bench(ScriptedCluster(is_espalier=False), **{option: True})


@pytest.mark.parametrize(("shift", "numerics_id", "clean"), [(0, "cpu1", True), (1, "cpu1", False), (1, "other", True)])
def test_two_servers_take_turns_and_their_replies_are_held_together(shift: int, numerics_id: str, clean: bool) -> None:
    one, two = ScriptedCluster(), ScriptedCluster(shift=shift, numerics_id=numerics_id)
    with target_of(one) as first, target_of(two) as second:
        result = run_bench(plan(levels=(2,), reps=3), [first, second], lambda line: None)
    (pair,) = result.pairs
    assert (pair.same, pair.different) == ((6, 0) if shift == 0 else (0, 6))
    assert len(one.bodies) == len(two.bodies) == 2 + 6
    assert pair.tokens_per_s is not None and pair.tokens_per_s > 0
    assert counts(result)["2"] == (6, 0, 0)
    assert result.is_clean is clean
    assert "same" in tables(result)


def test_reports_hold_every_row_and_no_key() -> None:
    cluster = ScriptedCluster()
    result = bench(cluster, api_key="secret")
    lines = tables(result).splitlines()[2:]
    assert len(lines) == 2 + len(result.rows)
    assert len({len(line) for line in lines}) == 1
    assert lines[0].count("|") == len(COLUMNS) + 1
    content = json.loads(bench_json(plan(), result, {"reps": "2", "commit": "abc"}))
    assert content["setup"]["commit"] == "abc"
    assert content["targets"][0]["model"] == "scripted"
    assert [row["comparison"]["equal"] for row in content["rows"]] == [0, 2, 6]
    assert len(content["solo"]) == 2


def test_the_command_writes_both_and_its_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(cluster: ScriptedCluster) -> int:
        with serving(cluster) as url:
            more = ["--levels", "1,2", "--tokens", "3", "--distinct", "1", "--api-key", "hidden"]
            return main(["bench", "--url", url, *more, "--json", str(tmp_path / "b.json")])

    assert command(ScriptedCluster()) == 0
    assert "tok/s a stream" in capsys.readouterr().out
    text = (tmp_path / "b.json").read_text()
    assert json.loads(text)["setup"]["options"]["tokens"] == "3"
    assert "hidden" not in text
    assert command(ScriptedCluster(faults={1: "other tokens"})) == 1
    assert "wrong: A, code, greedy, 1, code-0: token 2 is" in capsys.readouterr().err


def test_state_is_read_from_metrics() -> None:
    text = """
espalier_num_requests_running{model="m",replica="a"} 2
espalier_num_requests_running{model="m",replica="b"} 1
espalier_num_requests_waiting{model="m",replica="a"} 4
espalier_kv_cache_usage_perc{model="m",replica="a"} 0.25
espalier_kv_cache_usage_perc{model="m",replica="b"} 0
espalier_engine_device_memory_reserved_bytes{model="m",replica="a"} 1000
espalier_engine_device_memory_reserved_bytes{model="m",replica="b"} 234
"""
    state = state_of(text)
    assert state == TargetState(num_live=7, held_share=0.25, device_bytes=1234)
    assert not state.is_idle
    assert state_of("").is_idle


@pytest.mark.parametrize(
    "arguments",
    [
        ["--levels", "0"],
        ["--levels", "1,x"],
        ["--tokens", "-3"],
        ["--prompts", "absent.jsonl"],
        ["--json", "absent/b.json"],
        ["--max-lanes", "3"],
        ["--serial", "--no-alone"],
        ["--same-as", "x.json", "--no-alone"],
        ["--abort-share", "0.5"],
        ["--soak", "x"],
        ["--soak", "5", "--abort-share", "2"],
        ["--soak", "5", "--fresh"],
        ["--prompt-tokens", "5", "--prompts", "code"],
        ["--engine", "absent"],
        ["--write-prompts", "x.jsonl"],
        ["--engine", "absent", "--url", "http://x"],
    ],
)
def test_bad_arguments_are_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert any(argument in said for argument in arguments if argument.startswith("--"))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"name": "a", "prompt": "hello"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"kind": "ids", "token_ids": [5, 6]}\n'
    )
    first, second, third = read_prompts(path)
    assert (first.name, first.kind, first.messages[0]["content"]) == ("a", "file", "hello")
    assert second.messages == ({"role": "user", "content": "hi"},)
    assert (third.kind, third.token_ids) == ("ids", (5, 6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("{", ":1: is not JSON"),
        ('{"prompt": "a", "message": []}', ":1: must be"),
        ('{"name": "a", "prompt": "a"}\n[]', ":2: must be"),
        ('{"messages": ["a"]}', ":1: messages must be"),
        ('{"token_ids": []}', ":1: token_ids must be"),
        ('{"token_ids": [true]}', ":1: token_ids must be"),
        ('{"name": "a", "prompt": "a"}\n{"name": "a", "prompt": "b"}', "a name of its own"),
    ],
)
def test_broken_prompt_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        read_prompts(path)


def test_built_in_prompts_differ_and_some_share_a_beginning() -> None:
    prompts = [prompt for kind in KINDS for prompt in built_in(kind, 9)]
    assert KINDS == ("code", "chat", "long", "shared")
    assert len({prompt.name for prompt in prompts}) == len({str(prompt.messages) for prompt in prompts}) == 36
    assert len({prompt.messages[0]["content"] for prompt in built_in("shared", 9)}) == 1
