"""A bundle's calibration, from its file to what the engine uses."""

import itertools
from collections.abc import Callable

from dspark.calibration.condition import CandidateSet
from dspark.calibration.online import OnlineCalibration
from dspark.calibration.serving import Calibration, FixedCalibration, Uncalibrated
from dspark.calibration.table import FILE, CalibrationTable, file_sha256, read_table
from dspark.checkpoints.bundle import Bundle
from dspark.checkpoints.native import WEIGHTS
from dspark.core.errors import ConfigError

_OLD = " (fitted without the draft's entropy: dspark calibrate makes it anew)"


def candidate_set(bundle: Bundle) -> CandidateSet:
    """What the bundle's drafter proposes from, as it is served."""
    ids = bundle.draft_token_ids
    vocabulary = bundle.config.vocab_size if ids is None else len(ids)
    return CandidateSet(min(bundle.candidates, vocabulary) or vocabulary, vocabulary)


def read_calibration(bundle: Bundle) -> CalibrationTable | None:
    """The bundle's calibration; None without one. CheckpointError for one that is broken, or was
    fitted for other weights or another block size."""
    path = bundle.path / FILE
    if not path.exists():
        return None
    return read_table(
        path,
        block_size=bundle.config.block_size,
        weights_sha256=file_sha256(bundle.path / WEIGHTS),
    )


def expected_survival(bundle: Bundle) -> tuple[float, ...] | None:
    """What to expect of a request that nothing is known of: the share of prefixes accepted by
    position, never rising, of the default condition or the first there is. None without a
    calibration."""
    table = read_calibration(bundle) if bundle.config.has_confidence else None
    if table is None:
        return None
    entries = table.entries
    default = [entry for condition, entry in entries.items() if condition.is_default]
    shares = [*default, *entries.values()][0].mean_survival
    # Later positions are judged in fewer rounds, and their share of those may be the larger one.
    return tuple(itertools.accumulate(shares, min))


def serving_calibration(
    bundle: Bundle,
    say: Callable[[str], None],
    *,
    draft_length: int | None = None,
    recalibrate: bool = False,
) -> Calibration:
    """What an engine takes. `say` is told what it is, of every substitute condition and refit.

    draft_length: tokens of a served block, whose positions keep theirs; None is all.
    recalibrate: follow what is served; ConfigError without a confidence head.
    """
    if not bundle.config.has_confidence:
        if recalibrate:
            raise ConfigError(
                f"draft bundle {bundle.path} has no confidence head, so there is nothing to "
                "recalibrate; leave recalibration off"
            )
        say("calibration: this bundle has no confidence head; policies off and fixed:N need none")
        return Uncalibrated()
    table = read_calibration(bundle)
    if table is None:
        say(
            "calibration: none in this bundle, so confidences count as the head gives them "
            "(dspark calibrate makes one)"
        )
    else:
        known = [f"{c}{'' if own.has_entropy else _OLD}" for c, own in table.entries.items()]
        say(f"calibration: {'; '.join(known)}")
    length = min(draft_length or bundle.config.block_size, bundle.config.block_size)
    whole = {} if table is None else table.scalings
    scalings = {condition: own.first(length) for condition, own in whole.items()}
    if recalibrate:
        return OnlineCalibration(scalings, candidate_set(bundle), length, say=say)
    if not scalings:
        return Uncalibrated()
    return FixedCalibration(scalings, candidate_set(bundle), say=say)
