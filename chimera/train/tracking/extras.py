"""Whether what the trackers of ``[metrics]`` need is installed, asked before anything is started or loaded."""

import os
from collections.abc import Mapping
from importlib.util import find_spec

from chimera.errors import ConfigError
from chimera.train.config import MetricsOptions

__all__ = ["require_trackers"]


def require_trackers(options: MetricsOptions, environ: Mapping[str, str] = os.environ) -> None:
    """See that the packages are there, before anything is started.

    Raises:
        ConfigError: one is not; the message names the extra that has it.
    """
    needed: dict[str, tuple[str, ...]] = {}
    if options.wandb:
        needed["wandb"] = ("wandb",)
    if options.mlflow:
        remote = environ.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://"))
        needed["mlflow"] = ("mlflow",) if remote else ("mlflow", "sqlalchemy", "alembic")
    for extra, modules in needed.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            raise ConfigError(
                f"[metrics] {extra} = true needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
                f"not installed; pip install 'chimera-pipeline[{extra}]', or set metrics.{extra} to false"
            )
