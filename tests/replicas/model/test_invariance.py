"""The check at load: passes here, names what a library's arithmetic depends on when it depends on something."""

import pytest
import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import EngineError
from espalier.replicas.model import invariance
from espalier.replicas.model.decoder import Decoder
from espalier.replicas.model.invariance import check_row_invariance
from espalier.replicas.shard import Shard
from tests.support.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    config = EngineConfig(model_path=folder, cache_dir=folder.parent / "cache", kv_tokens=256, cpu_threads=1)
    return Shard(config)._decoder


def test_the_digest_is_the_same_on_any_number_of_threads(decoder: Decoder) -> None:
    one = check_row_invariance(decoder)
    torch.set_num_threads(2)
    try:
        assert check_row_invariance(decoder) == one
    finally:
        torch.set_num_threads(1)
    assert len(one) == 8


def test_a_product_that_depends_on_the_place_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = invariance.blocked_linear

    def placed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return exact(x, weight) * (1 + torch.arange(x.shape[0])[:, None] % 8 * 2.0**-23)

    monkeypatch.setattr(invariance, "blocked_linear", placed)
    monkeypatch.setattr(invariance, "_one_by_one", placed)
    with pytest.raises(EngineError, match="row's place"):
        check_row_invariance(decoder)


def test_a_product_that_depends_on_the_batch_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = invariance.blocked_linear
    monkeypatch.setattr(invariance, "blocked_linear", lambda x, weight: exact(x, weight) * (1 + x.shape[0] * 2.0**-20))
    with pytest.raises(EngineError, match="threads"):
        check_row_invariance(decoder)


def test_exp_that_treats_its_tail_otherwise_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.exp

    def tailed(x: torch.Tensor) -> torch.Tensor:
        y = exact(x)
        y[x.numel() // 16 * 16 :] *= 1 + 2.0**-22
        return y

    monkeypatch.setattr(invariance.torch, "exp", tailed)
    with pytest.raises(EngineError, match="number's place"):
        check_row_invariance(decoder)


def test_rough_numbers_are_fixed() -> None:
    x = invariance.rough(1000, seed=1)
    assert x.abs().max() <= 1.0
    assert abs(float(x.mean())) < 0.05
    assert x.unique().numel() > 990
    assert torch.equal(invariance.rough(10, 100, seed=1).view(-1), x)
