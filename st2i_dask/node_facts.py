"""What runs on a cluster's nodes to look at them, sent by value: the package may not be there.

So every function stands alone, and what it imports it imports by name.
"""

from __future__ import annotations

from typing import Any


def package_versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """The version of each package; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def scheduler_facts(dask_scheduler: Any) -> dict[str, Any]:
    """seams (what is unknown about them, or ""), configuration (what is wrong, or ""), attached,
    installed (the seams), workers."""
    from importlib import import_module

    seams = configuration = ""
    try:
        import_module("scheduler_plugin.seams").check(dask_scheduler)
    except ImportError as error:
        seams = str(error)
    except ValueError as error:
        seams = str(error)
    try:
        import_module("st2i_dask.config").check_node()
        import_module("scheduler_plugin.plugin").configured_settings()
    except (ImportError, AttributeError):  # not there, or of another version
        pass
    except ValueError as error:
        configuration = str(error)
    return {
        "seams": seams,
        "configuration": configuration,
        "attached": "st2i-scheduler" in dask_scheduler.plugins,
        "installed": type(dask_scheduler.queued).__name__ == "QueuedTasks",
        "workers": list(dask_scheduler.workers),
    }


def worker_facts(dask_worker: Any) -> dict[str, Any]:
    """nthreads, driver (of CUDA, and wanted), cuda (torch sees it), configuration (what is wrong, or
    ""), plugin (it was given one), serves (which started)."""
    from importlib import import_module
    from pathlib import Path

    driver, cuda, configuration = Path("/dev/nvidiactl").exists(), False, ""
    device = None
    try:
        config = import_module("st2i_dask.config")
        device = config.worker_options()["device"]
        config.check_node()
    except (ImportError, AttributeError):  # not there, or of another version
        pass
    except ValueError as error:
        configuration = str(error)
    if driver and device != "cpu":
        try:
            cuda = import_module("torch").cuda.is_available()
        except ImportError:
            cuda = False
    plugin = dask_worker.plugins.get("st2i-worker")
    return {
        "nthreads": dask_worker.state.nthreads,
        "driver": driver and device != "cpu",
        "cuda": cuda,
        "configuration": configuration,
        "plugin": plugin is not None,
        "serves": getattr(plugin, "checkup", None) is not None,
    }
