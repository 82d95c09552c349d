"""The checkpoint under evaluation: nothing is computed with weights that are not the ones its manifest names."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_engine import manifest
from dflash_engine.drafter.checkpoint import load_drafter
from dflash_engine.drafter.documents import read_config
from dflash_engine.drafter.fit import fit_faults
from dflash_engine.drafter.model import DFlashDrafter
from dflash_engine.errors import CheckpointError

__all__ = ["open_checkpoint"]


def open_checkpoint(folder: Path, target: Path) -> tuple[DFlashDrafter, manifest.Manifest]:
    """The drafter of a checkpoint folder and its manifest, cheapest questions first.

    Raises CheckpointError where it does not fit the target's configuration, has no readable manifest, is not
    what the manifest says, or does not load.
    """
    faults = fit_faults(read_config(folder), json.loads((target / "config.json").read_bytes()))
    if faults:
        raise CheckpointError(f"{folder} does not fit the target: {'; '.join(map(str, faults))}")
    try:
        record = manifest.parse_manifest((folder / manifest.MANIFEST_NAME).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {manifest.MANIFEST_NAME}; stage it, which gives it one") from error
    except (OSError, manifest.ManifestError) as error:
        raise CheckpointError(f"{folder} cannot be identified: {error}; stage it again") from error
    changed = manifest.verify_files(folder, record.model)
    if changed:
        raise CheckpointError(f"{folder} is not what its manifest says: {'; '.join(changed)}; stage it again")
    return load_drafter(folder), record
