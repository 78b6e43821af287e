"""Writes a Llama-shaped checkpoint with public libraries only. It has several shards, an untied
head, a chat template, and a byte-level BPE tokenizer that is trained here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

PAD, BOS, EOS, USER, ASSISTANT, END = SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' +"
    " message['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{%"
    " endif %}"
)
VOCABULARY = 384
"""Rows of the embedding: more than the tokenizer's tokens, as in most released models."""


def save_llama(directory: Path, layers: int = 2, **changes: Any) -> Path:
    """Write config, sharded safetensors, tokenizer and generation config. `changes` are settings of
    the LlamaConfig."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start as zeros, which would prove nothing
                parameter.normal_(0, 0.1)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=[2, SPECIAL.index(END)], pad_token_id=0
    )
    model.save_pretrained(directory, max_shard_size="150KB")
    tokenizer().save_pretrained(directory)
    return directory


def claim_llama_class(directory: Path) -> Path:
    """Name `LlamaTokenizerFast` in the checkpoint, as DeepSeek's checkpoints do. transformers then
    makes a sentencepiece tokenizer from the byte-level vocabulary."""
    file = directory / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"})
    )
    return directory


def tokenizer() -> Any:
    """Byte-level BPE with merges from sums in words and figures. It puts BOS before plain text, and
    the chat template writes BOS itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(arithmetic_lines(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT, END],
        chat_template=TEMPLATE,
    )


def arithmetic_lines(count: int = 300) -> list[str]:
    """Lines of text about sums, from a fixed seed."""
    draw = random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [
        f"What is {left} plus {right}? {left} + {right} = {left + right}." for left, right in pairs
    ]
