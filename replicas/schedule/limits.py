"""What one replica can serve at all, by numbers: pure checks made before a request is accepted."""

from espalier.replicas.cache.table import blocks_for
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import Request
from espalier.replicas.shard_info import ShardInfo


def check_servable(request: Request, info: ShardInfo) -> None:
    """Raises InvalidRequestError naming the field when the request could never finish here, even alone."""
    params = request.params
    prompt_len = len(request.prompt_token_ids)
    ids_by_param = {
        "prompt": request.prompt_token_ids,
        "emitted_token_ids": request.emitted_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
    }
    for param, token_ids in ids_by_param.items():
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < info.vocab_size):
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size)
            raise InvalidRequestError(
                f"{param}: token id {bad} lies outside the vocabulary of {info.vocab_size}", param=param
            )
    if len(request.emitted_token_ids) >= params.max_tokens:
        raise InvalidRequestError(
            f"emitted_token_ids: {len(request.emitted_token_ids)} tokens leave none of max_tokens={params.max_tokens}",
            param="emitted_token_ids",
        )
    # The last token of a reply is never computed, so its state needs no place.
    num_stored = prompt_len + params.max_tokens - 1
    limit = min(info.max_context, info.num_blocks * info.block_size + 1)
    if prompt_len >= limit:
        raise InvalidRequestError(
            f"prompt: {prompt_len} tokens leave no room for a reply; at most {limit} fit, both together", param="prompt"
        )
    if prompt_len + params.max_tokens > info.max_context or blocks_for(num_stored, info.block_size) > info.num_blocks:
        raise InvalidRequestError(
            f"max_tokens: {prompt_len} prompt tokens and max_tokens={params.max_tokens} exceed the {limit} tokens that fit, both together",
            param="max_tokens",
        )
