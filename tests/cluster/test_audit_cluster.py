"""A cluster of its own with `audit_share: 1` and two replicas: every reply is run again on the other one, and all are equal."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import wait_until
from tests.support.cluster_clients import GRPC, HTTP_STREAMED, HTTP_WHOLE, Answer, Ask, Roads
from tests.support.served_process import Served, serving
from tests.support.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.cluster

# Six prompts, so that later ones find the prefixes of earlier ones; half of them seeded. Five at a time share their rounds.
ASKS = [
    Ask(content=f"Question {i % 6}: " + "word " * (9 * (i % 6)), temperature=0.8 * (i % 2), seed=i) for i in range(15)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    options = {
        "models": [{"model": str(make_tiny_checkpoint(folder / "tiny")), "replicas": 2, "context": 512, "cpus": 0.1}],
        "cache_dir": str(folder / "cache"),
        "audit_share": 1,
    }
    with serving(folder, options) as served:
        yield served


def audits(served: Served) -> dict[str, float]:
    """Counts by result, and `pending`."""
    text = httpx.get(f"{served.http_url}/metrics", timeout=30).text
    found = {r: float(v) for r, v in re.findall(r'^espalier_audit_total\{.*result="(\w+)"\} (\S+)$', text, re.M)}
    [pending] = re.findall(r"^espalier_audit_pending\{.*\} (\S+)$", text, re.M)
    return found | {"pending": float(pending)}


def test_every_reply_is_audited_and_equal(served: Served, folder: Path) -> None:
    async def talk() -> list[Answer]:
        async with Roads(served.http_url, served.grpc_address, "tiny") as roads:
            answers = []
            for start, road in ((0, HTTP_WHOLE), (5, HTTP_STREAMED), (10, GRPC)):
                answers += await roads.together(ASKS[start : start + 5], road)
            return answers

    assert audits(served) == {"equal": 0, "unequal": 0, "failed": 0, "dropped": 0, "pending": 0}
    answers = asyncio.run(talk())
    assert all(answer.whole for answer in answers)
    assert len({answer.sha256 for answer in answers}) > 6, "replies that are all alike compare nothing"
    wait_until(lambda: audits(served)["equal"] == len(ASKS), "all are audited")
    assert audits(served) == {"equal": len(ASKS), "unequal": 0, "failed": 0, "dropped": 0, "pending": 0}
    assert "audit" not in (folder / "serve.log").read_text()
