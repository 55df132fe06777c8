"""How many columns of a prompt product are decoded at a time, and how wide the tiles are that multiply them: so that rounds leave few programs idle.

A tile is 128 output columns x 192, 128 or 64 tokens; all are whole, and programs take them round robin. The choice shows in no bit of the output.
Prices: benchmarks/notes/exl3-linear-prompts.md.
"""

import functools

# Hundredths of what a round of tiles of 192 tokens costs: rounds of each width, and a span's two launches. Measured, but for the launches.
ROUND_COSTS = {192: 100, 128: 71, 64: 52}
SPAN_COST = 5


@functools.cache
def choose_spans(column_blocks: int, rows: int, most_blocks: int, programs: int) -> tuple[tuple[int, int], ...]:
    """(column blocks, tokens of a tile) of the spans that are decoded and multiplied one after the other; wide tiles first.

    A span has whole tiles only and at most `most_blocks` blocks. Of all ways to cover the columns the one that costs least: narrower tiles
    for a few columns cost less than a round that most programs miss.
    """
    choices = []  # (cost, tokens, blocks): as many blocks as so many rounds can take
    for tokens, cost in ROUND_COSTS.items():
        token_blocks = -(-rows // tokens)
        for rounds in range(1, -(-most_blocks * token_blocks // programs) + 1):
            blocks = min(rounds * programs // token_blocks, most_blocks)
            if blocks:
                choices.append((rounds * cost + SPAN_COST, tokens, blocks))
    # least[n]: the cost of the first n blocks and the last of their spans. Of equals the one with the widest tiles, then the longest.
    least = [(0, (0, 0))]
    for covered in range(1, column_blocks + 1):
        cost, tokens, blocks = min(
            ((least[max(0, covered - blocks)][0] + cost, tokens, blocks) for cost, tokens, blocks in choices),
            key=lambda choice: (choice[0], -choice[1], -choice[2]),
        )
        least.append((cost, (min(blocks, covered), tokens)))
    spans = []
    while column_blocks:
        spans.append(least[column_blocks][1])
        column_blocks -= spans[-1][0]
    return tuple(sorted(spans, key=lambda span: (-span[1], -span[0])))
