"""Equal content has one id wherever it lies, other content another; files are read whole only if needed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from st2i_dask.errors import LoadError
from worker_plugin import digests
from worker_plugin.content import SAMPLE, ContentIds, Source
from worker_plugin.digests import LIMIT, DigestStore
from worker_plugin.file_identity import FileIdentity
from worker_plugin.node_cache import node_cache

BIG = 1 << 20  # bytes of one parameter; most of it is in no sample
NAMES = ("norm", "weight", "bias")


@pytest.fixture
def store(tmp_path):
    store = DigestStore(tmp_path / "cache")
    yield store
    store._check()


@pytest.fixture
def ids(store):
    ids = ContentIds(store)
    yield ids
    ids._check()


def write(path: Path, seed=0, change=None, header=b"header"):
    """A file with three parameters after a header; `change`: that byte of the second differs."""
    values = np.random.default_rng(seed).integers(0, 256, BIG + 200, dtype=np.uint8)
    if change is not None:
        values[100 + change] ^= 1
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(header + values.tobytes())
    return path


def sources(path, start=6, names=NAMES, dtype="float32"):
    file = FileIdentity.of(path)
    sizes = (100, BIG, 100)
    offsets = (start, start + 100, start + 100 + BIG)
    return [
        Source(name, dtype, (size // 4,), file, offset, size)
        for name, size, offset in zip(names, sizes, offsets, strict=True)
    ]


def bytes_read():
    """By this thread, since it started: the kernel's count."""
    lines = Path(f"/proc/self/task/{threading.get_native_id()}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


# ---------------------------------------------------------------- which ids are equal


def test_a_copy_has_the_same_id_and_other_weights_another(ids, tmp_path):
    path = write(tmp_path / "a" / "x.safetensors")
    copy = shutil.copy(path, tmp_path / "b.safetensors")
    other = write(tmp_path / "other", seed=1)
    first = ids.id(sources(path))
    assert ids.id(sources(copy)) == first
    assert ids.id(sources(other)) != first
    assert ids.id(sources(path)) == first


def test_weights_that_differ_outside_the_samples_only_are_told_apart(ids, tmp_path):
    paths = [write(tmp_path / str(change), change=change) for change in (None, 7, 8, 7, None)]
    a, b, c, b_copy, a_copy = [ids.id(sources(path)) for path in paths]
    assert len({a, b, c}) == 3
    assert (b_copy, a_copy) == (b, a)
    assert b.split("-") == [a, "1"], "the quick keys are equal, so this test tests something"


def test_a_difference_in_a_sample_is_seen_without_reading_files_whole(ids, store, tmp_path):
    first = ids.id(sources(write(tmp_path / "a")))
    assert ids.id(sources(write(tmp_path / "b", change=BIG // 2))) != first
    assert not store.path.exists(), "nothing was digested"


@pytest.mark.parametrize(
    "other",
    [{"names": ("norm", "weight", "other")}, {"dtype": "int32"}, {"start": len(b"header") + 1}],
)
def test_names_dtypes_and_places_count(ids, tmp_path, other):
    path = write(tmp_path / "a", header=b"header")
    path.write_bytes(path.read_bytes() + b"!")
    assert ids.id(sources(path)) != ids.id(sources(path, **other))


def test_the_order_of_parameters_and_their_shapes_count(ids, tmp_path):
    given = sources(write(tmp_path / "a"))
    turned = [Source(s.name, s.dtype, (1, *s.shape), s.file, s.offset, s.nbytes) for s in given]
    assert len({ids.id(given), ids.id(given[::-1]), ids.id(turned), ids.id(given[:2])}) == 4


def test_neither_header_nor_division_into_files_counts(ids, tmp_path):
    """The same tensors, stored with other metadata or in shards."""
    path = write(tmp_path / "a")
    first = ids.id(sources(path))
    header = b"another header"
    assert ids.id(sources(write(tmp_path / "b", header=header), len(header))) == first
    data = path.read_bytes()[len(b"header") :]
    (tmp_path / "shard-1").write_bytes(data[:100])
    (tmp_path / "shard-2").write_bytes(data[100:])
    shards = [FileIdentity.of(tmp_path / name) for name in ("shard-1", "shard-2")]
    norm, weight, bias = sources(path)
    assert first == ids.id(
        [
            Source(norm.name, norm.dtype, norm.shape, shards[0], 0, 100),
            Source(weight.name, weight.dtype, weight.shape, shards[1], 0, BIG),
            Source(bias.name, bias.dtype, bias.shape, shards[1], BIG, 100),
        ]
    )


def test_links_to_one_blob_are_one_file(ids, store, tmp_path):
    """As in the hub's cache: two snapshots, one blob."""
    blob = write(tmp_path / "blobs" / "1234")
    for snapshot in ("a", "b"):
        (tmp_path / snapshot).mkdir()
        (tmp_path / snapshot / "x.safetensors").symlink_to(blob)
    first = ids.id(sources(tmp_path / "a" / "x.safetensors"))
    read = bytes_read()
    assert ids.id(sources(tmp_path / "b" / "x.safetensors")) == first
    assert bytes_read() - read < BIG // 10
    assert not store.path.exists(), "nothing was digested"


def test_empty_parameters_and_no_parameters_have_ids(ids, tmp_path):
    file = FileIdentity.of(write(tmp_path / "a"))
    empty = [Source("empty", "float32", (0,), file, 6, 0)]
    assert ids.id(empty) == ids.id(empty)
    assert ids.id([]) == ids.id([]) != ids.id(empty)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=12))
def test_ids_are_equal_exactly_where_contents_are(tmp_path_factory, steps):
    """Files come, are asked for again, and go."""
    folder = tmp_path_factory.mktemp("files")
    ids, given_ids, live = ContentIds(DigestStore(folder / "cache")), {}, {}
    size = 3 * SAMPLE
    for number, (seed, change, remove) in enumerate(steps):
        values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        values[change] ^= 1
        path = folder / str(number)
        path.write_bytes(values.tobytes())
        key = ids.id([Source("w", "uint8", (size,), FileIdentity.of(path), 0, size)])
        ids._check()
        given_ids.setdefault(key, set()).add((seed, change))
        live[path] = key
        if remove:
            path.unlink()
            del live[path]
        for path, key in live.items():
            assert ids.id([Source("w", "uint8", (size,), FileIdentity.of(path), 0, size)]) == key
    assert all(len(contents) == 1 for contents in given_ids.values()), "one id, two contents"
    shutil.rmtree(folder)


def test_files_that_stay_get_one_id_per_content(ids, tmp_path):
    changes = [None, 1, 2, 1, None, 2, 3]
    found = [ids.id(sources(write(tmp_path / str(n), change=c))) for n, c in enumerate(changes)]
    assert [changes.index(c) for c in changes] == [found.index(key) for key in found]


# ---------------------------------------------------------------- threads


def test_threads_get_the_same_ids(ids, tmp_path):
    """Copies and look-alikes at once: which is first is chance, which are equal is not."""
    paths = [write(tmp_path / str(n), change=(None, 5, 6)[n % 3]) for n in range(12)]
    found, barrier = [None] * len(paths), threading.Barrier(len(paths))

    def ask(n):
        barrier.wait(10)
        found[n] = ids.id(sources(paths[n]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert None not in found
    assert len(set(found)) == 3
    assert all(found[n] == found[n % 3] for n in range(len(paths)))


def test_known_weights_do_not_wait_for_a_comparison(ids, tmp_path):
    known = sources(write(tmp_path / "a"))
    key = ids.id(known)
    group = ids._groups[key]
    with group.lock:  # as while files are compared
        done = []
        thread = threading.Thread(target=lambda: done.append(ids.id(known)))
        thread.start()
        thread.join(5)
        assert done == [key]


# ---------------------------------------------------------------- what an id costs


def test_the_first_weights_are_not_read_whole(ids, store, tmp_path):
    given = sources(write(tmp_path / "a"))
    read = bytes_read()
    ids.id(given)
    assert bytes_read() - read < 3 * SAMPLE + 1000
    assert not store.path.exists()


def test_a_thousand_parameters_cost_milliseconds(ids, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(os.urandom(8 << 20))
    file = FileIdentity.of(path)
    given = [Source(f"w{n}", "bfloat16", (4096,), file, n << 13, 1 << 13) for n in range(1000)]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        ids.id(given)
        seconds.append(time.perf_counter() - start)
    print(f"1000 parameters: {min(seconds) * 1e3:.1f} ms")
    assert min(seconds) < 0.1


def test_digests_outlive_the_process(store, tmp_path):
    paths = [write(tmp_path / name) for name in "ab"]

    def ask(store):
        ids = ContentIds(store)
        read = bytes_read()
        found = {ids.id(sources(path)) for path in paths}
        ids._check()
        return found, bytes_read() - read

    first, read = ask(store)
    assert read > 2 * BIG
    second, read = ask(DigestStore(store.path.parent))
    assert read < BIG // 2, "digests are read from the store"
    assert first == second
    assert len(first) == 1


def test_a_stored_digest_is_not_used_for_other_content_of_equal_times(store, tmp_path):
    """A file replaced in place, its time put back, as archivers do."""
    paths = [write(tmp_path / name) for name in "ab"]
    ids = ContentIds(store)
    assert len({ids.id(sources(path)) for path in paths}) == 1
    assert len(json.loads(store.path.read_text())["digests"]) == 2
    before = paths[1].stat()
    write(paths[1], seed=1)
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FileIdentity.of(paths[1]).key[2:] == (before.st_size, before.st_mtime_ns)
    copy = write(tmp_path / "c", seed=1)
    ids = ContentIds(store)
    old, new, new_copy = [ids.id(sources(path)) for path in (*paths, copy)]
    assert old != new
    assert new == new_copy, "the copy was compared with what the file held before"


def test_ids_are_the_same_in_another_process(tmp_path):
    path = write(tmp_path / "a")
    code = (
        "import sys; from pathlib import Path; "
        "from worker_plugin.content import ContentIds, Source; "
        "from worker_plugin.file_identity import FileIdentity; "
        "f = FileIdentity.of(sys.argv[1]); "
        "print(ContentIds().id([Source('w', 'float32', (25,), f, 6, 100)]))"
    )
    copy = shutil.copy(path, tmp_path / "b")
    printed = subprocess.run(
        [sys.executable, "-c", code, copy], capture_output=True, text=True, check=True, timeout=60
    )
    given = [Source("w", "float32", (25,), FileIdentity.of(path), 6, 100)]
    assert printed.stdout.strip() == ContentIds().id(given)


# ---------------------------------------------------------------- files that change


def refused(call):
    with pytest.raises(LoadError) as caught:
        call()
    return str(caught.value)


def test_a_file_that_changed_or_went_is_refused(ids, tmp_path):
    path = write(tmp_path / "a")
    given = sources(path)
    key = ids.id(given)
    write(tmp_path / "new", seed=1).replace(path)
    message = refused(lambda: ids.id(given))
    assert f"{path} was changed or replaced while its weights were in use" in message
    assert "load the model again" in message
    path.unlink()
    assert f"{path} cannot be read any more (No such file" in refused(lambda: ids.id(given))
    assert ids.id(sources(write(path))) != key, "what is gone cannot be compared"


def test_an_id_stays_when_its_files_went_and_copies_come(ids, tmp_path, caplog):
    path = write(tmp_path / "a")
    key = ids.id(sources(path))
    path.unlink()
    copies = [ids.id(sources(write(tmp_path / name))) for name in "bcd"]
    assert len(set(copies)) == 1
    assert copies[0] == f"{key}-1"
    assert caplog.text.count("cannot be compared any more") == 1


def test_a_file_that_is_too_short_is_refused(ids, tmp_path):
    path = write(tmp_path / "a")
    beyond = FileIdentity.of(path).nbytes - 50
    given = Source("w", "uint8", (100,), FileIdentity.of(path), beyond, 100)
    message = refused(lambda: ids.id([given]))
    assert f"{path} has {BIG + 206} bytes, but w is said to be the 100 bytes at {beyond}" in message
    assert "copy or fetch the file again" in message


# ---------------------------------------------------------------- the store


def digest_of(n):
    return f"{n:064x}"


def test_the_store_is_the_owners_alone_and_where_it_is_told_to_be(tmp_path, monkeypatch):
    monkeypatch.setenv("ST2I_CACHE", str(tmp_path / "deep" / "cache"))
    store = DigestStore(node_cache())
    store.put("a", digest_of(1))
    folder = tmp_path / "deep" / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["digests.json"], "no temporary files"
    monkeypatch.delenv("ST2I_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert node_cache() == tmp_path / ".cache" / "st2i_dask"


def test_stores_see_what_others_wrote(tmp_path):
    one, two = DigestStore(tmp_path), DigestStore(tmp_path)
    one.put("a", digest_of(1))
    two.put("b", digest_of(2))
    assert (one.get("b"), two.get("a"), one.get("c")) == (digest_of(2), digest_of(1), None)
    assert set(json.loads(one.path.read_text())["digests"]) == {"a", "b"}


def test_the_store_forgets_the_oldest(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "LIMIT", 3)
    store = DigestStore(tmp_path)
    for n in range(5):
        store.put(str(n), digest_of(n))
        store._check()
    assert set(json.loads(store.path.read_text())["digests"]) == {"2", "3", "4"}
    assert LIMIT == 1024


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff\xfe",
        b'{"version": 2, "digests": {}}',
        b'{"version": 1}',
        b'{"version": 1, "digests": 5}',
        b'{"version": 1, "digests": {"a": 5}}',
        b'{"version": 1, "digests": {"a": "short"}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_store_is_a_warning_and_replaced(tmp_path, caplog, text):
    store = DigestStore(tmp_path)
    store.path.write_bytes(text)
    assert store.get("a") is None
    assert store.get("b") is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{store.path} is not used" in record.getMessage()
    store.put("a", digest_of(1))
    assert DigestStore(tmp_path).get("a") == digest_of(1)


def test_a_store_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    ids = ContentIds(DigestStore(tmp_path / "file" / "cache"))  # no folder can be there
    paths = [write(tmp_path / str(n), change=n % 2) for n in range(6)]
    assert len({ids.id(sources(path)) for path in paths}) == 2
    ids._check()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("cannot be written" in message for message in messages) == 1
    assert any("set ST2I_CACHE to a folder" in message for message in messages)


def test_without_a_home_there_is_no_store(monkeypatch):
    monkeypatch.delenv("ST2I_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # in no list of users
    assert node_cache() is None
