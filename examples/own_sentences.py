"""Fine-tune a causal language model on your own sentences, one a line, with the memory of inference.

    python examples/own_sentences.py MODEL sentences.txt OUT [--steps N] [--lr LR]

MODEL is a name on the Hugging Face hub or a folder. Interrupt it and start it again: OUT.ledger says how far it came.
1e-6 is for large models; small ones learn faster, 1e-4 say: `print(optimizer.diagnose(...))` suggests a range.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cyber0 import ZeroOrder

parser = argparse.ArgumentParser(description="Fine-tune a causal language model on sentences, one a line.")
for argument in ("model", "sentences", "out"):
    parser.add_argument(argument)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--lr", type=float, default=1e-6)
given = parser.parse_args()
sentences = [line.strip() for line in Path(given.sentences).read_text("utf-8").splitlines() if line.strip()]
if not sentences:
    parser.error(f"{given.sentences} holds no sentence")
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device)

optimizer = ZeroOrder(model, lr=given.lr, mu=1e-3, k=1, seed=0, ledger=f"{given.out}.ledger")
while optimizer.round < given.steps:
    chosen = [sentences[(8 * optimizer.round + i) % len(sentences)] for i in range(8)]
    batch = tokenizer(chosen, padding=True, truncation=True, max_length=256, return_tensors="pt").to(device)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    result = optimizer.step(lambda: model(**batch, labels=labels, use_cache=False).loss)  # noqa: B023
    if result.round % 100 == 0:
        print(f"step {result.round}: loss {result.loss:.4f}", flush=True)
optimizer.close()
model.save_pretrained(given.out)
tokenizer.save_pretrained(given.out)
