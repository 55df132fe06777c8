"""What a gateway reads of a checkpoint itself: its tokenizer, and the sampling values it recommends."""

import json
from pathlib import Path

import pytest

from espalier.cluster.config import ServedModel
from espalier.cluster.served_text import load_text, recommended_sampling
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import CheckpointError
from tests.support.tiny import make_tiny_checkpoint


def test_recommended_sampling_takes_what_we_have_a_field_for(tmp_path: Path) -> None:
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": 2, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_a_checkpoint_need_not_recommend_anything(tmp_path: Path) -> None:
    assert recommended_sampling(tmp_path) == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": "hot"}', '{"top_k": true}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        recommended_sampling(tmp_path)


def test_a_broken_tokenizer_leaves_a_model_that_tells_why(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "checkpoint")
    model = ServedModel(name="tiny", engine=EngineConfig(model_path=checkpoint))
    assert load_text(model).text is not None
    (checkpoint / "tokenizer.json").write_text("{")
    broken = load_text(model)
    assert broken.text is None
    assert broken.failure is not None and "tokenizer.json" in broken.failure.message
