"""Published weights by name, and the Hugging Face hub: safetensors only, from its cache where there is no network."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """One set of published weights: what it is, where it is, what was reported for it."""

    hub: str
    family: str
    licence: str
    top1: float | None = None  # ImageNet, as reported by timm's results files
    real: float | None = None  # ImageNet-ReaL, likewise


def published() -> dict[str, Published]:
    """The weights that most people want, by a name that says model, recipe, data and size."""
    return {}


def fetch(address: str) -> Path:
    """A folder with the weights of `org/name[@revision]`: downloaded, or found in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = address.partition("@")
    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", "preprocessor_config.json"]
    by_hand = f"where there is a network, run `hf download {name}` and load the folder it prints"
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except HFValidationError as error:
        raise ValueError(f"{name!r} is not a hub address: it should read org/name") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{address} is not in the hub's cache and the hub cannot be reached: {by_hand}") from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"the hub does not give {address}: {reason}") from error
    except OSError as error:
        raise ValueError(f"{address} cannot be fetched ({type(error).__name__}): {by_hand}") from error
