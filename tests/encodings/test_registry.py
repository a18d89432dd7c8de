import pytest

import posenc
from posenc.encodings.bias import T5

NAMES = ["none", "sinusoidal", "learned", "shaw", "clipped", "t5", "transformer_xl", "xlnet", "deberta", "rope",
         "relative_logits", "alibi"]  # fmt: skip


def test_every_encoding_of_the_core_is_there():
    assert set(NAMES) <= set(posenc.list_encodings())
    for name in posenc.list_encodings():
        assert issubclass(posenc.info(name).load(), posenc.Encoding)


def test_classes_are_reachable_by_name():
    assert posenc.T5 is T5
    assert "T5" in dir(posenc)
    with pytest.raises(AttributeError, match="no attribute 'T6'"):
        _ = posenc.T6


def test_create_passes_the_sizes_that_an_encoding_needs():
    assert posenc.create("none", d_model=8, heads=2).state_dict() == {}
    assert posenc.create("t5", d_model=8, heads=2).table.shape == (32, 2)
    assert posenc.create("shaw", d_model=8, heads=2).keys.shape == (1, 33, 4)
    assert posenc.create("shaw", d_model=8, heads=2, head_dim=3).keys.shape == (1, 33, 3)


def test_unknown_names_are_guessed():
    with pytest.raises(ValueError, match="did you mean 'alibi'.*sinusoidal"):
        posenc.create("alibbi")


def test_unknown_options_are_named_with_the_allowed_ones():
    with pytest.raises(posenc.OptionError, match="no option 'bucket'; its options are buckets, max_distance"):
        posenc.create("t5", heads=2, bucket=4)
    with pytest.raises(TypeError, match="takes no options"):
        posenc.create("none", max_distance=3)


def test_missing_options_are_named():
    with pytest.raises(posenc.OptionError, match="learned needs max_length: "):
        posenc.create("learned", d_model=8)
    with pytest.raises(posenc.OptionError, match="t5 needs heads"):
        posenc.create("t5")
    with pytest.raises(posenc.OptionError, match="not a multiple"):
        posenc.create("shaw", d_model=9, heads=2)
