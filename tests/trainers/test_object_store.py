"""Places: paths, URLs of object stores, and their caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainers.object_store import check_place, local_folder, place_of


@pytest.mark.parametrize(
    "place",
    ["az://bucket/x", "gs://", "gs://key:secret@bucket/x", "s3://", "s3://key:secret@bucket/x",
     "s3://bucket/../x", "s3://bucket/x?y=1", "http://bucket", "file://relative", "S3://bucket"],
)  # fmt: skip
def test_places_that_are_none_are_refused_and_no_login_is_shown(place: str) -> None:
    with pytest.raises(ValueError, match=r"storage=.*must be") as error:
        check_place("storage", place)
    assert "secret@" not in str(error.value)


def test_a_folder_and_a_url_name_each_other(tmp_path: Path) -> None:
    for place in ("s3://bucket/a/b", "s3://bucket", "gs://my_bucket/a"):
        assert place_of(local_folder(place)) == place
    assert local_folder(f"file://{tmp_path}") == local_folder(str(tmp_path)) == tmp_path
    assert place_of(tmp_path) == str(tmp_path)
    check_place("storage", "relative/folder")
