"""Model files to a loaded model, and the card that says what it is."""

import json
import time
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.utils import _get_classes as get_classes
from mlx_lm.utils import load_model

from .errors import ModelError
from .limits import memory_limit
from .starter import NAME as STARTER_NAME
from .starter import ensure_starter

HEAD_PREFIXES: Final = ("mtp.", "model.mtp.")  # tensors of an MTP head in a checkpoint
DEFAULT_CONTEXT: Final = 8192  # for a configuration that names none
_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


class ModelCard(msgspec.Struct, frozen=True):
    """What was loaded.

    Args:
        name: What clients see under /v1/models.
        family: mlx-lm's model type.
        dtype: Type the products run in, or "4-bit" and the like for packed weights.
        why: One clause on why that type.
        context: The context window in tokens.
        created: Unix time of the weights' file.
    """

    name: str
    path: Path
    family: str
    dtype: str
    why: str
    device: str
    context: int
    parameters: int
    vocab_size: int
    end_ids: tuple[int, ...]
    created: int


class LoadedModel(msgspec.Struct, frozen=True):
    """An mlx-lm model and its card; arrays belong to the thread that loaded them."""

    net: nn.Module
    card: ModelCard


def find_model(model: str) -> Path:
    """Return the directory of a model named by a path, a Hugging Face id or 'starter'.

    Raises:
        ModelError: When it is neither here nor to be had.
    """
    if model == "starter":
        return ensure_starter()
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise ModelError(f"model={model!r}: no home folder is known for it here") from None
    if path.exists() or model.startswith((".", "/", "~")):
        if not (path / "config.json").exists():
            raise ModelError(f"model {model!r}: {path} has no config.json; give an mlx-lm folder")
        return path
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import hf_repo_to_path

    try:
        return Path(str(hf_repo_to_path(model)))
    except Exception as not_cached:
        offline = not_cached
    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        line = (str(error) or str(offline)).splitlines()[0]
        raise ModelError(
            f"model {model!r} is no directory, is not in the Hugging Face cache and cannot be "
            f"downloaded: {line}; give a directory, or connect once and run `paceline pull`"
        ) from None


def choose_device(device: str) -> str:
    """Make the device MLX's default and return its name, "cpu" or "gpu".

    Raises:
        ModelError: When a GPU is asked for and MLX has none.
    """
    has_gpu = mx.is_available(mx.gpu)
    if device == "gpu" and not has_gpu:
        raise ModelError("device 'gpu': this MLX sees no GPU; use device cpu or another build")
    chosen = "gpu" if has_gpu and device != "cpu" else "cpu"
    mx.set_default_device(mx.gpu if chosen == "gpu" else mx.cpu)
    if chosen == "cpu":
        # MLX compiles fused kernels with g++ into a shared temporary folder and loads them by
        # name; on a CPU they gain nothing here, so that door stays shut.
        mx.disable_compile()
    return chosen


def load(path: Path, dtype: str, device: str, context: int, served_name: str) -> LoadedModel:
    """Load a model on the calling thread, which then owns its arrays.

    Args:
        dtype: "auto", "checkpoint", or a float type that weights are turned into.
        context: Context window in tokens, or 0 for the model's own.

    Raises:
        ModelError: When the files are missing, damaged or of an unknown family.
    """
    chosen = choose_device(device)
    try:
        net, config = load_model(path, get_model_classes=_classes)
    except (FileNotFoundError, ValueError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"model in {path} cannot be loaded: {line}") from None
    target, why = _choose_dtype(dtype, chosen, net)
    if target is not None:
        _unpack(net, target)
    mx.eval(net.parameters())
    return LoadedModel(net, _card(path, net, config, why, chosen, context, served_name))


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return a family's model and arguments; the model takes a checkpoint with a head in it.

    Most families of mlx-lm would not load `mtp.*`; lanes/heads reads them.
    """
    family, arguments = get_classes(config)

    def make(args: Any) -> nn.Module:
        net: nn.Module = family(args)
        plain = getattr(net, "sanitize", dict)
        net.sanitize = lambda weights: {
            name: array
            for name, array in plain(weights).items()
            if not name.startswith(HEAD_PREFIXES)
        }
        return net

    return make, arguments


def save_unpacked(source: Path, target: Path, end_token: int) -> None:
    """Write a float32 copy of a model, weights and configuration, with another end token."""
    choose_device("cpu")
    net, config = load_model(source)
    _unpack(net, mx.float32)
    target.mkdir()
    weights = dict(tree_flatten(net.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    packed = ("quantization", "quantization_config")
    kept = {key: value for key, value in config.items() if key not in packed}
    (target / "config.json").write_text(json.dumps({**kept, "eos_token_id": end_token}))


def _choose_dtype(asked: str, device: str, net: nn.Module) -> tuple[mx.Dtype | None, str]:
    """Return the float type to unpack weights into, or None to keep them as they are."""
    if asked == "checkpoint":
        return None, "asked for"
    if asked != "auto":
        return _DTYPES[asked], "asked for"
    if device == "gpu":
        return None, "fastest on a GPU as stored"
    needed, limit = 4 * _parameter_count(net), memory_limit()
    if needed > limit.bytes // 2:
        return None, (
            f"float32 would be fastest on a CPU but needs {needed / 2**30:.1f} GiB, more than half "
            f"of the {limit.bytes / 2**30:.1f} GiB it may use ({limit.source})"
        )
    return mx.float32, "fastest on a CPU: the only type whose products run on BLAS"


def _unpack(net: nn.Module, dtype: mx.Dtype) -> None:
    """Turn packed and other float weights into one float type, in place."""
    swaps = []
    for name, module in net.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            swaps.append((name, _unpacked(module)))
    if swaps:
        net.update_modules(tree_unflatten(swaps))
    net.update(
        tree_map(
            lambda a: a.astype(dtype) if mx.issubdtype(a.dtype, mx.floating) else a,
            net.parameters(),
        )
    )


def _unpacked(module: nn.Module) -> nn.Module:
    """Return the plain twin of a quantized module; scales in float32 so nothing is rounded."""
    biases = module.get("biases")
    weight = mx.dequantize(
        module.weight,
        module.scales.astype(mx.float32) if biases is not None else module.scales,
        None if biases is None else biases.astype(mx.float32),
        group_size=module.group_size,
        bits=module.bits,
        mode=getattr(module, "mode", "affine"),
    )
    twin: nn.Module
    if isinstance(module, nn.QuantizedEmbedding):
        twin = nn.Embedding(1, 1)
    else:
        twin = nn.Linear(1, 1, bias="bias" in module)
        if "bias" in module:
            twin.bias = module.bias
    twin.weight = weight
    return twin


def _card(
    path: Path,
    net: nn.Module,
    config: dict[str, Any],
    why: str,
    device: str,
    context: int,
    served_name: str,
) -> ModelCard:
    inner = config.get("text_config", config)
    window = int(inner.get("max_position_embeddings") or DEFAULT_CONTEXT)
    files = sorted(path.glob("*.safetensors"))
    return ModelCard(
        name=served_name or _display_name(path, config),
        path=path,
        family=str(config.get("model_type", "unknown")),
        dtype=weights_type(net),
        why=why,
        device=device,
        context=min(context, window) if context else window,
        parameters=_parameter_count(net),
        vocab_size=int(inner.get("vocab_size", 0)),
        end_ids=_end_ids(path, config),
        created=int(files[0].stat().st_mtime) if files else int(time.time()),
    )


def weights_type(net: nn.Module) -> str:
    """Name the type of a model's weights: "float32", "bfloat16", or "4-bit"."""
    bits = {m.bits for m in net.modules() if isinstance(m, nn.QuantizedLinear)}
    if bits:
        return f"{min(bits)}-bit"
    arrays: dict[str, mx.array] = dict(tree_flatten(net.parameters()))
    first = next(array for array in arrays.values() if array.ndim == 2)
    return str(first.dtype).rpartition(".")[2]


def _display_name(path: Path, config: dict[str, Any]) -> str:
    if config.get("_name_or_path") == STARTER_NAME:
        return STARTER_NAME
    snapshot = path.parent
    if snapshot.name == "snapshots":  # a Hugging Face cache: models--owner--name/snapshots/hash
        return snapshot.parent.name.removeprefix("models--").replace("--", "/")
    return path.resolve().name


def _end_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    found: set[int] = set()
    generation = path / "generation_config.json"
    sources = [config, config.get("text_config", {})]
    if generation.exists():
        sources.append(json.loads(generation.read_text(encoding="utf-8")))
    for source in sources:
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    return tuple(sorted(found))


def _parameter_count(net: nn.Module) -> int:
    """Count weights, each packed one for what it unpacks to."""
    total = 0
    for module in net.modules():
        for name, value in module.items():
            if not isinstance(value, mx.array) or name in ("scales", "biases"):
                continue
            packed = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
            total += value.size * (32 // module.bits if packed and name == "weight" else 1)
    return total
