"""What bf16 itself costs: Hugging Face's model in bf16 against the same model in f32, as `castor parity` compares.
Usage: bf16_reference.py CASE..., folders with a model, batch.safetensors and expect.safetensors (f32). A line each."""
import os, sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

for case in sys.argv[1:]:
    expect, batch = load_file(f"{case}/expect.safetensors"), load_file(f"{case}/batch.safetensors")
    ids, labels = (batch[name].cuda() for name in ("input_ids.0", "labels.0"))
    for what in ("weights in bf16", "autocast to bf16"):
        dtype = torch.bfloat16 if what.startswith("weights") else torch.float32
        model = AutoModelForCausalLM.from_pretrained(case, dtype=dtype, attn_implementation="sdpa").cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
            logits = model(input_ids=ids).logits
        flat, targets = logits[:, :-1].float().reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1)
        torch.nn.functional.cross_entropy(flat, targets, ignore_index=-100).backward()
        got = {f"grad.{name}": p.grad for name, p in model.named_parameters()} | {"logits": logits.detach()}
        errors = {name: ((got[name].double().cpu() - value.double()).norm() / value.double().norm()).item()
                  for name, value in expect.items() if name in got}
        worst = sorted(errors, key=errors.get)[-3:][::-1]
        print(os.path.basename(case), what + ":", ", ".join(f"{name} {errors[name]:.1e}" for name in worst))
