"""Settings that all tests share: how hypothesis runs, Ctrl-C, and what the golden group needs."""

import importlib.util
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("default")

# A shell starts what it runs in the background with SIGINT ignored, and the programs that tests interrupt inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REFERENCE_PACKAGES = ("torch", "transformers")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip golden tests where the reference is not installed, unless they were asked for by name (`-m golden`).

    The compile matrix takes minutes: it runs only when asked for (`-m compile_matrix`).
    """
    if "compile_matrix" not in config.getoption("markexpr"):
        on_demand = pytest.mark.skip(reason="takes minutes (pytest -m compile_matrix)")
        for item in items:
            if "compile_matrix" in item.keywords:
                item.add_marker(on_demand)
    missing = [name for name in REFERENCE_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing or "golden" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason=f"no {' and '.join(missing)} (pip install --group golden)")
    for item in items:
        if "golden" in item.keywords:
            item.add_marker(skip)
