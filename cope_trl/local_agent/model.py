"""A tokenizer trained on the texts at hand and a tiny causal language model for it."""

import itertools
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# ChatML, with the marks by which TRL's `SFTTrainer` finds the assistant's own tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: whole words of the texts become single tokens, any other text is still encoded.

    Args:
        texts: what the agent will read and write.
        vocab_size: largest number of tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
    )
    roles = [role for role in ("system", "user", "assistant") for _ in range(100)]  # written by the template
    tokenizer.train_from_iterator(itertools.chain(texts, roles), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 96, layers: int = 3, context: int = 2048, seed: int = 42
) -> LlamaForCausalLM:
    """A Llama-architecture model with random weights.

    `AutoTokenizer` trusts the saved class of a Llama model's tokenizer; for some other architectures it puts the
    family's own class in its place, whose rules would split the same text otherwise.

    Args:
        tokenizer: fixes the vocabulary.
        hidden_size: width; heads are 32 wide.
        layers: number of layers.
        context: longest sequence in tokens.
        seed: seed of the weights.
    """
    torch.manual_seed(seed)
    heads = max(1, hidden_size // 32)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
