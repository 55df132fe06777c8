"""`python -m espalier.deploy.random_model`: the same command where only torch, NumPy and safetensors are installed."""

import argparse
import sys

from espalier.deploy.random_model.command import arguments, run
from espalier.replicas.errors import EngineError


def _main() -> int:
    parser = argparse.ArgumentParser("espalier.deploy.random_model", description="Writes a random EXL3 checkpoint.")
    arguments(parser)
    try:
        return run(parser.parse_args())
    except EngineError as error:
        print(f"espalier: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(_main())
