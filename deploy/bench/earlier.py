"""Solo replies of this run against those of an earlier one, from its JSON: the same model with other options must give the same tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from espalier.deploy.bench.plan import BenchPlan
from espalier.deploy.bench.results import Solo
from espalier.deploy.bench.stats import Comparison
from espalier.replicas.errors import InvalidRequestError

Hashes = dict[tuple[str, str], str]


def read_earlier(path: Path, plan: BenchPlan) -> Hashes:
    """Hash of each solo reply of target A, by sampling and prompt. Raises InvalidRequestError when the run asked for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        prompts_id, solo = content["setup"]["prompts_id"], content["solo"]
        hashes = {(one["sampling"], one["prompt"]): one["token_sha256"] for one in solo if one["side"] == "A"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"--same-as {path}: is no bench's JSON: {error!r}", param="same_as") from None
    if prompts_id != plan.prompts_id:
        raise InvalidRequestError(
            f"--same-as {path}: its prompts, their order or --tokens are not those of this run", param="same_as"
        )
    if not hashes:
        raise InvalidRequestError(f"--same-as {path}: it ran no prompt alone", param="same_as")
    return hashes


def hold_against(solo: Sequence[Solo], hashes: Hashes, path: Path) -> Comparison:
    """The solo replies of target A against the earlier ones; what only one run has is not compared."""
    equal, notes, uncompared = 0, [], 0
    for one in solo:
        if one.side != "A":
            continue
        expected = hashes.get((one.sampling, one.record.prompt))
        if expected is None or one.record.token_sha256 is None:
            uncompared += 1
        elif expected == one.record.token_sha256:
            equal += 1
        else:
            notes.append(f"{one.sampling}, {one.record.prompt}: not the reply that {path} tells of")
    return Comparison(equal=equal, unequal=len(notes), uncompared=uncompared, notes=tuple(notes))
