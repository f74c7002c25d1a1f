"""Download named files from the Hugging Face hub, or read them from its cache. Imports nothing else of plainvit."""

from pathlib import Path


class UnreachableError(ValueError):
    """The files are not in the cache and the hub cannot be reached."""


def fetch(address: str, patterns: list[str], kind: str = "model") -> Path:
    """Return a folder with the files of `org/name[@revision]` that match `patterns`, downloaded or from the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = address.partition("@")
    option = "" if kind == "model" else f" --repo-type {kind}"
    option += f" --revision {revision}" if revision else ""
    folder = name.rpartition("/")[2]
    instructions = f"on a machine with network access, run `hf download {name}{option} --local-dir {folder}`, copy "
    instructions += f"{folder}/ here and give its path"
    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision or None, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{name!r} is not a hub address: use org/name or org/name@revision") from error
    except LocalEntryNotFoundError as error:
        raise UnreachableError(
            f"{address} is not in the hub's cache and the hub cannot be reached: {instructions}"
        ) from error
    except HfHubHTTPError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(f"cannot download {address} from the hub: {reason}") from error
    except OSError as error:
        raise UnreachableError(f"cannot download {address} ({type(error).__name__}): {instructions}") from error
