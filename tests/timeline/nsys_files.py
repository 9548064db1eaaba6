"""Small exports of nsys, made by the test that reads them."""

import sqlite3

__all__ = ["Export"]

STEP = 1_000_000


class Export:
    """An export under construction: ranges, launches and what they start; tables appear as they are needed.

    ``suffix`` stands behind the names of NVTX's table, as some exporters write it.
    """

    def __init__(self, path, *, suffix="", event_type=True, process_of_kernels=False):
        self.path = path
        self.nvtx = f"NVTX_EVENTS{suffix}"
        self._with_process = process_of_kernels
        self._event_type = event_type
        self._strings = 0
        self._calls = 0
        self.database = sqlite3.connect(path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.database.commit()
        self.database.close()

    def _insert(self, table, **values):
        columns = ", ".join(f'"{name}"' for name in values)
        self.database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        places = ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} VALUES ({places})", tuple(values.values()))  # noqa: S608

    def range(self, name, start, end, thread=1 << 24, *, registered=False, event_type=59):
        """Add a range; a registered name stands in a table of strings."""
        number = None
        if registered:
            self._strings += 1
            number = self._strings
            self._insert("StringIds", id=number, value=name)
        kind = {"eventType": event_type} if self._event_type else {}
        text = None if registered else name
        self._insert(self.nvtx, start=start, end=end, text=text, textId=number, globalTid=thread, **kind)

    def launch(self, at, start, end, thread=1 << 24, *, table="KERNEL", correlation=None):
        """Add a call at ``at`` whose work runs from ``start`` to ``end``."""
        self._calls += 1
        number = correlation or self._calls
        self._insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=at, end=at + 1, correlationId=number, globalTid=thread, nameId=0
        )
        process = {"globalPid": thread >> 24 << 24} if self._with_process else {}
        self._insert(
            f"CUPTI_ACTIVITY_KIND_{table}",
            start=start,
            end=end,
            deviceId=0,
            streamId=7,
            correlationId=number,
            **process,
        )
