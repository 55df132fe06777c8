"""Requests that could never finish here are refused by numbers, and by the name of the field."""

import pytest

from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import Request, SamplingParams
from espalier.replicas.schedule.limits import check_servable
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

INFO = fake_info(num_blocks=4, max_context=100, vocab_size=50)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request("a", [50]), "prompt"),
        (make_request("a", [-1]), "prompt"),
        (make_request("a", [1], emitted=[50], max_tokens=3), "emitted_token_ids"),
        (make_request("a", [1], emitted=[2, 3, 4], max_tokens=3), "emitted_token_ids"),
        (make_request("a", [1], params=SamplingParams(stop_token_ids=(50,))), "stop_token_ids"),
        (make_request("a", [1], params=SamplingParams(logit_bias=((50, 1.0),))), "logit_bias"),
        (make_request("a", [1] * 65, max_tokens=1), "prompt"),
        (make_request("a", [1] * 64, max_tokens=2), "max_tokens"),
        (make_request("a", [1], max_tokens=65), "max_tokens"),
    ],
)
def test_refused_by_name(request_: Request, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{param}: ") as caught:
        check_servable(request_, INFO)
    assert caught.value.param == param


def test_the_context_bounds_prompt_and_reply_together() -> None:
    info = fake_info(num_blocks=64, max_context=100)
    check_servable(make_request("a", [1] * 90, max_tokens=10), info)
    for prompt_len, max_tokens, param in ((90, 11, "max_tokens"), (100, 1, "prompt")):
        with pytest.raises(InvalidRequestError) as caught:
            check_servable(make_request("a", [1] * prompt_len, max_tokens=max_tokens), info)
        assert caught.value.param == param


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(64, 1), (1, 64), (40, 25)])
def test_what_just_fits_alone_is_served(prompt_len: int, max_tokens: int) -> None:
    rounds = Rounds(fake_config(), FakeShard(fake_info(num_blocks=4, eos=())))
    requests = [make_request(str(i), range(i, i + prompt_len), max_tokens=max_tokens) for i in range(3)]
    rounds.run(*requests)
    rounds.assert_exact()
