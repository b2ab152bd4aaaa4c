"""The two ends of hidden-state communication: ranks that run the target, and what others get."""

from collections.abc import Sequence

from dspark.data.packing import TrainingSequence
from dspark.drafters.config import DraftConfig
from dspark.recipes.features import FeatureExtractor
from dspark.recipes.progress import Progress
from dspark.targets.load import LoadedTarget
from dspark.training.config import TrainConfig
from dspark.training.ranks import Ranks
from dspark.training.schedule import batch_stream, fingerprint, validation_batches
from dspark.training.teacher import Received, Teacher, Traffic


def check_same_texts(
    ranks: Ranks, train: Sequence[TrainingSequence], held_out: Sequence[TrainingSequence]
) -> None:
    """DataError unless all ranks have the same texts. All of them call it."""
    if not ranks.alone:
        number = int(fingerprint([*train, *held_out])[:15], 16)
        ranks.check_same(number, "texts to train on", teachers=True)


def teach(
    loaded: LoadedTarget,
    config: DraftConfig,
    train: Sequence[TrainingSequence],
    held_out: Sequence[TrainingSequence],
    training: TrainConfig,
    ranks: Ranks,
) -> None:
    """Runs the target for the ranks that train, until they are done."""
    check_same_texts(ranks, train, held_out)
    source = FeatureExtractor(loaded.target, config.target_layer_ids)
    stream = batch_stream(train, training, config.block_size)
    validation = validation_batches(held_out, training, config.block_size)
    Teacher(ranks, source, stream, held_out, validation).serve()


def from_teachers(
    ranks: Ranks, config: DraftConfig, vocab_size: int, progress: Progress
) -> Received:
    """What a training rank reads instead of a feature store; says what that costs."""
    width = len(config.target_layer_ids) * config.hidden_size
    traffic = Traffic.of(features=width, hidden_size=config.hidden_size, vocab_size=vocab_size)
    progress.say(str(traffic))
    return Received(ranks, features=width, hidden_size=config.hidden_size)
