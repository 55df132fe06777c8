"""Admission: a bound on choices, and a time to retry that follows how fast requests end."""

import pytest

from espalier.cluster.admission import Admission
from espalier.replicas.errors import InvalidRequestError, QueueFullError


def test_choices_take_places_and_give_them_back() -> None:
    admission = Admission(4)
    admission.admit(3, now=0)
    with pytest.raises(QueueFullError) as refused:
        admission.admit(2, now=0)
    assert refused.value.retry_after_s == 1.0
    admission.admit(1, now=0)
    admission.release(3, now=1)
    admission.admit(3, now=1)
    assert admission.outstanding == 4


def test_a_call_that_can_never_fit_is_invalid() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Admission(4).admit(5, now=0)
    assert refused.value.param == "n"


@pytest.mark.parametrize(("every_s", "expected_s"), [(0.01, 1.0), (3.0, 3.0), (1000.0, 60.0)])
def test_the_time_to_retry_is_the_mean_time_between_ends(every_s: float, expected_s: float) -> None:
    admission = Admission(100)
    for i in range(50):
        admission.admit(1, now=i * every_s)
        admission.release(1, now=i * every_s)
    assert admission.retry_after_s(now=49 * every_s) == expected_s
