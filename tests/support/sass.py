"""Compile a Triton or Gluon kernel for any NVIDIA architecture, without a GPU, and read the machine code: loops, registers, spills.

Knows no kernel. Needs Triton for Linux, whose wheel brings the assembler and the disassembler.
"""

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux on x86-64 only"
)

# cuobjdump prints one instruction a line: an address in a comment, a guard perhaps, opcode, operands; then, for some architectures, what to
# wait for, and the encoding in a comment.
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?)(?:;|\s[&?]|/\*)", re.MULTILINE
)
WAIT, RELEASE = "ACQBULK", "PREEXIT"  # griddepcontrol's two
# How opcodes begin that touch memory which other launches see; LDC and LDS do not.
READS, WRITES = ("LDG", "LD.", "UTMALDG", "UBLKCP"), ("STG", "ST.", "ATOM", "RED", "UTMASTG")


@dataclass(frozen=True, slots=True)
class MachineCode:
    """registers, stack: registers and bytes of stack of a thread; what is spilled goes to the stack.

    instructions: (address, opcode with its suffixes, operands) in order; empty where the disassembler does not know the architecture.
    """

    registers: int
    stack: int
    instructions: tuple[tuple[int, str, str], ...]

    def longest_loop(self) -> Counter[str]:
        """Opcodes, without suffixes, from the target of a backward branch to the branch; the widest such range that encloses no other."""
        loops = []
        for address, opcode, operands in self.instructions:
            target = re.search(r"0x([0-9a-f]+)\s*$", operands)
            if opcode.split(".")[0] == "BRA" and target and int(target[1], 16) < address:
                loops.append((int(target[1], 16), address))
        inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
        start, end = max(inner, key=lambda loop: loop[1] - loop[0])
        return Counter(op.split(".")[0] for address, op, _ in self.instructions if start <= address <= end)

    def overwritten_operands(self) -> list[str]:
        """Instructions that write a register which a `wgmma` still on its way reads or adds to, on any turn of a loop: its result is then chance.

        PTX forbids it (`wgmma.mma_async`: registers may not be touched before `wgmma.wait_group`); the assembler does not mind.
        """
        addresses = [address for address, _, _ in self.instructions]
        found: set[str] = set()
        for index, (address, opcode, operands) in enumerate(self.instructions):
            target = re.search(r"0x([0-9a-f]+)\s*$", operands)
            if opcode.split(".")[0] == "BRA" and target and int(target[1], 16) < address:
                body = self.instructions[addresses.index(int(target[1], 16)) : index + 1]
                found.update(_overwritten(body + body))
        return sorted(found)

    def before_wait(self) -> list[str]:
        """Opcodes before the one wait of a dependent launch for the launch before it; there must be one release of its own dependents too."""
        opcodes = [opcode for _, opcode, _ in self.instructions]
        (wait,) = (i for i, opcode in enumerate(opcodes) if opcode.startswith(WAIT))
        assert sum(opcode.startswith(RELEASE) for opcode in opcodes) == 1
        return opcodes[:wait]


def _overwritten(instructions: Sequence[tuple[int, str, str]]) -> Iterator[str]:
    """Straight code. Groups of `wgmma` end with one that names gsb0; DEPBAR waits until so many groups at most are on their way."""
    flying: list[set[int]] = [set()]  # registers of each group; the last one is being filled
    for address, opcode, operands in instructions:
        if opcode.startswith("HGMMA"):
            sums, *others = re.findall(r"(?:^|\s)R(\d+)", operands)
            columns = int(opcode.split("x")[1])
            flying[-1].update(range(int(sums), int(sums) + columns // 2))
            if len(others) > 1:  # weights in registers, before the sums are named again
                flying[-1].update(range(int(others[0]), int(others[0]) + 4))
            if "gsb0" in operands:
                flying.append(set())
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            left = int(re.findall(r"0x([0-9a-f]+)", operands)[-1], 16)
            flying = [*flying[:-1][max(len(flying) - 1 - left, 0) :], flying[-1]]
        elif target := re.match(r"\s*R(\d+)", operands):
            width = 4 if ".128" in opcode or opcode.endswith(".4") else 2 if ".64" in opcode or "WIDE" in opcode else 1
            written = set(range(int(target[1]), int(target[1]) + width))
            if any(written & registers for registers in flying):
                yield f"{address:#x} {opcode}{operands}"


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], capability: int, num_warps: int, **options: Any
) -> MachineCode:
    """kernel: a jitted function of Triton or Gluon. types: Triton's name of the type of each other argument ("*fp16", "i32"); pointers are
    taken to be aligned to 16 bytes. capability: 90 for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types.get(name, "")[:1] == "*"
    }
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    compiled = triton.compile(
        source(kernel, signature, dict(constants), aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, **options},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _dump("-res-usage", file.name))
        try:
            sass = _dump("-sass", file.name)
        except subprocess.CalledProcessError as error:
            if "Cannot decode architecture" not in error.stdout + error.stderr:
                raise
            sass = ""
    assert usage
    instructions = tuple((int(a, 16), opcode, operands) for a, opcode, operands in _INSTRUCTION.findall(sass))
    return MachineCode(int(usage[1]), int(usage[2]), instructions)


def _dump(what: str, cubin: str) -> str:
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    return subprocess.run([tool, what, cubin], check=True, capture_output=True, text=True).stdout
