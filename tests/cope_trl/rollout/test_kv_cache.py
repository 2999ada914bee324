"""The slot cache against whole forwards without a cache."""

import pytest
import torch
from support import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from cope_trl.rollout.kv_cache import Placement, SlotCache

CPU = torch.device("cpu")


def test_a_placement_written_out():
    place = Placement.of([3, 1], [5, 0], [2, 3], CPU)
    assert (place.span, place.queries, place.width) == (None, 3, 7)
    assert place.row.tolist() == [0, 0, 1, 1, 1]
    assert place.query.tolist() == [1, 2, 0, 1, 2]  # left-padded
    assert place.slot.tolist() == [3, 3, 1, 1, 1]
    assert place.column.tolist() == [5, 6, 0, 1, 2]
    assert place.grid(torch.tensor([10, 11, 20, 21, 22])).tolist() == [[0, 10, 11], [20, 21, 22]]
    seen = place.mask()[:, 0].int().tolist()
    assert seen[0] == [[1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1] * 7]
    assert seen[1] == [[1] + [0] * 6, [1] * 2 + [0] * 5, [1] * 3 + [0] * 4]


@pytest.mark.parametrize(
    ("slots", "span"), [([2, 3, 4], slice(2, 5)), ([2, 4], None), ([0], slice(0, 1)), ([1, 0], None)]
)
def test_slots_that_follow_one_another_are_a_slice(slots, span):
    assert Placement.of(slots, [0] * len(slots), [1] * len(slots), CPU).span == span


class Slots:
    """Feeds a model piece by piece; says what it returns after each row's last token."""

    def __init__(self, model, slots):
        self.model, self.cache = model, SlotCache(model.config.num_hidden_layers, slots)
        self.held = {slot: [] for slot in range(slots)}

    @torch.no_grad()
    def feed(self, pieces):
        slots = list(pieces)
        place = Placement.of(slots, [len(self.held[s]) for s in slots], [len(pieces[s]) for s in slots], CPU)
        self.cache.place(place)
        mask = place.mask()
        if self.model.config._attn_implementation == "eager":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        ids = place.grid(torch.tensor([token for s in slots for token in pieces[s]]))
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=place.grid(place.column), cache=self.cache
        )
        for slot in slots:
            self.held[slot] += pieces[slot]
        return dict(zip(slots, output.logits[:, -1], strict=True))

    @torch.no_grad()
    def whole(self, slot):
        return self.model(input_ids=torch.tensor([self.held[slot]])).logits[0, -1]

    def check(self, pieces):
        for slot, logits in self.feed(pieces).items():
            assert torch.allclose(logits, self.whole(slot), atol=1e-5), slot


def ids(count, seed):
    return torch.randint(5, 400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def other_model(architecture):
    """Learned positions (gpt2), rotary positions on a part of each head (gpt_neox), experts (mixtral)."""
    sizes = {"vocab_size": 420, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if architecture == "mixtral":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes))
    return model.apply(lambda module: module.weight.data.mul_(4) if isinstance(module, torch.nn.Linear) else None)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2", "gpt_neox", "mixtral"])
def test_any_order_of_pieces_gives_the_logits_of_the_whole(architecture):
    build = other_model if architecture in ("gpt2", "gpt_neox", "mixtral") else make_model
    slots = Slots(build(architecture).eval(), 4)
    slots.check({0: ids(9, 0), 2: ids(4, 1)})
    slots.check({0: ids(1, 2), 2: ids(1, 3)})
    slots.check({3: ids(12, 4)})
    slots.check({2: ids(7, 5), 1: ids(3, 6), 0: ids(1, 7)})
    slots.check({0: ids(1, 8), 1: ids(1, 9), 2: ids(1, 10), 3: ids(1, 11)})


def test_eager_attention_takes_the_same_placements():
    slots = Slots(make_model(attn_implementation="eager").eval(), 2)
    slots.check({1: ids(5, 0), 0: ids(3, 1)})
    slots.check({0: ids(2, 2), 1: ids(1, 3)})


def test_a_copied_prefix_continues_as_if_it_had_been_computed():
    slots = Slots(make_model().eval(), 3)
    slots.feed({0: ids(10, 0), 2: ids(30, 1)})
    slots.cache.copy(0, 2, 6)
    slots.held[2] = slots.held[0][:6]
    slots.check({2: ids(5, 2)})
    slots.check({0: ids(5, 3)})  # the source is as it was


def test_a_slot_used_again_shows_nothing_of_before():
    slots = Slots(make_model().eval(), 1)
    slots.feed({0: ids(40, 0)})
    slots.held[0] = []
    slots.check({0: ids(3, 1)})


def test_the_store_grows_without_losing_anything():
    model = make_model(max_position_embeddings=2048).eval()
    slots = Slots(model, 2)
    slots.check({0: ids(250, 0)})
    before = slots.cache.nbytes()
    slots.check({0: ids(300, 1), 1: ids(2, 2)})
    config = model.config
    width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    assert slots.cache.columns == 768
    assert slots.cache.nbytes() == 3 * before == 2 * config.num_hidden_layers * 2 * 768 * width * 4


def test_a_forward_that_was_not_placed_is_refused():
    model = make_model().eval()
    with pytest.raises(RuntimeError, match="place"):
        model(input_ids=torch.tensor([[5, 6]]), cache=SlotCache(model.config.num_hidden_layers, 1))
