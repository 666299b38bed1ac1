"""A tiny Llama with random weights in Hugging Face layout: real_vllm_model.py FOLDER

The tokenizer is a byte-level BPE trained on this repository's documents, so
nothing is downloaded; the weights come from a fixed seed. Needs what vLLM needs.
"""

import glob
import json
import os
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(folder: str, vocab: int) -> None:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    tok.train(sorted(glob.glob(os.path.join(here, "**", "*.md"), recursive=True)), trainer)
    tok.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": special[0],
                "eos_token": special[1],
                "model_max_length": 4096,
                "chat_template": CHAT,
            },
            f,
        )


def main(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    vocab = 1024
    tokenizer(folder, vocab)
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.08,  # wide enough that greedy text does not get stuck at once
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
