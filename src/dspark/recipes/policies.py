"""The policies that a target and a drafter can run, priced by what this machine's steps cost."""

from collections.abc import Callable

from dspark.checkpoints.bundle import Bundle
from dspark.nn.seams import Drafter
from dspark.recipes.bundles import whole_block
from dspark.recipes.calibration import expected_survival
from dspark.recipes.cost_tables import drafter_id, find_table, fingerprint_of, why_none
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.parse import needs_cost, parse_policy
from dspark.scheduling.policies import Policy
from dspark.scheduling.probing import Probing
from dspark.scheduling.table import Fingerprint
from dspark.targets.load import LoadedTarget


class Policies:
    """Where a policy weighs cost, it does so by a table that `dspark profile` has measured here.

    drafter: what `bundle` became, or prompt lookup where there is none; None drafts nothing.
    draft_length, many_requests: as in `LLM`.
    graphs: whether what can be is captured in CUDA graphs (`wants_graphs`).
    calibrated: whether the gate starts from what the bundle's calibration says of acceptance.
    probes: verify some rounds whole, for recalibration.
    say: is told what stands in for a policy that lacks a table.
    """

    def __init__(
        self,
        loaded: LoadedTarget,
        drafter: Drafter | None,
        bundle: Bundle | None,
        *,
        draft_length: int | None,
        graphs: bool,
        many_requests: bool,
        calibrated: bool,
        probes: bool,
        say: Callable[[str], None],
    ) -> None:
        self._loaded = loaded
        self._block_size = None if drafter is None else drafter.block_size
        self._bundle = bundle
        self._draft_length = draft_length
        whole = whole_block(None if bundle is None else bundle.config)
        self._cut_to = None if self._block_size in (None, whole) else self._block_size
        self._graphs = graphs
        self._many_requests = many_requests
        self._probes = probes
        self._say = say
        self._has_confidence = bundle is not None and bundle.config.has_confidence
        self._expected_K = expected_survival(bundle) if bundle is not None and calibrated else None
        self._cost: CostModel | None = None

    def resolve(self, text: str | None) -> Policy:
        """The policy that `text` names for this drafter; None is the default.

        Where only a cost table is missing, a fixed length stands in, and `say` is told.
        """
        block_size = self._block_size
        text = self.default if text is None else text
        if self.lacks_costs(text):
            assert block_size is not None
            fixed = f"fixed:{(block_size + 1) // 2}"
            self._say(
                f"policy {text} needs a cost table of this machine, target and drafter, and "
                f"{why_none(self.fingerprint)}; using {fixed} instead. Run dspark profile for one"
            )
            text = fixed
        policy = parse_policy(
            text,
            block_size=block_size,
            has_confidence=self._has_confidence,
            cost=self.cost_model,
            expected_K=None if self._expected_K is None else self._expected_K[:block_size],
        )
        return Probing(policy) if self._probes and policy.drafts else policy

    @property
    def default(self) -> str:
        """What the bundle names, else its whole block; off without a drafter. A `draft_length` goes
        before a length that the bundle names."""
        if self._block_size is None:
            return "off"
        info = None if self._bundle is None else self._bundle.info
        named = None if info is None else info.policy
        if named is None or (self._draft_length is not None and named.startswith("fixed:")):
            return f"fixed:{self._block_size}"
        return named

    @property
    def fingerprint(self) -> Fingerprint:
        """What a cost table must have been measured with to hold here."""
        return fingerprint_of(
            self._loaded,
            None if self._bundle is None else drafter_id(self._bundle.path),
            block_size=self._cut_to,
            graphs=self._graphs,
            many_requests=self._many_requests,
        )

    def cost_model(self) -> CostModel | None:
        """What steps cost on this machine; None where it has not been measured.

        Raises DataError for a table that is broken or another machine's.
        """
        if self._cost is None and (table := find_table(self.fingerprint)) is not None:
            self._cost = table.fit().model
        return self._cost

    def forget_costs(self) -> None:
        """The table is read again before the next use."""
        self._cost = None

    def lacks_costs(self, policy: str) -> bool:
        """Whether only a cost table is missing to run this policy."""
        able = self._block_size is not None and self._has_confidence
        return able and needs_cost(policy) and self.cost_model() is None
