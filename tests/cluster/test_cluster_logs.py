"""Log lines as JSON and as text, and the follower that brings them to the terminal."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.cluster.logs import LogConfig, LogFollower, configure_logging
from espalier.cluster.origin import Origin, at_work_for
from espalier.cluster.trace_context import TraceContext


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    logger = logging.getLogger("espalier")
    before = logger.handlers, logger.level, logger.propagate
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


def test_json_lines_hold_the_event_and_its_fields(tmp_path: Path) -> None:
    configure_logging(LogConfig(as_json=True, folder=tmp_path), "gateway-1")
    logging.getLogger("espalier.cluster.gateway").info("request", extra={"call_id": "a", "seconds": 0.5})
    logging.getLogger("other").error("not ours")
    [line] = (tmp_path / "gateway-1.log").read_text().splitlines()
    fields = json.loads(line)
    assert fields.pop("ts") > 0
    assert fields == {
        "level": "info",
        "logger": "espalier.cluster.gateway",
        "event": "request",
        "call_id": "a",
        "seconds": 0.5,
    }


def test_json_lines_tell_the_request_and_the_trace_that_they_belong_to(tmp_path: Path) -> None:
    configure_logging(LogConfig(as_json=True, folder=tmp_path), "p")
    log = logging.getLogger("espalier")
    trace = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")
    with at_work_for(Origin("one", trace)):
        log.info("traced")
        with at_work_for(Origin("two")):
            log.info("plain")
    log.info("nobody's")
    lines = [json.loads(line) for line in (tmp_path / "p.log").read_text().splitlines()]
    assert [(line.get("request_id"), line.get("trace_id")) for line in lines] == [
        ("one", "a" * 32),
        ("two", None),
        (None, None),
    ]


def test_text_lines_say_nothing_of_it(tmp_path: Path) -> None:
    configure_logging(LogConfig(folder=tmp_path), "p")
    with at_work_for(Origin("one")):
        logging.getLogger("espalier").info("request")
    assert (tmp_path / "p.log").read_text().rstrip().endswith("info    request")


def test_exceptions_stay_in_their_line(tmp_path: Path) -> None:
    configure_logging(LogConfig(as_json=True, folder=tmp_path), "p")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("espalier").exception("failed")
    [line] = (tmp_path / "p.log").read_text().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_text_lines_leave_out_what_is_not_known(tmp_path: Path) -> None:
    configure_logging(LogConfig(folder=tmp_path), "p")
    logging.getLogger("espalier").info("request", extra={"outcome": "ok", "ttft_s": None})
    assert (tmp_path / "p.log").read_text().rstrip().endswith("info    request outcome=ok")


def test_the_level_is_kept(tmp_path: Path) -> None:
    configure_logging(LogConfig(level="warning", folder=tmp_path), "p")
    logging.getLogger("espalier").info("quiet")
    assert (tmp_path / "p.log").read_text() == ""


def test_the_follower_copies_whole_lines_once_and_finds_new_files(tmp_path: Path) -> None:
    out = io.StringIO()
    follower = LogFollower(tmp_path, out)
    (tmp_path / "a.log").write_text("one\ntw")
    follower.copy_new_lines()
    assert out.getvalue() == "one\n"
    with (tmp_path / "a.log").open("a") as file:
        file.write("o\n")
    (tmp_path / "b.log").write_text("three\n")
    follower.copy_new_lines()
    follower.copy_new_lines()
    assert out.getvalue() == "one\ntwo\nthree\n"
