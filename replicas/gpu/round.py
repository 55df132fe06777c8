"""One round on a track's buffers: the launches from packed inputs to drawn tokens, the same eager and captured. Knows no sequences."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.kernels.attention.lanes import LaneTable
from espalier.kernels.attention.paged import scratch_size as attention_scratch
from espalier.kernels.counters import ScratchSize
from espalier.kernels.device import DeviceClass
from espalier.kernels.linear.exl3_linear import scratch_for
from espalier.kernels.round.drawn import keep_drawn
from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out
from espalier.kernels.round.updates import apply_updates
from espalier.kernels.sampling.history import observe
from espalier.kernels.sampling.rows import MAX_TOP, Limits, Needs
from espalier.kernels.sampling.sample import Drawn, sample
from espalier.kernels.sampling.sample import scratch_size as sampling_scratch
from espalier.replicas.gpu.activations import Activations, ActivationShape
from espalier.replicas.gpu.inputs import DECODE_ROWS, InputFields
from espalier.replicas.gpu.kv import DeviceKV
from espalier.replicas.gpu.network import GpuNetwork
from espalier.replicas.gpu.rounds import RoundShape, RoundShapes
from espalier.replicas.gpu.state import SlotState
from espalier.replicas.model.config import ModelConfig
from espalier.replicas.streams.counters import CounterPool

# Rounds whose tokens later rounds may read: two in flight, and what is being written.
REMEMBERED_ROUNDS = 4
_GREEDY = Needs(sifts=False, guesses=False, logprobs=False)
_BLOCK = 128  # linears' widths are padded to its multiples


@dataclass(frozen=True, slots=True)
class Model:
    """What the tracks of a device share."""

    network: GpuNetwork
    kv: DeviceKV
    state: SlotState


class RoundBuffers:
    """Buffers of one track, for any of its shapes; one round at a time.

    inputs: int32 words of the packed inputs. results: int32 [samples * (3 + 2 * MAX_TOP)], what the host reads: token ids, status, log
    probabilities. drawn: int32 [REMEMBERED_ROUNDS * samples], tokens of the last rounds.
    """

    def __init__(
        self, config: ModelConfig, shapes: RoundShapes, kv_dtype: torch.dtype, block_size: int, device: torch.device
    ) -> None:
        every = shapes.all()
        rows, lanes = max(shape.rows for shape in every), max(shape.lanes for shape in every)
        self.samples = lanes
        self.activations = Activations(ActivationShape(config, rows, lanes, kv_dtype), device)
        self.group = config.num_heads // config.num_kv_heads
        words = max(InputFields.of(shape, self.group).num_words for shape in every)
        self.inputs = torch.zeros(words, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(REMEMBERED_ROUNDS * lanes, dtype=torch.int32, device=device)
        self.results = torch.zeros(lanes * (3 + 2 * MAX_TOP), dtype=torch.int32, device=device)
        self._drawn = _split_results(self.results, lanes)
        self._block_size = block_size
        blocks = -(-max(shape.context for shape in every) // block_size)
        self._layout = RoundLayout.empty(rows, lanes, lanes, blocks, device)

    def compute(self, shape: RoundShape, fields: InputFields, model: Model, pool: CounterPool) -> None:
        """Launches a round whose inputs lie in `inputs`. Allocates nothing and asks the device nothing."""
        state, block_size = model.state, self._block_size

        def given(name: str, width: int = 1) -> Tensor:
            words = fields.device(self.inputs, name)
            return words if width == 1 else words.view(words.shape[0] // width, width)

        apply_updates(given("updates", 2), state.words.view(1, -1))
        layout = self._layout_of(shape)
        lay_out(
            RoundInputs(
                row_lane=given("row_lane"),
                given=given("given"),
                drawn=self.drawn,
                lane_slot=given("lane_slot"),
                first_row=given("first_row"),
                start=given("start"),
                observes=given("observes"),
                sampled_rows=given("sampled_rows"),
                tables=state.tables,
                block_size=block_size,
            ),
            layout,
        )
        lanes = LaneTable(
            first_row=given("first_row"),
            num_rows=given("num_rows"),
            start=given("start"),
            block_tables=layout.block_tables,
            tiles=given("tiles", 2),
            shares=given("shares", 3),
            min_rows=1,
            max_rows=shape.rows if shape.mixed else 1,
            max_context=shape.context,
            few_rows=DECODE_ROWS,
        )
        if not shape.greedy:
            observe(layout.token_ids, layout.history_slot, layout.positions, state.prompt_lens, state.seen)
        logits = model.network.forward(
            layout.token_ids,
            layout.positions,
            layout.kv_slots,
            lanes,
            layout.gather_rows,
            model.kv,
            self.activations,
            pool.scratch,
        )
        drawn = _first(self._drawn, shape.samples)
        sample(
            logits,
            layout.draw_slot,
            layout.draw_positions,
            state.lines,
            state.seen,
            state.limits,
            drawn,
            pool.scratch,
            _GREEDY if shape.greedy else Needs(),
        )
        keep_drawn(drawn.token_ids, given("place"), self.drawn)

    def _layout_of(self, shape: RoundShape) -> RoundLayout:
        whole, rows, samples = self._layout, shape.rows, shape.samples
        blocks = -(-shape.context // self._block_size)
        return RoundLayout(
            token_ids=whole.token_ids[:rows],
            positions=whole.positions[:rows],
            kv_slots=whole.kv_slots[:rows],
            history_slot=whole.history_slot[:rows],
            block_tables=whole.block_tables.view(-1)[: shape.lanes * blocks].view(shape.lanes, blocks),
            gather_rows=whole.gather_rows[:samples],
            draw_slot=whole.draw_slot[:samples],
            draw_positions=whole.draw_positions[:samples],
        )


def buffer_bytes(config: ModelConfig, shapes: RoundShapes, kv_dtype: torch.dtype) -> int:
    """About what `RoundBuffers` takes; tables and inputs are small beside the activations."""
    every = shapes.all()
    rows, lanes = max(shape.rows for shape in every), max(shape.lanes for shape in every)
    return ActivationShape(config, rows, lanes, kv_dtype).num_bytes


def round_scratch(device: DeviceClass, config: ModelConfig, shapes: RoundShapes, limits: Limits) -> ScratchSize:
    """What the launches of any round need together, since they follow each other."""

    def padded(*widths: int) -> tuple[int, ...]:
        return tuple(-(-width // _BLOCK) * _BLOCK for width in widths)

    every = shapes.all()
    rows, lanes = max(shape.rows for shape in every), max(shape.lanes for shape in every)
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    size = sampling_scratch(lanes, limits)
    for inputs, outputs, count in (
        (hidden, padded(q_width, kv_width, kv_width), rows),
        (q_width, padded(hidden), rows),
        (hidden, padded(inner, inner), rows),
        (inner, padded(hidden), rows),
        (hidden, padded(config.vocab_size), lanes),
    ):
        size |= scratch_for(device, *padded(inputs), outputs, count)
    return size | attention_scratch(
        device,
        lanes,
        DECODE_ROWS,
        max(shape.context for shape in every),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _split_results(results: Tensor, samples: int) -> Drawn:
    token_ids, status, logprob, top_ids, top_logprobs = torch.split(
        results, [samples, samples, samples, samples * MAX_TOP, samples * MAX_TOP]
    )
    return Drawn(
        token_ids=token_ids,
        status=status,
        logprob=logprob.view(torch.float32),
        top_ids=top_ids.view(samples, MAX_TOP),
        top_logprobs=top_logprobs.view(torch.float32).view(samples, MAX_TOP),
    )


def _first(drawn: Drawn, samples: int) -> Drawn:
    return replace(
        drawn,
        token_ids=drawn.token_ids[:samples],
        status=drawn.status[:samples],
        logprob=drawn.logprob[:samples],
        top_ids=drawn.top_ids[:samples],
        top_logprobs=drawn.top_logprobs[:samples],
    )
