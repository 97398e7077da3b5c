"""What Hugging Face transformers computes with model folders: logits, loss, gradient norm and every gradient of one
batch in float32, as `castor parity --expect` reads it. Usage: reference.py BATCH MODEL OUT [MODEL OUT …]

Prints each model's class and where its texts begin and end. Fails where a folder's tensors are not exactly those of the model."""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def results(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits
    targets = batch["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
    model.zero_grad()
    loss.backward()
    gradients = {f"grad.{name}": tensor.grad.clone() for name, tensor in model.named_parameters()}
    norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients.values()))
    scalars = {"loss": loss.detach().reshape(1), "grad_norm": norm.float().reshape(1)}
    return {"logits": logits.detach().contiguous(), **scalars, **gradients}


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    strangers = {what: names for what, names in info.items() if what.endswith("_keys") and names}
    if strangers:
        sys.exit(f"{folder}: {strangers}")
    return model.float()


if __name__ == "__main__":
    batch, *pairs = sys.argv[1:]
    for folder, out in zip(pairs[::2], pairs[1::2]):
        model = load(folder)
        save_file(results(model, load_file(batch)), out)
        config = model.generation_config
        print(type(model).__name__, "bos", config.bos_token_id, "eos", config.eos_token_id)
