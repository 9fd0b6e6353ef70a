"""What a runner may use its memory for: weights, KV, work space. Pure: numbers in, numbers out.

MLX that runs out of memory on a CPU ends in a SIGSEGV, so all of this is decided before anything is allocated.
"""

from msgspec import Struct

from inference.runner.engine import LoadError

PROCESS_BYTES = 192 << 20  # Python, MLX, mlx-lm and the tokenizer; measured 120 to 170 MB
RUNNING_MAX = 32  # rows of a batch: beyond it a step takes longer and yields little more
CONTEXT_MIN = 256  # a model that can't have this many tokens is not worth loading
PREFILL_TOKENS_MIN = 16
PREFILL_TOKENS_MAX = 2048
KV_BLOCK_TOKENS = 256  # mlx-lm's caches grow in such blocks
WORK_SHARE = 8  # prefill's attention scores may take this part of the memory


class ModelShape(Struct, frozen=True, kw_only=True):
    """What decides how much memory a model needs, once its weights are known."""

    weight_bytes: int  # as they will be run
    kv_bytes_per_token: int
    kv_bytes_fixed: int  # of a row, whatever its length (recurrent states)
    layers: int
    attention_heads: int
    hidden: int  # widest activation of a token: hidden and intermediate sizes together
    vocabulary: int
    context: int  # the model's
    item_bytes: int  # of an activation
    scores_kept: bool  # whether attention keeps its scores in memory (on a CPU) or not (fused, on a GPU)


class Budget(Struct, frozen=True, kw_only=True):
    """What a loaded model may take on."""

    context: int
    running_max: int
    kv_bytes_max: int
    prefill_tokens_max: int
    work_bytes: int


def blocks(tokens: int) -> int:
    """Tokens rounded up to whole blocks of a cache."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def row_bytes(shape: ModelShape, tokens: int) -> int:
    """KV of one row of that many tokens."""
    return blocks(tokens) * shape.kv_bytes_per_token + shape.kv_bytes_fixed


def batch_bytes(shape: ModelShape, totals: list[int]) -> int:
    """KV of rows that will have these many tokens: a batch is as long as its longest row."""
    return len(totals) * row_bytes(shape, max(totals)) if totals else 0


def plan(shape: ModelShape, memory_bytes: int, context: int, running_max: int | None) -> Budget:
    """Divide the memory; `context` and `running_max` are what was asked for and come down where memory is short.

    Rows of one batch are padded to the longest, so that `running_max` rows of a whole context must fit.

    Raises: LoadError where not even one short row fits.
    """
    free = memory_bytes - PROCESS_BYTES - shape.weight_bytes
    wanted = min(context, shape.context)
    rows = running_max or RUNNING_MAX
    prefill, work = _work(shape, memory_bytes, wanted, rows)
    # One layer at a time is copied when a cache grows or its rows change.
    kv = max(0, int((free - work) / (1 + 2 / shape.layers)))
    fitting = (kv - shape.kv_bytes_fixed) // max(1, shape.kv_bytes_per_token) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if fitting < min(CONTEXT_MIN, wanted):
        least = row_bytes(shape, min(CONTEXT_MIN, wanted))
        raise LoadError(
            f"the model needs {size(shape.weight_bytes)} for its weights, {size(work + PROCESS_BYTES)} to work in and at least "
            f"{size(least)} for one request's KV, and this runner may use {size(memory_bytes)}"
        )
    context = min(wanted, fitting)
    rows = max(1, min(rows, kv // row_bytes(shape, context)))
    return Budget(context=context, running_max=rows, kv_bytes_max=kv, prefill_tokens_max=prefill, work_bytes=work)


def _work(shape: ModelShape, memory_bytes: int, context: int, rows: int) -> tuple[int, int]:
    """Tokens of one prefill step, and the bytes that it and a decode step need beside weights and KV."""
    kept = shape.attention_heads * context * shape.item_bytes * 3 if shape.scores_kept else context * 4
    per_token = kept + shape.hidden * shape.item_bytes * 4
    prefill = max(PREFILL_TOKENS_MIN, min(PREFILL_TOKENS_MAX, memory_bytes // WORK_SHARE // per_token))
    logits = rows * shape.vocabulary * 4 * 6
    return prefill, prefill * per_token + logits


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
