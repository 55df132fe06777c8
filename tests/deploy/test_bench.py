"""The bench against a scripted cluster in this process: what it sends, what it counts, what it refuses to believe."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from espalier.deploy.bench.load import BenchError, BenchPlan, BenchResult, run_bench
from espalier.deploy.bench.prompts import BUILT_IN, BenchPrompt, read_prompts
from espalier.deploy.bench.report import COLUMNS, as_json, table
from espalier.deploy.cli import main
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.token_hash import token_sha256

T = TypeVar("T")
PROMPTS = tuple(BenchPrompt(name, ({"role": "user", "content": name},)) for name in ("one", "two"))


@dataclass
class ScriptedCluster:
    """Answers each prompt with its own ids. `fault`: what to do to the n-th chat call (from 0)."""

    models: tuple[str, ...] = ("scripted",)
    key: str | None = None
    tells_cpu: bool = True
    faults: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _metrics(self, _: web.Request) -> web.Response:
        spent = 0.5 * len(self.bodies)
        text = f"# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total {spent}\n" if self.tells_cpu else ""
        return web.Response(text=text)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        fault = self.faults.get(len(self.bodies))
        self.bodies.append(body)
        if fault == "full":
            return web.json_response({"error": {"message": "queue is full"}}, status=429)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keepalive\n\n")
        ids = [len(body["messages"][0]["content"]) + i for i in range(body["max_tokens"])]
        if fault == "other tokens":
            ids[-1] += 1
        for index, token_id in enumerate(ids):
            # Let the other streams of the level in before the first token is out.
            for _ in range(20):
                await asyncio.sleep(0)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": "x"}, "token_ids": [token_id]}
            chunk: dict[str, Any] = {"choices": [choice], "usage": None}
            if index == 0:
                chunk["prompt_token_ids"] = list(range(60_000))
            if index == len(ids) - 1:
                choice["finish_reason"] = "length"
                chunk["espalier"] = {"token_sha256": token_sha256(ids if fault != "wrong hash" else [0])}
            if fault == "error event" and index == 1:
                chunk = {"error": {"message": "replica lost"}}
            if fault == "cut" and index == 1:
                break
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.running -= 1
        if fault != "cut":
            usage = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}
            await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response


def plan(url: str, **changes: Any) -> BenchPlan:
    fields: dict[str, Any] = {
        "url": url,
        "model": None,
        "api_key": None,
        "levels": (1, 3),
        "num_tokens": 4,
        "seeded": False,
        "reps": 2,
        "prompts": PROMPTS,
    }
    return BenchPlan(**(fields | changes))


def with_cluster(cluster: ScriptedCluster, call: Callable[[str], Awaitable[T]]) -> T:
    async def run() -> T:
        runner = web.AppRunner(cluster.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await call(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def bench(cluster: ScriptedCluster, **changes: Any) -> BenchResult:
    return with_cluster(cluster, lambda url: run_bench(plan(url, **changes), lambda line: None))


def test_levels_compare_with_the_solo_runs() -> None:
    cluster = ScriptedCluster()
    result = bench(cluster)
    assert result.model == "scripted"
    assert [(level.level, level.streams, level.tokens) for level in result.levels] == [(1, 2, 8), (3, 6, 24)]
    assert [(level.equal, level.unequal, level.failed) for level in result.levels] == [(2, 0, 0), (6, 0, 0)]
    assert result.levels[0].gateway_cpu_s_per_token == pytest.approx(0.5 * 2 / 8)
    assert [record.cached_tokens for record in result.solo] == [4, 4]
    assert cluster.most_running == 3
    first = cluster.bodies[0]
    assert (first["temperature"], first["stream"], first["ignore_eos"], first["max_tokens"]) == (0.0, True, True, 4)
    assert {body["messages"][0]["content"] for body in cluster.bodies[2:4]} == {"one", "two"}


def test_seeded_runs_carry_one_seed() -> None:
    cluster = ScriptedCluster()
    bench(cluster, seeded=True)
    assert len({(body["seed"], body["temperature"]) for body in cluster.bodies}) == 1
    assert cluster.bodies[0]["temperature"] > 0


@pytest.mark.parametrize(
    ("fault", "counts", "said"),
    [
        ("other tokens", (5, 1, 0), None),
        ("full", (5, 0, 1), "status 429"),
        ("error event", (5, 0, 1), "replica lost"),
        ("cut", (5, 0, 1), "broke off"),
        ("wrong hash", (5, 0, 1), "its tokens hash to"),
    ],
)
def test_what_goes_wrong_in_one_stream(fault: str, counts: tuple[int, int, int], said: str | None) -> None:
    result = bench(ScriptedCluster(faults={3: fault}), levels=(3,))
    (level,) = result.levels
    assert (level.equal, level.unequal, level.failed) == counts
    assert (said is None and not result.failures) or said in result.failures[0]


def test_a_prompt_that_fails_alone_ends_the_bench() -> None:
    with pytest.raises(BenchError, match=r"prompt two fails when run alone: .*replica lost"):
        bench(ScriptedCluster(faults={1: "error event"}))


def test_cpu_is_absent_when_the_gateway_does_not_tell() -> None:
    assert bench(ScriptedCluster(tells_cpu=False), levels=(1,)).levels[0].gateway_cpu_s_per_token is None


def test_the_model_must_be_chosen_among_several_and_the_key_sent() -> None:
    with pytest.raises(InvalidRequestError, match="serves a, b; choose with --model"):
        bench(ScriptedCluster(models=("a", "b")))
    with pytest.raises(BenchError, match="answers 401"):
        bench(ScriptedCluster(key="secret"))
    assert bench(ScriptedCluster(key="secret"), api_key="secret", levels=(1,)).levels[0].failed == 0


def test_reports_hold_every_level_and_no_key() -> None:
    cluster = ScriptedCluster()
    result = bench(cluster, api_key="secret")
    lines = table(result).splitlines()
    assert len(lines) == 2 + len(result.levels)
    assert len({len(line) for line in lines}) == 1
    assert lines[0].count("|") == len(COLUMNS) + 1
    text = as_json(plan("http://x", api_key="secret"), result)
    assert "secret" not in text
    content = json.loads(text)
    assert content["setup"]["model"] == "scripted"
    assert [level["equal"] for level in content["levels"]] == [2, 6]


def test_the_command_writes_both_and_its_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(cluster: ScriptedCluster) -> int:
        async def run(url: str) -> int:
            arguments = ["bench", "--url", url, "--levels", "1,2", "--tokens", "3", "--json", str(tmp_path / "b.json")]
            return await asyncio.to_thread(main, arguments)

        return with_cluster(cluster, run)

    assert command(ScriptedCluster()) == 0
    assert "tokens/s in all" in capsys.readouterr().out
    assert json.loads((tmp_path / "b.json").read_text())["setup"]["tokens"] == 3
    assert command(ScriptedCluster(faults={len(BUILT_IN): "other tokens"})) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--levels", "0"],
        ["--levels", "1,x"],
        ["--tokens", "-3"],
        ["--prompts", "absent.jsonl"],
        ["--json", "absent/b.json"],
    ],
)
def test_bad_arguments_are_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"name": "a", "prompt": "hello"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    first, second = read_prompts(path)
    assert (first.name, first.messages[0]["content"]) == ("a", "hello")
    assert second.messages == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("{", ":1: is not JSON"),
        ('{"prompt": "a", "message": []}', ":1: must be"),
        ('{"name": "a", "prompt": "a"}\n[]', ":2: must be"),
        ('{"messages": ["a"]}', ":1: messages must be"),
        ('{"name": "a", "prompt": "a"}\n{"name": "a", "prompt": "b"}', "a name of its own"),
    ],
)
def test_broken_prompt_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        read_prompts(path)


def test_built_in_prompts_cover_the_kinds_and_share_a_beginning() -> None:
    names = [prompt.name for prompt in BUILT_IN]
    assert len(set(names)) == len(names)
    assert {"code", "chat", "long"} < set(names)
    shared = [prompt for prompt in BUILT_IN if prompt.name.startswith("shared")]
    assert len(shared) >= 2
    assert len({prompt.messages[0]["content"] for prompt in shared}) == 1
