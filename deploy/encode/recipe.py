"""What a run of the encoder makes: its options, checked, and which source they apply to. Decides whether a run may go on where one stopped."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from espalier.replicas.errors import InvalidRequestError

RECIPE_FILE = "espalier_encode.json"
PLAIN_HEAD_BITS = 16
# Of each source file, so much from its start decides whether it is the same: headers, and all of the small files.
_HASHED_BYTES = 1 << 20
# Raised when the same options would make other bits.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """bits, head_bits: rates of exl3-format 1.2, or 16 for a plain head. source_id: hash of the source's names, sizes and first bytes."""

    bits: float
    head_bits: float
    codebook: str
    seed: int
    source_id: str
    version: int = _VERSION

    def write(self, folder: Path) -> None:
        """As `espalier_encode.json` in `folder`, whole or not at all."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"
        unfinished = folder / f"{RECIPE_FILE}.tmp"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / RECIPE_FILE)

    def is_of(self, folder: Path) -> bool:
        """Whether `folder` holds the work of this recipe."""
        try:
            return bool(json.loads((folder / RECIPE_FILE).read_text(encoding="utf-8")) == asdict(self))
        except (OSError, ValueError):
            return False


def make_recipe(source: Path, *, bits: float, head_bits: float, codebook: str, seed: int) -> Recipe:
    """Raises InvalidRequestError naming the option."""
    if codebook not in tuple(Codebook):
        raise InvalidRequestError(f"codebook: must be one of {', '.join(Codebook)}, is {codebook!r}", param="codebook")
    for name, rate, others in (("bits", bits, ()), ("head_bits", head_bits, (PLAIN_HEAD_BITS,))):
        rates = [r for r in RATES if r == int(r) or Codebook(codebook).allows_half_rates]
        if rate not in (*rates, *others):
            listed = ", ".join(f"{r:g}" for r in (*rates, *others))
            raise InvalidRequestError(
                f"{name}: must be one of {listed} with codebook {codebook}, is {rate:g}", param=name
            )
    if not source.exists():
        raise InvalidRequestError(f"source: {source} does not exist", param="source")
    return Recipe(float(bits), float(head_bits), codebook, seed, _source_id(source))


def _source_id(source: Path) -> str:
    digest = hashlib.sha256()
    files = [source] if source.is_file() else sorted(file for file in source.iterdir() if file.is_file())
    for file in files:
        with file.open("rb") as stream:
            head = stream.read(_HASHED_BYTES)
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + hashlib.sha256(head).digest())
    return digest.hexdigest()
