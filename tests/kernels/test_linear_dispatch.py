"""Which form runs where, and what is refused before anything runs."""

import warnings

import pytest
import torch

from espalier.kernels.counters import ScratchSize
from espalier.kernels.device import DeviceClass
from espalier.kernels.linear import dispatch
from espalier.kernels.linear.dispatch import Form, choose_form, load_form, load_kernels, possible_forms, thresholds
from espalier.kernels.linear.exl3_linear import allocate_scratch, exl3_linear, linear_rotated, scratch_for
from espalier.kernels.linear.group import LinearGroup

HOPPER = DeviceClass((9, 0), 132, 232448, triton=True, gluon=True)
AMPERE = DeviceClass((8, 6), 84, 101376, triton=True, gluon=True)
BLACKWELL = DeviceClass((12, 0), 170, 101376, triton=True, gluon=True)
UNKNOWN_TRITON = DeviceClass((9, 0), 132, 232448, triton=True, gluon=False)
CPU = DeviceClass()
ROWS = [1, 2, 8, 16, 17, 32, 33, 64, 65, 127, 128, 129, 256, 1000, 1535, 1536, 2048, 8192]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("out_features", [128, 5120, 17408, 248320])
def test_every_device_gets_a_form_it_can_run(rows: int, out_features: int) -> None:
    for device in (HOPPER, AMPERE, BLACKWELL, UNKNOWN_TRITON):
        assert choose_form(device, rows, out_features) in possible_forms(device)
    assert choose_form(UNKNOWN_TRITON, rows, out_features) is Form.PLAIN
    assert choose_form(AMPERE, rows, out_features) is choose_form(BLACKWELL, rows, out_features)


def test_wgmma_is_for_hopper() -> None:
    assert {Form.ROWS_WGMMA, Form.PROMPT_WGMMA, Form.PROMPT_DECODED} <= set(possible_forms(HOPPER))
    for device in (AMPERE, BLACKWELL):
        assert possible_forms(device) == (Form.PLAIN, Form.ROWS_MMA, Form.PROMPT_MMA)
    assert possible_forms(CPU) == ()


def test_a_head_goes_to_the_prompt_form_early_without_wgmma() -> None:
    for device in (AMPERE, BLACKWELL):
        assert [choose_form(device, rows, 248320) for rows in (32, 33)] == [Form.ROWS_MMA, Form.PROMPT_MMA]
        assert [choose_form(device, rows, 17408) for rows in (128, 129)] == [Form.ROWS_MMA, Form.PROMPT_MMA]


@pytest.mark.parametrize("out_features", [1024, 17408])
def test_weights_are_decoded_once_where_rows_are_many(out_features: int) -> None:
    pytest.importorskip("triton")
    assert choose_form(HOPPER, 1535, out_features) is Form.PROMPT_WGMMA
    assert choose_form(HOPPER, 1536, out_features) is Form.PROMPT_DECODED
    # Only calls of so many rows want the memory of decoded weights.
    in_registers, decoded = (load_form(form) for form in (Form.PROMPT_WGMMA, Form.PROMPT_DECODED))
    most = scratch_for(HOPPER, 5120, (out_features,), 1535)
    assert most.partials == in_registers.scratch_size(5120, (out_features,), 1535).partials
    assert scratch_for(HOPPER, 5120, (out_features,), 1536) == most | decoded.scratch_size(5120, (out_features,), 1536)


@pytest.mark.parametrize("device", [HOPPER, AMPERE, UNKNOWN_TRITON], ids=["hopper", "ampere", "plain"])
def test_thresholds_say_where_the_form_changes(device: DeviceClass) -> None:
    for out_features in (1024, 17408):
        borders = [last for last, _ in thresholds(device, out_features)]
        assert borders == sorted(set(borders))
        for last, form in thresholds(device, out_features):
            assert choose_form(device, last, out_features) is form
            assert choose_form(device, last + 1, out_features) is not form


def test_a_form_that_cannot_be_imported_is_replaced_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        if name.endswith("rows_mma"):
            raise AttributeError("module 'gluon' has no attribute 'mma_v2'")
        return name

    monkeypatch.setattr(dispatch.importlib, "import_module", broken)
    load_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="rows_mma cannot be loaded"):
            assert load_form(Form.ROWS_MMA) == "espalier.kernels.linear.plain"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load_form(Form.ROWS_MMA) == "espalier.kernels.linear.plain"
    finally:
        load_kernels.cache_clear()


def test_plain_triton_that_cannot_be_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"no {name}")

    monkeypatch.setattr(dispatch.importlib, "import_module", absent)
    load_kernels.cache_clear()
    try:
        with pytest.raises(ModuleNotFoundError):
            load_form(Form.PLAIN)
    finally:
        load_kernels.cache_clear()


@pytest.mark.parametrize("device", [HOPPER, AMPERE, UNKNOWN_TRITON], ids=["hopper", "ampere", "plain"])
@pytest.mark.parametrize(
    ("in_features", "widths"), [(640, (128,)), (5120, (17408,)), (5120, (248320,)), (5120, (6144, 1024, 1024))]
)
def test_scratch_for_the_most_rows_serves_fewer(device: DeviceClass, in_features: int, widths: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    for most in (1, 16, 40, 65, 200, 2048):
        size = scratch_for(device, in_features, widths, most)
        for rows in range(1, most + 1, 1 if most < 100 else 7):
            module = load_form(choose_form(device, rows, sum(widths)))
            assert size | module.scratch_size(in_features, widths, rows) == size, (most, rows)


def linear_group(in_features: int, width: int) -> LinearGroup:
    """Shapes only: nothing of it is read before an argument is refused."""
    suh, svh = torch.ones(1, in_features).half(), torch.ones(width).half()
    return LinearGroup(in_features, (width,), (), suh, svh, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 384).half()}, "x is 384 wide, the linear 256"),
        ({"x": torch.zeros(2, 256, dtype=torch.float64)}, "x must be"),
        ({"x": torch.zeros(256, 2).half().T}, "neighbours"),
        ({"out": torch.zeros(3, 128)}, r"out must be .* \[2, 128\]"),
        ({"out": torch.zeros(2, 128, dtype=torch.int32)}, "out must be"),
        ({"rotated": torch.zeros(511).half()}, "rotated must be contiguous float16 with 512 elements"),
        ({"rotated": torch.zeros(512)}, "rotated must be"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, torch.Tensor], message: str) -> None:
    pytest.importorskip("triton")
    scratch = allocate_scratch(ScratchSize(), torch.device("cpu"))
    good = {"x": torch.zeros(2, 256).half(), "out": torch.zeros(2, 128), "rotated": torch.zeros(512).half()}
    arguments = good | changed
    with pytest.raises(ValueError, match=message):
        exl3_linear(arguments["x"], linear_group(256, 128), scratch, out=arguments["out"], rotated=arguments["rotated"])


def test_a_device_without_kernels_is_refused() -> None:
    scratch = allocate_scratch(ScratchSize(), torch.device("cpu"))
    with pytest.raises(ValueError, match="cpu, where no Triton kernel runs"):
        linear_rotated(torch.zeros(1, 2, 256).half(), linear_group(256, 128), scratch, torch.zeros(2, 128))
