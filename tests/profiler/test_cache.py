import json
import logging

import pytest

from uniap_jax.profiler.cache import Cache

FACTS = {"what": "layer", "strategy": "data=2", "jax": "0.10.2"}


def test_round_trip_and_other_facts(tmp_path):
    cache = Cache(tmp_path)
    assert cache.get(FACTS) is None
    cache.put(FACTS, {"seconds": [0.5]})
    assert cache.get(FACTS) == {"seconds": [0.5]}
    assert Cache(tmp_path).get(dict(reversed(FACTS.items()))) == {"seconds": [0.5]}
    assert cache.get(FACTS | {"jax": "0.12.0"}) is None


@pytest.mark.parametrize("damage", ["number", "cut", "text", "shape"])
def test_a_damaged_entry_is_measured_again(tmp_path, caplog, damage):
    cache = Cache(tmp_path)
    cache.put(FACTS, {"seconds": [0.5]})
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    entry = json.loads(text)
    entry["numbers"]["seconds"] = [0.1]
    damaged = {"number": json.dumps(entry), "cut": text[:-10], "text": "\x00", "shape": "[]"}[damage]
    path.write_text(damaged)
    with caplog.at_level(logging.WARNING, "uniap_jax"):
        assert cache.get(FACTS) is None
    assert "measuring again" in caplog.text
    cache.put(FACTS, {"seconds": [0.7]})
    assert cache.get(FACTS) == {"seconds": [0.7]}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = Cache(blocked / "folder")
    with caplog.at_level(logging.WARNING, "uniap_jax"):
        cache.put(FACTS, {"seconds": [0.5]})
    assert cache.get(FACTS) is None
    assert "cannot be kept" in caplog.text


def test_no_folder_keeps_nothing():
    cache = Cache(None)
    cache.put(FACTS, {})
    assert cache.get(FACTS) is None
