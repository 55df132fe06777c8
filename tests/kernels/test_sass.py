"""The reader of machine code finds what it looks for."""

from tests.support.sass import MachineCode

PRODUCT = ("HGMMA.64x16x16.F32", " R24, R152, gdesc[UR16], R24, gsb0 ")
WAIT_FOR_ALL_BUT_ONE = ("WARPGROUP.DEPBAR.LE", " gsb0, 0x1 ")
WAIT_FOR_ALL = ("WARPGROUP.DEPBAR.LE", " gsb0, 0x0 ")


def loop(*instructions: tuple[str, str]) -> MachineCode:
    body = [(16 * i, opcode, operands) for i, (opcode, operands) in enumerate(instructions)]
    return MachineCode(0, 0, (*body, (16 * len(body), "BRA", " 0x0 ")))


def test_registers_of_a_product_on_its_way() -> None:
    move = ("MOV", " R153, R8 ")
    assert loop(move, PRODUCT, WAIT_FOR_ALL).overwritten_operands() == []
    # On the second turn the first turn's product may still be reading.
    assert loop(move, PRODUCT, WAIT_FOR_ALL_BUT_ONE).overwritten_operands() == ["0x0 MOV R153, R8 "]
    assert loop(PRODUCT, move, WAIT_FOR_ALL).overwritten_operands() == ["0x10 MOV R153, R8 "]


def test_registers_of_sums_and_of_wide_instructions() -> None:
    assert loop(PRODUCT, ("FADD", " R31, R8, R9 "), WAIT_FOR_ALL).overwritten_operands()
    assert not loop(PRODUCT, ("FADD", " R32, R31, R9 "), WAIT_FOR_ALL).overwritten_operands()
    assert loop(PRODUCT, ("LDG.E.128", " R20, desc[UR4][R2.64] "), WAIT_FOR_ALL).overwritten_operands() == []
    assert loop(PRODUCT, ("LDG.E.128", " R150, desc[UR4][R2.64] "), WAIT_FOR_ALL).overwritten_operands()
    assert not loop(PRODUCT, ("STG.E.128", " desc[UR4][R2.64], R152 "), WAIT_FOR_ALL).overwritten_operands()


def test_two_products_with_registers_of_their_own() -> None:
    other = ("HGMMA.64x16x16.F32", " R24, R160, gdesc[UR16], R24, gsb0 ")
    write, write_other = ("MOV", " R152, R8 "), ("MOV", " R160, R8 ")
    turn = (PRODUCT, WAIT_FOR_ALL_BUT_ONE, write_other, other, WAIT_FOR_ALL_BUT_ONE, write)
    assert loop(*turn).overwritten_operands() == []
    assert loop(*turn[:2], write, *turn[3:5], write_other).overwritten_operands()
