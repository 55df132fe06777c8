"""Messages to calls and events to messages, without a server: what the generated types alone do not settle."""

import pytest

from espalier.cluster.call import ChoiceEvent, GenerateCall
from espalier.cluster.ingress import grpc_wire
from espalier.cluster.ingress.grpc_status import trailing_metadata
from espalier.cluster.ingress.pb import inference_pb2 as pb
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import Finish, FinishReason, SamplingParams, Timings, TokenEvent, Usage
from tests.support.fakes import FakeText, fake_model


def length_delimited(number: int, content: bytes) -> bytes:
    """Wire form of a short field of type string, bytes or message."""
    return bytes([number << 3 | 2, len(content)]) + content


def finished(matched: str | int | None) -> pb.Finish:
    call = GenerateCall(call_id="c", model="m", prompt_token_ids=(1,), params=SamplingParams(seed=9))
    finish = Finish(FinishReason.STOP, Usage(1, 2, 0), "hash", Timings(0.0, 0.0, 0.0), matched_stop=matched)
    event = TokenEvent(request_id="c-0", attempt=0, first_index=0, token_ids=(4, 5), text="", finish=finish)
    message = grpc_wire.response(call, ChoiceEvent(0, event, "r"), FakeText(), token_ids=False)
    assert message is not None
    return message.finish


def test_what_ended_a_choice_keeps_its_kind() -> None:
    assert finished("END").matched_stop == "END"
    assert finished(7).matched_token_id == 7
    assert finished(0).WhichOneof("matched") == "matched_token_id"
    assert finished(None).WhichOneof("matched") is None


def test_a_message_comes_back_as_it_was() -> None:
    request = pb.GenerateRequest(model="m", prompt="p", sampling={"logit_bias": {3: 1.0}}, n=2)
    assert grpc_wire.parse(request.SerializeToString(), pb.GenerateRequest) == request
    assert grpc_wire.parse(b"", pb.ListModelsRequest) == pb.ListModelsRequest()


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (length_delimited(12, b"grammar"), "GenerateRequest"),
        (length_delimited(5, b"\xa0\x06\x01"), "sampling"),
        (length_delimited(4, length_delimited(1, length_delimited(9, b"x"))), "messages"),
    ],
    ids=["top", "group", "deep"],
)
def test_fields_that_the_schema_lacks_are_refused(raw: bytes, where: str) -> None:
    with pytest.raises(InvalidRequestError, match="not one that this server honours") as caught:
        grpc_wire.parse(raw, pb.GenerateRequest)
    assert caught.value.param == where


@pytest.mark.parametrize("raw", [b"\x0a", b"\x0a\x05abc", b"\xff\xff\xff\xff", b"\x0a\x02\xc3\x28"], ids=repr)
def test_bytes_that_are_no_message_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="are no espalier"):
        grpc_wire.parse(raw, pb.GenerateRequest)


def test_numbers_are_the_same_as_in_json() -> None:
    """A float field would turn 0.1 into another number than HTTP's, and so give other tokens."""
    request = pb.GenerateRequest(prompt="p", sampling={"temperature": 0.1, "logit_bias": {1: 0.1}})
    parsed = grpc_wire.parse(request.SerializeToString(), pb.GenerateRequest)
    call = grpc_wire.generate_call(parsed, fake_model(), FakeText(), call_id="c", deadline=None)
    assert call.params.temperature == 0.1
    assert call.params.logit_bias == ((1, 0.1),)


def test_metadata_stays_ascii_whatever_a_client_calls_its_fields() -> None:
    error = InvalidRequestError("no", param="chat_template_kwargs.größe\n")
    assert trailing_metadata(error) == (("espalier-param", "chat_template_kwargs.gr??e?"),)
