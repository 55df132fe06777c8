"""Makes cluster/ingress/pb from cluster/ingress/proto: `python tests/support/generate_proto.py [FOLDER]`.

The compiler is one pinned grpcio-tools, taken into a folder of its own: code of its protobuf (6.31) runs on protobuf 6 and 7, while newer
compilers write code that refuses protobuf 6, and no environment can hold both that compiler and protobuf 7.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = "grpcio-tools==1.76.0"
INGRESS = Path(__file__).resolve().parents[2] / "cluster" / "ingress"
PROTO_ROOT = INGRESS / "proto"
PB_FOLDER = INGRESS / "pb"
PROTO = "espalier/v1/inference.proto"


def fetch_compiler(folder: Path) -> None:
    """Put grpc_tools into `folder`, without its dependencies: the compiler needs none. Raises CalledProcessError when pip cannot."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), TOOLS], check=True, capture_output=True, text=True)


def generate(compiler: Path, out: Path) -> None:
    """Write the three modules into `out`, side by side, with the compiler that fetch_compiler put into its folder."""
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}={scratch}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", *outputs, PROTO],
            check=True,
            env=os.environ | {"PYTHONPATH": str(compiler)},
        )
        made = Path(scratch, PROTO).parent
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(made.iterdir()):
            # protoc imports by the proto's own path, which is not where the modules live.
            text = path.read_text().replace("from espalier.v1 import", "from . import")
            (out / path.name).write_text(text)


def main() -> None:
    """Generate into the folder given, or the committed one."""
    with tempfile.TemporaryDirectory() as compiler:
        fetch_compiler(Path(compiler))
        generate(Path(compiler), Path(sys.argv[1]) if len(sys.argv) > 1 else PB_FOLDER)


if __name__ == "__main__":
    main()
