"""The chart with the values that `espalier render` writes makes the very Serve config that it writes beside them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.cluster.names import engine_app_name
from espalier.deploy.config import resolve
from espalier.deploy.render import Rendered, Target, render, serve_config, target_of
from tests.support.kube.chart import CHART, ray_service
from tests.support.kube.helm import load_values
from tests.support.kube.helm import render as render_chart

pytestmark = pytest.mark.deploy

KEYS = "api_key_file: /etc/espalier/keys\n"
CONFIGS = {
    "one folder": "model: /models/qwen\n",
    "one of the hub, unusual name": "model: org/Some_Model.EXL3@v1.0/a\nname: 'Größe 8.B  (test)'\n",
    "big and small numbers": (
        "model: /m\nkv_tokens: 33554432\nprefix_entries: 16777216\naffinity_min_tokens: 0\nsession_ttl: 0\n"
        "keepalive: 0.5\ncpus: 0.75\nmax_waiting: 0\nprefix_cache: false\n"
    ),
    "two models, keys, options at every place": KEYS
    + (
        "http_port: 8000\ngrpc_port: 50052\nlog_level: debug\nlog_json: true\ndrain_timeout: 12.5\ndeadline: 90\n"
        "reflection: false\nkv_dtype: bf16\nmodels:\n"
        "- {model: /models/a/first, replicas: 3, cpus: 4, gpus: 1, progress_timeout: 20}\n"
        "- {model: /data/second, name: Second, kv_dtype: fp16, context: 8192}\n"
    ),
}
TARGETS = {"plain": Target(), "claim": target_of(["models=/models"], "our-keys")}


def rendered(config: str, target: Target, folder: Path) -> Rendered:
    (folder / "serve.yaml").write_text(config)
    return render(resolve({}, {}, config_file=str(folder / "serve.yaml")), target)


def serve_config_of(values: dict[str, Any]) -> dict[str, Any]:
    """serveConfigV2 of the chart's RayService."""
    content: dict[str, Any] = yaml.safe_load(ray_service(render_chart(CHART, values))["spec"]["serveConfigV2"])
    return content


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_chart_renders_the_serve_config_that_we_render(config: str, target: Target, tmp_path: Path) -> None:
    both = rendered(config, target, tmp_path)
    assert serve_config_of(both.values) == both.serve_config


@pytest.mark.parametrize("example", sorted(path.name for path in CHART.glob("values-*.yaml")))
def test_examples_render_what_render_would(example: str) -> None:
    values = load_values(CHART / example)
    expected = serve_config({"models": [_filled(model) for model in values["models"]]} | _ours(values))
    assert serve_config_of(values) == expected


def _filled(model: dict[str, Any]) -> dict[str, Any]:
    """An entry with what the chart derives when it is left out: the folder, and empty options."""
    source = model["source"]
    mounted = source.get("hostPath") or source.get("pvc", {}).get("mountPath")
    slug = engine_app_name(model["name"]).removeprefix(engine_app_name(""))
    folder = model.get("model") or mounted or f"/models/{slug}"
    return {"name": model["name"], "model": folder, "options": model.get("options", {})}


def _ours(values: dict[str, Any]) -> dict[str, Any]:
    found = {key: values[key] for key in ("options", "gateway") if key in values}
    auth = values.get("auth", {})
    return found | ({"auth": {"key": "keys"} | auth} if auth.get("existingSecret") else {})
