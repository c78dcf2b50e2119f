"""What is wrong with a Hugging Face model's files: weights that do not fit its config, and any error, in one line."""

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replayscope.model.hf_config import UnmappedError
from replayscope.model.weights import WeightsError

log = logging.getLogger(__name__)
_LONGEST = 160
_NAMED = 3


@contextmanager
def told(name: str) -> Iterator[None]:
    """Whatever goes wrong while a model is found, read and mapped becomes a WeightsError with one line."""
    try:
        yield
    except WeightsError:
        raise
    except UnmappedError as error:
        raise WeightsError(f"model {name}: {error}") from error
    except Exception as error:
        # Other people's code reads other people's files: there is no list of what it raises.
        if not Path(name).is_dir() and isinstance(error, OSError | ValueError):
            what = f"is no folder here and could not be fetched from the hub: {_reason(error)}"
        else:
            what = f"cannot be loaded: {_reason(error)}; check its files, or add --debug to see where"
        raise WeightsError(f"model {name} {what}") from error


def check_weights(name: str, module: Any, layers: int, loading: dict[str, Any]) -> None:
    """Hold a checkpoint against its config, since transformers fills what it lacks at random.

    layers: how many the checkpoint may have. loading: from_pretrained's output_loading_info. Tensors that are not used
    and are of no layer give a warning. Raises WeightsError that names up to three tensors.
    """
    beyond = _beyond(loading["unexpected_keys"], [key for key, _ in module.named_parameters()], layers)
    # Mismatched ones come with both shapes.
    mismatched = [key for key, *_ in loading["mismatched_keys"]]
    for keys, what in (
        (loading["missing_keys"], "the checkpoint lacks {}"),
        (mismatched, "the checkpoint has {} in another shape"),
        (beyond, "the checkpoint has more layers: {}"),
    ):
        if keys:
            raise WeightsError(
                f"model {name} does not fit its config: {what.format(_some(keys))}; "
                "give the config.json that the checkpoint was saved with"
            )
    if unused := loading["unexpected_keys"]:
        log.warning("model %s: not used of its checkpoint: %s", name, _some(unused))


def _beyond(unexpected: Iterable[str], expected: Iterable[str], layers: int) -> list[str]:
    """Keys of layers that the config does not have: named as those of a layer that it has, but for the number."""
    known = {form for key in expected for form in (_form(key), _form(key).partition(".")[2])}
    return [key for key in unexpected if _form(key) in known and _layer(key) >= layers]


def _form(key: str) -> str:
    """A key without its layer; keys of no layer have none."""
    return re.sub(r"\.\d+\.", ".#.", key, count=1) if _layer(key) >= 0 else ""


def _layer(key: str) -> int:
    found = re.search(r"\.(\d+)\.", key)
    return int(found[1]) if found else -1


def _some(keys: Collection[str]) -> str:
    """How many, and the first few in the order of their layers."""
    first = sorted(keys, key=lambda key: (_layer(key), key))[:_NAMED]
    more = ", …" if len(keys) > len(first) else ""
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)} ({', '.join(first)}{more})"


def _reason(error: Exception) -> str:
    """The first line that says something: behind one that ends in a colon comes what it announces."""
    said = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        said = f"{said} {line}".strip()
        if not said.endswith(":"):
            break
    if not said or isinstance(error, KeyError):
        # The text of a KeyError is the bare key.
        said = f"{type(error).__name__} {said}".strip()
    return said if len(said) <= _LONGEST else said[: _LONGEST - 1] + "…"
