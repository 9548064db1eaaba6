"""MosaicML's streaming shards; this module stands for the package ``streaming``."""

import streaming

from chimera.data.record_samples import Records
from chimera.errors import DataError

__all__ = ["streaming_dataset"]


def streaming_dataset(path: str, cache: str | None) -> Records:
    """Open shards: here, or at a remote address through a local folder.

    Raises:
        DataError: there are none.
    """
    try:
        records: Records = (
            streaming.LocalDataset(path)
            if cache is None
            else streaming.StreamingDataset(remote=path, local=cache, batch_size=1)
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} holds no shards of MosaicML's streaming: {error}") from None
    return records
