"""Table of what the layers of each letter of a hybrid model's pattern take."""

from __future__ import annotations

from megatron.pipeline.planner import Device, Links, ModelDescription, Shape, estimate, hybrid, parameters, refusals, view


def by_letter(model: ModelDescription, gpu: Device, depth: int, links: Links, timed: bool) -> str:
    """A table with a row for each letter, of one layer; empty for a GPT.

    Args:
        gpu, depth, links: see ``costmodel.estimate.by_layer``.
        timed: whether seconds count, which are of a GPU, beside bytes.
    """
    if not model.hybrid_layer_pattern:
        return ""
    shape, letters = Shape.of(model), hybrid.Pattern.of(model.hybrid_layer_pattern).letters
    costs = estimate.by_layer(model, gpu, depth, links)
    heads = ["letter", "layers", "parameters", "F ms", "B ms", "W ms", "activations, MiB", "held until W, MiB"]
    rows = []
    for letter in dict.fromkeys(letters):
        first = letters.index(letter)
        layer = costs.stages[1 + first]
        times = [f"{1e3 * seconds:.4g}" for seconds in (layer.forward, layer.backward, layer.weight)]
        count = f"{parameters.layer_parameters(shape, first).total / 1e6:.1f}M"
        rows.append(
            [letter, str(letters.count(letter)), count, *times, *map(refusals.MIB.number, (layer.activation, layer.retained))]
        )
    kept = [index for index in range(len(heads)) if timed or index not in (3, 4, 5)]
    return view.plain_table([heads[index] for index in kept], [[row[index] for index in kept] for row in rows])
