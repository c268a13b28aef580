"""The picture of the house in CONTRIBUTING is drawn from the imports, and is up to date."""

import pytest

from tools.house_picture import PICTURE, ROOT, draw, floors_of, imports_by_room


def test_the_picture_shows_the_imports_of_today():
    assert PICTURE.read_text(encoding="utf-8") == draw(imports_by_room()), "run python -m tools.house_picture"
    assert "docs/house.svg" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_rooms_that_import_each_other_in_a_circle_have_no_floor():
    assert floors_of({"roof": {"wall"}, "wall": set()}) == [["wall"], ["roof"]]
    with pytest.raises(ValueError, match="circle: \\['roof', 'wall'\\]"):
        floors_of({"roof": {"wall"}, "wall": {"roof"}})
