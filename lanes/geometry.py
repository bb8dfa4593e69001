"""B1, B3, B8: which fixed width carries how many rows. A table, not special cases."""

from typing import Final

GEOMETRIES: Final = (1, 3, 8)
BRANCHING: Final = "hyper"  # the kind of a lane whose width is branches of one row


def geometry_for(rows: int) -> int:
    """Return the narrowest geometry that carries `rows` rows.

    Raises:
        ValueError: When no geometry is wide enough.
    """
    for geometry in GEOMETRIES:
        if rows <= geometry:
            return geometry
    raise ValueError(f"{rows} rows are more than the widest geometry, {GEOMETRIES[-1]}")


def lane_name(kind: str, geometry: int) -> str:
    """Return a lane's name, such as `ar-b3`."""
    return f"{kind}-b{geometry}"
