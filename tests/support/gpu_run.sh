#!/bin/sh
# All GPU tests, on a machine with torch, Triton and pytest; neither Ray nor an installed espalier is needed. Arguments go to pytest.
# Other people's plugins stay out: pytest-benchmark warns beside xdist, and warnings are errors here.
# Prints passed, failed, skipped, and fails when anything was skipped. Several processes where pytest-xdist is there.
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3}
export PYTHONPATH=src
if "$PYTHON" -c 'import xdist' 2>/dev/null; then set -- -n "${WORKERS:-4}" "$@"; fi
exec "$PYTHON" -m pytest -m gpu --no-skips --continue-on-collection-errors -p no:cacheprovider -p no:benchmark \
    tests/kernels tests/replicas/test_*_gpu.py tests/replicas/gpu "$@"
