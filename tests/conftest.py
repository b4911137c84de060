"""Settings of all tests."""

from __future__ import annotations

import os

# Two busy cores: threads that wait for each other by spinning cost more than they save on tensors this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every machine, and no deadline: a machine under load is not a fault.
settings.register_profile("flowkit", derandomize=True, deadline=None)
settings.load_profile("flowkit")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache of text encodings."""
    monkeypatch.setenv("FLOWKIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def assets() -> Path:
    """The folder of the embedded models."""
    import flowkit

    return Path(flowkit.__file__).parent / "assets"
