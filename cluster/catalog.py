"""Catalog: the served models as this gateway knows them: their text, their facts, and whether they can be used now. Knows no Ray and no calls."""

from dataclasses import dataclass, replace
from typing import Any

from espalier.cluster.call import ModelInfo, ModelText
from espalier.cluster.fleet import Fleet
from espalier.replicas.errors import DrainingError, EngineError, ModelNotFoundError

NO_REPLICA_RETRY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedText:
    """What the gateway itself holds of a model. text: None when the checkpoint's files for it are refused; failure then says why.

    defaults: sampling values of its generation_config.json, by SamplingParams field. created: seconds since the epoch.
    """

    text: ModelText | None
    failure: EngineError | None
    defaults: dict[str, float | int]
    created: int


class Catalog:
    """models: what the gateway holds of each served model, by name. fleet: who serves them."""

    def __init__(self, models: dict[str, ServedText], fleet: Fleet) -> None:
        self._models = models
        self._fleet = fleet
        # Facts outlive the replicas that told them, so that a model without replicas can still be described.
        self._infos: dict[str, ModelInfo] = {}

    def all(self) -> list[ModelInfo]:
        """All served models. Sizes are 0 and ids empty until a replica was ready."""
        return [self._info(name) for name in self._models]

    def resolve(self, model: str) -> ModelInfo:
        """The model of that name; raises ModelNotFoundError."""
        if model not in self._models:
            raise ModelNotFoundError(f"no model named {model!r} is served here", param="model")
        return self._info(model)

    def text(self, model: str) -> ModelText:
        """Its tokenizer and chat template; raises ModelNotFoundError, or DrainingError while no replica of it was ever ready."""
        info = self.resolve(model)
        text = self._models[model].text
        if text is None or info.vocab_size == 0:
            raise self.no_replica(model)
        return text

    def no_replica(self, model: str) -> DrainingError:
        """The refusal of a call that no replica can take now, with what is the matter."""
        failure = self._models[model].failure
        reasons = {failure.message} if failure else {self._fleet.problem(replica) for replica in self._fleet.of(model)}
        told = "; ".join(sorted(reason for reason in reasons if reason))
        message = f"no replica of {model!r} is ready" + (f": {told}" if told else "")
        return DrainingError(message, retry_after_s=NO_REPLICA_RETRY_S)

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether every model has a ready replica; per model what is the matter with its replicas, and `failure` if waiting will not
        help, with the code of its kind."""
        report: dict[str, Any] = {}
        for model, served in self._models.items():
            problems = {replica.replica_id: self._fleet.problem(replica) for replica in self._fleet.of(model)}
            report[model] = {
                "ready": served.failure is None and None in problems.values(),
                "replicas": {replica_id: problem or "ready" for replica_id, problem in problems.items()},
            }
            failure = served.failure or next((r.failure for r in self._fleet.of(model) if r.failure), None)
            if failure is not None and not report[model]["ready"]:
                report[model] |= {"failure": failure.message, "failure_code": failure.code}
        return all(entry["ready"] for entry in report.values()), report

    def _info(self, model: str) -> ModelInfo:
        served = self._models[model]
        ready = self._fleet.ready(model)
        if model not in self._infos and not ready:
            return ModelInfo(
                name=model,
                created=served.created,
                max_context=0,
                vocab_size=0,
                quantization="",
                numerics_id="",
                defaults=served.defaults,
                ready_replicas=0,
            )
        if ready:
            facts = ready[0].facts
            self._infos[model] = ModelInfo(
                name=model,
                created=served.created,
                max_context=facts.max_context,
                vocab_size=facts.vocab_size,
                quantization=facts.quantization,
                numerics_id=facts.numerics_id,
                defaults=served.defaults,
                ready_replicas=0,
            )
        return replace(self._infos[model], ready_replicas=len(ready))
