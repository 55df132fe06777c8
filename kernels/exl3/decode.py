"""Packed words -> weights, in the registers of a warp, as the A fragments of `mma` and `wgmma`. Gluon device functions; no kernel.

    packed = load_words(words, tile, step, ROW, RATE2, TILES, W)      a tuple of uint32 [32 TILES]; a loop can carry it as one value
    weights = decode_words(packed, A, TILES, RATE2, CODEBOOK)         fp16 [16 TILES, 64]: [n, k], input 64 * step + k, output 16 * tile + n

words: pointer to int32, the packed trellis (`exl3/pack.py`), of less than 2^31 elements. ROW: elements of one step of it, out * RATE2. tile:
first of the program's TILES column tiles, which are dealt out to its W warps in turn. RATE2: twice the rate (7 is 3.5 bits). A:
DotOperandLayout(0, ACC, 2), ACC of [W, 1] warps. CODEBOOK: `Codebook.number`. decode_words has a last argument JOIN: how mul1's sums of
bytes are paired, which moves work between pipes and changes no value.

A loop that is short of instructions keeps pointers, and loads each step's words after it has decoded those that they replace:

    pointers = word_pointers(words, tile, step, ROW, RATE2, TILES, W)
    pointers = advance(pointers, 2 * ROW)                             once for several steps
    packed = load_at(pointers, ROW, TILES, W)                         a constant distance costs nothing

The multiplier's pipe is the busiest there (mul1: a multiplication and a sum of bytes a weight, half a packed fma), and load_words adds a wide
multiplication for each load. Windows, the 16-bit states of a lane's weights, are cut out in `exl3/decode_windows.py`.
"""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from espalier.kernels.exl3.decode_windows import windows

JOIN_PRMT, JOIN_IMAD = gl.constexpr(0), gl.constexpr(1)


# ---- loads ----


@gluon.constexpr_function
def _planes(rate2):
    # (first word of a block's plane, half bytes of a lane's field of a tile in it): the sizes of pack.PLANES, which compiled code may not read
    sizes = {
        2: (2,),
        3: (2, 1),
        4: (4,),
        5: (4, 1),
        6: (4, 2),
        7: (4, 2, 1),
        8: (8,),
        10: (8, 2),
        12: (4, 8),
        14: (8, 4, 2),
        16: (8, 8),
    }
    return tuple((16 * sum(sizes[rate2][:i]), size) for i, size in enumerate(sizes[rate2]))


@gluon.jit
def _plane_pointers(
    words, RATE2: gl.constexpr, PLANE: gl.constexpr, BACK: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr
):
    # [32 TILES, words of a lane]: one plane's words of the lane BACK lanes before; the smallest plane has half words
    START: gl.constexpr = _planes(RATE2)[PLANE][0]
    NIBBLES: gl.constexpr = _planes(RATE2)[PLANE][1]
    WIDTH: gl.constexpr = NIBBLES // 2 if NIBBLES > 1 else 1
    SCALE: gl.constexpr = 1 if NIBBLES > 1 else 2
    L: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [W, 1], [1, 0])
    t = gl.arange(0, 32 * TILES, gl.SliceLayout(1, L))
    at = t // 32 * (16 * RATE2 * SCALE) + START * SCALE + (t + (32 - BACK)) % 32 * WIDTH
    if NIBBLES == 1:
        words = words.to(gl.pointer_type(gl.uint16), bitcast=True)
    return words + (at[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :])


@gluon.jit
def word_pointers(words, tile, step, ROW: gl.constexpr, RATE2: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr):
    """Where `load_words` loads: all planes of the lane; then the first plane of the lane before, at 1.5 and 3.5 bits the second one too, and
    below 2 bits the first of the lane before that."""
    words += step * ROW + tile * (16 * RATE2)
    pointers = ()
    for plane in gl.static_range(len(_planes(RATE2))):
        pointers += (_plane_pointers(words, RATE2, plane, 0, TILES, W),)
    pointers += (_plane_pointers(words, RATE2, 0, 1, TILES, W),)
    if RATE2 == 3 or RATE2 == 7:
        pointers += (_plane_pointers(words, RATE2, 1, 1, TILES, W),)
    if RATE2 < 4:
        pointers += (_plane_pointers(words, RATE2, 0, 2, TILES, W),)
    return pointers


@gluon.jit
def advance(pointers, ahead):
    """ahead: words, a multiple of ROW."""
    moved = ()
    for i in gl.static_range(len(pointers)):
        if pointers[i].dtype.element_ty == gl.uint16:
            moved += (pointers[i] + 2 * ahead,)
        else:
            moved += (pointers[i] + ahead,)
    return moved


@gluon.jit
def _load(p, TILES: gl.constexpr, W: gl.constexpr, ONCE: gl.constexpr):
    # 1, 2 or 4 tensors uint32 [32 TILES]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    v = gl.load(p, eviction_policy="evict_first" if ONCE else "").to(gl.uint32, bitcast=p.dtype.element_ty != gl.uint16)
    if p.shape[1] == 1:
        return (gl.convert_layout(v.reshape([32 * TILES]), LANES, assert_trivial=True),)
    elif p.shape[1] == 2:  # noqa: RET505 (compile-time branches)
        v0, v1 = v.split()
        return gl.convert_layout(v0, LANES, assert_trivial=True), gl.convert_layout(v1, LANES, assert_trivial=True)
    else:
        even, odd = v.reshape([32 * TILES, 2, 2]).split()
        v0, v2 = even.split()
        v1, v3 = odd.split()
        v0, v1 = gl.convert_layout(v0, LANES, assert_trivial=True), gl.convert_layout(v1, LANES, assert_trivial=True)
        v2, v3 = gl.convert_layout(v2, LANES, assert_trivial=True), gl.convert_layout(v3, LANES, assert_trivial=True)
        return v0, v1, v2, v3


@gluon.jit
def load_at(pointers, ahead, TILES: gl.constexpr, W: gl.constexpr, ONCE: gl.constexpr = False):
    """The words at pointers advanced by `ahead`: if that is a constant it costs nothing. ONCE: nobody else will, or soon, so L2 may forget them."""
    pointers = advance(pointers, ahead)
    packed = ()
    for i in gl.static_range(len(pointers)):
        packed += _load(pointers[i], TILES, W, ONCE)
    return packed


@gluon.jit
def load_words(words, tile, step, ROW: gl.constexpr, RATE2: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr):
    """See the top of the file."""
    # The step is added last: what is before it stays the same in a loop.
    return load_at(word_pointers(words, tile, 0, ROW, RATE2, TILES, W), step * ROW, TILES, W)


# ---- values ----


@gluon.constexpr_function
def _values_assembly(codebook, join):
    # two states -> two fp16 in one register (exl3-format 2.3)
    if codebook == 2:
        code = """
            mul.lo.u32 t0, $1, 0x83DCD12D;
            mul.lo.u32 t1, $2, 0x83DCD12D;"""
        if join == 0:
            code += """
            dp4a.u32.u32 t0, t0, 0x01010101, 0x6400;
            dp4a.u32.u32 t1, t1, 0x01010101, 0x6400;
            prmt.b32 t0, t0, t1, 0x5410;
            fma.rn.f16x2 $0, t0, kk, bb;"""
        else:
            code += """
            dp4a.u32.u32 t0, t0, 0x01010101, 0x64006400;
            dp4a.u32.u32 t1, t1, 0x01010101, 0;
            mad.lo.u32 t0, t1, 65536, t0;
            fma.rn.f16x2 $0, t0, kk, bb;"""
    else:
        if codebook == 1:
            code = """
            mul.lo.u32 t0, $1, 0xCBAC1FED;
            mul.lo.u32 t1, $2, 0xCBAC1FED;"""
        else:
            code = """
            mad.lo.u32 t0, $1, 89226354, 64248484;
            mad.lo.u32 t1, $2, 89226354, 64248484;"""
        code += """
            lop3.b32 t0, t0, 0x8fff8fff, 0x3b603b60, 0x6a;
            lop3.b32 t1, t1, 0x8fff8fff, 0x3b603b60, 0x6a;
            mov.b32 {l0, h0}, t0;
            mov.b32 {l1, h1}, t1;
            add.rn.f16 l0, l0, h0;
            add.rn.f16 l1, l1, h1;
            mov.b32 $0, {l0, l1};"""
    return f"""{{
            .reg .b32 t0, t1, kk, bb;
            .reg .b16 l0, h0, l1, h1;
            mov.b32 kk, 0x1eee1eee;
            mov.b32 bb, 0xc931c931;{code}
            }}"""


@gluon.jit
def _pair(first, second, CODEBOOK: gl.constexpr, JOIN: gl.constexpr):
    # two neighbouring states [n] -> fp16 [n, 2]
    return gl.inline_asm_elementwise(
        _values_assembly(CODEBOOK, JOIN),
        "=r,r,r",
        [gl.join(first, second)],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _tile_values(packed, T: gl.constexpr, RATE2: gl.constexpr, CODEBOOK: gl.constexpr, JOIN: gl.constexpr):
    # fp16 [lane, k bit 0, k bit 3, n bit 3]
    w = windows(packed, RATE2, T, CODEBOOK != 2)
    left = gl.join(_pair(w[0], w[1], CODEBOOK, JOIN), _pair(w[2], w[3], CODEBOOK, JOIN))
    right = gl.join(_pair(w[4], w[5], CODEBOOK, JOIN), _pair(w[6], w[7], CODEBOOK, JOIN))
    return gl.join(left, right)


@gluon.jit
def decode_words(
    packed,
    A: gl.constexpr,
    TILES: gl.constexpr,
    RATE2: gl.constexpr,
    CODEBOOK: gl.constexpr,
    JOIN: gl.constexpr = JOIN_PRMT,
):
    """See the top of the file. A lane's weights of a tile are its A fragment, so that nothing moves between lanes."""
    even = gl.join(_tile_values(packed, 0, RATE2, CODEBOOK, JOIN), _tile_values(packed, 2, RATE2, CODEBOOK, JOIN))
    odd = gl.join(_tile_values(packed, 1, RATE2, CODEBOOK, JOIN), _tile_values(packed, 3, RATE2, CODEBOOK, JOIN))
    q = gl.join(even, odd)  # [lane, k bit 0, k bit 3, n bit 3, k bit 5, k bit 4]
    q = q.reshape([TILES, 8, 4, 2, 2, 2, 2, 2]).permute((0, 5, 1, 6, 7, 4, 2, 3)).reshape([16 * TILES, 64])
    return gl.convert_layout(q, A, assert_trivial=True)


@gluon.jit
def decode_tile(
    packed,
    TILE: gl.constexpr,
    A: gl.constexpr,
    TILES: gl.constexpr,
    RATE2: gl.constexpr,
    CODEBOOK: gl.constexpr,
    JOIN: gl.constexpr = JOIN_PRMT,
):
    """`decode_words` for 16 inputs, the step's tile TILE of four: fp16 [16 TILES, 16] in layout A."""
    q = _tile_values(packed, TILE, RATE2, CODEBOOK, JOIN)  # [lane, k bit 0, k bit 3, n bit 3]
    q = q.reshape([TILES, 8, 4, 2, 2, 2]).permute((0, 5, 1, 4, 2, 3)).reshape([16 * TILES, 16])
    return gl.convert_layout(q, A, assert_trivial=True)
