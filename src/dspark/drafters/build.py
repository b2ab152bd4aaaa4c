"""From a config to the draft model it describes."""

from dspark.drafters.chain import Eagle3Model, MtpModel
from dspark.drafters.config import DraftConfig, DSparkConfig, Eagle3Config, MtpConfig
from dspark.drafters.dspark import DSparkModel
from dspark.drafters.model import DraftModel


def build_model(config: DraftConfig) -> DraftModel:
    """The model, with torch's default weights."""
    match config:
        case DSparkConfig():
            return DSparkModel(config)
        case Eagle3Config():
            return Eagle3Model(config)
        case MtpConfig():
            return MtpModel(config)
    raise AssertionError(type(config))


def drafter_name(config: DraftConfig) -> str:
    """As `dspark train --drafter` names it."""
    match config:
        case DSparkConfig(markov_rank=0):
            return "dflash"
        case DSparkConfig(markov_head_type="vanilla"):
            return "dspark"
        case DSparkConfig():
            return f"dspark-{config.markov_head_type}"
        case Eagle3Config():
            return "eagle3"
    return "mtp"
