"""Settings all tests share: threads of the references, how hypothesis runs, Ctrl-C, and what the golden group needs."""

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Tests run in a process for each core. Threads of numpy's and torch's products would be more, and most of their time is
# spent on waiting for each other in loops.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

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
