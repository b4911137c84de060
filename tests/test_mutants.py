from __future__ import annotations

import pytest

from tests.mutants import FAULTS, REPO, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_still_has_its_place(fault: Fault) -> None:
    assert (REPO / fault.path).read_text(encoding="utf-8").count(fault.right) == 1
