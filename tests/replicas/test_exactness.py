"""The product, on a real (tiny, quantized) model: the tokens of a request depend on the request alone.

Each request has one reference hash, from a run alone with one step in flight and without prefix cache. Whatever else happens, to it or
around it, must end in the same hash.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.replicas import shard as shard_module
from espalier.replicas.config import EngineConfig
from espalier.replicas.detokenizer import TextDecoder
from espalier.replicas.engine import Engine
from espalier.replicas.errors import InvalidRequestError, RequestFailedError
from espalier.replicas.group import LocalShardGroup
from espalier.replicas.request import Request, SamplingParams
from espalier.replicas.shard import Shard
from espalier.replicas.tokenizer import Tokenizer
from tests.support.engine_runs import EngineRun, running
from tests.support.rounds import make_request
from tests.support.tiny import make_tiny_checkpoint
from tests.support.waiting import wait_until

MAX_TOKENS = 16
# A host tier of some hundred blocks.
HOST_GB = 0.01
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01, seed=7, max_tokens=MAX_TOKENS)
PENALIZED = SamplingParams(
    temperature=0.8,
    seed=11,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    max_tokens=MAX_TOKENS,
    min_tokens=MAX_TOKENS,
)
# With a prompt of 500 tokens it takes every block of a cache of 512.
FILLING = SamplingParams(temperature=0.0, max_tokens=1)
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "penalized": PENALIZED}


def prompt_of(number: int, length: int) -> list[int]:
    """Ordinary tokens of the tiny vocabulary, other ones for each number."""
    return [3 + (number * 131 + position * position * 7 + position) % 500 for position in range(length)]


class Models:
    """Engines over one tiny checkpoint, and the reference hash of any request."""

    def __init__(self, folder: Path) -> None:
        self.path = make_tiny_checkpoint(folder / "model", architecture="qwen3")
        self.cache_dir = folder / "cache"
        self.text = Tokenizer.from_folder(self.path)
        self._hashes: dict[tuple[object, ...], str] = {}

    @contextmanager
    def run(
        self,
        *,
        kv_tokens: int = 4096,
        depth: int = 2,
        tracks: int = 1,
        batch_tokens: int = 64,
        prefix_cache: bool = True,
        host_kv_gb: float = 0.0,
        text: TextDecoder | None = None,
    ) -> Iterator[EngineRun]:
        config = EngineConfig(
            model_path=self.path,
            kv_tokens=kv_tokens,
            max_lanes=16,
            batch_tokens=batch_tokens,
            max_steps_in_flight=depth,
            tracks=tracks,
            prefix_cache=prefix_cache,
            host_kv_gb=host_kv_gb,
            cpu_threads=1,
            cache_dir=self.cache_dir,
        )
        with running(Engine(config, LocalShardGroup(Shard(config)), text or self.text)) as run:
            yield run

    def references(self, requests: list[Request]) -> list[str]:
        """The hash of each, alone."""
        keys = [(request.prompt_token_ids, request.params) for request in requests]
        missing = [request for request, key in zip(requests, keys, strict=True) if key not in self._hashes]
        if missing:
            with self.run(depth=1, prefix_cache=False) as run:
                for number, request in enumerate(missing):
                    (answer,) = run.run(
                        make_request(f"alone {number}", request.prompt_token_ids, params=request.params)
                    )
                    self._hashes[(request.prompt_token_ids, request.params)] = answer.token_sha256
        return [self._hashes[key] for key in keys]

    def assert_exact(self, run: EngineRun, *request_ids: str) -> None:
        answers = [run.answers[request_id] for request_id in request_ids or run.answers]
        assert [answer.finish.error for answer in answers if answer.finish] == [None] * len(answers)
        expected = self.references([answer.request for answer in answers])
        assert [answer.token_sha256 for answer in answers] == expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("exactness"))


def crowd(level: int, params: SamplingParams) -> list[Request]:
    """Prompts of unlike lengths, some longer than a round."""
    return [make_request(f"{i} of {level}", prompt_of(i, 3 + 11 * i % 97), params=params) for i in range(level)]


def test_replies_are_worth_comparing(models: Models) -> None:
    """The tiny model says other things to other prompts and seeds, else every comparison below would be empty."""
    with models.run() as run:
        answers = run.run(*crowd(8, GREEDY))
        assert len({answer.token_sha256 for answer in answers}) == 8
        assert all(len(set(answer.token_ids)) > 3 for answer in answers)
        seeds = [SamplingParams(seed=seed, max_tokens=MAX_TOKENS) for seed in range(4)]
        sampled = run.run(*(make_request(f"seed {p.seed}", prompt_of(0, 20), params=p) for p in seeds))
        assert len({answer.token_sha256 for answer in sampled}) == 4


@pytest.mark.parametrize("tracks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_concurrent_is_alone_at_every_level(models: Models, kind: str, tracks: int) -> None:
    with models.run(prefix_cache=False, tracks=tracks) as run:
        for level in (1, 2, 3, 5, 8, 16):
            run.run(*crowd(level, KINDS[kind]))
        models.assert_exact(run)


@pytest.mark.parametrize("batch_tokens", [16, 23, 256])
def test_chunks_of_a_prompt_leave_no_trace(models: Models, batch_tokens: int) -> None:
    with models.run(batch_tokens=batch_tokens) as run:
        run.run(*crowd(8, GREEDY), make_request("long", prompt_of(99, 300), params=PENALIZED))
        models.assert_exact(run)


@pytest.mark.parametrize("kind", KINDS)
def test_cold_is_warm_is_after_eviction_at_every_tail(models: Models, kind: str) -> None:
    with models.run(kv_tokens=512) as run:
        for tail in (0, 1, 15, 16, 17, 127, 128, 129):
            prompt = prompt_of(tail, 64 + tail)
            for when in ("cold", "warm"):
                run.run(make_request(f"{when} {tail}", prompt, params=KINDS[kind]))
            run.run(make_request(f"other {tail}", prompt_of(300 + tail, 500), params=FILLING))
            run.run(make_request(f"evicted {tail}", prompt, params=KINDS[kind]))
            finishes = [run.answers[f"{when} {tail}"].finish for when in ("cold", "warm", "evicted")]
            cached = [finish.usage.cached_tokens for finish in finishes if finish is not None]
            assert cached == [0, (len(prompt) - 1) // 16 * 16, 0]
        models.assert_exact(run)


@pytest.mark.parametrize("tracks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_from_the_host_is_what_was_computed(models: Models, kind: str, tracks: int) -> None:
    """Prompts and replies that evict each other from a cache of 512 tokens, with room for all of them on the host."""
    with models.run(kv_tokens=512, host_kv_gb=HOST_GB, tracks=tracks) as run:
        for tail in (0, 1, 16, 129):
            prompt = prompt_of(tail, 64 + tail)
            (cold,) = run.run(make_request(f"cold {tail}", prompt, params=KINDS[kind]))
            turn = [*prompt, *cold.token_ids, *prompt_of(7, 5)]
            for number in range(2):
                run.run(make_request(f"other {tail} {number}", prompt_of(300 + tail + number, 500), params=FILLING))
                run.run(make_request(f"back {tail} {number}", prompt, params=KINDS[kind]))
            run.run(make_request(f"other {tail}", prompt_of(300 + tail, 500), params=FILLING))
            run.run(make_request(f"turn {tail}", turn, params=KINDS[kind]))
            finishes = [run.answers[name].finish for name in (f"back {tail} 0", f"back {tail} 1", f"turn {tail}")]
            cached = [finish.usage.cached_tokens for finish in finishes if finish is not None]
            whole = (len(prompt) - 1) // 16 * 16
            # A reply's last token is computed by the next turn.
            assert cached == [whole, whole, (len(prompt) + len(cold.token_ids) - 1) // 16 * 16]
        stats = run.engine.stats()
        assert stats.prefix_host_hits == 16 * stats.host_restores > 0.9 * stats.prefix_hits
        assert 0 < stats.host_saves <= stats.host_blocks_used <= stats.host_blocks and stats.host_evictions == 0
        models.assert_exact(run)


@pytest.mark.parametrize("host_kv_gb", [HOST_GB, 12 / 2**15])
@pytest.mark.parametrize(("depth", "tracks"), [(1, 1), (2, 1), (2, 2)])
def test_a_crowd_that_evicts_its_own_prefixes_is_exact(
    models: Models, depth: int, tracks: int, host_kv_gb: float
) -> None:
    """With room for all on the host, and for 12 blocks; some of the crowd leave. Nothing is held when all have ended."""
    with models.run(kv_tokens=160, depth=depth, tracks=tracks, host_kv_gb=host_kv_gb) as run:
        for wave in range(3):
            for i in range(6):
                params = replace(SAMPLED if i % 2 else GREEDY, max_tokens=40, ignore_eos=True)
                run.submit(make_request(f"{wave}.{i}", prompt_of(i % 4, 60 + 3 * i), params=params))
            run.engine.abort(f"{wave}.4")
            run.wait_tokens(f"{wave}.5", 3)
            run.engine.abort(f"{wave}.5")
            run.wait()
        models.assert_exact(run, *(f"{wave}.{i}" for wave in range(3) for i in range(4)))
        stats, scheduler = run.engine.stats(), run.engine._scheduler
        assert stats.preemptions > 0 and stats.host_restores > 0
        assert (stats.host_evictions > 0) == (stats.host_blocks == 12)
        wait_until(lambda: scheduler.pool.num_free == scheduler.pool.num_blocks, "all blocks are free")
        scheduler.check()
        assert scheduler.pool.host.num_claimed == 0


def test_a_host_tier_that_does_not_fit_is_refused_before_weights_are_read(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "load_decoder", None)
    with pytest.raises(InvalidRequestError, match=r"host_kv_gb: 1e\+06 GiB do not fit"), models.run(host_kv_gb=1e6):
        pass


@pytest.mark.parametrize(("depth", "tracks"), [(1, 1), (2, 1), (2, 2)])
def test_preempted_is_not_preempted(models: Models, depth: int, tracks: int) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParams(seed=5, max_tokens=60, ignore_eos=True, presence_penalty=0.6, repetition_penalty=1.2),
    ]
    requests = [make_request(str(i), prompt_of(i, 8 + i), params=params[i % 2]) for i in range(6)]
    with models.run(kv_tokens=160, depth=depth, tracks=tracks) as run:
        run.run(*requests)
        assert run.engine.stats().preemptions > 0
        models.assert_exact(run)


@pytest.mark.parametrize("tracks", [1, 2])
def test_the_next_turn_reuses_the_reply_and_is_exact(models: Models, tracks: int) -> None:
    """Three turns of one conversation: of each, all full blocks of the turn before are taken over, those of its reply too."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = prompt_of(1, 30)
    with models.run(tracks=tracks) as run:
        cached = []
        for turn, of_turn in enumerate((params, params, PENALIZED)):
            (answer,) = run.run(make_request(f"turn {turn}", prompt, params=of_turn))
            assert answer.finish is not None
            cached.append(answer.finish.usage.cached_tokens)
            prompt = [*prompt, *answer.token_ids, *prompt_of(2 + turn, 9)]
        # A reply's last token is computed by the next turn.
        assert cached == [0, (30 + 39) // 16 * 16, (79 + 39) // 16 * 16]
        stats = run.engine.stats()
        assert (stats.prefix_hits, stats.prefix_queries) == (sum(cached), 30 + 79 + 128)
        models.assert_exact(run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_re_run_alone_and_without_cache_is_equal(models: Models, kind: str) -> None:
    requests = crowd(8, KINDS[kind])
    again = [replace(r, request_id=f"{r.request_id} again", alone=True, use_prefix_cache=False) for r in requests]
    with models.run() as run:
        run.run(*requests)
        run.submit(*again)
        # The re-runs give way to these.
        run.run(*(make_request(f"after {r.request_id}", r.prompt_token_ids, params=r.params) for r in requests))
        finishes = [answer.finish for answer in run.wait(*(r.request_id for r in again))]
        assert [finish.usage.cached_tokens for finish in finishes if finish is not None] == [0] * 8
        models.assert_exact(run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_reply_is_the_whole_one(models: Models, kind: str) -> None:
    request = make_request("whole", prompt_of(4, 37), params=KINDS[kind])
    with models.run() as run:
        (whole,) = run.run(request)
        for kept in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
            emitted = whole.token_ids[:kept]
            resumed = make_request(f"from {kept}", prompt_of(4, 37), params=KINDS[kind], emitted=emitted)
            (answer,) = run.run(resumed)
            assert [*emitted, *answer.token_ids] == whole.token_ids
        models.assert_exact(run)


# Twice at the start of a prompt, this token triggers the faults below; no other prompt begins so.
MARK = 501


@pytest.mark.parametrize("place", ["prefill", "sample", "detokenize"])
def test_a_failing_request_leaves_its_neighbours_exact(
    models: Models, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults are put where the parts meet: the batch of rows, the sampler of one row, the tokenizer's bytes."""
    marked_seed = 666
    real_batch, real_sample = shard_module.make_batch, shard_module.sample_row

    class Text:
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == MARK:
                raise ValueError("injected")
            return models.text.token_bytes(token_id)

        def is_special(self, token_id: int) -> bool:
            return models.text.is_special(token_id)

    def make_batch(lanes, **shape):  # type: ignore[no-untyped-def]
        if any(lane.token_ids[:2] == (MARK, MARK) for lane in lanes):
            raise RuntimeError("injected")
        return real_batch(lanes, **shape)

    def sample_row(logits, row):  # type: ignore[no-untyped-def]
        if row.params.seed == marked_seed and row.position > 40:
            raise RuntimeError("injected")
        return real_sample(logits, row)

    if place == "prefill":
        monkeypatch.setattr(shard_module, "make_batch", make_batch)
    if place == "sample":
        monkeypatch.setattr(shard_module, "sample_row", sample_row)
    # Detokenizing fails at the first token that is MARK, which its bias makes the only choice.
    biased = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, seed=marked_seed, logit_bias=((MARK, 100.0),))
    plain = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, seed=marked_seed, ignore_eos=True)
    failing = make_request(
        "failing", [MARK, MARK, *prompt_of(9, 33)], params=biased if place == "detokenize" else plain
    )
    with models.run(text=Text() if place == "detokenize" else None) as run:
        run.run(*crowd(5, PENALIZED), failing, *(make_request(f"after {i}", prompt_of(i, 50)) for i in range(3)))
        finish = run.answers["failing"].finish
        assert finish is not None and isinstance(finish.error, RequestFailedError) and "injected" in str(finish.error)
        assert len(run.answers["failing"].token_ids) == (6 if place == "sample" else 0)
        run.run(make_request("next", prompt_of(9, 33), params=SAMPLED))
    monkeypatch.undo()
    models.assert_exact(run, *(name for name in run.answers if name != "failing"))
