"""Where a model's head comes from: the checkpoint's own `mtp.*` tensors, or a head we carry.

mlx-lm drops `mtp.*` when it loads a model, so they are read here. A carried head names the trunk
it was trained on by samples of that trunk's weights, and is refused on any other.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec
import numpy as np

from ...runtime.errors import NoHead
from ...runtime.model import HEAD_PREFIXES, LoadedModel
from ..halves import plain_rows

PREFIX: Final = "mtp."
DRAFT_IDS: Final = "draft_token_ids"
_SAMPLES: Final = 16  # weights of each sampled tensor that a fingerprint holds
# What 16-bit types round is within these, relative and absolute; other weights are not.
_TOLERANCE: Final = (0.01, 1e-3)


class HeadSource(msgspec.Struct, frozen=True):
    """A head's tensors and what is known of it.

    Args:
        tensors: By name without the leading `mtp.`.
        origin: For people: which file it was read from.
        norm_offset: Added to norm weights; 1 where a checkpoint stores them around zero.
        draft_ids: Token ids it drafts, most frequent first; None for the whole vocabulary.
        golden: A folder with golden values, or None.
    """

    tensors: dict[str, mx.array]
    origin: str
    norm_offset: float
    draft_ids: np.ndarray[Any, Any] | None
    golden: Path | None


def find_head(model: LoadedModel) -> HeadSource:
    """Return the head of a loaded model.

    Raises:
        NoHead: With the reason, when there is none or it is another trunk's.
    """
    every = _checkpoint(model.card.path)
    own = {
        name.partition(PREFIX)[2]: array
        for name, array in every.items()
        if name.startswith(HEAD_PREFIXES)
    }
    if own:
        return HeadSource(own, f"{PREFIX}* of {model.card.name}", _norm_offset(every), None, None)
    reasons = []
    for folder in _carried():
        reason = _not_its_trunk(_config(folder), model)
        if reason is None:
            return _carried_head(folder)
        reasons.append(f"the head {folder.name} that paceline carries is for {reason}")
    raise NoHead("; ".join([f"model {model.card.name!r} has no {PREFIX}* weights", *reasons]))


def fingerprint(net: Any) -> dict[str, list[float]]:
    """Sample a trunk's weights: its embedding, a layer in the middle, its last norm."""
    middle = len(net.layers) // 2
    return {
        "embed_tokens": _samples(net.model.embed_tokens, net.args.vocab_size),
        "down_proj of the middle layer": _samples(
            net.layers[middle].mlp.down_proj, net.args.hidden_size
        ),
        "norm": net.model.norm.weight[:_SAMPLES].astype(mx.float32).tolist(),
    }


def _samples(module: Any, rows: int) -> list[float]:
    """Return one weight each of some rows, from the first to the last."""
    found = plain_rows(module, mx.array(np.linspace(0, rows - 1, _SAMPLES).astype(np.int32)))
    columns = mx.array(np.linspace(0, found.shape[1] - 1, _SAMPLES).astype(np.int32))
    picked = mx.take_along_axis(found.astype(mx.float32), columns[:, None], axis=1)
    values: list[float] = picked[:, 0].tolist()  # type: ignore[assignment]
    return values


def _checkpoint(folder: Path) -> dict[str, mx.array]:
    """Return all tensors of a checkpoint; none of them is read before it is used."""
    found: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= _tensors(file)
    return found


def _tensors(file: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    return arrays


def _norm_offset(checkpoint: dict[str, mx.array]) -> float:
    """Return 1 for a checkpoint as its makers published it, with norms that lack their 1.

    mlx-lm tells it by the same sign: a depthwise convolution that is not transposed yet.
    """
    published = any("conv1d.weight" in n and a.shape[-1] != 1 for n, a in checkpoint.items())
    return 1.0 if published else 0.0


def _carried() -> list[Path]:
    root = Path(str(resources.files(__package__))) / "data"
    return sorted(path for path in root.iterdir() if path.is_dir())


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def _not_its_trunk(config: dict[str, Any], model: LoadedModel) -> str | None:
    """Say which trunk a head is for when it is not for this model."""
    trunk = config["trunk"]
    name = str(trunk["name"])
    if model.card.vocab_size != config["vocab_size"]:
        return f"{name} with {config['vocab_size']} tokens, not {model.card.vocab_size}"
    try:
        ours = fingerprint(model.net)
    except AttributeError:
        return f"{name}, whose layers have other names"
    for tensor, theirs in trunk["fingerprint"].items():
        found = ours.get(tensor)
        if found is None or not np.allclose(found, theirs, *_TOLERANCE):
            return f"{name} as its maker published it; {tensor} has other weights here"
    return None


def _carried_head(folder: Path) -> HeadSource:
    config = _config(folder)
    carried = _tensors(folder / "model.safetensors")
    tensors = {name.removeprefix(PREFIX): array for name, array in carried.items()}
    ids = np.array(tensors.pop(DRAFT_IDS))[: config["draft_vocab"]["default"]]
    offset = float(config["norm_weight_offset"])
    return HeadSource(tensors, folder.name, offset, ids.astype(np.int64), folder)
