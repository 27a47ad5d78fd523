"""Files that change under a model: an error with a cure, never wrong weights, and the next lease works."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from st2i_dask._core import GRANULE
from st2i_dask.errors import LoadError

from .leases import (
    LAYER,
    NO_LIMIT,
    WAIT,
    damage,
    give,
    reference,
    use,
)
from .models import (
    Model,
    mapped_weights,
    same,
    save_plain,
    settle,
    store_of,
)


def use_damaged(store, model, how):
    """It is damaged while it is leased."""
    with store.lease(model) as lease:
        damage(model.model_path, how)
        return give(lease)


DAMAGES = ["truncated", "truncated to nothing", "overwritten", "replaced", "deleted"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_file_that_changes_in_use_is_an_error_and_the_model_is_read_anew(even, how):
    model, other = even("a"), even("b")
    good, whole = reference(model), Path(model.model_path).read_bytes()
    with store_of(3 * LAYER) as store:
        use(store, model)
        use(store, other)
        with pytest.raises(LoadError) as caught:
            use_damaged(store, model, how)
        assert str(caught.value).startswith(model.model_path)
        assert "submit again, and the model is read anew" in str(caught.value)
        assert same(use(store, other), reference(other))
        store._check()
        # As a user would: the file is put there again, whole.
        with open(f"{model.model_path}.new", "wb") as file:
            file.write(whole)
        os.replace(f"{model.model_path}.new", model.model_path)
        for _ in range(2):
            assert same(use(store, model), good)
        assert same(use(store, other), reference(other))
        assert not store._shelf._retired
        assert len(store._layers._weights) == 2
    assert model.model_path not in mapped_weights()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("memory", [3 * LAYER, NO_LIMIT])
def test_a_file_that_changed_since_it_was_used_is_read_anew(even, how, memory):
    """What is resident of the old one, or was mapped, is not used."""
    model, other = even("a"), even("b")
    with store_of(memory) as store:
        use(store, model)
        damage(model.model_path, how)
        if how in ("overwritten", "replaced"):
            assert same(use(store, model), reference(model))
        else:
            with pytest.raises(Exception, match=r"(?i)safetensors|incomplete|header|no such file"):
                use(store, model)
        assert same(use(store, other), reference(other))
        store._check()
        assert not store._shelf._retired


def test_a_file_that_is_still_cut_is_refused_again_and_again(even):
    model, other = even("a"), even("b")
    with store_of(NO_LIMIT) as store:
        use(store, model)
        damage(model.model_path, "truncated")
        for _ in range(3):
            with pytest.raises(Exception, match=r"(?i)safetensors|incomplete|read anew"):
                use(store, model)
            assert same(use(store, other), reference(other))


class WithTensors(Model):
    """Bare tensors beside the module: nothing that may be compared as a whole."""

    def load_model(self, model_path):
        return {"bare": torch.zeros(3), **super().load_model(model_path)}


def test_an_old_model_goes_when_its_last_run_ends(even):
    """Though another has its name and place."""
    model = even("a", cls=WithTensors)
    with store_of(NO_LIMIT) as store:
        for _ in range(4):
            use(store, model)
        with store.lease(model) as lease:
            with ThreadPoolExecutor(1) as pool:
                for _ in range(3):
                    damage(model.model_path, "replaced")
                    assert same(pool.submit(use, store, model).result(WAIT), reference(model))
            assert [skeleton is lease.skeleton for skeleton in store._shelf._retired] == [True]
            assert len(store._shelf._skeletons) == 1
            assert same(give(lease), reference(model))
        assert not store._shelf._retired
        assert len(store._layers._weights) <= 2, (
            "its weights, unless they are the same, and the tensor"
        )


class Replaced(Model):
    """Its file is replaced while it is read, the first time."""

    def load_model(self, model_path):
        components = super().load_model(model_path)
        if not os.path.exists(f"{model_path}.done"):
            Path(f"{model_path}.done").touch()
            damage(model_path, "replaced")
        return components


def test_a_file_that_is_replaced_while_it_is_read(even):
    """All of the model is then in this process's memory; where that does not fit it is read anew."""
    for layers in (4, 3):
        model = even(f"a{layers}", cls=Replaced)
        with store_of(layers * LAYER) as store:
            if layers == 3:
                with pytest.raises(LoadError, match="does not fit this worker"):
                    use(store, model)
                assert store.models() == []
            for _ in range(3):
                assert same(use(store, model), reference(model))


def test_other_weights_in_the_same_file_are_used(store, even):
    model = even("a")
    old = use(store, model)
    save_plain(f"{model.model_path}.new", "even", 77, depth=4)
    os.replace(f"{model.model_path}.new", model.model_path)
    new = use(store, model)
    assert same(new, reference(model))
    assert not same(new, old)
    assert len(store._layers._weights) == 1, "the old ones are gone"


def test_a_run_of_old_weights_goes_on_beside_one_of_new(even):
    """What it has in memory is still right; what it would have to read is an error."""
    model = even("a")
    with store_of(NO_LIMIT) as store:
        for _ in range(4):
            old = use(store, model)
        with store.lease(model) as lease:
            save_plain(f"{model.model_path}.new", "even", 77, depth=4)
            os.replace(f"{model.model_path}.new", model.model_path)
            with ThreadPoolExecutor(1) as pool:
                new = pool.submit(use, store, model).result(WAIT)
            assert same(give(lease), old)
            assert not same(new, old)
        assert not store._shelf._retired
        assert len(store._layers._weights) == 1


def test_an_error_of_a_load_holds_no_memory(even):
    """Whoever keeps the error must not keep the arena's block that the layer was to go to."""
    model = even("a")
    # So slow that the file is damaged while layers are on their way.
    with store_of(LAYER // 2, 4 * GRANULE, bandwidth=20 * LAYER) as store:
        use(store, model)
        store.trim(model, 0)
        with pytest.raises(LoadError, match="read anew") as caught:
            use_damaged(store, model, "truncated")
        settle(store)  # the next layer was on its way
        assert store._arena.heap.used_bytes == 0
        assert any("_copy" in str(entry.name) for entry in caught.traceback)
