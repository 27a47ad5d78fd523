"""ModelFn: declarations and their refusals, and what makes two instances one model."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

import st2i_dask as st2i


def declaring(body, **kwargs):
    return type("Made", (st2i.ModelFn,), {"setup_io": body})(**kwargs)


class Upscale(st2i.ModelFn):
    """Module level: pickled by reference."""

    factor = 2

    def setup_io(self):
        self.add_input("image")
        self.add_input("mask", optional=True)
        self.add_input("control", callback=True, optional=True)
        self.add_output("large")

    def load_model(self, model_path):
        return {"path": model_path}

    def execute(self, model_components, **inputs):
        return {"large": inputs["image"] * self.factor}


# ---------------------------------------------------------------- declarations


def test_declarations_are_kept_in_order():
    model = Upscale("folder", dtype="bfloat16")
    assert list(model.inputs) == ["image", "mask", "control"]
    assert model.inputs["control"].callback
    assert model.inputs["mask"].optional
    assert not model.inputs["image"].optional
    assert model.outputs == ("large",)
    assert model.options == {"dtype": "bfloat16"}
    assert repr(model) == "Upscale('folder')"


def test_a_path_object_is_kept_as_text():
    assert Upscale(Path("a/b")).model_path == "a/b"
    assert Upscale().model_path is None


def test_a_model_without_setup_io_or_execute_says_so():
    with pytest.raises(st2i.ComposeError, match=r"Bare must define setup_io\(\)"):
        type("Bare", (st2i.ModelFn,), {})()
    with pytest.raises(st2i.ComposeError, match=r"Made must define execute\(\)"):
        declaring(lambda self: self.add_output("y")).execute({})


def test_a_model_without_outputs_is_refused():
    with pytest.raises(st2i.ComposeError, match=r"'Made' declares no output; call self.add_output"):
        declaring(lambda self: self.add_input("x"))


@pytest.mark.parametrize("name", ["", "noise pred", "1st", None, 5])
@pytest.mark.parametrize("declare", ["add_input", "add_output"])
def test_a_name_that_is_no_identifier_is_refused(name, declare):
    with pytest.raises(st2i.ComposeError, match="cannot name an input or output; use a Python"):
        declaring(lambda self: getattr(self, declare)(name))


@pytest.mark.parametrize("first", ["add_input", "add_output"])
@pytest.mark.parametrize("second", ["add_input", "add_output"])
def test_a_name_declared_twice_is_refused(first, second):
    def setup_io(self):
        getattr(self, first)("x")
        getattr(self, second)("x")

    with pytest.raises(st2i.ComposeError, match="'Made' declares 'x' twice; keep one"):
        declaring(setup_io)


def circular():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [threading.Lock(), object(), {1, 2}, b"x", print, circular()])
def test_options_that_are_not_plain_are_refused(value):
    with pytest.raises(st2i.ComposeError) as caught:
        Upscale("folder", special=value)
    assert "ModelFn 'Upscale': options {'special'" in str(caught.value)
    assert "cannot be carried to a worker" in str(caught.value)
    assert "use plain strings, numbers, lists and dicts" in str(caught.value)


def test_a_call_outside_a_workflow_is_refused():
    with pytest.raises(st2i.ComposeError, match="'Upscale' was called outside a workflow; call it"):
        Upscale()(1)


# ---------------------------------------------------------------- identity


def test_same_class_path_and_options_are_one_model():
    key = Upscale("folder", dtype="f", size=1).model_key
    assert Upscale("folder", size=1, dtype="f").model_key == key
    assert Upscale("folder", dtype="f", size=1, name="other").model_key == key
    assert Upscale("other", dtype="f", size=1).model_key != key
    assert Upscale("folder", dtype="f", size=2).model_key != key
    assert Upscale("folder").model_key != key
    assert Upscale(None).model_key != Upscale("").model_key


def made_of(source, **names):
    """The class that a notebook cell defines."""
    names.update(st2i=st2i, functools=functools, __name__="__main__")
    exec(source, names)
    return names["Cell"]


CELL = """
class Cell(st2i.ModelFn):
    scale = 2
    def setup_io(self): self.add_output("y")
    def load_model(self, model_path): return {"w": 1}
"""


@pytest.mark.parametrize(
    "edited",
    [
        CELL.replace("1", "3"),
        CELL.replace("scale = 2", "scale = 3"),
        CELL.replace("self, model_path", "self, model_path, extra=1"),
        CELL + "    def execute(self, c): return {'y': 0}\n",
        CELL + "    half = property(lambda self: 0.5)\n",
        CELL + "    half = functools.cached_property(lambda self: 0.5)\n",
        CELL + "    half = staticmethod(lambda: 0.5)\n",
    ],
)
def test_an_edited_class_is_another_model(edited):
    assert made_of(edited)().model_key != made_of(CELL)().model_key


def test_a_class_defined_again_or_moved_down_is_the_same_model():
    assert made_of(CELL)().model_key == made_of(CELL)().model_key
    assert made_of("\n\n" + CELL)().model_key == made_of(CELL)().model_key


def decorated(number):
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    source = CELL.replace("    def load", "    @logged\n    def load").replace("1", str(number))
    return made_of(source, logged=logged)


def test_an_edit_below_a_decorator_is_seen():
    assert decorated(1)().model_key == decorated(1)().model_key
    assert decorated(1)().model_key != decorated(3)().model_key


def factory(weight):
    class Constant(st2i.ModelFn):
        def setup_io(self):
            assert isinstance(self, __class__)
            self.add_output("y")

        def load_model(self, model_path):
            return {"weight": weight}

    return Constant


def test_classes_from_a_factory_are_one_model_only_for_equal_arguments():
    assert factory(1)().model_key == factory(1)().model_key
    assert factory(1)().model_key != factory(2)().model_key
    assert factory([1, {"a": (2,)}])().model_key == factory([1, {"a": (2,)}])().model_key
    assert factory([1, {"a": (2,)}])().model_key != factory([1, {"a": (3,)}])().model_key
    assert factory({"b", "a"})().model_key == factory({"a", "b"})().model_key


def test_what_cannot_be_compared_in_a_closure_does_no_harm():
    lock = threading.Lock()
    assert factory(lock)().model_key == factory(lock)().model_key
    assert factory(sys)().model_key
    recursive = made_of(CELL)
    recursive.again = recursive.load_model
    assert recursive().model_key


def test_the_key_is_the_same_in_another_process():
    source = f"import st2i_dask as st2i\n{CELL}\nCell.names = {{'a', 'b', 'c'}}\n"
    cell = made_of(CELL)
    cell.names = {"c", "b", "a"}
    printed = subprocess.run(
        [sys.executable, "-c", source + "print(Cell('folder', size=1).model_key)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert printed.strip() == cell("folder", size=1).model_key


@pytest.mark.parametrize("make", [Upscale, factory(1)])
def test_the_key_travels_with_the_instance(make):
    model = make("folder", size=1)
    again = pickle.loads(cloudpickle.dumps(model))
    assert again.__dict__["model_key"] == model.model_key
    assert (again.inputs, again.outputs) == (model.inputs, model.outputs)
