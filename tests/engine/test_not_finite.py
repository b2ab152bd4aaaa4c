"""Numbers that are none end a run: no token may be drawn from them."""

import pytest

from dspark.core.errors import DSparkError
from dspark.core.sampling import SamplingParams
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength
from tests.engine.setup import BLOCK, drafter, target


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_draft_that_overflows(rule, monkeypatch):
    """A residual of NaN has no law at all, and its draw could be any id or none."""
    broken = drafter("untrained")
    hidden = broken.block_hidden
    monkeypatch.setattr(broken, "block_hidden", lambda *args: hidden(*args) * float("inf"))
    monkeypatch.setattr(broken, "_confidence", None)  # whose own check would be first
    engine = Engine(target(), broken, FixedLength(BLOCK))
    engine.add([1, 2, 3], SamplingParams(verification=rule, max_new_tokens=9, ignore_eos=True))
    with pytest.raises(DSparkError, match="drafter's probabilities are not finite"):
        list(engine.run())
