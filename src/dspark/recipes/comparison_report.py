"""The comparison as tables: `comparison.json` holds everything, `comparison.md` what to read."""

import json
from pathlib import Path
from typing import Any


def report(document: dict[str, Any], folder: Path) -> None:
    """Writes both files; `document` is `comparison.gather`'s."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "comparison.md").write_text(markdown(document))


def markdown(document: dict[str, Any]) -> str:
    settings, contenders = document["settings"], document["contenders"]
    first = next(iter(next(iter(contenders.values()))["temperatures"].values()))
    start = "noise" if settings["start"] == "noise" else "the target's layers"
    lines = [
        "# Drafters compared",
        "",
        f"Target {first['target']} ({first['weights'] or 'own'} weights), `rejection` "
        f"verification, whole blocks, at most {settings['max_new_tokens']} tokens a text, seed "
        f"{settings['seed']}. Every drafter read the same responses {settings['passes']:g} times, "
        f"with at most {settings['anchors_per_sequence']} blocks a response and pass, "
        f"{settings['anchors_per_step']} a step, and started from {start}. Parallel drafters have "
        f"{settings['layers']} layers, Eagle3 and MTP one; MTP proposes one token, so 2 is its "
        f"ceiling; prompt lookup is not trained. Intervals are 95%, over prompts.",
        "",
        "## Training",
        "",
        *_table(
            ["drafter", "steps", "positions", "seconds", "accepted length on held-out text"],
            [_training_row(name, own["training"]) for name, own in contenders.items()],
        ),
    ]
    for temperature in map("{:g}".format, settings["temperatures"]):
        results = {
            name: own["temperatures"][temperature]["domains"]
            for name, own in contenders.items()
            if temperature in own["temperatures"]
        }
        if not results:
            continue
        domains = list(dict.fromkeys(d for own in results.values() for d in own))
        lines += ["", f"## Temperature {temperature}: accepted length", ""]
        lines += _table(
            ["drafter", *domains],
            [
                [name, *(_length(own.get(domain)) for domain in domains)]
                for name, own in results.items()
            ],
        )
        for domain in domains:
            lines += ["", f"## Temperature {temperature}, {domain}: conditional acceptance", ""]
            positions = range(settings["block_size"])
            lines += _table(
                ["drafter", *(f"@{k + 1}" for k in positions)],
                [
                    [name, *(_acceptance(own[domain], k) for k in positions)]
                    for name, own in results.items()
                    if domain in own
                ],
            )
    return "\n".join(lines) + "\n"


def _training_row(name: str, training: dict[str, Any] | None) -> list[str]:
    if training is None:
        return [name, "-", "-", "-", "-"]
    length = training["validation"]["accepted_length"]
    return [
        name, f"{training['steps']:,}", f"{training['positions']:,}", f"{training['seconds']:,.0f}",
        f"{length:.3f}",
    ]  # fmt: skip


def _length(result: dict[str, Any] | None) -> str:
    if result is None or result["accepted_length"] is None:
        return "-"
    return f"{result['accepted_length']:.2f}{_interval(result['ci95'])}"


def _acceptance(result: dict[str, Any], position: int) -> str:
    values = result["conditional_acceptance"]
    if position >= len(values) or values[position] is None:
        return "-"
    return f"{values[position]:.3f}{_interval(result['conditional_ci95'][position])}"


def _interval(bounds: list[float] | None) -> str:
    return "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
