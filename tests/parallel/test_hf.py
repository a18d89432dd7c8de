"""hf.accelerate(model, context_parallel=...): T5, UMT5, DeBERTa, BLOOM and MPT in training, against one process."""

import pytest

pytest.importorskip("transformers")


@pytest.mark.slow
def test_models_of_transformers_share_sequences(ranks):
    from tests.parallel import models

    ranks.run(models.compare_models, 2, [("ring", "zigzag"), ("gather", "none"), ("ulysses", "striped")])


@pytest.mark.slow
def test_what_cannot_share_sequences_is_refused(ranks):
    from tests.parallel import models

    ranks.run(models.refusals, 2)
