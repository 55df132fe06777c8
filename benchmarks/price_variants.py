"""The variants of price_of_exactness.py: what each replaces in its own process, and how that process measures what it is told to.

Patches names that are private to their modules: it follows them, and they owe it nothing.
"""

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

PRODUCT = "product"
# What each variant is held against.
BASE_OF = {
    "splits-1": PRODUCT,
    "splits-2": PRODUCT,
    "splits-4": PRODUCT,
    "splits-16": PRODUCT,
    "unmerged": PRODUCT,
    "plain-head-cublas": "plain-head",
    "plain-cublas": "plain",
}
VARIANTS = (
    PRODUCT,
    *(name for name in BASE_OF if "plain" not in name),
    "plain-head",
    "plain-head-cublas",
    "plain",
    "plain-cublas",
)
CONTEXT = 512
MIXED_ROWS = (64, 512, 2048)  # that rounds with prompts are padded to: few, so that little is compiled


def use_splits(count: int) -> None:
    """Cuts every EXL3 linear's sum into so many parts; all forms ask `num_splits`, which reads these two."""
    from espalier.kernels.linear import splits

    splits.MAX_SPLITS = count
    splits.SPLIT_INPUTS = min(splits.SPLIT_INPUTS, 4096 // count)
    assert splits.num_splits(4096) == count


def leave_splits_unmerged() -> None:
    """Attention of decoding rows ends with its splits: what any other cut of the keys could save at most."""
    from espalier.kernels.attention import merge

    def nothing(*_: object, **__: object) -> None:
        return

    merge.launch = nothing


def use_plain_weights(*, head_alone: bool) -> None:
    """Random fp16 weights stand in for EXL3 ones of the same shapes: for the head, or for every linear."""
    import torch

    from espalier.kernels.linear.dense import pack_dense
    from espalier.replicas.gpu import load

    pack = load._pack

    def plain(checkpoint: Any, group: Any, tensors: Any, vectors: Any) -> Any:
        if head_alone and group[0].key != checkpoint.spec.head.key:
            return pack(checkpoint, group, tensors, vectors)
        members = [load._exl3(checkpoint, linear.key, tensors) for linear in group]
        weights = [
            torch.randn(one.out_features, one.in_features, dtype=torch.float16, device=one.svh.device)
            * one.in_features**-0.5
            for one in members
        ]
        return pack_dense(weights, [None] * len(weights))

    torch.manual_seed(0)
    load._pack = plain


def use_cublas() -> None:
    """Plain linears are one product of fp16 inputs by cuBLAS, which picks its kernel by the shape of the call."""
    import torch
    from torch import Tensor

    from espalier.replicas.gpu import network

    def product(x: Tensor, group: Any, out: Tensor) -> None:
        assert group.bias is None, "the shapes that are measured have no biases"
        rounded = x.to(group.weight.dtype)
        if out.dtype == rounded.dtype:
            torch.mm(rounded, group.weight.t(), out=out)
        else:
            torch.mm(rounded, group.weight.t(), out_dtype=out.dtype, out=out)

    network.dense_linear = product  # type: ignore[attr-defined]


def replace(variant: str) -> None:
    """Makes this process's engine the variant. To be called before anything is loaded."""
    if variant.startswith("splits-"):
        use_splits(int(variant.removeprefix("splits-")))
    if variant == "unmerged":
        leave_splits_unmerged()
    if variant.startswith("plain"):
        use_plain_weights(head_alone=variant.startswith("plain-head"))
    if variant.endswith("cublas"):
        use_cublas()


def use_shapes(levels: Sequence[int]) -> None:
    """Rounds are captured for the measured row counts alone."""
    from espalier.replicas.gpu.rounds import RoundShapes

    plan = RoundShapes.plan

    def few(max_lanes: int, batch_tokens: int, max_context: int) -> RoundShapes:
        shapes = plan(max_lanes, batch_tokens, max_context)
        mixed = (*(rows for rows in MIXED_ROWS if max_lanes <= rows < batch_tokens), batch_tokens)
        return dataclasses.replace(shapes, decode_rows=tuple(sorted(levels)), mixed_rows=mixed)

    RoundShapes.plan = staticmethod(few)  # type: ignore[method-assign]


def serve(args: argparse.Namespace, orders: IO[str], answers: IO[str]) -> None:
    """A variant's process: loads, says that it is ready, and measures what it is told to, a line each."""
    from espalier.deploy.bench.engine_target import EngineTarget
    from espalier.replicas.config import EngineConfig
    from espalier.replicas.open import open_group

    def answer(**content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    began = time.monotonic()
    max_context = max(*args.prefill, CONTEXT + args.tokens) + 128
    with tempfile.TemporaryDirectory() as records:
        config = EngineConfig(
            model_path=args.model,
            device=args.device,
            max_context=max_context,
            max_lanes=max(args.levels),
            batch_tokens=max(MIXED_ROWS[-1], *args.levels),
            kv_tokens=max(max(args.levels) * (CONTEXT + args.tokens + 32), max_context + 128),
            cache_dir=Path(records),
        )
        if args.device == "cpu":
            group = open_group(config)
        else:
            replace(args.variant)
            use_shapes(args.levels)
            from espalier.replicas.gpu.group import DeviceShardGroup
            from espalier.replicas.gpu.shard import GpuShard

            group = DeviceShardGroup(GpuShard(config))  # without the canary, which asks for the product's bits
        target = EngineTarget(config, group, None)
        try:
            answer(ready_s=time.monotonic() - began, device=target.info.device, setup=dict(target.info.setup))
            for line in orders:
                cell, number, rep = line.split()
                measure = decode_speed if cell == "decode" else prefill_speed
                answer(tokens_per_s=measure(target, int(number), int(rep), args.tokens))
        finally:
            target.close()


def decode_speed(target: Any, streams: int, rep: int, tokens: int) -> float:
    """Tokens a second of all streams together while all of them decode."""
    from espalier.deploy.bench.plan import sampling_params
    from espalier.deploy.bench.prompts import random_prompts
    from espalier.deploy.bench.stats import batch_decode_speed
    from espalier.deploy.bench.target import Call, run_together

    prompts = random_prompts(streams, (CONTEXT,), target.info.vocab_size, random.Random(f"{streams} {rep}"))
    records = run_together(target, [Call(prompt=one, params=sampling_params("greedy", tokens, 0)) for one in prompts])
    return _checked(batch_decode_speed(records), records)


def prefill_speed(target: Any, num_tokens: int, rep: int, _: int) -> float:
    """Tokens a second of one cold prompt until its first token."""
    from espalier.deploy.bench.plan import sampling_params
    from espalier.deploy.bench.prompts import random_prompts
    from espalier.deploy.bench.target import Call, run_together

    (prompt,) = random_prompts(1, (num_tokens,), target.info.vocab_size, random.Random(f"prefill {num_tokens} {rep}"))
    call = Call(prompt=prompt, params=sampling_params("greedy", 1, 0), use_prefix_cache=False)
    (record,) = records = run_together(target, [call])
    return _checked(num_tokens / record.ttft_s if record.ttft_s else None, records)


def _checked(speed: float | None, records: Sequence[Any]) -> float:
    errors = [record.error for record in records if record.error is not None]
    if errors or speed is None:
        raise RuntimeError(errors[0] if errors else "streams never decoded together; more --tokens")
    return speed
