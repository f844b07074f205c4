"""Make a random model of two blocks that can write calls of one tool, and rows for it.

python examples/agent/make.py --output_dir demo/agent

The model knows nothing: its head only makes the few tokens of the task likelier than letters, so
that some of its first turns call the tool, as any pretrained model's do.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

CALL = '<tool_call>\n{"name": "take", "arguments": {}}\n</tool_call>'
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Each is one token; nothing else of a prompt is.
WORDS = ("user", "assistant", "tool", "count", "more", "done")
LIKELY = (CALL, "<|im_end|>", "more", "done")


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, a few words, and the call as a whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([CALL, *WORDS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A random model whose head has a bias for the tokens of the task."""
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = PhiForCausalLM(config)
    likely = tokenizer.convert_tokens_to_ids([*LIKELY])
    with torch.no_grad():
        model.lm_head.bias.fill_(-8.0)
        model.lm_head.bias[likely] = 0.0
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("demo/agent"))
    folder = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder, make_tokenizer(folder))
    rows = [
        {"prompt": [{"role": "user", "content": f"count {number}"}], "count": number}
        for number in (1, 2, 3, 4)
        for _ in range(16)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    print(f"{folder}: a model of {len(LIKELY)} likely tokens, and {len(rows)} rows")


if __name__ == "__main__":
    main()
