"""The engine that keeps its cache: against whole forwards without one, whatever runs beside an episode."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_model

from cope_trl.forecast.attention import use_branched_attention
from cope_trl.rollout.cached import CachedEngine
from cope_trl.rollout.sampling import RowSampler

STOPS = [7, 8]


@pytest.fixture(scope="module")
def model():
    return make_model().eval()


def ids(count, seed):
    return random.Random(seed).choices(range(10, 400), k=count)


@torch.no_grad()
def turn_by_hand(model, history, limit, numbers, temperature=1.0, stops=STOPS):
    """A turn by whole forwards; each token is where the summed probabilities pass the next number."""
    sampled = []
    while len(sampled) < limit and not (sampled and sampled[-1] in stops):
        logits = model(input_ids=torch.tensor([history + sampled])).logits[0, -1]
        number = numbers.random()
        if temperature == 0:
            sampled.append(int(logits.argmax()))
        else:
            sums = (logits / temperature).softmax(-1).double().cumsum(-1)
            sampled.append(int((sums <= number * sums[-1]).sum()))
    return sampled


class Player:
    """Plays episodes of given observations on an engine, each turn asked for as soon as the one before is there."""

    def __init__(self, engine, limits=(6,)):
        self.engine, self.limits = engine, limits
        self.turns = {}
        self.histories = {}

    def begin(self, name, observations):
        key = self.engine.open(name)
        self.turns[name], self.histories[name] = [], []
        observations = list(observations)

        def ask():
            self.histories[name] += observations.pop(0)
            limit = self.limits[len(self.turns[name]) % len(self.limits)]
            self.engine.sample(key, self.histories[name], limit, deliver)

        def deliver(generation):
            assert generation.logprobs is None
            self.turns[name].append(generation.ids)
            self.histories[name] += generation.ids
            if observations:
                ask()
            else:
                self.engine.close(key)

        ask()

    def run(self):
        while self.engine.advance():
            pass
        return self.turns


def by_hand(model, name, observations, limits=(6,), temperature=1.0):
    numbers, history, turns = random.Random(name), [], []
    for index, observation in enumerate(observations):
        history = history + observation
        turns.append(turn_by_hand(model, history, limits[index % len(limits)], numbers, temperature))
        history = history + turns[-1]
    return turns


def episodes_of(seed, count, turns=3, longest=30):
    """Observations of `count` episodes; those that follow one another in pairs share their first one."""
    rng = random.Random(seed)
    return {
        f"{seed}-{i}": [
            ids(rng.randint(1, longest), f"{seed}-{i // 2}-first")
            if t == 0
            else ids(rng.randint(1, longest), (seed, i, t).__repr__())
            for t in range(rng.randint(1, turns))
        ]
        for i in range(count)
    }


def play(model, episodes, sampler=None, slots=None, **settings):
    limits = settings.pop("limits", (6,))
    engine = CachedEngine(model, STOPS, sampler or RowSampler(), slots or len(episodes), **settings)
    player = Player(engine, limits)
    for name, observations in episodes.items():
        player.begin(name, observations)
    return player.run(), engine


@pytest.mark.parametrize("temperature", [0, 1.0, 0.7])
@pytest.mark.parametrize("patience", [1, 3, 100])
def test_turns_are_those_of_whole_forwards(model, temperature, patience):
    episodes = episodes_of(1, 6)
    limits = (6, 2, 9)
    turns, _ = play(model, episodes, RowSampler(temperature), patience=patience, limits=limits)
    for name, observations in episodes.items():
        assert turns[name] == by_hand(model, name, observations, limits, temperature), name


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 7),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 5, 64, 8192]),
    st.sampled_from([3, 40]),
)
def test_what_runs_beside_an_episode_does_not_change_it(seed, count, patience, max_prefill, longest):
    model = make_model().eval()
    episodes = episodes_of(seed, count, longest=longest)
    turns, _ = play(model, episodes, patience=patience, max_prefill=max_prefill)
    for name, observations in episodes.items():
        alone, _ = play(model, {name: observations})
        assert alone[name] == turns[name]


def test_a_turn_ends_with_any_stop_or_at_its_limit(model):
    episodes = {str(i): [ids(5, i)] for i in range(40)}
    (turns, _) = play(model, episodes, RowSampler(3.0), limits=(200,))
    turns = [turn for (turn,) in turns.values()]
    assert {turn[-1] for turn in turns if len(turn) < 200} == set(STOPS)
    assert all(token not in STOPS for turn in turns for token in turn[:-1])
    assert all(len(turn) <= 200 for turn in turns)


# ---------------------------------------------------------------- the work done


def prefixes(histories):
    return {tuple(history[:end]) for history in histories for end in range(1, len(history) + 1)}


def test_only_new_tokens_are_prefilled(model):
    """Every token of a history once, common beginnings once for all; the last of a prompt is forwarded for each."""
    first = ids(60, "task")
    names = [f"rollout {i}" for i in range(8)]
    episodes = {name: [first, ids(20, name + "1"), ids(20, name + "2")] for name in names}
    turns, engine = play(model, episodes)
    ended = sum(len(turn) for turn in turns.values()) - len(names)  # a turn's last token is not sampled after
    assert engine.tokens.prefilled == 60 + 7 * 1 + 8 * 2 * 20 + ended
    assert engine.tokens.copied == 7 * 59
    assert engine.tokens.decoded == sum(len(turn) for turns in turns.values() for turn in turns)
    assert engine.tokens.padding == 0


def test_prefilled_tokens_are_few_more_than_unique_ones(model):
    """Three tasks with one instruction, four rollouts each, observations of unequal length."""
    rng = random.Random(5)
    instruction = ids(150, "instruction")
    episodes = {
        f"{task}-{i}": [
            instruction + ids(50, f"task {task}"),
            *(ids(rng.randint(20, 120), f"{task}-{i}-{t}") for t in "abcde"),
        ]
        for task in range(3)
        for i in range(4)
    }
    player = Player(CachedEngine(model, STOPS, RowSampler(), 12), (10,))
    for name, observations in episodes.items():
        player.begin(name, observations)
    turns = player.run()
    histories = [history[: len(history) - len(turns[name][-1])] for name, history in player.histories.items()]
    decoded = sum(len(turn) - 1 for name in turns for turn in turns[name][:-1])
    unique = len(prefixes(histories)) - decoded
    tokens = player.engine.tokens
    assert unique <= tokens.prefilled <= 1.1 * unique
    assert tokens.padding <= 0.1 * tokens.prefilled


def test_tasks_that_share_nothing_are_prefilled_together(model):
    _, engine = play(model, {str(i): [ids(20, i)] for i in range(6)}, limits=(1,))
    assert engine.tokens.forwards == 1
    assert (engine.tokens.prefilled, engine.tokens.copied) == (120, 0)


def test_no_forward_holds_more_than_allowed(model):
    _, engine = play(model, {str(i): [ids(20, i)] for i in range(6)}, limits=(1,), max_prefill=64)
    assert engine.tokens.forwards == 2


def test_a_long_history_is_cut_into_pieces(model):
    episodes = {"long": [ids(300, 0)], "short": [ids(40, 1)]}
    turns, engine = play(model, episodes, max_prefill=64, limits=(3,))
    assert engine.tokens.forwards >= 5
    for name, observations in episodes.items():
        assert turns[name] == by_hand(model, name, observations, (3,))


def test_turns_that_come_in_wait_for_those_under_way(model):
    """With patience 4 a second episode joins after four tokens of the first, not at once."""
    engine = CachedEngine(model, [], RowSampler(), 2, patience=4)
    done = []
    first, second = engine.open("a"), engine.open("b")
    engine.sample(first, ids(5, 0), 12, lambda generation: done.append("a"))
    assert engine.advance()
    engine.sample(second, ids(5, 1), 2, lambda generation: done.append("b"))
    forwards = []
    while engine.advance():
        forwards.append((engine.tokens.prefilled, tuple(done)))
    assert [prefilled for prefilled, _ in forwards[:5]] == [5, 5, 5, 5, 10]
    assert done == ["b", "a"]


# ---------------------------------------------------------------- episodes that come and go


def test_slots_are_used_again_by_later_episodes(model):
    engine = CachedEngine(model, STOPS, RowSampler(), 2)
    for round_ in range(4):
        episodes = episodes_of(round_, 2)
        player = Player(engine)
        for name, observations in episodes.items():
            player.begin(name, observations)
        for name, turns in player.run().items():
            assert turns == by_hand(model, name, episodes[name])


def test_what_a_closed_episode_computed_serves_the_next_one(model):
    engine = CachedEngine(model, STOPS, RowSampler(), 2)
    for name in ("a", "b"):
        player = Player(engine)
        player.begin(name, [ids(50, "same")])
        assert player.run()[name] == by_hand(model, name, [ids(50, "same")])
    assert engine.tokens.prefilled == 51


def test_an_episode_closed_in_the_middle_of_a_turn_is_not_delivered(model):
    engine = CachedEngine(model, [], RowSampler(), 3)
    delivered = []

    def ask(name):
        key = engine.open(name)
        engine.sample(key, ids(5, name), 6, lambda generation: delivered.append((name, generation.ids)))
        return key

    waiting = ask("waiting")
    engine.close(waiting)
    sampled_for, _ = ask("sampled for"), ask("kept")
    engine.advance()
    engine.close(sampled_for)
    ask("later")  # in a slot that was given up
    while engine.advance():
        pass
    assert sorted(name for name, _ in delivered) == ["kept", "later"]
    for name, turn in delivered:
        assert turn == turn_by_hand(model, ids(5, name), 6, random.Random(name), stops=[])


def test_a_history_that_does_not_continue_the_last_one_is_computed_anew(model):
    engine = CachedEngine(model, [], RowSampler(0), 1)
    key, got = engine.open("a"), []
    for history in (ids(30, 0), ids(30, 0)[:12] + ids(9, 1), ids(30, 0)[:5]):
        engine.sample(key, history, 4, lambda generation: got.append(generation.ids))
        while engine.advance():
            pass
        assert got[-1] == turn_by_hand(model, history, 4, random.Random(0), temperature=0, stops=[])


def test_more_episodes_than_slots_are_refused(model):
    engine = CachedEngine(model, STOPS, RowSampler(), 1)
    engine.open("a")
    with pytest.raises(RuntimeError, match="all 1 episodes"):
        engine.open("b")


def test_there_is_nothing_to_do_without_a_request(model):
    engine = CachedEngine(model, STOPS, RowSampler(), 1)
    engine.open("a")
    assert engine.advance() is False
    assert engine.tokens.forwards == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_knows_branches_samples_the_same(attention):
    """As in a trainer that forecasts."""
    model, plain = make_model(attn_implementation=attention).eval(), make_model().eval()
    assert use_branched_attention(model)
    episodes = {"a": [ids(9, 0), ids(9, 1)], "b": [ids(3, 0)]}
    turns, _ = play(model, episodes)
    assert turns == {name: by_hand(plain, name, observations) for name, observations in episodes.items()}


def test_eager_attention_samples_the_same():
    model = make_model(attn_implementation="eager").eval()
    episodes = {"a": [ids(9, 0), ids(9, 1)], "b": [ids(9, 0)]}
    turns, _ = play(model, episodes)
    assert turns == {name: by_hand(model, name, observations) for name, observations in episodes.items()}


def test_half_precision_runs():
    model = make_model().eval().to(torch.bfloat16)
    turns, engine = play(model, {"a": [ids(9, 0), ids(9, 1)], "b": [ids(9, 0)]})
    assert [len(turn) for turn in turns.values()] == [2, 1]
    assert {layer.keys.dtype for layer in engine.cache.layers} == {torch.bfloat16}


def test_an_adapter_is_part_of_the_model():
    peft = pytest.importorskip("peft")
    base = make_model().eval()
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model.eval()
    episodes = {"a": [ids(9, 0), ids(9, 1)]}
    turns, _ = play(model, episodes, RowSampler(0))
    assert turns["a"] == by_hand(model, "a", episodes["a"], temperature=0)
    with model.disable_adapter():
        assert turns["a"] != by_hand(model, "a", episodes["a"], temperature=0)
