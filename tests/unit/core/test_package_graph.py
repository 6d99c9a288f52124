"""The figures of the package are those of what runs, not of what only types need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import package_graph

FILES = {
    "__init__.py": "",
    "a/__init__.py": "from libra_cli.b import thing",
    "b/__init__.py": "",
    "b/thing.py": "def f(recipe: Recipe | None):\n    import libra_cli.c.deep\n",
    "c/__init__.py": "",
    "c/deep.py": "import os\nfrom libra_cli import a\n",
    "d/__init__.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from libra_cli import e\n"
        "gae_lambda = 'the critics'\n"
    ),
    "e/__init__.py": "from libra_cli import d\nmatch d:\n    case 1 | 2:\n        pass\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "libra_cli" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


def test_imports_inside_functions_tie_folders_and_those_for_types_do_not(root: Path) -> None:
    assert package_graph.knots(root) == [["a", "b", "c"]]
    assert package_graph.folder_imports(root)["e"] == {"d"}


def test_words_are_whole_or_parts_of_a_name(root: Path) -> None:
    assert [str(one) for one in package_graph.files_that_name("gae", root)] == ["d/__init__.py"]
    assert package_graph.files_that_name("critic", root) == []


def test_functions_and_arms_are_counted(root: Path) -> None:
    assert package_graph.functions_that_take("Recipe", root) == {"b": 1}
    assert package_graph.match_arms(root) == 1
