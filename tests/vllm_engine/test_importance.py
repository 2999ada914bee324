"""How far vLLM in bfloat16 is from a model in float32, by length: what an importance correction makes of it."""

import pytest
import torch
from support import make_model

pytest.importorskip("vllm")
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("these tests are for vLLM's CPU backend", allow_module_level=True)

from vllm import LLM, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LENGTHS = (32, 128, 512, 1024)
CLIP = 3.0  # TRL's default bound of the ratio


@torch.no_grad()
def test_a_ratio_summed_over_a_sequence_leaves_its_bounds_with_the_length(tmp_path, capsys):
    model = make_model(hidden_size=128).eval()  # hardly ever sure of a token: 5 nats of entropy
    model.save_pretrained(tmp_path)
    engine = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=64,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    assert engine.llm_engine.model_config.dtype == torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 400, (16,), generator=generator).tolist() for _ in range(64)]
    parameters = SamplingParams(max_tokens=LENGTHS[-1], ignore_eos=True, logprobs=0, temperature=1.0)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        (sequence,) = output.outputs
        ids = list(sequence.token_ids)
        sampled = torch.tensor([chosen[i].logprob for i, chosen in zip(ids, sequence.logprobs, strict=True)])
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0] - sampled)
    ratio = torch.stack(rows)
    summed = {length: ratio[:, :length].sum(1).exp() for length in LENGTHS}
    kept = {length: float((values <= CLIP).float().mean()) for length, values in summed.items()}
    with capsys.disabled():
        print(f"\nlog-ratio of a token: mean of the size {ratio.abs().mean():.3f}, largest {ratio.abs().max():.2f}")
        for length, values in summed.items():
            print(f"{length:5} tokens: ratio {values.min():.2f} to {values.max():.2f}, {kept[length]:.1%} kept")
    assert ratio.abs().mean() < 0.1
    assert (ratio.exp() <= CLIP).all()  # a ratio a token stays within them
    assert kept[32] == 1 > kept[1024]
    spread = [float(values.log().std()) for values in summed.values()]
    assert spread == sorted(spread)
    assert spread[-1] > 3 * spread[0]
