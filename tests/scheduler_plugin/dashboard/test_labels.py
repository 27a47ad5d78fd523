"""Labels are short, tell something, and no two are equal."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.dashboard import labels


def of(*names):
    made = labels.of_models({f"k{n}": name for n, name in enumerate(names)})
    return [made[f"k{n}"] for n in range(len(names))]


def test_a_model_is_its_modelfn_its_folder_and_its_adapters():
    assert of("Vae('/data/sd3')", "Clip('org/repo')", "Noise(None)", "Unet@there") == [
        "Vae@sd3",
        "Clip@repo",
        "Noise",
        "Unet@there",
    ]
    assert of("Unet('/data/xl', oil.safetensors, ink.bin)", 'Unet("/data/ann\'s")') == [
        "Unet@xl+oil+ink",
        "Unet@ann's",
    ]


def test_folders_of_the_same_name_are_told_apart_by_those_they_lie_in():
    assert of("Vae('/a/sd3')", "Vae('/b/sd3')", "Vae('/a/xl')") == [
        "Vae@a/sd3",
        "Vae@b/sd3",
        "Vae@xl",
    ]
    assert of("Vae('/a/x/sd3')", "Vae('/b/x/sd3')") == ["Vae@a/x/sd3", "Vae@b/x/sd3"]


def test_equal_ones_are_numbered():
    assert of("Vae('/a/sd3')", "Vae('/a/sd3')") == ["Vae@a/sd3", "Vae@a/sd3 (2)"]


def test_copies_with_adapters_still_say_which():
    copies = [f"ZImageTransformer('/tmp/z-image', style-{n:02d}.safetensors)" for n in range(24)]
    assert of(*copies) == [f"ZImageTra...r@z-image+style-{n:02d}" for n in range(24)]


@given(st.lists(st.text("ab", max_size=14)), st.integers(10, 14))
def test_no_two_are_equal_and_none_is_longer(texts, most):
    made = labels.distinct(texts, most)
    assert len(made) == len(texts) == len(set(made))
    assert all(len(label) <= most for label in made)
    for text, label in zip(texts, made, strict=True):
        assert label == text or "..." in label or label.endswith(")")
