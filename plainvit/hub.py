"""The Hugging Face hub: named files only, and from its cache where there is no network. A leaf."""

from pathlib import Path


class UnreachableError(ValueError):
    """What is asked for may exist, but it is neither in the cache nor to be had now."""


def fetch(address: str, patterns: list[str], kind: str = "model") -> Path:
    """A folder with those files of `org/name[@revision]`: downloaded, or found in the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = address.partition("@")
    option = "" if kind == "model" else f" --repo-type {kind}"
    option += f" --revision {revision}" if revision else ""
    folder = name.rpartition("/")[2]
    by_hand = f"where there is a network, run `hf download {name}{option} --local-dir {folder}`, copy "
    by_hand += f"{folder}/ here and give its path"
    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision or None, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"{name!r} is not a hub address: it should read org/name") from error
    except LocalEntryNotFoundError as error:
        raise UnreachableError(
            f"{address} is not in the hub's cache and the hub cannot be reached: {by_hand}"
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"the hub does not give {address}: {reason}") from error
    except OSError as error:
        raise UnreachableError(f"{address} cannot be fetched ({type(error).__name__}): {by_hand}") from error
