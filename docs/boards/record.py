"""Records what the pictures of the boards show: a real cluster of a tiny model under load, watched by a real Prometheus with the recording rules.

python -m docs.boards.record FOLDER     # from the checkout; a quarter of an hour; needs `prometheus` and the dev extra
python -m docs.boards.draw FOLDER       # the pictures
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.support import prometheus, served_process
from tests.support.board_load import Phase, play, served_options
from tests.support.tiny import make_tiny_checkpoint

RULES = Path(__file__).resolve().parents[2] / "helm/espalier/files/rules"
SCRAPE_S = 5
AUDIT_SHARE = 0.1
# Of the tiny model, room for some seventy blocks: less than it is asked to keep.
HOST_KV_GB = 0.0045
# The rules look back five minutes: what is shown begins after the first phase.
WARM_UP = Phase(seconds=330, clients=3, pause_s=0.3)
SHOWN = (
    Phase(seconds=90, clients=3, pause_s=0.3),
    Phase(seconds=30, clients=16, pause_s=0.1),
    Phase(seconds=30, clients=24, pause_s=0.1),
    Phase(seconds=60, clients=16, pause_s=0.1),
    Phase(seconds=120, clients=2, pause_s=0.5),
    Phase(seconds=120, clients=6, pause_s=0.2),
)
# Into what is shown: a replica is killed.
LOSS_S = 150.0


async def watch(served: served_process.Served) -> tuple[float, float]:
    """Play it all; returns when what is shown began and ended."""
    await play(served.http_url, served.grpc_address, [WARM_UP], seed=1)
    start = time.time()
    loss = asyncio.create_task(_lose_one(served))
    await play(served.http_url, served.grpc_address, SHOWN, seed=2)
    await loss
    return start, time.time()


async def _lose_one(served: served_process.Served) -> None:
    await asyncio.sleep(LOSS_S)
    os.kill(served.replica_pids()[0], signal.SIGKILL)


def main(folder: Path) -> None:
    """Leaves Prometheus' configuration and data in the folder, and `window.json`."""
    folder.mkdir(parents=True)
    options = served_options(make_tiny_checkpoint(folder / "tiny"), folder / "cache")
    options |= {"audit_share": AUDIT_SHARE, "host_kv_gb": HOST_KV_GB}
    with contextlib.ExitStack() as running:
        served = running.enter_context(served_process.serving(folder, options))
        rules = sorted(RULES.glob("*.yaml"))
        running.enter_context(prometheus.scraping(folder / "prometheus", served.http_address, rules, SCRAPE_S))
        start, end = asyncio.run(watch(served))
    (folder / "window.json").write_text(json.dumps({"start": start, "end": end, "scrape_s": SCRAPE_S}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
