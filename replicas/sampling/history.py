"""TokenHistory: which tokens a sequence has seen, for the penalties. Knows no scheduling: it is told tokens by position."""

from collections.abc import Sequence

import torch


class TokenHistory:
    """Tokens of one sequence, counted. What it holds depends on the tokens only, not on how they were cut into calls.

    in_prompt: bool [vocab], the prompt contains the token. output_counts: int32 [vocab], how often the reply contains it.
    length: positions observed so far; the next `observe` starts there.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output_counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.length = 0

    def observe(self, start: int, token_ids: Sequence[int], prompt_len: int) -> None:
        """Counts the tokens at positions start, start + 1, ...; those from `prompt_len` on are output."""
        assert start == self.length, f"history holds {self.length} tokens, the next ones start at {start}"
        num_prompt = min(max(prompt_len - start, 0), len(token_ids))
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.in_prompt.device)
        self.in_prompt[ids[:num_prompt]] = True
        output = ids[num_prompt:]
        self.output_counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.length = start + len(token_ids)
