"""Products with some outputs of a packed weight."""

from __future__ import annotations

from lookahead.kernels.packed_product import COLUMNS, PackedWeight
from lookahead.model.families.operations import Product, sizes_of


def part_of(weight: PackedWeight, part: Product) -> PackedWeight:
    """The weight of some outputs of a packed weight, which begin with a panel."""
    end, panels = part.first + part.outputs, -(-part.outputs // COLUMNS)
    own = slice(part.first, end) if weight.is_stored else slice(part.first // COLUMNS, -(-end // COLUMNS))
    return weight._replace(packed=weight.packed[own], outputs=part.outputs, panels=panels)


def has_own_panels(part: Product) -> bool:
    """Whether some outputs of a packed weight are in panels of their own."""
    end = part.first + part.outputs
    return part.first % COLUMNS == 0 and (end % COLUMNS == 0 or end == sizes_of(part.module)[1])
