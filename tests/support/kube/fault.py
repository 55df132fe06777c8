"""What a check of a Kubernetes object found."""

from typing import NamedTuple


class Fault(NamedTuple):
    """path: from the object's root, `spec/containers/0/image`, empty for the object itself. message: one sentence."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def joined(*parts: object) -> str:
    """A path of its parts; empty ones are left out."""
    return "/".join(str(part) for part in parts if part != "")
