"""Fine-tune a causal language model on your own sentences, one per line, with the memory of inference.

    python examples/own_sentences.py MODEL sentences.txt OUT [STEPS [LR]]

MODEL is a name on the Hugging Face hub or a folder. If interrupted, start it again: it resumes from OUT.ledger.
LR 1e-6 suits large models; small ones tolerate more, such as 1e-4: `print(optimizer.diagnose(...))` suggests a range.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cyber0 import ZeroOrder

name, file, out, *more = sys.argv[1:] if len(sys.argv) > 3 else sys.exit(__doc__)
steps, lr = int(more[0]) if more else 2000, float(more[1]) if more[1:] else 1e-6
sentences = [line.strip() for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
sentences = sentences or sys.exit(f"{file} holds no sentence")
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)


def loss_fn(batch):
    return model(**batch, use_cache=False).loss


optimizer = ZeroOrder(model, lr=lr, mu=1e-3, k=1, seed=0, ledger=f"{out}.ledger")
while optimizer.round < steps:
    chosen = [sentences[(8 * optimizer.round + i) % len(sentences)] for i in range(8)]
    batch = tokenizer(chosen, padding=True, truncation=True, max_length=256, return_tensors="pt").to(device)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    result = optimizer.step(loss_fn, batch)
    if result.round % 100 == 0:
        print(f"step {result.round}: loss {result.loss:.4f}", flush=True)
optimizer.close()
model.save_pretrained(out)
tokenizer.save_pretrained(out)
print(f"{steps} steps done; the model is in {out}")
