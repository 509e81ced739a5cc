"""Small files: the seal of a JSON object."""

from __future__ import annotations

from cli.files import seal


def test_the_seal_of_saved_files_stays_valid_in_any_order_of_keys():
    expected = "1d779f1e21653a7a911f5c2dc554687b0be0bdb77530a87bebea96889bae35e5"
    assert seal({"b": [1, "é"], "a": 2}) == seal({"a": 2, "b": [1, "é"]}) == expected
