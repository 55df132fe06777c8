"""compute-sanitizer over one small launch of each kernel: `python tests/support/sanitize.py` on a machine with an NVIDIA GPU.

Each case runs in a process of its own under each tool, several at once. Where a tool does not work (some virtual machines), its line says
'not run' and why. Exit code 1 when anything was found. Cases: `sanitize_cases.py`.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.support.sanitize_cases import CASES  # noqa: E402 (the checkout need not be installed)

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
REPORT = re.compile(r"========= (?:Error: |Warning: |Invalid )")
FURTHER = re.compile(r"=========     (?:and |at )")  # lines of a report after its first
VARIES = re.compile(r"\+0x[0-9a-f]+| \[\d+ hazards?\]")  # between reports of the same source lines
MAX_LINES = 40
TIMEOUT_S = 300


def check(tool: str, case: str) -> tuple[bool, str]:
    """(nothing was found, what to print)."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return True, "not run: compute-sanitizer is not on the PATH"
    # Torch's cache would hide accesses past the end of a tensor.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, sys.executable, __file__, "--case", case]
    try:
        run = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return True, f"not run: more than {TIMEOUT_S} s"
    summary = SUMMARY.search(run.stdout)
    if summary is None:
        return True, f"not run: {' / '.join(run.stdout.strip().splitlines()[-3:])}"
    if int(summary[1]):
        return False, "\n".join([f"{summary[1]} found", *findings(run.stdout)[:MAX_LINES]])
    if run.returncode:
        return False, f"clean, but the case itself failed:\n{run.stdout}"
    return True, "clean"


def findings(output: str) -> list[str]:
    """The lines of each report, and each line of a report, once for the source lines that it names."""
    reports: list[dict[str, str]] = []
    for line in output.splitlines():
        if REPORT.match(line):
            reports.append({})
        elif not (reports and FURTHER.match(line)):
            continue
        reports[-1].setdefault(VARIES.sub("", line), line)
    once = {tuple(report): list(report.values()) for report in reversed(reports)}
    return [line for lines in reversed(once.values()) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="run this one here, without a tool")
    parser.add_argument("--only", nargs="*", default=list(CASES), metavar="CASE", help="check these")
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once")
    args = parser.parse_args()
    if args.case:
        CASES[args.case]()
        return 0
    pairs = list(itertools.product(args.tools, args.only))
    found = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for (tool, case), (good, text) in zip(pairs, pool.map(lambda pair: check(*pair), pairs), strict=True):
            print(f"{tool} {case}: {text}", flush=True)
            found += not good
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
