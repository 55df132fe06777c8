"""What a round's kernels are for, told by their names and their order. Pure; knows names of kernels and the order of a layer, no times.

A product's kernel does the same for every linear, so it is the neighbours that say which one it was: what came out of a norm and is turned next
is q, k and v; what came out of a norm and is gated next is gate and up.
"""

import enum
from collections.abc import Sequence

from espalier.kernels.linear.dispatch import Form


class Kind(enum.StrEnum):
    """Where a round's time goes, in the order of reports."""

    QKV = "qkv"
    OUT = "o"
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"
    FUSIONS = "norms, gates, rotations"
    ATTENTION = "attention"
    ROPE = "rope and store"
    SAMPLER = "sampler"
    ROUND = "round's own"
    COPIES = "copies"
    OTHER = "other"


LINEARS = (Kind.QKV, Kind.OUT, Kind.GATE_UP, Kind.DOWN, Kind.HEAD)
# The first kernel of a round. Where a round's changes have no room in it, one more runs ahead.
ROUND_BEGINS = "_apply_updates_kernel"
# In every round once.
LAYS_OUT = "_lay_out_kernel"


class _Role(enum.Enum):
    PRODUCT = enum.auto()
    NORM = enum.auto()
    GATE = enum.auto()
    ROTATE = enum.auto()
    ATTENTION = enum.auto()
    ROPE = enum.auto()
    SAMPLER = enum.auto()
    ROUND = enum.auto()
    COPY = enum.auto()
    OTHER = enum.auto()


_ROLES = {
    _Role.PRODUCT: (
        *Form,  # kernels of EXL3 weights are named for their form, ...
        "decode_weights",
        *("_linear", "_partials", "_finish"),  # ... but for plain Triton's
        "_dense_kernel",
    ),
    _Role.NORM: ("_add_norm_rotate_kernel", "_rms_norm_kernel"),
    _Role.GATE: ("_silu_mul_rotate_kernel", "_silu_mul_kernel"),
    _Role.ROTATE: ("_rotate_input_kernel",),
    _Role.ATTENTION: ("attend_split", "attend_rows", "attend_chunk", "merge_row"),
    _Role.ROPE: ("_norm_rotate_store_kernel",),
    _Role.SAMPLER: (
        *("score_kernel", "guess_kernel", "sift_kernel", "choose_kernel"),
        *("sum_kernel", "report_kernel"),
    ),
    _Role.ROUND: (
        *("_apply_updates_kernel", "_lay_out_kernel", "_observe_kernel", "_gather_kernel", "_keep_drawn_kernel"),
    ),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}
_KIND_OF = {
    _Role.NORM: Kind.FUSIONS,
    _Role.GATE: Kind.FUSIONS,
    _Role.ROTATE: Kind.FUSIONS,
    _Role.ATTENTION: Kind.ATTENTION,
    _Role.ROPE: Kind.ROPE,
    _Role.SAMPLER: Kind.SAMPLER,
    _Role.ROUND: Kind.ROUND,
    _Role.COPY: Kind.COPIES,
    _Role.OTHER: Kind.OTHER,
}


def kinds_of(names: Sequence[str]) -> list[Kind]:
    """The kind of each kernel, named in the order in which they began; copies count by the names that profilers give them."""
    roles = [_role(name) for name in names]
    return [_linear(roles, index) if role is _Role.PRODUCT else _KIND_OF[role] for index, role in enumerate(roles)]


def _role(name: str) -> _Role:
    if name.startswith(("Memcpy", "Memset")):
        return _Role.COPY
    return _ROLE_OF.get(name, _Role.OTHER)


def _linear(roles: Sequence[_Role], index: int) -> Kind:
    """Which linear the product at `index` is, by what made its input and what reads its output."""
    skipped = (_Role.PRODUCT, _Role.ROTATE)
    before = next((role for role in reversed(roles[:index]) if role not in skipped), None)
    after = next((role for role in roles[index:] if role is not _Role.PRODUCT), None)
    if before is _Role.ATTENTION:
        return Kind.OUT
    if before is _Role.GATE:
        return Kind.DOWN
    if before is not _Role.NORM:
        return Kind.OTHER
    return {_Role.ROPE: Kind.QKV, _Role.GATE: Kind.GATE_UP}.get(after or _Role.OTHER, Kind.HEAD)
