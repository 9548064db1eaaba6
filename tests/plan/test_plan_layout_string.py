"""Megatron-LM's way to write the cut into stages, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera.errors import UsageError
from chimera.plan.layout_string import cut_by_count, cut_from_layout, format_layout, layout_of_cut, parse_layout


def test_the_layout_of_megatrons_documentation_is_read():
    """DeepSeek-V3 over 16 ranks with two chunks: 61 blocks, one that predicts further, and the loss on its own."""
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    assert stages == ("Ettt", *["tt"] * 29, "m", "L")
    assert len(stages) == 32
    assert "".join(stages).count("t") == 61


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ("EtL",)),
        ("E t , t | t L", ("Ett", "tL")),
        ("(Et|(t|)*2)*1tL", ("Et", "t", "t", "tL")),
        ("Et|(t*2|t|)*2L", ("Et", "tt", "t", "tt", "t", "L")),
    ],
)
def test_repetitions_nest_and_spaces_do_not_count(text, stages):
    """A repetition takes the letter or the parenthesis before it."""
    assert parse_layout(text) == stages


@given(st.lists(st.text("EtmL", min_size=1, max_size=9), min_size=1, max_size=40))
def test_what_is_written_is_read_back(stages):
    """Any stages survive, and the form written is no longer than the plain one by more than its commas."""
    written = format_layout(stages)
    assert parse_layout(written) == tuple(stages)
    assert len(written) <= len("|".join(stages))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Et*3|x|L", r"character 6: got 'x'; needed: the letters E, t, m and L"),
        ("*3tL", r"character 1: got '\*'; nothing stands before it"),
        ("Et*0L", r"character 3: got '\*'; needed: a number from 1"),
        ("Et*999999999L", r"at most 100,000 layers"),
        ("(((t*99999)*99999)*99999)", r"at most 100,000 layers"),
        ("Et*L", r"character 3: got '\*'; needed: the letters"),
        ("E(tL", r"character 5: got ''; a parenthesis is still open"),
        ("Et)L", r"character 3: got '\)'; this parenthesis was never opened"),
        ("E||L", r"stage 1 of 3 has no layers"),
        ("", r"stage 0 of 1 has no layers"),
        ("Et|", r"stage 1 of 2 has no layers"),
    ],
)
def test_what_is_not_a_layout_is_refused_by_place(text, told):
    """The message has the place and what is needed there."""
    with pytest.raises(UsageError, match=told):
        parse_layout(text)


def test_a_layout_gives_each_layer_its_stage():
    """Embedding, blocks and head in order."""
    assert cut_from_layout("Ett|t*3|tL", [6]) == (0, 0, 0, 1, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Et|tL", "has 1 E, 2 t and 1 L; needed, in this order: one E, the 3 t of the model, one L"),
        ("tE|ttL", "needed, in this order: one E"),
        ("Ettt|m|L", "this model has none: leave it out"),
    ],
)
def test_a_layout_of_another_model_is_refused(text, told):
    """What it has is counted beside what the model has."""
    with pytest.raises(UsageError, match=told):
        cut_from_layout(text, [3])


def test_a_layout_of_two_stacks_has_two_embeddings():
    """T5's decoder and the second encoder of ICT begin with an E of their own, which stands where the layout says."""
    assert cut_from_layout("Ett|E|t*3L", [2, 3]) == (0, 0, 0, 1, 2, 2, 2, 2)
    assert cut_by_count([2, 3], 5) == (0, 0, 1, 2, 2, 3, 4, 4)
    with pytest.raises(UsageError, match="one E, the 2 t of the first stack, one E, the 3 t of the second, one L"):
        cut_from_layout("Et*5L", [2, 3])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=2), st.data())
def test_a_cut_by_count_is_even_and_written_as_a_layout(stacks, data):
    """Blocks per stage differ by at most one, none is lost, and the layout gives the cut back."""
    num_stages = data.draw(st.integers(1, sum(stacks)))
    cut = cut_by_count(stacks, num_stages)
    embeddings = [0, *(blocks + 1 for blocks in stacks[:-1])]
    of_blocks = [stage for layer, stage in enumerate(cut[:-1]) if layer not in embeddings]
    blocks = [of_blocks.count(stage) for stage in range(num_stages)]
    assert sum(blocks) == sum(stacks)
    assert max(blocks) - min(blocks) <= 1
    assert all(cut[layer] == cut[layer + 1] for layer in embeddings)
    assert (cut[0], cut[-1]) == (0, num_stages - 1)
    assert cut_from_layout(layout_of_cut(cut, stacks), stacks) == cut


def test_more_stages_than_blocks_are_refused():
    """A stage without a block is only made by a layout that says so."""
    with pytest.raises(UsageError, match="got 4 stages for 3 layers"):
        cut_by_count([3], 4)
