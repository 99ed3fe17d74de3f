"""The benchmarks' policy is trained on text as described, and its padded form is the same function."""

import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.target import head as target_head
from benchmarks.target import pad_maps, pad_plan, pad_to_7b
from benchmarks.target import policy as target_policy
from benchmarks.target import run as target
from benchmarks.target import text as target_text
from recipes.assets.make_countdown import EOS, HIT, START, WORDS, make_tokenizer
from tests.support.drafters.draft_texts import quality_on
from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter.architectures.base import Drafting
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.drafter.architectures.eagle3 import Eagle3
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.rewards.countdown import countdown
from tlt_lightning.speculation.head_files import check_head, read_head

DRAFT_VOCAB = 200
ARCHITECTURES = {"head": Eagle3(), "head-block": DSpark(num_layers=2, block_size=4, markov_rank=8)}


def shake(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Biases and norms that matter, as after training."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "bias")):
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = target_policy.make_policy(target_policy.TINY)
    policy.lm_head.weight.data *= 10  # greedy text does not hang on rounding
    shake({name: parameter.data for name, parameter in policy.named_parameters()}, 1)
    policy.save_pretrained(folder / "policy")
    make_tokenizer().save_pretrained(folder / "policy")
    for head, architecture in ARCHITECTURES.items():
        module = DrafterModule(str(folder / "policy"), num_draft_tokens=3, architecture=architecture)
        module.configure_model()
        module.load_trainable(shake({name: tensor.clone() for name, tensor in module.trainable_tensors()}, 2))
        module.export(folder / head)
    return folder


@pytest.fixture(scope="module")
def wide(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    plan = make_plan(small / "policy")
    pad_to_7b.pad_policy(plan, small / "policy", folder / "policy")
    for head in ARCHITECTURES:
        pad_to_7b.pad_head(plan, small / head, folder / "policy", folder / head, DRAFT_VOCAB)
    return folder


def make_plan(policy: Path, shape: pad_plan.Shape = pad_plan.TINY) -> pad_plan.Padding:
    return pad_plan.Padding(Qwen2Config.from_pretrained(policy), shape, "cpu", torch.float32, 0)


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "policy").eval()


# Text


def test_a_search_that_hits_earns_the_reward_and_one_that_gives_up_does_not():
    rng, tokenizer, outcomes = random.Random(0), make_tokenizer(), set()
    for _ in range(200):
        question = target_text.draw_question(rng)
        ids = target_text.write_search(question, rng)
        words = [WORDS[index] for index in ids]
        if words[-1] != EOS:
            assert len(words) == target_text.MAX_RESPONSE
            continue
        reward = countdown("", tokenizer.decode(ids, skip_special_tokens=True), question.row)
        assert reward == float(HIT in words)
        outcomes.add(reward)
    assert outcomes == {0.0, 1.0}


@pytest.mark.slow
def test_lengths_have_a_long_tail_and_searches_succeed_often_but_not_always():
    rng = random.Random(0)
    lengths, hits = [], 0
    for _ in range(2000):
        ids = target_text.write_search(target_text.draw_question(rng), rng)
        lengths.append(len(ids))
        hits += WORDS.index(HIT) in ids
    lengths.sort()
    assert 110 <= lengths[1000] <= 180
    assert 2300 <= lengths[1980] <= 4000
    assert lengths[-1] == target_text.MAX_RESPONSE
    assert 0.35 < hits / 2000 < 0.5


def test_text_goes_on_with_a_question_after_the_end_of_an_answer():
    row = target_text.write_row(random.Random(0), 2000)
    ends = [index for index, token in enumerate(row[:-1]) if token == WORDS.index(EOS)]
    assert len(row) == 2000
    assert ends
    assert {row[0], *(row[end + 1] for end in ends)} == {WORDS.index(START)}


def test_held_out_questions_are_never_asked():
    train, val = target_text.make_questions(0, 50, 20)
    keys = {question.key for question in val}
    assert len(keys | {question.key for question in train}) == 70
    rng = random.Random(0)  # draws what `make_questions` drew, unless told not to
    assert target_text.draw_question(rng).key in keys
    rng = random.Random(0)
    assert target_text.draw_question(rng, keys).key not in keys


def test_streams_repeat_with_their_seed():
    first, again, other = (next(iter(target_text.Streams(2, 100, (), seed))) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_word_is_a_token_of_the_policies_made_from_scratch():
    assert target_text.spelling_of(make_tokenizer()) == target_text.WORD_BY_WORD


# Training


@pytest.mark.slow
def test_parts_leave_a_policy_heads_questions_and_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(target, "run_apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(target_head, "MEASURED_ROWS", 2)
    ticks = itertools.count(0.0, 0.08)  # as many steps on any machine
    monkeypatch.setattr(target_policy, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    models, results = tmp_path / "models", tmp_path / "results"
    options = ["--seconds", "2", "--head-seconds", "1", "--parts", "policy", "head", "measure", "block"]
    target.main(["--tiny", "--models", str(models), "--out", str(results), *options])
    written = json.loads((results / "target.json").read_text())
    curve = written["policy"]["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert (models / "policy" / "tokenizer.json").is_file()
    names = [f"{head}{stage}" for head, _ in target.HEADS.values() for stage in ("-random", "-brief", "")]
    assert {path.parent.name for path in models.glob("head*/config.json")} == set(names)
    assert len((models / "val.jsonl").read_text().splitlines()) == target_policy.TINY.num_val
    assert (results / "target.md").read_text() in capsys.readouterr().out
    heads = [load_file(models / name / "model.safetensors")["fc.weight"] for name in names]
    assert not any(itertools.starmap(torch.equal, itertools.combinations(heads, 2)))
    assert all(written[part]["us_a_token"] > 0 for part in target.HEADS)


def test_training_stops_in_time_and_slows_down_before(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(target_policy.time, "perf_counter", lambda: now[0])
    model = nn.Linear(2, 1)
    rates = []
    clock = target_policy.Clock(seconds=100.0, learning_rate=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    while clock.tick(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        now[0] += 1.0
    assert clock.steps == target_policy.UNTIMED_STEPS + 100
    assert 0.45 < max(rates) < 0.65  # warm after half of the steps
    assert rates[-1] < 0.01
    assert rates[-1] < rates[-20] < rates[60]


def test_a_loss_that_is_not_a_number_ends_the_training():
    model = nn.Linear(2, 1)
    clock = target_policy.Clock(seconds=5.0, learning_rate=1e-3)
    with pytest.raises(RuntimeError, match="loss is nan after 4 steps"):
        target_policy.optimise(model, lambda: model(torch.full((1, 2), math.nan)).sum(), clock, 1)


# Padding


@pytest.mark.parametrize("copies", [1, 2, 7, 13, 16])
def test_shares_are_powers_of_two_that_add_up_to_one(copies):
    shares = pad_maps.shares(torch.arange(5 * copies) % 5)
    assert torch.equal(shares.reshape(copies, 5).sum(0), torch.ones(5))
    assert torch.equal(shares.log2(), shares.log2().round())
    assert shares.max() <= 2 * shares.min()


@pytest.mark.parametrize("count", [2, 7, 14])
def test_sets_of_equal_values_cancel(count):
    sets, weights = pad_maps.cancelling(count)
    values = torch.randn(count)[sets]  # equal within a set
    assert torch.zeros(count).index_add(0, sets, values * weights).abs().max() == 0
    assert (weights != 0).all()


@pytest.mark.slow
def test_the_wide_policy_gives_the_log_probs_of_the_small_one(small, wide):
    ids = target_head.write_rows(0, 2, 200)
    reference, other = (pad_to_7b.log_probs(load(folder), ids) for folder in (small, wide))
    assert other.shape[-1] == pad_plan.TINY.vocab_size
    torch.testing.assert_close(other[..., : len(WORDS)], reference, atol=2e-4, rtol=0)
    assert other[..., len(WORDS) :].max() < -100


@pytest.mark.slow
def test_the_wide_policy_writes_the_greedy_text_of_the_small_one(small, wide):
    prompt = target_head.write_rows(1, 3, 10)
    texts = [load(folder).generate(prompt, do_sample=False, max_new_tokens=40) for folder in (small, wide)]
    assert torch.equal(texts[0], texts[1])
    assert len(texts[0].unique()) > 10  # not the same token all the time


@pytest.mark.slow
def test_layers_between_add_nothing_and_no_matrix_is_of_zeros(small, wide):
    plan, policy = make_plan(small / "policy"), load(wide)
    with torch.no_grad():
        states = policy(target_head.write_rows(0, 1, 64), output_hidden_states=True).hidden_states
    idle = [layer for layer in range(6) if layer not in plan.places]
    assert idle == [2, 4]
    for layer in range(6):
        change = (states[layer + 1] - states[layer]).abs().max()
        assert (change < 1e-5) if layer in idle else (change > 0.1)
    for name, tensor in policy.state_dict().items():
        assert (tensor == 0).double().mean() < 0.01, name


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_the_wide_head_drafts_what_the_small_one_drafts(small, wide, head):
    ids = target_head.write_rows(0, 2, 130)
    losses, qualities = [], []
    for folder in (small, wide):
        module = DrafterModule(str(folder / "policy"), str(folder / head), num_draft_tokens=3)
        module.configure_model()
        packs = target_head.make_packs(load(folder), ids, module.layer_ids, 128)
        losses.append(torch.stack([module.loss(pack)[0] for pack in packs]))
        qualities.append(quality_on(module, packs).metrics())
    # States are packed in the policy's precision, float32 here.
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-4)
    assert qualities[1] == pytest.approx(qualities[0], rel=1e-3, abs=1e-3)
    assert losses[0].max() > 0.1


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_the_wide_head_drafts_no_padded_token(wide, head):
    module = DrafterModule(str(wide / "policy"), str(wide / head), num_draft_tokens=3)
    module.configure_model()
    (pack,) = target_head.make_packs(load(wide), target_head.write_rows(0, 1, 130), module.layer_ids, 128)
    highest = []

    def judge(step, rows, logits, targets):
        highest.append(logits[:, len(WORDS) :].max())

    terms = chunked_loss.terms_of("kl_div", pack.states)
    module.architecture.predict(module.head, pack, Drafting(terms, torch.ones(3, 128), judge=judge))
    assert max(highest) < -100


@pytest.mark.parametrize("architecture", ARCHITECTURES.values())
def test_a_random_head_learns_for_the_wide_policy_as_for_any_of_its_vocabulary(wide, architecture):
    module = DrafterModule(str(wide / "policy"), num_draft_tokens=3, architecture=architecture)
    module.configure_model()
    (pack,) = target_head.make_packs(load(wide), target_head.write_rows(0, 1, 130), module.layer_ids, 128)
    loss, _ = module.loss(pack)
    assert loss / 3 < 5 * math.log(pad_plan.TINY.vocab_size)
    quality = quality_on(module, [pack])
    assert quality.acceptance_length < 1.5


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_the_wide_head_reads_the_layers_that_the_small_one_reads(small, wide, head):
    places = make_plan(small / "policy").places
    little, large = (read_head(str(folder / head)) for folder in (small, wide))
    check_head(large, str(wide / "policy"))
    assert list(large.layer_ids) == [places[layer] for layer in little.layer_ids]
    assert (large.num_layers, large.most_drafts) == (little.num_layers, little.most_drafts)
    assert large.draft_vocab_size == DRAFT_VOCAB
    config = json.loads((wide / head / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(wide / "policy")


def test_what_is_padded_says_so(wide):
    for name in ("policy", *ARCHITECTURES):
        assert json.loads((wide / name / "padded.json").read_text())["padded"] is True


def test_the_shape_is_that_of_the_large_policy():
    config = Qwen2Config(**{**vars(pad_plan.SEVEN_B), "num_hidden_layers": 1})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.model.layers.parameters()) * 28 / 1e9 == pytest.approx(6.53, abs=0.01)
    large = target_policy.LARGE
    pad_plan.Padding(target_policy.make_policy(large).config, pad_plan.SEVEN_B, "cpu", torch.bfloat16, 0)
    assert pad_plan.SEVEN_B.intermediate_size % large.shape["intermediate_size"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 460, "num_attention_heads": 14}, "do not fill"),
        ({"hidden_size": 480, "num_attention_heads": 15, "num_key_value_heads": 5}, "must be a multiple of 64"),
        ({"intermediate_size": 50}, "no room for 96 dimensions"),
        ({"num_key_value_heads": 7}, "no room for 2 in 2 groups"),
        ({"num_hidden_layers": 3}, "more layers or tokens"),
        ({"vocab_size": 100}, "more layers or tokens"),
    ],
)
def test_shapes_without_room_for_the_policy_are_refused(small, change, message):
    with pytest.raises(ValueError, match=message):
        make_plan(small / "policy", pad_plan.Shape(**{**vars(pad_plan.TINY), **change}))


def test_heads_that_cannot_be_padded_exactly_are_refused(small, wide, tmp_path):
    plan = make_plan(small / "policy")
    tensors = load_file(small / "head" / "model.safetensors")
    config = json.loads((small / "head" / "config.json").read_text())
    save_file({**tensors, "lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="output head"):
        pad_to_7b.pad_head(plan, tmp_path, wide / "policy", tmp_path / "out", DRAFT_VOCAB)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "norm_before_residual": True}))
    with pytest.raises(ValueError, match="norm_before_residual"):
        pad_to_7b.pad_head(plan, tmp_path, wide / "policy", tmp_path / "out", DRAFT_VOCAB)
