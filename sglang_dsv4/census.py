"""What a checkpoint holds of each component, and what we run: one line each, for log and doctor."""

from collections.abc import Iterator
from functools import cache

from sglang_dsv4.formats import LAYOUTS
from sglang_dsv4.precision import floor_component
from sglang_dsv4.tensor_table import Row

QUANTISED = {format.value for format in LAYOUTS}


@cache
def component(names: str) -> str:
    """layers.*.ffn.experts.*.w1.weight -> ffn.experts.*.w1."""
    return names.removeprefix("layers.*.").removesuffix(".weight")


class Census:
    """In which format the weights of each component are, and in how many layers.

    examples: (component, format) -> name in the file of the first such weight.
    """

    def __init__(self) -> None:
        self.examples: dict[tuple[str, str], str] = {}
        self._layers: dict[tuple[str, str, str], set[int | None]] = {}

    def add(self, row: Row, layer: int | None, held: str, name: str, run: str = "") -> None:
        """Count a weight of a layer, None outside them; name: in the file.

        held: its format in the checkpoint. run: in words, what is made of it.
        """
        what = component(row.vendor_name)
        self.examples.setdefault((what, held), name)
        self._layers.setdefault((what, held, run), set()).add(layer)

    def quantised(self) -> set[str]:
        """The quantised formats that some weight has."""
        return {held for _, held in self.examples if held in QUANTISED}

    def lines(self) -> list[str]:
        """ "attn.wkv: FP8 in the checkpoint -> BF16 at load, 61 layers", for each component."""
        low = {key for key, _ in self.quantised_floor()}
        return [
            f"{what}: {held} in the checkpoint -> {run}"
            f"{_in_layers(layers)}{' (below the floor)' * ((what, held) in low)}"
            for (what, held, run), layers in sorted(self._layers.items())
        ]

    def below_the_floor(self) -> list[str]:
        """A line for each component that the checkpoint holds in less than it needs."""
        return [
            f"{what}: {held} in the checkpoint{_in_layers(self._layers_of(what, held))}: below the"
            f" floor ({floor}: bf16); run in BF16, but what rounding took from it is lost"
            for (what, held), floor in self.quantised_floor()
        ]

    def quantised_floor(self) -> Iterator[tuple[tuple[str, str], str]]:
        """((weight, format), component) of what the checkpoint holds in less than it needs."""
        for what, held in sorted(self.examples):
            floor = floor_component(what)
            if floor is not None and held in QUANTISED:
                yield (what, held), floor

    def _layers_of(self, what: str, held: str) -> set[int | None]:
        """The layers of a component in this format, whatever is made of it."""
        found = (layers for (*key, _), layers in self._layers.items() if key == [what, held])
        return set().union(*found)


def _in_layers(layers: set[int | None]) -> str:
    count = len(layers - {None})
    return f", {count} layer{'s' * (count > 1)}" if count else ""
