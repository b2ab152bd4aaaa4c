"""The Python API over a tiny model folder with its tokenizer."""

import pytest

from dspark.checkpoints.native import read_bundle
from dspark.core.errors import CheckpointError, ConfigError, PromptError, TargetError
from dspark.core.sampling import SamplingParams
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.lookup import PromptLookup
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.recorder import Recorder
from dspark.recipes.bundles import make_drafter, tell_graphs, wants_graphs
from dspark.recipes.llm import LLM
from dspark.targets.captured import CapturedTarget
from dspark.targets.hf import HFTarget
from dspark.targets.tiny import tiny_model

PROMPTS = ["Hello there", "A much longer prompt, with more words in it.", "é"]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(target_folder, bundle_folder):
    return LLM(str(target_folder), draft=bundle_folder, weights="fp32")


@pytest.fixture(scope="module")
def plain(target_folder):
    return LLM(str(target_folder), draft=None, weights="fp32")


def test_generate(llm, plain, tokenizer):
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output, other in zip(
        PROMPTS, outputs, plain.generate(PROMPTS, GREEDY), strict=True
    ):
        assert list(output.prompt_token_ids) == tokenizer(prompt)["input_ids"]
        assert output.token_ids == other.token_ids and output.text == other.text
        assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert len(output.fates) == len(output.token_ids) == 20
        assert output.finish_reason == "length"
        assert output.accepted_length == pytest.approx(19 / output.rounds)
        assert 1.0 <= output.accepted_length <= 1 + llm.drafter.block_size
        assert other.accepted_length == 1.0 and other.rounds == 19


def test_prompt_lookup_needs_no_bundle(target_folder, plain):
    llm = LLM(str(target_folder), draft="lookup", weights="fp32")
    assert llm.policy.name == "fixed:7" and llm.draft_name == "lookup"
    prompts = ["to be or not to be or not to", "abc abc abc abc"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, GREEDY)]
    assert max(o.accepted_length for o in outputs) > 1.0


def test_log_probabilities_of_prompts(llm):
    params = [
        SamplingParams(max_new_tokens=0, prompt_logprobs=2),
        SamplingParams(max_new_tokens=4, prompt_logprobs=2, n=2, ignore_eos=True),
        GREEDY,
    ]
    scored, both, none = llm.generate([PROMPTS[1]] * 3, params)
    assert scored.token_ids == () and scored.text == "" and scored.finish_reason == "length"
    assert scored.prompt_logprobs[0] is None
    tokens = [own.token for own in scored.prompt_logprobs[1:]]
    assert tokens == list(scored.prompt_token_ids[1:])
    assert all(len(own.top) == 2 and own.logprob <= 0 for own in scored.prompt_logprobs[1:])
    assert both.prompt_logprobs == scored.prompt_logprobs
    assert len(both.choices) == 2 and len(both.token_ids) == 4
    assert none.prompt_logprobs == ()


def test_devices_that_cannot_serve(target_folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda' is not here"):
        LLM(str(target_folder), draft=None, device="cuda")
    for device in ("mps", "cpu:0", "cuda:x", "cuda:"):
        message = f"device '{device}' is not supported; use cpu or cuda"
        with pytest.raises(ConfigError, match=message):
            LLM(str(target_folder), draft=None, device=device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="weights 'int8' are for a CPU; on cuda use bf16 or fp32"):
        LLM(str(target_folder), draft=None, device="cuda", weights="int8")


def test_cuda_graphs_where_there_is_nothing_to_capture(target_folder, bundle_folder):
    with pytest.raises(ConfigError, match="cuda_graphs need a CUDA device, and the device is cpu"):
        LLM(str(target_folder), draft=bundle_folder, cuda_graphs=True)
    target, said = HFTarget(tiny_model("gemma2")), []
    for drafter in (None, PromptLookup()):
        with pytest.raises(ConfigError, match=r"nothing to capture.* its layers are not those"):
            tell_graphs(target, drafter, said.append, asked=True)
    assert said == []
    tell_graphs(target, PromptLookup(), said.append, asked=False)
    assert said[0].startswith("verification runs eagerly, without CUDA graphs: its layers are not")
    assert said[1].startswith("the draft runs eagerly") and len(said) == 2


def test_what_can_be_is_captured_on_cuda_unless_told_not_to(bundle_folder, llm):
    bundle = read_bundle(bundle_folder)
    for asked, device, wants in [
        (None, "cuda:1", True), (True, "cuda", True), (False, "cuda", False),
        (None, "cpu", False), (False, "cpu", False),
    ]:  # fmt: skip
        assert wants_graphs(asked, device) == wants
    said = []
    target = CapturedTarget(tiny_model("llama"), capture=Recorder())
    drafter = make_drafter(bundle, llm.loaded, capture=Recorder())
    tell_graphs(target, drafter, said.append, asked=True)
    tell_graphs(HFTarget(tiny_model("gemma2")), drafter, said.append, asked=True)
    assert said[0].startswith("CUDA graphs for verification: steps without prompts")
    assert "at most 64 sizes" in said[0] and said[1].startswith("verification runs eagerly")
    assert isinstance(make_drafter(bundle, llm.loaded, capture=Recorder()), CapturedDrafter)
    assert type(make_drafter(bundle, llm.loaded)) is DSparkDrafter


def test_a_pipelined_llm_gives_the_same(target_folder, bundle_folder, llm):
    piped = LLM(str(target_folder), draft=bundle_folder, weights="fp32", pipeline=True)
    for mine, theirs in zip(
        piped.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY), strict=True
    ):
        assert mine.choices == theirs.choices
    started = piped.start(piped.encode_chat(PROMPTS), GREEDY)
    for _ in started:
        break  # what was committed by then is in the outputs, written or not
    for output in started.outputs():
        assert len(output.token_ids) >= 1
        assert round((output.accepted_length or 0) * output.rounds) == len(output.token_ids) - 1


def test_one_prompt_many_forms(llm, tokenizer):
    ids = tokenizer(PROMPTS[0])["input_ids"]
    forms = [llm.generate(form, GREEDY)[0] for form in (PROMPTS[0], ids, [ids], [PROMPTS[0]])]
    assert len({form.token_ids for form in forms}) == 1
    assert llm.generate([], GREEDY) == []


def test_chat_goes_through_the_template(llm, tokenizer):
    (output,) = llm.chat(PROMPTS[0], GREEDY)
    expected = tokenizer("<user>Hello there<assistant>")["input_ids"]
    assert list(output.prompt_token_ids) == expected
    (output,) = llm.chat([PROMPTS[0]], GREEDY, system="Be brief.")
    expected = tokenizer("<system>Be brief.<user>Hello there<assistant>")["input_ids"]
    assert list(output.prompt_token_ids) == expected


def test_a_stream_adds_up(llm):
    run = llm.stream(PROMPTS, GREEDY)
    texts, tokens, ends = [""] * 3, [[], [], []], [[], [], []]
    for piece in run:
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        ends[piece.index].append(piece.finish_reason)
        assert len(piece.fates) == len(piece.token_ids)
    chat = llm.chat(PROMPTS, GREEDY)
    assert texts == [output.text for output in chat] == [output.text for output in run.outputs()]
    assert tokens == [list(output.token_ids) for output in chat]
    for reasons in ends:
        assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}


def test_an_interrupted_stream_keeps_what_came_and_can_go_on(llm):
    run = llm.stream(PROMPTS, GREEDY)
    for count, _piece in enumerate(run):
        if count == 7:
            break
    partial = run.outputs()
    whole = llm.chat(PROMPTS, GREEDY)
    for some, all_of_it in zip(partial, whole, strict=True):
        assert 0 < len(some.token_ids) < 20
        assert some.finish_reason is None
        assert all_of_it.token_ids[: len(some.token_ids)] == some.token_ids
        assert all_of_it.text.startswith(some.text)
    for _ in run:
        pass
    # Nothing is lost: not even the other requests' events of the step that was left.
    assert [output.token_ids for output in run.outputs()] == [o.token_ids for o in whole]
    assert [output.text for output in run.outputs()] == [o.text for o in whole]


def test_an_exception_in_a_step_keeps_what_came(llm, monkeypatch):
    run = llm.stream(PROMPTS, GREEDY)
    forward, calls = llm.loaded.target.forward, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(llm.loaded.target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for _ in run:
            pass
    assert all(len(output.token_ids) >= 3 for output in run.outputs())


def test_the_end_of_the_text(llm, plain):
    text = plain.generate(PROMPTS[0], GREEDY)[0].token_ids
    index = next(i for i in range(2, 20) if text.index(text[i]) == i)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=20, ignore_eos=True, stop_token_ids=(text[index],)
    )
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.token_ids == text[: index + 1] and output.finish_reason == "stop"
    total = sum(record.emitted for step in llm_records(llm, params) for record in step.rounds)
    assert output.accepted_length == pytest.approx(total / output.rounds)
    one = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], one)
    assert (output.rounds, output.accepted_length, len(output.token_ids)) == (0, None, 1)


def llm_records(llm, params):
    run = llm.start([llm.tokenizer(PROMPTS[0])["input_ids"]], params)
    for _ in run:
        pass
    return run.records


def test_seeds(llm):
    params = SamplingParams(seed=3, max_new_tokens=12, ignore_eos=True)
    first, second = llm.generate([PROMPTS[0]] * 2, params)
    assert first.token_ids == second.token_ids and first.seed == 3
    assert llm.generate(PROMPTS[0], params, policy="off")[0].token_ids == first.token_ids
    assert llm.generate(PROMPTS[0], params, policy="fixed:1")[0].token_ids == first.token_ids
    drawn = SamplingParams(max_new_tokens=12, ignore_eos=True)
    a, b = llm.generate([PROMPTS[0]] * 2, drawn)
    assert a.seed != b.seed
    repeated = SamplingParams(
        max_new_tokens=12, ignore_eos=True, seed=a.seed, verification="rejection"
    )
    assert llm.generate(PROMPTS[0], repeated)[0].token_ids == a.token_ids


def test_parameters_for_each_prompt(llm):
    params = [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in (3, 9, 1)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.token_ids) for output in outputs] == [3, 9, 1]


def test_more_prompts_than_places(target_folder, bundle_folder, llm):
    small = LLM(str(target_folder), draft=bundle_folder, weights="fp32", max_requests=2)
    many = PROMPTS + PROMPTS[:2]
    got = [output.token_ids for output in small.generate(many, GREEDY)]
    assert got == [output.token_ids for output in llm.generate(many, GREEDY)]


def test_bad_requests(llm, plain):
    for prompt in ("", [""], [[]], ["fine", ""]):
        with pytest.raises(PromptError, match="empty"):
            llm.generate(prompt, GREEDY)
    for turn in ("", "  \n"):
        with pytest.raises(PromptError, match="empty"):
            llm.chat(turn, GREEDY)
    with pytest.raises(PromptError, match=r"250 tokens.*256 tokens"):
        llm.generate([[5] * 250], GREEDY)
    with pytest.raises(ConfigError, match="3 prompts came with 2"):
        llm.generate(PROMPTS, [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match="needs a drafter"):
        plain.generate(PROMPTS, GREEDY, policy="fixed:2")
    with pytest.raises(ConfigError, match=r"fixed:1 to fixed:3"):
        llm.generate(PROMPTS, GREEDY, policy="fixed:4")
    with pytest.raises(ConfigError, match="did you mean 'fixed'"):
        llm.generate(PROMPTS, GREEDY, policy="fixd:4")


def test_a_draft_length(target_folder, bundle_folder, plain):
    greedy = plain.generate(PROMPTS, GREEDY)
    short = LLM(str(target_folder), draft=bundle_folder, weights="fp32", draft_length=2)
    assert short.drafter.block_size == 2 and short.policy.name == "fixed:2"
    for output, other in zip(short.generate(PROMPTS, GREEDY), greedy, strict=True):
        assert output.token_ids == other.token_ids
    options = {"draft": bundle_folder, "weights": "fp32", "recalibrate": True}
    long = LLM(str(target_folder), draft_length=99, **options)  # a whole block is all there is
    assert [output.token_ids for output in long.generate(PROMPTS, GREEDY)] == [
        output.token_ids for output in greedy
    ]
    whole = LLM(str(target_folder), **options)
    assert long.policies.fingerprint == whole.policies.fingerprint  # one cost table serves both
    assert short.policies.fingerprint != whole.policies.fingerprint
    with pytest.raises(ConfigError, match="more than the drafter's block of 2"):
        short.policies.resolve("fixed:3")
    with pytest.raises(ConfigError, match="draft_length is 0; it must be at least 1"):
        LLM(str(target_folder), draft=bundle_folder, draft_length=0)
    with pytest.raises(ConfigError, match="draft_length is for a drafter"):
        LLM(str(target_folder), draft=None, draft_length=2)


def test_a_fixed_length_drafts_no_more(llm, plain, monkeypatch):
    """Same tokens as plain decoding, blocks of two."""
    widths = []
    draft = type(llm.drafter).draft

    def watched(self, *args, **options):
        widths.append(draft(self, *args, **options).tokens_RK.shape[1])
        return draft(self, *args, **options)

    monkeypatch.setattr(type(llm.drafter), "draft", watched)
    monkeypatch.setattr(llm, "policy", llm.policies.resolve("fixed:2"))
    for output, other in zip(
        llm.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY), strict=True
    ):
        assert output.token_ids == other.token_ids
    assert set(widths) == {2}


def test_bad_construction(target_folder, bundle_folder, tmp_path):
    with pytest.raises(TargetError, match="there is no model folder"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(str(target_folder), draft=tmp_path / "nowhere", weights="fp32")
    with pytest.raises(ConfigError, match="max_requests is 0; it must be at least 1"):
        LLM(str(target_folder), max_requests=0)
    with pytest.raises(ConfigError, match="weights is 'q5'; it must be fp32 or"):
        LLM(str(target_folder), weights="q5")
    with pytest.raises(ConfigError, match="threads is 0"):
        LLM(str(target_folder), threads=0)
    with pytest.raises(ConfigError, match="needs a drafter"):
        LLM(str(target_folder), draft=None, weights="fp32", policy="fixed:2")
    assert LLM(str(target_folder), weights="fp32").drafter is None, "auto is for its own target"
