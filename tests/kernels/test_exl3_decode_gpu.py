"""Both decodes on a GPU, bit for bit: every case of the vectors, every rate and codebook, several shapes of program."""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES, Exl3Tensors, words_of_rate
from espalier.kernels.exl3.pack import pack_trellis, unpack_words
from espalier.kernels.exl3.reference import decode_inner

gluon = pytest.importorskip("triton.experimental.gluon")
from triton.experimental.gluon import language as gl  # noqa: E402 (needs Triton)

from espalier.kernels.exl3 import decode  # noqa: E402
from espalier.kernels.exl3.reconstruct import reconstruct  # noqa: E402

pytestmark = pytest.mark.gpu

VECTORS = Path(__file__).parents[1] / "data" / "vectors" / "exl3_decode.safetensors"
CASES = [(rate, codebook) for codebook in Codebook for rate in RATES if rate == int(rate) or codebook.allows_half_rates]


@gluon.jit
def fragments(
    words, out, ROW: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, RATE2: gl.constexpr, CODEBOOK: gl.constexpr,
    JOIN: gl.constexpr,
):  # fmt: skip
    """One step of TILES column tiles, from the A fragments to out, fp16 [in, out]."""
    step, tile = gl.program_id(0), gl.program_id(1) * TILES
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    packed = decode.load_words(words, tile, step, ROW, RATE2, TILES, W)
    weights = decode.decode_words(packed, A, TILES, RATE2, CODEBOOK, JOIN)
    n = tile * 16 + gl.arange(0, 16 * TILES, gl.SliceLayout(1, A))
    k = step * 64 + gl.arange(0, 64, gl.SliceLayout(0, A))
    gl.store(out + k[None, :] * (ROW // RATE2) + n[:, None], weights)


def fast_decode(words: torch.Tensor, codebook: Codebook, tiles: int = 4, warps: int = 4, join: int = 0) -> torch.Tensor:
    steps, columns, size = words.shape
    out = torch.full((64 * steps, 16 * columns), torch.nan, dtype=torch.float16, device=words.device)
    fragments[(steps, columns // tiles)](
        words, out, ROW=columns * size, TILES=tiles, W=warps, RATE2=size // 16,
        CODEBOOK=codebook.number, JOIN=join, num_warps=warps,
    )  # fmt: skip
    return out


def tensors_of(trellis: torch.Tensor, codebook: Codebook) -> Exl3Tensors:
    rows, columns, _ = trellis.shape
    return Exl3Tensors(trellis, torch.ones(16 * rows).half(), torch.ones(16 * columns).half(), codebook)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))


def test_vectors() -> None:
    vectors = load_file(VECTORS)
    names = [name.removesuffix(".trellis") for name in vectors if name.endswith(".trellis")]
    assert len(names) == 23
    for name in names:
        codebook = Codebook(name.partition(".")[0])
        words = pack_trellis(vectors[f"{name}.trellis"].cuda())
        for weights in (fast_decode(words, codebook), reconstruct(words, codebook)):
            assert zlib.crc32(weights.cpu().numpy().tobytes()) == int(vectors[f"{name}.inner_crc32"]), name


@pytest.mark.parametrize(("rate", "codebook"), CASES)
def test_every_rate_and_codebook(rate: float, codebook: Codebook) -> None:
    trellis = torch.randint(-32768, 32768, (24, 24, words_of_rate(rate))).to(torch.int16)
    want = decode_inner(tensors_of(trellis, codebook))
    words = pack_trellis(trellis.cuda())
    assert torch.equal(unpack_words(words).cpu(), trellis)
    assert same(reconstruct(words, codebook), want)
    assert same(fast_decode(words, codebook), want)


@pytest.mark.parametrize(("tiles", "warps"), [(1, 1), (8, 4), (8, 8)])
@pytest.mark.parametrize("rate", [3.0, 3.5, 4.0])
def test_program_shapes(rate: float, tiles: int, warps: int) -> None:
    trellis = torch.randint(-32768, 32768, (8, 16, words_of_rate(rate))).to(torch.int16)
    want = decode_inner(tensors_of(trellis, Codebook.MUL1))
    assert same(fast_decode(pack_trellis(trellis.cuda()), Codebook.MUL1, tiles, warps), want)


@pytest.mark.parametrize("join", [0, 1])
def test_all_states_by_every_join(join: int) -> None:
    # At 8 bits a trellis of all 16-bit words in turn has every state.
    trellis = torch.arange(-32768, 32768).to(torch.int16).view(32, 16, 128)
    want = decode_inner(tensors_of(trellis, Codebook.MUL1))
    assert same(fast_decode(pack_trellis(trellis.cuda()), Codebook.MUL1, join=join), want)
