"""Names of our Serve applications and deployments."""

import re

GATEWAY_APP = "espalier-gateway"
GATEWAY_DEPLOYMENT = "Gateway"
ENGINE_DEPLOYMENT = "EngineReplica"


def engine_app_name(model: str) -> str:
    """The application that serves a model; different names of models may only meet here if they differ in punctuation alone."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"espalier-engine-{slug}"
