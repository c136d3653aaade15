"""Fetch a checkpoint by its hub id, with `huggingface_hub`'s cache and resumed downloads."""

from importlib import import_module
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats beside the model: onnx/, original/, ...


def fetch_snapshot(repo: str, progress: bool = True) -> Path:
    """Return the local folder of a hub id `org/name`; download what is not in the cache.

    Files arrive under a temporary name and are moved when they are complete, so an interrupted
    download can be run again. HF_HUB_OFFLINE=1, HF_ENDPOINT, HF_HOME and HF_TOKEN mean what they
    mean to huggingface_hub. Raises TinyspecError if the id does not exist or is not allowed, if
    there is no network, and offline if a file is not in the cache.
    """
    from huggingface_hub import constants, errors, snapshot_download

    utils: Any = import_module("huggingface_hub.utils")  # its stubs hide the two switches
    silent = utils.are_progress_bars_disabled()
    if not progress:
        utils.disable_progress_bars()
    try:
        return Path(snapshot_download(repo, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except errors.HFValidationError as error:
        raise TinyspecError(
            f"{repo}: not a hub id (expected org/name), and no such path here"
        ) from error
    except errors.GatedRepoError as error:
        raise TinyspecError(
            f"{repo}: gated; accept its terms on the hub, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise TinyspecError(
            f"{repo}: no such model on the hub, and no such path here; "
            "for a private one run `hf auth login`"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"no connection to {constants.ENDPOINT}"
        )
        raise TinyspecError(
            f"{repo}: {why}, and it is not in the cache {constants.HF_HUB_CACHE}"
        ) from error
    except Exception as error:  # a status, a timeout, a full disk: the transport has own classes
        line = " ".join(str(error).split()) or type(error).__name__
        raise TinyspecError(
            f"{repo}: the download stopped ({line}); run it again, it goes on where it was"
        ) from error
    finally:
        if not silent:
            utils.enable_progress_bars()
