"""`espalier random-model`: its arguments, and the call. Light to import."""

import argparse
from pathlib import Path

from espalier.deploy.random_model.shapes import SHAPES


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `espalier random-model`."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the new checkpoint")
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True, help="widths and depth of the network")
    parser.add_argument("--layers", metavar="N", type=int, help="layers instead of the shape's own")
    parser.add_argument(
        "--bits", metavar="K", type=float, default=4.0, help="bits a weight of the layers, 1 to 8 or a half rate [4]"
    )
    parser.add_argument(
        "--head-bits", metavar="K", type=float, default=6.0, help="bits a weight of the head, or 16: plain [6]"
    )
    parser.add_argument("--codebook", choices=("3inst", "mcg", "mul1"), default="mul1", help="of all weights [mul1]")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="other numbers for another seed [0]")
    parser.add_argument(
        "--tokenizer-from", metavar="FOLDER", type=Path, help="copy this folder's tokenizer (default: there is none)"
    )
    parser.add_argument("--threads", metavar="N", type=int, help="threads [all cores]")


def run(args: argparse.Namespace) -> int:
    """Writes the checkpoint and prints its folder."""
    from espalier.deploy.random_model.write import write_random_model

    checkpoint = write_random_model(
        args.out,
        args.shape,
        bits=args.bits,
        head_bits=args.head_bits,
        codebook=args.codebook,
        layers=args.layers,
        seed=args.seed,
        tokenizer_from=args.tokenizer_from,
        threads=args.threads,
    )
    print(checkpoint.path)
    return 0
