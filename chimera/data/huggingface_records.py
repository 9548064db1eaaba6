"""Tables of Hugging Face datasets; this module stands for the package ``datasets``."""

import datasets

from chimera.data.record_samples import Records
from chimera.errors import DataError

__all__ = ["saved_dataset"]


def saved_dataset(path: str) -> Records:
    """Open a dataset that was saved to disk.

    Raises:
        DataError: there is none, or a dictionary of several.
    """
    try:
        found = datasets.load_from_disk(path)
    except (FileNotFoundError, ValueError, OSError) as error:
        raise DataError(f"{path} is no dataset that save_to_disk wrote: {error}") from None
    if isinstance(found, datasets.DatasetDict):
        raise DataError(f"{path} holds the splits {', '.join(found)}; give the folder of one, such as {path}/train")
    records: Records = found
    return records
