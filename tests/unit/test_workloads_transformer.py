"""The transformer sorts, and its layers form a sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.errors import DataError
from raypar.study.options import resolve
from raypar.train.flops import ATTENTION, FULLY_CONNECTED, LayerWork, count_work
from raypar.workloads import transformer
from raypar.workloads.transformer import TENSOR_PLAN, sequence_accuracy, token_accuracy, token_loss

SMALL = {"width": 32, "num_blocks": 2, "sequence_length": 8, "num_sequences": 1024}


def config(**chosen):
    return resolve(transformer, {**SMALL, **chosen})


def loaded(**chosen):
    return transformer.data(config(**chosen))


def network(**chosen):
    torch.manual_seed(0)
    return transformer.model(config(**chosen))


@given(st.integers(1, 4), st.integers(1, 8), st.integers(2, 9), st.integers(2, 12))
def test_there_is_a_score_for_every_token_at_every_position(num_heads, head_width, length, num_tokens):
    sizes = {"num_heads": num_heads, "width": num_heads * head_width}
    model = network(**sizes, sequence_length=length, num_tokens=num_tokens, num_blocks=1)
    assert model(torch.zeros(3, length, dtype=torch.int64)).shape == (3, length, num_tokens)


def test_the_heads_attend_separately():
    """As torch's own attention does with the same weights."""
    (block,) = network(num_blocks=1)[1:-1]
    own = nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        own.in_proj_weight.copy_(torch.cat([layer.weight for layer in (block.q, block.k, block.v)]))
        own.in_proj_bias.copy_(torch.cat([layer.bias for layer in (block.q, block.k, block.v)]))
        own.out_proj.load_state_dict(block.out.state_dict())
    x = torch.randn(3, 8, 32)
    normed = block.attention_norm(x)
    attended = x + own(normed, normed, normed, need_weights=False)[0]
    expected = attended + block.down(nn.functional.gelu(block.up(block.mlp_norm(attended))))
    torch.testing.assert_close(block(x), expected)


def test_the_plan_names_the_six_linear_layers_of_every_block():
    model = network(num_blocks=3)
    plan = transformer.tensor_plan(model)
    assert [type(layer).__name__ for layer in model] == ["Embedding", *["Block"] * 3, "Head"]
    assert plan == {f"{block}.{layer}": way for block in (1, 2, 3) for layer, way in TENSOR_PLAN.items()}
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in plan)


def test_sequences_are_the_same_every_time_and_their_targets_are_in_order():
    data, again = loaded(), loaded()
    assert data.train.inputs.shape == data.train.targets.shape == (1024, 8)
    assert data.val.inputs.shape == (256, 8) and data.val.inputs.dtype == torch.int64
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.inputs, again.val.inputs)
    for part in (data.train, data.val):
        assert set(part.inputs.flatten().tolist()) == set(range(10))
        for tokens, target in zip(part.inputs.tolist(), part.targets.tolist(), strict=True):
            assert sorted(tokens) == target


def test_no_sequence_of_the_default_length_is_both_trained_on_and_judged_by():
    data = loaded(**{key: resolve(transformer, {})[key] for key in SMALL})
    rows = {part: {tuple(row) for row in split.inputs.tolist()} for part, split in enumerate((data.train, data.val))}
    assert len(rows[0]) == transformer.train_size(resolve(transformer, {})) == 8192
    assert not rows[0] & rows[1]


def test_the_loss_is_the_mean_over_all_positions():
    scores, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    surprise = [-scores[i, t].log_softmax(0)[targets[i, t]] for i in range(3) for t in range(5)]
    torch.testing.assert_close(token_loss(scores, targets), torch.stack(surprise).mean())


def test_a_sequence_with_one_wrong_token_is_mostly_right_and_not_right():
    targets = torch.tensor([[0, 1, 2, 3], [1, 1, 2, 2]])
    scores = nn.functional.one_hot(targets, 4).float()
    scores[1, 3] = torch.tensor([9.0, 0, 0, 0])
    assert token_accuracy(scores, targets).tolist() == [1.0, 0.75]
    assert sequence_accuracy(scores, targets).tolist() == [1.0, 0.0]


def test_heads_have_to_divide_the_width_and_be_divisible_by_the_workers():
    transformer.prepare(config())
    with pytest.raises(DataError, match=r"width=32 is not divisible by num_heads=5") as error:
        transformer.prepare(config(num_heads=5))
    assert "width=35" in str(error.value.hint)
    transformer.prepare(config(strategy="tensor", num_workers=4))
    with pytest.raises(DataError, match=r"num_heads=2 is not divisible by the 4 workers"):
        transformer.prepare(config(num_heads=2, strategy="hybrid", tensor_size=4, num_workers=4))


def test_the_work_of_a_sample_is_twelve_widths_squared_per_token_and_block():
    work = {layer.kind: layer for layer in count_work(network(), torch.zeros(2, 8, dtype=torch.int64)).layers}
    assert work[FULLY_CONNECTED].forward == 2 * 8 * 12 * 32**2 + 8 * 32 * 10
    product = 2 * 8 * 8 * 32  # of two activations: two forward, four backward, none by weights
    assert work[ATTENTION] == LayerWork(ATTENTION, 2 * product, 0, 4 * product)
