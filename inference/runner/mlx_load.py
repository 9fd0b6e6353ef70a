"""From a directory in mlx-lm's format to a model in memory, in the form that runs best on this device.

Import it only after `blas.fast_blas`: it imports MLX. Everything is loaded lazily first, so that sizes are known, and refused,
before a byte of weights is read.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer, maybe_set_recommended_wired_limit

from inference.runner import mlx_memory
from inference.runner.engine import LoadError
from inference.runner.mlx_lane import Model
from inference.runner.mlx_memory import KV_BLOCK_TOKENS, Budget, ModelShape
from inference.runner_protocol import LoadModel

PROGRESS_BYTES = 16 << 20  # weights are evaluated in pieces of about this size
DENSE_SHARE = 0.5  # of the memory: dequantized weights may take that much, else they stay quantized

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in memory and what is known of it."""

    model: Model
    tokenizer: Any  # mlx_lm's TokenizerWrapper
    shape: ModelShape
    budget: Budget
    device: str
    dtype: str
    threads: int  # that BLAS may use
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Form:
    """How weights are run: `dtype` None leaves them as they are on disk."""

    dtype: mx.Dtype | None
    dequantize: bool
    share: float  # of the memory that the weights may take in this form


def forms(on_cpu: bool, blas: bool) -> tuple[Form, ...]:
    """The forms to try, best first. On a CPU a quantized matmul with 16-bit scales is 30 times slower than with 32."""
    if not on_cpu:
        return (Form(None, dequantize=False, share=1.0),)
    if blas:
        return (Form(mx.float32, dequantize=True, share=DENSE_SHARE), Form(mx.float32, dequantize=False, share=1.0))
    return (Form(mx.bfloat16, dequantize=True, share=1.0), Form(mx.float32, dequantize=False, share=1.0))


def load_weights(command: LoadModel, blas: bool, progress: Progress) -> Loaded:
    """Load what the command names.

    Raises: LoadError.
    """
    path = Path(command.model_path)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if on_cpu:
        mx.disable_compile()  # it would run g++ for every new kernel, and gains nothing
    else:
        mx.enable_compile()  # whatever the environment says: on a GPU it gains
        maybe_set_recommended_wired_limit()
    # No hard limit, but above it MLX waits for running work, which frees memory, before it allocates more.
    mx.set_memory_limit(max(1, command.memory_bytes - mlx_memory.PROCESS_BYTES))
    check_files(path)
    model, config, form = choose(path, forms(on_cpu, blas), command.memory_bytes)
    tokenizer = _tokenizer(path, config)
    shape = _shape(model, config, form, on_cpu)
    budget = mlx_memory.plan(shape, command.memory_bytes, command.context, command.running_max)
    mx.set_cache_limit(budget.work_bytes)
    _evaluate(model, shape.weight_bytes, progress)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        shape=shape,
        budget=budget,
        device="cpu" if on_cpu else f"gpu ({mx.device_info().get('device_name', 'unknown')})",
        dtype=_dtype_name(config, model, form),
        threads=command.threads if blas else 1,
        stop_ids=stop_ids(tokenizer, config),
    )


def check_files(path: Path) -> None:
    """Find the usual faults of a model directory.

    Raises: LoadError.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if not (path / name).is_file():
            raise LoadError(f"{path} has no {name}")
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"{path / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise LoadError(f"{path / 'config.json'} names no model_type")
    if "model_file" in config:
        raise LoadError(f"{path} brings its own code ({config['model_file']}), which is never run here")
    weights = sorted(path.glob("model*.safetensors"))
    if not weights:
        raise LoadError(f"{path} has no model*.safetensors")
    for file in weights:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """A file that ends early would be read as whatever lies behind it."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            total = file.stat().st_size
            header = json.loads(opened.read(length)) if length <= total else None
        ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"] if header else []
        whole = bool(ends) and 8 + length + max(ends) == total
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{file} is damaged: {error}") from error
    if not whole:
        raise LoadError(f"{file} is damaged: its length is not what its header says")


def choose(path: Path, candidates: tuple[Form, ...], memory_bytes: int) -> tuple[Model, dict[str, Any], Form]:
    """The model, not yet evaluated, in the first form that fits; the last form is left for `plan` to refuse."""
    for form in candidates:
        model, config = _lazily(path, form)
        if form is candidates[-1] or _parameter_bytes(model) <= memory_bytes * form.share:
            return model, config, form
    raise AssertionError("there is always a form")


def _lazily(path: Path, form: Form) -> tuple[Model, dict[str, Any]]:
    try:
        model, config = load_model(path, lazy=True)
        # Scales are made wider before they are used: dequantizing in f32 is exact, and five times faster than in f16.
        if form.dtype is not None:
            model.set_dtype(mx.float32 if form.dequantize else form.dtype)
        if form.dequantize:
            dequantize_model(model)
            model.set_dtype(form.dtype)
    except SystemExit as error:  # a model file of mlx-lm does that where a package of its own is missing
        raise LoadError(f"{path} needs a package that is not installed") from error
    except Exception as error:  # whatever a config makes of mlx-lm's model classes, it is the model's fault
        raise LoadError(f"{path} can't be loaded: {_sentence(error)}") from error
    return model, config


def _sentence(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _tokenizer(path: Path, config: dict[str, Any]) -> Any:  # noqa: ANN401 - mlx_lm is untyped
    try:
        # Said outright: else transformers asks on stdin whether to run a tokenizer's own code.
        return load_tokenizer(path, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # likewise
        if b'"auto_map"' in (path / "tokenizer_config.json").read_bytes():
            raise LoadError(f"the tokenizer of {path} brings its own code, which is never run here") from error
        raise LoadError(f"the tokenizer of {path} can't be loaded: {_sentence(error)}") from error


def stop_ids(tokenizer: Any, config: dict[str, Any]) -> frozenset[int]:  # noqa: ANN401 - of any type
    """All that end an answer: of the tokenizer, of config.json and generation_config.json (which mlx-lm merges into it)."""
    configured = config.get("eos_token_id")
    more = configured if isinstance(configured, list) else [configured]
    return frozenset(tokenizer.eos_token_ids) | {token for token in more if isinstance(token, int)}


def _parameters(model: Model) -> list[mx.array]:
    return list(dict(tree_flatten(model.parameters())).values())


def _parameter_bytes(model: Model) -> int:
    return sum(value.nbytes for value in _parameters(model))


def _shape(model: Model, config: dict[str, Any], form: Form, on_cpu: bool) -> ModelShape:
    text = {**config, **(config.get("text_config") or {})}
    short, long = (_cache_bytes(model, blocks * KV_BLOCK_TOKENS) for blocks in (1, 2))
    per_token = -(-(long - short) // KV_BLOCK_TOKENS)
    hidden = int(text.get("hidden_size") or 4096)
    item_bytes = 4 if form.dtype == mx.float32 else 2
    return ModelShape(
        weight_bytes=_parameter_bytes(model),
        kv_bytes_per_token=per_token,
        kv_bytes_fixed=max(0, short - per_token * KV_BLOCK_TOKENS),
        layers=len(model.layers),
        attention_heads=int(text.get("num_attention_heads") or 32),
        hidden=hidden + int(text.get("intermediate_size") or 4 * hidden),
        vocabulary=int(model(mx.array([[0]])).shape[-1]),
        context=int(text.get("max_position_embeddings") or 8192),
        item_bytes=item_bytes,
        scores_kept=on_cpu,
    )


def _cache_bytes(model: Model, tokens: int) -> int:
    """What the model's own caches take for so many tokens, from shapes alone: nothing is evaluated."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, tokens), dtype=mx.uint32), cache=cache)
    return sum(part.nbytes for part in cache)


def _dtype_name(config: dict[str, Any], model: Model, form: Form) -> str:
    quantization = config.get("quantization")
    if quantization and not form.dequantize:
        return f"{quantization['bits']}-bit"
    dtypes = {str(value.dtype).removeprefix("mlx.core.") for value in _parameters(model)}
    return "/".join(sorted(dtypes))


def _evaluate(model: Model, total: int, progress: Progress) -> None:
    done = 0
    progress(done, total)
    for group in _groups(_parameters(model)):
        mx.eval(group)
        done += sum(value.nbytes for value in group)
        progress(done, total)


def _groups(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    group: list[mx.array] = []
    for value in arrays:
        group.append(value)
        if sum(member.nbytes for member in group) >= PROGRESS_BYTES:
            yield group
            group = []
    if group:
        yield group
